"""`make train-math`: its data, its tokenizer and the model that its warm-up leaves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import plot_evaluations
from examples.math_words import make_data, warm_up
from plugin.config import JobConfig

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "math_words"
ROWS = ("--train-rows", "400", "--eval-rows", "60")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and a model of two supervised steps."""
    directory = tmp_path_factory.mktemp("math_words")
    make_data.main(["--output", str(directory), *ROWS])
    sizes = ("--hidden", "32", "--layers", "1", "--steps", "2", "--batch-size", "4")
    warm_up.main(["--data", str(directory), "--output", str(directory / "model"), *sizes])
    return directory


def rows(directory: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").open()]


def calculation(row: dict[str, str]) -> str:
    """The steps without their results: what a problem asks for, whatever its words."""
    return re.sub(r"=\d+", "", row["answer"].split("\n####")[0])


def test_training_and_evaluation_share_no_calculation(made: Path) -> None:
    train, held_out = ({calculation(r) for r in rows(made, name)} for name in ("train", "eval"))
    assert len(train) == 400 and len(held_out) == 60  # no calculation comes twice either
    assert not train & held_out


def test_every_worked_answer_is_right_and_asked_for(made: Path) -> None:
    for row in rows(made, "train"):
        *steps, final = row["answer"].split("\n")
        for step in steps:
            left, result = step.split("=")
            assert eval(left) == int(result), row
        assert final == f"#### {steps[-1].split('=')[1]}"
        asked = re.findall(r"\d+", row["question"])
        operands = [re.findall(r"\d+", step) for step in steps]
        assert asked == [operands[0][0], *(numbers[1] for numbers in operands)], row


def test_the_same_seed_makes_the_same_data(made: Path, tmp_path: Path) -> None:
    make_data.main(["--output", str(tmp_path), *ROWS])
    assert (tmp_path / "train.jsonl").read_bytes() == (made / "train.jsonl").read_bytes()


def test_the_warm_up_leaves_a_hugging_face_directory_whose_tokenizer_reads_digit_by_digit(
    made: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(made / "model")
    row = rows(made, "eval")[0]
    tokens = tokenizer.tokenize(row["answer"])
    assert "".join(t for t in tokens if t.isdigit()) == re.sub(r"\D", "", row["answer"])
    assert all(len(token) == 1 for token in tokens if token.isdigit())
    ids = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == row["answer"]
    messages = [{"role": "user", "content": row["question"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n") and row["question"] in text
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_make_train_math_runs_the_three_parts_and_the_job_reads_what_they_write() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (target,) = re.findall(r"^train-math: venv.*\n((?:\t.*\n)+)", makefile, re.M)
    for part in ("make_data.py", "warm_up.py", "train --config examples/math_words/dapo.yaml"):
        assert part in target
    config = JobConfig.from_sources({}, EXAMPLE / "dapo.yaml")
    for script in ("make_data.py", "warm_up.py"):
        assert 'default=Path("runs/math_words")' in (EXAMPLE / script).read_text()
    assert config.hf_checkpoint == "runs/math_words/model"
    assert config.prompt_data == "runs/math_words/train.jsonl"


def test_the_picture_of_several_seeds_comes_with_its_data_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, after in ((1, 0.5), (2, 0.75)):
        run = tmp_path / str(seed)
        run.mkdir()
        (run / "config.yaml").write_text(f"name: x\nseed: {seed}\n")
        lines: list[dict[str, float]] = [
            {"step": step} | {f"eval/held-out/{name}": value for name in plot_evaluations.NAMES}
            for step, value in ((0, 0.25), (4, after))
        ]
        lines.insert(1, {"step": 1, "reward": 0.5})
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    picture = tmp_path / "seeds.svg"
    plot_evaluations.main([str(picture), str(tmp_path / "1"), str(tmp_path / "2")])
    first, drawn = capsys.readouterr().out, picture.read_bytes()
    assert "| 2 | 25.0% [25.0%, 25.0%] | 75.0% [75.0%, 75.0%] |" in first
    assert "| all | 25.0% to 25.0% | 50.0% to 75.0% |" in first
    plot_evaluations.main([str(picture)])  # again, from the data beside it
    assert capsys.readouterr().out == first and picture.read_bytes() == drawn


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_reaches_the_accuracy_that_the_readme_names(tmp_path: Path) -> None:
    """With the seed of `make train-math`, at least the lower end of what its three seeds reached."""
    seeds = json.loads((ROOT / "docs/images/math_words.json").read_text())
    lowest = min(run["evaluations"][-1]["mean/ci_low"] for run in seeds)
    make_data.main(["--output", str(tmp_path)])
    warm_up.main(["--data", str(tmp_path), "--output", str(tmp_path / "model")])
    changes = {
        "hf-checkpoint": tmp_path / "model",
        "prompt-data": tmp_path / "train.jsonl",
        "eval-data": f"held-out:{tmp_path / 'eval.jsonl'}",
        "eval-interval": 40,
        "run-dir": tmp_path / "run",
    }
    command = [sys.executable, "-m", "plugin", "train", "--config", str(EXAMPLE / "dapo.yaml")]
    for name, value in changes.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, cwd=ROOT)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    accuracy = [line["eval/held-out/mean"] for line in lines if "eval/held-out/mean" in line]
    assert len(accuracy) == 2
    assert accuracy[0] < 0.5 and accuracy[-1] >= lowest
