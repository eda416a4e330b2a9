"""A real Megatron-Core model on a device that is not the host: log-prob pass, replayed routes, training pass.

Both passes give what they give on the CPU, and of all that waits for the device, nothing is in this package's closures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.loss_scaling import LossScale
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import Pipeline, training_forward_step
from plugin.megatron_backend.step.step_metrics import step_metrics
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from tests.parallel import tiny_models
from tests.parallel.training_jobs import RunRanks, Start
from tests.pretend_device import PretendDevice

SETTINGS = {"max_tokens_per_gpu": 40, "use_tis": True, "entropy_coef": 0.05}
#: Where a pass may read: the results that it returns to the caller, and Megatron's token dispatcher, which asks for split sizes.
RETURNED = ("rank_model.py", "rows = rows.cpu()")
MEGATRON = ("output = model(", "return schedule(")


def to_device(trainer: MegatronTrainer, device: torch.device) -> None:
    """Move the weights in place of those on the CPU; Megatron's own marks stay on them."""
    trainer.device = device
    for module in trainer.chunks[0].modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                moved = torch.nn.Parameter(parameter.detach().to(device))
                moved.__dict__.update(parameter.__dict__)
                module._parameters[name] = moved
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = None if buffer is None else buffer.to(device)


def both_passes(trainer: MegatronTrainer, start: Start) -> dict[str, Tensor]:
    """Log-probs, then metrics and gradients of a training pass on the routes that the first recorded."""
    results = {"log-probs": trainer.compute_log_probs(start.batch).values}
    errors, table = ErrorCollector(trainer.device), StatisticsTable(trainer.device)
    step = trainer._prepared(start.batch, errors)
    share = step.share
    scale = LossScale(trainer.config.per_token, share.total_weight, len(share.counts), 1)
    session = trainer._replay_session(step)
    closure = training_forward_step(trainer.config, trainer.groups, scale, table, errors, session)
    if session is None:
        Pipeline(trainer.groups).run(closure, trainer.chunks, step.microbatches)
    else:
        with session:
            Pipeline(trainer.groups).run(closure, trainer.chunks, step.microbatches)
            session.check_consumed()
    errors.agree("the pass")
    for name, parameter in trainer.chunks[0].named_parameters():
        results[name] = torch.zeros(()) if parameter.grad is None else parameter.grad.cpu()
    metrics = step_metrics(table.reduced(None))
    return results | {name: torch.tensor(value) for name, value in metrics.items()}


def on_both_devices(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    results, reads = [], []
    for use in (False, True):
        config = TrainerConfig(**settings)
        hf_config = tiny_models.FAMILIES[start.family]()
        trainer = MegatronTrainer(config, hf_config, groups, trainable=False)
        trainer.load_hf_weights(start.weights)
        if use:
            with PretendDevice() as pretend:
                to_device(trainer, pretend.device)
                pretend.reads.clear()
                results.append(both_passes(trainer, start))
                reads = [read for read in pretend.reads if "/plugin/" in read]
        else:
            results.append(both_passes(trainer, start))
    return results[0], results[1], reads


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", SETTINGS), ("qwen3_moe", {**SETTINGS, "use_routing_replay": True})],
)
def test_a_megatron_model_on_another_device_is_the_one_on_the_cpu(
    run_ranks: RunRanks, family: str, settings: dict[str, Any]
) -> None:
    [(wanted, found, reads)] = run_ranks(on_both_devices, 1, Start.of(family), settings)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    ours = [r for r in reads if not any(place in r for place in (*RETURNED, *MEGATRON))]
    assert not ours, "\n".join(dict.fromkeys(ours))
