"""A transformers engine that has one wrong tensor after every load: ten kinds, as real engines have had them.

By import path: `--rollout-engine tests.planted_faults:make_<kind>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugin.config import JobConfig
from plugin.engines.transformers.engine import TransformersEngine


def _layers(model: Any) -> list[Any]:
    return list(model.model.layers)


def _middle(model: Any) -> Any:
    layers = _layers(model)
    return layers[len(layers) // 2]


def stale_head(model: Any) -> None:
    """The LM head keeps the weights that it was packed from, and no longer follows the embedding."""
    generator = torch.Generator().manual_seed(0)
    held = torch.empty(model.lm_head.weight.shape).normal_(0, 0.02, generator=generator)
    model.lm_head.weight = nn.Parameter(held.to(model.lm_head.weight), requires_grad=False)


def permuted_embedding(model: Any) -> None:
    """The rows of the embedding in another order, as after a wrong split of the vocabulary."""
    rows = model.model.embed_tokens.weight
    rows.copy_(rows.roll(len(rows) // 2, 0))


def missing_query(model: Any) -> None:
    """A query projection that never arrived."""
    _middle(model).self_attn.q_proj.weight.zero_()


def swapped_key_and_value(model: Any) -> None:
    """Keys where values belong, as in a fused projection that is cut in another order."""
    attention = _middle(model).self_attn
    _swap(attention.k_proj.weight, attention.v_proj.weight)


def default_norms(model: Any) -> None:
    """Norm weights that are left as they are built."""
    for layer in _layers(model):
        layer.post_attention_layernorm.weight.fill_(1.0)


def scaled_output(model: Any) -> None:
    """An output projection summed over two ranks that both had all of it."""
    _middle(model).self_attn.o_proj.weight.mul_(2.0)


def swapped_gate_and_up(model: Any) -> None:
    """Gate and up projection in the other order."""
    mlp = _middle(model).mlp
    _swap(mlp.gate_proj.weight, mlp.up_proj.weight)


def swapped_layers(model: Any) -> None:
    """Two layers in each other's place, as after a wrong pipeline offset."""
    layers = _layers(model)
    one, other = layers[len(layers) // 2 - 1], layers[len(layers) // 2]
    for name, weight in one.named_parameters():
        _swap(weight, other.get_parameter(name))


def wrong_rope(model: Any) -> None:
    """Rotary frequencies of another theta."""
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq ** (4 / 3))


def rounded_weights(model: Any) -> None:
    """Weights that went through bfloat16 on the way to a float32 engine, or through fp8 to a 16-bit one."""
    for weight in model.parameters():
        full = weight.dtype == torch.float32
        weight.copy_(weight.to(torch.bfloat16 if full else torch.float8_e4m3fn))


def _swap(one: Tensor, other: Tensor) -> None:
    held = one.clone()
    one.copy_(other)
    other.copy_(held)


FAULTS: dict[str, Callable[[Any], None]] = {
    fault.__name__: fault
    for fault in (
        stale_head,
        permuted_embedding,
        missing_query,
        swapped_key_and_value,
        default_norms,
        scaled_output,
        swapped_gate_and_up,
        swapped_layers,
        wrong_rope,
        rounded_weights,
    )
}

#: What checksums of the weights cannot see.
NO_WEIGHT = ("wrong_rope",)


class FaultyEngine(TransformersEngine):
    """Its model gets the fault `kind` whenever it has new weights; None = it is healthy.

    checksums: whether it reports those of its weights
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        kind: str | None,
        *,
        checksums: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(hf_config, **options)
        self._kind, self._has_checksums = kind, checksums

    def load_weights(self, version: int, bucket: Any, *, last: bool) -> None:
        super().load_weights(version, bucket, last=last)
        if last and self._kind is not None:
            with torch.no_grad():
                FAULTS[self._kind](self.model)

    def weight_checksums(self) -> Any:
        return super().weight_checksums() if self._has_checksums else None


def _factory(kind: str) -> Callable[[JobConfig, Mapping[str, Any], str], FaultyEngine]:
    def make(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> FaultyEngine:
        return FaultyEngine(hf_config, kind, dtype=config.rollout_dtype, name=name)

    return make


globals().update({f"make_{kind}": _factory(kind) for kind in FAULTS})


def make_faulty_replacement(
    config: JobConfig, hf_config: Mapping[str, Any], name: str
) -> FaultyEngine:
    """Healthy at the start of a job, and faulty where it replaces an engine during it."""
    assert config.run_dir is not None
    kind = "scaled_output" if (Path(config.run_dir) / "metrics.jsonl").exists() else None
    return FaultyEngine(hf_config, kind, dtype=config.rollout_dtype, name=name)
