"""How often `compare --advise` names one of the best arms: looked up in the data, not argued.

In every setting of the suite an uncorrected run is dumped early, the adviser sees the dump alone, and the arm that it
names is looked up in the data. The adviser's rule was written from the settings of the tables; those that check it
(`grid.CHECK`) were run after that. A choice is good if its final reward, the mean of the seeds, is in the top third.
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
from benchmarks.evidence.grid import CHECK, SETTINGS, read_rows, results, setting_of
from benchmarks.evidence.policy import LENGTH
from benchmarks.evidence.simulation import run
from benchmarks.evidence.summary import (
    APPENDIX,
    PAGE,
    Results,
    by_cell,
    interval,
    setting_name,
    wrapped,
)
from benchmarks.marked_pages import write_marked
from plugin.config import LossConfig
from plugin.observe.log_prob_dump import LogProbDump
from plugin.tools.compare.advice import advise_dump

#: The dump holds these rollouts of the uncorrected run: what a user has who asks early.
FIRST_DUMPED, LAST_DUMPED = 20, 24
ADVISED = Path(__file__).with_name("advised.jsonl")


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
    """How what was advised in a setting did.

    regret: what the best arm had more, and half of the 95 % interval of that difference, seed by seed
    """

    setting: Setting
    arm: str
    rank: int
    of: int
    regret: float
    scatter: float

    @property
    def good(self) -> bool:
        return 3 * self.rank <= self.of

    @property
    def within_scatter(self) -> bool:
        return self.regret <= self.scatter


def choices() -> list[Setting]:
    """The settings that leave something to choose: not all arms are one run."""
    settings = (*SETTINGS, *CHECK)
    return [s for s in settings if any(not equals_ppo(a, s) for a in arms()[1:])]


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
    rewards = (found[a.name, setting]["final"] for a in distinct_arms(setting, found))
    best, own = max(rewards, key=mean), found[arm, setting]["final"]
    regret, scatter = interval([b - o for b, o in zip(best, own, strict=True)])
    return Checked(setting, arm, *rank_of(arm, setting, found), regret, scatter)


def checks_made(found: Results) -> list[Checked]:
    """Every decision of the adviser that can be looked up; those held back from its rule first."""
    measured = {setting for _, setting in found}
    rows = [row for row in read_rows(ADVISED) if setting_of(row) in measured]
    checks = [checked(setting_of(row), row["arm"], found) for row in rows]
    return sorted(checks, key=lambda check: check.setting not in CHECK)


def shares(found: Results) -> str:
    """How often the advice was good, for the page."""
    checks = checks_made(found)
    held = [c for c in checks if c.setting in CHECK]
    used = [c for c in checks if c.setting not in CHECK]
    return f"{_counted('held back', held)}\n{_counted('used for the rule', used)}"


def report(found: Results) -> str:
    """The table of all decisions, for the appendix."""
    lines = [
        "| setting | held back | advised | rank | below the best, ± 95 % |",
        "|---|---|---|---|---|",
    ]
    for c in checks_made(found):
        place = f"{c.rank} of {c.of}" if c.good else f"**{c.rank} of {c.of}**"
        mark = "yes" if c.setting in CHECK else ""
        regret = f"{c.regret:.3f} ± {c.scatter:.3f}"
        lines.append(f"| {setting_name(c.setting)} | {mark} | `{c.arm}` | {place} | {regret} |")
    return "\n".join(lines)


def _counted(title: str, checks: Sequence[Checked]) -> str:
    if not checks:
        return f"- {title}: not measured yet"
    good, close = sum(c.good for c in checks), sum(c.within_scatter for c in checks)
    return wrapped(
        f"- {title}: in the top third of the arms in {good} of {len(checks)} settings "
        f"({good / len(checks):.0%}); on average {mean(c.regret for c in checks):.3f} below the best final reward, and "
        f"in {close} of {len(checks)} within the 95 % interval of the difference from the best"
    )


def main() -> None:
    """Advise in every setting, and write how the choices did, where they were measured, into the docs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.adviser_check")
    parser.add_argument("--report", action="store_true", help="only look up what was advised last")
    if not parser.parse_args().report:
        rows = [{**asdict(s), "arm": advised_arm(s).name} for s in choices()]
        ADVISED.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = by_cell(results())
    write_marked(PAGE, "adviser", shares(found))
    write_marked(APPENDIX, "adviser", report(found))
    print(f"{shares(found)}\n\n{report(found)}")


if __name__ == "__main__":
    main()
