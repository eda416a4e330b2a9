"""The task of `--prompt-data`: prompts of a dataset by number, responses scored by their text.

Every pass over the rows has its own order.

All rows are checked when the dataset is opened: a missing column, a prompt of a wrong type, one
that the template does not render and one that is too long are found before anything starts, with
file and row.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from plugin.errors import ConfigError
from plugin.rewards.reward_set import RewardSet, reward_input
from plugin.tasks.prompt_format import PromptFormat
from plugin.tasks.protocol import Prompt
from plugin.tasks.row_files import BadRow, Place, Rows, open_rows

_ROWS_AT_ONCE = 1000
_SECONDS_BETWEEN_REPORTS = 5.0
_PLACES_NAMED = 5

Row = Mapping[str, Any]


class PromptDataset:
    """The usable rows of a file or directory, as an endless sequence of prompts.

    option: the flag that names `path`, for messages
    row_problem: returns what else is wrong with a row, such as its label; None if nothing is
    max_prompt_length: in tokens; None = no limit
    bad_rows: whether an unusable row is an error or skipped
    shuffle: a new order for every pass, from `seed`; otherwise the order of the files
    log: prints a message for a person
    fingerprint: hash of all prompts in use; a saved position is only valid for the same data
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        prompt_format: PromptFormat | None = None,
        *,
        option: str = "--prompt-data",
        row_problem: Callable[[Row], str | None] = lambda _: None,
        max_prompt_length: int | None = None,
        bad_rows: Literal["error", "skip"] = "error",
        shuffle: bool = True,
        seed: int = 0,
        log: Callable[[str], None] = print,
    ) -> None:
        self._format = prompt_format or PromptFormat()
        self._tokenizer, self._shuffle, self._seed = tokenizer, shuffle, seed
        self._max_length, self._row_problem = max_prompt_length, row_problem
        self._rows = open_rows(path, option)
        check = _Check(self._rows, lambda text: log(f"{option} {path}: {text}"))
        for numbers, rows in check.chunks():
            self._check_chunk(check, numbers, rows)
        check.report(f"{option} {path}", option, bad_rows)
        self._used = array("q", (n for n in range(len(self._rows)) if n not in check.problems))
        self.fingerprint = check.everything.hexdigest()
        self._order: tuple[int, array[int]] = (-1, self._used)

    def __len__(self) -> int:
        return len(self._used)

    def prompt(self, index: int) -> Prompt:
        """Row `index` modulo the dataset, in the order of its pass."""
        row = self.row(index)
        return Prompt(tuple(self._encode([self._format.text(row, self._tokenizer)])[0]), row)

    def row(self, index: int) -> Row:
        """The columns of prompt `index`."""
        epoch, position = divmod(index, len(self._used))
        if self._shuffle and self._order[0] != epoch:
            order = self._used[:]
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        row = self._rows[self._order[1][position]]
        assert not isinstance(row, BadRow)
        return row

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts; a template brings its own special tokens."""
        if callable(self._tokenizer):  # of Hugging Face: many texts at once are much faster
            special = not self._format.chat
            return self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return [self._tokenizer.encode(text) for text in texts]

    def _check_chunk(
        self, check: _Check, numbers: range, rows: list[dict[str, Any] | BadRow]
    ) -> None:
        texts: dict[int, str] = {}
        for number, row in zip(numbers, rows, strict=True):
            if isinstance(row, BadRow):
                check.problems[number] = row.problem
                continue
            problem = self._format.problem(row) or self._row_problem(row)
            if problem is None:
                try:
                    texts[number] = self._format.text(row, self._tokenizer)
                except Exception as error:
                    problem = f"the chat template fails on it ({_named(error)})"
            if problem is not None:
                check.problems[number] = problem
        doubtful = {n: text for n, text in texts.items() if not self._surely_fits(text)}
        self._check_lengths(check, doubtful)
        check.add(text for number, text in texts.items() if number not in check.problems)

    def _surely_fits(self, text: str) -> bool:
        """Whether the text is neither empty nor too long, as far as its characters already show.

        A token of ASCII text has at least one character, and special tokens around it are few.
        """
        spare = math.inf if self._max_length is None else self._max_length - len(text)
        return callable(self._tokenizer) and text.isascii() and text.strip() != "" and spare >= 16

    def _check_lengths(self, check: _Check, texts: Mapping[int, str]) -> None:
        try:
            encoded = self._encode(list(texts.values())) if texts else []
        except Exception as error:
            if len(texts) == 1:
                check.problems[next(iter(texts))] = f"the tokenizer fails on it ({_named(error)})"
                return
            for number, text in texts.items():
                self._check_lengths(check, {number: text})
            return
        for number, tokens in zip(texts, encoded, strict=True):
            if not tokens:
                check.problems[number] = "the prompt has no tokens; write one"
            elif self._max_length is not None and len(tokens) > self._max_length:
                check.too_long += 1
                check.problems[number] = (
                    f"the prompt has {len(tokens)} tokens, more than {self._max_length}; shorten "
                    "it or raise --max-prompt-length"
                )


class DatasetTask:
    """Prompts of `data`; `rewards` of a response's text and its row.

    In a job the rewards are computed by a `TextScorer`; `reward` is the same on this thread.
    """

    def __init__(self, data: PromptDataset, tokenizer: Any, rewards: RewardSet) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no eos_token_id, so no response could end")
        self.data, self.rewards, self.tokenizer = data, rewards, tokenizer
        self._loaded = rewards.load()
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`, from 0 on without end."""
        return self.data.prompt(index)

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The weighted sum of the rewards of a response."""
        given = reward_input(self, prompt, response, with_prompt=self.asks_prompt)
        return self._loaded.score(given).total

    @property
    def asks_prompt(self) -> bool:
        """Whether a reward reads the prompt's text."""
        return self._loaded.asks_prompt


class _Check:
    """Findings of the first pass over all rows."""

    def __init__(self, rows: Rows, log: Callable[[str], None]) -> None:
        self._rows, self._log = rows, log
        self.problems: dict[int, str] = {}
        self.too_long = 0
        self._duplicates = 0
        self._seen: set[bytes] = set()
        self.everything = hashlib.blake2b(digest_size=16)

    def chunks(self) -> Iterator[tuple[range, list[dict[str, Any] | BadRow]]]:
        """All rows with their numbers, some at a time; reports progress."""
        reported, start, rest = time.monotonic(), 0, iter(self._rows)
        while chunk := list(islice(rest, _ROWS_AT_ONCE)):
            yield range(start, start + len(chunk)), chunk
            start += len(chunk)
            if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                self._log(f"{start} of {len(self._rows)} rows checked")

    def add(self, texts: Iterator[str]) -> None:
        """Count the prompts of usable rows."""
        for text in texts:
            digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
            self._duplicates += digest in self._seen
            self._seen.add(digest)
            self.everything.update(digest)

    def report(self, what: str, option: str, bad_rows: str) -> None:
        """Raise or print what is wrong with the rows."""
        total, bad = len(self._rows), sorted(self.problems)
        if not total:
            raise ConfigError(f"{what} holds no row; give one JSON object per line, or a table")
        if bad:
            first = self._rows.place(bad[0])
            problem = self.problems[bad[0]]
            if len(bad) == total or bad_rows == "error":
                also = self._others(first, bad[1:])
                escape = "; --bad-rows skip leaves them out" if len(bad) < total else ""
                raise ConfigError(f"{option} {first}: {problem}{also}{escape}")
            long = f" ({self.too_long} too long)" if self.too_long else ""
            self._log(
                f"{len(bad)} of {total} rows are left out{long}; the first is {first.unit} "
                f"{first.number}: {problem}"
            )
        if self._duplicates:
            self._log(f"{self._duplicates} of {total} rows repeat the prompt of an earlier row")

    def _others(self, first: Place, bad: list[int]) -> str:
        if not bad:
            return ""
        places = [self._rows.place(number) for number in bad[:_PLACES_NAMED]]
        named = ", ".join(
            str(place.number) if place.file == first.file else f"{place.file.name}:{place.number}"
            for place in places
        )
        dots = ", ..." if len(bad) > _PLACES_NAMED else ""
        total = len(self._rows)
        return f"; {len(bad)} of {total} rows are bad besides ({first.unit}s {named}{dots})"


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
