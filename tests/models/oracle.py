"""The oracle of the parallel tests: transformers in float32, one forward per document, and the micro-batches both sides read."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

LENGTHS = ([8, 12, 4], [16, 4, 4, 8], [12, 8], [4, 8, 16])
"""Documents of four micro-batches: multiples of 4, so that they divide over two context ranks."""


def write_micro_batches(path: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    """Random packed micro-batches; about a third of the positions have weight 0, temperatures differ from token to token."""
    generator = torch.Generator().manual_seed(3)
    data = {"count": torch.tensor(len(LENGTHS))}
    for number, lengths in enumerate(LENGTHS):
        tokens = sum(lengths)
        data[f"{number}.cu"] = torch.tensor([0, *lengths]).cumsum(0).int()
        data[f"{number}.positions"] = torch.cat([torch.arange(n) for n in lengths])
        data[f"{number}.ids"] = torch.randint(0, vocab_size, (tokens,), generator=generator)
        data[f"{number}.labels"] = torch.randint(0, vocab_size, (tokens,), generator=generator)
        # The last vocabulary row is the one next to the padding.
        data[f"{number}.labels"][::5] = vocab_size - 1
        data[f"{number}.temperatures"] = 0.5 + torch.rand(tokens, generator=generator)
        weights = torch.randn(tokens, generator=generator)
        data[f"{number}.weights"] = weights * (torch.rand(tokens, generator=generator) > 0.33)
    save_file(data, path)
    return data


def reference(model_dir: Path, data: dict[str, torch.Tensor], learning_rate: float) -> dict:
    """logprobs and entropy per micro-batch; by HF name the gradient of -sum(weights * logprobs), the weights, and what two steps of SGD
    make of them."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    logprobs, entropies = _forward_backward(model, data)
    gradients = {name: grad for key, p in _trained(model) for name, grad in _as_saved(key, p.grad.clone())}
    _sgd(model, learning_rate)
    model.zero_grad()
    _forward_backward(model, data)
    _sgd(model, learning_rate)
    stepped = {name: weight for key, p in _trained(model) for name, weight in _as_saved(key, p.detach())}
    weights = load_file(model_dir / "model.safetensors")
    return {"logprobs": logprobs, "entropy": entropies, "gradients": gradients, "stepped": stepped, "weights": weights}


def _trained(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    """The indexer of sparse attention has no gradient."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]


def _sgd(model: PreTrainedModel, learning_rate: float) -> None:
    with torch.no_grad():
        for _, parameter in _trained(model):
            parameter -= learning_rate * parameter.grad


def _forward_backward(model: PreTrainedModel, data: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    logprobs, entropies = [], []
    for number, lengths in enumerate(LENGTHS):
        parts, start = [], 0
        for length in lengths:
            at = slice(start, start + length)
            logits = model(data[f"{number}.ids"][None, at], use_cache=False).logits[0]
            parts.append((logits / data[f"{number}.temperatures"][at, None]).log_softmax(-1))
            start += length
        distribution = torch.cat(parts)
        chosen = distribution.gather(1, data[f"{number}.labels"][:, None])[:, 0]
        (-(chosen * data[f"{number}.weights"]).sum()).backward()
        logprobs.append(chosen.detach())
        entropies.append(-(distribution.exp() * distribution).sum(-1).detach())
    return logprobs, entropies


def _as_saved(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers holds the experts of a block in two tensors and saves each expert's three."""
    if name.endswith("experts.gate_up_proj"):
        for expert, gate_up in enumerate(value):
            for part, tensor in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{expert}.{part}_proj.weight", tensor
    elif name.endswith("experts.down_proj"):
        for expert, tensor in enumerate(value):
            yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", tensor
    else:
        yield name, value
