"""Detectors: each planted fault is found, and only that one. Real models are in benchmarks/detector_confusion.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.batch_types import FIELDS
from plugin.cli import main
from plugin.config import JobConfig
from plugin.errors import HookLoadError
from plugin.observe.detectors import DETECTORS, Detector, MismatchDetectors, load_detectors
from plugin.observe.findings import Finding, Step
from plugin.observe.log_prob_dump import LogProbDump
from plugin.observe.routing_agreement import routing_finding

MISMATCH_PAGE = Path(__file__).parents[3] / "docs" / "mismatch.md"
VOCABULARY, SAMPLES, LENGTH = 40, 128, 64


class Language:
    """A table of logits per previous token: a policy that can be sampled and evaluated exactly."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = 2.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)

    def perturbed(self, size: float) -> Language:
        other = Language()
        noise = torch.randn(self.logits.shape, generator=torch.Generator().manual_seed(9))
        other.logits = self.logits + size * noise
        return other

    def scores(self, previous: Tensor, temperature: float, top_p: float) -> Tensor:
        scores = self.logits[previous] / temperature
        ordered, order = scores.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        drop = probabilities.cumsum(-1) - probabilities > top_p
        return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)


def rollout(
    engine: Language,
    trainer: Language,
    *,
    seed: int = 0,
    noise: float = 0.01,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> dict[str, list[Any]]:
    """Columns of a step sampled from `engine`, with rounding noise, and judged by `trainer`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (SAMPLES, 1), generator=generator)
    engine_log_probs, trainer_log_probs = [], []
    for _ in range(LENGTH):
        log_probs = engine.scores(tokens[:, -1], temperature, top_p).log_softmax(-1)
        chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
        engine_log_probs.append(log_probs.gather(1, chosen)[:, 0])
        trainer_log_probs.append(
            trainer.logits[tokens[:, -1]].log_softmax(-1).gather(1, chosen)[:, 0]
        )
        tokens = torch.cat((tokens, chosen), 1)
    mine = torch.stack(engine_log_probs, 1)
    theirs = torch.stack(trainer_log_probs, 1)
    rounding = noise * theirs.abs() * torch.randn(theirs.shape, generator=generator)
    return {
        "unconcat_tokens": list(tokens),
        "total_lengths": [LENGTH + 1] * SAMPLES,
        "response_lengths": [LENGTH] * SAMPLES,
        "loss_masks": [torch.ones(LENGTH, dtype=torch.int64)] * SAMPLES,
        "rollout_log_probs": list(mine),
        "log_probs": list((theirs + rounding).clamp(max=0)),
        "weight_versions": [0] * SAMPLES,
    }


def found(columns: dict[str, list[Any]], **options: Any) -> list[str]:
    return [finding.detector for finding in MismatchDetectors().check(columns, step=0, **options)]


LANGUAGE = Language()


@pytest.mark.parametrize("seed", range(20))
def test_clean_rollouts_raise_no_alarm(seed: int) -> None:
    assert found(rollout(LANGUAGE, LANGUAGE, seed=seed), trainer_version=0) == []


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shift_by_one_token_is_found(shift: int) -> None:
    columns = rollout(LANGUAGE, LANGUAGE)
    columns["rollout_log_probs"] = [value.roll(shift) for value in columns["rollout_log_probs"]]
    assert found(columns) == ["one_token_shift"]


def test_zero_filled_and_constant_samples_are_found() -> None:
    columns = rollout(LANGUAGE, LANGUAGE)
    columns["rollout_log_probs"][3] = torch.zeros(LENGTH)
    assert found(columns) == ["zero_filled"]
    columns["rollout_log_probs"][3] = torch.full((LENGTH,), -1.5)
    assert found(columns) == ["zero_filled"]


def test_zeros_on_masked_tokens_are_no_fault() -> None:
    columns = rollout(LANGUAGE, LANGUAGE)
    mask = torch.ones(LENGTH, dtype=torch.int64)
    mask[10:30] = 0
    columns["loss_masks"] = [mask] * SAMPLES
    columns["rollout_log_probs"] = [value * mask for value in columns["rollout_log_probs"]]
    assert found(columns) == []


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_another_temperature_is_found(temperature: float) -> None:
    assert found(rollout(LANGUAGE, LANGUAGE, temperature=temperature)) == ["temperature"]


def test_truncated_log_probs_are_found() -> None:
    assert found(rollout(LANGUAGE, LANGUAGE, top_p=0.9)) == ["truncation"]


def test_weights_that_differ_are_told_from_rounding_noise() -> None:
    assert found(rollout(LANGUAGE.perturbed(0.03), LANGUAGE)) == ["different_weights"]
    assert found(rollout(LANGUAGE, LANGUAGE, noise=0.03)) == []


def cut(columns: dict[str, list[Any]], samples: int) -> dict[str, list[Any]]:
    return {name: values[:samples] for name, values in columns.items()}


@pytest.mark.parametrize("samples", [1, 128])
def test_an_engine_with_another_model_is_found_on_few_tokens_and_explains_the_rest(
    samples: int,
) -> None:
    columns = cut(rollout(Language(seed=5), LANGUAGE), samples)
    # A running job has resolved --rollout-dtype auto.
    config = JobConfig(rollout_dtype="float32")
    [finding] = MismatchDetectors(config=config).check(columns, step=0, trainer_version=0)
    assert finding.detector == "another_model" and finding.unmistakable
    assert finding.severity == "error" and finding.numbers["k3"] > 0.5
    assert "doctor --bisect --embedded-model qwen3 --rollout-dtype float32" in finding.what_to_try


def test_its_table_row_runs_on_32_tokens_and_not_on_fewer() -> None:
    columns = rollout(Language(seed=5), LANGUAGE)
    short = {n: [v[0][:LENGTH] if isinstance(v[0], Tensor) else v[0]] for n, v in columns.items()}
    for length, expected in ((32, ["another_model"]), (31, [])):
        mask = torch.zeros(LENGTH, dtype=torch.int64)
        mask[:length] = 1
        assert (
            found(
                {**short, "unconcat_tokens": columns["unconcat_tokens"][:1], "loss_masks": [mask]}
            )
            == expected
        )


def test_old_weights_are_never_called_another_model() -> None:
    columns = rollout(Language(seed=5), LANGUAGE)
    assert "another_model" not in found(columns, trainer_version=1)


def test_one_outlier_is_no_other_model() -> None:
    # 8,192 tokens of which one has a ratio of e^12: k3 is 163,000 / 8,192 = 20, mean |d| 0.01
    columns = rollout(LANGUAGE, LANGUAGE, noise=0.001)
    columns["rollout_log_probs"][0][3] = columns["log_probs"][0][3] - 12
    assert "another_model" not in found(columns)


def test_a_more_specific_cause_is_named_instead() -> None:
    columns = rollout(LANGUAGE, LANGUAGE)
    zeros = {**columns, "rollout_log_probs": [v * 0 for v in columns["rollout_log_probs"]]}
    assert found(zeros) == ["zero_filled"]
    shifted = [v.roll(1) for v in columns["rollout_log_probs"]]
    assert found({**columns, "rollout_log_probs": shifted}) == ["one_token_shift"]


def test_heavy_truncation_is_no_other_model_where_sampling_may_be_truncated() -> None:
    # a policy of 40 equally likely tokens, of which the engine keeps 8: d = ln(8/40) = -1.6
    flat = Language()
    flat.logits = flat.logits * 1e-3
    columns = rollout(flat, flat, top_p=0.19)
    truncating = JobConfig(
        rollout_top_p=0.19, use_rollout_sampling_mask="off", allow_biased_correction=True
    )
    for config, names in ((None, []), (truncating, []), (JobConfig(), ["another_model"])):
        checked = MismatchDetectors(config=config).check(columns, step=0, trainer_version=0)
        assert [f.detector for f in checked if f.unmistakable] == names


def test_small_steps_are_pooled_before_weights_are_judged() -> None:
    detectors = MismatchDetectors()
    columns = rollout(LANGUAGE.perturbed(0.03), LANGUAGE)
    # 32 of the 128 samples: 2,048 of the 8,192 tokens that are needed
    parts = [{n: v[i : i + 32] for n, v in columns.items()} for i in range(0, SAMPLES, 32)]
    said = [[f.detector for f in detectors.check(part, step=0)] for part in parts]
    assert said == [[], [], [], ["different_weights"]]


def test_old_weights_are_called_stale_when_the_versions_say_so() -> None:
    columns = rollout(LANGUAGE.perturbed(0.3), LANGUAGE)
    assert found(columns, trainer_version=8) == ["staleness"]
    assert found(columns, trainer_version=0) == ["different_weights"]


def test_staleness_beyond_the_allowed_is_said_even_without_mismatch() -> None:
    detectors = MismatchDetectors(max_staleness=2)
    columns = rollout(LANGUAGE, LANGUAGE)
    [finding] = detectors.check(columns, step=0, trainer_version=3)
    assert finding.detector == "staleness" and "3.0 weight versions" in finding.evidence


def test_weights_that_never_change_are_found_after_four_steps() -> None:
    detectors = MismatchDetectors()
    said = [
        [
            f.detector
            for f in detectors.check(rollout(LANGUAGE, LANGUAGE), step=i, trainer_version=i)
        ]
        for i in range(5)
    ]
    assert said[:3] == [[], [], []]
    assert "frozen_weights" in said[3] and "frozen_weights" in said[4]


def test_a_growing_mismatch_is_found_and_a_steady_one_is_not() -> None:
    growing, steady = MismatchDetectors(), MismatchDetectors()
    for i in range(16):
        columns = rollout(LANGUAGE, LANGUAGE, seed=i, noise=0.02 + 0.01 * i)
        last = [finding.detector for finding in growing.check(columns, step=i)]
        columns = rollout(LANGUAGE, LANGUAGE, seed=i, noise=0.05)
        assert steady.check(columns, step=i) == []
    assert last == ["growing_mismatch"]


def doc_example() -> str:
    (code,) = re.findall(r"```python\n(from plugin.observe.+?)```", MISMATCH_PAGE.read_text(), re.S)
    return code


def test_the_users_own_detector_of_the_docs_runs_after_the_built_in_ones(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(doc_example())
    columns = rollout(LANGUAGE, LANGUAGE)
    columns["rollout_log_probs"] = [values * 0 for values in columns["rollout_log_probs"]]
    detectors = MismatchDetectors(custom_path=f"{file}:long_tail")
    [built_in, own] = detectors.check(columns, step=0)
    assert (built_in.detector, own.detector) == ("zero_filled", f"{file}:long_tail")
    [_, later] = detectors.check(columns, step=1)
    assert own.evidence == later.evidence, "the worst share so far is the same share"
    assert detectors.check(rollout(LANGUAGE, LANGUAGE), step=2) == []


@pytest.mark.parametrize(
    "body, message",
    [
        ("def f(step): return None", r"cannot be called as fn\(step, memory\)"),
        ("def f(step, memory): return step.no_such_field", "failed on an example step"),
        ("def f(step, memory): return 'odd'", "returned a str; a detector returns a Finding"),
        ("def g(step, memory): return None", "has no 'f'"),
    ],
)
def test_a_detector_that_cannot_work_is_refused_when_it_is_loaded(
    tmp_path: Path, body: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(body)
    with pytest.raises(HookLoadError, match=message):
        load_detectors(f"{tmp_path}/own.py:f")


def test_a_row_of_the_table_is_all_that_a_detector_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def always(step: Step, memory: list[Any]) -> Finding:
        """Everything."""
        return Finding("always", "info", f"{len(step.tokens)} tokens", "a test", "nothing")

    added = Detector(always, needs=("rollout_log_probs",))
    monkeypatch.setattr("plugin.observe.detectors.DETECTORS", (*DETECTORS, added))
    assert found(rollout(LANGUAGE, LANGUAGE)) == ["always"]
    LogProbDump(tmp_path).write(0, rollout(LANGUAGE, LANGUAGE))
    assert main(["compare", str(tmp_path)]) == 0
    assert "info: always\n  evidence: 8192 tokens" in capsys.readouterr().out


def test_the_table_names_columns_of_a_batch_and_detectors_further_up() -> None:
    earlier: set[str] = set()
    for detector in DETECTORS:
        assert {*detector.needs} <= {*FIELDS, "train_routed_experts"}
        assert detector.looks_for and detector.name not in earlier
        earlier.add(detector.name)
        assert {*detector.unless} <= {d.name for d in DETECTORS}


def routes(seed: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(200, 4, 8, generator=generator).topk(2, -1).indices for _ in range(count)]


def test_equal_routes_are_fine_whatever_their_order() -> None:
    assert routing_finding(routes(0), [route.flip(-1) for route in routes(0)]) is None


def test_swapped_layers_are_named() -> None:
    swapped = [route[:, [0, 2, 1, 3]] for route in routes(0)]
    finding = routing_finding(routes(0), swapped)
    assert finding is not None
    assert "layer 1 with 2, 2 with 1" in finding.evidence
    assert "another order" in finding.likely_cause


def test_routes_shifted_by_a_token_are_named() -> None:
    finding = routing_finding(routes(0, 1), [routes(0, 1)[0].roll(1, 0)])
    assert finding is not None and "shifted by one token" in finding.likely_cause


def test_routes_of_other_shapes_are_named() -> None:
    finding = routing_finding(routes(0), [route[:, :3] for route in routes(0)])
    assert finding is not None and "shapes" in finding.evidence


def test_only_tokens_that_both_sides_routed_are_compared() -> None:
    engine, trainer = ([route.to(torch.int8) for route in routes(0)] for _ in range(2))
    for route in engine:
        route[:100] = -1  # no route
        route[-1] = route[-2]  # engines never read the last token that they sample
    assert routing_finding(engine, trainer) is None
    assert routing_finding(engine, trainer[:1]) is None, (
        "the trainer reports the first samples only"
    )
    nothing = [torch.full_like(route, -1) for route in engine]
    assert routing_finding(nothing, trainer) is None


def test_a_finding_is_repeated_only_now_and_then() -> None:
    detectors = MismatchDetectors(repeat_every=5)
    columns = rollout(LANGUAGE, LANGUAGE, temperature=0.7)
    said = [len(detectors.news(detectors.check(columns, step=step), step)) for step in range(7)]
    assert said == [1, 0, 0, 0, 0, 1, 0]


def test_every_finding_gives_evidence_cause_and_advice() -> None:
    [finding] = MismatchDetectors().check(rollout(LANGUAGE, LANGUAGE, top_p=0.9), step=0)
    described = finding.as_dict()
    assert all(described[name] for name in ("evidence", "likely_cause", "what_to_try", "numbers"))


def test_a_batch_without_log_probs_is_silent() -> None:
    columns = rollout(LANGUAGE, LANGUAGE)
    del columns["log_probs"]
    assert found(columns, trainer_version=0) == []
