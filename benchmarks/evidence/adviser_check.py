"""Is what `megatron-tis compare --advise` recommends among the best arms? `python -m benchmarks.evidence.adviser_check`

For every setting of the suite an uncorrected run is dumped early, the adviser sees the dump alone, and the arm that it
names is looked up in the data. Half of the settings, every second of the list, were held back: the adviser's rules
were written from the others. A choice is good if its final reward, the mean of the seeds, is in the top third.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch

from benchmarks.evidence.arms import Arm, arms, equals_ppo
from benchmarks.evidence.engine import Rollout, Setting
from benchmarks.evidence.grid import SETTINGS, results, setting_of
from benchmarks.evidence.policy import LENGTH
from benchmarks.evidence.simulation import run
from benchmarks.evidence.summary import BEGIN, PAGE, Results, by_cell, setting_name
from plugin.compare.advice import advise_dump
from plugin.compare.log_prob_dump import LogProbDump
from plugin.config import LossConfig

#: The dump holds these rollouts of the uncorrected run: what a user has who asks early.
FIRST_DUMPED, LAST_DUMPED = 20, 24
ADVISED = Path(__file__).with_name("advised.jsonl")
MARKS = tuple(
    mark.replace("evidence", "adviser") for mark in (BEGIN, BEGIN.replace("begin", "end"))
)


def held_back() -> tuple[Setting, ...]:
    """Every second setting of the list."""
    return SETTINGS[1::2]


def dump_run(setting: Setting, directory: Path) -> None:
    """The log-probs of an uncorrected run, of all seeds, as a job dumps them."""
    dump = LogProbDump(directory)

    def watch(step: int, rollout: Rollout, train: torch.Tensor, cur: torch.Tensor) -> None:
        if step < FIRST_DUMPED:
            return
        # With several updates per rollout the job dumps the last minibatch's tokens at its own policy.
        samples = cur.numel() // LENGTH
        part = rollout.part(setting.updates - 1, setting.updates)
        flat = {
            "cur_log_probs": cur,
            "log_probs": train.chunk(setting.updates, 1)[-1],
            "rollout_log_probs": part.log_probs,
        }
        columns = {name: list(value.reshape(samples, LENGTH)) for name, value in flat.items()}
        columns |= {
            "unconcat_tokens": list(
                torch.cat([part.seen[..., :2].flatten(2), part.written], 2).flatten(0, 1)
            ),
            "total_lengths": [3 * LENGTH] * samples,
            "response_lengths": [LENGTH] * samples,
            "loss_masks": [torch.ones(LENGTH)] * samples,
            "advantages": list(part.advantages.flatten()[:, None].expand(-1, LENGTH)),
            "rewards": part.rewards.flatten().tolist(),
            "weight_versions": [max(step - setting.staleness, 0)] * samples,
        }
        dump.write(step, columns, trainer_version=step)

    run(Arm("ppo"), setting, steps=LAST_DUMPED, watch=watch)


def arm_of(flags: Sequence[str]) -> Arm | None:
    """The arm that these flags set, if it was measured."""
    parser = argparse.ArgumentParser()
    LossConfig.add_arguments(parser)
    given = {k: v for k, v in vars(parser.parse_args(list(flags))).items() if v is not None}
    given |= {"validate_batch": "never", "get_mismatch_metrics": False}
    if given.get("use_tis") and "custom_tis_function_path" not in given:
        given["custom_tis_function_path"] = "plugin.ppo_utils.vanilla_tis_function"
    wanted = LossConfig.from_sources(given)
    return next((arm for arm in arms() if arm.config == wanted), None)


def distinct_arms(setting: Setting, found: Results) -> list[Arm]:
    """The arms that were measured in a setting; those that are the same run count once."""
    return [a for a in arms() if (a.name, setting) in found and not equals_ppo(a, setting)]


def rank_of(arm: str, setting: Setting, found: Results) -> tuple[int, int]:
    """Its place by final reward, 1 is the best, and the number of arms."""
    runs = distinct_arms(setting, found)
    own = mean(found[arm, setting]["final"])
    return 1 + sum(mean(found[a.name, setting]["final"]) > own for a in runs), len(runs)


@dataclass(frozen=True)
class Checked:
    """How what was advised in a setting did."""

    setting: Setting
    arm: str
    rank: int
    of: int
    regret: float

    @property
    def good(self) -> bool:
        return 3 * self.rank <= self.of


def advised_arm(setting: Setting) -> Arm:
    """What the adviser says about a dump of this setting."""
    with tempfile.TemporaryDirectory() as directory:
        dump_run(setting, Path(directory))
        flags = advise_dump([directory]).flags
    arm = arm_of(flags)
    if arm is None:
        raise ValueError(f"{' '.join(flags)} is no arm of the suite: add it to SETTINGS")
    return arm


def checked(setting: Setting, arm: str, found: Results) -> Checked:
    """Look an arm up."""
    best = max(mean(found[a.name, setting]["final"]) for a in distinct_arms(setting, found))
    own = mean(found[arm, setting]["final"])
    return Checked(setting, arm, *rank_of(arm, setting, found), best - own)


def report(found: Results) -> str:
    """Shares and the table of all decisions, for the docs."""
    rows = [json.loads(line) for line in ADVISED.read_text().splitlines()]
    checks = [checked(setting_of(row), row["arm"], found) for row in rows]
    held = set(held_back())
    lines = []
    for title, chosen in (
        ("held back", [c for c in checks if c.setting in held]),
        ("used for the rule", [c for c in checks if c.setting not in held]),
    ):
        good = sum(c.good for c in chosen)
        lines.append(
            f"- {title}: in the top third of the arms in {good} of {len(chosen)} settings "
            f"({good / len(chosen):.0%}); on average {mean(c.regret for c in chosen):.3f} below the best final reward"
        )
    lines += [
        "",
        "| setting | held back | advised | rank | below the best |",
        "|---|---|---|---|---|",
    ]
    for c in checks:
        place = f"{c.rank} of {c.of}" if c.good else f"**{c.rank} of {c.of}**"
        lines.append(
            f"| {setting_name(c.setting)} | {'yes' if c.setting in held else ''} | `{c.arm}` | {place} | {c.regret:.3f} |"
        )
    return "\n".join(lines)


def shown() -> str:
    """What the page says now."""
    return PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0].strip()


def main() -> None:
    """Advise in every measured setting, and write how the choices did into the docs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.adviser_check")
    parser.add_argument("--report", action="store_true", help="only look up what was advised last")
    found = by_cell(results())
    if not parser.parse_args().report:
        # Where all arms are one run there is nothing to choose.
        settings = [s for s in SETTINGS if len(distinct_arms(s, found)) > 1]
        rows = [{**asdict(s), "arm": advised_arm(s).name} for s in settings]
        ADVISED.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, rest = PAGE.read_text().split(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n{report(found)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    print(report(found))


if __name__ == "__main__":
    main()
