"""Who scores: the built-in task and tasks by path on the driver, or the latter in workers on demand."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from plugin.config import JobConfig
from plugin.environments.deadline_calls import CallFailure
from plugin.errors import ConfigError
from plugin.rewards.reward_set import Score
from plugin.rewards.scorers import DriverScorer, TaskScorer, make_scorer
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from plugin.tasks.loading import load_task

TOKENIZER = CharacterTokenizer(ALPHABET)

OWN = """
import os, time
from plugin.tasks.copy_digits import CopyDigitsTask

class Own(CopyDigitsTask):
    def reward(self, prompt, response):
        if response == [0]:
            time.sleep(60)
        if response == [1]:
            return None
        return os.getpid() if response == [2] else super().reward(prompt, response)

def make(config, tokenizer):
    return Own(tokenizer, seed=config.seed)
"""


def test_a_task_by_path_is_scored_by_workers_if_their_number_is_given(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    config = JobConfig(task_path=f"{file}:make", reward_workers=1, reward_timeout=20.0)
    task = load_task(config, TOKENIZER)
    assert not isinstance(make_scorer(JobConfig(task_path=f"{file}:make"), task), TaskScorer)  # type: ignore[arg-type]
    with contextlib.closing(make_scorer(config, task)) as scorer:  # type: ignore[arg-type]
        prompt = task.prompt(0)  # type: ignore[union-attr]
        right = [*TOKENIZER.encode(prompt.data["answer"]), TOKENIZER.eos_token_id]
        asked = [scorer.submit(prompt, words, truncated=False) for words in (right, [1], [2])]
        found: dict[int, Score | CallFailure] = {}
        while len(found) < 3:
            found |= dict(scorer.finished(wait_seconds=60))
    assert found[asked[0]] == Score(1.0)
    assert "reward is None; it must be a finite number" in str(found[asked[1]])
    import os

    pid = found[asked[2]]
    assert isinstance(pid, Score) and pid.total != os.getpid()


def test_the_built_in_task_is_scored_at_once() -> None:
    scorer = make_scorer(JobConfig(), task := CopyDigitsTask(TOKENIZER))
    assert isinstance(scorer, DriverScorer)
    ticket = scorer.submit(task.prompt(0), [TOKENIZER.eos_token_id], truncated=False)
    assert scorer.finished() == [(ticket, Score(0.0))]
    with pytest.raises(ConfigError, match=r"--reward-workers 2 would do nothing"):
        JobConfig.from_sources({"reward_workers": 2})
