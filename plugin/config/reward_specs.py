"""`--reward NAME:WEIGHT`: the built-in names and how a reward and its weight are written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from plugin.config.flags import expect
from plugin.config.import_paths import is_import_path

BUILT_IN_REWARDS = (
    *("exact", "numeric", "gsm8k", "boxed", "choice", "json_schema", "code_tests"),
    *("length_penalty", "http"),
)
_WEIGHT = re.compile(r"(?P<reward>.+):(?P<weight>[-+]?[\d.][\d.e+-]*)")


@dataclass(frozen=True)
class RewardSpec:
    """One reward.

    reward: a built-in name, or the import path of a function
    name: what its metric is called, `reward/<name>`
    """

    reward: str
    weight: float = 1.0

    @property
    def name(self) -> str:
        return re.split("[:.]", self.reward)[-1]


def parse_rewards(texts: tuple[str, ...], option: str = "--reward") -> tuple[RewardSpec, ...]:
    """The rewards that `texts` name; a `ConfigError` for one that is none, or named twice."""
    specs = tuple(_parsed(text.strip(), option) for text in texts)
    names = [spec.name for spec in specs]
    for name in names:
        expect(
            names.count(name) == 1,
            f"{option}: two rewards are called {name!r}; name it once, or rename your function",
        )
    return specs


def _parsed(text: str, option: str) -> RewardSpec:
    found = _WEIGHT.fullmatch(text)
    reward, weight = (found["reward"], found["weight"]) if found else (text, "1")
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    expect(
        math.isfinite(number) and number != 0,
        f"{option} {text}: the weight {weight!r} must be a finite number other than 0",
    )
    expect(
        reward in BUILT_IN_REWARDS or is_import_path(reward),
        f"{option} is {text!r}; choose one of {', '.join(BUILT_IN_REWARDS)}, or give the import "
        "path of your own: pkg.mod:fn or file.py:fn; a weight follows a colon, as in "
        "length_penalty:0.1",
    )
    return RewardSpec(reward, number)
