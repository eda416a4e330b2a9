"""The built-in task, JSONL prompts and the character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugin.errors import BatchError, ConfigError
from plugin.rollout.tasks.character_tokenizer import CharacterTokenizer
from plugin.rollout.tasks.copy_digits import ALPHABET, CopyDigitsTask
from plugin.rollout.tasks.jsonl import JsonlTask
from plugin.rollout.tasks.protocol import (
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


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_every_pass_over_a_file_uses_each_row_once_in_its_own_order(tmp_path: Path) -> None:
    file = write_rows(
        tmp_path / "p.jsonl", [{"prompt": f"{i}=", "answer": str(i)} for i in range(9)]
    )
    task = JsonlTask(file, TOKENIZER, seed=1)
    passes = [[task.prompt(9 * epoch + i).tokens for i in range(9)] for epoch in range(2)]
    assert sorted(passes[0]) == sorted(passes[1])
    assert len(set(passes[0])) == 9
    assert passes[0] != passes[1]
    assert task.prompt(0).tokens == passes[0][0]


def test_exact_match_ignores_the_stop_token_and_a_reward_function_sees_the_row(
    tmp_path: Path,
) -> None:
    file = write_rows(tmp_path / "p.jsonl", [{"prompt": "1=", "answer": "1", "bonus": "5"}])
    task = JsonlTask(file, TOKENIZER)
    assert task.reward(task.prompt(0), TOKENIZER.encode("1$")) == 1.0
    assert task.reward(task.prompt(0), TOKENIZER.encode("11$")) == 0.0
    own = JsonlTask(
        file, TOKENIZER, reward_function=lambda text, row: len(text) + int(row["bonus"])
    )
    assert own.reward(own.prompt(0), TOKENIZER.encode("11$")) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "1="}', "line 1: no 'answer'"),
        ('{"prompt": "1=", "answer": "1"}\n{"prompt', "line 2: not JSON"),
        ("", "holds no line"),
    ],
)
def test_a_broken_prompt_file_is_named_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        JsonlTask(file, TOKENIZER)


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
