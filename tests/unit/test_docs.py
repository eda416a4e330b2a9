"""Documentation: generated pages are current, links lead somewhere, code and commands in it work."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.write_reference import pages
from plugin.cli import COMMANDS
from plugin.config import JobConfig, LossConfig
from plugin.config.other_frameworks import SLIME_LOSS_FLAGS, slime_option

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    slugs = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"\s+", "-", slug) for slug in slugs}


def test_the_generated_pages_are_current() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path, content in pages().items():
            assert path.read_text() == content, "run `python -m docs.write_reference`"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_and_make_targets_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(
        r"\b((?:examples|tests|plugin|benchmarks)/[\w/]+\.(?:py|sh|yaml))", text
    ):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M):
        assert target in targets, f"make {target}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_folders_and_modules_of_the_package_that_are_named_exist(page: Path) -> None:
    """`plugin.x.y`, `plugin/x/` anywhere; on the architecture page also `x/y.py` and `x/` below plugin/."""
    text = page.read_text()
    for path in re.findall(r"`(plugin/[\w/]*)", text):
        found = ROOT / path
        assert found.exists() or found.with_suffix(".py").exists(), path
    for dotted in re.findall(r"\bplugin(?:\.\w+)+", text):
        if not dotted.endswith((".py", ".md")):
            assert resolves(dotted), dotted
    if page.name == "architecture.md":
        for path in re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", text):
            below = {
                "plugin",
                "plugin/megatron_backend",
                "plugin/tools",
                "plugin/engines",
                "plugin/logprobs",
            }
            places = [ROOT / folder / path for folder in below]
            assert (ROOT / path).exists() or any(place.exists() for place in places), path


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or something that can be reached from one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("plugin"):
                return True  # an adapter of a framework that is not installed
            continue
        for name in parts[cut:]:
            found = getattr(found, name, None)
        return found is not None
    return False


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in navigation, page.name


def test_every_flag_that_is_named_exists() -> None:
    known = {"traceback"}
    for name, (module, _) in COMMANDS.items():
        parser = argparse.ArgumentParser(name)
        importlib.import_module(module).add_arguments(parser)
        known |= {o.removeprefix("--") for a in parser._actions for o in a.option_strings}
    known |= {slime_option(name).removeprefix("--") for name in SLIME_LOSS_FLAGS}
    # of Ray, vLLM, torchrun, pip and of scripts
    foreign = {
        *("tensor-parallel-size", "head", "port", "strict", "log-probs", "write"),
        *("logprobs-mode", "generation-config", "enable-return-routed-experts", "max-logprobs"),
        *("enforce-eager", "runtime-env-json", "object-store-memory", "shm-size"),
    }
    generated = {DOCS / "reference" / "flags.md"}
    mine = [page for page in PAGES if page not in generated]
    for page in mine:
        for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", page.read_text()):
            assert flag in known | foreign, f"--{flag} in {page.name}"


def train_commands() -> list[Any]:
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] == ["megatron-tis", "train"]:
                    found.append(pytest.param(words[2:], id=f"{page.stem}-{len(found)}"))
    return found


@pytest.mark.parametrize("words", train_commands())
def test_a_train_command_is_a_valid_configuration(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    JobConfig.add_arguments(parser)
    settings = vars(parser.parse_args(words))
    config = settings.pop("config")
    JobConfig.from_sources(settings, ROOT / config if config else None)


def test_the_commands_of_the_decision_table_are_valid_losses() -> None:
    page = DOCS / "which_correction.md"
    rows = re.findall(
        r"^\| [^|]+ \| (.+?) \| .+\|$", page.read_text().split("## What is refused")[0], re.M
    )
    commands = [code for row in rows for code in re.findall(r"`(--[^`]+)`", row)]
    assert len(commands) >= 8
    parser = argparse.ArgumentParser(allow_abbrev=False)
    JobConfig.add_arguments(parser)
    for command in commands:
        JobConfig.from_sources(vars(parser.parse_args(shlex.split(command))))


def test_the_library_example_of_the_quickstart_runs() -> None:
    (code,) = [block for block in blocks(DOCS / "quickstart.md", "python") if "backward" in block]
    scope: dict[str, Any] = {}
    exec(compile(code, "quickstart.md", "exec"), scope)
    assert scope["logits"].grad is not None and "rollout_kl" in scope["metrics"]
    assert scope["metrics"]["is_masked"] == 0 and scope["metrics"]["pg_loss"] != 0


def test_the_hook_example_is_the_one_in_the_examples() -> None:
    (shown,) = [block for block in blocks(DOCS / "hooks.md", "python") if "soft_tis" in block]
    source = (ROOT / "examples" / "custom_correction.py").read_text()
    for line in shown.splitlines()[1:]:
        assert line.split("#")[0].strip() in source, line


def test_prime_rls_settings_in_the_docs_are_valid() -> None:
    (block,) = blocks(DOCS / "frameworks.md", "toml")
    pairs = re.findall(r"(\w+) = (\"[^\"]+\"|[\d.]+)", block.split("kwargs")[1])
    LossConfig.from_sources({name: yaml.safe_load(value) for name, value in pairs})


def test_the_readme_shows_the_two_commands_a_picture_and_a_place_for_the_result() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("make train") < text.index("make test") < text.index("![")
    assert "<!-- result of make train: begin -->" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_in_a_clean_environment_has_the_hooks(tmp_path: Path) -> None:
    """torch comes from this environment (a .pth file), so that nothing large is installed."""
    import sys
    import sysconfig

    run = lambda *command: subprocess.run(  # noqa: E731
        [str(part) for part in command], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("megatron_tis-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", wheel)
    target = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).stdout.strip()
    only = tmp_path / "only"
    only.mkdir()
    installed = Path(sysconfig.get_path("purelib"))
    for entry in installed.iterdir():
        if (
            not entry.name.startswith(("__editable__", "megatron_tis", "plugin"))
            and entry.suffix != ".pth"
        ):
            (only / entry.name).symlink_to(entry)
    Path(target, "only.pth").write_text(str(only))
    code = (
        "from plugin.ppo_utils import off_policy_is_function; import plugin; print(plugin.__file__)"
    )
    where = run(python, "-c", code).stdout
    assert str(tmp_path) in where
    run(python, "-m", "plugin", "corrections", "icepop")
