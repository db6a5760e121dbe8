"""transformers' side, a process of its own: float32, one forward per document, plain SGD.

`python -m megatron_rl.parity.oracle SETTINGS.json FOLDER`. Holds the weights and their gradients; tensors go to files under HF's names.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_rl.config.parity import ParityConfig
from megatron_rl.parity import exchange
from megatron_rl.parity.documents import MicroBatch, micro_batches, predictions


def main(settings: str, folder: str) -> None:
    config, out = ParityConfig.model_validate_json(Path(settings).read_text()), Path(folder)
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, attn_implementation="eager")
    use_configured_epsilon(model)
    batches = micro_batches(config, model.config.vocab_size)
    losses: list[Tensor] = []
    learning_rate = 0.0
    for step in range(max(1, config.steps)):
        model.zero_grad()
        outputs = forward_backward(model, batches)
        losses.append(outputs.pop("loss"))
        if step == 0:
            learning_rate = config.step_size / max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
            exchange.write(out / "oracle.outputs", outputs.items())
            exchange.write(out / "oracle.gradients", as_saved((name, p.grad) for name, p in model.named_parameters()))
        if config.steps:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= learning_rate * parameter.grad
    exchange.write(out / "oracle.loss", [("loss", torch.stack(losses))])
    if config.steps:
        exchange.write(out / "oracle.parameters", as_saved((name, p) for name, p in model.named_parameters() if p.grad is not None))


def use_configured_epsilon(model: PreTrainedModel) -> None:
    """transformers computes the norms of latent attention with 1e-6 whatever rms_norm_eps says; engines, and we, follow the config."""
    for name, module in model.named_modules():
        if name.endswith((".q_a_layernorm", ".kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps


def forward_backward(model: PreTrainedModel, batches: list[MicroBatch]) -> dict[str, Tensor]:
    """log_probs and entropy of every position, in order, and the mean loss, whose gradient is in the parameters.

    Position i predicts token i + 1; a document's last position is asked for its first token, and is no part of the loss.
    """
    log_probs, entropy = [], []
    count, loss = predictions(batches), torch.zeros(())
    for document in (document for documents in batches for document in documents):
        token_ids = torch.from_numpy(document)
        distribution = model(token_ids[None], use_cache=False).logits[0].log_softmax(-1)
        chosen = distribution.gather(1, token_ids.roll(-1)[:, None])[:, 0]
        share = -chosen[:-1].sum() / count
        share.backward()
        loss += share.detach()
        log_probs.append(chosen.detach())
        entropy.append(-(distribution.exp() * distribution).sum(-1).detach())
    return {"log_probs": torch.cat(log_probs), "entropy": torch.cat(entropy), "loss": loss}


def as_saved(tensors: Iterator[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors there are, as a checkpoint has them: transformers holds the experts of a block in two tensors, saved as three of each."""
    for name, tensor in tensors:
        if tensor is None:
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                for part, half in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                    yield f"{name.removesuffix('gate_up_proj')}{expert}.{part}_proj.weight", half
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", down
        else:
            yield name, tensor


if __name__ == "__main__":
    main(*sys.argv[1:])
