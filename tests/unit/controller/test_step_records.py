"""When a run's records are written: late, in order, and before whatever makes them final."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.cluster import array_transport
from plugin.cluster.array_transport import store
from plugin.config import JobConfig
from plugin.controller.shared_devices import OwnDevices
from plugin.controller.step_records import StepRecords, seen_columns
from plugin.controller.training_loop import Position, TrainingLoop
from plugin.errors import BatchLost, ParallelError
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_prompts, read_run, read_samples
from plugin.tools.doctor.run_diagnosis import diagnose
from tests.unit.observe.test_detectors import LANGUAGE, Language, rollout


def records_in(directory: Path) -> StepRecords:
    config = JobConfig()
    console: Any = SimpleNamespace(log=print, step=lambda *_: None)
    checkpoints: Any = SimpleNamespace(newest=lambda: None)
    return StepRecords(config, RunFiles(directory, config.as_dict()), checkpoints, console, [])


def test_nothing_is_written_before_it_is_asked_for_and_nothing_twice(tmp_path: Path) -> None:
    records = records_in(tmp_path / "run")
    trained: Any = SimpleNamespace(seen=None, skipped=None, overflow=False)
    batch: Any = RolloutBatch({})
    records.log_samples(1, lambda: [{"prompt": "1="}])
    records.add({"step": 1, "weight_version": 0}, batch, trained, of_rollout_weights=True)
    records.log_prompts(0, [4, 5], {})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    for _ in range(2):
        records.write()
        assert [step["step"] for step in read_run(tmp_path / "run").steps] == [1]
        assert [sample["prompt"] for sample in read_samples(tmp_path / "run")] == ["1="]
        assert [record["trained"] for record in read_prompts(tmp_path / "run")] == [[4, 5]]


def test_another_model_is_found_before_anything_is_said_about_rewards(tmp_path: Path) -> None:
    """Both are due at the same step, and --on-finding warn lets both be said."""
    said: list[str] = []
    config = JobConfig(on_finding="warn")
    console: Any = SimpleNamespace(log=said.append, step=lambda *_: None)
    files = RunFiles(tmp_path, config.as_dict())
    idle = {"reward": 0.0, "reward_std": 0.0, "grad_norm": 0.0}
    history: list[dict[str, Any]] = [{"step": i, **idle} for i in range(1, 20)]
    records = StepRecords(config, files, SimpleNamespace(), console, history)  # type: ignore[arg-type]
    columns = rollout(Language(seed=5), LANGUAGE)
    batch: Any = RolloutBatch(columns)
    trained: Any = SimpleNamespace(seen=batch, skipped=None, overflow=False, live_routes=None)
    line = {"step": 20, "weight_version": 0, **idle}
    records.add(line, batch, trained, of_rollout_weights=True)
    records.write()
    assert [text.splitlines()[0] for text in said] == [
        "step 20: error: the engine runs a different model than the trainer",
        "step 20: error: nothing is learned: all rewards are equal",
    ]
    titles = [finding["title"] for finding in diagnose(tmp_path)["findings"]]
    assert titles[0] == "the engine runs a different model than the trainer"


def job_that_tells(told: list[str], **settings: Any) -> TrainingLoop:
    """A job of two rollouts before its first, whose parts only say what they are asked to do."""

    def log(word: str) -> Any:
        return lambda *_, **__: told.append(word)

    job: Any = object.__new__(TrainingLoop)
    job._config = JobConfig(num_rollouts=2, **settings)
    job._at = Position()
    job._evaluations = SimpleNamespace(is_due=lambda _: True)
    job._queue = SimpleNamespace(take=lambda _: [], begin=log("prompts"))
    job._weights = SimpleNamespace(trainer_holds_still=contextlib.nullcontext)
    job._devices = OwnDevices()
    job._records = SimpleNamespace(write=log("records"))
    job._save, job._send_weights = log("checkpoint"), log("weights")
    job._save_hf = log("model")

    def train_on(*_: Any) -> None:
        told.append("training")
        job._at.rollouts += 1

    job._train_on = train_on
    return job


@pytest.mark.parametrize(
    "settings, order",
    [
        ({"save_hf_interval": 1}, "training records model weights prompts records"),
        ({}, "training weights prompts records"),
        ({"save_interval": 1}, "training records checkpoint weights prompts records"),
        # An evaluation comes before the next prompts; asynchronous engines have theirs.
        ({"eval_data": ("held:4",)}, "training weights records"),
        ({"async_rollouts": True, "policy_loss": "icepop"}, "training weights records"),
    ],
)
def test_records_are_written_while_the_engines_work_but_before_a_checkpoint(
    settings: dict[str, Any], order: str
) -> None:
    told: list[str] = []
    interrupts: Any = SimpleNamespace(held_back=lambda _: contextlib.nullcontext())
    job_that_tells(told, **settings)._one_rollout(interrupts)
    assert told == order.split()


def test_a_step_is_recorded_though_its_weights_cannot_be_sent() -> None:
    told: list[str] = []
    job: Any = job_that_tells(told)

    def fail(**_: Any) -> None:
        raise ParallelError("rank 0 died")

    job._send_weights = fail
    with pytest.raises(ParallelError):
        job._one_rollout(None)
    assert told == ["training", "records"]


def test_what_could_not_be_written_is_forgotten_when_the_run_goes_back(tmp_path: Path) -> None:
    """A dump of log-probs that are lost fails; the steps after it are repeated."""
    records = records_in(tmp_path / "run")

    def lost() -> None:
        raise BatchLost("a part of the batch is lost")

    records._waiting.append(lost)
    records.log_prompts(1, [4, 5], {})
    with pytest.raises(BatchLost):
        records.write()
    records.go_back(0)
    records.log_prompts(0, [0, 1], {})
    records.write()
    assert [record["trained"] for record in read_prompts(tmp_path / "run")] == [[0, 1]]


def test_detectors_get_what_the_ranks_return_and_routes_of_the_first_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = [torch.full((4, 1, 1), i, dtype=torch.int8) for i in range(8)]
    batch = RolloutBatch(
        {"total_lengths": [4] * 8, "response_lengths": [3] * 8, "rollout_routed_experts": routes}
    )
    objects: list[Any] = []
    away = store(batch, [np.arange(5), np.arange(5, 8)], lambda a: objects.append(a) or objects[-1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(array_transport, "_of_ray", list)
    few = RolloutBatch(
        {"total_lengths": [4], "response_lengths": [3], "log_probs": [torch.tensor([-1.0] * 3)]}
    )
    trained: Any = SimpleNamespace(live_routes=[1, 2], seen=few)
    seen = seen_columns(away, trained)
    assert [row.tolist() for row in seen["log_probs"]] == [[-1.0] * 3]
    assert [row[0].item() for row in seen["rollout_routed_experts"]] == [0, 1]
