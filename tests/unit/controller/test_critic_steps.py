"""Values of a batch become advantages and returns, and the flags of the critic its learning rate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.cluster import array_transport
from plugin.cluster.array_transport import only, store
from plugin.cluster.trainer_actor import _critic_of, _move_waiting_critics
from plugin.config import JobConfig
from plugin.controller.batch import prepare_batch
from plugin.controller.passes import CriticSteps, with_gae
from plugin.environments.trajectory import Rollouts, Trajectory
from plugin.errors import CheckpointError, ConfigError
from plugin.ragged import Ragged


def sample(*mask: int) -> RolloutSample:
    return RolloutSample(
        torch.arange(2 + len(mask)),
        response_length=len(mask),
        loss_mask=torch.tensor(mask),
        rollout_log_probs=torch.full((len(mask),), -1.0),
    )


def test_a_trajectory_of_two_samples_is_one_sequence_of_steps() -> None:
    rollouts = Rollouts.of(
        [[Trajectory((sample(1, 1), sample(0, 1)), 8.0), Trajectory((sample(1),), 1.0)]]
    )
    config = JobConfig.from_sources({"advantage_estimator": "gae", "gamma": 0.5, "lambd": 0.5})
    batch = prepare_batch(config, rollouts)
    assert "advantages" not in batch
    values = Ragged(torch.tensor([1.0, 2.0, 99.0, 4.0, 0.5]), [2, 2, 1])
    batch = with_gae(config, batch, rollouts, values)
    # steps of the first: V = 1, 2, 4, reward 8 at the last. delta: 0, 0, 8 - 4 = 4;
    # A = 0.25 * 1, 0.25 * 4, 4; the second: 1 - 0.5
    assert [a.tolist() for a in batch.columns["advantages"]] == [[0.25, 1.0], [0.0, 4.0], [0.5]]
    assert [r.tolist() for r in batch.columns["returns"]] == [[1.25, 3.0], [0.0, 8.0], [1.0]]
    assert batch.columns["values"].values.tolist() == [1.0, 2.0, 99.0, 4.0, 0.5]


def test_values_that_stay_on_the_ranks_are_read_for_advantages_which_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects: list[Any] = []

    def stored(batch: RolloutBatch, parts: Any = ()) -> RolloutBatch:
        return store(batch, [np.arange(len(batch))], lambda a: objects.append(a) or objects[-1])  # type: ignore[func-returns-value]

    def values(batch: RolloutBatch) -> Any:
        found = batch.here().with_column("values", Ragged(torch.tensor([1.0, 2.0, 0.5]), [2, 1]))
        return stored(found).columns["values"]

    monkeypatch.setattr(array_transport, "_of_ray", list)
    rollouts = Rollouts.of([[Trajectory((sample(1, 1),), 8.0), Trajectory((sample(1),), 1.0)]])
    config = JobConfig.from_sources({"advantage_estimator": "gae", "gamma": 0.5, "lambd": 0.5})
    steps = CriticSteps(config, SimpleNamespace(stored=stored, values=values))  # type: ignore[arg-type]
    batch, metrics = steps.added_to(stored(prepare_batch(config, rollouts)), rollouts)
    assert batch.stored.keys() >= {"values", "returns", "advantages"}
    arrived = only(batch, "values", "returns", "advantages").columns
    # delta: 0.5 * 2 - 1 = 0, 8 - 2 = 6; the second: 1 - 0.5
    assert [a.tolist() for a in arrived["advantages"]] == [[1.5, 6.0], [0.5]]
    assert [r.tolist() for r in arrived["returns"]] == [[2.5, 8.0], [1.0]]
    assert metrics["critic/value"] == pytest.approx(3.5 / 3)


def test_the_critics_learning_rate_warms_up_and_is_the_policys_unless_given() -> None:
    gae = {"advantage_estimator": "gae"}
    config = JobConfig.from_sources({**gae, "critic_lr": 0.4, "critic_lr_warmup_steps": 4})
    rates = [config.critic_learning_rate(n) for n in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert JobConfig.from_sources({**gae, "lr": 0.7}).critic_learning_rate(0) == 0.7


@pytest.mark.parametrize(
    "flag", [{"critic_lr": 1e-3}, {"value_clip": 0.3}, {"num_critic_only_rollouts": 2}]
)
def test_flags_of_a_critic_that_the_job_does_not_have_are_refused(flag: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--advantage-estimator gae"):
        JobConfig.from_sources(flag)


def test_a_critic_is_found_in_its_checkpoint_or_where_it_waits(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_0000004"
    with pytest.raises(CheckpointError, match="step_0000004 holds no critic"):
        _critic_of(checkpoint)
    waiting = tmp_path / ".critic" / "step_0000004"
    waiting.mkdir(parents=True)
    assert _critic_of(checkpoint) == waiting
    (checkpoint / "critic").mkdir(parents=True)
    assert _critic_of(checkpoint) == checkpoint / "critic"


def test_a_critic_that_waits_after_a_kill_is_moved_before_the_next_save_prunes_it(
    tmp_path: Path,
) -> None:
    for step in (4, 8, 12):
        (tmp_path / f".critic/step_{step:07d}").mkdir(parents=True)
    (tmp_path / "step_0000004").mkdir()
    (tmp_path / "step_0000008/critic").mkdir(parents=True)
    _move_waiting_critics(tmp_path)
    assert (tmp_path / "step_0000004/critic").is_dir()
    # One whose checkpoint has a critic already, or was never published, stays.
    assert {path.name for path in (tmp_path / ".critic").iterdir()} == {
        "step_0000008",
        "step_0000012",
    }
