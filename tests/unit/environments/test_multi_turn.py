"""Whole conversations: endings, failures, order, seeds, and log-probs against the model itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plugin.config import JobConfig
from plugin.engines.protocol import (
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.transformers.sampling import sampling_log_probs
from plugin.environments.environment_protocol import Step
from plugin.environments.multi_turn import OpeningPrompts, turn_seed
from plugin.environments.trajectory import Trajectory
from plugin.errors import BatchError
from plugin.tasks.copy_digits import CharacterTokenizer
from tests.parallel.tiny_models import FAMILIES, VOCAB_SIZE, hf_model
from tests.unit.engines.tiny_engines import loaded_engine
from tests.unit.environments.conversations import (
    STOP,
    ScriptedEngine,
    ScriptedEnvironment,
    ScriptedTask,
    chat_tokenizer,
    encode,
    play,
    prompt_and_response,
    script,
    tool,
    user,
)
from tests.unit.environments.played_groups import run_multi_turn

pytestmark = pytest.mark.usefixtures("jumping_clock")


def run(
    engine: Any, requests: list[GenerationRequest], make: Callable[[int, int], Any], **flags: Any
) -> list[list[Trajectory]]:
    return run_multi_turn(
        engine,
        requests,
        SamplingParameters(stop_token_ids=STOP),
        task=ScriptedTask(make),
        tokenizer=chat_tokenizer("plain"),
        config=JobConfig(**flags),
    )


def test_a_conversation_ends_when_the_environment_says_so_and_is_worth_what_it_says() -> None:
    trajectory, environment = play("plain", script(["a", "b", "c"]), [tool(), tool()])
    assert (trajectory.reward, trajectory.turns, trajectory.error) == (1.0, 3, None)
    assert [reply.text for reply in environment.heard] == ["a", "b", "c"]
    assert environment.endings == ["done"]
    assert environment.closed == 1


def test_a_reply_cut_by_length_ends_the_trajectory_and_is_scored_without_a_step() -> None:
    engine = ScriptedEngine(lambda turn, _: encode("long") if turn else [*encode("a"), *STOP])
    trajectory, environment = play("plain", engine, [tool(), tool()])
    assert trajectory.error is None and trajectory.reward == 1.0
    assert environment.endings == ["reply_cut"]
    assert [reply.text for reply in environment.heard] == ["a"]
    assert trajectory.truncated
    assert trajectory.samples[-1].tokens.tolist()[-len(encode("long")) :] == encode("long")


def test_the_number_of_turns_is_limited_and_the_last_reply_is_heard() -> None:
    trajectory, environment = play("plain", script(["a"] * 9), [tool()] * 8, max_turns=3)
    assert (trajectory.turns, environment.endings) == (3, ["max_turns"])
    assert len(environment.heard) == 3


def test_a_turn_that_would_not_fit_is_not_started_and_leaves_no_trailing_tokens() -> None:
    first = len(encode("<|turn|>user\nquestion 0<|end|>\n<|turn|>assistant\n"))
    # 1024 tokens for a reply: the first context fits exactly, the second does not.
    trajectory, environment = play(
        "plain", script(["a"] * 3), [tool()] * 2, max_context_length=first + 1024
    )
    assert (trajectory.turns, environment.endings) == (1, ["max_context"])
    [sample] = trajectory.samples
    assert prompt_and_response(sample)[1] == [*encode("a"), *STOP]
    none, _ = play("plain", script(["a"]), [], max_context_length=first + 1023)
    assert none.error is not None and "--max-context-length" in none.error


def test_all_open_conversations_of_a_turn_are_one_batch_and_share_equal_contexts() -> None:
    engine = script(["a", "b", "c"])
    requests = [GenerationRequest((), (1, 2, 3), 0), GenerationRequest((), (4, 5), 1)]
    answers = run(engine, requests, lambda index, seed: ScriptedEnvironment([tool(str(seed)), tool()]))  # fmt: skip
    assert [[t.turns for t in group] for group in answers] == [[3, 3, 3], [3, 3]]
    assert engine.batches == 3
    first_turn = {call.request.seeds for call in engine.calls[:5]}
    assert sorted(map(len, first_turn)) == [2, 3]
    assert all(len(call.request.seeds) == 1 for call in engine.calls[5:])


def test_a_trajectory_depends_on_its_seed_and_not_on_the_batch() -> None:
    def random_engine() -> ScriptedEngine:
        def reply(_: int, seed: int) -> list[int]:
            draw = torch.Generator().manual_seed(seed)
            return [*torch.randint(3, 200, (4,), generator=draw).tolist(), *STOP]

        return ScriptedEngine(reply)

    def make(index: int, seed: int) -> ScriptedEnvironment:
        return ScriptedEnvironment([tool(), user(str(seed))])

    [together] = run(random_engine(), [GenerationRequest((), (1, 2, 3))], make)
    [[alone]] = run(random_engine(), [GenerationRequest((), (2,))], make)
    first, second = (prompt_and_response(t.samples[0])[1] for t in together[:2])
    assert second == prompt_and_response(alone.samples[0])[1]
    assert second != first
    seeds = {turn_seed(seed, turn) for seed in range(100) for turn in range(10)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**62 for seed in seeds)


def hanging(history: Any) -> Step:
    threading.Event().wait(30)
    return Step(done=True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (ScriptedEnvironment([ZeroDivisionError("oops")]), "the environment's step: ZeroDivisionError: oops"),
        (ScriptedEnvironment([SystemExit(3)]), "the environment's step: SystemExit: 3"),
        (ScriptedEnvironment([hanging]), "the environment's step: no answer within 0.2 seconds"),
        (ScriptedEnvironment([Step()]), "neither ended the conversation nor added a message"),
        (ScriptedEnvironment([lambda history: None]), "step is a NoneType"),
        (ScriptedEnvironment([Step([{"content": "no role"}])]), "message {'content': 'no role'} has no role"),
        (ScriptedEnvironment([Step(["text"])]), "message 'text' has no role"),  # type: ignore[list-item]
        (ScriptedEnvironment([], worth=float("nan")), "reward is nan; it must be a finite number"),
        (ScriptedEnvironment([], worth="good"), "reward is 'good'; it must be a finite number"),  # type: ignore[arg-type]
    ],
    ids=["raises", "exits", "hangs", "silent", "no step", "no role", "no message", "nan", "text"],
)  # fmt: skip
def test_an_environment_that_misbehaves_fails_its_own_trajectory_only(
    environment: ScriptedEnvironment, message: str
) -> None:
    good = [ScriptedEnvironment([tool()]), ScriptedEnvironment([tool()])]
    environments = [good[0], environment, good[1]]
    [group] = run(
        script(["a", "b"]),
        [GenerationRequest((), (0, 1, 2))],
        lambda index, seed: environments[seed],
        environment_timeout=0.2 if environment.steps == [hanging] else 60.0,
    )
    assert group[1].samples == () and message in (group[1].error or "")
    assert [t.turns for t in (group[0], group[2])] == [2, 2]
    assert group[0].error is None and group[2].reward == 1.0
    assert [e.closed for e in environments] == [1, 1, 1]


def test_an_environment_that_does_not_start_fails_its_own_trajectory_only() -> None:
    def make(index: int, seed: int) -> ScriptedEnvironment:
        if seed == 1:
            raise OSError("no sandbox left")
        return ScriptedEnvironment([])

    [group] = run(script(["a"]), [GenerationRequest((), (0, 1))], make)
    assert group[0].error is None
    assert group[1].error == "starting the environment: OSError: no sandbox left"


def test_a_generation_that_fails_or_is_empty_fails_its_own_trajectory_only() -> None:
    bad = {turn_seed(1, 1): GenerationFailure("out of memory"), turn_seed(2, 1): []}

    def reply(_: int, seed: int) -> Any:
        return bad.get(seed, [*encode("a"), *STOP])

    [group] = run(
        ScriptedEngine(reply),
        [GenerationRequest((), (0, 1, 2))],
        lambda index, seed: ScriptedEnvironment([tool()]),
    )
    assert [t.error for t in group] == [None, "out of memory", "empty response"]


def test_environments_are_closed_when_the_engine_breaks() -> None:
    environment = ScriptedEnvironment([])

    def broken(_: int, seed: int) -> list[int]:
        raise RuntimeError("engine is gone")

    with pytest.raises(RuntimeError, match="engine is gone"):
        run(ScriptedEngine(broken), [GenerationRequest((), (0,))], lambda *_: environment)
    assert environment.closed == 1


def test_the_driver_sees_the_first_context_as_the_prompt_and_never_scores() -> None:
    engine = script(["a"])
    run(engine, [GenerationRequest((), (0,), 5)], lambda *_: ScriptedEnvironment([]))
    task = ScriptedTask(lambda *_: ScriptedEnvironment([]))
    prompts = OpeningPrompts(task, chat_tokenizer("plain"), JobConfig())
    assert prompts.prompt(5).tokens == engine.calls[0].request.prompt
    assert prompts.stop_token_ids == STOP
    with pytest.raises(BatchError, match="no reward of its own"):
        prompts.reward(prompts.prompt(5), [1])


PRINTABLE = "".join(map(chr, range(32, 127)))
CHARACTERS = CharacterTokenizer(PRINTABLE, end="\n")
CHARACTERS.chat_template = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Talk(ScriptedTask):
    def messages(self, index: int) -> list[Any]:
        return [{"role": "user", "content": f"q{index}"}]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_log_probs_of_a_conversation_are_those_of_one_pass_over_the_whole_sample(
    family: str,
) -> None:
    # Many stop tokens, so that a model with random weights ends its replies; one character is the end of a turn.
    stops = (CHARACTERS.eos_token_id, *range(10))
    parameters = SamplingParameters(
        temperature=0.7, max_response_length=24, stop_token_ids=stops, routed_experts=family == "qwen3_moe"
    )  # fmt: skip
    [group] = run_multi_turn(
        loaded_engine(family),
        [GenerationRequest((), tuple(range(12)))],
        parameters,
        task=Talk(lambda *_: ScriptedEnvironment([tool("42"), user("more")]), stop_token_ids=stops),
        tokenizer=CHARACTERS,
        config=JobConfig(preserve_all_thinking=True),
    )
    model = hf_model(FAMILIES[family]())
    longest = max(group, key=lambda trajectory: trajectory.turns)
    assert CHARACTERS.vocab_size == VOCAB_SIZE and longest.turns == 3
    for trajectory in group:
        [sample] = trajectory.samples
        tokens, mask = sample.tokens, sample.loss_mask
        with torch.no_grad():
            rows = sampling_log_probs(model(tokens[None]).logits[0, :-1], parameters)
        expected = rows.gather(-1, tokens[1:, None]).squeeze(-1)[-sample.response_length :]
        log_probs = sample.rollout_log_probs
        assert log_probs is not None
        assert torch.allclose(log_probs * mask, expected * mask, atol=1e-4)
        assert not log_probs[mask == 0].any()
        if sample.routed_experts is not None:
            assert len(sample.routed_experts) == len(tokens)


def test_an_environment_that_takes_its_time_holds_up_its_own_conversation_only() -> None:
    other_is_done = threading.Event()

    class Slow(ScriptedEnvironment):
        def step(self, reply: Any, history: Any) -> Step:
            assert other_is_done.wait(20), "the other conversation waits for this one"
            return super().step(reply, history)

    class Fast(ScriptedEnvironment):
        def reward(self, ending: Any) -> float:
            other_is_done.set()
            return super().reward(ending)

    slow, fast = Slow([tool("1")]), Fast([tool("2"), user("3")])
    # Nearly every token ends a reply, so that none is cut before its environment hears it.
    stops = tuple(i for i in range(VOCAB_SIZE) if i % 8)
    [group] = run_multi_turn(
        loaded_engine(),
        [GenerationRequest((), (0, 1))],
        SamplingParameters(max_response_length=24, stop_token_ids=stops),
        task=Talk(lambda _, seed: (slow, fast)[seed], stop_token_ids=stops),
        tokenizer=CHARACTERS,
        config=JobConfig(preserve_all_thinking=True),
    )
    assert [t.error for t in group] == [None, None]
    assert len(slow.heard) == 2 and len(fast.heard) == 3
