"""How many training samples a conversation makes, and what is in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.batch_types import SamplerHead
from plugin.engines.protocol import Generation
from plugin.environments.conversation import ChatRenderer
from plugin.environments.environment_protocol import Step
from plugin.environments.trajectory import Trajectory
from tests.unit.environments.conversations import (
    STOP,
    TEMPLATES,
    ScriptedEngine,
    chat_tokenizer,
    compaction,
    encode,
    play,
    prompt_and_response,
    script,
    text_of,
    tool,
    user,
)

NONE: dict[str, bool] = {}
BETWEEN = {"preserve_thinking_between_tool_calls": True}
ALL = {"preserve_all_thinking": True}
BOTH = {**ALL, **BETWEEN}


def thoughts(number: int) -> list[str]:
    return [f"<think>\nthinking {i}\n</think>\n\nanswer {i}" for i in range(number)]


def samples(template: str, steps: list[Any], flags: dict[str, Any], replies: Any = None) -> int:
    replies = replies or thoughts(len(steps) + 1)
    trajectory, _ = play(template, script(replies), steps, **flags)
    assert trajectory.error is None
    assert trajectory.turns == len(steps) + 1
    return len(trajectory.samples)


@pytest.mark.parametrize("flags", [NONE, BETWEEN, ALL, BOTH])
def test_a_template_that_strips_nothing_gives_one_sample(flags: dict[str, Any]) -> None:
    assert samples("plain", [tool(), user(), tool()], flags) == 1


@pytest.mark.parametrize(
    ("flags", "after_tools", "after_users"), [(NONE, 4, 4), (BETWEEN, 1, 4), (ALL, 1, 1), (BOTH, 1, 1)]
)  # fmt: skip
@pytest.mark.parametrize("template", ["strips_always", "opens_thinking", "empty_thinking"])
def test_a_template_that_strips_every_older_reply_gives_one_sample_per_turn_unless_thinking_is_kept(
    template: str, flags: dict[str, Any], after_tools: int, after_users: int
) -> None:
    assert samples(template, [tool()] * 3, flags) == after_tools
    assert samples(template, [user()] * 3, flags) == after_users


@pytest.mark.parametrize(("flags", "expected"), [(NONE, 2), (BETWEEN, 2), (ALL, 1), (BOTH, 1)])
def test_a_template_that_strips_before_the_last_user_message_splits_there(
    flags: dict[str, Any], expected: int
) -> None:
    # tool, tool | user, tool
    assert samples("qwen_like", [tool(), tool(), user(), tool()], flags) == expected
    assert samples("qwen_like", [tool()] * 4, flags) == 1


def test_between_tool_calls_keeps_thinking_until_each_user_message() -> None:
    # tool, tool | user, tool | user: three samples, where stripping at each turn would give six.
    steps = [tool(), tool(), user(), tool(), user()]
    assert samples("strips_always", steps, NONE) == 6
    assert samples("strips_always", steps, BETWEEN) == 3
    trajectory, _ = play("strips_always", script(thoughts(6)), steps, **BETWEEN)
    assert [text_of(s).count("thinking") for s in trajectory.samples] == [3, 2, 1]


@pytest.mark.parametrize(("flags", "expected"), [(NONE, 2), (BETWEEN, 1), (ALL, 1)])
def test_thinking_that_the_template_writes_in_another_shape_is_no_extension(
    flags: dict[str, Any], expected: int
) -> None:
    # The template puts line breaks around the thinking; the reply had none.
    replies = ["<think>quick</think>answer", "done"]
    assert samples("qwen_like", [tool()], flags, replies) == expected


@pytest.mark.parametrize("compactions", [0, 1, 2, 3])
@pytest.mark.parametrize(("flags", "per_compaction"), [(NONE, 2), (BETWEEN, 2), (ALL, 1), (BOTH, 1)])  # fmt: skip
def test_kept_thinking_gives_one_sample_more_per_compaction_and_stripping_gives_two(
    compactions: int, flags: dict[str, Any], per_compaction: int
) -> None:
    # A tool call, a request for a summary (a user message, so the template strips), the summary in place of all.
    steps = [tool(), user("summarize"), compaction()] * compactions + [tool()]
    assert samples("qwen_like", steps, flags) == 1 + per_compaction * compactions


@pytest.mark.parametrize("flags", [NONE, BETWEEN, ALL])
def test_a_compaction_by_the_environment_alone_gives_one_sample_more(flags: dict[str, Any]) -> None:
    assert samples("qwen_like", [tool(), compaction(), tool(), compaction()], flags) == 3


def test_a_history_that_changes_nothing_does_not_split() -> None:
    def same(history: Any) -> Step:
        return Step([{"role": "tool", "content": "found"}], history=history)

    assert samples("qwen_like", [same, same], NONE) == 1
    assert samples("strips_always", [same, same], ALL) == 1


@pytest.mark.parametrize("template", ["qwen_like", "strips_always", "opens_thinking", "empty_thinking"])  # fmt: skip
def test_a_reply_that_survives_a_compaction_keeps_its_thinking_in_the_new_prompt(
    template: str,
) -> None:
    def shortened(history: Any) -> Step:
        return Step([{"role": "user", "content": "go on"}], history=history[-2:])

    said = ["first", "thinking hard</think>\n\nsecond", "third"]
    if template != "opens_thinking":
        said[1] = "<think>\n" + said[1]
    kept, _ = play(template, script(said), [user("more"), shortened], **ALL)
    stripped, _ = play(template, script(said), [user("more"), shortened])
    expected = "<think>\nthinking hard</think>\n\nsecond"
    assert f"<|end|>\n<|turn|>assistant\n{expected}" in text_of(kept.samples[-1])
    assert "thinking hard" not in text_of(stripped.samples[-1])
    assert len(kept.samples) == 2


def test_the_likeliest_ids_stay_with_their_tokens_and_tool_text_has_none() -> None:
    def reply(turn: int, _: int) -> Generation:
        tokens = [*encode(["one", "two"][turn]), *STOP]
        ids = torch.tensor([[token, 50 + turn] for token in tokens], dtype=torch.int32)
        head = SamplerHead(ids, torch.tensor([[-0.1, -3.0]] * len(tokens)))
        return Generation(torch.tensor(tokens), "stop", 1, -torch.ones(len(tokens)), head=head)

    trajectory, _ = play("plain", ScriptedEngine(reply), [tool()])
    (sample,) = trajectory.samples
    assert sample.head is not None and len(sample.head.ids) == sample.response_length
    response = sample.tokens[-sample.response_length :]
    own = sample.loss_mask != 0
    assert bool((~own).any()) and torch.equal(sample.head.ids[own, 0].long(), response[own])
    assert sample.head.ids[own, 1].unique().tolist() == [50, 51]
    assert bool((sample.head.ids[~own] == -1).all())


def test_thinking_in_a_field_of_its_own_is_kept_too() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "deep"},
        {"role": "user", "content": "c"},
    ]
    texts = {
        keep: ChatRenderer(chat_tokenizer("qwen_like"), keep=keep).render(messages)  # type: ignore[arg-type]
        for keep in ("template", "between_tool_calls", "all")
    }
    assert "deep" not in texts["template"]
    assert texts["between_tool_calls"] == texts["template"]
    assert "assistant\n<think>\ndeep\n</think>\n\nb<|end|>" in texts["all"]


def test_template_arguments_and_tools_reach_the_template() -> None:
    tokenizer = chat_tokenizer("plain")
    tokenizer.chat_template, plain = (
        "{{ tools[0].name }} {{ thinking_on }}",
        tokenizer.chat_template,
    )
    try:
        renderer = ChatRenderer(tokenizer, tools=[{"name": "add"}], arguments={"thinking_on": 5})
        assert renderer.render([{"role": "user", "content": "a"}]) == "add 5"
    finally:
        tokenizer.chat_template = plain


@pytest.mark.parametrize("flags", [NONE, ALL])
@pytest.mark.parametrize("template", ["plain", "strips_always", "empty_thinking"])
def test_the_end_of_a_turn_is_there_once(template: str, flags: dict[str, Any]) -> None:
    trajectory, _ = play(template, script(["one", "two", "three"]), [tool(), user()], **flags)
    for sample in trajectory.samples:
        tokens = sample.tokens.tolist()
        ends, turns = tokens.count(STOP[0]), tokens.count(1)
        assert ends == turns
    text = text_of(trajectory.samples[-1])
    assert text.startswith("<|turn|>user\nquestion 0")
    if template != "empty_thinking":
        assert text == (
            "<|turn|>user\nquestion 0<|end|>\n<|turn|>assistant\none<|end|>\n<|turn|>tool\nfound<|end|>\n"
            "<|turn|>assistant\ntwo<|end|>\n<|turn|>user\nand now?<|end|>\n<|turn|>assistant\nthree<|end|>"
        )


def test_sampled_tokens_that_the_tokenizer_would_not_choose_stay_as_they_were_sampled() -> None:
    letters = [token for letter in "the answer" for token in encode(letter)]
    assert letters != encode("the answer")
    engine = ScriptedEngine(lambda turn, _: [*letters, *STOP])
    trajectory, _ = play("plain", engine, [tool()])
    [sample] = trajectory.samples
    prompt, response = prompt_and_response(sample)
    assert response[: len(letters) + 1] == [*letters, *STOP]
    assert engine.calls[1].request.prompt[len(prompt) :][: len(letters)] == tuple(letters)


def test_bytes_that_are_no_text_do_not_split_a_sample() -> None:
    lone_byte = encode("é")[:1]
    engine = ScriptedEngine(lambda turn, _: [*lone_byte, *STOP])
    trajectory, environment = play("plain", engine, [tool()])
    assert environment.heard[0].text == "\ufffd"
    assert len(trajectory.samples) == 1
    assert prompt_and_response(trajectory.samples[0])[1][0] == lone_byte[0]


def test_masks_and_log_probs_by_hand() -> None:
    trajectory, _ = play("plain", script(["a", "b"]), [tool("c")])
    [sample] = trajectory.samples
    between = encode("\n<|turn|>tool\nc<|end|>\n<|turn|>assistant\n")
    _, response = prompt_and_response(sample)
    assert response == [*encode("a"), *STOP, *between, *encode("b"), *STOP]
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask.tolist() == [1, 1, *[0] * len(between), 1, 1]
    # The scripted engine counts its tokens: the k-th has log-prob -k / 1024.
    sampled = [-1 / 1024, -2 / 1024], [-3 / 1024, -4 / 1024]
    assert sample.rollout_log_probs.tolist() == [*sampled[0], *[0.0] * len(between), *sampled[1]]
    # The scripted engine has new weights at every turn; the policy did not sample what is between.
    assert sample.weight_version.tolist() == [0, 0, *[-1] * len(between), 1, 1]


def test_a_sample_without_inserted_tokens_masks_nothing() -> None:
    trajectory, _ = play("strips_always", script(thoughts(2)), [tool()])
    assert [bool(sample.loss_mask.all()) for sample in trajectory.samples] == [True, True]


def test_the_routes_before_a_token_are_of_the_turn_that_sampled_it_and_cover_every_position() -> (
    None
):
    trajectory, _ = play(
        "qwen_like", script(thoughts(4)), [tool(), user(), tool()], routed_experts=True
    )
    assert len(trajectory.samples) == 2
    for sample, turns in zip(trajectory.samples, ([0, 1], [2, 3]), strict=True):
        routes = sample.routed_experts
        assert routes is not None
        assert len(routes) == len(sample.tokens)
        assert routes.unique().tolist() == turns
        # The scripted engine has as many versions as turns, and routes with the turn's number.
        before = routes[-sample.response_length - 1 : -1, 0, 0]
        sampled = sample.loss_mask != 0
        assert before[sampled].tolist() == sample.weight_version[sampled].tolist()


VOCABULARY = len(chat_tokenizer())
PIECES = ["<think>\n", "</think>", "\n</think>\n\n", "<tool_response>", "\n", " x "]
REPLIES = st.one_of(
    st.lists(st.integers(1, VOCABULARY - 1), max_size=6),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join).map(encode),
).map(lambda tokens: [token for token in tokens if token not in STOP])
STEPS = st.sampled_from(
    [
        tool(),
        tool("</think> the <|end|>"),
        user(),
        compaction(),
        lambda history: Step([{"role": "user", "content": "go on"}], history=history[-3:]),
        lambda history: Step([{"role": "tool", "content": "same"}], history=history),
        Step([{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]),
    ]
)


def check_samples_against_calls(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    """Each call's context and answer is found, in order, in the samples, and nothing else carries loss."""
    calls = iter(engine.calls)
    for sample in trajectory.samples:
        prompt, tokens = prompt_and_response(sample)
        log_probs, mask = sample.rollout_log_probs, sample.loss_mask
        assert log_probs is not None and len(mask) == len(log_probs) == len(tokens)
        assert not log_probs[mask == 0].any()
        position, sampled = 0, 0
        while int(mask.sum()) > sampled:
            call = next(calls)
            assert isinstance(call.answer, Generation)
            start = len(call.request.prompt) - len(prompt)
            end = start + call.answer.tokens.numel()
            assert call.request.prompt == (*prompt, *tokens[:start])
            assert start >= position and not mask[position:start].any()
            assert tokens[start:end] == call.answer.tokens.tolist()
            assert mask[start:end].all()
            assert torch.equal(log_probs[start:end], call.answer.log_probs)
            position, sampled = end, sampled + end - start
        assert position == len(tokens)
    assert next(calls, None) is None


@settings(max_examples=300, deadline=None)
@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    flags=st.sampled_from([NONE, BETWEEN, ALL]),
    turns=st.lists(st.tuples(REPLIES, STEPS), max_size=6),
    last=REPLIES,
    cut=st.booleans(),
)
def test_every_sampled_token_is_trained_on_once_in_the_context_it_was_sampled_in(
    template: str, flags: dict[str, bool], turns: list[Any], last: list[int], cut: bool
) -> None:
    said = [[*reply, *STOP] for reply, _ in turns]
    said.append([*last, encode("x")[0]] if cut else [*last, *STOP])
    engine = ScriptedEngine(lambda turn, _: said[turn])
    trajectory, _ = play(template, engine, [step for _, step in turns], **flags)
    assert trajectory.error is None
    check_samples_against_calls(trajectory, engine)
    if flags is ALL and not any(callable(step) or step.history for _, step in turns):
        assert len(trajectory.samples) == 1
