"""The task of `--prompt-data`: prompts of a dataset, responses scored by their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plugin.errors import ConfigError
from plugin.rollout.tasks.prompt_data import PromptDataset
from plugin.rollout.tasks.protocol import Prompt

RewardFunction = Callable[[str, Mapping[str, Any]], float]


class DatasetTask:
    """Prompts of `data`, and `reward_function` of a response's text and its row."""

    def __init__(
        self, data: PromptDataset, tokenizer: Any, reward_function: RewardFunction
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no eos_token_id, so no response could end")
        self.data = data
        self._tokenizer, self._reward_function = tokenizer, reward_function
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`, from 0 on without end."""
        return self.data.prompt(index)

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The reward function's value for the text of the response, without the stop token."""
        kept = [token for token in response if token not in self.stop_token_ids]
        return self._reward_function(self._tokenizer.decode(kept), prompt.data)
