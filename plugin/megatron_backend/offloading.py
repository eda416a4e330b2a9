"""Offloads a trainer's weights, gradients and optimizer state while engines use its devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from plugin.host_storage import HostStorage

TrainerPart = Literal["weights", "gradients", "optimizer"]

#: In the order of offloading; the weights are sent to the engines before they are offloaded.
ALL_PARTS: tuple[TrainerPart, ...] = ("gradients", "optimizer", "weights")


class TrainerMemory:
    """What a model and its optimizer hold on the device, by part.

    Gradients are not kept: a step begins by setting them to 0.

    optimizer: Megatron's; None for a model that is not trained
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any | None) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._storages = {
            "weights": HostStorage(self.weights),
            "gradients": HostStorage(self.gradients, keeps_values=False),
            "optimizer": HostStorage(self.optimizer_state),
        }

    def offload(self, parts: Iterable[TrainerPart]) -> int:
        """Free the device memory of `parts`, return its bytes; offloaded parts stay as they are."""
        return sum(self._storages[part].park() for part in parts)

    def onload(self, parts: Iterable[TrainerPart]) -> None:
        """Bring `parts` back to the device with their values; those there stay as they are."""
        for part in parts:
            self._storages[part].restore()

    @contextmanager
    def used(self, part: TrainerPart) -> Iterator[None]:
        """Keep `part` on the device inside the body only."""
        self.onload((part,))
        try:
            yield
        finally:
            self.offload((part,))

    def weights(self) -> Iterator[Tensor]:
        """Parameters and buffers of the model; the former may be views of Megatron's buffers."""
        for chunk in self._chunks:
            yield from chunk.parameters()
            yield from nn.Module.buffers(chunk)  # DDP has a list of this name
            for buffer in _ddp_buffers(chunk):
                if buffer.param_data is not None:
                    yield buffer.param_data

    def gradients(self) -> Iterator[Tensor]:
        """Megatron's gradient buffers, and gradients outside of them."""
        for chunk in self._chunks:
            for buffer in _ddp_buffers(chunk):
                yield buffer.grad_data
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    yield parameter.grad

    def optimizer_state(self) -> Iterator[Tensor]:
        """Moments and the float32 copies of weights, without what belongs to the other parts."""
        others = {_address(tensor) for tensor in (*self.weights(), *self.gradients())}
        for tensor in _optimizer_tensors(self._optimizer):
            if _address(tensor) not in others:
                yield tensor


def _ddp_buffers(chunk: Any) -> list[Any]:
    """Megatron's buffers; its DDP keeps a list under the name of a module's method."""
    own = vars(chunk)
    return [*own.get("buffers", ()), *own.get("expert_parallel_buffers", ())]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(one, "optimizer", None)
        if inner is None:
            continue  # none at all, or a rank without parameters of this kind
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
