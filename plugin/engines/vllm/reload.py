"""A version of weights in a vLLM model: loaded layer by layer, packed, and accounted for.

The only place that uses vLLM's layer-wise reload; every transport loads through it. vLLM packs
weights for its kernels when it processes a layer, and a reload (0.32) processes only the layers
that are loaded by name. What it leaves behind is mended here, and a tensor that nothing was loaded
into is an error instead of a model that computes with the weights before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import vllm
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS
from vllm.platforms import current_platform

from plugin.errors import WeightError


class WeightReload:
    """One version on its way into `model`; to be ended with `finish`, or `abort`."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._reported: set[str] = set()
        if current_platform.is_cpu():
            _forget_expert_kernels(model)
        initialize_layerwise_reload(model)

    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors, by the names of a Hugging Face checkpoint."""
        model: Any = self._model
        loaded = model.load_weights(named_tensors)
        if loaded is None:
            raise WeightError(
                f"vLLM's {type(model).__name__} does not report which weights it loads, so new "
                "ones cannot be trusted to arrive; use --rollout-engine transformers"
            )
        self._reported.update(map(_without_adapters, loaded))

    def finish(self) -> None:
        """End the load; a `WeightError` names what the model has and no tensor was loaded into."""
        loaded = self._reported & set(_delivered_names(self._model))
        self.abort()
        tensors = list(_tensors_to_load(self._model))
        current = {id(t.value) for t in tensors if t.name in loaded} - {id(None)}
        left = [t for t in tensors if t.name not in loaded]
        missing = [t.name for t in left if id(t.value) not in current]
        if missing:
            raise WeightError(
                f"vLLM {vllm.__version__} loaded nothing into {len(missing)} of the "
                f"{len(tensors)} tensors of its {type(self._model).__name__}, the first of them "
                f"{missing[0]}; all must come from the trainer. This vLLM class cannot reload the "
                "model (it does not tie a tied LM head, or bypasses vLLM's weight loaders); use "
                "--rollout-engine transformers"
            )
        for tensor in left:
            _process_again(tensor.module)

    def abort(self) -> None:
        """End a load that is not complete, so that the next one starts afresh."""
        finalize_layerwise_reload(self._model, self._model_config)


class _Loadable(NamedTuple):
    """A parameter or buffer that has to be loaded, by the name that a load reports.

    value: what the module holds now; None if it was replaced by others
    """

    name: str
    module: nn.Module
    value: Tensor | None


def _tensors_to_load(model: nn.Module) -> Iterator[_Loadable]:
    """What the model computes with and does not follow from its config or from other tensors.

    Follows from the config: non-persistent buffers (rotary tables, expert maps), which vLLM neither
    fills at random nor touches. Follows from other tensors: what was registered after the model
    was built (scales of online quantization), and the tensors of attention layers (absorbed
    projections, scales of the cache), which vLLM computes at the end of every load.
    """
    for prefix, module in model.named_modules():
        if is_deferred_attention_layer(module):
            continue
        held = {**module._parameters, **module._buffers}
        parameters, buffers = get_layerwise_info(module).restore_metadata
        built = {name: held[name] for name in held.keys() & SKIP_TENSORS} | parameters | buffers
        for name in sorted(built.keys() - module._non_persistent_buffers_set):
            if built[name] is not None and built[name].is_floating_point():
                yield _Loadable(_without_adapters(f"{prefix}.{name}"), module, held.get(name))


def _delivered_names(model: nn.Module) -> Iterator[str]:
    """The tensors that a load which has not ended brought to the modules that hold them.

    Some classes of vLLM 0.32 (gpt-oss: experts and sinks) copy into parameters past their loaders.
    During a reload these are on the meta device, where a copy is lost without an error.
    """
    for prefix, module in model.named_modules():
        info = get_layerwise_info(module)
        names = {name for name, _ in info.loaded_weights} | SKIP_LOAD_TENSORS
        if not info.can_load():  # processed, because all of its tensors had come
            names |= module._parameters.keys() | module._buffers.keys()
        yield from (_without_adapters(f"{prefix}.{name}") for name in names)


def _process_again(module: nn.Module) -> None:
    """Have a module whose tensor was loaded through another module pack it again.

    A tied LM head shares the embedding's weight. vLLM 0.32 on CPU computes logits with a packed
    copy, made when the head is processed; a reload processes the embedding alone, and the head
    would keep the copy of the weights before. To be removed when vLLM processes every module that
    shares a loaded parameter. On GPUs vLLM makes no copy, and this changes nothing.
    """
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(module)


def _forget_expert_kernels(model: nn.Module) -> None:
    """Have vLLM set up its experts anew with the weights that come next.

    vLLM 0.32 on CPU packs the weights of experts for its kernel only when it makes the kernel, so
    that new ones would be read in the wrong order, without an error. To be removed when it packs
    them at every load.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _without_adapters(name: str) -> str:
    """The name that a tensor has in a model without vLLM's LoRA wrappers."""
    return name.replace(".base_layer.", ".")
