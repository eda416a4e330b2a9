"""The rewards of responses that arrive as token ids: a worker decodes them and scores the text.

Imports neither numpy nor transformers: every worker would pay for it when it starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugin.errors import BatchError
from plugin.rewards.reward_set import RewardInput, RewardSet, Score, reward_input
from plugin.tasks.protocol import Prompt

_ID_BYTES = 4


def ids_of(response: bytes) -> list[int]:
    """The token ids that were sent as the bytes of int32 numbers."""
    return array("i", response).tolist()


@dataclass(frozen=True)
class TokenResponse:
    """A response as it is sent to a worker.

    tokens: its ids, as the bytes of int32 numbers
    row: the columns of its prompt; prompt: its ids, if a reward reads the prompt's text
    """

    tokens: bytes
    row: Mapping[str, Any]
    truncated: bool = False
    prompt: tuple[int, ...] = ()


@dataclass(frozen=True)
class PortableTokenizer:
    """A tokenizer as it is sent to other processes, which only decode with it.

    fast: the JSON of one of the library `tokenizers`; it loads without transformers
    other: any other tokenizer, as it is
    """

    fast: str | None = None
    other: Any = None

    @classmethod
    def of(cls, tokenizer: Any) -> PortableTokenizer:
        """`tokenizer` with the same `decode`."""
        if _decodes_by_backend(tokenizer):
            return cls(fast=tokenizer.backend_tokenizer.to_str())
        return cls(other=tokenizer)

    def load(self) -> Any:
        """An object with `decode(ids) -> text`."""
        if self.fast is None:
            return self.other
        import tokenizers

        return _FastDecoder(tokenizers.Tokenizer.from_str(self.fast))


@dataclass(frozen=True)
class _FastDecoder:
    backend: Any

    def decode(self, tokens: list[int]) -> str:
        text: str = self.backend.decode(tokens, skip_special_tokens=False)
        return text


def _decodes_by_backend(tokenizer: Any) -> bool:
    """Whether `tokenizer.decode` is that of the library `tokenizers`, and nothing more."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return False
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if kind.decode is not PreTrainedTokenizerBase.decode:
        return False
    if kind._decode is not PreTrainedTokenizerFast._decode:
        return False
    # transformers 5 leaves the spaces of BPE tokenizers alone, unless this says otherwise.
    corrupts = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    leaves_spaces = is_bpe and not getattr(tokenizer, corrupts, True)
    return leaves_spaces or not tokenizer.clean_up_tokenization_spaces


@dataclass(frozen=True)
class TextSource:
    """How rewards of text are sent to a worker: with what makes text of token ids."""

    rewards: RewardSet
    tokenizer: PortableTokenizer
    stop_token_ids: tuple[int, ...]

    def load(self) -> TextRewards:
        return TextRewards(self)

    def timed_out(self, given: TokenResponse) -> Score | None:
        """As `RewardSet.timed_out`."""
        length = len(given.tokens) // _ID_BYTES
        return self.rewards.timed_out(RewardInput("", given.row, num_tokens=length))


class TextRewards:
    """The tokenizer and the rewards of a worker, loaded once."""

    def __init__(self, source: TextSource) -> None:
        self.tokenizer, self.stop_token_ids = source.tokenizer.load(), source.stop_token_ids
        self._rewards = source.rewards.load()

    def import_libraries(self) -> None:
        self._rewards.import_libraries()

    def score(self, given: TokenResponse) -> Score:
        """The rewards of one response; a `BatchError` if it has no text or no finite reward."""
        prompt = Prompt(given.prompt, given.row)
        try:
            text = reward_input(
                self,
                prompt,
                ids_of(given.tokens),
                truncated=given.truncated,
                with_prompt=self._rewards.asks_prompt,
            )
        except Exception as error:  # of whatever tokenizer
            raise BatchError(f"the tokenizer failed: {type(error).__name__}: {error}") from error
        return self._rewards.score(text)
