"""Evaluation on the engines of a job: what it asks for, when, and that training does not notice."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.controller.evaluation import Evaluations, Evaluator, describe, evaluation_sampling
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.engines.protocol import SamplingParameters
from plugin.errors import BatchError, ConfigError, EngineError
from plugin.tasks.protocol import FIRST_HELD_OUT, EvalSet
from tests.unit.controller.queue.test_rollout_queue import (
    PARAMETERS,
    TASK,
    DirectEngines,
    new_weights,
)
from tests.unit.engines.tiny_engines import loaded_engine

SIZES: dict[str, Any] = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "use_tis": True,
    "eval_data": ("held:6",),
}


def make_evaluator(
    engines: DirectEngines, rows: int = 6, **flags: Any
) -> tuple[Evaluator, list[str]]:
    said: list[str] = []
    config = JobConfig(**{**SIZES, **flags})
    sets = [EvalSet("held", TASK, rows, FIRST_HELD_OUT)]
    return Evaluator(config, sets, engines, PARAMETERS, said.append), said


ENGINE = loaded_engine()


def one_engine() -> DirectEngines:
    return DirectEngines([ENGINE])


def schedule(config: JobConfig, records: list[dict[str, Any]]) -> Evaluations:
    """When evaluations come; none is made."""
    return Evaluations(config, make_evaluator(DirectEngines([]))[0], records)


def test_every_prompt_of_a_set_is_asked_once_with_the_same_seeds_each_time() -> None:
    engines = one_engine()
    evaluator, _ = make_evaluator(engines, n_samples_per_eval_prompt=3, rollout_max_batch=6)
    first = evaluator.run(0)
    asked = engines.served[:]
    assert [r.prompt_index for r in asked] == list(range(FIRST_HELD_OUT, FIRST_HELD_OUT + 6))
    assert all(len(set(request.seeds)) == 3 for request in asked)
    again = evaluator.run(0)
    assert engines.served[6:] == asked
    assert {k: v for k, v in first.items() if "seconds" not in k} == {
        k: v for k, v in again.items() if "seconds" not in k
    }
    assert first["eval/held/prompts"] == 6 and "eval/held/pass@2/ci_low" in first


def test_training_goes_on_as_if_nothing_had_been_evaluated() -> None:
    batches = []
    for evaluates in (False, True):
        engines = one_engine()
        config = JobConfig(**SIZES, async_rollouts=True, max_weight_staleness=2)
        queue = RolloutQueue(TASK, engines, PARAMETERS, config)
        queue.take(0)
        queue.pump()
        if evaluates:
            evaluator, _ = make_evaluator(engines, async_rollouts=True)
            queue.settle()
            before = queue.state(), queue.metrics()
            evaluator.run(0)
            assert (queue.state(), queue.metrics()) == before
        batches.append([[g.index for g in queue.take(0)] for _ in range(3)])
    assert batches[0] == batches[1]


def test_the_engines_have_answered_all_training_requests_before_an_evaluation() -> None:
    engines = one_engine()
    config = JobConfig(**SIZES, async_rollouts=True, max_weight_staleness=2)
    queue = RolloutQueue(TASK, engines, PARAMETERS, config)
    queue._issue()
    assert engines.waiting
    queue.settle()
    assert not engines.waiting and not queue._in_flight and queue.under_way == len(queue._ready)


def test_an_answer_of_other_weights_ends_the_evaluation() -> None:
    engines = DirectEngines([loaded_engine()])
    evaluator, _ = make_evaluator(engines)
    with pytest.raises(EngineError, match="weights of version 0 while version 1 was evaluated"):
        evaluator.run(1)
    new_weights(engines.engines[0], 1)
    assert evaluator.run(1)["eval/held/prompts"] == 6


def test_a_prompt_that_cannot_be_generated_is_left_out_and_counted() -> None:
    engines = one_engine()
    engines.spoiled = {FIRST_HELD_OUT + 2: 100}
    evaluator, said = make_evaluator(engines)
    metrics = evaluator.run(0)
    assert metrics["eval/held/prompts"] == 5 and metrics["eval/held/failed_prompts"] == 1
    assert said[-1].startswith(f"evaluation on held: prompt {FIRST_HELD_OUT + 2} is dropped")
    assert {r.prompt_index - FIRST_HELD_OUT for r in engines.served} == set(range(6))
    engines.spoiled = {FIRST_HELD_OUT: 100}
    with pytest.raises(BatchError, match="none of its 1 prompts could be generated"):
        make_evaluator(engines, rows=1)[0].run(0)


def test_one_response_is_greedy_and_several_are_sampled() -> None:
    def sampling(**flags: Any) -> SamplingParameters:
        return evaluation_sampling(JobConfig(**{**SIZES, **flags}), PARAMETERS)

    assert (sampling().top_k, sampling().temperature) == (1, 1.0)
    several = sampling(n_samples_per_eval_prompt=4, rollout_temperature=0.7)
    assert (several.top_k, several.temperature) == (None, 0.7)
    own = sampling(eval_temperature=0.5, eval_top_p=0.9, eval_max_response_length=3)
    assert (own.temperature, own.top_p, own.max_response_length) == (0.5, 0.9, 3)
    assert not own.log_probs and not own.routed_experts


def test_evaluations_come_at_the_start_at_every_interval_and_at_the_end_once_each() -> None:
    def due(**flags: Any) -> list[int]:
        config = JobConfig(**{**SIZES, "num_rollouts": 7, **flags})
        done = schedule(config, [{"rollout": 4, "step": 4}])
        return [rollouts for rollouts in range(8) if done.is_due(rollouts)]

    assert due(eval_interval=2) == [0, 2, 6, 7]
    assert due(eval_at_start=False) == [7]
    assert due(eval_interval=7) == [0, 7]


def test_what_is_repeated_after_a_restart_is_evaluated_again() -> None:
    config = JobConfig(**SIZES, num_rollouts=8, eval_interval=2)
    records: list[dict[str, Any]] = [{"rollout": r, "step": r} for r in (0, 2, 4)]
    evaluations = schedule(config, records)
    evaluations.go_back(3)
    assert evaluations.is_due(4) and not evaluations.is_due(2) and len(records) == 2


def test_the_best_is_the_highest_mean_on_the_first_set() -> None:
    config = JobConfig(**SIZES)
    means = [0.5, 0.7, 0.6, math.nan, 0.7, 0.8]
    best, marked = None, []
    records: list[dict[str, Any]] = []
    evaluations = schedule(config, records)
    for step, mean in enumerate(means, 1):
        records.append({"step": step, "rollout": step, "eval/held/mean": mean})
        if evaluations.last_is_best(best):
            best = step
            marked.append(step)
    assert marked == [1, 2, 6], "a tie keeps the earlier one"


def test_the_line_on_the_terminal_names_scores_and_intervals() -> None:
    metrics = {
        "step": 3,
        "eval/a/mean": 0.5,
        "eval/a/mean/ci_low": 0.25,
        "eval/a/mean/ci_high": 0.75,
        "eval/a/pass@4": 1.0,
        "eval/a/prompts": 9.0,
    }
    assert describe(metrics) == "a/mean 0.500 [0.250, 0.750], a/pass@4 1.000"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_pass_at": "1,16", "n_samples_per_eval_prompt": 8}, "holds 16, .* of the 8 resp"),
        ({"eval_pass_at": "all"}, "expected numbers separated by commas"),
        ({"eval_data": ("64",)}, "expected NAME:PATH, or NAME:N"),
        ({"eval_data": ("a/b:64",)}, "expected NAME:PATH"),
        ({"eval_data": ("held:0",)}, "ask for at least one prompt"),
        ({"eval_data": ("a:4", "a:5")}, r"names \['a'\] twice"),
        ({"eval_data": ("math:rows.jsonl",)}, "needs the tokenizer of --hf-checkpoint"),
        ({"n_samples_per_eval_prompt": 4, "eval_temperature": 0}, "greedy responses"),
        ({"eval_top_p": 1.5}, "must lie in"),
        (
            {"hf_checkpoint": "m", "prompt_data": "train.jsonl", "eval_data": ("held:4",)},
            "--prompt-data has none; give the path of other rows, held:PATH",
        ),
        ({"rollout_engine": "vllm", "eval_temperature": 0.001}, "choose 0 or at least that"),
    ],
)
def test_evaluations_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(**{**SIZES, **given})


def test_a_flag_of_evaluation_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="--eval-interval 5 would do nothing: it needs --eval-da"):
        JobConfig.from_sources({"eval_interval": 5})
