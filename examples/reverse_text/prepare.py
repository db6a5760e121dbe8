"""Makes what the demo starts from: a byte-level tokenizer, a Qwen3 of 3.2M parameters with random weights, and demonstrations.

    python examples/reverse_text/prepare.py --out runs/demo-data

writes OUT/model/ (HF directory), OUT/sft.jsonl and OUT/counts.json. The words come from reasoning-gym (spell_backward).
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_rl.envs.reasoning_gym import is_heldout

QUESTION = "Spell this word backward (example: sun -> nus): "
"""How every question begins. One token of the tokenizer, so that a prompt has about 10 tokens and not 57."""
HELDOUT = 0.1
DEMONSTRATIONS = {3: 3360, 4: 4480, 5: 3200, 6: 160}
"""Word length -> demonstrations. RL is about words of 6 letters, of which there are few here."""
RL_LENGTH = 6
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo-data"), help="directory to make; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and of the demonstrations")
    arguments = parser.parse_args()
    disable_progress_bar()
    if arguments.out.exists():
        sys.exit(f"error: {arguments.out} exists; delete it, or give another --out")
    prepare(arguments.out, arguments.seed)


def prepare(out: Path, seed: int) -> None:
    """Write everything below `out`; counts.json comes last."""
    words = all_words()
    train = [word for word in words if not is_heldout(QUESTION + word, HELDOUT)]
    rows = demonstrations(train, random.Random(seed))
    tokenizer = build_tokenizer()
    out.mkdir(parents=True)
    tokenizer.save_pretrained(out / "model")
    build_model(tokenizer, seed).save_pretrained(out / "model")
    (out / "sft.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    shown = {row[0]["content"].removeprefix(QUESTION).casefold() for row in rows}
    rl = {word.casefold() for word in train if len(word) == RL_LENGTH}
    heldout = {word.casefold() for word in words if is_heldout(QUESTION + word, HELDOUT) and len(word) == RL_LENGTH}
    counts = {
        "demonstrations": len(rows),
        "sft_words": len(shown),
        "rl_words": len(rl),
        "heldout_words": len(heldout),
        "heldout_words_in_sft_or_rl": len(heldout & (shown | rl)),
    }
    (out / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")
    print(f"{out}: {', '.join(f'{name} {count}' for name, count in counts.items())}")


def all_words() -> list[str]:
    """Every word that the task can ask about, in a fixed order."""
    from reasoning_gym.factory import create_dataset  # slow to import

    dataset = create_dataset("spell_backward", min_word_len=min(DEMONSTRATIONS), max_word_len=max(DEMONSTRATIONS), size=1, seed=0)
    return sorted(set(dataset.words))


def demonstrations(words: list[str], rng: random.Random) -> list[list[dict[str, str]]]:
    """Conversations about words drawn from `words`, DEMONSTRATIONS[n] of length n, in random order."""
    drawn = [word for length, count in DEMONSTRATIONS.items() for word in rng.choices([w for w in words if len(w) == length], k=count)]
    rng.shuffle(drawn)
    return [[{"role": "user", "content": QUESTION + word}, {"role": "assistant", "content": word[::-1]}] for word in drawn]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and no merges, four special tokens, and the question as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"])
    backend.add_tokens([AddedToken(QUESTION, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Random float32 weights; every matrix dimension is a multiple of 16."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main()
