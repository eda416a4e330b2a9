"""A whole job: checks, Ray, ranks and engines, the training loop, and the report at its end."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from plugin.cluster.engine_pool import EnginePool
from plugin.cluster.placement import on_this_machine, plan_on_cluster, reserve
from plugin.cluster.ray_cluster import cluster, object_stores, spill_directory
from plugin.cluster.reward_nodes import RewardNodes
from plugin.cluster.trainer_actor import teacher_policy
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.config.device_defaults import engine_dtype
from plugin.controller.interrupts import Interrupts, ignored_interrupts
from plugin.controller.preflight.job_checks import JobParts, check_job
from plugin.controller.preflight.resource_checks import (
    RayMachine,
    rollout_bytes,
    store_warnings,
)
from plugin.controller.run_directory import (
    CHECKPOINTS,
    RunCheckpoints,
    changed_settings,
    check_run_dir,
    claimed_run_dir,
    earlier_history,
)
from plugin.controller.training_loop import TrainingLoop
from plugin.controller.weight_sync import WeightSync
from plugin.environments.multi_turn import OpeningPrompts
from plugin.observe.console import Console
from plugin.observe.run_files import RunFiles, new_run_dir
from plugin.rewards.pool import PoolScorer
from plugin.rewards.scorers import Scorer, make_scorer

#: Of weights, in bytes a second, from a file system that many nodes read; and what vLLM and SGLang
#: take to compile and to capture graphs of a large model. Generous: a stuck start is the exception.
_SLOWEST_READ, _CAPTURE_SECONDS = 100e6, 600.0


@dataclass
class JobResult:
    """How a job ended.

    history: the metrics of the first and the latest steps, without their slices by position, age
        and probability
    evaluations: what metrics.jsonl has of them
    checkpoint: the newest one; best_checkpoint: that of --keep-best
    """

    run_dir: Path
    history: list[dict[str, Any]]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False
    checkpoint: Path | None = None
    best_checkpoint: Path | None = None


def run_job(
    config: JobConfig,
    console: Console | None = None,
    connected: Callable[[], None] | None = None,
    ended: Callable[[JobResult], None] = lambda _: None,
    begun: Callable[[Path], None] = lambda _: None,
) -> JobResult:
    """Run a whole job; Ctrl-C ends it early with its report written.

    connected: waits for the `cluster` that the caller has begun to start; none = start one
    ended: called with the result, also when the job ends in an error
    begun: called with the run directory once it is this job's
    """
    if connected is None:
        with cluster(config) as connected:
            return run_job(config, console, connected, ended, begun)
    console = console or Console()
    asked = config.colocate
    config = on_this_machine(config.with_absolute_paths(), gpus=torch.cuda.device_count())
    run_dir = Path(config.run_dir) if config.run_dir else new_run_dir(config.name)
    check_run_dir(run_dir, config)
    if config.colocate and not asked:
        console.log(
            f"--colocate: {torch.cuda.device_count()} GPUs for {config.world_size} ranks and "
            f"{config.num_rollout_engines} engines of {config.rollout_num_gpus_per_engine}, which "
            "take turns"
        )
    with console.phase("checking the job"):
        parts = check_job(config, console.log)
    if parts.data is not None:
        config = _with_epochs(config, len(parts.data))
    with claimed_run_dir(run_dir, config):
        begun(run_dir)
        result = JobResult(run_dir, [])
        _run_in(result, config, parts, console, connected, ended)
        return result


def _with_epochs(config: JobConfig, rows: int) -> JobConfig:
    """The config with --num-epochs turned into a number of rollouts."""
    if config.num_epochs is None:
        return config
    rollouts = max(1, math.ceil(config.num_epochs * rows / config.rollout_batch_size))
    return replace(config, num_rollouts=rollouts, num_epochs=None)


def _run_in(
    result: JobResult,
    config: JobConfig,
    parts: JobParts,
    console: Console,
    connected: Callable[[], None],
    ended: Callable[[JobResult], None],
) -> None:
    run_dir = result.run_dir
    if config.resumes:
        result.history, result.evaluations, problems = earlier_history(run_dir)
        for problem in problems:
            console.warn(problem)
        for change in changed_settings(run_dir, config):
            console.log(f"resumed with another setting: {change}")
    # How this part of the run was started is no setting of the run.
    settings = config.as_dict() | {"resume": False, "resume_from": None, "overwrite": False}
    files = RunFiles(run_dir, settings)
    checkpoints = RunCheckpoints((run_dir / CHECKPOINTS).resolve())
    interrupts = Interrupts(console.log)

    @functools.cache
    def finish() -> None:
        """Write the report and say how the job ended; once."""
        with ignored_interrupts():
            result.checkpoint, result.best_checkpoint = checkpoints.newest(), checkpoints.best()
            if result.history:
                files.write_report()
            files.close()
            ended(result)

    try:
        with (
            contextlib.closing(_scorer(config, parts, console)) as scorer,
            _running(config, parts, run_dir, console, connected, interrupts, scorer) as running,
        ):
            config, trainer, engines, weights = running
            console.log(
                f"trainer ranks: {trainer.places_as_text()}; engines: {len(engines)}; started in "
                f"{time.monotonic() - console.began:.0f} s; run directory: {run_dir}"
            )
            loop = TrainingLoop(
                *(config, parts, trainer, engines, weights, scorer),
                *(files, checkpoints, console, result.history, result.evaluations),
            )
            try:
                loop.run(interrupts)
            except KeyboardInterrupt:
                result.interrupted = True
                console.log("interrupted")
            finally:
                # A signal to the whole process group kills Ray, too: ending the actors may then
                # fail, or take a minute.
                finish()
    except KeyboardInterrupt:
        if not result.interrupted:
            result.interrupted = True
            console.log("interrupted")
    finally:
        finish()


def load_timeout(config: JobConfig, nbytes: int, *, on_gpus: bool) -> float:
    """Seconds that an engine or a model of `nbytes` may take to start; see --load-timeout."""
    if config.load_timeout is not None:
        return config.load_timeout
    compiles = on_gpus and config.engine_traits.package is not None
    return config.start_timeout + nbytes / _SLOWEST_READ + _CAPTURE_SECONDS * compiles


def _scorer(config: JobConfig, parts: JobParts, console: Console) -> Scorer:
    """Who scores; on this machine its processes start while Ray does, on a cluster after that."""
    if config.address is None:
        return make_scorer(config, parts.task)
    return make_scorer(config, parts.task, functools.partial(RewardNodes, console))


@contextlib.contextmanager
def _running(
    config: JobConfig,
    parts: JobParts,
    run_dir: Path,
    console: Console,
    connected: Callable[[], None],
    interrupts: Interrupts,
    scorer: Scorer,
) -> Iterator[tuple[JobConfig, TrainerGroup, EnginePool, WeightSync]]:
    """Start the ranks and engines of a job, and end them whatever happens.

    Yields the configuration with the engines' dtype resolved.
    """
    with console.phase("starting Ray"):
        connected()
    # The handler comes after Ray's own, which ends the process without a word.
    with interrupts.handled(), contextlib.ExitStack() as cleanup:
        has_environments = isinstance(parts.task, OpeningPrompts)
        plan = plan_on_cluster(config, has_environments=has_environments)
        needed = rollout_bytes(config, parts.route_shape)
        machine = RayMachine.here(spill_directory())
        for warning in store_warnings(config, needed, object_stores(), machine):
            console.warn(warning)
        config = config.unchecked_copy(
            rollout_dtype=engine_dtype(config, cuda=plan.uses_gpus),
            load_timeout=load_timeout(config, parts.policy.nbytes, on_gpus=plan.uses_gpus),
        )
        reservation = reserve(plan, config.start_timeout)
        cleanup.callback(reservation.release)
        if isinstance(scorer, PoolScorer) and isinstance(scorer.pool, RewardNodes):
            by_others = config.reward_workers == "auto"
            scorer.pool.begin(reservation.cpus_left(by_others=by_others))
        trainer = TrainerGroup(config, plan, reservation, console)
        cleanup.callback(trainer.close)
        # Servers write their logs there.
        of_engines = config.unchecked_copy(run_dir=str(run_dir.resolve()))
        if config.colocate:
            trainer.join()
        engines = EnginePool(
            *(of_engines, parts.policy.hf_config, plan, reservation, console),
            trainer_places=lambda: trainer.places,
        )
        cleanup.callback(engines.close)
        if config.colocate:
            # An engine measures what memory is free when it starts, so the trainer comes after it.
            with console.phase("waiting for engines"):
                engines.wait_until_ready()
                engines.sleep(config.colocate_sleep_level)
        else:
            with console.phase(f"starting ranks ({config.world_size})"):
                trainer.join()
        with console.phase("building models"):
            trainer.build("policy", parts.policy)
            if parts.reference is not None and not config.reference_is_base:
                trainer.build("reference", parts.reference)
            for name, teacher in parts.teachers.items():
                trainer.build(teacher_policy(name), teacher)
            if parts.critic is not None:
                trainer.build("critic", parts.critic)
        with console.phase("waiting for engines"):
            engines.wait_until_ready()
        weights = WeightSync(config, trainer, engines, console)
        cleanup.callback(weights.close)
        yield config, trainer, engines, weights
