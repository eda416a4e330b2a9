"""What every layer of a model computed from given tokens: recorded, in memory or in a file.

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

Both sides are recorded on the same tokens: a transformers model, and the trainer, by itself or on
the engine's inputs. The trainer's sequences take the path of every log-prob pass
(`MegatronTrainer.compute_log_probs`), so that what is compared is what trains: packing, position
ids, attention and LM head included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plugin.batch_types import RolloutBatch
from plugin.engines.transformers.growing_cache import growing_cache
from plugin.errors import BatchError, ConfigError
from plugin.json_lines import require_file
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.trainer import MegatronTrainer

_PARTS = ("attention", "middle", "mlp")
#: Tokens of a sequence that are read as a prompt before the others are decoded.
PROMPT_LENGTH = 4
#: How many times smaller a file may be than its arrays.
_MOST_COMPRESSED = 100


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
    if not len(tokens) or int(lengths.sum()) != len(tokens) or bool((lengths < 2).any()):
        raise BatchError(
            f"{path}: lengths {lengths[:20].tolist()} of {len(tokens)} tokens; sequences have at "
            "least 2 tokens and fill the file"
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
    if path.suffix not in (".npz", ".safetensors"):
        raise ConfigError(f"{path} ends in {path.suffix!r}; hidden states are .safetensors or .npz")
    try:
        require_file(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                whole = sum(member.file_size for member in archive.zip.infolist())
                if whole > _MOST_COMPRESSED * path.stat().st_size:
                    raise ValueError(f"it unpacks to {whole} bytes, which no hidden states do")
                return {name: torch.from_numpy(archive[name]) for name in archive.files}
        import safetensors.torch

        return dict(safetensors.torch.load_file(path))
    except Exception as error:  # readers of corrupt files raise anything
        raise BatchError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


@torch.inference_mode()
def trace_engine(
    model: nn.Module, sequences: Sequence[Tensor], *, decodes: bool = False
) -> LayerTrace:
    """Run every sequence [S] through a transformers causal language model.

    decodes: only the first tokens are read together; every other one comes alone and reads the
        keys and values of those before it from the cache, as when it is sampled
    """
    recorder = TraceRecorder()
    device = next(model.parameters()).device
    with _installed(_engine_hooks(model, recorder)):
        for tokens in sequences:
            ids = tokens[None].to(device)
            together = PROMPT_LENGTH if decodes else ids.shape[1]
            parts = [ids[:, :together], *ids[:, together:].split(1, dim=1)]
            cache = growing_cache(model.config)
            logits = torch.cat(
                [
                    model(input_ids=part, past_key_values=cache, use_cache=True).logits[0]
                    for part in parts
                    if part.shape[1]
                ]
            )
            log_probs = torch.log_softmax(logits[:-1].float(), dim=-1)
            recorder.add("log_probs", log_probs.gather(1, ids[0, 1:, None]).squeeze(1))
    return recorder.trace(sequences)


@contextmanager
def _installed(hooks: Sequence[Any]) -> Iterator[None]:
    """Remove the hooks at the end of the body."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _engine_hooks(model: Any, recorder: TraceRecorder) -> list[Any]:
    """Hooks on the decoder's layers; their names are Llama's, which all our families share."""

    def input_hook(name: str) -> Any:
        def record(_module: Any, args: Any, kwargs: Any) -> None:
            recorder.add(name, (args[0] if args else kwargs["hidden_states"])[0])

        return record

    def output_hook(name: str) -> Any:
        def record(_module: Any, _args: Any, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            # Routers see tokens without the dimension of the batch.
            recorder.add(name, values[0] if values.dim() == 3 else values)

        return record

    layers = model.model.layers
    handles = [layers[0].register_forward_pre_hook(input_hook("embedding"), with_kwargs=True)]
    for i, layer in enumerate(layers):
        name = f"layers.{i}"
        handles += [
            layer.self_attn.register_forward_hook(output_hook(f"{name}.attention")),
            layer.post_attention_layernorm.register_forward_pre_hook(
                input_hook(f"{name}.middle"), with_kwargs=True
            ),
            layer.mlp.register_forward_hook(output_hook(f"{name}.mlp")),
            layer.register_forward_hook(output_hook(f"{name}.output")),
        ]
        if hasattr(layer.mlp, "gate"):
            handles.append(layer.mlp.gate.register_forward_hook(output_hook(f"{name}.router")))
    return handles


def trace_trainer(
    trainer: MegatronTrainer, sequences: Sequence[Tensor], forced: LayerTrace | None = None
) -> LayerTrace:
    """Run every sequence [S] through the model of one process.

    forced: the engine's trace of the same sequences. Every layer, every MLP and the LM head then
        work on what the engine gave its own, and nothing that one layer does reaches another.
    """
    recorder = TraceRecorder()
    for number, tokens in enumerate(sequences):
        rows = None if forced is None else forced.rows(number)
        with _installed(_trainer_hooks(trainer, recorder, len(tokens), forced, rows)):
            (log_probs,) = trainer.compute_log_probs(_one_sample(tokens))
        recorder.add("log_probs", log_probs)
    return recorder.trace(sequences)


def _one_sample(tokens: Tensor) -> RolloutBatch:
    """Every token but the first is a response token, so that each has a log-prob."""
    return RolloutBatch(
        {
            "unconcat_tokens": [tokens],
            "total_lengths": [len(tokens)],
            "response_lengths": [len(tokens) - 1],
            "loss_masks": [torch.ones(len(tokens) - 1, dtype=torch.int64)],
        }
    )


def _trainer_hooks(
    trainer: MegatronTrainer,
    recorder: TraceRecorder,
    length: int,
    forced: LayerTrace | None,
    rows: slice | None,
) -> list[Any]:
    decoder = unwrap(trainer.chunks[0]).decoder

    def input_hook(name: str | None, given: Tensor | None) -> Any:
        """Record what enters a module under `name`, or put `given` [T, H] in its place."""

        def hook(_module: Any, args: Any, kwargs: Any) -> Any:
            values = args[0] if args else kwargs["hidden_states"]
            if given is not None and rows is not None:
                values = values.clone()
                values[:length, 0] = given[rows].to(values)
            if name is not None:
                recorder.add(name, values[:length, 0])
            if args:
                return (values, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": values}

        return hook

    def output_hook(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            recorder.add(name, values[:length, 0])

        return hook

    def router_hook(name: str) -> Any:
        def hook(router: Any, args: Any) -> None:
            # Without what happens to the logits later: only the choice is made from them.
            recorder.add(name, router.gating(args[0])[:length, 0])

        return hook

    handles = []
    for i, layer in enumerate(decoder.layers):
        name = f"layers.{i}"
        given = None if forced is None else forced.input_of(i)
        middle = None if forced is None else forced.states.get(f"{name}.middle")
        handles += [
            layer.register_forward_pre_hook(
                input_hook("embedding" if i == 0 and forced is None else None, given),
                with_kwargs=True,
            ),
            layer.self_attention.register_forward_hook(output_hook(f"{name}.attention")),
            layer.pre_mlp_layernorm.register_forward_pre_hook(
                input_hook(f"{name}.middle", middle), with_kwargs=True
            ),
            layer.mlp.register_forward_hook(output_hook(f"{name}.mlp")),
            layer.register_forward_hook(output_hook(f"{name}.output")),
        ]
        if hasattr(layer.mlp, "router"):
            handles.append(
                layer.mlp.router.register_forward_pre_hook(router_hook(f"{name}.router"))
            )
    if forced is not None:
        last = forced.input_of(len(decoder.layers))
        handles.append(
            decoder.final_layernorm.register_forward_pre_hook(
                input_hook(None, last), with_kwargs=True
            )
        )
    return handles
