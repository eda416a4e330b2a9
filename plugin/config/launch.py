"""Flags of launching a job and of what it writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from plugin.config.flags import (
    FlagGroup,
    Needs,
    absolute_code,
    absolute_path,
    expect,
    flag,
    needs_flag,
    runtime_flag,
)


@dataclass(frozen=True)
class LaunchFlags(FlagGroup):
    title: ClassVar[str] = "launch"

    num_nodes: int = flag(1, "nodes that hold trainer ranks", at_least=1)
    num_gpus_per_node: int | None = flag(
        None,
        "GPUs (or CPU slots) with a trainer rank on each node; engines get others, or with "
        "--colocate the same; none = as few as fit the layout",
        at_least=1,
        common_in="train",
    )
    address: str | None = runtime_flag(
        None,
        "Ray cluster to join: host:port, or auto; none = a private one on this machine",
        common_in="train",
    )
    colocate: bool | None = flag(
        None,
        "engines share the trainer's GPUs (or CPU slots) instead of having their own: they sleep "
        "while it trains, and it is offloaded to host memory while they generate; none = only if "
        "this machine has enough GPUs for the trainer but not for the engines as well",
    )
    colocate_sleep_level: int = flag(
        2,
        "2 = a sleeping engine's weights are dropped, because a new version comes anyway; 1 = they "
        "wait in host memory",
        at_least=1,
        needs=needs_flag("colocate"),
    )
    cpus_per_rank: int = flag(1, "CPU slots that a rank or engine reserves", at_least=1)
    threads_per_rank: int | Literal["auto"] = runtime_flag(
        "auto",
        "torch threads of a rank or engine on CPU; auto = the node's cores over its ranks, or over "
        "the engines; 1 for a model of hidden size below 256",
        at_least=1,
    )
    start_timeout: float = runtime_flag(300.0, "seconds the actors may take to start", above=0)
    load_timeout: float | None = runtime_flag(
        None,
        "seconds for an engine to start, or for a model to be built and loaded; none = "
        "--start-timeout plus 10 per GB of weights, on GPUs plus 600 for engines that compile and "
        "capture graphs (vLLM, SGLang)",
        above=0,
    )
    step_timeout: float = runtime_flag(
        1800.0, "seconds the trainer may take for a step, a pass or a save", above=0
    )
    weight_timeout: float | None = runtime_flag(
        None,
        "seconds that sending new weights to the engines may take; none = --step-timeout, and in "
        "asynchronous jobs what the longest responses under way take",
        above=0,
    )
    ray_timeout: float = runtime_flag(
        60.0, "seconds without an answer of Ray itself after which the job ends", above=0
    )
    max_restarts: int = runtime_flag(
        3,
        "consecutive restarts of a lost engine, or of the trainer, without progress",
        at_least=0,
    )
    network_interface: str | None = runtime_flag(
        None,
        "network interface for trainer and engine traffic between nodes; none = the interface of "
        "the node's Ray address, or loopback without --address",
    )
    seed: int = flag(1234, "seed of weights, prompts and sampling", at_least=0, common_in="eval")

    def check(self) -> None:
        expect(
            self.colocate_sleep_level <= 2,
            f"--colocate-sleep-level is {self.colocate_sleep_level}; choose 1 or 2",
        )

    @property
    def load_patience(self) -> float:
        """Seconds that an engine may take to start and a model to be loaded."""
        return self.start_timeout if self.load_timeout is None else self.load_timeout


@dataclass(frozen=True)
class OutputFlags(FlagGroup):
    title: ClassVar[str] = "output"

    run_dir: str | None = runtime_flag(
        None, "run directory; none = runs/<time>-<name>", common_in="train"
    )
    name: str = runtime_flag("train", "name of the run")
    save_interval: int | None = runtime_flag(
        None, "rollouts between checkpoints; a lost trainer rank restarts from the last", at_least=1
    )
    save_at_end: bool | None = runtime_flag(
        None,
        "write a checkpoint at the end and on Ctrl-C; none = with --hf-checkpoint or "
        "--save-interval",
    )
    async_save: bool = runtime_flag(
        True,
        "train on while a checkpoint is written: the trainer waits only for a copy in host memory, "
        "of what each rank writes",
    )
    keep_checkpoints: int = runtime_flag(2, "checkpoints to keep, the newest", at_least=1)
    group_journal: bool | None = runtime_flag(
        None,
        "write finished groups to the run directory; with --resume they are trained on instead of "
        "generated again; none = in asynchronous jobs with checkpoints, without routes or kept ids",
    )
    resume: bool = runtime_flag(
        False, "continue from the newest checkpoint in --run-dir", common_in="train"
    )
    resume_from: str | None = runtime_flag(
        None, "continue from this checkpoint in --run-dir instead, e.g. step_0000012"
    )
    overwrite: bool = runtime_flag(
        False, "delete what an earlier run wrote to --run-dir and --dump-log-probs, then start"
    )
    save_hf: bool = runtime_flag(
        False,
        "write the trained model as a Hugging Face directory, model/, at the end",
        common_in="train",
    )
    save_hf_interval: int | None = runtime_flag(
        None, "rollouts between Hugging Face models in models/step_<number>/; all stay", at_least=1
    )
    detect_mismatch: bool = flag(
        True, "look for shifted, constant, tempered, truncated or stale log-probs at every step"
    )
    on_finding: Literal["stop", "warn"] = flag(
        "stop",
        "what an unmistakable finding does, such as an engine that runs a different model than the "
        "trainer; other findings are warnings",
        needs=needs_flag("detect_mismatch"),
    )
    custom_detector_path: str | None = flag(
        None,
        "import paths of your own mismatch detectors, comma-separated",
        needs=needs_flag("detect_mismatch"),
        path=absolute_code,
    )
    dump_log_probs: str | None = runtime_flag(
        None,
        "directory for the log-probs of every step, for `megatron-tis compare`",
        path=absolute_path,
    )
    dump_routes: bool = flag(
        False,
        "MoE: the dump also holds the engine's routes and, where it reports them, their weights, "
        "for `megatron-tis compare --routing`",
        needs=Needs(
            "--dump-log-probs with --use-rollout-routing-replay or --detect-routing",
            lambda config: config.dump_log_probs is not None and config.wants_rollout_routes,
        ),
    )
    log_samples: int = runtime_flag(
        3,
        "samples per rollout that samples.jsonl and the report keep, with their texts: in turn the "
        "best, the worst, a random one; 0 = none",
        at_least=0,
    )
    use_wandb: bool = runtime_flag(False, "also log to Weights & Biases, if it is installed")
    wandb_project: str = runtime_flag("megatron-tis", "its project", needs=needs_flag("use_wandb"))

    def check(self) -> None:
        expect(
            not self.resumes or self.run_dir is not None,
            "--resume without --run-dir: name the run directory to continue",
        )
        expect(
            self.resume_from is None or re.fullmatch(r"step_\d+", self.resume_from) is not None,
            f"--resume-from is {self.resume_from}; name a checkpoint in --run-dir, such as "
            "step_0000012",
        )
        expect(
            not (self.overwrite and self.resumes),
            "--overwrite with --resume: one deletes the run that the other continues; drop one of "
            "the two",
        )
        expect(
            not self.overwrite or self.run_dir is not None or self.dump_log_probs is not None,
            "--overwrite without --run-dir: a run without it gets a new directory; drop it, or "
            "name the directory",
        )

    @property
    def resumes(self) -> bool:
        """Whether the job continues the run in its directory."""
        return self.resume or self.resume_from is not None
