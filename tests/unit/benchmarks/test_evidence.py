"""The experiment suite: what it measures, that it goes on where it was, and that docs and data agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import adviser_check, figures, grid, simulation, summary
from benchmarks.evidence.arms import CORE, EQUAL_TO_PPO, NEVER_PPO, Arm, arms, equals_ppo
from benchmarks.evidence.engine import SEEDS, Rollout, Setting, sample
from benchmarks.evidence.policy import StackedAdder, engine_weights
from benchmarks.evidence.simulation import run
from benchmarks.marked_pages import marked


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of two steps from models that were hardly trained."""
    for name, value in {"STEPS": 2, "WARM_STEPS": 2, "EVALUATED": 4, "EVALUATE_EVERY": 1}.items():
        monkeypatch.setattr(simulation, name, value)
    simulation.warmed_weights.cache_clear()
    yield
    simulation.warmed_weights.cache_clear()


def test_the_tables_in_the_docs_are_those_of_the_data() -> None:
    rows, fix = grid.results(), "python -m benchmarks.evidence --summary"
    assert marked(summary.APPENDIX, "evidence") == summary.tables(rows), fix
    assert marked(summary.PAGE, "evidence") == summary.short_table(rows), fix
    assert all(path.exists() for path in figures.FIGURES)


def test_the_share_of_good_advice_in_the_docs_is_that_of_the_data() -> None:
    found = summary.by_cell(grid.results())
    assert marked(summary.PAGE, "adviser") == adviser_check.shares(found)
    assert marked(summary.APPENDIX, "adviser") == adviser_check.report(found)
    good = adviser_check.checked(Setting(4), "topr", found)
    assert (good.rank, good.regret, good.good) == (1, 0, True)
    bad = adviser_check.checked(Setting(16), "ppo", found)
    assert 3 * bad.rank > bad.of and not bad.good and bad.regret > 0.2


def test_what_advice_cost_is_compared_with_its_interval_over_the_seeds() -> None:
    # topr is 0.1, 0 and 0.2 above: mean 0.1, deviation 0.1; 4.30 * 0.1 / sqrt(3) = 0.2483. minpro is 0.1 below topr always.
    finals = {"topr": [0.6, 0.7, 0.8], "ppo": [0.5, 0.7, 0.6], "minpro": [0.5, 0.6, 0.7]}
    found = {(name, Setting(4)): {"final": values} for name, values in finals.items()}
    close = adviser_check.checked(Setting(4), "ppo", found)
    assert (close.rank, close.of, close.good) == (2, 3, False)
    assert (close.regret, close.scatter) == (pytest.approx(0.1), pytest.approx(0.2483, abs=1e-3))
    assert close.within_scatter
    assert not adviser_check.checked(Setting(4), "minpro", found).within_scatter
    assert adviser_check.checked(Setting(4), "topr", found).good


def test_no_setting_that_checks_the_adviser_was_used_for_its_rule() -> None:
    assert len(set(grid.CHECK)) == len(grid.CHECK) >= 10
    assert not set(grid.CHECK) & set(grid.SETTINGS)


def test_advice_is_looked_up_by_the_configuration_that_its_flags_set() -> None:
    advised = [
        "--policy-loss",
        "ppo",
        "--use-tis",
        "--use-rollout-kl-loss",
        "--rollout-kl-loss-coef",
        "0.1",
    ]
    arm = adviser_check.arm_of(advised)
    assert arm is not None and arm.name.startswith("ppo + vanilla_tis, use-rollout-kl-loss")
    plain = adviser_check.arm_of(["--policy-loss", "ppo", "--get-mismatch-metrics"])
    assert plain == Arm("ppo")
    assert adviser_check.arm_of(["--policy-loss", "ppo", "--use-tis", "--tis-clip", "7"]) is None


def test_every_setting_that_is_shown_has_the_arms_it_should_and_all_seeds() -> None:
    found = summary.by_cell(grid.results())
    settings = {setting for _, setting in found}
    assert {Setting(s) for s in grid.STALENESS} <= settings
    for setting in settings:
        wanted = arms() if setting in grid.FIRST else CORE
        assert all((arm.name, setting) in found for arm in wanted), setting
    assert all(len(row["final"]) == SEEDS for row in found.values())
    assert all(map(math.isfinite, (v for row in found.values() for v in row["final"])))


def test_intervals_are_of_differences_on_the_same_seed() -> None:
    # Arm a is 0.1 above the mean of both on every seed but one (0.2): differences 0.1, 0.1, 0.2; mean 0.1333,
    # deviation 0.0577; 4.30 * 0.0577 / sqrt(3) = 0.1433. The seeds themselves differ by far more.
    a, b = [0.2, 0.5, 0.9], [0.0, 0.3, 0.5]
    found = {("a", Setting()): {"final": a}, ("b", Setting()): {"final": b}}
    middle, half = summary.paired_interval(found, "a", Setting())
    assert (middle, half) == (pytest.approx(1.6 / 3), pytest.approx(0.1433, abs=1e-3))


def test_a_run_that_lost_half_of_its_gain_has_collapsed() -> None:
    # From 0.4 to 0.6 at best: below 0.5 at the end, and by 0.05 at least.
    curves = [[0.4, 0.6, 0.49], [0.4, 0.6, 0.51], [0.4, 0.42, 0.4], [0.4, 0.4, 0.3]]
    assert summary.collapsed({"rewards": curves}) == [True, False, False, True]


def test_intervals_by_hand() -> None:
    # 0.2, 0.4, 0.6: mean 0.4, deviation 0.2; 4.30 * 0.2 / sqrt(3) = 0.4965
    assert summary.interval([0.2, 0.4, 0.6]) == (
        pytest.approx(0.4),
        pytest.approx(0.4965, abs=1e-4),
    )
    assert summary.interval([0.5]) == (0.5, math.inf)


def test_a_suite_that_was_ended_goes_on_where_it_was(tmp_path: Path, short: None) -> None:
    file = tmp_path / "data.jsonl"
    missing = grid.open_runs(file)
    assert missing == list(grid.runs()) and len(missing) == len(set(missing))
    for arm, setting in missing[:2]:
        grid.record(run(arm, setting), file)
    assert grid.open_runs(file) == missing[2:]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(1, updates=4),
        Setting(0, "bfloat16"),
        Setting(0, "int8", mixture=True, route_replay=True),
        Setting(0, top_p=0.9, mask_replay=True),
    ],
    ids=summary.setting_name,
)
def test_a_run_is_the_same_every_time(setting: Setting, short: None) -> None:
    rows = [run(Arm("ppo", "m2po"), setting) for _ in range(2)]
    for row in rows:
        row.pop("processor_seconds")
    assert rows[0] == rows[1] and len(rows[0]["final"]) == SEEDS


def _trainer_against_engine(setting: Setting) -> float:
    """Largest difference of log-probs, with the same weights."""
    weights = simulation.warmed_weights(setting.mixture)
    policy = StackedAdder(SEEDS, mixture=setting.mixture)
    policy.load_state_dict(weights)
    rollout = sample(weights, setting, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(
            (simulation._log_probs(policy, rollout, setting) - rollout.log_probs).abs().max()
        )


def test_an_engine_differs_by_its_precision_routes_and_nucleus_and_by_nothing_else(
    short: None,
) -> None:
    same, coarse, nucleus = 1e-5, 1e-3, 0.02
    assert _trainer_against_engine(Setting()) < same
    assert _trainer_against_engine(Setting(mixture=True)) < same
    assert _trainer_against_engine(Setting(0, "bfloat16")) > coarse
    int8 = Setting(0, "int8", mixture=True)
    replayed = Setting(0, "int8", mixture=True, route_replay=True)
    assert _trainer_against_engine(int8) > 2 * _trainer_against_engine(replayed) > coarse
    assert _trainer_against_engine(Setting(top_p=0.9)) > nucleus
    assert _trainer_against_engine(Setting(top_p=0.9, mask_replay=True)) < same


def test_an_engine_is_as_many_rollouts_behind_as_said(short: None) -> None:
    gaps = {s: run(Arm("ppo"), Setting(s), steps=3)["kl_curve"] for s in (0, 1, 2)}
    assert max(gaps[0]) < 1e-9
    # The first rollout is always fresh; then one update lies between, and at staleness 2 a second one.
    assert gaps[1][0] < 1e-9 < 1e-6 < gaps[1][1] == gaps[2][1]
    assert gaps[2][2] > 1.5 * gaps[1][2]


def test_seeds_of_a_stack_do_not_touch_each_other() -> None:
    torch.manual_seed(0)
    policy = StackedAdder(3, mixture=True)
    seen = torch.randint(10, (3, 4, simulation.LENGTH, 3))
    policy(seen)[0][1].sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    assert all(g[1].abs().sum() > 0 and g[0].abs().sum() + g[2].abs().sum() == 0 for g in gradients)
    whole = policy(seen)[0]
    one = StackedAdder(1, mixture=True)
    one.load_state_dict({name: value[1:2] for name, value in policy.state_dict().items()})
    torch.testing.assert_close(one(seen[1:2])[0], whole[1:2])


@pytest.mark.parametrize("hook", ["m2po", "vanilla_tis"])
def test_a_threshold_over_the_batch_is_that_of_one_seed(hook: str) -> None:
    torch.manual_seed(0)
    shape = (SEEDS, 4, simulation.LENGTH)
    # One seed is far from its engine: with a common threshold it would decide about the others' tokens.
    apart = torch.tensor([2.0, 0.01, 0.01, 0.01, 0.01])[:, None, None]
    policy = -torch.rand(shape) - 1
    rollout = Rollout(
        seen=torch.zeros(*shape, 3),
        written=torch.zeros(shape),
        log_probs=policy + apart * torch.randn(shape),
        kept=torch.zeros(*shape, 10),
        routes=None,
        rewards=torch.zeros(shape[:2]),
        advantages=torch.randn(shape[:2]),
    )
    config = Arm("ppo", hook).config
    losses, kept = simulation._losses(config, rollout, policy, None)
    for seed in range(SEEDS):
        columns = (policy, policy, rollout.log_probs, rollout.advantages[:, :, None].expand(shape))
        alone = simulation._objective(config, *(c[seed : seed + 1] for c in columns))
        assert float(losses[seed]) == pytest.approx(float(alone.total.mean()), abs=1e-6)
        assert float(kept[seed]) == pytest.approx(float(alone.policy.kept.float().mean()))
    assert (kept[0] < 0.5) == (hook == "m2po") and (kept[1:] == 1).all()


def test_an_int8_engine_has_256_levels_per_row() -> None:
    weights = StackedAdder(1, mixture=False).state_dict()
    coarse = engine_weights(weights, "int8")
    assert torch.equal(coarse["head"], weights["head"])
    assert all(len(row.unique()) <= 256 for row in coarse["down"][0].t())
    assert not torch.equal(coarse["down"], weights["down"])


def test_arms_that_share_the_runs_of_ppo_have_its_gradient() -> None:
    torch.manual_seed(0)
    shape = (SEEDS, 4, simulation.LENGTH)
    policy, engine, advantages = -torch.rand(shape), -torch.rand(shape), torch.randn(shape)

    def gradient(arm: Arm, rollout: torch.Tensor) -> torch.Tensor:
        cur = policy.clone().requires_grad_()
        outputs = simulation._objective(arm.config, cur, cur.detach(), rollout, advantages)
        return torch.autograd.grad(outputs.total.sum(), cur)[0]

    for setting, rollout in ((Setting(4), engine), (Setting(), policy)):
        expected = gradient(Arm("ppo"), rollout)
        equal = [arm for arm in arms() if equals_ppo(arm, setting)]
        others = len(arms()) - 1 - len(NEVER_PPO)
        assert len(equal) == (len(EQUAL_TO_PPO) if setting.staleness else others)
        for arm in equal:
            found = gradient(arm, rollout)
            torch.testing.assert_close(found, expected, msg=f"{arm.name}: {found - expected}")
    assert not torch.allclose(
        gradient(Arm("ppo", "vanilla_tis"), engine), gradient(Arm("ppo"), engine)
    )
    clipped = Arm("ppo", None, (("use_rollout_logprobs", True),))
    assert clipped in arms()
    assert not torch.allclose(gradient(clipped, engine), gradient(Arm("ppo"), engine))
    assert not equals_ppo(Arm("cispo"), Setting(updates=4))
