"""The trainer's weights in vLLM's workers, behind vLLM's interface for weight transfer.

Imported by every worker, for its `WorkerExtension`, which makes `StreamEngine` known to vLLM.
vLLM's own `nccl` engine has one sender and no timeout; ours takes what every pipeline stage sends,
on CPU as well, and ends when the driver calls the transfer off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from plugin.errors import TransferError
from plugin.rollout.engines.engine_adapters import is_adapter
from plugin.rollout.engines.lent_memory import device_id
from plugin.rollout.engines.vllm_adapters import AdapterShape, use_adapters
from plugin.rollout.engines.weight_handover import receiver_of
from plugin.rollout.engines.weight_meeting import NamedTensors, TensorNote, WeightGroup
from plugin.rollout.engines.weight_members import Membership


@dataclass
class StreamInit(WeightTransferInitInfo):
    """The group as a mapping, and the number of the engine's first worker in it."""

    group: dict[str, Any]
    first: int


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):
    """Which version is received."""

    version: int


@dataclass
class Received:
    """What has come of a version in one worker.

    adapters: tensors of it that are no weights of the model
    cut_off: why it is not whole, if so
    """

    notes: list[TensorNote] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    cut_off: str | None = None


class StreamEngine(WeightTransferEngine[StreamInit, StreamUpdate]):
    """Receives a version in buckets and loads it layer by layer.

    A transfer that is cut off is no error in a worker, because vLLM would lose count of its
    workers' answers; `received` tells.
    """

    init_info_cls = StreamInit
    update_info_cls = StreamUpdate

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._membership = Membership()
        self._group: WeightGroup | None = None
        self._number = 0
        self._reloads = False
        self.received = Received()

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        """Take the place of the next transfers; the group is joined when they begin."""
        parallel = self.parallel_config
        self._number = init_info.first + parallel.rank
        self._group = WeightGroup(**init_info.group)

    def start_weight_update(self) -> None:
        """Forget the version before."""
        self.received, self._reloads = Received(), False

    def _begin_reload(self) -> None:
        """Have the next weights loaded layer by layer, and packed as at the start."""
        if not torch.cuda.is_available():
            forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self._reloads = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a whole version."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: StreamUpdate) -> None:
        """Receive a whole version, or note why it was cut off."""
        group, version = self._group, update_info.version
        assert group is not None
        try:
            # vLLM keeps the tensors of a layer until all of them are there.
            with self._membership.of(
                group, lambda: receiver_of(group, self._number, keeps=True)
            ) as receiver:
                receiver.meet(version)
                receiver.receive(version, self._load)
        except TransferError as error:
            self.received.cut_off = str(error)

    def _load(self, bucket: NamedTensors) -> None:
        self.received.notes += [TensorNote(n, t.dtype, tuple(t.shape)) for n, t in bucket]
        self.received.adapters.update((n, t) for n, t in bucket if is_adapter(n))
        weights = [(n, t) for n, t in bucket if not is_adapter(n)]
        if weights:
            if not self._reloads:
                self._begin_reload()
            self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """End the loading; also after one that was cut off, so that the next begins afresh."""
        if self._reloads:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self._membership.leave()


class WorkerExtension:
    """Methods of every worker."""

    weight_transfer_engine: Any

    def device_id(self) -> str:
        """The device, for ranks that hand over weights within it."""
        return device_id()

    def received_weights(self) -> Received:
        """What has come of the last version, but for the tensors themselves."""
        return replace(self.weight_transfer_engine.received, adapters={})

    def use_adapters(self, shape: AdapterShape) -> str | None:
        """Compute with the adapters of the last version; why vLLM refuses them, if it does."""
        adapters = self.weight_transfer_engine.received.adapters
        try:
            if adapters:
                use_adapters(self, adapters, shape)
        except ValueError as error:
            return str(error)
        return None


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have vLLM set up its experts anew with the weights that come next.

    vLLM 0.32 on CPU packs the weights of experts for its kernel only when it makes the kernel, so
    that new ones would be read in the wrong order, without an error. To be removed when it packs
    them at every load.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def reload_from_buckets(worker: Any, buckets: list[bytes]) -> None:
    """Load the buckets into one of vLLM's workers, in its process."""
    if not torch.cuda.is_available():
        forget_expert_kernels(worker.model_runner.get_model())
    worker.reload_weights(weights_iterator=_named_tensors(buckets))


def _named_tensors(buckets: list[bytes]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all buckets; each bucket is freed when it has been read."""
    while buckets:
        yield from safetensors.torch.load(buckets.pop(0)).items()


WeightTransferEngineFactory.register_engine("megatron_tis", StreamEngine)
