"""The task of `--prompt-data`: prompts of a dataset, responses scored by their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plugin.errors import ConfigError
from plugin.rewards.reward_set import RewardSet, reward_input
from plugin.tasks.prompt_data import PromptDataset
from plugin.tasks.protocol import Prompt


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
