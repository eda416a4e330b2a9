"""`megatron-tis compare` end to end: table, JSON, page, findings and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugin.cli import main
from plugin.errors import BatchError
from plugin.observe.log_prob_dump import LogProbDump
from tests.unit.observe.dump_samples import batch_columns
from tests.unit.observe.test_html_report import BROWSER, browse


def compare(*words: str) -> int:
    return main(["compare", *words])


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    writer = LogProbDump(tmp_path / "dump")
    for step in range(3):
        writer.write(step, batch_columns(samples=40, seed=step), trainer_version=3)
    return tmp_path / "dump"


def test_the_table_has_a_row_for_every_method(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(str(dump)) == 0
    printed = capsys.readouterr().out
    for name in ("ppo + vanilla_tis", "icepop", "reinforce + off_policy_is", "ppo + opsm"):
        assert name in printed
    assert "120 samples" in printed


def test_thresholds_from_the_command_line_are_used_and_yours_is_added(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--policy-loss", "reinforce", "--use-tis", "--tis-clip", "1.01", "--json", "-")
    assert compare(str(dump), *words) == 0
    methods = {m["name"]: m for m in json.loads(capsys.readouterr().out)["methods"]}
    assert methods["yours"]["weight_max"] == pytest.approx(1.01)
    assert methods["ppo + vanilla_tis"]["weight_max"] == pytest.approx(1.01)


def test_sweeps_are_written_as_json_and_as_a_page(dump: Path, tmp_path: Path) -> None:
    page, data = tmp_path / "c.html", tmp_path / "c.json"
    words = ("--sweep", "tis-clip=1.01:2:4", "sequence-tis-clip=1.1:5:3", "--html", str(page))
    assert compare(str(dump), *words, "--json", str(data)) == 0
    sweeps = json.loads(data.read_text())["sweeps"]
    assert {sweep["flag"] for sweep in sweeps} == {"tis_clip", "sequence_tis_clip"}
    assert all("recommendation" in sweep for sweep in sweeps)
    assert "ess_against_bias" in page.read_text()
    assert compare(str(dump), "--html", str(page)) == 2
    assert compare(str(dump), "--html", str(page), "--force") == 0


def test_unreadable_parts_are_named_and_the_rest_compared(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (dump / "step-000001.parquet").write_bytes(b"not parquet")
    assert compare(str(dump)) == 0
    output = capsys.readouterr()
    assert "step-000001.parquet" in output.err
    assert "80 samples" in output.out


def test_a_dump_without_a_readable_token_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text("nothing\n")
    assert compare(str(tmp_path / "x.jsonl")) == 2
    assert "no readable token" in capsys.readouterr().err


def test_findings_of_the_detectors_are_printed_with_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = LogProbDump(tmp_path / "dump")
    for step in range(2):
        columns = batch_columns(samples=100, seed=step)
        columns["rollout_log_probs"] = [value * 0 for value in columns["rollout_log_probs"]]
        writer.write(step, columns)
    assert compare(str(tmp_path / "dump")) == 0
    printed = capsys.readouterr().out
    assert "zero-filled" in printed and "steps 0 to 1" in printed


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
def test_a_browser_draws_the_sweeps(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    assert compare(str(dump), "--sweep", "tis-clip=1.01:2:4", "--html", str(page)) == 0
    dom, log = browse(page, "--dump-dom")
    assert "CONSOLE" not in log, log
    assert 'data-plot="ess_against_bias"' in dom
    assert "ppo + vanilla_tis" in dom


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--routing",), "--routing needs --hf-checkpoint"),
        (("--hf-checkpoint", "model"), "would do nothing without --routing"),
        (("--routing", "--hf-checkpoint", "nowhere"), "nowhere holds no config.json"),
        (("--routing", "--hf-checkpoint", "model", "--html", "a.html"), "drop --html and --sweep"),
    ],
)
def test_routing_says_what_it_needs(
    dump: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert compare(str(dump), *words) == 2
    assert message in capsys.readouterr().err


def test_a_dump_without_routes_is_told_how_to_get_them(dump: Path) -> None:
    from plugin.tools.compare.dump_reading import open_dump
    from plugin.tools.compare.routing_mismatch import routed_batch

    with pytest.raises(BatchError, match="--dump-log-probs DIR --dump-routes"):
        routed_batch(open_dump([dump]), max_tokens=100)
