"""The trace of a transformers model: the engine's side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plugin.engines.transformers.growing_cache import growing_cache
from plugin.tools.doctor.bisect.layer_trace import LayerTrace, TraceRecorder

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
    with _recording(model, recorder):
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
def _recording(model: Any, recorder: TraceRecorder) -> Iterator[None]:
    """Hook the decoder's layers; the names are those of Llama, which all our families share."""
    handles = []

    def entering(name: str) -> Any:
        def record(_module: Any, args: Any, kwargs: Any) -> None:
            recorder.add(name, (args[0] if args else kwargs["hidden_states"])[0])

        return record

    def leaving(name: str, pick: int = 0) -> Any:
        def record(_module: Any, _args: Any, output: Any) -> None:
            values = output[pick] if isinstance(output, tuple) else output
            # Routers see tokens without the dimension of the batch.
            recorder.add(name, values[0] if values.dim() == 3 else values)

        return record

    layers = model.model.layers
    handles.append(layers[0].register_forward_pre_hook(entering("embedding"), with_kwargs=True))
    for i, layer in enumerate(layers):
        name = f"layers.{i}"
        handles += [
            layer.self_attn.register_forward_hook(leaving(f"{name}.attention")),
            layer.post_attention_layernorm.register_forward_pre_hook(
                entering(f"{name}.middle"), with_kwargs=True
            ),
            layer.mlp.register_forward_hook(leaving(f"{name}.mlp")),
            layer.register_forward_hook(leaving(f"{name}.output")),
        ]
        if hasattr(layer.mlp, "gate"):
            handles.append(layer.mlp.gate.register_forward_hook(leaving(f"{name}.router")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
