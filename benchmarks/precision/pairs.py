"""Mismatch of a trainer in one dtype and an engine in another, on the way that a job takes.

The trainer (Megatron-Core) holds the weights in its dtype and sends them to the engine, which rounds them to its own; the
engine (transformers with a KV cache) samples token by token; the trainer computes the log-probs of whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.precision.sharpened_model import random_tokens
from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.engines.protocol import Generation, GenerationRequest, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.megatron_backend.parallel_groups import one_process
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.ppo_utils.mismatch_metrics import record_mismatch, summarize
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.ragged import Ragged
from plugin.weights.buckets import pack_buckets

DTYPES = ("float32", "bfloat16", "float16")
SAMPLES, PROMPT, RESPONSE = 24, 32, 224


def measured(hf_config: Any, weights: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """One row per pair of dtypes, each with the same prompts and seeds."""
    prompts = random_tokens(SAMPLES, PROMPT, seed=1)
    with one_process() as groups:
        for train_dtype in DTYPES:
            config = TrainerConfig(train_dtype=train_dtype, max_tokens_per_gpu=2048)  # type: ignore[arg-type]
            trainer = MegatronTrainer(config, hf_config, groups, trainable=False)
            trainer.load_hf_weights(weights)
            buckets = list(pack_buckets(trainer.export_hf_weights()))
            for rollout_dtype in DTYPES:
                batch = sampled(hf_config, rollout_dtype, buckets, prompts)
                log_probs = trainer.compute_log_probs(batch)
                row = {"trainer": train_dtype, "engine": rollout_dtype}
                yield row | statistics(log_probs, batch.columns["rollout_log_probs"])


def sampled(hf_config: Any, dtype: Any, buckets: list[bytes], prompts: Tensor) -> RolloutBatch:
    """What an engine in `dtype` answers to the prompts [N, PROMPT], one response each."""
    engine = TransformersEngine(hf_config.to_dict(), dtype=dtype, max_batch=SAMPLES)
    for number, bucket in enumerate(buckets):
        engine.load_weights(0, bucket, last=number == len(buckets) - 1)
    requests = [
        GenerationRequest(tuple(prompt.tolist()), (number,))
        for number, prompt in enumerate(prompts)
    ]
    answers = engine.generate(requests, SamplingParameters(max_response_length=RESPONSE))
    responses: list[Generation] = [answer for [answer] in answers]  # type: ignore[misc]
    batch = RolloutBatch(
        {
            "unconcat_tokens": [
                torch.cat([prompt, response.tokens])
                for prompt, response in zip(prompts, responses, strict=True)
            ],
            "total_lengths": [PROMPT + RESPONSE] * len(prompts),
            "response_lengths": [RESPONSE] * len(prompts),
            "loss_masks": [torch.ones(RESPONSE, dtype=torch.int64)] * len(prompts),
            "rollout_log_probs": [response.log_probs for response in responses],
        }
    )
    batch.check()
    return batch


def statistics(train: Ragged, rollout: Ragged) -> dict[str, float]:
    """Token by token and by sequence; `k3_error` is the standard error of `k3` over sequences."""
    table, lengths = StatisticsTable(torch.device("cpu")), rollout.lengths.tolist()
    record_mismatch(
        table,
        mask=torch.ones_like(rollout.values, dtype=torch.bool),
        train_log_probs=train.values,
        rollout_log_probs=rollout.values,
        position=torch.cat([torch.arange(n) for n in lengths]),
    )
    found = summarize(table.reduced(None))
    names = ("k3", "abs_log_ratio", "ratio_max", "ess_share")
    log_ratio = (train.values.double() - rollout.values.double()).split(lengths)
    by_sequence = torch.stack([(part.exp() - 1 - part).mean() for part in log_ratio])
    whole = torch.stack([part.sum() for part in log_ratio])
    weights = whole.exp()
    return {
        **{name: found[f"mismatch/{name}"] for name in names},
        "k3_error": float(by_sequence.std() / len(lengths) ** 0.5),
        "sequence_abs_log_ratio": float(whole.abs().mean()),
        "sequence_ess_share": float(weights.sum() ** 2 / (weights**2).sum() / len(lengths)),
        "surprise": float(-rollout.values.double().mean()),
        "tokens": float(rollout.values.numel()),
    }
