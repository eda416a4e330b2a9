"""`megatron-tis train`: run a job. Nothing heavy is imported before the arguments are read."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from plugin.config import JobConfig
from plugin.controller.driver_process import (
    DriverEnd,
    DriverPipe,
    fork_driver,
    newest_checkpoints,
)
from plugin.errors import (
    ConfigError,
    FindingError,
    HookLoadError,
    MegatronTisError,
    ParallelError,
    shortened,
)
from plugin.observe.console import Console, capture_warnings

if TYPE_CHECKING:
    from plugin.controller.job import JobResult

#: What most people set; `--help-all` shows the rest.
COMMON_FLAGS = JobConfig.common_flags("train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One argument per setting, and the YAML file below them."""
    parser.usage = "megatron-tis train [-h | --help-all] [--config FILE] [--FLAG VALUE ...]"
    parser.epilog = "These are the flags that most people set; --help-all shows every flag."
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings; flags on the command line win"
    )
    JobConfig.add_arguments(parser, in_short_help=COMMON_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 on success, 2 for a usage error, 1 for a failure, 130 after Ctrl-C.

    A job whose steps were all skipped or without gradient has failed.
    """
    _require_working_directory()
    pipe: DriverPipe | DriverEnd = DriverPipe()
    if getattr(args, "owns_process", False):
        pipe = fork_driver()
    if isinstance(pipe, DriverEnd):
        return pipe.code if "ended" in pipe.said else _tell_end(pipe)
    try:
        return _drive(args, pipe)
    finally:
        pipe.tell(ended=True)


def _require_working_directory() -> None:
    """Refuse to start where libraries that the job loads would end the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory is gone ({error.strerror}); change to one that exists"
        ) from error


def _tell_end(end: DriverEnd) -> int:
    """Say for a driver that could not how the job ended, and write its report."""
    console = Console()
    if "run_dir" in end.said:
        from plugin.controller.job import JobResult
        from plugin.controller.run_directory import earlier_history
        from plugin.observe.html_report import write_report

        run_dir = Path(end.said["run_dir"])
        try:
            history, evaluations, _ = earlier_history(run_dir)
            result = JobResult(run_dir, history, evaluations, True, *newest_checkpoints(run_dir))
            if history:
                write_report([run_dir], run_dir / "report.html", force=True)
            config = JobConfig.from_sources({}, run_dir / "config.yaml")
            _summarize(result, config, console, finished=False, advises=False)
        except (MegatronTisError, OSError) as error:
            console.error(str(error))
    console.error(end.cause)
    return 1


def _drive(args: argparse.Namespace, pipe: DriverPipe) -> int:
    console = Console()
    flags = JobConfig.given_in(args)
    with capture_warnings(console.warn):
        try:
            config = JobConfig.from_sources(flags, getattr(args, "config", None))
            from plugin.cluster.ray_cluster import cluster

            # Ray starts while torch is imported and the job is checked.
            with cluster(config, _last_words(pipe, console)) as connected:
                return _run(config, console, connected, args, pipe)
        except MegatronTisError as error:
            return _report_error(error, console, args)


def _last_words(pipe: DriverPipe, console: Console) -> Callable[[str], None]:
    """What the driver does when Ray is gone: no call of it would return."""

    def lost(cause: str) -> None:
        from plugin.cluster.ray_cluster import end_process

        if pipe.is_read:
            pipe.tell(cause=cause)
        else:
            console.error(cause)
        end_process(1)

    return lost


def _run(
    config: JobConfig,
    console: Console,
    connected: Callable[[], None],
    args: argparse.Namespace,
    pipe: DriverPipe,
) -> int:
    from plugin.cluster.ray_cluster import end_process, private_ray_is_gone

    owns_process = getattr(args, "owns_process", False)
    results: list[JobResult] = []

    def ended(result: JobResult) -> None:
        results.append(result)
        if result.interrupted:
            _summarize(result, config, console, finished=False)
            if owns_process and private_ray_is_gone():
                pipe.tell(ended=True)
                end_process(130)

    try:
        with console.phase("loading torch"):
            from plugin.controller.job import run_job
        result = run_job(
            *(config, console, connected, ended),
            lambda run_dir: pipe.tell(run_dir=str(run_dir.resolve())),
        )
    except FindingError as error:
        # Before the summary: it explains the rewards.
        code = _report_error(error, console, args)
        for result in results:
            _summarize(result, config, console, finished=False, advises=False)
        return code
    except MegatronTisError as error:
        for result in results:
            if not result.interrupted:
                _summarize(result, config, console, finished=False)
        if isinstance(error, ParallelError):
            raise  # through the cluster, which then keeps Ray's logs
        # Here, so that it is shown before Ray shuts down.
        code = _report_error(error, console, args)
        if owns_process and not results:
            pipe.tell(ended=True)
            end_process(code)
        return code
    if result.interrupted:
        # Only Ray's shutdown is left.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130
    return 0 if _summarize(result, config, console) else 1


def _summarize(
    result: JobResult,
    config: JobConfig,
    console: Console,
    *,
    finished: bool = True,
    advises: bool = True,
) -> bool:
    """Log progress and where the weights are; return whether any step was applied.

    advises: also log why nothing was learned, if so
    """
    learned = True
    if result.history:
        learned = _log_learning(result, config, console, advises=advises)
    if result.evaluations:
        from plugin.controller.evaluation import describe

        console.log(
            f"last evaluation, after rollout {result.evaluations[-1]['rollout']}: "
            f"{describe(result.evaluations[-1])}"
        )
    if result.best_checkpoint is not None:
        console.log(f"best checkpoint: {result.best_checkpoint} (--checkpoint best)")
    if result.checkpoint is not None:
        longer = f" --num-rollouts {2 * config.num_rollouts}"
        if config.num_epochs is not None:
            longer = f" --num-epochs {2 * config.num_epochs:g}"
        more, run_dir = longer if finished else "", shlex.quote(str(result.run_dir))
        console.log(
            f"weights: {result.checkpoint}\n"
            f"  go on:  megatron-tis train --config {run_dir}/config.yaml --run-dir {run_dir} "
            f"--resume{more}\n"
            f"  export: megatron-tis export {run_dir} {run_dir}/model_{result.checkpoint.name}"
        )
    return learned


def _log_learning(result: JobResult, config: JobConfig, console: Console, *, advises: bool) -> bool:
    from plugin.observe.learning import any_step_applied, learning_findings
    from plugin.observe.run_record import unmistakable_titles

    first, last = result.history[0], result.history[-1]
    skipped = int(last.get("skipped_steps") or 0)
    console.log(
        f"reward {first['reward']:.3f} -> {last['reward']:.3f} in {last['step']} steps"
        f"{f', {skipped} of them skipped' if skipped else ''}; "
        f"report: {result.run_dir / 'report.html'}"
    )
    if advises:
        for title in unmistakable_titles(result.run_dir):
            console.log(f"error: {title}; megatron-tis doctor {result.run_dir} shows it again")
        for finding in learning_findings(result.history, config):
            console.log(str(finding))
    return any_step_applied(result.history)


def _report_error(error: MegatronTisError, console: Console, args: argparse.Namespace) -> int:
    if getattr(args, "traceback", False):
        raise error
    console.error(shortened(str(error)))
    return 2 if isinstance(error, (ConfigError, HookLoadError)) else 1
