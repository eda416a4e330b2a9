"""`compare --advise`: what is recommended for dumps whose policies are known, and for runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plugin import cli
from plugin.config import JobConfig, LossConfig
from plugin.errors import BatchError
from plugin.tools.compare.advice import (
    Advice,
    Situation,
    _with_settings,
    advise_dump,
    advise_run,
    candidates,
    situation_of,
)


def write_dump(
    path: Path, *, mismatch: float = 0.0, drift: float = 0.0, tail: float = 0.0, length: int = 40
) -> Path:
    """100 samples: engine, trainer (its log-probs plus noise), current policy (plus more), a share of outliers."""
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(100):
        rollout = -3 * draw.random(length) - 0.5
        train = rollout + mismatch * draw.standard_normal(length)
        train = np.where(
            draw.random(length) < tail, rollout + draw.choice([-3.0, 3.0], length), train
        )
        cur = train + drift * draw.standard_normal(length)
        columns = {"rollout_log_probs": rollout, "log_probs": train, "cur_log_probs": cur}
        line: dict[str, Any] = {name: np.minimum(v, -1e-6).tolist() for name, v in columns.items()}
        line |= {"advantages": [float(draw.standard_normal())] * length}
        lines.append(json.dumps({**line, "loss_mask": [1] * length}))
    path.write_text("\n".join(lines))
    return path


def test_where_the_policies_agree_nothing_is_corrected(tmp_path: Path) -> None:
    advice = advise_dump([write_dump(tmp_path / "d.jsonl", mismatch=1e-3)])
    assert advice.flags == ["--policy-loss", "ppo", "--get-mismatch-metrics"]
    assert "nothing to correct" in advice.reasons[0]


def test_a_mismatch_gets_what_learned_best_and_the_alternatives_by_bias(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d.jsonl", mismatch=0.1, tail=0.02)
    advice = advise_dump([dump], target_ess=0.9)
    assert "--use-tis --use-rollout-kl-loss --rollout-kl-loss-coef 0.1" in " ".join(advice.flags)
    assert advice.expected["ess_share"] >= 0.9 and advice.expected["bias_bound"] < 0.2
    assert "mostly mismatch" in advice.reasons[0]
    # The alternatives with enough ESS come first, the least biased of them before the others.
    enough = [row["ess_share"] >= 0.9 for row in advice.others]
    assert enough == sorted(enough, reverse=True) and enough[0]
    biases = [row["bias_bound"] for row in advice.others if row["ess_share"] >= 0.9]
    assert biases == sorted(biases)
    # The flags are those of configurations that exist.
    parser = argparse.ArgumentParser()
    LossConfig.add_arguments(parser)
    for flags in (advice.flags, *(row["flags"] for row in advice.others)):
        LossConfig.from_sources(vars(parser.parse_args(flags)))


def test_drift_is_told_from_mismatch(tmp_path: Path) -> None:
    advice = advise_dump([write_dump(tmp_path / "d.jsonl", mismatch=0.01, drift=0.15)])
    assert "mostly staleness" in advice.reasons[0]


def test_sequence_weights_are_tried_only_where_length_times_kl_is_small(tmp_path: Path) -> None:
    from plugin.tools.compare.dump_reading import open_dump

    names = []
    for length, mismatch in ((4, 0.05), (400, 0.1)):
        dump = open_dump(
            [write_dump(tmp_path / f"{length}.jsonl", mismatch=mismatch, length=length)]
        )
        situation = situation_of(block for block, _ in dump.blocks())
        names.append({method.name for method, _ in candidates(situation)})
    assert "vespo" in names[0] and "vespo" not in names[1]


def write_run(path: Path, steps: list[dict[str, float]]) -> Path:
    path.mkdir()
    lines = [json.dumps({"step": i + 1, **step}) for i, step in enumerate(steps)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("kl", "staleness", "expected"),
    [
        (1e-6, 0.0, "--get-mismatch-metrics"),
        (1e-2, 0.0, "--use-rollout-kl-loss"),
        (1e-6, 2.0, "--use-rollout-kl-loss"),
        (1e-2, 40.0, "--use-tis"),
    ],
)
def test_a_run_without_a_dump_is_advised_by_rule(
    tmp_path: Path, kl: float, staleness: float, expected: str
) -> None:
    run = write_run(tmp_path / "run", [{"mismatch_kl": kl, "staleness": staleness}] * 3)
    advice = advise_run(run)
    assert expected in advice.flags and not advice.expected
    # Tokens as old as that are weighted and not pulled at.
    assert ("--use-rollout-kl-loss" in advice.flags) == (expected == "--use-rollout-kl-loss")
    assert "nothing can be predicted" in advice.reasons[-1]


def test_a_run_that_measured_nothing_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="--get-mismatch-metrics"):
        advise_run(write_run(tmp_path / "run", [{"loss": 1.0}]))


def test_the_command_prints_flags_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = write_dump(tmp_path / "d.jsonl", mismatch=0.1, tail=0.02)
    assert cli.main(["compare", "--advise", str(dump)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--policy-loss ") and "bias bound" in printed
    assert cli.main(["compare", "--advise", "--json", "-", str(dump)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"].split() == found["flags"] and found["situation"]["tokens"] == 4000
    assert cli.main(["compare", "--advise", "--html", str(tmp_path / "x.html"), str(dump)]) == 2


def test_what_settings_leave_uncorrected_is_added_as_flags_that_parse() -> None:
    config = SimpleNamespace(
        truncates_sampling=True,
        replays_sampling_mask=False,
        embedded_model="moe",
        replays_routes=False,
    )
    advice = _with_settings(Advice(["--policy-loss", "ppo"], [], {}, [], {}), config)  # type: ignore[arg-type]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    JobConfig.add_arguments(parser)
    found = parser.parse_args(advice.flags)
    assert found.use_rollout_sampling_mask == "on" and found.use_rollout_routing_replay
    assert len(advice.reasons) == 2


@pytest.mark.parametrize(
    ("mismatch", "staleness", "flags"),
    [
        # Nothing between engine and trainer, however much the updates on a rollout move the policy.
        (1e-5, 0.0, "--policy-loss ppo"),
        (5e-4, None, "--policy-loss ppo --use-tis"),
        (5e-3, 0.0, "--policy-loss ppo --use-tis --use-rollout-kl-loss --rollout-kl-loss-coef 0.1"),
        # Stale tokens are corrected however close they still are; those of the measured age are pulled at.
        (1e-5, 1.0, "--policy-loss ppo --use-tis --use-rollout-kl-loss --rollout-kl-loss-coef 0.1"),
        (0.3, 16.0, "--policy-loss ppo --use-tis --use-rollout-kl-loss --rollout-kl-loss-coef 0.1"),
        (0.3, 17.0, "--policy-loss ppo --use-tis"),
    ],
)
def test_the_choice_follows_distance_and_age(
    mismatch: float, staleness: float | None, flags: str
) -> None:
    situation = Situation(1000, mismatch, 0.01, 0.9, 0.0, 0.0, 8.0, staleness)
    _, chosen = candidates(situation)[0]
    assert " ".join(chosen) == flags
    names = [" ".join(each) for _, each in candidates(situation)]
    assert len(set(names)) == len(names)
