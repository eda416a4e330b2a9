"""What a run keeps of its steps: metrics, samples, prompts, findings and log-probs.

Nothing waits for these files. The job's loop hands the records over and has them written later,
while the engines work on the next batch.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.batch_types import RolloutBatch
from plugin.cluster.array_transport import fetched, only
from plugin.cluster.trainer_actor import TrainedStep
from plugin.config import JobConfig
from plugin.controller.run_directory import RunCheckpoints
from plugin.environments.trajectory import Rollouts
from plugin.errors import FindingError, TrainingError
from plugin.observe.console import Console
from plugin.observe.detectors import MismatchDetectors
from plugin.observe.findings import Finding
from plugin.observe.learning import learning_findings
from plugin.observe.log_prob_dump import LISTS, ROUTES, SCALARS
from plugin.observe.run_files import RunFiles, without_slices

_STEPS_KEPT = 2000
#: After this many steps the console reports if nothing is learned, and again at the end.
_STEPS_JUDGED = 20
#: Longer texts in samples.jsonl are cut in the middle, so that long runs do not fill the disk.
_MOST_CHARACTERS = 8000


class StepRecords:
    """Queues the records of a run in order; `write` writes those that are waiting."""

    def __init__(
        self,
        config: JobConfig,
        files: RunFiles,
        checkpoints: RunCheckpoints,
        console: Console,
        history: list[dict[str, Any]],
    ) -> None:
        self._config, self._files, self._checkpoints = config, files, checkpoints
        self._console, self._history = console, history
        self._watch = MismatchWatch(config, files, console.log)
        self._waiting: deque[Callable[[], None]] = deque()
        self._skipped_in_a_row = 0
        self._wandb: Any = None
        self._dump: Any = None
        if config.use_wandb:
            import wandb

            self._wandb = wandb.init(
                project=config.wandb_project, name=config.name, config=config.as_dict()
            )
        if config.dump_log_probs is not None:
            from plugin.observe.log_prob_dump import LogProbDump

            self._dump = LogProbDump(
                config.dump_log_probs, force=config.resumes, with_routes=config.dump_routes
            )

    def add(
        self,
        line: dict[str, Any],
        batch: RolloutBatch,
        trained: TrainedStep,
        *,
        of_rollout_weights: bool,
    ) -> None:
        """An optimizer step.

        line: its metrics
        of_rollout_weights: whether it started from the weights of the rollout
        """
        self._waiting.append(partial(self._write_step, line, batch, trained, of_rollout_weights))

    def log_samples(self, step: int, samples: Callable[[], list[dict[str, Any]]]) -> None:
        """Responses to read, made when they are written."""
        self._waiting.append(lambda: self._files.log_samples(step, samples()))

    def log_prompts(self, rollout: int, trained: list[int], dropped: dict[str, list[int]]) -> None:
        """The prompts of a rollout."""
        self._waiting.append(lambda: self._files.log_prompts(rollout, trained, dropped))

    def write(self) -> None:
        """Write what waits; a `TrainingError` after too many skipped steps in a row."""
        while self._waiting:
            self._waiting.popleft()()

    def log_evaluation(self, record: dict[str, Any], step: int) -> None:
        """Write an evaluation at once."""
        self._files.log_evaluation(record)
        if self._wandb is not None:
            self._wandb.log(record, step=step)

    def go_back(self, step: int) -> None:
        """Forget what came after `step`: the run goes on from there.

        Also what could not be written, because what it is about is lost.
        """
        self._waiting.clear()
        self._history[:] = [line for line in self._history if line["step"] <= step]
        if self._dump is not None:
            self._dump.remove_after(step)

    def _write_step(
        self, line: dict[str, Any], batch: RolloutBatch, trained: TrainedStep, comparable: bool
    ) -> None:
        step, version = line["step"], line["weight_version"]
        # All of it is in the file; kept here it would fill the driver of a long run.
        self._history.append(without_slices(line))
        if len(self._history) > _STEPS_KEPT:
            del self._history[1]
        self._files.log_step(line)
        self._console.step(line, self._config.total_updates)
        if self._wandb is not None:
            self._wandb.log(line, step=step)
        if self._dump is not None:
            self._dump.write(step, self._dumped(batch, trained), trainer_version=version)
        # After an update the step's own log-probs come from newer weights than the samples.
        if trained.seen is not None and (comparable or "log_probs" in batch):
            self._watch.check(step, seen_columns(batch, trained), version, trained.live_routes)
        # After the watch: rewards mean nothing while engine and trainer disagree.
        if len(self._history) == _STEPS_JUDGED:
            for finding in learning_findings(self._history, self._config):
                self._console.log(f"step {step}: {finding}")
        self._note_skipped(step, trained.skipped, searching=trained.overflow)

    def _dumped(self, batch: RolloutBatch, trained: TrainedStep) -> dict[str, Any]:
        """The columns of a dump."""
        current: dict[str, Any] = {}
        if trained.log_probs is not None:
            own = batch.with_column("log_probs", trained.log_probs)
            current["cur_log_probs"] = only(own, "log_probs").columns["log_probs"]
            batch = batch if "log_probs" in batch else own
        # What is not written is not fetched: it may be far heavier.
        written = {*SCALARS, *LISTS, *(ROUTES if self._config.dump_routes else ())}
        names = [name for name in batch.columns if name in written]
        return {**only(batch, *names).columns, **current}

    def _note_skipped(self, step: int, cause: str | None, *, searching: bool = False) -> None:
        """Report a step that changed nothing; a `TrainingError` after too many in a row.

        searching: the dynamic loss scale is still being lowered, which stops on its own
        """
        if cause is None:
            self._skipped_in_a_row = 0
            return
        self._console.log(f"step {step} was skipped: {cause}")
        if searching:
            return
        self._skipped_in_a_row += 1
        found = Finding(
            "steps were skipped",
            "error",
            cause,
            "a value that is not finite reached the gradient, or the gradient exploded",
            "fix what the evidence names",
            detector="skipped_step",
        )
        self._files.log_findings(step, [found])
        if self._skipped_in_a_row >= self._config.max_skipped_steps:
            saved = self._checkpoints.newest() is not None
            raise TrainingError(
                f"the last {self._skipped_in_a_row} steps were skipped, the limit of "
                f"--max-skipped-steps; the last one: {cause}. Repair that and "
                f"{'go on from the last checkpoint with --resume' if saved else 'start again'}"
            )


def seen_columns(batch: RolloutBatch, trained: TrainedStep) -> dict[str, Any]:
    """What the detectors look at: some samples, and routes of those that the trainer's are of."""
    assert trained.seen is not None
    columns = dict(fetched(trained.seen).columns)
    if trained.live_routes is not None:
        first = batch.select(np.arange(len(trained.live_routes)))
        name = "rollout_routed_experts"
        columns[name] = only(first, name).columns[name]
    return columns


class MismatchWatch:
    """Runs the detectors at every step: findings go to a file, new ones to the console."""

    def __init__(self, config: JobConfig, files: RunFiles, log: Callable[[str], None]) -> None:
        self._detectors = MismatchDetectors(config=config)
        self._counts: Counter[str] = Counter()
        self._on, self._stops = config.detect_mismatch, config.on_finding == "stop"
        self._files, self._log = files, log

    def check(
        self,
        step: int,
        columns: Mapping[str, Sequence[Any]],
        trainer_version: int,
        live_routes: Sequence[Any] | None = None,
    ) -> None:
        """Check one step; columns as in `RolloutBatch`, with the trainer's `log_probs`.

        A `FindingError` for an unmistakable finding, with --on-finding stop.

        live_routes: the trainer's own choices of experts for the first samples
        """
        if live_routes is not None:
            columns = {**columns, "train_routed_experts": live_routes}
        if not self._on or "rollout_log_probs" not in columns:
            return
        findings = self._detectors.check(columns, step=step, trainer_version=trainer_version)
        self._files.log_findings(step, findings)
        self._counts.update(finding.detector for finding in findings)
        for finding in findings:
            if finding.unmistakable and self._stops:
                raise FindingError(f"step {step}: {finding.text}")
        for finding in self._detectors.news(findings, step):
            times = self._counts[finding.detector]
            again = f"again ({times} times so far): {finding.title}"
            self._log(f"step {step}: {finding if times == 1 else again}")


def readable_samples(
    rollouts: Rollouts,
    parts: Mapping[str, NDArray[np.float64]],
    prompts: Sequence[int],
    tokenizer: Any,
    count: int,
    seed: str,
) -> list[dict[str, Any]]:
    """At most `count` samples as samples.jsonl holds them: in turn the best, the worst, a random.

    The text is of a trajectory's last sample.

    parts: [M] of every reward before its weight; prompts: the number of each group's prompt
    """
    found = []
    for kind, i in chosen(rollouts.rewards, count, seed):
        last = int(rollouts.sample_starts[i] + rollouts.samples[i] - 1)
        tokens = rollouts.batch.columns["unconcat_tokens"][last].tolist()
        length = int(rollouts.batch.columns["response_lengths"][last])
        found.append(
            {
                "kind": kind,
                "prompt_index": int(prompts[int(rollouts.groups[i])]),
                "reward": float(rollouts.rewards[i]),
                "rewards": {name: float(values[i]) for name, values in parts.items()},
                "truncated": bool(rollouts.truncated[i]),
                "weight_version": int(rollouts.oldest_version[i]),
                "tokens": length,
                "prompt": _text(tokenizer, tokens[: len(tokens) - length]),
                "response": _text(tokenizer, tokens[len(tokens) - length :]),
            }
        )
    return found


def chosen(rewards: NDArray[np.float64], count: int, seed: str) -> list[tuple[str, int]]:
    """Kinds and numbers of different trajectories: best, worst, random, best, ..."""
    order = [int(i) for i in np.argsort(rewards, kind="stable")]
    draw = random.Random(f"samples/{seed}")
    found: list[tuple[str, int]] = []
    while order and len(found) < count:
        kind = ("best", "worst", "random")[len(found) % 3]
        place = {"best": -1, "worst": 0, "random": draw.randrange(len(order))}[kind]
        found.append((kind, order.pop(place)))
    return found


def _text(tokenizer: Any, tokens: list[int]) -> str:
    try:
        text = str(tokenizer.decode(tokens))
    except Exception:  # of whatever tokenizer; ids that it does not know are still readable
        text = " ".join(map(str, tokens))
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
