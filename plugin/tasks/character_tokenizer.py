"""One token per character: the tokenizer of the model that is built on the spot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugin.errors import BatchError, ConfigError


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
