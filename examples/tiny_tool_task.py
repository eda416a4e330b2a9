"""A tool that a model with a hundred thousand parameters learns to use: look up a digit, then say it.

    megatron-tis train --config examples/multi_turn_tools.yaml

The characters of the built-in model are digits and `=+-*$`, so the chat template is short:

    user 7           7=
    reply            34-*7$     thinks 34, asks the tool for key 7 and ends its turn
    tool 2           +2=
    reply            2$         the answer

Like the templates of thinking models, this one shows older replies without their thinking: the second reply reads
`7=*7$+2=`, which does not extend `7=34-*7$`, so the trajectory becomes two training samples. With
--preserve-thinking-between-tool-calls or --preserve-all-thinking the second reply reads `7=34-*7$+2=`, and it is one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from plugin.environments.environment_protocol import Ending, Message, Reply, Step

DIGITS = "0123456789"
TEMPLATE = """\
{%- for m in messages %}
  {%- if m.role == 'assistant' %}{{ m.content.split('-')[-1] + '$' }}
  {%- else %}{{ ('+' if m.role == 'tool' else '') + m.content + '=' }}
  {%- endif %}
{%- endfor %}"""


class LookupTask:
    """A key of a table that only the tool knows; both are drawn from the seed and the number."""

    tools: tuple[Any, ...] = ()

    def __init__(self, config: Any, tokenizer: Any) -> None:
        tokenizer.chat_template = TEMPLATE
        self.stop_token_ids = (tokenizer.eos_token_id,)
        self._seed = config.seed

    def messages(self, index: int) -> list[Message]:
        """The key, as the user's message."""
        return [{"role": "user", "content": self._key_and_table(index)[0]}]

    def environment(self, index: int, seed: int) -> LookupEnvironment:
        """The tool and the judge of one conversation."""
        return LookupEnvironment(*self._key_and_table(index))

    def _key_and_table(self, index: int) -> tuple[str, dict[str, str]]:
        draw = random.Random(f"{self._seed}/{index}")
        return draw.choice(DIGITS), {digit: draw.choice(DIGITS) for digit in DIGITS}


class LookupEnvironment:
    """Answers `*` and a digit; anything else is the final answer."""

    def __init__(self, key: str, table: dict[str, str]) -> None:
        self._table = table
        self._wanted = ["*" + key]
        self._answers: list[str] = []

    def step(self, reply: Reply, history: Sequence[Message]) -> Step:
        """The tool's output: the value of the key."""
        answer = reply.text.split("-")[-1]
        self._answers.append(answer)
        found = self._table.get(answer[1:]) if answer.startswith("*") else None
        if found is None:
            return Step(done=True)
        self._wanted.append(found)
        return Step([{"role": "tool", "content": found}])

    def reward(self, ending: Ending) -> float:
        """Half for asking for the right key first, half for saying what the tool said; a wrong key's value counts."""
        scores = map(_likeness, self._answers[:2], self._wanted)
        return sum(scores) / 2


def _likeness(said: str, wanted: str) -> float:
    """Right positions divided by the longer length, both with their end: a signal before the first whole answer.

    Example: `*7$` is wanted; `*$` has 1 of 3 right, `*4$` 2 of 3.
    """
    pairs = list(zip_longest(said + "$", wanted + "$"))
    return sum(a == b for a, b in pairs) / len(pairs)
