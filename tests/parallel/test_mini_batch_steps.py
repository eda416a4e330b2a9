"""Mini-batches on ranks are the optimizer steps of a plain loop: transformers, autograd and torch's Adam.

9 responses in mini-batches of 3: two data parallel ranks never have equal shares. Two epochs, the second shuffled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plugin.config import JobConfig
from plugin.controller.batch import mini_batches
from plugin.environments.trajectory import Rollouts
from plugin.errors import ReplayError
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel import tiny_models
from tests.parallel.training_jobs import SMOOTH_ADAM, RunRanks, Start, exported, new_trainer

SETTINGS = {"policy_loss": "ppo", "eps_clip": 0.05, "max_tokens_per_gpu": 20}
APPROXIMATE = {"train_log_probs": "approximate"}


def steps_of_a_rollout(start: Start) -> list[Any]:
    count = len(start.batch)
    rollouts = Rollouts(
        start.batch,
        np.repeat(np.arange(3), 3),
        np.ones(count, np.int64),
        np.zeros(count),
        np.array([""] * count),
        np.ones(count, np.int64),
        np.zeros(count, np.bool_),
    )
    config = JobConfig(
        rollout_batch_size=3,
        n_samples_per_prompt=3,
        global_batch_size=3,
        num_updates_per_rollout=2,
    )
    steps = mini_batches(config, rollouts, 1)
    assert len(steps) == 6 and steps[3].samples.tolist() != steps[0].samples.tolist()
    return steps


def train_on_mini_batches(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Old log-probs of the whole rollout first, then a step per mini-batch, as the driver does it."""
    trainer = new_trainer(groups, start, {**SETTINGS, **settings})
    batch = start.batch.with_column("log_probs", trainer.compute_log_probs(start.batch))
    results, steps = [], steps_of_a_rollout(start)
    for number, step in enumerate(steps):
        trainer.version, trainer.version_progress = 0, number / len(steps)
        results.append(trainer.train_step(step.of(batch)))
    losses = [result.metrics["loss"] for result in results]
    return losses, [result.grad_norm for result in results], exported(trainer)


def plain_loop(
    start: Start, *, approximate: bool = False
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same by hand: PPO, mean of sample means, gradients clipped to norm 1, Adam."""
    model = tiny_models.hf_model(tiny_models.FAMILIES[start.family]())
    columns = start.batch.columns

    def log_probs(i: int) -> Tensor:
        tokens, response = columns["unconcat_tokens"][i], int(columns["response_lengths"][i])
        rows = torch.log_softmax(model(tokens[None]).logits[0, -response - 1 : -1], -1)
        return rows.gather(-1, tokens[-response:, None])[:, 0]

    with torch.no_grad():
        old = [log_probs(i) for i in range(len(start.batch))]
    adam = torch.optim.Adam(
        model.parameters(), lr=SMOOTH_ADAM["lr"], eps=SMOOTH_ADAM["adam_eps"], betas=(0.9, 0.98)
    )
    losses, norms = [], []
    steps = steps_of_a_rollout(start)
    for number, step in enumerate(steps):
        means = []
        for i in step.samples.tolist():
            cur, advantages = log_probs(i), columns["advantages"][i]
            if approximate:
                behind = -columns["weight_versions"][i].float()  # of a trainer at version 0
                share = behind / (behind + number / len(steps)) if number else 1.0
                rollout = columns["rollout_log_probs"][i]
                old[i] = rollout + share * (cur.detach() - rollout)
            ratio = (cur - old[i]).exp()
            per_token = torch.maximum(-ratio * advantages, -ratio.clamp(0.95, 1.05) * advantages)
            mask = columns["loss_masks"][i] != 0
            if bool(mask.any()):
                means.append(per_token[mask].mean())
        loss = torch.stack(means).mean()
        adam.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(loss.item())
        adam.step()
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "settings, sizes",
    [
        pytest.param({}, {"tensor_model_parallel_size": 2}, id="TP2"),
        pytest.param({}, {}, id="DP2 uneven"),
        pytest.param(APPROXIMATE, {"context_parallel_size": 2}, id="approximate CP2"),
    ],
)
def test_mini_batches_are_as_many_manual_steps(
    run_ranks: RunRanks, settings: dict[str, Any], sizes: dict[str, int]
) -> None:
    start = Start.of("qwen3")
    losses, norms, weights = plain_loop(start, approximate=settings == APPROXIMATE)
    [(mine, my_norms, my_weights), *others] = run_ranks(
        train_on_mini_batches, 2, start, settings, **sizes
    )
    assert mine == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert my_norms == pytest.approx(norms, rel=1e-4)
    for name, value in my_weights.items():
        update = float((weights[name] - start.weights[name]).abs().max())
        assert float((value - weights[name]).abs().max()) < 1e-3 * update, name
    assert all(other[0] == mine for other in others)


def train_on_recorded_routes(groups: ParallelGroups, start: Start) -> tuple[list[float], str]:
    """Record two mini-batches, train on both; then record one and train on the other."""
    trainer = new_trainer(groups, start, {"use_routing_replay": True, "max_tokens_per_gpu": 20})
    parts = [start.batch.select(range(4)), start.batch.select(range(4, 9))]
    for number, part in enumerate(parts):
        trainer.compute_log_probs(part, keep_routes=number > 0)
    agreement = [trainer.train_step(part).metrics["replay/agreement"] for part in parts]
    trainer.compute_log_probs(parts[0])
    try:
        trainer.train_step(parts[1])
    except ReplayError as error:
        return agreement, str(error)
    return agreement, ""


def test_every_mini_batch_repeats_its_own_recorded_routes(run_ranks: RunRanks) -> None:
    [(agreement, error), *_] = run_ranks(train_on_recorded_routes, 2, Start.of("qwen3_moe"))
    # The first is trained with the weights that chose the routes, the second after an update.
    assert agreement[0] == pytest.approx(1.0) and 0.3 < agreement[1] <= 1.0
    assert "recorded for a different batch" in error
