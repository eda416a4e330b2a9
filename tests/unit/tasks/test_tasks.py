"""The built-in task and the character tokenizer."""

from __future__ import annotations

import pytest

from plugin.errors import BatchError, ConfigError
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from plugin.tasks.protocol import (
    Prompt,
    checked_prompt,
    checked_reward,
    require_task,
)

TOKENIZER = CharacterTokenizer(ALPHABET)


def test_encoding_and_decoding_are_inverse_and_the_end_has_its_own_id() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("725=")) == "725="
    assert TOKENIZER.eos_token_id == len(ALPHABET) == TOKENIZER.vocab_size - 1
    with pytest.raises(BatchError, match="'x'"):
        TOKENIZER.encode("7x")


def test_a_prompt_is_determined_by_seed_and_number() -> None:
    task = CopyDigitsTask(TOKENIZER, seed=3)
    assert task.prompt(5) == CopyDigitsTask(TOKENIZER, seed=3).prompt(5)
    assert len({task.prompt(i).tokens for i in range(50)}) > 40
    assert task.prompt(5) != CopyDigitsTask(TOKENIZER, seed=4).prompt(5)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("725$", 1.0),
        ("729$", 3 / 4),
        ("7255$", 3 / 5),  # right: 7, 2, 5; the longer of the two has 5 positions
        ("$", 0.0),
        ("725", 3 / 4),
    ],
)
def test_the_reward_is_the_share_of_right_positions(response: str, reward: float) -> None:
    prompt = Prompt(tuple(TOKENIZER.encode("725=")), {"answer": "725"})
    assert CopyDigitsTask(TOKENIZER).reward(prompt, TOKENIZER.encode(response)) == reward


def test_prompts_and_rewards_are_checked() -> None:
    class Odd(CopyDigitsTask):
        def reward(self, prompt: Prompt, response: object) -> float:
            return float("nan")

    task = Odd(TOKENIZER)
    with pytest.raises(BatchError, match="4 tokens; it must have between 1 and 3"):
        checked_prompt(task, 0, 3)
    with pytest.raises(BatchError, match="is nan; it must be a finite number"):
        checked_reward(task, task.prompt(0), [1])
    with pytest.raises(ConfigError, match="without stop_token_ids, prompt, reward"):
        require_task(object(), "a.b")
