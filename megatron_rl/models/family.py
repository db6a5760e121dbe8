"""What a model family declares: which HF configs it reads, and ONE table from HF tensors to Megatron tensors, used in both directions.

No torch import: config validation reads families too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_rl.config.trainer import ParallelConfig

HFConfig = dict[str, Any]

Placement = Literal["column", "row", "vocab", "replicated"]
"""Over (expert) tensor parallel: output features split by rows (column-parallel), input features split by columns (row-parallel),
vocabulary rows split (padded to a multiple of the ranks), or the whole tensor on every rank."""

Layout = Literal["identity", "qkv", "gate_up"]
"""HF tensors to one Megatron tensor: as is; query, key, value interleaved by key-value group; gate above up, per rank."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the HF checkpoint: its name and the names of its dimensions (keys of `Family.dimensions`)."""

    name: str
    dims: tuple[str, ...]


def _always(hf: HFConfig, layer: int) -> bool:
    return True


@dataclass(frozen=True)
class TensorRule:
    """One row of a family's table. In names, `{layer}` is the HF block, `{attention}` and `{mlp}` its two entries in Megatron's stack,
    `{expert}` an expert's number over the whole model. Names are those of `models.naming`, whichever layers hold the tensor."""

    megatron: str
    hf: tuple[HFTensor, ...]
    placement: Placement = "replicated"
    """Of an expert's tensor: over expert tensor parallel."""
    layout: Layout = "identity"
    dtype: str | None = None
    """Of the Megatron tensor, where it is not the model's."""
    when: Callable[[HFConfig, int], bool] = _always
    """Whether block `layer` of this model has it."""
    expert: int | None = None
    """Which expert it belongs to, once `at` has filled the names in."""

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron

    def at(self, layer: int, expert: int | None = None) -> "TensorRule":
        """The rule with the names of block `layer` (0-based, over the whole model) and of an expert."""
        numbers = {"layer": layer, "attention": 2 * layer, "mlp": 2 * layer + 1, "expert": expert}
        hf = tuple(replace(tensor, name=tensor.name.format(**numbers)) for tensor in self.hf)
        return replace(self, megatron=self.megatron.format(**numbers), hf=hf, expert=expert)


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
    """Sizes of the dimensions that the table names; "experts" is how many experts a MoE entry has."""
    block: Callable[[HFConfig, int], str]
    """The two entries of block `layer` in Megatron's symbols: attention (`*`), latent attention (`+`), sparse latent attention (`D`);
    MLP (`-`), mixture of experts (`E`)."""
    entries: Mapping[str, tuple[TensorRule, ...]]
    """The table's rows by the symbol of the entry that has them."""
    embedding: tuple[TensorRule, ...]
    head: tuple[TensorRule, ...]
    rotary_dim: Callable[[HFConfig], int]
    """How many dimensions of a head the rotary embedding turns."""
    rotary_interleaved: Callable[[HFConfig], bool] = lambda hf: False
    """Of latent attention: whether neighbours make a rotary pair, not the halves."""
    index_sources: Callable[[HFConfig], tuple[int, ...]] = lambda hf: ()
    """Of sparse attention: by block, the block whose indexer chooses its keys."""
    check_layout: Callable[[HFConfig, ParallelConfig], list[str]] = lambda hf, parallel: []
    """Layouts that its layers cannot run in, one line each, beyond what the registry checks for all."""
    rope_kinds: tuple[str, ...] = ("default", "llama3")
    """Rotary types (HF's names) that it computes as HF does."""
    ignored: Callable[[HFConfig], tuple[str, ...]] = lambda hf: ()
    """Prefixes of HF tensors that its checkpoints may hold and the policy does not use."""
    engine_config: Mapping[str, Any] = field(default_factory=dict)
    """config.json fields that say what the family computes anyway, for an engine that takes their absence for something else."""

    def tensors(self, hf: HFConfig) -> Iterator[TensorRule]:
        """The table of this model, numbers filled in, in the order of the forward pass. With tied embeddings there is no row for the
        output matrix."""
        yield from self.embedding
        experts = range(self.dimensions(hf).get("experts", 0))
        for layer in range(hf["num_hidden_layers"]):
            for symbol in self.block(hf, layer):
                rules = [rule for rule in self.entries[symbol] if rule.when(hf, layer)]
                yield from (rule.at(layer) for rule in rules if not rule.per_expert)
                for expert in experts:
                    yield from (rule.at(layer, expert) for rule in rules if rule.per_expert)
        yield from (rule for rule in self.head if not (tied(hf) and rule.megatron == OUTPUT_WEIGHT))

    def pattern(self, hf: HFConfig) -> list[str]:
        """Each block's two entries."""
        return [self.block(hf, layer) for layer in range(hf["num_hidden_layers"])]

    def has_experts(self, hf: HFConfig) -> bool:
        return any("E" in block for block in self.pattern(hf))


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
