"""One token per character: the tokenizer of the model that is built on the spot."""

from __future__ import annotations

from collections.abc import Sequence

from plugin.errors import BatchError


class CharacterTokenizer:
    """Ids are positions in `alphabet`; the end of a text is one more token, shown as `end`.

    Example: with alphabet "ab=", "ba=" is [1, 0, 2] and the end is 3.
    """

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

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        unknown = [character for character in text if character not in self._ids]
        if unknown:
            raise BatchError(
                f"{text!r} holds {unknown[0]!r}, which is not among {self._characters!r}"
            )
        return [self._ids[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; the end shows as its character."""
        return "".join(self._characters[token] for token in tokens)
