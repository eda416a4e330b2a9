"""The step does not depend on how it was cut: every layout gives loss, metrics, gradient norm and weights of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from tests.parallel.training_jobs import (
    Case,
    Layout,
    Outcome,
    RunRanks,
    differences,
    further,
    run_cases,
)

#: Every term of the loss at once, a mean of sample means, a correction that weights.
PER_SAMPLE = {
    "policy_loss": "ppo",
    "use_tis": True,
    "tis_clip": 1.3,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "use_rollout_kl_loss": True,
    "rollout_kl_loss_coef": 0.2,
    "entropy_coef": 0.05,
}
#: One global token denominator, a band that drops about a third of the tokens.
PER_TOKEN = {
    "policy_loss": "icepop",
    "icepop_ratio_low": 0.7,
    "icepop_ratio_high": 1.4,
    "entropy_coef": 0.05,
    "rollout_temperature": 0.8,
}
#: The two ways of dividing by what a correction keeps.
KEPT_PER_SAMPLE = {
    "policy_loss": "ppo",
    "use_tis": True,
    "custom_tis_function_path": "plugin.ppo_utils.vanilla_tis_function,plugin.ppo_utils.rejection_function",
    "rejection_rules": "token_ratio=0.6:1.6,mean_k1=-0.35:0.35",
    "loss_denominator": "kept",
}
KEPT_PER_TOKEN = {
    "policy_loss": "icepop",
    "icepop_ratio_low": 0.7,
    "icepop_ratio_high": 1.4,
    "loss_denominator": "kept",
}

#: The longest sample has 16 tokens.
SMALL_BUDGET = {"max_tokens_per_gpu": 20}
LARGE_BUDGET = {"max_tokens_per_gpu": 1000}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ONE_PROCESS = Layout()
DATA_PARALLEL = Layout(2)


@pytest.fixture(scope="module")
def one_process() -> dict[str, Outcome]:
    """Outcomes of one process by problem, filled as tests ask for them."""
    return {}


def check_equal(
    run_ranks: RunRanks, known: dict[str, Outcome], layout: Layout, cases: Mapping[str, Case]
) -> dict[str, Outcome]:
    """Trains the cases on `layout` and, as far as not yet known, in one process; asserts that nothing differs."""
    wanted = {repr(case.uncut()): case.uncut() for case in cases.values()}
    unknown = {key: case for key, case in wanted.items() if key not in known}
    if unknown:
        known |= run_cases(run_ranks, ONE_PROCESS, unknown)
    outcomes = run_cases(run_ranks, layout, cases)
    for name, case in cases.items():
        expected = known[repr(case.uncut())]
        assert all(step.updated for step in expected.steps)
        found = differences(outcomes[name], expected, case.family)
        assert not found, f"{name}: {len(found)} differences: {found[:8]}"
    return outcomes


def padding_shares(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    return {
        name: outcome.steps[0].metrics["padding_microbatch_share"]
        for name, outcome in outcomes.items()
    }


def dense_cases() -> dict[str, Case]:
    """Both normalizations and both denominators, small and large budgets and fixed sizes."""
    return {
        "per sample, small budget": Case(settings={**PER_SAMPLE, **SMALL_BUDGET}),
        "per sample, fixed size": Case(settings={**PER_SAMPLE, "micro_batch_size": 2}),
        "per token, small budget": Case(settings={**PER_TOKEN, **SMALL_BUDGET}),
        "per token, large budget": Case(settings={**PER_TOKEN, **LARGE_BUDGET}),
        "kept per sample": Case(settings={**KEPT_PER_SAMPLE, **SMALL_BUDGET}),
        "kept per token": Case(settings={**KEPT_PER_TOKEN, "micro_batch_size": 4}),
        "per rollout": Case(settings={**PER_SAMPLE, **SMALL_BUDGET}, samples=4, mask_sums=True),
    }


def moe_cases(**settings: object) -> dict[str, Case]:
    return {
        "per sample, small budget": Case(
            "qwen3_moe", settings={**PER_SAMPLE, **SMALL_BUDGET, **settings}
        ),
        "per token, fixed size": Case(
            "qwen3_moe", settings={**PER_TOKEN, "micro_batch_size": 2, **settings}
        ),
        "per token, large budget, recompute": Case(
            "qwen3_moe", settings={**PER_TOKEN, **LARGE_BUDGET, **RECOMPUTE, **settings}
        ),
    }


def tensor_parallel(**sizes: int) -> Layout:
    return Layout(2, {"tensor_model_parallel_size": 2, **sizes})


DENSE_LAYOUTS = {
    "one process": ONE_PROCESS,
    "TP2": tensor_parallel(),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "DP2": DATA_PARALLEL,
    "TP2xPP2": Layout(4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", ["one process", "DP2", "TP2xPP2", *further("TP2", "PP2")])
def test_a_dense_step_is_that_of_one_process(
    run_ranks: RunRanks, one_process: dict[str, Outcome], name: str
) -> None:
    check_equal(run_ranks, one_process, DENSE_LAYOUTS[name], dense_cases())


@pytest.mark.parametrize("name", ["TP2", *further("PP2", "DP2")])
def test_recompute_sequence_parallel_fused_heads_and_in_place_gradients_change_nothing(
    run_ranks: RunRanks, one_process: dict[str, Outcome], name: str
) -> None:
    cases = {
        "recompute per sample": Case(settings={**PER_SAMPLE, **SMALL_BUDGET, **RECOMPUTE}),
        "recompute per token": Case(settings={**PER_TOKEN, "micro_batch_size": 2, **RECOMPUTE}),
        "in place": Case(
            settings={
                **PER_SAMPLE,
                **SMALL_BUDGET,
                "inplace_logits_grad": True,
                "fused_lm_head": "off",
            }
        ),
        "fused head": Case(settings={**PER_TOKEN, "micro_batch_size": 1, "fused_lm_head": "on"}),
    }
    if name == "TP2":
        cases["sequence parallel"] = Case(
            settings={**PER_SAMPLE, **SMALL_BUDGET, "sequence_parallel": True}
        )
    check_equal(run_ranks, one_process, DENSE_LAYOUTS[name], cases)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ONE_PROCESS, id="one process", marks=pytest.mark.slow),
        pytest.param(DATA_PARALLEL, id="DP2", marks=pytest.mark.slow),
        pytest.param(Layout(2, {"expert_model_parallel_size": 2}), id="EP2"),
        pytest.param(
            Layout(2, {"pipeline_model_parallel_size": 2}), id="PP2", marks=pytest.mark.slow
        ),
    ],
)
def test_a_moe_step_is_that_of_one_process(
    run_ranks: RunRanks, one_process: dict[str, Outcome], layout: Layout
) -> None:
    check_equal(run_ranks, one_process, layout, moe_cases())


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(tensor_parallel(), id="TP2 experts split"),
        pytest.param(
            tensor_parallel(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
            id="TP2 EP2",
            marks=pytest.mark.slow,  # test_cpu_runtime.py has this layout too
        ),
        pytest.param(
            Layout(
                4,
                {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 2,
                    "expert_model_parallel_size": 2,
                    "expert_tensor_parallel_size": 1,
                },
            ),
            id="TP2xPP2 EP2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_moe_step_with_tensor_and_sequence_parallelism_is_that_of_one_process(
    run_ranks: RunRanks, one_process: dict[str, Outcome], layout: Layout
) -> None:
    check_equal(run_ranks, one_process, layout, moe_cases(sequence_parallel=True))


def test_the_distributed_optimizer_gives_the_same_weights(
    run_ranks: RunRanks, one_process: dict[str, Outcome]
) -> None:
    sharded = {"use_distributed_optimizer": True}
    cases = {
        "per sample": Case(settings={**PER_SAMPLE, **SMALL_BUDGET, **sharded}),
        "per token": Case(settings={**PER_TOKEN, **SMALL_BUDGET, **sharded}),
        "moe": Case("qwen3_moe", settings={**PER_TOKEN, **SMALL_BUDGET, **sharded}),
    }
    check_equal(run_ranks, one_process, DATA_PARALLEL, cases)
    experts = Layout(2, {"expert_model_parallel_size": 2})
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    moe = {"moe": cases["moe"], "overlapped": cases["moe"].cut(**overlapped)}
    check_equal(run_ranks, one_process, experts, moe)


def test_overlapped_communication_gives_the_same_weights(
    run_ranks: RunRanks, one_process: dict[str, Outcome]
) -> None:
    # Three steps: reductions start inside the backward pass from the second on, and weights are read between steps.
    overlapped = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    gathered = {**overlapped, "overlap_param_gather": True}
    cases = {
        "reduce": Case(settings={**PER_SAMPLE, **SMALL_BUDGET, **overlapped}, steps=3),
        "gather": Case(settings={**PER_TOKEN, **SMALL_BUDGET, **gathered}, steps=3),
        "one sample": Case(settings={**PER_SAMPLE, **gathered}, samples=1, steps=3),
    }
    check_equal(run_ranks, one_process, DATA_PARALLEL, cases)


def test_ranks_with_uneven_counts_fill_up_with_padding_and_agree(
    run_ranks: RunRanks, one_process: dict[str, Outcome]
) -> None:
    # 9 samples one by one over 2 ranks: 5 + 4, so 1 of 10 microbatches is padding. With one sample, the other rank
    # has nothing but padding. The planner spreads 9 samples in microbatches of up to 2 over 6, and needs none.
    cases = {
        "one by one": Case(settings={**PER_SAMPLE, "micro_batch_size": 1}),
        "two by two": Case(settings={**PER_TOKEN, "micro_batch_size": 2}),
        "one sample": Case(settings=PER_SAMPLE, samples=1),
        "one sample, kept": Case(settings={**KEPT_PER_TOKEN, **LARGE_BUDGET}, samples=1),
        "moe": Case("qwen3_moe", settings={**PER_SAMPLE, "micro_batch_size": 1}),
    }
    outcomes = check_equal(run_ranks, one_process, DATA_PARALLEL, cases)
    expected = {"one by one": 0.1, "two by two": 0.0, "one sample": 0.5, "moe": 0.1}
    assert padding_shares(outcomes) == pytest.approx({**expected, "one sample, kept": 0.5})
    experts = Layout(2, {"expert_model_parallel_size": 2})
    check_equal(run_ranks, one_process, experts, {"moe": cases["moe"]})


@pytest.mark.parametrize("name", ["TP2", *further("one process", "PP2", "DP2")])
def test_packed_and_padded_rows_give_the_same(
    run_ranks: RunRanks, one_process: dict[str, Outcome], name: str
) -> None:
    cases = {
        "dense": Case(settings={**PER_SAMPLE, "micro_batch_size": 3}, layout="padded"),
        "moe": Case("qwen3_moe", settings={**PER_TOKEN, **SMALL_BUDGET}, layout="padded"),
    }
    if name == "TP2":
        del cases["moe"]
        cases["sequence parallel"] = Case(
            "qwen3_moe",
            settings={**PER_TOKEN, **SMALL_BUDGET, "sequence_parallel": True},
            layout="padded",
        )
    check_equal(run_ranks, one_process, DENSE_LAYOUTS[name], cases)


@pytest.mark.parametrize("name", ["TP2", *further("PP2", "DP2")])
def test_garbage_under_the_mask_changes_not_one_bit(run_ranks: RunRanks, name: str) -> None:
    problems = {"per sample": PER_SAMPLE, "per token": PER_TOKEN, "kept": KEPT_PER_SAMPLE}
    cases = {}
    for problem, settings in problems.items():
        clean = Case(settings={**settings, **SMALL_BUDGET})
        cases[problem] = clean
        cases[f"{problem}, garbage"] = Case(settings=clean.settings, masked_garbage=True)
    outcomes = run_cases(run_ranks, DENSE_LAYOUTS[name], cases)
    for problem in problems:
        clean_outcome, spoiled = outcomes[problem], outcomes[f"{problem}, garbage"]
        assert spoiled.steps == clean_outcome.steps
        assert spoiled.weights is not None and clean_outcome.weights is not None
        for key, value in clean_outcome.weights.items():
            assert torch.equal(spoiled.weights[key], value), key


SAMPLING_MASK_LAYOUTS = {
    "TP2": tensor_parallel(),
    "CP2": Layout(2, {"context_parallel_size": 2}),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "DP2": DATA_PARALLEL,
}


@pytest.mark.parametrize("name", ["TP2", "CP2", *further("PP2", "DP2")])
def test_steps_over_kept_ids_are_those_of_one_process(
    run_ranks: RunRanks, one_process: dict[str, Outcome], name: str
) -> None:
    # One by one over two data parallel ranks is uneven: padding microbatches keep the whole vocabulary.
    cases = {
        "logits": Case(settings={**PER_SAMPLE, **SMALL_BUDGET, "fused_lm_head": "off"}),
        "fused head": Case(settings={**PER_SAMPLE, "micro_batch_size": 1, "fused_lm_head": "on"}),
        "separable": Case(settings={**PER_TOKEN, **LARGE_BUDGET}),
        "entropy of kept": Case(settings={**PER_TOKEN, **SMALL_BUDGET, "entropy_of": "kept"}),
    }
    if name != "CP2":
        cases["padded"] = Case(settings={**PER_SAMPLE, "micro_batch_size": 3}, layout="padded")
    masked = {key: replace(case, sampling_mask=True) for key, case in cases.items()}
    outcomes = check_equal(run_ranks, one_process, SAMPLING_MASK_LAYOUTS[name], masked)
    plain = run_cases(run_ranks, ONE_PROCESS, {"plain": cases["logits"].uncut()})["plain"]
    assert outcomes["logits"].steps[0].metrics["loss"] != pytest.approx(
        plain.steps[0].metrics["loss"], rel=0.01
    )


@pytest.mark.slow
def test_moe_steps_over_kept_ids_with_expert_parallelism_are_those_of_one_process(
    run_ranks: RunRanks, one_process: dict[str, Outcome]
) -> None:
    cases = {name: replace(case, sampling_mask=True) for name, case in moe_cases().items()}
    experts = Layout(2, {"expert_model_parallel_size": 2})
    check_equal(run_ranks, one_process, experts, cases)


MUTATIONS = {
    "no num_microbatches": PER_SAMPLE,
    "no dp_cp_size": PER_SAMPLE,
    "no total_weight": PER_SAMPLE,
    "no token count": PER_TOKEN,
    "unmasked padding": PER_SAMPLE,
}


def test_a_missing_factor_of_the_loss_scale_would_be_noticed(
    run_ranks: RunRanks, one_process: dict[str, Outcome]
) -> None:
    cases = {
        name: Case(settings={**settings, "micro_batch_size": 1}, mutation=name)
        for name, settings in MUTATIONS.items()
    }
    sound = {name: Case(settings=case.settings) for name, case in cases.items()}
    check_equal(run_ranks, one_process, DATA_PARALLEL, sound)
    outcomes = run_cases(run_ranks, DATA_PARALLEL, cases)
    for name, case in cases.items():
        assert differences(outcomes[name], one_process[repr(case.uncut())], case.family), name
