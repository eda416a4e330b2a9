"""Hooks named by path: three spellings, loaded once, errors that show their cause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plugin.errors import HookLoadError
from plugin.loss import load_function, load_hook
from plugin.ppo_utils import vanilla_tis_function

HOOK_SOURCE = """
import pathlib
with pathlib.Path(__file__).with_suffix(".loads").open("a") as log:
    log.write("x")

def hook(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss * 2, loss_masks, {}

VALUE = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package `user_hooks` on the path, with the hook in its module `good`."""
    folder = tmp_path / "user_hooks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "good.py").write_text(HOOK_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("user_hooks")]:
        del sys.modules[name]
    load_function.cache_clear()
    load_hook.cache_clear()


@pytest.mark.parametrize("spelling", ["user_hooks.good.hook", "user_hooks.good:hook", "{}/good.py:hook"])  # fmt: skip
def test_three_spellings_load_the_hook_once(package: Path, spelling: str) -> None:
    path = spelling.format(package)
    first = load_hook(path)
    assert first is load_hook(path)
    assert load_function(path).__name__ == "hook"
    assert (package / "good.loads").read_text() == "x"
    values = dict.fromkeys(
        ("train_log_probs", "rollout_log_probs", "total_lengths", "response_lengths")
    )
    result = first(None, pg_loss=1, loss_masks=[], cur_log_probs=None, advantages=None, **values)
    assert result == (2, [], {})


def test_our_own_hooks_load_by_their_documented_name() -> None:
    assert load_function("plugin.ppo_utils.vanilla_tis_function") is vanilla_tis_function
    assert load_function("plugin.ppo_utils:vanilla_tis_function") is vanilla_tis_function


def test_a_relative_file_path_works(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    assert load_function("good.py:hook")("args", pg_loss=2, loss_masks=[]) == (4, [], {})
    assert load_function("./good.py:hook").__name__ == "hook"


def test_two_files_of_the_same_name_do_not_replace_each_other(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hook.py").write_text(f"def which():\n    return {folder!r}\n")
    loaded = [load_function(f"{tmp_path}/{folder}/hook.py:which") for folder in ("a", "b")]
    assert [function() for function in loaded] == ["a", "b"]


def test_an_import_error_inside_the_users_module_is_shown_with_its_traceback(package: Path) -> None:
    (package / "broken.py").write_text("import json\nimport no_such_dependency\n")
    for path in ("user_hooks.broken.hook", f"{package}/broken.py:hook"):
        with pytest.raises(HookLoadError) as caught:
            load_hook(path)
        text = str(caught.value)
        assert "Traceback" in text and "No module named 'no_such_dependency'" in text
        assert "broken.py" in text and "line 2" in text


def test_any_exception_inside_the_users_module_is_shown(package: Path) -> None:
    (package / "raising.py").write_text("def f():\n    return 1 / 0\nf()\n")
    (package / "syntax.py").write_text("def f(:\n")
    with pytest.raises(HookLoadError, match=r"(?s)Traceback.*ZeroDivisionError"):
        load_hook("user_hooks.raising.hook")
    with pytest.raises(HookLoadError, match=r"(?s)syntax.py.*SyntaxError"):
        load_hook("user_hooks.syntax.hook")


def test_a_failed_file_import_is_retried_not_remembered_half_built(package: Path) -> None:
    file = package / "flaky.py"
    file.write_text("def hook(args, **kwargs): ...\nraise RuntimeError('first')\n")
    with pytest.raises(HookLoadError, match="first"):
        load_function(f"{file}:hook")
    file.write_text("def hook(args, **kwargs): ...\n# repaired\n")
    assert load_function(f"{file}:hook").__name__ == "hook"


@pytest.mark.parametrize(
    "path, message",
    [
        ("no_such_package.module.fn", "no module named 'no_such_package'"),
        ("plugin.ppo_utils.no_such_function", "has no 'no_such_function'; it has .*"),
        ("plugin.ppo_utils.KL_ESTIMATORS", "is a dict; a function is needed"),
        (
            "function_without_module",
            r"is not the path of a function; write .* path/to/file\.py:function",
        ),
        ("package.module:", "is not the path of a function"),
        ("package.module:not a name", "is not the path of a function"),
        ("", "is not the path of a function"),
        ("/no/such/file.py:fn", "there is no file '/no/such/file.py'"),
        ("/some/where/file.py", r":function is missing; write /some/where/file\.py:NAME"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(path: str, message: str) -> None:
    with pytest.raises(HookLoadError, match=message):
        load_hook(path)


def define(package: Path, name: str, source: str) -> str:
    (package / f"{name}.py").write_text(source)
    return f"user_hooks.{name}.hook"


CONTRACT = (
    "pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths"
)
VALUES = {name: name for name in (*CONTRACT.split(", "), "cur_log_probs", "advantages")}


@pytest.mark.parametrize(
    "name, signature, shown",
    [
        ("narrow", f"args, {CONTRACT}", "args"),
        ("narrow_keyword_only", f"args, *, {CONTRACT}", "args"),
        ("other_name", f"config, {CONTRACT}", "config"),
        ("args_last", f"{CONTRACT}, args", "args"),
        ("only_keywords", "**kwargs", "kwargs['args']"),
        ("no_args_but_keywords", f"{CONTRACT}, **kwargs", "kwargs['args']"),
        ("positional_only", f"namespace, /, {CONTRACT}", "namespace"),
        ("with_default", f"args, {CONTRACT}, extra=None", "args"),
    ],
)
def test_hooks_written_for_slimes_narrow_call_work(
    package: Path, name: str, signature: str, shown: str
) -> None:
    hook = load_hook(define(package, name, f"def hook({signature}):\n    return {shown}\n"))
    assert hook("the flags", **VALUES) == "the flags"


def test_a_hook_gets_the_extra_arguments_exactly_if_it_takes_them(package: Path) -> None:
    source = f"def hook(args, {CONTRACT}, advantages, cur_log_probs=None):\n    return advantages, cur_log_probs\n"
    assert load_hook(define(package, "extras", source))(None, **VALUES) == ("advantages", "cur_log_probs")  # fmt: skip
    source = f"def hook(args, {CONTRACT}, **kwargs):\n    return sorted(kwargs)\n"
    assert load_hook(define(package, "any", source))(None, **VALUES) == ["advantages", "cur_log_probs"]  # fmt: skip


@pytest.mark.parametrize(
    "name, signature, message",
    [
        (
            "lacks",
            "args, pg_loss, loss_masks",
            "does not accept train_log_probs, rollout_log_probs",
        ),
        ("demands", f"args, {CONTRACT}, magic", "requires magic, which is never passed"),
        ("lacks_args", CONTRACT, "does not accept args"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_when_it_is_loaded(
    package: Path, name: str, signature: str, message: str
) -> None:
    path = define(package, name, f"def hook({signature}):\n    return None\n")
    with pytest.raises(HookLoadError, match=f"{path}.*{message}"):
        load_hook(path)


def test_a_callable_object_is_a_hook(package: Path) -> None:
    source = (
        "class Hook:\n    def __call__(self, args, **kwargs):\n        return args\nhook = Hook()\n"
    )
    assert load_hook(define(package, "instance", source))("flags", **VALUES) == "flags"
