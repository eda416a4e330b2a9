"""The loop of a job on its driver: rollouts, advantages, log-prob passes, updates, weight sync.

Synchronous: engines generate, then the trainer trains, in turn. Asynchronous: the engines go on
generating with the weights they have while the trainer works; the queue bounds how old those may
be. A lost engine is replaced by the engine pool; a lost trainer rank sends the whole job back to
its last checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plugin.batch_types import RolloutBatch
from plugin.cluster.engine_pool import EnginePool
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.controller.batch import (
    describe_batch,
    first_epoch,
    mini_batches,
    prepare_batch,
    without_old_tokens,
)
from plugin.controller.evaluation import Evaluations, Evaluator, describe
from plugin.controller.interrupts import Interrupts
from plugin.controller.passes import CriticSteps, LogProbPasses, Teachers
from plugin.controller.preflight.job_checks import JobParts
from plugin.controller.queue.group_journal import GroupJournal, remove_journal
from plugin.controller.queue.groups import Group, joined, reward_parts
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.controller.run_directory import (
    MODEL,
    MODELS,
    RunCheckpoints,
    evaluation_scores,
    find_checkpoint,
    group_key,
    warn_of_other_rows,
)
from plugin.controller.shared_devices import OwnDevices, SharedDevices, Turn
from plugin.controller.step_records import StepRecords, readable_samples
from plugin.controller.weight_sync import WeightSync
from plugin.controller.weight_verification import WeightVerification
from plugin.errors import (
    ActorLost,
    BatchError,
    BatchLost,
    FindingError,
    MegatronTisError,
    ParallelError,
    TrainingError,
)
from plugin.loss.entropy_control import EntropyBonus
from plugin.megatron_backend.checkpoint.directory import set_aside_later, step_of
from plugin.observe.console import Console
from plugin.observe.run_files import RunFiles
from plugin.rewards.scorers import Scorer, scorer_for

#: What ends a job because of the groups it has, which a resumed one must not train on.
_OF_GROUPS = (BatchError, FindingError, TrainingError)


@dataclass
class Position:
    """Rollouts trained on, optimizer updates made, and the version of the trainer's weights.

    skipped, critic_skipped: of the updates, those that changed nothing
    entropy_coef: of the bonus that holds the entropy at a target, None before the first update;
        entropy_below: whether the entropy was below it
    """

    rollouts: int = 0
    updates: int = 0
    version: int = 0
    skipped: int = 0
    critic_skipped: int = 0
    entropy_coef: float | None = None
    entropy_below: bool = True


class TrainingLoop:
    """The loop of one run and its state between steps.

    history, evaluations: what the job has of steps and evaluations so far; both are added to
    """

    def __init__(
        self,
        config: JobConfig,
        parts: JobParts,
        trainer: TrainerGroup,
        engines: EnginePool,
        weights: WeightSync,
        scorer: Scorer,
        files: RunFiles,
        checkpoints: RunCheckpoints,
        console: Console,
        history: list[dict[str, Any]],
        evaluations: list[dict[str, Any]],
    ) -> None:
        self._config, self._parts, self._trainer, self._engines = config, parts, trainer, engines
        self._weights = weights
        self._files, self._console = files, console
        self._records = StepRecords(config, files, checkpoints, console, history)
        evaluator = Evaluator(
            *(config, parts.eval_sets, engines, parts.sampling, console.log),
            scorer_of=lambda task: scorer_for(task, scorer, config),
        )
        self._evaluations = Evaluations(config, evaluator, evaluations)
        self._devices: SharedDevices | OwnDevices = OwnDevices()
        if config.colocate:
            self._devices = SharedDevices(trainer, engines, config.colocate_sleep_level)
        self._journal = self._make_journal() if config.keeps_group_journal else None
        if self._journal is None or not config.resumes:
            remove_journal(files.run_dir)
        self._queue = RolloutQueue(
            *(parts.task, engines, parts.sampling, config, console.log, scorer),
            journal=self._journal,
        )
        self._start_of_queue = self._queue.state()
        self._checkpoints = checkpoints
        self._at = Position()
        # What a checkpoint would hold now; None while the trainer's weights are between rollouts.
        self._boundary: dict[str, Any] | None = None
        self._reach_boundary()
        self._saved = 0
        self._writes = False  # whether a checkpoint may still be being written
        self._restarts, self._restarts_in_a_row, self._furthest = 0, 0, -1
        teachers = Teachers.of(config, parts, trainer) if config.teacher_specs else None
        self._log_prob_passes = LogProbPasses(config, parts, trainer, teachers)
        self._critic = CriticSteps(config, trainer) if parts.critic is not None else None
        self._verification = WeightVerification(
            config, parts, trainer, engines, weights, files, console
        )

    def run(self, interrupts: Interrupts) -> None:
        """Run the remaining rollouts; an interrupted job is saved where it is."""
        try:
            self._train(interrupts)
        except KeyboardInterrupt:
            if self._config.saves_at_end:
                self._save_interrupted()
            self._finish_save_of_ended_job()
            raise
        except ParallelError:
            raise  # the ranks, or some of them, are gone
        except MegatronTisError as error:
            if self._journal is not None and isinstance(error, _OF_GROUPS):
                self._journal.replace([])
            self._finish_save_of_ended_job()
            raise

    def _make_journal(self) -> GroupJournal:
        config = self._config
        return GroupJournal(
            self._files.run_dir,
            group_key(config, self._parts.data),
            # The batch in training, those before it that groups may be as old as, and the next.
            config.staleness_limit + 2,
            self._console.warn,
            proven=lambda: self._engines.all_verified,
        )

    def _train(self, interrupts: Interrupts) -> None:
        """Run the remaining rollouts, surviving lost engines and trainer ranks."""
        if self._config.resumes:
            self._resume()
        else:
            with self._console.phase("sending the first weights"):
                self._send_weights(wait=True)
        self._engines.require_version(self._at.version)
        if self._config.async_rollouts:
            self._trainer.while_waiting(self._queue.pump)
        finished = False
        while not finished:
            try:
                self._evaluate_if_due()
                finished = self._at.rollouts >= self._config.num_rollouts
                if finished:
                    self._finish_save()
                else:
                    self._one_rollout(interrupts)
            except ParallelError as error:
                self._recover(error)
                finished = False
        if self._config.save_hf:
            self._save_hf(MODEL, replace=self._config.resumes)

    def _save_hf(self, name: str, *, replace: bool) -> None:
        self._devices.train()
        target = self._files.run_dir / name
        self._trainer.save_hf(str(target.resolve()), self._config.hf_checkpoint, replace=replace)
        self._console.log(f"model written to {target}")

    def _evaluation_is_due(self) -> bool:
        return bool(self._config.eval_data) and self._evaluations.is_due(self._at.rollouts)

    def _evaluate_if_due(self) -> None:
        """Evaluate between two rollouts; with --keep-best the best weights so far are saved."""
        if not self._evaluation_is_due():
            return
        at = self._at
        self._let_engines_generate()
        if not self._config.colocate:  # otherwise the trainer has no memory now
            self._verification.check(at.version, at.updates)
        with self._weights.trainer_holds_still(self._devices.sending):
            self._queue.settle()
            self._repair_best()
            record = self._evaluations.run(at.updates, at.rollouts, at.version)
        self._records.log_evaluation(record, at.updates)
        self._console.log(f"evaluation after rollout {at.rollouts}: {describe(record)}")
        best = self._checkpoints.best()
        if not self._config.keep_best or at.rollouts == 0:
            return
        if self._evaluations.last_is_best(None if best is None else step_of(best)):
            if at.rollouts > self._saved:
                self._save()
            self._finish_save()
            self._checkpoints.mark_best(at.updates)

    def _repair_best(self) -> None:
        """Before something relies on the marker of the best checkpoint, above all a removal."""
        if self._config.keep_best:
            scores = evaluation_scores(self._config, self._evaluations.records)
            if (warning := self._checkpoints.repair_best(scores)) is not None:
                self._console.warn(warning)

    def _let_engines_generate(self) -> None:
        """Have the engines hold the newest weights, and on shared devices their memory."""
        if self._weights.version != self._at.version or self._devices.turn is not Turn.GENERATING:
            self._send_weights(wait=True)

    def _one_rollout(self, interrupts: Interrupts) -> None:
        began = time.monotonic()
        if self._config.colocate:
            self._let_engines_generate()
        with self._weights.trainer_holds_still(self._devices.sending):
            groups = self._queue.take(self._at.version)
        with contextlib.ExitStack() as stack:
            if self._config.saves_at_end:
                until = "the job ends and saves after the training on this rollout"
                stack.enter_context(interrupts.held_back(until))
            try:
                self._train_on(groups, began)
                self._save_if_due()
                self._go_on_generating()
            finally:
                self._records.write()

    def _train_on(self, groups: list[Group], began: float) -> None:
        """Train on a rollout."""
        config, self._boundary = self._config, None
        if config.colocate:
            self._queue.settle()
            self._devices.train()
        self._queue.pump()
        generated = time.monotonic()
        self._verification.check(self._at.version, self._at.updates)
        if self._journal is not None:
            self._journal.write()
        rollouts, masked = joined(groups), {}
        if config.max_token_staleness is not None:
            oldest = self._at.version - config.max_token_staleness
            rollouts, masked["stale_token_share"] = without_old_tokens(rollouts, oldest)
        parts = reward_parts(groups)
        batch = prepare_batch(config, rollouts, self._parts.route_shape, parts)
        described = describe_batch(config, batch, rollouts, self._at.version) | masked
        described |= {f"reward/{name}": float(values.mean()) for name, values in parts.items()}
        trained, rollout = [group.index for group in groups], self._at.rollouts
        if config.log_samples:
            self._records.log_samples(
                self._at.updates + 1,
                lambda: readable_samples(
                    *(rollouts, parts, trained, self._parts.tokenizer),
                    *(config.log_samples, f"{config.seed}/{rollout}"),
                ),
            )
        updates = mini_batches(config, rollouts, self._at.rollouts)
        batch = self._trainer.stored(batch, first_epoch(updates))
        timings = {
            "seconds_waiting": generated - began,
            "seconds_preparing": time.monotonic() - generated,
            **self._weights.metrics(),
        }
        if self._critic is not None:
            batch, of_critic = self._critic.added_to(batch, rollouts, updates)
            described |= of_critic
        batch, passes = self._log_prob_passes.added_to(batch, updates, trained)
        timings |= passes
        applied = 0
        for update in updates:
            place = {"update_epoch": update.epoch, "mini_batch": update.number}
            progress = applied / len(updates)
            applied += self._one_update(
                update.of(batch), progress, described | timings | place, began
            )
            began, timings = time.monotonic(), {}
            if update is not updates[-1]:
                self._records.write()
        self._records.log_prompts(rollout, trained, self._queue.take_dropped())
        self._at.rollouts += 1
        self._at.version += 1
        self._reach_boundary()

    def _save_if_due(self) -> None:
        """Write a checkpoint and a model if they are due."""
        config, rollouts = self._config, self._at.rollouts
        last = rollouts == config.num_rollouts
        due = config.save_interval and rollouts % config.save_interval == 0
        due = due or (last and config.saves_at_end)
        hf_due = config.save_hf_interval and rollouts % config.save_hf_interval == 0
        if due or hf_due:
            # A run that goes on from this checkpoint does not repeat the steps before it, and a
            # finding that ends the job keeps these weights from being saved.
            self._records.write()
        if due:
            self._save()
        if hf_due and not (last and config.save_hf):
            # One of the same step is this run's own, from before it went back to a checkpoint.
            self._save_hf(f"{MODELS}/step_{self._at.updates:07d}", replace=True)

    def _go_on_generating(self) -> None:
        """Send the weights to the engines and, where these only wait for prompts, the next prompts.

        What is recorded of the rollout is written while they are at work.
        """
        config = self._config
        if self._at.rollouts == config.num_rollouts:
            return
        self._send_weights(wait=not config.async_rollouts)
        if not (config.async_rollouts or config.colocate or self._evaluation_is_due()):
            self._queue.begin()

    def _reach_boundary(self) -> None:
        # Prompts and seeds follow from numbers, so there is no generator state to save.
        self._boundary = {"position": asdict(self._at), "queue": self._queue.state()}
        if self._parts.data is not None:
            self._boundary["data"] = self._parts.data.fingerprint

    def _save(self) -> None:
        assert self._boundary is not None
        self._devices.train()
        self._finish_save()
        self._repair_best()
        self._checkpoints.add(self._at.updates)
        root = str(self._checkpoints.root)
        self._trainer.save_checkpoint(root, self._at.updates, self._boundary)
        self._saved, self._writes = self._at.rollouts, self._config.async_save

    def _finish_save(self) -> None:
        """Wait until the last checkpoint is there; raises why it is not."""
        if self._writes:
            self._writes = False
            self._trainer.finish_checkpoint()

    def _finish_save_of_ended_job(self) -> None:
        """As `_finish_save`, for a job that ends for another reason."""
        try:
            self._finish_save()
        except MegatronTisError as error:
            self._console.error(f"the last checkpoint is not saved: {error}")

    def _save_interrupted(self) -> None:
        """Save the weights after the last whole rollout, unless that has been done."""
        if self._boundary is None:
            self._console.log("what was trained since the last checkpoint is not saved")
        elif self._at.rollouts > self._saved:
            self._console.log(f"saves the weights after rollout {self._at.rollouts}")
            # Engines on shared devices sleep only when nothing is under way.
            self._engines.forget()
            try:
                self._save()
            except MegatronTisError as error:
                self._console.error(f"the weights are not saved: {error}")

    def _entropy_bonus(self) -> EntropyBonus | None:
        """That of the next update, if there is an entropy to hold."""
        if self._config.entropy_target is None:
            return None
        if self._at.entropy_coef is None:
            return EntropyBonus(self._config.entropy_coef)
        return EntropyBonus(self._at.entropy_coef, self._at.entropy_below)

    def _one_update(
        self, batch: RolloutBatch, progress: float, described: dict[str, float], began: float
    ) -> bool:
        """Train on a mini-batch; return whether the weights were changed.

        progress: share of the rollout's updates that have been made
        """
        started = time.monotonic()
        # As in Megatron, a skipped step does not move the schedule.
        rate = learning_rate(self._config, self._at.updates - self._at.skipped)
        if self._critic is not None:
            of_critic = self._critic.train(batch, self._at.updates - self._at.critic_skipped)
            self._at.critic_skipped += int(of_critic["critic/skipped"])
            described = described | of_critic
            if self._at.rollouts < self._config.num_critic_only_rollouts:
                rate = 0.0
        bonus = self._entropy_bonus()
        called = time.monotonic()
        trained = self._trainer.train(
            batch, self._at.version, progress, rate, None if bonus is None else bonus.in_force
        )
        held: dict[str, float] = {}
        if bonus is not None:
            held["entropy_coef"] = bonus.in_force
            bonus = bonus.after(trained.metrics.get("entropy_loss", math.nan), self._config)
            self._at.entropy_coef, self._at.entropy_below = bonus
        self._at.updates += 1
        self._at.skipped += trained.skipped is not None
        now = time.monotonic()
        tokens = int(batch.columns["response_lengths"].sum())
        epoch: dict[str, float] = {}
        if self._parts.data is not None:  # passes over --prompt-data, with the rows dropped
            asked = self._queue.counts.issued - self._queue.under_way
            epoch = {"epoch": asked / len(self._parts.data)}
        line = {
            "step": self._at.updates,
            "rollout": self._at.rollouts,
            "weight_version": self._at.version,
            "lr": rate,
            **held,
            "tokens_per_second": tokens / max(now - began, 1e-9),
            "seconds_training": now - started,
            "seconds_transport": now - called - trained.seconds,
            "seconds": now - began,
            **self._queue.metrics(),
            **epoch,
            "engine_restarts": self._engines.restarts,
            "rollout_engines": len(self._engines),
            "trainer_restarts": self._restarts,
            **described,
            **trained.metrics,
        }
        line["skipped"] = float(trained.skipped is not None)
        self._records.add(line, batch, trained, of_rollout_weights=progress == 0)
        return trained.skipped is None

    def _send_weights(self, *, wait: bool) -> None:
        with self._devices.sending():
            self._weights.send(self._at.version, wait=wait)

    def _recover(self, error: ParallelError) -> None:
        """Restart the trainer from its last checkpoint if it lost a rank; else raise `error`."""
        config = self._config
        while True:
            dead = self._trainer.dead_ranks()
            if not dead and not isinstance(error, ActorLost):
                raise error
            self._count_restart(error)
            who = ", ".join(dead) or str(error).splitlines()[0]
            self._console.log(f"the trainer is restarted, it lost {who}")
            self._boundary, self._writes = None, False
            try:
                if config.staleness_limit:  # what is generated may be trained on, see the queue
                    self._engines.keep_groups()
                else:
                    self._engines.forget()
                if isinstance(error, BatchLost):
                    self._queue.forget_stored()
                with self._devices.restarting():
                    self._trainer.restart()
                self._go_back_to_checkpoint(keeps_groups=config.staleness_limit > 0)
                return
            except ParallelError as again:
                error = again

    def _count_restart(self, error: ParallelError) -> None:
        """Raise `error` without checkpoints, or after too many restarts without a new rollout."""
        if self._config.save_interval is None and self._checkpoints.newest() is None:
            raise ParallelError(
                f"{error}\nThe job keeps no checkpoints and ends; with --save-interval it would "
                "restart from the last one"
            ) from error
        rollouts = self._at.rollouts
        if rollouts > self._furthest:
            self._restarts_in_a_row, self._furthest = 0, rollouts
        if self._restarts_in_a_row >= self._config.max_restarts:
            raise ParallelError(
                f"the trainer was restarted {self._restarts_in_a_row} times without getting "
                f"further than rollout {rollouts}, the limit of --max-restarts; the last error: "
                f"{error}"
            ) from error
        self._restarts_in_a_row += 1
        self._restarts += 1

    def _resume(self) -> None:
        """Resume from the requested checkpoint, or from the latest, if there is one."""
        chosen = find_checkpoint(self._checkpoints.root, self._config.resume_from)
        if chosen is not None:
            self._checkpoints.add_until(chosen)
        self._go_back_to_checkpoint(finished=self._journal.read() if self._journal else ())
        if chosen is not None and self._config.resume_from is not None:
            for path in set_aside_later(chosen):
                self._console.log(f"a checkpoint after {chosen.name} is kept as {path}")

    def _go_back_to_checkpoint(
        self, *, keeps_groups: bool = False, finished: Sequence[Group] = ()
    ) -> None:
        """Load the run's newest checkpoint, or start over if there is none yet.

        keeps_groups: of engines that the trainer did not take with it
        finished: groups of the journal
        """
        state: dict[str, Any] = {"position": {}, "queue": self._start_of_queue}
        newest = self._checkpoints.newest()
        if newest is not None:
            state = self._trainer.load_checkpoint(str(newest))
        warn_of_other_rows(self._parts.data, state, self._console.warn)
        self._at = Position(**state["position"])
        # A version names one set of weights: what was sent after the checkpoint keeps its number.
        self._at.version = max(self._at.version, self._weights.version + 1)
        last = max((group.last_version for group in finished), default=-1)
        if self._config.async_rollouts and last > self._at.version:
            self._at.version = last + 1
        kept = self._queue.restore(
            state["queue"],
            keep_for=self._at.version if keeps_groups or finished else None,
            finished=finished,
        )
        self._records.go_back(self._at.updates)
        self._evaluations.go_back(self._at.rollouts)
        self._console.log(
            f"goes on after rollout {self._at.rollouts} of {self._config.num_rollouts}"
            + f", keeps {kept} finished or running groups" * bool(kept)
        )
        self._send_weights(wait=True)
        self._saved = self._at.rollouts
        self._reach_boundary()


def learning_rate(config: JobConfig, update: int) -> float:
    """Warm-up, then constant or a decay from lr to min-lr over the job; `update` counts from 0."""
    if update < config.lr_warmup_steps:
        return config.lr * (update + 1) / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    decays = max(1, config.total_updates - config.lr_warmup_steps)
    done = min(1.0, (update - config.lr_warmup_steps) / decays)
    share = 1 - done if config.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * share
