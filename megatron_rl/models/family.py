"""What a model family declares: which HF configs it reads, and ONE table from HF tensors to Megatron tensors, used in both directions.

No torch import: config validation reads families too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

HFConfig = dict[str, Any]

Placement = Literal["column", "row", "vocab", "replicated"]
"""Over tensor parallel: output features split by rows (column-parallel linear), input features split by columns (row-parallel linear),
vocabulary rows split (padded to a multiple of the ranks), or the whole tensor on every rank."""

Layout = Literal["identity", "qkv", "gate_up"]
"""HF tensors to one Megatron tensor: as is; query, key, value interleaved by key-value group; gate above up, per rank."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the HF checkpoint: its name and the names of its dimensions (keys of `Family.dimensions`)."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class TensorRule:
    """One row of a family's table. In names, `{layer}` is the HF block, `{attention}` and `{mlp}` its two entries in Megatron's stack."""

    megatron: str
    hf: tuple[HFTensor, ...]
    placement: Placement = "replicated"
    layout: Layout = "identity"

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.hf[0].name

    def at(self, layer: int) -> "TensorRule":
        """The rule with the names of block `layer` (0-based, over the whole model)."""
        numbers = {"layer": layer, "attention": 2 * layer, "mlp": 2 * layer + 1}
        hf = tuple(replace(tensor, name=tensor.name.format(**numbers)) for tensor in self.hf)
        return replace(self, megatron=self.megatron.format(**numbers), hf=hf)


@dataclass(frozen=True)
class Family:
    """A model family: one module in models/ with one instance of this, listed in models/registry.py."""

    name: str
    architectures: tuple[str, ...]
    """HF `architectures` entries it reads."""
    check: Callable[[HFConfig], list[str]]
    """What of this config the family does not compute as HF does, one line each."""
    transformer: Callable[[HFConfig], dict[str, Any]]
    """TransformerConfig fields that follow from the HF config alone."""
    dimensions: Callable[[HFConfig], dict[str, int]]
    """Sizes of the dimensions that the table names."""
    rules: tuple[TensorRule, ...]
    """In the order of the forward pass: embedding, blocks, final norm, head."""

    def tensors(self, hf: HFConfig) -> Iterator[TensorRule]:
        """The table of this model, layer numbers filled in. With tied embeddings there is no row for the head."""
        before, blocks, after = [], [], []
        for rule in self.rules:
            (blocks if rule.per_layer else after if blocks else before).append(rule)
        yield from before
        for layer in range(hf["num_hidden_layers"]):
            yield from (rule.at(layer) for rule in blocks)
        yield from (rule for rule in after if not (tied(hf) and rule.megatron == OUTPUT_WEIGHT))


EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"
OUTPUT_WEIGHT = "output_layer.weight"


def tied(hf: HFConfig) -> bool:
    """Whether the embedding is also the output matrix."""
    return bool(hf.get("tie_word_embeddings", False))


def head_dim(hf: HFConfig) -> int:
    """Width of one attention head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def key_value_heads(hf: HFConfig) -> int:
    """Key-value heads; as many as query heads where the config does not say."""
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def padded_vocab(hf: HFConfig, tensor_parallel: int) -> int:
    """Vocabulary rows in Megatron: the next multiple of tensor_parallel."""
    return -(-hf["vocab_size"] // tensor_parallel) * tensor_parallel
