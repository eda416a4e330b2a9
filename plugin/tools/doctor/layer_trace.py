"""What every layer of a model computed from given tokens, in memory or in a file.

A file (`.safetensors`, or `.npz` without pickle) holds, over all tokens of all sequences end to
end (T) of a model with hidden size H:

    tokens                  [T] integers
    lengths                 [N] integers: tokens of every sequence; missing = one sequence
    embedding               [T, H] what enters the first layer
    layers.<i>.output       [T, H] what leaves layer i = 0, 1, ..., before any final norm
    layers.<i>.attention    [T, H] what attention adds to the residual stream (optional)
    layers.<i>.middle       [T, H] the residual stream between attention and MLP (optional)
    layers.<i>.mlp          [T, H] what the MLP or the experts add to it (optional)
    layers.<i>.router       [T, experts] the router's logits (optional)
    log_probs               [T - N] of every token but the first of its sequence (optional)

Without attention, middle and mlp a layer is judged as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugin.errors import BatchError, ConfigError

_PARTS = ("attention", "middle", "mlp")


@dataclass
class LayerTrace:
    """States by name, on the CPU in float32; see the module for names and shapes."""

    tokens: Tensor
    lengths: NDArray[np.int64]
    states: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return sum(name.endswith(".output") for name in self.states)

    @property
    def has_parts(self) -> bool:
        """Whether attention and MLP of every layer are known."""
        return all(
            f"layers.{i}.{part}" in self.states for i in range(self.num_layers) for part in _PARTS
        )

    @property
    def positions(self) -> NDArray[np.int64]:
        """[T]: the place of every token in its sequence."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    def sequences(self) -> Sequence[Tensor]:
        """The tokens of every sequence."""
        return self.tokens.split(self.lengths.tolist())

    def rows(self, sequence: int) -> slice:
        """Where the states of a sequence are."""
        end = int(self.lengths[: sequence + 1].sum())
        return slice(end - int(self.lengths[sequence]), end)

    def input_of(self, layer: int) -> Tensor:
        """[T, H]: what enters a layer."""
        return self.states["embedding" if layer == 0 else f"layers.{layer - 1}.output"]


class TraceRecorder:
    """Collects the states of one sequence after the other."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Record values [S, ...] of the current sequence."""
        # A copy: in a forward-only pass Megatron adds the residual stream in place.
        copied = values.detach().to("cpu", torch.float32, copy=True)
        self._parts.setdefault(name, []).append(copied)

    def trace(self, sequences: Sequence[Tensor]) -> LayerTrace:
        """The trace of everything recorded, for `sequences` in this order."""
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        states = {name: torch.cat(parts) for name, parts in self._parts.items()}
        return LayerTrace(torch.cat(list(sequences)), lengths, states)


def save_trace(trace: LayerTrace, path: Path) -> None:
    """Write a trace as `.safetensors` or `.npz`."""
    content = {
        "tokens": trace.tokens,
        "lengths": torch.from_numpy(trace.lengths),
        **{name: values.contiguous() for name, values in trace.states.items()},
    }
    if path.suffix == ".npz":
        np.savez(path, **{name: values.numpy() for name, values in content.items()})  # type: ignore[arg-type]
        return
    import safetensors.torch

    safetensors.torch.save_file(content, path)


def load_trace(path: Path, hf_config: Any) -> LayerTrace:
    """Read a trace and check that it is one of this model; errors name the array."""
    content = _read(path)
    if "tokens" not in content:
        raise BatchError(f"{path} has no array `tokens`; found {', '.join(content) or 'nothing'}")
    tokens = content.pop("tokens").reshape(-1).long()
    lengths = content.pop("lengths", torch.tensor([len(tokens)])).reshape(-1).long()
    if int(lengths.sum()) != len(tokens) or bool((lengths < 2).any()):
        raise BatchError(
            f"{path}: lengths {lengths.tolist()} of {len(tokens)} tokens; sequences have at least "
            "2 tokens and fill the file"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= hf_config.vocab_size:
        raise BatchError(f"{path}: tokens outside 0..{hf_config.vocab_size - 1}, the vocabulary")
    trace = LayerTrace(tokens, lengths.numpy(), {n: v.float() for n, v in content.items()})
    layers, hidden = hf_config.num_hidden_layers, hf_config.hidden_size
    needed = ["embedding", *(f"layers.{i}.output" for i in range(layers))]
    missing = [name for name in needed if name not in trace.states]
    if missing:
        raise BatchError(f"{path} has no array `{missing[0]}`; the model has {layers} layers")
    known = {*needed, "log_probs"}
    known |= {f"layers.{i}.{part}" for i in range(layers) for part in (*_PARTS, "router")}
    for name, values in trace.states.items():
        if name not in known:
            raise BatchError(f"{path}: array `{name}` is none that a model of {layers} layers has")
        rows = len(tokens) - (len(lengths) if name == "log_probs" else 0)
        shape = list(values.shape)
        fits = shape[:1] == [rows] and (len(shape) == 1 if name == "log_probs" else len(shape) == 2)
        if not fits or (len(shape) == 2 and not name.endswith("router") and shape[1] != hidden):
            raise BatchError(
                f"{path}: `{name}` has shape {shape} for {len(tokens)} tokens of hidden size "
                f"{hidden}"
            )
        if not bool(values.isfinite().all()):
            raise BatchError(f"{path}: `{name}` holds a value that is not finite")
    return trace


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: torch.from_numpy(archive[name]) for name in archive.files}
        if path.suffix == ".safetensors":
            import safetensors.torch

            return dict(safetensors.torch.load_file(path))
    except Exception as error:  # readers of corrupt files raise anything
        raise BatchError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    raise ConfigError(f"{path} ends in {path.suffix!r}; hidden states are .safetensors or .npz")
