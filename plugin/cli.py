"""The command line. Arguments are parsed before anything heavy is imported: `--help` is instant.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`. It is imported only
when it is the one that was asked for, and imports torch, Ray or Megatron inside `run`. Errors of
this package that `run` raises are printed here, or shown whole with `--traceback`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from plugin import __version__
from plugin.errors import ConfigError, MegatronTisError

#: name -> module, one line of help
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("plugin.launch.train_command", "run a complete RL job, on this machine or a cluster"),
    "doctor": (
        "plugin.doctor.doctor_command",
        "check packages and devices, a hook, a configuration, and that parallel layouts agree",
    ),
    "compare": (
        "plugin.compare.compare_command",
        "replay every loss and correction on dumped log-probs, offline",
    ),
    "report": ("plugin.observe.report_command", "write the HTML report of one or several runs"),
    "corrections": (
        "plugin.compare.corrections_command",
        "list or draw every policy loss and correction",
    ),
}

#: Which extra of the distribution brings a package that a sub-command may find missing.
_EXTRAS = {
    **dict.fromkeys(("ray", "matplotlib", "tensorboard", "pyarrow", "tqdm"), "job"),
    **dict.fromkeys(("megatron", "mbridge", "transformers", "safetensors", "einops"), "megatron"),
    "vllm": "vllm",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; the exit code is 2 for an error that the user can repair."""
    words = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        module = _load(command) if command in COMMANDS else None
        parser = _parser(command, module)
        args = parser.parse_args(words)
        if module is None:
            parser.print_help()
            return 0
        return int(module.run(args))
    except MegatronTisError as error:
        if "--traceback" in words:
            raise
        print(f"megatron-tis: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; close quietly, also at interpreter exit.
        sys.stderr.close()
        return 1


def _parser(command: str, module: ModuleType | None) -> argparse.ArgumentParser:
    """The top-level parser; only the sub-command in use gets its arguments."""
    parser = argparse.ArgumentParser(
        prog="megatron-tis",
        description="RL post-training on Megatron-Core with loadable off-policy corrections.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-tis {__version__}")
    _add_traceback(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
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
    return parser


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
        package = missing.split(".")[0]
        extra = _EXTRAS.get(package)
        fix = f"pip install 'megatron-tis[{extra}]'" if extra else f"install {package}"
        raise ConfigError(
            f"the command {command!r} needs the package {package!r}; {fix}"
        ) from error
