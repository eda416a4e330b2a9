"""`megatron-tis doctor RUN_DIR`: what went wrong in a run, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugin.cli import main
from plugin.config import JobConfig
from plugin.observe.log_prob_dump import LogProbDump
from plugin.observe.run_files import RunFiles
from tests.unit.observe.test_detectors import LANGUAGE, rollout

pytestmark = pytest.mark.hostile


SOUND = {"reward": 0.5, "reward_std": 0.4, "uniform_group_share": 0.2, "grad_norm": 0.3}


def write_run(path: Path, *lines: dict[str, Any], **settings: Any) -> str:
    config = JobConfig(num_rollouts=4, **settings).as_dict()
    with RunFiles(path, config, tensorboard=False) as files:
        for number, line in enumerate(lines, 1):
            files.log_step({"step": number, **SOUND, **line})
            if line.get("skipped"):
                cause = "hook own.py:f is not finite at sample 3, position 7"
                skipped = {"detector": "skipped_step", "title": "steps were skipped"}
                files.log_findings(number, [{**skipped, "severity": "error", "evidence": cause}])
    return str(path)


def test_a_sound_run_is_not_accused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", write_run(tmp_path / "run", {}, {}, {}, {})]) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 steps" in printed and "nothing was found wrong" in printed


def test_a_run_of_skipped_steps_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"skipped": 1.0, "grad_norm": float("nan"), "skipped_steps": 3.0}
    run = write_run(tmp_path / "run", bad, bad, bad)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew\n')
    assert main(["doctor", run]) == 1
    printed = capsys.readouterr().out
    assert "3 of 4 steps: it has not finished" in printed and "3 steps skipped" in printed
    assert "error: steps were skipped (steps 1 to 3, 3 times)" in printed
    assert "hook own.py:f is not finite at sample 3, position 7" in printed
    assert "nothing is learned: steps are skipped" in printed
    assert "metrics.jsonl: line 4" in printed
    assert main(["doctor", run, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 2


def test_the_dump_of_a_run_without_detectors_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump"
    LogProbDump(dump).write(1, rollout(LANGUAGE, LANGUAGE, temperature=0.7), trainer_version=0)
    run = write_run(tmp_path / "run", {}, detect_mismatch=False, dump_log_probs=str(dump))
    assert main(["doctor", run]) == 1
    assert "different temperatures (step 1)" in capsys.readouterr().out


def test_code_that_a_run_directory_names_is_not_run(tmp_path: Path) -> None:
    marker, code = tmp_path / "ran", tmp_path / "own.py"
    code.write_text(f"open({str(marker)!r}, 'w')\n\ndef f(*_, **__): ...\n")
    own = f"{code}:f"
    run = write_run(tmp_path / "run", {}, use_tis=True, custom_detector_path=own)
    for name in ("policy_loss", "advantage_estimator", "custom_tis_function_path"):
        config = JobConfig(use_tis=True).as_dict() | {name: own, "custom_detector_path": own}
        (tmp_path / "run" / "config.yaml").write_text(json.dumps(config))
        assert main(["doctor", run]) == 0
        assert main(["report", run]) == 0
    assert not marker.exists()


def test_other_checks_beside_a_run_directory_are_not_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", write_run(tmp_path / "run", {}), "--layouts", "tp2"]) == 2
    assert "drop --layouts" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
