"""The tool-use examples: how many samples they make with each flag, and what their answers are worth."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.controller.preflight.job_checks import check_job
from plugin.engines.choice import make_engine, sampling_parameters
from plugin.engines.protocol import GenerationRequest
from plugin.engines.response_stream import ResponseStream
from plugin.environments.environment_protocol import Reply
from plugin.environments.group_server import SingleTurnPlayer
from plugin.environments.multi_turn import MultiTurnPlayer, choose_player
from plugin.environments.trajectory import Trajectory
from plugin.tasks.loading import load_task, load_tokenizer
from plugin.weights.buckets import pack_buckets
from tests.unit.environments.conversations import (
    STOP,
    ScriptedEngine,
    chat_tokenizer,
    encode,
    prompt_and_response,
)
from tests.unit.environments.played_groups import play_all, run_multi_turn

EXAMPLES = Path(__file__).parents[3] / "examples"
LOOKUP = f"{EXAMPLES / 'tiny_tool_task.py'}:LookupTask"
CALCULATOR = f"{EXAMPLES / 'calculator_tool_task.py'}:CalculatorTask"
BETWEEN = {"preserve_thinking_between_tool_calls": True}
ALL = {"preserve_all_thinking": True}


def lookup_job(**flags: Any) -> JobConfig:
    settings = {"task_path": LOOKUP, "max_turns": 3, "max_response_length": 6}
    return JobConfig.from_sources({**settings, **flags})


def key_and_value(index: int = 0) -> tuple[str, str]:
    """The user's key, and the value that the tool answers to it."""
    config = lookup_job()
    task: Any = load_task(config, load_tokenizer(config))
    key = task.messages(index)[0]["content"]
    step = task.environment(index, 0).step(Reply("*" + key), [])
    return key, step.messages[0]["content"]


def look_up(replies: list[str], **flags: Any) -> tuple[Trajectory, list[str]]:
    """A trajectory of conversation 0, and the contexts in which its replies were given."""
    config = lookup_job(**flags)
    tokenizer = load_tokenizer(config)
    task: Any = load_task(config, tokenizer)
    engine = ScriptedEngine(lambda turn, _: tokenizer.encode(replies[turn]), task.stop_token_ids)
    [[trajectory]] = run_multi_turn(
        engine,
        [GenerationRequest((), (1,))],
        sampling_parameters(config, task.stop_token_ids),
        task=task,
        tokenizer=tokenizer,
        config=config,
    )
    return trajectory, [tokenizer.decode(call.request.prompt) for call in engine.calls]


@pytest.mark.parametrize(
    ("flags", "samples"), [({}, 2), (BETWEEN, 1), (ALL, 1), ({**ALL, **BETWEEN}, 1)]
)
def test_a_thinking_tool_call_is_one_sample_with_either_flag_and_two_without(
    flags: dict[str, Any], samples: int
) -> None:
    key, value = key_and_value()
    trajectory, contexts = look_up([f"34-*{key}$", f"5-{value}$"], **flags)
    assert len(trajectory.samples) == samples
    thinking = "" if samples == 2 else "34-"
    assert contexts == [f"{key}=", f"{key}={thinking}*{key}$+{value}="]
    assert trajectory.reward == 1.0


def test_without_thinking_there_is_one_sample_with_and_without_the_flags() -> None:
    key, value = key_and_value()
    assert len(look_up([f"*{key}$", f"{value}$"])[0].samples) == 1


def test_the_lookup_rewards_the_call_and_the_value() -> None:
    key, value = key_and_value()
    assert look_up([f"*{key}$", f"{value}{value}$"])[0].reward == pytest.approx((1 + 1 / 3) / 2)
    # A wrong key: 2 of 3 positions; what the tool says to it has to be repeated all the same.
    wrong = str((int(key) + 1) % 10)
    trajectory, contexts = look_up([f"*{wrong}$", "=$"])
    assert trajectory.reward == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert contexts[1].startswith(f"{key}=*{wrong}$+")
    # No call: the conversation is over after one turn.
    assert look_up([f"{value}$"])[0].turns == 1


def test_a_multi_turn_task_passes_the_checks_of_the_driver_and_is_played_by_the_engine() -> None:
    config = lookup_job()
    parts = check_job(config)
    player = choose_player(config)
    assert isinstance(player, functools.partial) and player.func is MultiTurnPlayer
    assert choose_player(JobConfig.from_sources({})) is SingleTurnPlayer
    engine = make_engine(config, parts.policy.hf_config, "engine 0")
    weights = parts.policy.random_weights()
    buckets = list(pack_buckets(weights.items(), bucket_bytes=100_000))
    for number, bucket in enumerate(buckets):
        engine.load_weights(0, bucket, last=number == len(buckets) - 1)
    prompt = parts.task.prompt(3).tokens
    request = GenerationRequest(
        prompt, tuple(range(1000)), 3
    )  # about 3 in 1000 random replies call
    [group] = play_all(player(ResponseStream(engine, 1000)), [request], parts.sampling)
    [again] = play_all(player(ResponseStream(engine, 1000)), [request], parts.sampling)
    assert {t.error for t in group} == {None}
    assert {tuple(prompt_and_response(t.samples[0])[0]) for t in group} == {prompt}
    assert max(t.turns for t in group) > 1
    texts = [[s.tokens.tolist() for s in t.samples] for t in group]
    assert texts == [[s.tokens.tolist() for s in t.samples] for t in again]


def calculate(expression: str) -> str:
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("expression", "output"),
    [
        ("(1 + 2) * 3", "9"),
        ("2 ** 9", "error: ValueError: 2 ** 9 is not allowed"),
        ("__import__('os')", "error: ValueError"),
        ("1 +", "error: SyntaxError"),
        ("1" * 300, "error: ValueError: the expression is longer"),
    ],
)
@pytest.mark.parametrize("flags", [{}, ALL])
def test_the_calculator_answers_or_says_what_is_wrong(
    expression: str, output: str, flags: dict[str, Any]
) -> None:
    config = JobConfig(task_path=CALCULATOR, **flags)
    task: Any = load_task(config, chat_tokenizer("qwen_like"))
    question = task.messages(0)[0]["content"]
    # The question is `What is 1234 + 56 - 7? ...`: integers with + - and *, so eval of it is the answer.
    wanted = eval(question.removeprefix("What is ").partition("?")[0])
    replies = [f"<think>\nhm\n</think>\n\n{calculate(expression)}", f" {wanted}\n"]
    engine = ScriptedEngine(lambda turn, _: [*encode(replies[turn]), *STOP])
    [[trajectory]] = run_multi_turn(
        engine,
        [GenerationRequest((), (1,))],
        sampling_parameters(config, task.stop_token_ids),
        task=task,
        tokenizer=chat_tokenizer("qwen_like"),
        config=config,
    )
    assert trajectory.reward == 1.0 and trajectory.turns == 2 and len(trajectory.samples) == 1
    second = chat_tokenizer().decode(engine.calls[1].request.prompt)
    assert f"<|turn|>tool\n{output}" in second
