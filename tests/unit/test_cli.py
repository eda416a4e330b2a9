"""The command line: instant help, clean errors, lazy sub-commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plugin import __version__, cli
from plugin.errors import BatchError, ConfigError

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "ray", "megatron", "transformers", "matplotlib", "yaml")


def existing_commands() -> list[str]:
    """Sub-commands whose module is there."""
    return [
        name
        for name, (module, _) in cli.COMMANDS.items()
        if (ROOT / (module.replace(".", "/") + ".py")).exists()
    ]


def modules_after(*words: str) -> tuple[set[str], str]:
    """Top-level modules that a call of the command line has imported, and what it printed."""
    source = (
        "import sys\nfrom plugin.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('MODULES', *{name.split('.')[0] for name in sys.modules})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", source, *words],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    printed, _, names = result.stdout.rpartition("MODULES ")
    return set(names.split()), printed


@pytest.mark.parametrize("words", [("--help",), ("--version",), ()])
def test_top_level_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    modules, printed = modules_after(*words)
    assert not modules & set(HEAVY)
    assert "megatron-tis" in printed


def test_top_level_help_lists_every_command() -> None:
    _, printed = modules_after("--help")
    assert all(re.search(rf"^ +{name}\b", printed, re.MULTILINE) for name in cli.COMMANDS)
    assert modules_after("--version")[1].strip() == f"megatron-tis {__version__}"


@pytest.mark.parametrize("name", existing_commands())
def test_help_of_a_command_imports_nothing_heavy(name: str) -> None:
    modules, printed = modules_after(name, "--help")
    assert not modules & set(HEAVY)
    assert f"usage: megatron-tis {name}" in printed


def test_python_dash_m_is_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "plugin", "--version"],
        capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == f"megatron-tis {__version__}"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A sub-command `probe` whose `run` a test replaces."""
    module = ModuleType("probe_command")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    module.run = lambda args: args.number or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_command", "a command for tests"))
    return module


def test_the_exit_code_is_what_the_command_returns(command: ModuleType) -> None:
    assert cli.main(["probe"]) == 0
    assert cli.main(["probe", "--number", "3"]) == 3


def test_an_error_of_this_package_is_one_message_and_exit_code_2(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any) -> int:
        raise BatchError("advantages of sample 3 is nan")

    command.run = fail  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "megatron-tis: advantages of sample 3 is nan\n" and printed.out == ""
    for words in (["--traceback", "probe"], ["probe", "--traceback"]):
        with pytest.raises(BatchError):
            cli.main(words)


#: Words that make every command fail with an error of this package.
FAILING = {
    "train": ["--config", "no/such/file.yaml"],
    "plan": ["--gpu", "no-such-gpu"],
    "doctor": ["--layouts", "no-such-layout"],
    "compare": ["no/such/dump"],
    "eval": ["no/such/run"],
    "export": ["no/such/run", "no/such/target"],
    "report": ["no/such/run"],
    "samples": ["no/such/run"],
    "corrections": ["no-such-correction"],
}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_shows_one_message_or_with_traceback_the_error(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, *FAILING[name]]) == 2
    printed = capsys.readouterr().err
    assert "no" in printed and "Traceback" not in printed
    assert re.match(r"(megatron-tis|error): ", printed)
    for words in (["--traceback", name, *FAILING[name]], [name, *FAILING[name], "--traceback"]):
        with pytest.raises(ConfigError):
            cli.main(words)


def test_a_bug_is_not_hidden(command: ModuleType) -> None:
    command.run = lambda args: 1 // 0  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_an_interrupt_is_not_a_traceback(command: ModuleType) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    command.run = interrupted  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 130


def test_an_unknown_command_or_flag_exits_with_2_and_usage(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["no-such-command"], ["probe", "--nummer", "3"], ["probe", "--numb", "3"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 2
        assert "usage: megatron-tis" in capsys.readouterr().err


def test_a_missing_command_module_and_a_missing_package_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "absent", ("plugin.observe.absent_command", "not there"))
    assert cli.main(["absent"]) == 2
    assert "'absent' is not part of this installation" in capsys.readouterr().err
    (tmp_path / "needy_command.py").write_text(
        "raise ModuleNotFoundError('no ray', name='ray.util')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "needy", ("needy_command", "needs ray"))
    assert cli.main(["needy"]) == 2
    assert "needs the package 'ray'; pip install 'megatron-tis[job]'" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet() -> None:
    result = subprocess.run(
        f"{sys.executable} -m plugin corrections | head -n 1",
        shell=True, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert result.stdout == "Policy losses: --policy-loss NAME\n" and result.stderr == ""
