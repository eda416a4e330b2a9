"""The workload of one optimizer step: sample lengths, microbatches, and one rank's share.

Lengths come from a file or a distribution. The batch that a planned step runs on has microbatches
as full as the job allows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plugin.batch_types import RolloutBatch, route_dtype
from plugin.config import JobConfig, TrainerConfig
from plugin.config.device_defaults import trainer_dtype
from plugin.config.flags import expect
from plugin.controller.preflight.resource_checks import WeightCounts, count_weights, least_bytes
from plugin.errors import ConfigError
from plugin.json_lines import read_settings
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.step.batch_share import BatchShare, plan_batch
from plugin.megatron_backend.step.microbatching import sample_cost
from plugin.megatron_backend.step.token_budget import token_budget, tokens_in
from plugin.ragged import Integers, Ragged
from plugin.tools.plan.estimates import Gpu
from plugin.tools.plan.meta_kernels import even_routes
from plugin.vocabulary_ids import HEAD_IDS, HEAD_LOG_PROBS, TOPK_IDS, TOPK_LOG_PROBS

_DEFAULT_SIGMA = 0.8
#: Of an optimizer step; each is placed, as the driver would.
_MOST_SAMPLES = 1_000_000
#: No sample has more tokens than this has digits for.
_NUMBER = re.compile("[0-9]{1,12}")
_FORM = "one line per sample with the tokens of prompt and response, such as: 310 1840"


@dataclass(frozen=True)
class SampleLengths:
    """prompts, responses: [N] tokens of each sample of one optimizer step."""

    prompts: Integers
    responses: Integers

    @property
    def totals(self) -> Integers:
        return self.prompts + self.responses

    @property
    def response_share(self) -> float:
        """Response tokens over all tokens."""
        return float(self.responses.sum() / self.totals.sum())


def sample_lengths(config: JobConfig, source: str | None, longest: int) -> SampleLengths:
    """The samples of one optimizer step.

    source: a file, `lognormal:MEDIAN:SIGMA` for responses, or None for one whose median is a third
        of --max-response-length
    longest: positions of the model
    """
    count = config.global_batch_size or config.responses_per_rollout
    expect(
        max(count, config.micro_batch_size) <= _MOST_SAMPLES,
        f"an optimizer step has {count:,} samples in microbatches of {config.micro_batch_size:,}, "
        f"and {_MOST_SAMPLES:,} are planned at most; lower --global-batch-size, "
        "--rollout-batch-size, --n-samples-per-prompt or --micro-batch-size",
    )
    if source is None or source.startswith("lognormal"):
        prompts, responses = _lognormal(config, source, count)
    else:
        prompts, responses = _from_file(source, count)
    prompts = np.clip(prompts, 1, max(1, longest - 1))
    responses = np.clip(responses, 1, np.maximum(1, longest - prompts))
    return SampleLengths(prompts, responses)


def _lognormal(config: JobConfig, source: str | None, count: int) -> tuple[Integers, Integers]:
    median, sigma = config.max_response_length / 3, _DEFAULT_SIGMA
    if source not in (None, "lognormal"):
        try:
            _, first, second = str(source).split(":")
            median, sigma = float(first), float(second)
        except ValueError:
            raise ConfigError(
                f"--lengths {source} is not a distribution; write lognormal:MEDIAN:SIGMA, such as "
                "lognormal:2000:0.8, or name a file"
            ) from None
        if not 1 <= median < 1e12 or not 0 <= sigma < 10:
            raise ConfigError(
                f"--lengths {source}: the median must be at least 1 token and below 1e12, sigma in "
                "[0, 10)"
            )
    generator = np.random.default_rng(config.seed)
    responses = np.minimum(
        generator.lognormal(np.log(median), sigma, count), config.max_response_length
    )
    prompts = np.full(count, max(1, config.max_prompt_length // 4))
    return prompts.astype(np.int64), responses.astype(np.int64)


def _from_file(source: str, count: int) -> tuple[Integers, Integers]:
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"--lengths {source} is no file; give {_FORM}; or lognormal:MEDIAN:SIGMA")
    try:
        lines = read_settings(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {source} is not readable ({error}); give {_FORM}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(_NUMBER.fullmatch(word) for word in words):
            raise ConfigError(
                f"--lengths {source}, line {number} is {line.strip()!r}; give {_FORM}"
            )
        rows.append([int(word) for word in words])
    if not rows:
        raise ConfigError(f"--lengths {source} is empty; give {_FORM}")
    table = np.array(rows, np.int64)[np.arange(count) % len(rows)]
    return table[:, 0], table[:, 1]


@dataclass(frozen=True)
class Batching:
    """One optimizer step of all data parallel ranks.

    microbatches: per rank, padding ones among them; padding: of the rank that has most of these
    tokens: per data parallel rank, [dp]
    balance: tokens' work of the busiest rank over the mean
    largest: [samples] total lengths of the fullest microbatch
    attention_share: causal pairs of tokens within samples, of all pairs of a row
    """

    microbatches: int
    padding: int
    padding_share: float
    oversize: int
    samples: int
    tokens: list[int]
    balance: float
    largest: list[int]
    attention_share: float


def plan_batching(config: JobConfig, hf_config: Any, lengths: SampleLengths) -> Batching:
    """Cut a step's samples as the driver would."""
    cp, pp = config.context_parallel_size, config.pipeline_model_parallel_size
    dp = config.world_size // (config.tensor_model_parallel_size * pp * cp)
    batch = RolloutBatch({"total_lengths": lengths.totals, "response_lengths": lengths.responses})
    plan = plan_batch(
        batch,
        config,
        dp_size=dp,
        cp_size=cp,
        round_size=pp if config.virtual_pipeline_model_parallel_size else 1,
        hidden_size=hf_config.hidden_size,
        longest=hf_config.max_position_embeddings,
    )
    totals = lengths.totals
    samples = [[i for cell in rank for i in cell] for rank in plan.ranks]
    work = [sum(sample_cost(int(totals[i]), hf_config.hidden_size) for i in s) for s in samples]
    largest = full_microbatch(config, lengths, hf_config.max_position_embeddings)
    return Batching(
        plan.num_microbatches,
        max(sum(not cell for cell in rank) for rank in plan.ranks),
        plan.padding_share(),
        len(plan.oversize),
        len(totals),
        [int(totals[s].sum()) for s in samples],
        max(work) / (sum(work) / len(work)),
        largest.tolist(),
        float((largest.astype(float) ** 2).sum() / largest.sum() ** 2 / 2),
    )


def whole_counts(hf_config: Any) -> WeightCounts:
    """The weights of the model that transformers would build."""
    from transformers import AutoModelForCausalLM, initialization

    with initialization.no_init_weights(), torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(hf_config).named_parameters())
    return count_weights({name: tensor.shape for name, tensor in weights.items()})


def with_token_budget(
    config: JobConfig, hf_config: Any, counts: WeightCounts, gpu: Gpu | None
) -> JobConfig:
    """The configuration with a number for `--max-tokens-per-gpu auto`, as the job would choose."""
    if config.max_tokens_per_gpu != "auto":
        return config
    on_cuda = gpu is not None
    longest = min(config.longest_sample, hf_config.max_position_embeddings)
    fitting = 1 << 20  # the memory of a CPU machine is not planned
    if gpu is not None:
        room = gpu.memory - least_bytes(counts, config, on_cuda=True).total
        on_gpu = config.unchecked_copy(train_dtype=trainer_dtype(config, cuda=True))
        fitting = tokens_in(room, hf_config, on_gpu)
    budget = token_budget(fitting, "cuda" if on_cuda else "cpu", longest)
    return config.unchecked_copy(max_tokens_per_gpu=budget)


def full_microbatch(config: JobConfig, lengths: SampleLengths, longest: int) -> Integers:
    """[samples] total lengths of the largest microbatch: the token budget, or the longest samples.

    longest: positions of the model
    """
    most = min(int(lengths.totals.max()), longest)
    if config.max_tokens_per_gpu is None:
        return np.full(config.micro_batch_size, most, np.int64)
    assert config.max_tokens_per_gpu != "auto"
    budget = config.max_tokens_per_gpu * config.context_parallel_size
    if most >= budget:
        return np.array([most], np.int64)
    samples = max(1, round(budget / float(lengths.totals.mean())), -(-budget // longest))
    expect(
        samples <= _MOST_SAMPLES,
        f"--max-tokens-per-gpu {config.max_tokens_per_gpu:,} holds {samples:,} samples, and "
        f"{_MOST_SAMPLES:,} are planned at most; lower it",
    )
    cuts = np.arange(samples + 1) * budget // samples
    return np.diff(cuts)


def full_share(
    config: TrainerConfig,
    hf_config: Any,
    microbatch: Integers,
    response_share: float,
    *,
    microbatches: int,
    padding: int = 0,
    route_layers: list[int] | None = None,
) -> BatchShare:
    """A rank's share of a step: `microbatches` alike, the last `padding` of them padding.

    microbatch: [samples] total lengths; route_layers: MoE layers of this stage, if replayed
    """
    real = microbatches - padding
    totals = np.tile(microbatch, real)
    responses = np.clip((totals * response_share).astype(np.int64), 1, np.maximum(1, totals - 1))
    tokens, answers = int(totals.sum()), int(responses.sum())
    columns: dict[str, Any] = {
        "unconcat_tokens": Ragged(torch.arange(tokens) % hf_config.vocab_size, totals),
        "total_lengths": torch.from_numpy(totals),
        "response_lengths": torch.from_numpy(responses),
        "loss_masks": Ragged(torch.ones(answers, dtype=torch.int64), responses),
        "weight_versions": Ragged(torch.zeros(answers, dtype=torch.int64), responses),
        "rewards": torch.zeros(len(totals)),
        "group_index": torch.zeros(len(totals), dtype=torch.int64),
    }
    names = ["advantages", "rollout_log_probs", "log_probs"]
    names += ["ref_log_probs"] if config.use_kl_loss else []
    names += ["teacher_log_probs"] if config.teacher_tau else []
    for name in names:
        columns[name] = Ragged(torch.full((answers,), -1.0), responses)
    for k, ids_name, log_probs_name in (
        (config.distill_topk, TOPK_IDS, TOPK_LOG_PROBS),
        (config.score_centering_topk, HEAD_IDS, HEAD_LOG_PROBS),
    ):
        if k:
            ids = torch.arange(answers * k, dtype=torch.int32).view(answers, k)
            columns[ids_name] = Ragged(ids % hf_config.vocab_size, responses)
            columns[log_probs_name] = Ragged(torch.full((answers, k), -math.log(2 * k)), responses)
    if route_layers is not None and config.use_rollout_routing_replay:
        model = family_of(hf_config).transformer_arguments(hf_config)
        experts, topk = model["num_moe_experts"], model["moe_router_topk"]
        routes = even_routes(tokens, experts, topk).to(route_dtype(experts))
        whole = routes[:, None].repeat(1, len(route_layers), 1)
        columns["rollout_routed_experts"] = Ragged(whole, totals)
        if config.replays_route_weights:
            columns["rollout_routed_weights"] = Ragged(torch.full(whole.shape, 1 / topk), totals)
    counts = np.full(microbatches, len(microbatch), np.int64)
    counts[real:] = 0
    return BatchShare(
        RolloutBatch(columns),
        counts,
        np.arange(len(totals)),
        totals[:1],
        float(max(1, answers)),  # of all ranks: also one that has only padding divides by it
        padding / microbatches,
        0,
    )
