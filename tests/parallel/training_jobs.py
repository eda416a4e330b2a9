"""One global batch, ways to train on it, and what must come out the same: shared by the train step's tests.

A `Case` says what is trained and how the batch is cut. `train_cases` runs several of them, one after the other,
in the same ranks. `differences` compares an outcome with that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer, StepResult
from tests.parallel import step_mutations, tiny_models

#: Uneven on purpose: lengths, masks, one sample that is fully masked, one with a response of a single token.
PROMPTS = (3, 5, 2, 7, 4, 1, 6, 3, 2)
RESPONSES = (6, 1, 9, 4, 12, 7, 2, 5, 8)

#: Adam divides a gradient by its own size, so that where a gradient is nearly 0 the float noise of another order of
#: summation becomes a full step. A large epsilon keeps the update smooth in the gradient: lr * g / (|g| + 0.1).
SMOOTH_ADAM = {"lr": 0.05, "adam_eps": 0.1}

#: Facts about the cut itself, which of course depend on it.
ABOUT_THE_CUT = ("num_microbatches", "padding_microbatch_share")

_TWO_ROUNDINGS = 2 * torch.finfo(torch.float32).eps

RunRanks = Callable[..., list[Any]]


def further(*names: str) -> list[Any]:
    """More parameters for a claim that others already show by default; these run with `-m slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


_in_one_process: dict[str, Outcome] = {}
"""What one process gave, by case: many tests compare with the same."""


@dataclass(frozen=True)
class Case:
    """What is trained, on which samples, cut how.

    settings: of `TrainerConfig`, without parallel sizes
    samples: how many of the global batch's samples
    masked_garbage: put NaN, -inf and 1e30 where the loss mask is 0
    mask_sums: divide every sample by a token count of its rollout, larger than its own
    sampling_mask: most tokens were sampled from a part of the vocabulary
    mutation: name of a deliberate fault (see `step_mutations`)
    """

    family: str = "qwen3"
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 9
    layout: str = "packed"
    steps: int = 2
    masked_garbage: bool = False
    mask_sums: bool = False
    sampling_mask: bool = False
    mutation: str | None = None

    def cut(self, **settings: Any) -> Case:
        """The same problem with other settings on top."""
        return replace(self, settings={**self.settings, **settings})

    def uncut(self) -> Case:
        """The same problem for one process: all samples in one microbatch and nothing else switched on."""
        cutting = (
            *("max_tokens_per_gpu", "micro_batch_size", "use_distributed_optimizer"),
            *("overlap_grad_reduce", "overlap_param_gather"),
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            *("recompute_granularity", "recompute_method", "recompute_num_layers"),
            *("recompute_modules", "variable_seq_lengths"),
            *("sequence_parallel", "inplace_logits_grad", "fused_lm_head"),
        )
        problem = {name: value for name, value in self.settings.items() if name not in cutting}
        problem |= {"micro_batch_size": 64, "fused_lm_head": "off", "inplace_logits_grad": False}
        return replace(self, settings=problem, layout="packed", masked_garbage=False, mutation=None)


@dataclass(frozen=True)
class Layout:
    """A number of ranks and their parallel sizes, in Megatron's names."""

    ranks: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a rank saw. log_probs: before the first update; weights: after the last, on rank 0 only."""

    log_probs: list[Tensor]
    steps: list[StepResult]
    weights: dict[str, Tensor] | None


def uneven_batch(
    samples: int = 9, *, seed: int = 0, vocab: int = tiny_models.VOCAB_SIZE
) -> RolloutBatch:
    """A global batch with every optional per-token field except routes; log-probs are of no model."""
    generator = torch.Generator().manual_seed(seed)

    def values(count: int, low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    prompts, responses = PROMPTS[:samples], RESPONSES[:samples]
    masks = [(torch.rand(n, generator=generator) > 0.2).long() for n in responses]
    masks[1][:] = 0
    masks[0][0] = 1
    columns: dict[str, list[Any]] = {
        "unconcat_tokens": [
            torch.randint(0, vocab, (p + r,), generator=generator)
            for p, r in zip(prompts, responses, strict=True)
        ],
        "total_lengths": [p + r for p, r in zip(prompts, responses, strict=True)],
        "response_lengths": list(responses),
        "loss_masks": masks,
        "advantages": [values(r, -1.5, 1.5) for r in responses],
        # Every other response was interrupted: its later tokens come from newer weights.
        "weight_versions": [
            i % 3 - 2 if i % 2 else torch.arange(r) * 3 // r - 2 for i, r in enumerate(responses)
        ],
    }
    for name in ("rollout_log_probs", "ref_log_probs", "teacher_log_probs"):
        columns[name] = [values(r, -6.0, -2.5) for r in responses]
    batch = RolloutBatch(columns)
    batch.check()
    return batch


def near_policy(log_probs: Sequence[Tensor], *, spread: float, seed: int) -> list[Tensor]:
    """Log-probs of a policy near another one, so that ratios stay around 1 and bands cut some tokens off."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (values + spread * torch.randn(values.shape, generator=generator)).clamp(max=-1e-4)
        for values in log_probs
    ]


@cache
def weights_of(family: str) -> dict[str, Tensor]:
    """The weights that every layout starts from."""
    return tiny_models.hf_state_dict(tiny_models.FAMILIES[family]())


@cache
def global_batch(family: str) -> RolloutBatch:
    """`uneven_batch` with four policies near the model of that family, as transformers evaluates it."""
    batch = uneven_batch()
    model = tiny_models.hf_model(tiny_models.FAMILIES[family]())
    columns = batch.columns
    log_probs = [
        tiny_models.hf_log_probs(model, ids[None])[0, -response:]
        for ids, response in zip(
            columns["unconcat_tokens"], columns["response_lengths"], strict=True
        )
    ]
    for seed, (name, spread) in enumerate(
        {
            "log_probs": 0.15,
            "rollout_log_probs": 0.4,
            "ref_log_probs": 0.5,
            "teacher_log_probs": 0.5,
        }.items()
    ):
        batch = batch.with_column(name, near_policy(log_probs, spread=spread, seed=seed))
    batch.check()
    return batch


def with_kept_ids(batch: RolloutBatch, *, seed: int = 11) -> RolloutBatch:
    """The batch with kept ids: a few, many, or (every fifth token) the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    ids, counts = [], []
    for tokens, response in zip(
        batch.columns["unconcat_tokens"], batch.columns["response_lengths"].tolist(), strict=True
    ):
        keep = torch.rand(response, tiny_models.VOCAB_SIZE, generator=generator)
        keep = keep < torch.tensor([0.1, 0.6, 0.9])[torch.arange(response) % 3, None]
        keep[torch.arange(response), tokens[-response:]] = True
        keep[4::5] = False
        ids.append(keep.nonzero()[:, 1].int())
        counts.append(keep.sum(1).int())
    batch = batch.with_column("rollout_kept_ids", ids).with_column("rollout_kept_counts", counts)
    batch.check()
    return batch


def with_garbage(batch: RolloutBatch) -> RolloutBatch:
    """The batch with NaN, -inf and 1e30 wherever the loss mask is 0."""
    garbage = torch.tensor([math.nan, -math.inf, 1e30])
    for name in (
        "advantages",
        "log_probs",
        "rollout_log_probs",
        "ref_log_probs",
        "teacher_log_probs",
    ):
        spoiled = [
            torch.where(mask != 0, values, garbage[torch.arange(len(values)) % 3])
            for values, mask in zip(batch.columns[name], batch.columns["loss_masks"], strict=True)
        ]
        batch = batch.with_column(name, spoiled)
    return batch


@dataclass(frozen=True)
class Start:
    """Weights and batch that every layout starts from. Made in the test's process: transformers saves on rank 0 only."""

    family: str
    weights: dict[str, Tensor]
    batch: RolloutBatch

    @classmethod
    def of(cls, family: str) -> Start:
        """The start of a model family."""
        return cls(family, weights_of(family), global_batch(family))

    def batch_of(self, case: Case) -> RolloutBatch:
        """The global batch of a case."""
        batch = self.batch.select(range(case.samples))
        if case.mask_sums:
            batch = batch.with_column("rollout_mask_sums", [30.0 + i for i in range(len(batch))])
        if case.sampling_mask:
            batch = with_kept_ids(batch)
        return with_garbage(batch) if case.masked_garbage else batch


def new_trainer(
    groups: ParallelGroups, start: Start, settings: Mapping[str, Any], layout: str = "packed"
) -> MegatronTrainer:
    """A trainer of this rank with the weights that every layout starts from."""
    sizes = {
        "tensor_model_parallel_size": groups.tp_size,
        "pipeline_model_parallel_size": groups.pp_size,
        "virtual_pipeline_model_parallel_size": groups.vpp_size,
        "context_parallel_size": groups.cp_size,
        "expert_model_parallel_size": groups.ep_size,
    }
    config = TrainerConfig(**{**SMOOTH_ADAM, **sizes, **settings})
    hf_config = tiny_models.FAMILIES[start.family]()
    trainer = MegatronTrainer(config, hf_config, groups, layout=layout)  # type: ignore[arg-type]
    trainer.load_hf_weights(start.weights)
    return trainer


def exported(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Copies of all weights; a collective."""
    return {name: value.detach().clone().cpu() for name, value in trainer.export_hf_weights()}


def train_cases(
    groups: ParallelGroups, cases: Mapping[str, Case], starts: Mapping[str, Start]
) -> dict[str, Outcome]:
    """Trains every case in turn on these ranks: a log-prob pass, then updates on the same batch."""
    return {name: _train(groups, case, starts[case.family]) for name, case in cases.items()}


def _train(groups: ParallelGroups, case: Case, start: Start) -> Outcome:
    with step_mutations.applied(case.mutation):
        trainer = new_trainer(groups, start, case.settings, case.layout)
        batch = start.batch_of(case)
        log_probs = trainer.compute_log_probs(batch)
        steps = [trainer.train_step(batch) for _ in range(case.steps)]
        weights = exported(trainer)
    return Outcome(log_probs, steps, weights if groups.rank == 0 else None)


def run_cases(run_ranks: RunRanks, layout: Layout, cases: Mapping[str, Case]) -> dict[str, Outcome]:
    """`train_cases` on a layout; every rank must have seen the same, so one outcome per case is returned."""
    if layout == Layout():
        unknown = {repr(case): case for case in cases.values() if repr(case) not in _in_one_process}
        if unknown:
            _in_one_process.update(_run_on_ranks(run_ranks, layout, unknown))
        return {name: _in_one_process[repr(case)] for name, case in cases.items()}
    return _run_on_ranks(run_ranks, layout, cases)


def _run_on_ranks(
    run_ranks: RunRanks, layout: Layout, cases: Mapping[str, Case]
) -> dict[str, Outcome]:
    starts = {case.family: Start.of(case.family) for case in cases.values()}
    by_rank = run_ranks(train_cases, layout.ranks, dict(cases), starts, **layout.sizes)
    for outcomes in by_rank[1:]:
        for name, outcome in outcomes.items():
            first = by_rank[0][name]
            assert outcome.steps == first.steps, f"{name}: ranks report different steps"
            assert all(map(torch.equal, outcome.log_probs, first.log_probs))
    return by_rank[0]


def differences(
    outcome: Outcome, expected: Outcome, family: str, *, tolerance: float = 1e-5
) -> list[str]:
    """Where an outcome is not the expected one: log-probs, every metric, weights and their updates."""
    found = []
    for i, (mine, theirs) in enumerate(zip(outcome.log_probs, expected.log_probs, strict=True)):
        if _relative(mine, theirs) > tolerance:
            found.append(f"log-probs of sample {i} by {_relative(mine, theirs):.1e}")
    for number, (mine, theirs) in enumerate(zip(outcome.steps, expected.steps, strict=True)):
        found += [f"step {number}: {text}" for text in metric_differences(mine, theirs, tolerance)]
    assert outcome.weights is not None and expected.weights is not None
    start = weights_of(family)
    for name, theirs in expected.weights.items():
        off = float((outcome.weights[name] - theirs).abs().max())
        largest, update = float(theirs.abs().max()), float((theirs - start[name]).abs().max())
        # The update is compared, not only the weight that it is a small part of; two roundings of the weight remain.
        if off > tolerance * update + _TWO_ROUNDINGS * largest:
            found.append(f"{name} by {off / largest:.1e}, its update by {off / update:.1e}")
    return found


def metric_differences(mine: StepResult, theirs: StepResult, tolerance: float) -> list[str]:
    """Names and values of the metrics in which two steps differ."""
    if mine.updated != theirs.updated:
        return [f"updated is {mine.updated}, expected {theirs.updated}"]
    mine_of, theirs_of = mine.metrics, theirs.metrics
    if mine_of.keys() != theirs_of.keys():
        return [f"metric names differ: {sorted(mine_of.keys() ^ theirs_of.keys())}"]
    found = []
    for name, value in theirs_of.items():
        # A chi^2 is the mean of r^2 less 1: what is rounded is that mean.
        less = 1.0 if name.endswith("chi2") else 0.0
        a, b = mine_of[name] + less, value + less
        if name not in ABOUT_THE_CUT and not math.isclose(
            a, b, rel_tol=tolerance, abs_tol=tolerance / 10
        ):
            found.append(f"{name} is {mine_of[name]!r}, expected {value!r}")
    return found


def _relative(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value."""
    if not mine.numel():
        return 0.0
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
