"""Records the layers of both sides on the same tokens: a transformers model and the trainer's.

The trainer runs by itself or on the engine's inputs. Its sequences take the path of every log-prob
pass (`MegatronTrainer.compute_log_probs`), so that what is compared is what trains: packing,
position ids, attention and LM head included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plugin.batch_types import RolloutBatch
from plugin.engines.transformers.growing_cache import growing_cache
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.tools.doctor.layer_trace import LayerTrace, TraceRecorder

#: Tokens of a sequence that are read as a prompt before the others are decoded.
PROMPT_LENGTH = 4


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
