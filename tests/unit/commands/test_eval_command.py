"""`megatron-tis eval` on a Hugging Face directory, and what it is not given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from plugin.cli import main
from plugin.cluster.model_source import policy_source
from plugin.commands.eval import as_table
from plugin.config import JobConfig
from tests.ray.tokenizer_files import save_character_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights, as a Hugging Face directory."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("model")
    source = policy_source(JobConfig.from_sources({}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(source.as_config()).save_pretrained(directory)
    save_character_tokenizer(directory)
    return directory


def rows(path: Path, count: int) -> Path:
    lines = [{"prompt": f"{i}{i}=", "answer": f"{i}{i}"} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


FLAGS = ("--max-response-length", "6", "--max-prompt-length", "16")


def test_a_model_is_evaluated_by_itself_as_table_and_json(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"digits:{rows(tmp_path / 'rows.jsonl', 5)}"
    sampled = ("--n-samples-per-eval-prompt", "4", "--eval-pass-at", "1,4")
    assert main(["eval", str(model), "--eval-data", data, *sampled, *FLAGS, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["source"] == str(model) and metrics["eval/digits/prompts"] == 5
    assert 0 <= metrics["eval/digits/pass@1"] <= metrics["eval/digits/pass@4"] <= 1
    assert metrics["eval/digits/mean/ci_low"] <= metrics["eval/digits/mean"]
    assert as_table(metrics).splitlines()[0].split() == [
        "set",
        "metric",
        "value",
        "95",
        "%",
        "interval",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "does not say what to evaluate on; add --eval-data NAME:PATH"),
        (("--eval-data", "digits:nowhere.jsonl"), r"--eval-data .*nowhere\.jsonl"),
        (("--eval-data", "held:4"), "has nothing to train on|add --prompt-data"),
        (("--eval-data", "digits:{bad}"), r"--eval-data .*bad\.jsonl, line 1: "),
        (("--eval-data", "digits:{empty}"), r"--eval-data .*empty\.jsonl"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_one_line(
    model: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"bad": tmp_path / "bad.jsonl", "empty": tmp_path / "empty.jsonl"}
    files["bad"].write_text('{"question": "1"}\n')
    files["empty"].write_text("")
    given = [word.format(**files) for word in words]
    assert main(["eval", str(model), *given, *FLAGS]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_directory_that_is_neither_run_nor_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "neither a run directory (it has no config.yaml) nor a checkpoint" in (
        capsys.readouterr().err
    )
    (tmp_path / "checkpoints" / "step_0000003").mkdir(parents=True)
    assert main(["eval", str(tmp_path / "checkpoints" / "step_0000003")]) == 2
    assert "is not in the run directory that it was written to" in capsys.readouterr().err


def test_a_set_of_one_row_is_evaluated_with_a_word_about_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"one:{rows(tmp_path / 'one.jsonl', 1)}"
    assert main(["eval", str(model), "--eval-data", data, *FLAGS, "--json"]) == 0
    out, err = capsys.readouterr()
    metrics = json.loads(out)
    assert metrics["eval/one/prompts"] == 1 and "eval/one/mean/ci_high" in metrics
    assert "--eval-data one has one prompt" in err
