"""The trainer's weights in vLLM's workers, behind vLLM's interface for weight transfer.

Imported by every worker, for its `WorkerExtension`, which makes `StreamEngine` known to vLLM.
vLLM's own `nccl` engine has one sender and no timeout; ours takes what every pipeline stage sends,
on CPU as well, and ends when the driver aborts the transfer.

Every transport loads through `WeightReload`, layer by layer. vLLM packs weights for its kernels
when it processes a layer, and a reload (0.32) processes only the layers that are loaded by name.
What it leaves behind is mended here, and a tensor that nothing was loaded into is an error instead
of a model that computes with the weights before.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import safetensors.torch
import torch
import vllm
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS
from vllm.platforms import current_platform

from plugin.engines.transformers.weight_loader import is_adapter
from plugin.engines.vllm.checksums import worker_checksums
from plugin.engines.vllm.startup import AdapterShape, request_with_adapters
from plugin.errors import DeltaError, TransferError, WeightError
from plugin.weights import make_receiver
from plugin.weights.checksums import Shares
from plugin.weights.delta import DeltaBase
from plugin.weights.directory import read_directory
from plugin.weights.group import Membership, WeightGroup
from plugin.weights.ipc import device_id
from plugin.weights.tensor_layout import NamedTensors, TensorSpec


@dataclass
class StreamInit(WeightTransferInitInfo):
    """The group as a mapping, and the number of the engine's first worker in it.

    base_dtype: of the copy of each version that deltas are applied to; None = there are none
    """

    group: dict[str, Any]
    first: int
    base_dtype: str | None = None


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):
    """Which version is received."""

    version: int


@dataclass
class Received:
    """What one worker received of a version.

    adapters: tensors of it that are no weights of the model
    aborted: why it is not whole, if so
    refused: why the model cannot compute with it, if so
    damaged: which tensors a delta did not make the trainer's, if any
    """

    specs: list[TensorSpec] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    aborted: str | None = None
    refused: str | None = None
    damaged: str | None = None


class StreamEngine(WeightTransferEngine[StreamInit, StreamUpdate]):
    """Receives a version in buckets and loads it layer by layer.

    A transfer that is aborted, or weights that do not fit, are no error in a worker, because vLLM
    would lose count of its workers' answers; `received` tells.
    """

    init_info_cls = StreamInit
    update_info_cls = StreamUpdate

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._membership = Membership()
        self._group: WeightGroup | None = None
        self._number = 0
        self._base: DeltaBase | None = None
        self._reload: WeightReload | None = None
        self.received = Received()

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        """Take the place of the next transfers; the group is joined when they begin."""
        parallel = self.parallel_config
        self._number = init_info.first + parallel.rank
        self._group = WeightGroup(**init_info.group)
        if init_info.base_dtype is not None and self._base is None:
            self._base = DeltaBase(getattr(torch, init_info.base_dtype))

    def start_weight_update(self) -> None:
        """Forget the version before."""
        self.received, self._reload = Received(), None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a whole version."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: StreamUpdate) -> None:
        """Receive a whole version, or note why it was aborted."""
        group, version = self._group, update_info.version
        assert group is not None
        try:
            # vLLM keeps the tensors of a layer until all of them are there.
            with self._membership.of(
                group, lambda: make_receiver(group, self._number, keeps=True)
            ) as receiver:
                receiver.barrier(version)
                if self._base is None:
                    receiver.receive(version, self._load)
                else:
                    receiver.receive(version, self._base.beginning(self._load))
                    self._load_changed(version, self._base)
        except DeltaError as error:
            self.received.damaged = str(error)
        except TransferError as error:
            self.received.aborted = str(error)

    def _load_changed(self, version: int, base: DeltaBase) -> None:
        """After a delta, load all of the version from the copy; an error leaves the group."""
        for tensor in base.completed(version):
            self._load([tensor])

    def _load(self, bucket: NamedTensors) -> None:
        self.received.specs += [TensorSpec.of(n, t) for n, t in bucket]
        self.received.adapters.update((n, t) for n, t in bucket if is_adapter(n))
        weights = [(n, t) for n, t in bucket if not is_adapter(n)]
        if weights:
            if self._reload is None:
                self._reload = WeightReload(self.model, self.model_config)
            self._reload.load(weights)

    def finish_weight_update(self) -> None:
        """End the loading; also after one that was aborted, so that the next begins afresh."""
        if self._reload is None:
            return
        if self.received.aborted is not None or self.received.damaged is not None:
            self._reload.abort()
            return
        try:
            self._reload.finish()
        except WeightError as error:
            self.received.refused = str(error)

    def shutdown(self) -> None:
        """Leave the group."""
        self._membership.leave()


class WorkerExtension:
    """Methods of every worker."""

    weight_transfer_engine: Any
    add_lora: Any

    def device_id(self) -> str:
        """The device of this worker, for weights by IPC."""
        return device_id()

    def received_weights(self) -> Received:
        """What was received of the last version, without the tensors themselves."""
        return replace(self.weight_transfer_engine.received, adapters={})

    def weight_checksums(self, dtype: str) -> Shares:
        """Of what this worker holds and computes with."""
        return worker_checksums(cast(Any, self).model_runner.get_model(), getattr(torch, dtype))

    def load_directory(self, directory: str) -> str | None:
        """Load the files of a whole version; why they do not fit, if so."""
        return _reload(self, read_directory(directory))

    def use_adapters(self, shape: AdapterShape) -> str | None:
        """Compute with the adapters of the last version; why vLLM refuses them, if it does."""
        adapters = self.weight_transfer_engine.received.adapters
        if not adapters:
            return None
        described = {
            "peft_type": "LORA",
            "r": shape.rank,
            "lora_alpha": shape.alpha,
            "target_modules": sorted({name.split(".")[-3] for name in adapters}),
            "bias": "none",
        }
        # vLLM reads adapters from PEFT's files.
        with tempfile.TemporaryDirectory(prefix="megatron_tis_adapters_") as directory:
            (Path(directory) / "adapter_config.json").write_text(json.dumps(described))
            tensors = {name: tensor.cpu() for name, tensor in adapters.items()}
            safetensors.torch.save_file(tensors, Path(directory) / "adapter_model.safetensors")
            try:
                self.add_lora(request_with_adapters(directory, new=True))
            except ValueError as error:
                return str(error)
        return None


def reload_from_buckets(worker: Any, buckets: list[bytes]) -> str | None:
    """Load the buckets into one of vLLM's workers, in its process; why they do not fit, if so."""
    return _reload(worker, _named_tensors(buckets))


def _reload(worker: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Load a whole version into a worker; why it does not fit, if so."""
    runner = worker.model_runner
    with set_current_vllm_config(worker.vllm_config):
        reload = WeightReload(runner.get_model(), worker.model_config)
        try:
            reload.load(named_tensors)
            reload.finish()
        except WeightError as error:
            return str(error)
    runner.reset_lora_state()
    return None


def _named_tensors(buckets: list[bytes]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all buckets; each bucket is freed when it has been read."""
    while buckets:
        yield from safetensors.torch.load(buckets.pop(0)).items()


class WeightReload:
    """Loads one version into `model`; has to be ended with `finish` or `abort`."""

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
        """End the load; a `WeightError` names parameters that nothing was loaded into."""
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
    """Tensors that an unfinished load has delivered to the modules that hold them.

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
    """Have vLLM rebuild its expert kernels with the next weights.

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


WeightTransferEngineFactory.register_engine("megatron_tis", StreamEngine)
