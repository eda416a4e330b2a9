"""The trainer's weights in vLLM's workers, behind vLLM's interface for weight transfer.

Imported by every worker, for its `WorkerExtension`, which makes `StreamEngine` known to vLLM.
vLLM's own `nccl` engine has one sender and no timeout; ours takes what every pipeline stage sends,
on CPU as well, and ends when the driver aborts the transfer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from plugin.engines.transformers.weight_loader import is_adapter
from plugin.engines.vllm.reload import WeightReload
from plugin.engines.vllm.startup import AdapterShape, request_with_adapters
from plugin.errors import TransferError, WeightError
from plugin.weights import make_receiver
from plugin.weights.directory import read_directory
from plugin.weights.group import Membership, NamedTensors, TensorSpec, WeightGroup
from plugin.weights.ipc import device_id


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
    aborted: why it is not whole, if so
    refused: why the model cannot compute with it, if so
    """

    specs: list[TensorSpec] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    aborted: str | None = None
    refused: str | None = None


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
        self._reload: WeightReload | None = None
        self.received = Received()

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        """Take the place of the next transfers; the group is joined when they begin."""
        parallel = self.parallel_config
        self._number = init_info.first + parallel.rank
        self._group = WeightGroup(**init_info.group)

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
                receiver.receive(version, self._load)
        except TransferError as error:
            self.received.aborted = str(error)

    def _load(self, bucket: NamedTensors) -> None:
        self.received.specs += [TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in bucket]
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
        if self.received.aborted is not None:
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
        """What has come of the last version, but for the tensors themselves."""
        return replace(self.weight_transfer_engine.received, adapters={})

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


WeightTransferEngineFactory.register_engine("megatron_tis", StreamEngine)
