"""How a dataclass field becomes a command line flag, a YAML key and a validated value.

A *flag group* is a frozen dataclass whose fields are made with `flag(...)`. A configuration is a
frozen dataclass that inherits from several groups, so that every value is a plain attribute named
like its flag (`config.tis_clip` is `--tis-clip`). Each group checks its own fields in `check`; the
checks run when the configuration is built, which is after every source (command line, YAML,
namespace) has been merged.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, Union, get_args, get_origin

from plugin.config.import_paths import is_import_path
from plugin.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a flag needs to have an effect: as text, and as a predicate on a configuration."""

    what: str
    are_met: Callable[[Any], bool]

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            f"{self.what} or {other.what}",
            lambda config: self.are_met(config) or other.are_met(config),
        )


def needs_flag(name: str) -> Needs:
    """The flag called `name` has to be given, or on."""
    return Needs(option_name(name), lambda config: bool(getattr(config, name)))


def flag(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    names: Iterable[str] = (),
    not_offered: Mapping[str, str] | None = None,
    needs: Needs | None = None,
    path: Callable[[str], str] | None = None,
    may_change_on_resume: bool = False,
    common_in: str = "",
) -> Any:
    """A field with its default, help text, bounds and marks.

    A flag with an upper bound (at_most, below) has a lower one, too.

    names: the built-in members of an open set; the value is one of them or the import path of the
        user's own
    not_offered: names that a user may know from elsewhere, and why each is none of `names`
    needs: without this the flag has no effect, and giving it is an error
    path: the value, or each of several, names a file; this makes the name absolute
    may_change_on_resume: a different value does not change what a resumed run trains
    common_in: the commands whose short --help shows the flag, separated by spaces
    """
    metadata = {
        "help": help,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "names": tuple(names),
        "not_offered": not_offered or {},
        "needs": needs,
        "path": path,
        "may_change_on_resume": may_change_on_resume,
        "common_in": common_in,
    }
    return dataclasses.field(default=default, metadata=metadata)


def runtime_flag(default: Any, help: str, **marks: Any) -> Any:
    """A flag of how a job runs, not of what it trains: it may change on resume."""
    return flag(default, help, may_change_on_resume=True, **marks)


@dataclasses.dataclass(frozen=True)
class Alias:
    """Another spelling of a flag: accepted wherever the flag is, but never stored.

    of: the flag
    means: for each value of the alias, the values of the flag that agree with it; the first is
        what the alias sets where the flag is not given
    off: a value that a given flag overrides, such as the default in a full namespace
    """

    of: str
    means: Mapping[Any, tuple[Any, ...]]
    off: Any = None


def alias(of: str, means: Mapping[Any, tuple[Any, ...]], help: str, *, off: Any = None) -> Any:
    """An `InitVar` that is another spelling of the flag `of`; see `Alias`."""
    metadata = {"help": help, "names": (), "alias": Alias(of, means, off)}
    return dataclasses.field(default=None, metadata=metadata)


def absolute_path(path: str) -> str:
    """The absolute path of a file or directory."""
    return os.path.abspath(os.path.expanduser(path))


def absolute_code(paths: str) -> str:
    """Comma-separated import paths, those of the form `file.py:function` with an absolute path."""
    parts = [part.strip().partition(".py:") for part in paths.split(",")]
    return ",".join(
        f"{absolute_path(file)}{colon}{rest}" if colon else file for file, colon, rest in parts
    )


def option_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def expect(condition: bool, message: str) -> None:
    """Raise a `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def expect_band(name: str, low: float, high: float, upper: str | None = None) -> None:
    """Raise a `ConfigError` unless `low` (--name-low) is below `high` (--name-high, or `upper`)."""
    upper = upper or f"{name}-high"
    expect(
        low < high,
        f"--{name}-low is {low} and --{upper} is {high}; the lower must be below the upper",
    )


def without_credentials(text: str) -> str:
    """`text` with `user:password@` removed from every URL in it."""
    return re.sub(r"://[^\s,]*@", "://", text)


@dataclasses.dataclass(frozen=True)
class FlagGroup:
    """Base of all groups; a subclass gives `title` and, where needed, `check`."""

    title: typing.ClassVar[str] = ""

    def __post_init__(self, *aliases: Any) -> None:
        given = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        given |= dict(zip(self.aliases(), aliases, strict=True))
        for name, value in self.without_aliases(given).items():
            item = self.__dataclass_fields__[name]
            object.__setattr__(self, name, _coerced(type(self), item, value))
        for group in reversed(type(self).__mro__):
            if "check" in vars(group):
                vars(group)["check"](self)

    @classmethod
    def groups(cls) -> list[type[FlagGroup]]:
        """The groups this configuration is made of, in the order of their definition."""
        return [
            g for g in cls.__mro__ if issubclass(g, FlagGroup) and "title" in vars(g) and g.title
        ]

    @classmethod
    def aliases(cls) -> dict[str, Alias]:
        """Spellings of flags that the configuration accepts and does not store."""
        found = {name: item.metadata.get("alias") for name, item in _all_fields(cls).items()}
        return {name: other for name, other in found.items() if other is not None}

    @classmethod
    def setting_names(cls) -> set[str]:
        """Every name that the command line and a YAML file may give."""
        return set(_all_fields(cls))

    @classmethod
    def without_aliases(
        cls, given: Mapping[str, Any], below: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The settings of one source, with every alias replaced by the flag it is a spelling of.

        A flag and its alias that contradict each other are a `ConfigError`.

        below: the settings of lower sources, without aliases; a value there that agrees with the
            alias stays
        """
        result = dict(given)
        for name, other in cls.aliases().items():
            value = result.pop(name, None)
            if value is None or (isinstance(value, str) and value.lower() == "none"):
                continue
            expect(
                isinstance(value, bool) and value in other.means,
                f"{option_name(name)} is {value!r}; expected bool (true or false)",
            )
            default, meant = _all_fields(cls)[other.of].default, other.means[value]
            stated = result.get(other.of, default)
            if stated in (default, None, "none"):
                lower = (below or {}).get(other.of, default)
                result[other.of] = lower if lower in meant else meant[0]
                continue
            shown = option_name(name if value else f"no_{name}")
            expect(
                stated in meant or value == other.off,
                f"{shown} with {option_name(other.of)} {stated}: two different values of one "
                "setting; drop one of the two",
            )
        return result

    @classmethod
    def add_arguments(
        cls, parser: argparse.ArgumentParser, in_short_help: Container[str] | None = None
    ) -> None:
        """Add one argument per field, grouped; what is not given is absent from the namespace.

        in_short_help: the fields that `--help` shows, where it does not show all; then `--help-all`
            does
        """
        if in_short_help is not None:
            parser.add_argument(
                "--help-all", action=_HelpAll, nargs=0, help="show every flag and exit"
            )
        for group in cls.groups():
            section = parser.add_argument_group(group.title)
            for name in vars(group).get("__annotations__", {}):
                if name in cls.setting_names():
                    action = _add_argument(section, cls, name)
                    if in_short_help is not None and name not in in_short_help:
                        _HelpAll.hide(action)

    @classmethod
    def from_sources(cls, flags: Mapping[str, Any], yaml_file: str | Path | None = None) -> Self:
        """Merge a YAML file (lower) with explicit flags (higher), then validate the result."""
        settings = cls.without_aliases(read_yaml(Path(yaml_file)) if yaml_file else {})
        merged = {**settings, **cls.without_aliases(flags, settings)}
        known = cls.setting_names()
        unknown = sorted(set(merged) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}{_did_you_mean(unknown[0], known)}")
        return cls(**merged)

    @classmethod
    def from_namespace(cls, args: Any) -> Self:
        """Take the fields that any namespace happens to have; the rest keep their defaults."""
        if isinstance(args, cls):
            return args
        return cls(
            **{name: getattr(args, name) for name in cls.setting_names() if hasattr(args, name)}
        )

    @classmethod
    def given_in(cls, args: argparse.Namespace) -> dict[str, Any]:
        """What the command line gave, of the flags that `add_arguments` added."""
        known = cls.setting_names()
        return {name: value for name, value in vars(args).items() if name in known}

    def refuse_idle_flags(self, flags: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` for a given flag that has no effect with the other flags.

        flags: of the command line; turning one off, or setting it to none, is always allowed
        settings: of a YAML file, which may be another run's and name every flag: values at their
            default are allowed, too
        """
        for item in dataclasses.fields(self):
            needs: Needs | None = item.metadata["needs"]
            if needs is None or not (item.name in flags or item.name in settings):
                continue
            value = getattr(self, item.name)
            asked_for = item.name in flags and value is not None and value is not False
            if (asked_for or value != item.default) and not needs.are_met(self):
                name = option_name(item.name)
                shown = name.replace("--", "--no-") if value is False else name
                value = "" if isinstance(value, bool) else f" {value}"
                raise ConfigError(
                    f"{shown}{value} would do nothing: it needs {needs.what}; add that, or drop "
                    f"{shown}"
                )

    @classmethod
    def common_flags(cls, command: str) -> set[str]:
        """The flags that the short `--help` of a command shows."""
        fields = dataclasses.fields(cls)
        return {item.name for item in fields if command in item.metadata["common_in"].split()}

    def with_absolute_paths(self) -> Self:
        """The same configuration with absolute paths: actors have their own working directories."""
        changes: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            absolute, value = item.metadata["path"], getattr(self, item.name)
            if absolute is not None and value is not None:
                several = isinstance(value, tuple)
                changes[item.name] = tuple(map(absolute, value)) if several else absolute(value)
        return dataclasses.replace(self, **changes)

    def unchecked_copy(self, **changes: Any) -> Self:
        """A copy with different values, for a part of the job, without checks across its groups."""
        changed = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed

    def as_dict(self) -> dict[str, Any]:
        """Flat mapping of every field, as written to a run's `config.yaml`."""
        return dataclasses.asdict(self)


def _did_you_mean(name: str, known: set[str]) -> str:
    import difflib

    from plugin.config.other_frameworks import not_here, spelled_here

    reason = not_here(name)
    if reason is not None:
        return f": not supported, because {reason}"
    here = spelled_here(name, known)
    if here is not None:
        return f"; here it is {here}"
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return (
        f"; did you mean {near[0]!r}?"
        if near
        else "; `megatron-tis train --help-all` lists all settings"
    )


def read_yaml(path: Path, option: str = "--config") -> dict[str, Any]:
    """The settings in a YAML file, safe-loaded, keys with underscores; an empty file has none.

    option: the flag that led to the file, for messages
    """
    import yaml

    from plugin.json_lines import parse_yaml, read_settings

    try:
        loaded = parse_yaml(read_settings(path))
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:500]
        raise ConfigError(f"{option} {path}: not valid YAML: {problem}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(f"{option} {path}: expected a mapping of setting names to values")
    names = [key.replace("-", "_") for key in loaded]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(
            f"{option} {path}: {twice[0]} is given twice, with - and with _; keep one"
        )
    return dict(zip(names, loaded.values(), strict=True))


def _all_fields(owner: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields and aliases (`InitVar`s) of a configuration, by name."""
    found: dict[str, dataclasses.Field[Any]] = owner.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: item for name, item in found.items() if "help" in item.metadata}


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def _members(owner: type, name: str) -> tuple[Any, ...]:
    """The types that a field takes: the members of a union, or its only one."""
    hint = _hints(owner)[name]
    hint = hint.type if isinstance(hint, dataclasses.InitVar) else hint
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def field_type(owner: type, name: str) -> tuple[Any, bool]:
    """The field's type without `None`, and whether `None` is allowed."""
    members = _members(owner, name)
    kinds = [member for member in members if member is not type(None)]
    return kinds[0], len(kinds) < len(members)


def number_words(owner: type, name: str) -> tuple[str, ...]:
    """The words that a flag for numbers takes besides them: auto for `int | Literal["auto"]`."""
    first, *others = _members(owner, name)
    literals = [member for member in others if get_origin(member) is Literal]
    return tuple(w for m in literals for w in get_args(m)) if first in (int, float) else ()


class _HelpAll(argparse.Action):
    """Prints the help with the flags that `--help` hides."""

    @staticmethod
    def hide(action: argparse.Action) -> None:
        action.full_help, action.help = action.help, argparse.SUPPRESS  # type: ignore[attr-defined]

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "full_help", action.help)
        parser.epilog = None
        parser.print_help()
        parser.exit()


class _OffOrChoice(argparse.Action):
    """`--flag` means its first choice, `--flag CHOICE` that one, `--no-flag` off."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        negated = option_strings[0].replace("--", "--no-", 1)
        super().__init__([*option_strings, negated], dest, **options)

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        off = option_string is not None and option_string.startswith("--no-")
        if off and values != self.const:
            parser.error(f"{option_string} takes no value, and got {values!r}")
        setattr(namespace, self.dest, False if off else values)


def _add_argument(section: Any, owner: type, name: str) -> argparse.Action:
    item = _all_fields(owner)[name]
    kind, _ = field_type(owner, name)
    shown = "none" if item.default in (None, ()) else item.default
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    options["help"] = f"{item.metadata['help']} (default: {shown})".replace("%", "%%")
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif kind == tuple[str, ...]:
        options |= {"action": "append", "metavar": "TEXT"}
        options["help"] += "; may be repeated"
    elif get_origin(kind) is Literal:
        choices = [choice for choice in get_args(kind) if choice is not False]
        options["metavar"] = "{" + ",".join(choices) + "}"
        if False in get_args(kind):
            options |= {"action": _OffOrChoice, "nargs": "?", "const": choices[0]}
    elif item.metadata["names"]:
        options["metavar"] = "{" + ",".join(item.metadata["names"]) + ",PATH}"
    else:
        options["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        if words := number_words(owner, name):
            options["metavar"] = "{" + ",".join([options["metavar"], *words]) + "}"
    action: argparse.Action = section.add_argument(option_name(name), **options)
    return action


def _coerced(owner: type, item: dataclasses.Field, value: Any) -> Any:
    """`value` as the field's type, within the field's bounds, or a `ConfigError`."""
    kind, optional = field_type(owner, item.name)
    if value is None or (optional and isinstance(value, str) and value.lower() == "none"):
        if optional:
            return None
        raise ConfigError(f"{option_name(item.name)} is none; give a value")
    if get_origin(kind) is Literal:
        choices = [choice for choice in get_args(kind) if choice is not False]
        off = False in get_args(kind)
        if off and isinstance(value, bool):
            # What used to be a boolean flag still takes true and false.
            return choices[0] if value else False
        expect(
            value in choices,
            f"{option_name(item.name)} is {value!r}; choose one of {', '.join(choices)}"
            + (", or false" if off else ""),
        )
        return value
    names, not_offered = item.metadata["names"], item.metadata.get("not_offered", {})
    if isinstance(value, str) and value in not_offered:
        raise ConfigError(f"{option_name(item.name)} {value}: {not_offered[value]}")
    expect(
        not names or value in names or (isinstance(value, str) and is_import_path(value)),
        f"{option_name(item.name)} is {value!r}; choose one of {', '.join(names)}, or give the "
        "import path of your own: pkg.mod.fn, pkg.mod:fn or file.py:fn",
    )
    value = _converted(owner, item.name, value)
    if not isinstance(value, str):
        _check_bounds(item, value)
    return value


def _converted(owner: type, name: str, value: Any) -> Any:
    (kind, _), words = field_type(owner, name), number_words(owner, name)
    expected = " or ".join([getattr(kind, "__name__", str(kind)), *words])
    wanted = f"{option_name(name)} is {value!r}; expected {expected}"
    if kind is bool:
        expect(isinstance(value, bool), f"{wanted} (true or false)")
        return value
    if kind in (int, float):
        try:
            number = float(value)
        except (TypeError, ValueError):
            # `float | str` takes any text that is no number; the group checks it.
            if value in words or (isinstance(value, str) and str in _members(owner, name)):
                return value
            raise ConfigError(wanted) from None
        expect(not isinstance(value, bool) and math.isfinite(number), f"{wanted}, a finite number")
        expect(kind is float or number == int(number), wanted)
        if kind is float:
            return number
        # Not through float where it can be helped: that would round integers beyond 2**53.
        return int(value) if not isinstance(value, str) or value.strip().isdigit() else int(number)
    if kind == tuple[str, ...]:
        # The command line and YAML lists give several; a single text needs no list.
        values = (value,) if isinstance(value, str) else value
        wanted = f"{option_name(name)} is {value!r}; expected text, or a list of texts"
        expect(isinstance(values, (list, tuple)), wanted)
        expect(all(isinstance(item, str) for item in values), wanted)
        return tuple(values)
    expect(kind is not str or isinstance(value, (str, Path)), wanted)
    return str(value) if kind is str else value


def _check_bounds(item: dataclasses.Field, value: Any) -> None:
    low, above, high, below = (
        item.metadata[bound] for bound in ("at_least", "above", "at_most", "below")
    )
    fits_low = (low is None or value >= low) and (above is None or value > above)
    if fits_low and (high is None or value <= high) and (below is None or value < below):
        return
    constraint = f"be at least {low}" if above is None else f"be greater than {above}"
    if (high, below) != (None, None):
        start = f"[{low}" if above is None else f"({above}"
        constraint = f"lie in {start}, {f'{high}]' if below is None else f'{below})'}"
    raise ConfigError(f"{option_name(item.name)} is {value}; it must {constraint}")
