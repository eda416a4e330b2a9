"""One job of `job_bench` in a process of its own: `python -m benchmarks.job_worker SPEC.json`.

After its first step and after every round of steps a job waits until the benchmark lets it go on, so that jobs take
turns and only one of them works at a time. Both sides are timed the same way: from the end of a step to the end of the
next one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.job_task import SEED, EndlessDigits
from plugin.tasks.protocol import Prompt

_POLL_SECONDS = 0.02


class JobSpec(NamedTuple):
    """What a job does; of a round's `steps`, the first does not count if there are others.

    rows: a prompt file with sums for a pretrained model; none = the digits of `job_task`
    """

    kind: Literal["synchronous", "rank per core", "asynchronous", "TRL"]
    directory: str
    model: str
    prompts: int
    samples_per_prompt: int
    response: int
    microbatch: int
    lr: float
    rounds: int
    steps: int
    ranks: int = 1
    engines: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    engine: str = "transformers"
    rows: str | None = None

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def all_steps(self) -> int:
        """The step of the start, then those of every round."""
        return 1 + self.rounds * self.steps


class Turns:
    """Writes a line per step to `steps.jsonl`, `done-<n>` after round n, and waits for `go-<n>` after that.

    Round 0 is the first step, which starts and compiles whatever is left to start.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec, self._directory = spec, Path(spec.directory)
        self._step = 0
        self._began = time.perf_counter()

    def end_of_step(self, phases: Mapping[str, float], reward: float, tokens: int) -> None:
        """phases: the seconds of this step by what they were spent on"""
        ended, place = divmod(self._step, self._spec.steps)
        line = {
            "counts": place != 1 and self._step > 0,
            "seconds": time.perf_counter() - self._began,
            "phases": dict(phases),
            "reward": reward,
            "tokens": tokens,
        }
        with open(self._directory / "steps.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        self._step += 1
        if place == 0:
            (self._directory / f"done-{ended}").touch()
            while not (self._directory / f"go-{ended}").exists():
                time.sleep(_POLL_SECONDS)
        self._began = time.perf_counter()


def run_ours(spec: JobSpec, turns: Turns) -> None:
    """`megatron-tis train` with the flags of the quick start, in this process."""
    from plugin.config import JobConfig
    from plugin.controller.job import run_job
    from plugin.observe.console import Console

    class TimedConsole(Console):
        def step(self, metrics: Mapping[str, Any], total: int) -> None:
            phases = {
                name.removeprefix("seconds_"): float(value)
                for name, value in metrics.items()
                if name.startswith("seconds_")
            }
            tokens = round(metrics["response_length"] * spec.samples)
            turns.end_of_step(phases, metrics["reward"], tokens)

    flags = {
        "hf_checkpoint": spec.model,
        "rollout_batch_size": spec.prompts,
        "n_samples_per_prompt": spec.samples_per_prompt,
        "max_response_length": spec.response,
        "rollout_engine": spec.engine,
        "train_dtype": spec.dtype,
        "num_rollouts": spec.all_steps,
        "calculate_per_token_loss": True,
        "lr": spec.lr,
        "async_rollouts": spec.kind == "asynchronous",
        "num_gpus_per_node": spec.ranks,
        "num_rollout_engines": spec.engines,
        "run_dir": str(Path(spec.directory) / "run"),
        "seed": SEED,
    }
    if spec.rows is None:
        flags |= {
            "task_path": "benchmarks.job_task:make_task",
            "rollout_max_batch": spec.samples,
            "micro_batch_size": spec.microbatch,
            # Steps are timed with one loss, asynchronous or not.
            "allow_biased_correction": spec.kind == "asynchronous",
        }
    else:
        flags |= {
            "prompt_data": spec.rows,
            "prompt_key": "messages",
            "label_key": "answer",
            "apply_chat_template": True,
            "shuffle_data": False,
            "reward": ["numeric"],
            "use_tis": True,
        }
    run_job(JobConfig.from_sources(flags), TimedConsole())


class TrlTask(NamedTuple):
    """Rows of TRL's data set, and what a response to a row is worth."""

    prompts: list[Any]
    answers: list[str]
    reward: Callable[[list[int], str], float]

    @classmethod
    def of(cls, spec: JobSpec, tokenizer: Any) -> TrlTask:
        """The task of our own jobs."""
        if spec.rows is None:
            task = EndlessDigits()
            indices = range(spec.all_steps * spec.prompts)
            digits = [str(task.prompt(index).data["answer"]) for index in indices]
            return cls(
                [a + "=" for a in digits],
                digits,
                lambda tokens, answer: task.reward(Prompt((), {"answer": answer}), tokens),
            )
        from plugin.rewards.built_in import numeric

        rows = [json.loads(line) for line in Path(spec.rows).read_text().splitlines()]
        rows = rows[: spec.all_steps * spec.prompts]

        def reward(tokens: list[int], answer: str) -> float:
            return numeric(tokenizer.decode(tokens, skip_special_tokens=True), {}, label=answer)

        return cls([row["messages"] for row in rows], [row["answer"] for row in rows], reward)


def run_trl(spec: JobSpec, turns: Turns) -> None:
    """TRL's GRPOTrainer with transformers' generate: the same loss, optimizer and microbatches."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model)
    task = TrlTask.of(spec, tokenizer)
    spent: dict[str, float] = {}
    scored: dict[str, float] = {"reward": 0.0, "tokens": 0}

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments, **named)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
            return result

        return call

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        rewards = [
            task.reward(response, wanted)
            for wanted, response in zip(answer, completion_ids, strict=True)
        ]
        scored["reward"] = sum(rewards) / len(rewards)
        scored["tokens"] = sum(len(response) for response in completion_ids)
        return rewards

    class TimedSteps(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            generating = spent.pop("generating", 0.0)
            preparing = spent.pop("preparing", 0.0) - generating
            phases = {"waiting": generating, "preparing": preparing}
            turns.end_of_step(phases, scored["reward"], int(scored["tokens"]))

    settings = GRPOConfig(
        output_dir=str(Path(spec.directory) / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=spec.microbatch,
        gradient_accumulation_steps=spec.samples // spec.microbatch,
        num_generations=spec.samples_per_prompt,
        max_completion_length=spec.response,
        temperature=1.0,
        shuffle_dataset=False,
        max_steps=spec.all_steps,
        learning_rate=spec.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype)
        ),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": task.prompts, "answer": task.answers}),
        callbacks=[TimedSteps()],
    )
    for name, method in {
        "generating": "_generate_single_turn",
        "preparing": "_generate_and_score_completions",
    }.items():
        setattr(trainer, method, timed(name, getattr(trainer, method)))
    trainer.train()


def main() -> None:
    """Run the job that the file on the command line describes."""
    spec = JobSpec(**json.loads(Path(sys.argv[1]).read_text()))
    (run_trl if spec.kind == "TRL" else run_ours)(spec, Turns(spec))


if __name__ == "__main__":
    main()
