"""Prompts of `--prompt-data`: a JSONL file with `{"prompt": "...", "answer": "..."}` per line.

`prompt` is text, or a list of chat messages when the chat template is applied. Other keys are
passed to the reward function as they are. Every pass over the file has its own order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError
from plugin.rollout.tasks.protocol import Prompt

RewardFunction = Callable[[str, Mapping[str, Any]], float]


def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """1 if the response is the row's answer, apart from white space around it."""
    return float(response.strip() == str(row["answer"]).strip())


class JsonlTask:
    """A task over the rows of a file.

    template_arguments: what the chat template is called with besides the messages
    """

    def __init__(
        self,
        file: str | Path,
        tokenizer: Any,
        *,
        reward_function: RewardFunction | None = None,
        apply_chat_template: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._file = Path(file)
        self._tokenizer = tokenizer
        self._reward_function = reward_function or exact_match
        self._chat = apply_chat_template
        self._template_arguments = dict(template_arguments or {})
        self._seed = seed
        self._rows = _read_rows(self._file, needs_answer=reward_function is None)
        self._shuffled: tuple[int, list[int]] = (-1, [])
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no eos_token_id, so no response could end")
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)

    def prompt(self, index: int) -> Prompt:
        """Row `index` modulo the file, in the order of its pass."""
        epoch, position = divmod(index, len(self._rows))
        if self._shuffled[0] != epoch:
            order = list(range(len(self._rows)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._shuffled = (epoch, order)
        row = self._rows[self._shuffled[1][position]]
        text = row["prompt"]
        if not self._chat:
            return Prompt(tuple(self._tokenizer.encode(text)), row)
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._template_arguments
        )
        return Prompt(tuple(self._tokenizer.encode(rendered, add_special_tokens=False)), row)

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The reward function's value for the text of the response, without the stop token."""
        kept = [token for token in response if token not in self.stop_token_ids]
        return self._reward_function(self._tokenizer.decode(kept), prompt.data)


def _read_rows(file: Path, *, needs_answer: bool) -> list[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompt-data {file} cannot be read ({error.strerror})") from error
    rows = []
    wanted = ("prompt", "answer") if needs_answer else ("prompt",)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--prompt-data {file}, line {number}: not JSON ({error})") from error
        missing = [key for key in wanted if not isinstance(row, dict) or key not in row]
        if missing:
            raise ConfigError(
                f"--prompt-data {file}, line {number}: no {missing[0]!r}; every line is a JSON object "
                f"with {' and '.join(wanted)}"
            )
        rows.append(row)
    if not rows:
        raise ConfigError(f"--prompt-data {file} holds no line; give one JSON object per line")
    return rows
