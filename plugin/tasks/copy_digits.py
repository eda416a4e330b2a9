"""The built-in task, repeat three digits, and its tokenizer: one token per character.

`725=` is answered by `725` and the end of the text. The reward is the share of positions that are
right: a random policy earns about 0.04, a perfect one 1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from plugin.errors import BatchError, ConfigError
from plugin.tasks.protocol import Prompt, Tokenizer

#: Characters of the model that is built for this task; the spare ones are for a user's own tasks.
ALPHABET = "0123456789=+-*"


class CharacterTokenizer:
    """Ids are positions in `alphabet`; the end of a text is one more token, shown as `end`.

    Example: with alphabet "ab=", "ba=" is [1, 0, 2] and the end is 3. Keywords that Hugging Face
    tokenizers take are accepted where they change nothing.

    chat_template: Jinja text; none until a task sets one, because the alphabet says nothing of
        roles
    """

    chat_template: str | None = None

    def __init__(self, alphabet: str, end: str = "$") -> None:
        if len(set(alphabet + end)) != len(alphabet) + 1:
            raise BatchError(f"alphabet {alphabet!r} repeats a character or holds the end {end!r}")
        self._characters = alphabet + end
        self._ids = {character: number for number, character in enumerate(self._characters)}
        self.eos_token_id = len(alphabet)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, with the end."""
        return len(self._characters)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`."""
        unknown = [character for character in text if character not in self._ids]
        if unknown:
            raise BatchError(
                f"{text!r} holds {unknown[0]!r}, which is not among {self._characters!r}"
            )
        return [self._ids[character] for character in text]

    def decode(
        self,
        tokens: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Text of token ids; the end shows as its character unless special tokens are skipped."""
        kept = [t for t in tokens if not (skip_special_tokens and t == self.eos_token_id)]
        return "".join(self._characters[token] for token in kept)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **arguments: Any,
    ) -> str | list[int]:
        """`messages` through `chat_template`, as text or as token ids."""
        if self.chat_template is None:
            raise ConfigError("this tokenizer has no chat template; set its chat_template first")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = jinja.from_string(self.chat_template).render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )
        return self.encode(text) if tokenize else text


class CopyDigitsTask:
    """Random digits and their copy; prompt `index` of a seed is always the same."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self.stop_token_ids: tuple[int, ...] = (tokenizer.eos_token_id,)

    def prompt(self, index: int) -> Prompt:
        """Digits and `=`; the answer is in `data`."""
        draw = random.Random(f"{self._seed}/{index}")
        answer = "".join(draw.choice("0123456789") for _ in range(3))
        return Prompt(tuple(self._tokenizer.encode(answer + "=")), {"answer": answer})

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """Right positions divided by the longer of response and answer, both with their end.

        Example: answer 725; the response 7 2 9 end has 3 of 4 right, 7 2 5 5 end has 3 of 5.
        """
        wanted = [*self._tokenizer.encode(prompt.data["answer"]), self._tokenizer.eos_token_id]
        right = sum(a == b for a, b in zip(wanted, response, strict=False))
        return right / max(len(wanted), len(response))
