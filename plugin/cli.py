"""The command line. Arguments are parsed before anything heavy is imported: `--help` is instant.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`. It is imported only
when it is the one that was asked for, and imports torch, Ray or Megatron inside `run`. Errors of
this package that `run` raises are printed here, or shown whole with `--traceback`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from plugin import __version__
from plugin.errors import ConfigError, MegatronTisError, shortened

#: name -> module, one line of help
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("plugin.commands.train", "run a complete RL job, on this machine or a cluster"),
    "eval": (
        "plugin.commands.eval",
        "evaluate a run, a checkpoint or a Hugging Face model",
    ),
    "export": (
        "plugin.commands.export",
        "write a checkpoint of a run as a Hugging Face model",
    ),
    "plan": (
        "plugin.commands.plan",
        "show memory, communication and pipeline bubbles of every kind of rank, without running",
    ),
    "doctor": (
        "plugin.commands.doctor",
        "check packages and devices, a hook, a configuration, that parallel layouts agree; or "
        "diagnose a run",
    ),
    "compare": (
        "plugin.commands.compare",
        "replay every loss and correction on dumped log-probs, offline",
    ),
    "report": ("plugin.commands.report", "write the HTML report of one or several runs"),
    "samples": ("plugin.commands.samples", "print responses of a run and their rewards"),
    "corrections": (
        "plugin.commands.corrections",
        "list or draw every policy loss and correction",
    ),
}

#: Which extra of the distribution brings a package that a sub-command may find missing.
_EXTRAS = {
    **dict.fromkeys(("ray", "matplotlib", "tensorboard", "pyarrow", "tqdm"), "job"),
    "math_verify": "math",
    **dict.fromkeys(("megatron", "mbridge", "transformers", "safetensors", "einops"), "megatron"),
    "vllm": "vllm",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; the exit code is 2 for an error that the user can repair."""
    if argv is None:
        _open_closed_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        module = _load(command) if command in COMMANDS else None
        parser, used = _parser(command, module)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            used.error(_unknown(unknown, used))
        if module is None:
            parser.print_help()
            return 0
        args.owns_process = argv is None
        try:
            return int(module.run(args))
        except ModuleNotFoundError as error:
            if "--traceback" in words or (error.name or "plugin").split(".")[0] == "plugin":
                raise
            raise _missing_package(command, error) from error
    except MegatronTisError as error:
        if "--traceback" in words:
            raise
        print(f"megatron-tis: {shortened(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; close quietly, also at interpreter exit.
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.filename is None or "--traceback" in words:
            raise
        print(shortened(f"megatron-tis: {error.filename}: {error.strerror}"), file=sys.stderr)
        return 2


def _open_closed_streams() -> None:
    """Give closed standard streams (`>&-`) a file; the next one opened would take their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):  # of one that is open after all
                os.fstat(number)
                continue
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _parser(
    command: str, module: ModuleType | None
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The top-level parser and that of the command in use, the only one that gets its arguments."""
    parser = argparse.ArgumentParser(
        prog="megatron-tis",
        description="RL post-training on Megatron-Core with loadable off-policy corrections.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-tis {__version__}")
    _add_traceback(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    used = parser
    for name, (_, summary) in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            allow_abbrev=False,
        )
        if name == command and module is not None:
            _add_traceback(sub)
            module.add_arguments(sub)
            used = sub
    return parser, used


def _unknown(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The error for arguments that no parser has taken."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not flags:
        return f"unexpected argument {words[0]!r}"
    from plugin.config.other_frameworks import not_here, spelled_here

    reason = not_here(flags[0])
    if reason is not None:
        return f"{flags[0]} is not supported: {reason}"
    known = [name for action in parser._actions for name in action.option_strings]
    here = spelled_here(flags[0], {action.dest for action in parser._actions})
    if here is not None:
        return f"unknown flag {flags[0]}; here it is {here}"
    near = difflib.get_close_matches(flags[0], known, n=1)
    return f"unknown flag {flags[0]}" + (f"; did you mean {near[0]}?" if near else "")


def _add_traceback(parser: argparse.ArgumentParser) -> None:
    # Without a default: a sub-command's parser would overwrite what stood before COMMAND.
    parser.add_argument(
        "--traceback",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the traceback of an error",
    )


def _load(command: str) -> ModuleType:
    name, _ = COMMANDS[command]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ConfigError(
                f"the command {command!r} is not part of this installation ({name} is missing)"
            ) from error
        raise _missing_package(command, error) from error


def _missing_package(command: str, error: ModuleNotFoundError) -> ConfigError:
    package = (error.name or "").split(".")[0]
    extra = _EXTRAS.get(package)
    fix = f"pip install 'megatron-tis[{extra}]'" if extra else f"install {package}"
    return ConfigError(f"the command {command!r} needs the package {package!r}; {fix}")
