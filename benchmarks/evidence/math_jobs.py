"""`python -m benchmarks.evidence.math_jobs`: the arithmetic task of the recipes with engines that are some rollouts behind.

What a job consists of, in one process: the package's trainer on Megatron-Core, its transformers engine, queue, rewards,
advantages, log-prob passes and evaluation, with the settings of examples/math_words/dapo.yaml. Asynchronous jobs bound
how old weights may be and get what the timing gives; here the engine is handed weights of an exact age instead.

It can be ended at any time and goes on where it was: every finished run is a line of `math_data.jsonl`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence.arms import ROLLOUT_KL, WIDE, Arm
from benchmarks.evidence.grid import Row, read_rows, record
from examples.math_words import make_data, warm_up
from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig
from plugin.controller.batch import describe_batch, mini_batches, prepare_batch
from plugin.controller.evaluation import Evaluator
from plugin.controller.local_engine import LocalEngine
from plugin.controller.passes import LogProbPasses
from plugin.controller.preflight.job_checks import check_job
from plugin.controller.queue.groups import joined
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.engines.choice import make_engine
from plugin.megatron_backend.parallel_groups import ParallelGroups, one_process
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.ragged import Ragged
from plugin.weights.buckets import pack_buckets

DATA = Path(__file__).with_name("math_data.jsonl")
RECIPE = Path(__file__).parents[2] / "examples/math_words/dapo.yaml"
#: Beyond the recipe: smaller batches and one update on each, so that staleness is all that differs.
CHANGED: dict[str, Any] = {
    "eps_clip_high": None,  # arms at their defaults
    "dynamic_sampling": False,
    "global_batch_size": None,
    "rollout_batch_size": 16,
    "num_rollouts": 24,
    "eval_interval": 6,
    "num_gpus_per_node": 1,
    "num_rollout_engines": 1,
    "save_hf": False,
    "detect_mismatch": False,
    "get_mismatch_metrics": True,
}
EVALUATED = 128
ARMS = (
    Arm("ppo"),
    Arm("ppo", "vanilla_tis"),
    Arm("ppo", "vanilla_tis", ROLLOUT_KL),
    Arm("reinforce", "off_policy_is", WIDE),
    Arm("reinforce", "off_policy_is"),
    Arm("icepop"),
    Arm("dppo_tv"),
    Arm("topr"),
)
#: What is kept of every rollout, by the name of the job's metric.
CURVES = {
    "reward": "reward",
    "mismatch_kl": "mismatch_kl",
    "ess_share": "mismatch/ess_share",
    "kept_share": "mismatch/kept_share",
    "grad_norm": "grad_norm",
}
#: In the order in which they are run.
STALENESS, SEEDS = (8, 16), (1, 2, 3)


@dataclass(frozen=True)
class MathRun:
    """One run of the suite."""

    arm: Arm
    staleness: int
    seed: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.arm.name, self.staleness, self.seed


def arms_at(staleness: int) -> tuple[Arm, ...]:
    """On the engine's own policy all arms are `ppo`."""
    return ARMS if staleness else ARMS[:1]


def runs() -> Iterator[MathRun]:
    """All runs, seed by seed: fresh samples and the first staleness, then the others."""
    for stage in ((0, STALENESS[0]), STALENESS[1:]):
        for seed in SEEDS:
            for staleness in stage:
                yield from (MathRun(arm, staleness, seed) for arm in arms_at(staleness))


def open_runs(path: Path = DATA) -> list[MathRun]:
    """Those that are still to be made, in order."""
    done = {(row["arm"], row["staleness"], row["seed"]) for row in read_rows(path)}
    return [one for one in runs() if one.key not in done]


def make_inputs(directory: Path) -> None:
    """Problems and the warmed-up model that all runs start from, unless they are there."""
    if not (directory / "model/config.json").is_file():
        make_data.main(["--output", str(directory), "--eval-rows", str(EVALUATED)])
        warm_up.main(["--data", str(directory), "--output", str(directory / "model")])


def config_of(one: MathRun, directory: Path, **changed: Any) -> JobConfig:
    """The recipe with this run's arm and seed."""
    arm = one.arm
    flags = {
        **CHANGED,
        "hf_checkpoint": str(directory / "model"),
        "prompt_data": str(directory / "train.jsonl"),
        "eval_data": [f"held-out:{directory / 'eval.jsonl'}"],
        "seed": one.seed,
        "policy_loss": arm.loss,
        "use_tis": arm.hook is not None,
        "custom_tis_function_path": arm.hook and f"plugin.ppo_utils.{arm.hook}_function",
        **dict(arm.settings),
        **changed,
    }
    return JobConfig.from_sources(flags, RECIPE)


class StaleJob:
    """Trainer, an engine that is `staleness` rollouts behind, and one that evaluates the newest weights."""

    def __init__(self, config: JobConfig, staleness: int, groups: ParallelGroups) -> None:
        self._config, self._staleness = config, staleness
        parts = check_job(config, log=lambda _: None)
        self._trainer = MegatronTrainer(
            config, parts.policy.as_config(), groups, layout="padded", seed=config.seed
        )
        assert parts.policy.directory is not None
        self._trainer.load_hf_weights(parts.policy.directory)
        self._engine, self._newest = (
            make_engine(config, parts.policy.hf_config, name) for name in ("behind", "newest")
        )
        behind, newest = (LocalEngine(engine, config) for engine in (self._engine, self._newest))
        self._queue = RolloutQueue(parts.task, behind, parts.sampling, config, lambda _: None)
        self._evaluator = Evaluator(config, parts.eval_sets, newest, parts.sampling, lambda _: None)
        self._passes = LogProbPasses(config, parts, self)  # type: ignore[arg-type]
        self._held: deque[tuple[int, list[bytes]]] = deque(maxlen=staleness + 1)
        self._sent = -1

    def log_probs(self, policy: str, batch: RolloutBatch) -> Ragged:
        """What a job's trainer ranks answer to `LogProbPasses`."""
        return self._trainer.compute_log_probs(batch)

    def run(self) -> Row:
        """All rollouts; held-out accuracy over the run, and what the method did on the way."""
        accuracy, steps = [], []
        for rollout in range(self._config.num_rollouts):
            self._held.append((rollout, list(pack_buckets(self._trainer.export_hf_weights()))))
            if rollout % (self._config.eval_interval or 1) == 0:
                accuracy.append(self._evaluate(rollout))
            steps.append(self._one_rollout(rollout))
        last = self._config.num_rollouts
        self._held.append((last, list(pack_buckets(self._trainer.export_hf_weights()))))
        accuracy.append(self._evaluate(last))
        return {
            "accuracy": [round(value, 4) for value in accuracy],
            "final_staleness": steps[-1]["staleness"],
            **{
                short: [float(f"{step[name]:.3g}") for step in steps]
                for short, name in CURVES.items()
            },
        }

    def _evaluate(self, version: int) -> float:
        _load(self._newest, *self._held[-1])
        return self._evaluator.run(version)["eval/held-out/mean"]

    def _one_rollout(self, version: int) -> dict[str, float]:
        config = self._config
        age, buckets = self._held[0]
        if age != self._sent:
            _load(self._engine, age, buckets)
            self._sent = age
        # The queue takes the engine's age for the newest one, so nothing is too old for it.
        rollouts = joined(self._queue.take(age))
        batch = prepare_batch(config, rollouts)
        described = describe_batch(config, batch, rollouts, version)
        updates = mini_batches(config, rollouts, version)
        batch, _ = self._passes.added_to(batch, updates)
        for number, update in enumerate(updates):
            self._trainer.version = version
            self._trainer.version_progress = number / len(updates)
            self._trainer.set_learning_rate(config.lr)
            result = self._trainer.train_step(update.of(batch))
        return described | result.metrics | {"grad_norm": result.grad_norm}


def _load(engine: Any, version: int, buckets: list[bytes]) -> None:
    for number, bucket in enumerate(buckets, 1):
        engine.load_weights(version, bucket, last=number == len(buckets))


def run(one: MathRun, directory: Path, **changed: Any) -> Row:
    """A line of the data."""
    began = time.process_time()
    with one_process() as groups:
        result = StaleJob(config_of(one, directory, **changed), one.staleness, groups).run()
    place = {"arm": one.arm.name, "staleness": one.staleness, "seed": one.seed}
    return {**place, **result, "processor_seconds": round(time.process_time() - began, 1)}


def main() -> int:
    """Run until everything is measured or the minutes are over, then write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.math_jobs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--inputs", type=Path, default=Path("runs/evidence_math"))
    parser.add_argument("--summary", action="store_true", help="only write the table")
    options = parser.parse_args()
    end, missing = time.monotonic() + 60 * options.minutes, open_runs()
    if not options.summary and missing:
        make_inputs(options.inputs)
        for number, one in enumerate(missing):
            if time.monotonic() > end:
                break
            record(run(one, options.inputs), DATA)
            print(f"{len(missing) - number - 1} runs to go", file=sys.stderr, flush=True)
    from benchmarks.evidence.math_summary import write_table

    write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
