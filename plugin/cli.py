"""The command line. Arguments are parsed before heavy imports, so `--help` is instant.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`. It is imported only when it is
the one that was asked for; the module itself imports torch, Ray or Megatron inside `run`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from plugin import __version__
from plugin.errors import ConfigError, MegatronTisError

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("plugin.launch.train_command", "run a complete RL job, on this machine or a cluster"),
    "doctor": ("plugin.doctor.doctor_command", "check this machine or a run for what goes wrong"),
    "compare": ("plugin.compare.compare_command", "compare log-probs of two sources offline"),
    "report": ("plugin.observe.report_command", "write the HTML report of one or several runs"),
    "corrections": ("plugin.compare.corrections_command", "every policy loss and correction"),
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
    command = next((word for word in words if not word.startswith("-")), None)
    show_traceback = "--traceback" in words
    try:
        module = _load(command) if command in COMMANDS else None
        args = _parser(command, module).parse_args(words)
        if module is None:
            _parser(None, None).print_help()
            return 0
        return int(module.run(args))
    except MegatronTisError as error:
        if show_traceback:
            raise
        print(f"megatron-tis: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; close quietly, also at interpreter exit.
        sys.stderr.close()
        return 1


def _parser(command: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    """The top-level parser; only the sub-command in use gets its arguments."""
    parser = argparse.ArgumentParser(
        prog="megatron-tis",
        description="RL post-training on Megatron-Core with loadable off-policy corrections.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-tis {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error (before COMMAND)"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (_, summary) in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            allow_abbrev=False,
        )
        if name == command and module is not None:
            module.add_arguments(sub)
    return parser


def _load(command: str | None) -> ModuleType:
    assert command is not None
    name, _ = COMMANDS[command]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"the command {command!r} is not part of this installation ({name} is missing)"
            ) from error
        raise _missing_package(command, error) from error


def _missing_package(command: str, error: ModuleNotFoundError) -> ConfigError:
    package = (error.name or "").split(".")[0]
    extra = _EXTRAS.get(package)
    fix = f"pip install 'megatron-tis[{extra}]'" if extra else f"install {package}"
    return ConfigError(f"the command {command!r} needs the package {package!r}; {fix}")
