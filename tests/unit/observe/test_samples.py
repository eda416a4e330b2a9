"""Samples that a person can read: which are kept, how they are printed, and that nothing in them acts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutSample
from plugin.cli import main
from plugin.controller.step_records import chosen, readable_samples
from plugin.environments.trajectory import Rollouts, Trajectory
from plugin.errors import ConfigError
from plugin.observe.html_report import MAX_SAMPLES, report_html
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run, read_samples
from plugin.tasks.copy_digits import CharacterTokenizer
from tests.unit.observe.test_html_report import BROWSER, browse

TOKENIZER = CharacterTokenizer("0123456789=")
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def sample(prompt: str, response: str) -> RolloutSample:
    tokens = torch.tensor(TOKENIZER.encode(prompt + response))
    length = len(response)
    return RolloutSample(
        tokens=tokens,
        response_length=length,
        loss_mask=torch.ones(length, dtype=torch.int64),
        weight_version=4,
        rollout_log_probs=torch.zeros(length),
    )


def test_the_best_the_worst_and_a_random_sample_are_chosen_once_each() -> None:
    rewards = np.array([0.5, 1.0, 0.0, 0.25])
    picked = chosen(rewards, 3, "1")
    assert picked[0] == ("best", 1) and picked[1] == ("worst", 2)
    assert picked[2][0] == "random" and picked[2][1] in (0, 3)
    assert chosen(rewards, 3, "1") == picked
    assert sorted(i for _, i in chosen(rewards, 9, "1")) == [0, 1, 2, 3]


def test_a_sample_has_its_texts_its_reward_parts_and_its_truncation() -> None:
    answers = [
        [Trajectory((sample("1=", "1"),), 1.0), Trajectory((sample("1=", "23"),), 0.0, truncated=True)],
        [Trajectory((sample("77=", "7"),), 0.5)],
    ]  # fmt: skip
    parts = {"exact": np.array([1.0, 0.0, 0.5])}
    found = readable_samples(Rollouts.of(answers), parts, [10, 11], TOKENIZER, 2, "1")
    assert found == [
        {
            "kind": "best",
            "prompt_index": 10,
            "reward": 1.0,
            "rewards": {"exact": 1.0},
            "truncated": False,
            "weight_version": 4,
            "tokens": 1,
            "prompt": "1=",
            "response": "1",
        },
        {
            "kind": "worst",
            "prompt_index": 10,
            "reward": 0.0,
            "rewards": {"exact": 0.0},
            "truncated": True,
            "weight_version": 4,
            "tokens": 2,
            "prompt": "1=",
            "response": "23",
        },
    ]


def entry(kind: str, reward: float, response: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "reward": reward,
        "rewards": {"exact": reward},
        "tokens": len(response),
        "prompt": "What is 1+1?",
        "response": response,
        "prompt_index": 3,
        "truncated": False,
        **more,
    }


def write_run(path: Path, steps: int = 3) -> Path:
    with RunFiles(path, {}, tensorboard=False) as files:
        for step in range(1, steps + 1):
            files.log_step({"step": step, "reward": 0.5})
            files.log_samples(
                step,
                [
                    entry("best", 1.0, f"two, at step {step}"),
                    entry("worst", 0.0, HOSTILE + "\x1b[2J" + "long " * 200, truncated=True),
                ],
            )
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["samples", *words]) == 0
    return capsys.readouterr().out


def test_the_command_prints_filters_and_sorts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(write_run(tmp_path / "run"))
    monkeypatch.setenv("COLUMNS", "60")
    everything = printed(capsys, run)
    assert "step 1 | best | reward 1 (exact 1) | 14 tokens | prompt 3" in everything
    assert max(map(len, everything.splitlines())) <= 60
    assert "more lines; --full shows them" in everything
    # What would steer the terminal is shown, not sent.
    assert "\x1b" not in everything and "\\x1b[2J" in everything
    assert "more lines" not in printed(capsys, run, "--full")
    second = printed(capsys, run, "--steps", "2", "--kind", "best")
    assert second.count("step 2 |") == 1 and "step 1" not in second and "worst" not in second
    assert printed(capsys, run, "--search", "at step 3").count("reward") == 1
    first, *_ = printed(capsys, run, "--sort", "reward", "--descending").splitlines()
    assert "best" in first
    assert "2 of 6 samples; --limit shows more" in printed(capsys, run, "--limit", "2")
    assert printed(capsys, run, "--steps", "9") == "no such sample\n"
    assert main(["samples", run, "--steps", "x"]) == 2
    assert main(["samples", str(tmp_path)]) == 2
    assert "has no samples.jsonl" in capsys.readouterr().err


def test_steps_that_a_run_took_back_show_their_last_samples_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with RunFiles(run, {}, tensorboard=False) as files:
        files.log_samples(2, [entry("best", 1.0, "again")])
    assert [(s["step"], s["response"][:5]) for s in read_samples(run)][2:] == [(2, "again")]
    # A line that a crash cut off costs itself.
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"step": 9, "samp')
    assert {s["step"] for s in read_samples(run)} == {1, 2}


def test_the_report_holds_a_bounded_number_of_samples(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=400)
    text = report_html([read_run(run)])
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    samples = json.loads(found.group(1))["samples"]
    assert len(samples) == MAX_SAMPLES and samples[0]["step"] == 1 and samples[-1]["step"] == 400
    # The texts are data of the page, never part of it.
    assert "<script>document" not in text and "<img" not in text


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_a_browser_shows_the_samples_as_text_and_finds_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    page = tmp_path / "report.html"
    text = report_html([read_run(run)])
    page.write_text(text.replace("  search();\n}", '  box.value = "At step 2"; search();\n}'))
    shown, log = browse(page, "--dump-dom")
    assert "CONSOLE" not in log
    assert "&lt;script&gt;document.title" in shown and "<title>taken" not in shown
    assert "1 of 6 samples" in shown and "two, at step 2" in shown


def test_a_run_without_samples_says_how_to_have_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a run with --log-samples"):
        read_samples(tmp_path)
