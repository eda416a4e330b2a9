"""Prompts of `--prompt-data`: a JSONL file with `{"prompt": "...", "answer": "..."}` per line.

`prompt` is text, or a list of chat messages when the chat template is applied. Other keys are
passed to the reward function as they are. Every pass over the file has its own order. All rows are
checked when the task is made: a prompt of a wrong type, one that the template does not render and
one that is too long are found before anything starts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from plugin.errors import ConfigError
from plugin.json_lines import read_json_lines
from plugin.rollout.tasks.protocol import Prompt

_ROWS_AT_ONCE = 1000
_SECONDS_BETWEEN_REPORTS = 5.0
_LINES_NAMED = 5

RewardFunction = Callable[[str, Mapping[str, Any]], float]


def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """1 if the response is the row's answer, apart from white space around it."""
    return float(response.strip() == str(row["answer"]).strip())


class JsonlTask:
    """A task over the rows of a file.

    template_arguments: what the chat template is called with besides the messages
    max_prompt_length: of a row, in tokens; None = no limit
    bad_rows: whether a row that cannot be used is an error or left out
    say: prints a message for a person
    """

    def __init__(
        self,
        file: str | Path,
        tokenizer: Any,
        *,
        reward_function: RewardFunction | None = None,
        apply_chat_template: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        max_prompt_length: int | None = None,
        bad_rows: Literal["error", "skip"] = "error",
        seed: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no eos_token_id, so no response could end")
        self._tokenizer = tokenizer
        self._reward_function = reward_function or exact_match
        self._chat = apply_chat_template
        self._template_arguments = dict(template_arguments or {})
        self._seed = seed
        rows, problems = _read_rows(Path(file), needs_answer=reward_function is None)
        problems |= self._unusable(rows, max_prompt_length, lambda text: say(f"{file}: {text}"))
        _report(file, problems, len(rows.keys() | problems.keys()), bad_rows, say)
        self._rows = [row for number, row in rows.items() if number not in problems]
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)

    def prompt(self, index: int) -> Prompt:
        """Row `index` modulo the file, in the order of its pass."""
        epoch, position = divmod(index, len(self._rows))
        if self._shuffled[0] != epoch:
            order = list(range(len(self._rows)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._shuffled = (epoch, order)
        row = self._rows[self._shuffled[1][position]]
        return Prompt(tuple(self._encode([self._text(row)])[0]), row)

    def _text(self, row: Mapping[str, Any]) -> str:
        """What is tokenized of a row."""
        given = row["prompt"]
        if not self._chat:
            return given
        messages = given if isinstance(given, list) else [{"role": "user", "content": given}]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._template_arguments
        )

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts; a template brings its own special tokens."""
        if callable(self._tokenizer):  # of Hugging Face: many texts at once are much faster
            special = not self._chat
            return self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return [self._tokenizer.encode(text) for text in texts]

    def _unusable(
        self,
        rows: Mapping[int, dict[str, Any]],
        max_length: int | None,
        progress: Callable[[str], None],
    ) -> dict[int, str]:
        """What is wrong with the prompts of rows, by line number."""
        problems: dict[int, str] = {}
        reported = time.monotonic()
        numbers = list(rows)
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            texts: dict[int, str] = {}
            for number in numbers[start : start + _ROWS_AT_ONCE]:
                problem = _type_problem(rows[number]["prompt"], self._chat)
                if problem is None:
                    try:
                        text = self._text(rows[number])
                        if not self._surely_fits(text, max_length):
                            texts[number] = text
                    except Exception as error:
                        problem = f"the chat template fails on it ({_named(error)})"
                if problem is not None:
                    problems[number] = problem
            problems |= self._length_problems(texts, max_length)
            if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                progress(f"{start + _ROWS_AT_ONCE} of {len(numbers)} rows checked")
        return problems

    def _surely_fits(self, text: str, max_length: int | None) -> bool:
        """Whether the text need not be tokenized to know that it is neither empty nor too long.

        A token of ASCII text has at least one character, and special tokens around it are few.
        """
        spare = math.inf if max_length is None else max_length - len(text)
        return callable(self._tokenizer) and text.isascii() and text.strip() != "" and spare >= 16

    def _length_problems(self, texts: Mapping[int, str], max_length: int | None) -> dict[int, str]:
        try:
            encoded = self._encode(list(texts.values())) if texts else []
        except Exception as error:
            if len(texts) == 1:
                return dict.fromkeys(texts, f"the tokenizer fails on it ({_named(error)})")
            alone = [self._length_problems({n: text}, max_length) for n, text in texts.items()]
            return {number: problem for one in alone for number, problem in one.items()}
        problems: dict[int, str] = {}
        for number, tokens in zip(texts, encoded, strict=True):
            if not tokens:
                problems[number] = "the prompt has no tokens; write one"
            elif max_length is not None and len(tokens) > max_length:
                problems[number] = (
                    f"the prompt has {len(tokens)} tokens, more than {max_length}; shorten it or "
                    "raise --max-prompt-length"
                )
        return problems

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The reward function's value for the text of the response, without the stop token."""
        kept = [token for token in response if token not in self.stop_token_ids]
        return self._reward_function(self._tokenizer.decode(kept), prompt.data)


def _read_rows(
    file: Path, *, needs_answer: bool
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The rows with the keys they need, and what is wrong with the others, by line number."""
    rows: dict[int, dict[str, Any]] = {}
    problems: dict[int, str] = {}
    wanted = ("prompt", "answer") if needs_answer else ("prompt",)
    try:
        for line in read_json_lines(file):
            missing = [key for key in wanted if line.value is not None and key not in line.value]
            if line.value is None:
                problems[line.number] = line.problem
            elif missing:
                problems[line.number] = (
                    f"no {missing[0]!r}; every line is a JSON object with {' and '.join(wanted)}"
                )
            else:
                rows[line.number] = line.value
    except OSError as error:
        raise ConfigError(f"--prompt-data {file} cannot be read ({error.strerror})") from error
    return rows, problems


def _type_problem(prompt: Any, chat: bool) -> str | None:
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return (
            f"the prompt is of type {type(prompt).__name__}; it must be text or a list of messages"
        )
    if not chat:
        return "the prompt is a list of messages; render it with --apply-chat-template"
    if not prompt or not all(isinstance(message, dict) for message in prompt):
        return 'the prompt must be a list of messages such as {"role": "user", "content": "..."}'
    return None


def _report(
    file: str | Path,
    problems: Mapping[int, str],
    total: int,
    bad_rows: str,
    say: Callable[[str], None],
) -> None:
    """Raise or print what is wrong with a file of `total` rows."""
    if not total:
        raise ConfigError(f"--prompt-data {file} holds no line; give one JSON object per line")
    if not problems:
        return
    first, *others = sorted(problems)
    if len(problems) == total or bad_rows == "error":
        also = ""
        if others:
            named = ", ".join(map(str, others[:_LINES_NAMED]))
            dots = ", ..." if len(others) > _LINES_NAMED else ""
            also = f"; {len(others)} of {total} rows are bad besides (lines {named}{dots})"
        escape = "; --bad-rows skip leaves them out" if len(problems) < total else ""
        raise ConfigError(f"--prompt-data {file}, line {first}: {problems[first]}{also}{escape}")
    say(
        f"--prompt-data {file}: {len(problems)} of {total} rows are left out; the first is line "
        f"{first}: {problems[first]}"
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
