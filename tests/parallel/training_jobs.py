"""Module-level functions that ranks run in the tests of the train step, and the batch they run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer
from tests.parallel import tiny_models

#: Uneven on purpose: lengths, masks, one sample that is fully masked, one with a response of a single token.
PROMPTS = (3, 5, 2, 7, 4, 1, 6, 3, 2)
RESPONSES = (6, 1, 9, 4, 12, 7, 2, 5, 8)


def uneven_batch(samples: int = 9, *, seed: int = 0, vocab: int = tiny_models.VOCAB_SIZE) -> RolloutBatch:
    """A global batch with every optional per-token field except routes."""
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
        "weight_versions": [i % 3 - 2 for i in range(samples)],
    }
    for name in ("rollout_log_probs", "ref_log_probs", "teacher_log_probs"):
        columns[name] = [values(r, -6.0, -2.5) for r in responses]
    batch = RolloutBatch(columns)
    batch.check()
    return batch


def near_policy(log_probs: list[Tensor], *, spread: float, seed: int) -> list[Tensor]:
    """Log-probs of a policy near another one, so that ratios stay around 1 and bands cut some tokens off."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (values + spread * torch.randn(values.shape, generator=generator)).clamp(max=-1e-4)
        for values in log_probs
    ]


def train(
    groups: ParallelGroups,
    hf_config: Any,
    state_dict: dict[str, Tensor],
    settings: dict[str, Any],
    *,
    steps: int = 2,
    batch: RolloutBatch | None = None,
    layout: str = "packed",
) -> dict[str, Any]:
    """Two updates on one batch: log-prob pass, then training passes; what every layout must agree on."""
    settings = {"lr": 1e-2, **settings}
    trainer = MegatronTrainer(TrainerConfig(**settings), hf_config, groups, layout=layout)
    trainer.load_hf_weights(state_dict)
    batch = batch or uneven_batch()
    log_probs = trainer.compute_log_probs(batch)
    batch = batch.with_column("log_probs", log_probs)
    batch = batch.with_column("rollout_log_probs", near_policy(log_probs, spread=0.3, seed=5))
    results = [trainer.train_step(batch) for _ in range(steps)]
    weights = {name: value.detach().clone().cpu() for name, value in trainer.export_hf_weights()}
    return {
        "log_probs": log_probs,
        "metrics": [result.metrics for result in results],
        "weights": weights if groups.rank == 0 else None,
        "updated": [result.updated for result in results],
    }
