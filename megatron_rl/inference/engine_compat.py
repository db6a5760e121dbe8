"""What vLLM has no public hook for: one function each, with the version it was written against."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_rl.transports.weights.base import WeightTransferError

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig

VLLM = "0.32.0"


def reload_weights(model: "torch.nn.Module", model_config: "ModelConfig", weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
    """Load a whole HF checkpoint into a serving model, whatever its kernels did to the layout of its parameters.

    vLLM 0.32.0: `model.load_weights` alone writes into repacked parameters (size 0 on CPU), so it runs within a layerwise reload; but that
    takes a layer which got only a part of its weights for a padded one and serves uninitialised memory, hence the check before finalize.
    On any error the model's structure is put back, with weights of no version. Raises WeightTransferError naming parameters that got
    nothing or too little, and whatever the model's loaders raise for a name or shape they do not know.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    unique = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    initialize_layerwise_reload(model)
    try:
        forget_packed_experts(model)
        expected = {name for name, _ in model.named_parameters()} - tied
        loaded = model.load_weights(weights)
        if unfilled := unfilled_parameters(model, expected, loaded):
            raise WeightTransferError(f"the model has parameters that the version does not fill: {', '.join(unfilled)}", unfilled[0])
        finalize_layerwise_reload(model, model_config)
        repack_tied_layers(model, tied)
    except BaseException:
        abandon_layerwise_reload(model)
        raise


def forget_packed_experts(model: "torch.nn.Module") -> None:
    """Let experts on the CPU be packed at this reload as they were at the first load.

    vLLM 0.32.0: UnquantizedFusedMoEMethod takes a layer that has its kernel for one whose weights are in place, and leaves out the packing
    into the CPU kernel's layout. The packed tensor has the shape of the plain one, so it would serve scrambled experts without an error.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and issubclass(method.experts_cls or object, CPUUnquantizedExperts):
            method.moe_kernel = None


def repack_tied_layers(model: "torch.nn.Module", tied: set[str]) -> None:
    """Let the layers that own the parameters `tied` (second names of shared ones) derive anew what their kernels made of them.

    vLLM 0.32.0: a layerwise reload processes only layers that were loaded by name. A tied lm_head is not, and on CPU it multiplies by
    its own packed copy of the embedding, so it would go on with the old version's.
    """
    for name in tied:
        layer = model.get_submodule(name.rpartition(".")[0])
        layer.quant_method.process_weights_after_loading(layer)


def unfilled_parameters(model: "torch.nn.Module", expected: set[str], loaded: set[str] | None) -> list[str]:
    """Parameters (vLLM's names, fused ones included) that a layerwise reload has not filled so far.

    vLLM 0.32.0: `loaded` is what `load_weights` returned; a fused parameter is in it once any of its parts came, so the element count kept
    per layer decides. Vocabulary layers are padded and may stay below their size.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    unfilled = [] if loaded is None else sorted(expected - loaded)
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or isinstance(layer, VocabParallelEmbedding):
            continue
        parameters = [f"{name}.{parameter}" for parameter in info.restore_metadata[0]]
        if any(parameter in expected for parameter in parameters) and info.load_numel < (info.load_numel_total or 0):
            unfilled += [parameter for parameter in parameters if parameter in expected and parameter not in unfilled]
    return unfilled


def silence_layerwise_reload() -> None:
    """vLLM 0.32.0 warns at every reload of rotary tables and tied heads, which no checkpoint holds; `unfilled_parameters` knows better."""
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def abandon_layerwise_reload(model: "torch.nn.Module") -> None:
    """End a layerwise reload that failed, so that the next one starts clean. vLLM 0.32.0 only knows how to finish one."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
