"""Unset flags of a trainer on CPU, on CUDA, and on CUDA with Transformer Engine."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities, cuda_environment, on_device
from plugin.errors import ConfigError

CPU = Capabilities(transformer_engine=True)  # installed, but of no use
BARE_CUDA = Capabilities(cuda=True)
CUDA = Capabilities(cuda=True, transformer_engine=True)
DECIDED = (
    *("train_dtype", "transformer_impl", "use_distributed_optimizer"),
    *("overlap_grad_reduce", "overlap_param_gather"),
)


def decided(found: Capabilities, **settings: Any) -> tuple[Any, ...]:
    config = on_device(TrainerConfig(**settings), found)
    return tuple(getattr(config, name) for name in DECIDED)


def test_defaults_on_cpu_are_float32_local_and_plain() -> None:
    assert decided(CPU) == ("float32", "local", False, False, False)


def test_defaults_on_cuda_are_bfloat16_sharded_and_overlapped() -> None:
    assert decided(BARE_CUDA) == ("bfloat16", "local", True, True, True)
    assert decided(CUDA) == ("bfloat16", "transformer_engine", True, True, True)


def test_what_is_set_stays() -> None:
    given = {
        "train_dtype": "bfloat16",
        "transformer_impl": "local",
        "use_distributed_optimizer": True,
    }
    assert decided(CPU, **given) == ("bfloat16", "local", True, False, False)
    plain = {"use_distributed_optimizer": False, "overlap_grad_reduce": False}
    assert decided(CUDA, **plain) == ("bfloat16", "transformer_engine", False, False, False)


def test_deciding_twice_changes_nothing() -> None:
    once = on_device(TrainerConfig(), CUDA)
    assert on_device(once, CUDA) == once


def test_float32_takes_local_layers_and_is_refused_with_transformer_engine() -> None:
    assert decided(CUDA, train_dtype="float32")[1] == "local"
    with pytest.raises(ConfigError, match=r"--train-dtype float32 with .*half precision only"):
        decided(CUDA, train_dtype="float32", transformer_impl="transformer_engine")


@pytest.mark.parametrize("found", [CPU, BARE_CUDA])
def test_transformer_engine_where_it_cannot_run_is_refused(found: Capabilities) -> None:
    with pytest.raises(ConfigError, match="needs CUDA and the transformer_engine package"):
        decided(found, transformer_impl="transformer_engine")


def test_reductions_do_not_wait_for_routers_that_get_no_gradient() -> None:
    frozen = {"use_rollout_routing_replay": "ids+weights"}
    assert decided(CUDA, **frozen)[3:] == (False, False)
    assert decided(CUDA, **frozen, router_gradient="keep")[3:] == (True, True)
    with pytest.raises(ConfigError, match="routers get none"):
        decided(CUDA, **frozen, overlap_grad_reduce=True)


def test_fp8_needs_transformer_engine_and_aligned_rows() -> None:
    assert on_device(TrainerConfig(fp8="hybrid"), CUDA).row_alignment == 16
    assert TrainerConfig(fp8="e4m3", fp8_recipe="mxfp8").row_alignment == 32
    assert TrainerConfig().row_alignment == 1
    for found, settings in ((CPU, {}), (BARE_CUDA, {}), (CUDA, {"train_dtype": "float32"})):
        with pytest.raises(ConfigError, match="--fp8 hybrid needs Transformer Engine"):
            decided(found, fp8="hybrid", **settings)


def test_a_gather_is_overlapped_only_with_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="--overlap-param-gather needs"):
        TrainerConfig(overlap_param_gather=True, use_distributed_optimizer=False)


def test_the_environment_has_one_queue_where_megatron_orders_kernels_by_it() -> None:
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert cuda_environment(TrainerConfig()) == segments
    assert cuda_environment(TrainerConfig(pipeline_model_parallel_size=2)) == segments
    for size in ("tensor_model_parallel_size", "context_parallel_size"):
        one_queue = {**segments, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        assert cuda_environment(TrainerConfig(**{size: 2})) == one_queue
