"""Chat templates, a tokenizer for them, and engines and environments that follow a script."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plugin.batch_types import RolloutSample
from plugin.config import JobConfig
from plugin.engines.protocol import (
    Answer,
    Generation,
    GenerationRequest,
    SamplingParameters,
)
from plugin.environments.environment_protocol import Ending, Message, Reply, Step
from plugin.environments.trajectory import Trajectory
from tests.unit.environments.played_groups import run_multi_turn

SPECIAL = ("<|end|>", "<|turn|>", "<|pad|>")

#: Everything as it was said.
PLAIN = """\
{%- for m in messages %}<|turn|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif %}"""

#: Thinking before the last user message goes; thinking after it is written anew, in one shape. Tool output is no user's.
QWEN_LIKE = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
  {%- set part = namespace(thinking='', content=m.content) %}
  {%- if m.role == 'assistant' %}
    {%- if m.reasoning_content is string %}
      {%- set part.thinking = m.reasoning_content %}
    {%- elif '</think>' in m.content %}
      {%- set part.thinking = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set part.content = m.content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
  {%- endif %}
{{- '<|turn|>' + m.role + '\\n' }}
  {%- if part.thinking and loop.index0 > last.user %}
{{- '<think>\\n' + part.thinking + '\\n</think>\\n\\n' }}
  {%- endif %}
{{- part.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

#: Every older reply loses its thinking.
STRIPS_ALWAYS = """\
{%- for m in messages %}{{ '<|turn|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

#: As above, and the prompt for a reply opens its thinking.
OPENS_THINKING = STRIPS_ALWAYS.replace(
    "{{ '<|turn|>assistant\\n' }}", "{{ '<|turn|>assistant\\n<think>\\n' }}"
)

#: As above, but an older reply shows an empty thinking block, and its end stands on a line of its own.
EMPTY_THINKING = """\
{%- for m in messages %}{{ '<|turn|>' + m.role + '\\n' }}
  {%- if m.role == 'assistant' %}{{ '<think></think>\\n' }}{% endif %}
{{- m.content.split('</think>')[-1].strip() + '\\n<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

TEMPLATES = {
    "plain": PLAIN,
    "qwen_like": QWEN_LIKE,
    "strips_always": STRIPS_ALWAYS,
    "opens_thinking": OPENS_THINKING,
    "empty_thinking": EMPTY_THINKING,
}


@functools.cache
def chat_tokenizer(template: str = "plain") -> Any:
    """Byte-level BPE with a few merges, so that a text has many tokenizations of which one is canonical."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["user assistant tool the answer thinking think answer tool the the"] * 8
    tokenizer.train_from_iterator(words, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = TEMPLATES[template]
    return fast


STOP = (0,)  # <|end|>


def encode(text: str) -> list[int]:
    return list(chat_tokenizer().encode(text, add_special_tokens=False))


def text_of(sample: RolloutSample) -> str:
    """What a reader of the sample's tokens sees."""
    return str(chat_tokenizer().decode(sample.tokens.tolist(), skip_special_tokens=False))


def prompt_and_response(sample: RolloutSample) -> tuple[list[int], list[int]]:
    tokens, length = sample.tokens.tolist(), sample.response_length
    return tokens[:-length], tokens[-length:]


@dataclass
class Call:
    """One response that the engine was asked for, and gave."""

    request: GenerationRequest
    seed: int
    answer: Answer


@dataclass
class ScriptedEngine:
    """Answers with `reply(turn, seed)`: tokens, or a finished answer; records what it was asked."""

    reply: Callable[[int, int], list[int] | Answer]
    stop: tuple[int, ...] = STOP
    calls: list[Call] = field(default_factory=list)
    batches: int = 0

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Answer]]:
        answers = [
            [self._answer(request, seed, parameters) for seed in request.seeds]
            for request in requests
        ]
        self.batches += 1
        return answers

    def _answer(
        self, request: GenerationRequest, seed: int, parameters: SamplingParameters
    ) -> Answer:
        said = self.reply(self.batches, seed)
        if isinstance(said, list):
            # Log-probs that are different for every token of every call, and never 0.
            start = 1 + sum(
                len(c.answer.tokens) for c in self.calls if isinstance(c.answer, Generation)
            )
            said = Generation(
                torch.tensor(said, dtype=torch.int64),
                "stop" if said and said[-1] in self.stop else "length",
                self.batches,
                -torch.arange(start, start + len(said)) / 1024,
                torch.full((len(request.prompt) + len(said), 2, 2), self.batches, dtype=torch.uint8)
                if parameters.routed_experts
                else None,
            )  # fmt: skip
        self.calls.append(Call(request, seed, said))
        return said


def script(replies: Sequence[str]) -> ScriptedEngine:
    """An engine whose replies have these texts, each ended by the end of turn."""
    return ScriptedEngine(lambda turn, _: [*encode(replies[turn]), *STOP])


@dataclass
class ScriptedEnvironment:
    """Gives `steps` in order, then ends; a step may be a function of the history, or an exception."""

    steps: Sequence[Any]
    worth: float = 1.0
    heard: list[Reply] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    closed: int = 0

    def step(self, reply: Reply, history: Sequence[Message]) -> Step:
        assert history[-1] == {"role": "assistant", "content": reply.text}
        self.heard.append(reply)
        if len(self.heard) > len(self.steps):
            return Step(done=True)
        step = self.steps[len(self.heard) - 1]
        if isinstance(step, BaseException):
            raise step
        return step(history) if callable(step) else step

    def reward(self, ending: Ending) -> float:
        self.endings.append(ending)
        return self.worth

    def close(self) -> None:
        self.closed += 1


@dataclass
class ScriptedTask:
    """Environments by number."""

    make: Callable[[int, int], Any]
    stop_token_ids: tuple[int, ...] = STOP
    tools: Sequence[Mapping[str, Any]] = ()

    def messages(self, index: int) -> list[Message]:
        return [{"role": "user", "content": f"question {index}"}]

    def environment(self, index: int, seed: int) -> Any:
        return self.make(index, seed)


def tool(text: str = "found") -> Step:
    return Step([{"role": "tool", "content": text}])


def user(text: str = "and now?") -> Step:
    return Step([{"role": "user", "content": text}])


def compaction(text: str = "summary", *more: Message) -> Step:
    return Step(history=[{"role": "user", "content": text}, *more])


def play(
    template: str, engine: ScriptedEngine, steps: Sequence[Any], **flags: Any
) -> tuple[Trajectory, ScriptedEnvironment]:
    """One trajectory with prompt 0 and seed 7."""
    environment = ScriptedEnvironment(steps)
    [[trajectory]] = run_multi_turn(
        engine,
        [GenerationRequest((), (7,))],
        SamplingParameters(stop_token_ids=STOP, routed_experts=flags.pop("routed_experts", False)),
        task=ScriptedTask(lambda index, seed: environment),
        tokenizer=chat_tokenizer(template),
        config=JobConfig(**flags),
    )
    return trajectory, environment
