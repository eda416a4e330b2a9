"""Transformer Engine's own Adam behind --use-precision-aware-optimizer, up to its kernel: what it keeps and in which dtype, and
what a checkpoint takes of it and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values

from plugin.config import TrainerConfig
from plugin.config.device_defaults import on_device
from plugin.megatron_backend.checkpoint.sharded_state import (
    load_sharded_state,
    optimizer_step,
    set_optimizer_step,
    sharded_state,
)
from plugin.megatron_backend.model import builder
from plugin.megatron_backend.model.builder import (
    build_optimizer,
    reload_main_weights,
    wrap_with_ddp,
)
from tests.parallel import tiny_models
from tests.te.te_models import H100, built

HALF = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
DTYPES = [{}, HALF, {"main_params_dtype": "float16", "exp_avg_dtype": "float16"}]


@contextmanager
def optimized(settings: dict[str, Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Chunks, groups, Megatron's optimizer and the Adam inside it."""
    config = TrainerConfig(use_precision_aware_optimizer=True, **settings)
    with (
        built(tiny_models.tiny_qwen3(), config) as (model, groups),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(builder, "capabilities", lambda: H100)
        chunks = wrap_with_ddp([model], config, groups)
        optimizer = build_optimizer(chunks, on_device(config, H100))
        [part] = optimizer.chained_optimizers
        yield chunks, groups, optimizer, part.optimizer


@pytest.mark.parametrize("settings", DTYPES)
def test_main_weights_and_moments_have_the_dtypes_that_were_asked_for(
    settings: dict[str, Any],
) -> None:
    with optimized(settings) as (chunks, groups, optimizer, adam):
        assert type(adam).__module__.startswith("transformer_engine")
        sharded_state(chunks, optimizer, groups)
        flags = {
            "exp_avg": settings.get("exp_avg_dtype", "float32"),
            "exp_avg_sq": settings.get("exp_avg_sq_dtype", "float32"),
            "master_param": settings.get("main_params_dtype", "float32"),
        }
        assert adam.state
        for state in adam.state.values():
            found = {name: str(value.dtype).removeprefix("torch.") for name, value in state.items()}
            assert found == flags


@pytest.mark.parametrize("settings", DTYPES)
def test_a_checkpoint_holds_float32_and_comes_back(settings: dict[str, Any]) -> None:
    with optimized(settings) as (chunks, groups, optimizer, _):
        state = sharded_state(chunks, optimizer, groups)
        pieces = [p for p in nested_values(state["optimizer"]) if hasattr(p, "data")]
        assert pieces and {piece.data.dtype for piece in pieces} == {torch.float32}
        # As `dist_checkpointing.load` returns it: tensors in place of what describes them.
        generator = torch.Generator().manual_seed(0)
        wanted = sharded_state(chunks, optimizer, groups, loading=True)
        filled = _filled(wanted["optimizer"], generator)
        load_sharded_state({**_tensors(wanted), "optimizer": filled}, chunks, optimizer)
        again = sharded_state(chunks, optimizer, groups)["optimizer"]
        for mine, given in zip(nested_values(again), nested_values(filled), strict=True):
            rounding = 2**-7 if settings else 0.0
            torch.testing.assert_close(mine.data, given, rtol=rounding, atol=rounding / 8)
        set_optimizer_step(optimizer, 7)
        assert optimizer_step(optimizer) == 7


def _filled(state: Any, generator: torch.Generator) -> Any:
    if isinstance(state, dict):
        return {key: _filled(value, generator) for key, value in state.items()}
    if isinstance(state, list):
        return [_filled(value, generator) for value in state]
    return torch.rand(state.local_shape, generator=generator) + 0.5


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: piece.data for key, piece in part.items() if hasattr(piece, "data")}
        for name, part in state.items()
        if name != "optimizer"
    }


def test_new_weights_reach_main_weights_that_are_there_already() -> None:
    with optimized({}) as (chunks, groups, optimizer, adam):
        sharded_state(chunks, optimizer, groups)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.fill_(0.25)
        reload_main_weights(optimizer)
        for state in adam.state.values():
            assert bool((state["master_param"] == 0.25).all())
