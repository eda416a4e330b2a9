"""The catalog of losses and corrections: complete, true to the flags, printable, drawable."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from plugin import ppo_utils
from plugin.cli import main
from plugin.commands.corrections import listing
from plugin.config import LossConfig
from plugin.loss import POLICY_LOSSES
from plugin.tools.compare.correction_catalog import (
    COMMON,
    CatalogEntry,
    catalog,
    correction_weight,
    entry_of,
    gradient_by_difference,
    loss_gradient,
)

ENTRIES = catalog()
HOOKS = [name for name in ppo_utils.__all__ if name.endswith("_function")]
DEFAULTS = {field.name: field.default for field in dataclasses.fields(LossConfig)}


def test_every_policy_loss_and_every_exported_hook_is_in_the_catalog() -> None:
    assert [e.name for e in ENTRIES if e.kind == "policy loss"] == list(POLICY_LOSSES)
    assert {e.name for e in ENTRIES if e.kind == "correction"} == set(HOOKS)
    assert len(ENTRIES) == len(POLICY_LOSSES) + len(HOOKS)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_is_complete(entry: CatalogEntry) -> None:
    assert entry.summary and entry.reference and re.search(r"\d{4}|verl", entry.reference)
    assert re.match(r"(loss|weight|keep|drop) = ", entry.formula)
    assert entry.flags == "none" or entry.flags.startswith("--")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_flags_of_an_entry_exist_with_the_default_it_names(entry: CatalogEntry) -> None:
    if entry.flags == "none":
        return
    for part in re.split(r", (?=--)", entry.flags):
        option, _, shown = part.partition(" ")
        default = DEFAULTS[option.removeprefix("--").replace("-", "_")]
        word = shown.split(" ")[0]
        if default is None:
            assert shown.startswith("("), f"{option} has no default, the docstring says {shown}"
        elif isinstance(default, float):
            assert float(word) == default, f"{option} is {default}, the docstring says {shown}"
        else:
            assert str(default) in word.split("|"), (
                f"{option} is {default}, the docstring says {shown}"
            )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_setting_in_a_formula_is_among_the_flags(entry: CatalogEntry) -> None:
    for name in DEFAULTS:
        if "_" in name and re.search(rf"\b{name}\b", entry.formula):
            assert f"--{name.replace('_', '-')}" in entry.flags, name


def test_a_docstring_without_its_parts_is_refused() -> None:
    def undocumented() -> None:
        """Only a sentence."""

    with pytest.raises(ValueError, match="docstring of undocumented"):
        entry_of(undocumented, "undocumented", "correction", "")


def test_the_table_shows_everything_and_keeps_to_its_width(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["corrections"]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{entry.name} ", printed, re.MULTILINE) for entry in ENTRIES)
    assert max(map(len, printed.splitlines())) <= 140


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = listing(ENTRIES, width).splitlines()
    # a path of a hook is never broken, so that it can be copied
    assert all(len(line) <= width or "--custom-tis-function-path" in line or "plugin." in line for line in lines)  # fmt: skip


def test_one_entry_by_its_short_or_long_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corrections", "vanilla_tis", "opsm_function"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("vanilla_tis_function\n") and "\nopsm_function\n" in printed
    assert "clip(exp(proximal - rollout), tis_clip_low, tis_clip)" in printed
    assert "ppo" not in printed.split()


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corrections", "tiss"]) == 2
    assert "no loss or correction 'tiss'; there are ppo, reinforce" in capsys.readouterr().err


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "corrections.png"
    assert main(["corrections", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000


@pytest.mark.parametrize("name", ["no/such/folder/out.png", "out.unknown", "out"])
def test_a_picture_that_cannot_be_written_is_a_clean_error(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["corrections", "--plot", str(tmp_path / name)]) == 2
    assert "megatron-tis: --plot" in capsys.readouterr().err


def test_the_drawn_weights_are_those_of_the_hooks() -> None:
    # ratios 0.1, 1, 4 at default flags
    ratios = torch.tensor([0.1, 1.0, 4.0])
    expected = {
        "vanilla_tis_function": [0.1, 1.0, 2.0],
        "icepop_function": [0.1, 1.0, 0.0],
        "off_policy_is_function": [0.8, 1.0, 1.2],
        "sequence_tis_function": [0.1, 1.0, 2.0],
        "geometric_mask_function": [0.0, 1.0, 0.0],
        "rejection_function": [0.0, 1.0, 0.0],
        "veto_function": [1.0, 1.0, 1.0],
        "opsm_function": [
            0.0,
            1.0,
            1.0,
        ],  # A = -1 and the policy has left: mean(train - cur) = log 10
        "dppo_tv_mask_function": [1.0, 1.0, 1.0],  # 0.05 * (4 - 1) = 0.15 < 0.2
        "segment_tis_function": [0.1, 1.0, 2.0],
        # 0.05 -> 0.005: 0.034 and 0.071; 0.05 -> 0.2: 0.2 ln 4 + 0.8 ln(0.8 / 0.95) = 0.140 > 0.1
        "kpop_function": [0.1, 1.0, 0.0],
        # squares 5.3, 0, 1.9: only the 0 has a mean below 0.04
        "m2po_function": [0.0, 1.0, 0.0],
        # 5.1^2 / (3 * 17.01) = 0.50970
        "ess_tis_function": [0.1, 5.1**2 / (3 * 17.01), 5.1**2 / (3 * 17.01)],
    }
    assert expected.keys() == set(HOOKS)
    for name, values in expected.items():
        torch.testing.assert_close(correction_weight(name, ratios), torch.tensor(values))


def test_the_drawn_gradients_are_those_of_the_losses() -> None:
    rollout = torch.tensor([math.log(0.4)])
    cur = torch.tensor([math.log(0.5)])  # ratio 1.25, difference 0.1
    for name, expected in {"ppo": 0.0, "reinforce": 1.0, "cispo": 1.2, "icepop": 1.25}.items():
        torch.testing.assert_close(loss_gradient(name, cur, rollout, 1.0), torch.tensor([expected]))
    x, y = gradient_by_difference("dppo_tv", 1.0)
    kept = y != 0
    assert x[kept].min() >= -0.2 - 1e-5 and x[kept].max() <= 0.2 + 1e-5
    torch.testing.assert_close(y[kept], (x[kept] + COMMON) / COMMON, rtol=1e-4, atol=1e-5)
