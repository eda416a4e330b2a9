"""Log-prob pass and whole training steps, optimizer included, of real Megatron-Core models on a device that is not the host.

They give what they give on the CPU. Where the host waits for the device is a list, below: everything else fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import clip_grads
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.megatron_backend import cpu_runtime
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step import microbatch_loss
from plugin.megatron_backend.trainer import MegatronTrainer, StepResult
from tests.parallel import tiny_models
from tests.parallel.training_jobs import SMOOTH_ADAM, RunRanks, Start, exported
from tests.pretend_device import PretendDevice

#: Where the host may wait, however many microbatches a step has: file and function, and what for.
ONCE_A_STEP = {
    "plugin/ppo_utils/sufficient_statistics.py _from_rows": "the metrics",
    "plugin/megatron_backend/rank_model.py _gathered": "log-probs, which go to the object store",
    "megatron/core/optimizer/clip_grads.py get_grad_norm_fp32": "the norm that steps are skipped by",
}
ONCE_A_MICROBATCH: dict[str, str] = {}

BFLOAT16 = {
    "train_dtype": "bfloat16",
    "transformer_impl": "local",
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
LOSS = {"use_tis": True, "entropy_coef": 0.05}
#: Name -> family, settings.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("qwen3", LOSS),
    "bfloat16 as on CUDA": ("qwen3", {**LOSS, **BFLOAT16}),
    "float16 with a loss scale": ("qwen3", {**LOSS, **BFLOAT16, "train_dtype": "float16"}),
    "MoE, replayed": ("qwen3_moe", {**LOSS, **BFLOAT16, "use_routing_replay": True}),
}


class OnPretendDevice(MegatronTrainer):
    """A trainer whose weights are on the pretend device before DDP and optimizer see them."""

    def _add_optimizer(self) -> None:
        self.device = torch.device("pretend", 0)
        for module in self.chunks[0].modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    moved = torch.nn.Parameter(parameter.detach().to(self.device))
                    moved.__dict__.update(parameter.__dict__)
                    module._parameters[name] = moved
            for name, buffer in list(module._buffers.items()):
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        super()._add_optimizer()


def norm_on_the_device(
    _chunk: int, _buffer: Tensor, lists: list[list[Tensor]], _each: bool
) -> tuple[Tensor, None]:
    """As kernels of Transformer Engine and APEX: Megatron's own stand-in for them reads a number per weight."""
    norms = [torch.linalg.vector_norm(tensor) for tensors in lists for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms))[None], None


@contextmanager
def pretend_device() -> Iterator[PretendDevice]:
    """Where Megatron-Core puts what it puts on its CUDA device, in the body."""
    cpu_runtime.activate()
    norm = mock.patch.object(clip_grads, "l2_norm_impl", norm_on_the_device)
    with norm, PretendDevice() as pretend:
        before, cpu_runtime._stand_in = cpu_runtime._stand_in, pretend.device
        try:
            yield pretend
        finally:
            cpu_runtime._stand_in = before


def two_steps(trainer: MegatronTrainer, start: Start) -> tuple[list[Tensor], list[StepResult]]:
    """Log-probs and results of two updates."""
    log_probs, steps = [], []
    for _ in range(2):
        log_probs += list(trainer.compute_log_probs(start.batch))
        steps.append(trainer.train_step(start.batch))
    return log_probs, steps


def config_of(settings: dict[str, Any], budget: int) -> TrainerConfig:
    return TrainerConfig(**{**SMOOTH_ADAM, **settings, "max_tokens_per_gpu": budget})


def on_the_device(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], budgets: tuple[int, ...]
) -> list[tuple[list[Tensor], list[StepResult], dict[str, Tensor], list[str]]]:
    """For every budget: log-probs, steps, weights, and where the second step waited."""
    results = []
    hf_config = tiny_models.FAMILIES[start.family]()
    for budget in budgets:
        with pretend_device() as pretend:
            trainer = OnPretendDevice(config_of(settings, budget), hf_config, groups)
            trainer.load_hf_weights(start.weights)
            log_probs = list(trainer.compute_log_probs(start.batch))
            steps = [trainer.train_step(start.batch)]
            pretend.reads.clear()
            pretend.writes.clear()
            log_probs += list(trainer.compute_log_probs(start.batch))
            steps.append(trainer.train_step(start.batch))
            waits = [*pretend.reads, *pretend.writes]
            results.append((log_probs, steps, exported(trainer), waits))
    return results


def on_the_cpu(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], budget: int
) -> tuple[list[Tensor], list[StepResult], dict[str, Tensor]]:
    hf_config = tiny_models.FAMILIES[start.family]()
    trainer = MegatronTrainer(config_of(settings, budget), hf_config, groups)
    trainer.load_hf_weights(start.weights)
    return *two_steps(trainer, start), exported(trainer)


def places(waits: list[str]) -> Counter[str]:
    """How often each function waited."""
    found: Counter[str] = Counter()
    for wait in waits:
        where = re.search(r" at (\S+?):\d+ in (\S+?):", wait)
        found[f"{where[1]} {where[2]}" if where else wait] += 1
    return found


@pytest.mark.parametrize("name", JOBS)
def test_steps_on_a_device_are_those_on_the_cpu_and_wait_for_it_where_they_may(
    run_ranks: RunRanks, name: str
) -> None:
    family, settings = JOBS[name]
    start = Start.of(family)
    [(log_probs, steps, weights)] = run_ranks(on_the_cpu, 1, start, settings, 40)
    [[few, many]] = run_ranks(on_the_device, 1, start, settings, (40, 20))
    # The device computes some functions in several operations, each of which rounds.
    near = 1e-4 if "train_dtype" not in settings else 0.03
    for mine, theirs in zip(few[0], log_probs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
    for done, expected in zip(few[1], steps, strict=True):
        assert done.updated and expected.updated
        for metric in ("loss", "grad_norm", "mismatch_kl"):
            wanted = pytest.approx(expected.metrics[metric], rel=near, abs=near / 10)
            assert done.metrics[metric] == wanted, metric
    for key, weight in weights.items():
        torch.testing.assert_close(few[2][key], weight, rtol=near, atol=near, msg=key)
    once, often = places(few[3]), places(many[3])
    allowed = {**ONCE_A_STEP, **ONCE_A_MICROBATCH}
    unknown = [
        w for w in dict.fromkeys(few[3] + many[3]) if not places([w]).keys() <= allowed.keys()
    ]
    assert not unknown, "the host waits for the device:\n" + "\n".join(unknown)
    for place in ONCE_A_STEP:
        assert once[place] == often[place], f"{place} waits more often with more microbatches"


def with_a_planted_read(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> list[str]:
    weights = microbatch_loss.token_weights

    def planted(*args: Any, **kwargs: Any) -> Tensor:
        result = weights(*args, **kwargs)
        return result * 1.0 if float(result.sum()) > 0 else result

    microbatch_loss.token_weights = planted  # type: ignore[assignment]
    try:
        return on_the_device(groups, start, settings, (40,))[0][3]
    finally:
        microbatch_loss.token_weights = weights


def test_a_read_that_is_planted_in_a_step_is_found(run_ranks: RunRanks) -> None:
    [waits] = run_ranks(with_a_planted_read, 1, Start.of("qwen3"), LOSS)
    assert any("token_weights" in wait or "planted" in wait for wait in waits)
