"""What a person types wrong gets an answer that helps, at once."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plugin import cli
from plugin.commands.train import COMMON_FLAGS
from plugin.config import JobConfig
from plugin.config.flags import option_name
from plugin.config.import_paths import load_function
from plugin.errors import HookLoadError

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--tis-clp", "3"], "unknown flag --tis-clp; did you mean --tis-clip?"),
        (["train", "--polcy-loss=ppo"], "unknown flag --polcy-loss; did you mean --policy-loss?"),
        (["train", "config.yaml"], "unexpected argument 'config.yaml'"),
        (["compare", "dump", "--swep", "x"], "unknown flag --swep; did you mean --sweep?"),
        (["doctor", "--layout", "tp2"], "unknown flag --layout; did you mean --layouts?"),
    ],
)
def test_no_unknown_flag_is_answered_with_another_commands_usage(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and message in printed
    assert printed.startswith(f"usage: megatron-tis {words[0]} ")
    assert len(printed.splitlines()) < 6


def helped(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", flag])
    assert not stopped.value.code
    return capsys.readouterr().out


def test_no_help_buries_the_flags_that_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    short = helped("--help", capsys)
    assert all(f"{option_name(name)} " in short.replace(",", " ") for name in COMMON_FLAGS)
    assert 15 <= len(COMMON_FLAGS) <= 25 and len(short.splitlines()) < 90
    assert "--adam-beta1" not in short and "--help-all" in short
    everything = helped("--help-all", capsys)
    for name in (item.name for item in dataclasses.fields(JobConfig)):
        assert option_name(name) in everything, name


def test_no_package_missing_inside_a_command_is_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: Any) -> int:
        raise ModuleNotFoundError("No module named 'ray.util'", name="ray.util")

    module = ModuleType("needy_inside")
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "needy_inside", module)
    monkeypatch.setitem(cli.COMMANDS, "needy", ("needy_inside", "needs Ray"))
    assert cli.main(["needy"]) == 2
    line = (
        "megatron-tis: the command 'needy' needs the package 'ray'; pip install 'megatron-tis[job]'"
    )
    assert capsys.readouterr().err == f"{line}\n"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["needy", "--traceback"])


def test_no_file_without_a_function_is_taken_for_a_module(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("raise SystemExit('this code was run')\ndef score(response, row): ...\n")
    with pytest.raises(HookLoadError, match=r":function is missing; write .*rewards.py:score$"):
        load_function(str(file))
    with pytest.raises(HookLoadError, match=r"'absent.py' .* write absent.py:NAME$"):
        load_function("absent.py")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_end_no_command_in_a_traceback(closed: str) -> None:
    words = [sys.executable, "-m", "plugin", "train", "--config", "/no/such/file"]
    script = f'exec "$@" {closed}'
    done = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True)
    said = [] if "2>&-" in closed else ["error: --config /no/such/file: cannot be read"]
    assert done.returncode == 2 and done.stdout == ""
    assert [line.partition(" (")[0] for line in done.stderr.splitlines()] == said


def test_a_job_is_not_started_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = [sys.executable, "-m", "plugin", "train"]
    script = f'cd {gone} && rmdir {gone} && exec "$@"'
    done = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("megatron-tis: the working directory is gone")
