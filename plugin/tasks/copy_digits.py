"""The built-in task: repeat three digits. `725=` is answered by `725` and the end of the text.

The reward is the share of positions that are right, so a random policy earns about 0.04 and a
perfect one 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from plugin.tasks.protocol import Prompt, Tokenizer

#: Characters of the model that is built for this task; the spare ones are for a user's own tasks.
ALPHABET = "0123456789=+-*"


class CopyDigitsTask:
    """Random digits and their copy; prompt `index` of a seed is always the same."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int = 0, digits: int = 3) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._digits = digits
        self.stop_token_ids: tuple[int, ...] = (tokenizer.eos_token_id,)

    def prompt(self, index: int) -> Prompt:
        """Digits and `=`; the answer is in `data`."""
        draw = random.Random(f"{self._seed}/{index}")
        answer = "".join(draw.choice("0123456789") for _ in range(self._digits))
        return Prompt(tuple(self._tokenizer.encode(answer + "=")), {"answer": answer})

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """Right positions divided by the longer of response and answer, both with their end.

        Example: answer 725; the response 7 2 9 end has 3 of 4 right, 7 2 5 5 end has 3 of 5.
        """
        wanted = [*self._tokenizer.encode(prompt.data["answer"]), self._tokenizer.eos_token_id]
        right = sum(a == b for a, b in zip(wanted, response, strict=False))
        return right / max(len(wanted), len(response))
