"""What ranks compute with the real model: round trip, log-probs and steps of a layout, and LoRA beside full training."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.megatron_backend.lora.adapters import adapters_off
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer

#: Adam's first step is lr * sign(g): where a gradient is nearly 0, the rounding of another order of summation would become a
#: full step. With this epsilon the update is smooth in the gradient, and large enough that the second step shows it.
SMOOTH_ADAM = {"lr": 1e-3, "adam_eps": 1e-3}

#: How a batch is cut into microbatches: (settings, layout of a row).
CUTS: dict[str, tuple[dict[str, Any], str]] = {
    # 55 to 84 tokens per sample: two or three to a row
    "packed": ({"max_tokens_per_gpu": 200}, "packed"),
    "padded": ({"micro_batch_size": 4}, "padded"),
    "one sample": ({"micro_batch_size": 1}, "padded"),
}


@dataclass(frozen=True)
class Measured:
    """What one cut gave.

    log_probs: [response tokens of all samples] float32, before the first update
    steps: metrics of two train steps on the same batch
    """

    log_probs: Tensor
    steps: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class RoundTrip:
    """How exported weights differ from the file that was loaded; the lists hold names.

    exported: in order, so that a name that came twice is there twice
    different: other values, shapes or dtypes
    """

    exported: list[str]
    missing: list[str]
    different: list[str]


def new_trainer(
    groups: ParallelGroups, model: str, settings: Mapping[str, Any], layout: str = "packed"
) -> MegatronTrainer:
    """A trainer of this rank with the model's weights."""
    from transformers import AutoConfig

    # Ranks of the pool have one thread each; one rank alone may have both cores.
    torch.set_num_threads(max(1, 2 // torch.distributed.get_world_size()))
    sizes = {
        "tensor_model_parallel_size": groups.tp_size,
        "pipeline_model_parallel_size": groups.pp_size,
    }
    config = TrainerConfig(**{**SMOOTH_ADAM, **sizes, **settings})
    trainer = MegatronTrainer(config, AutoConfig.from_pretrained(model), groups, layout=layout)  # type: ignore[arg-type]
    trainer.load_hf_weights(model)
    return trainer


def round_trip(trainer: MegatronTrainer, model: str) -> RoundTrip:
    """Compare every exported tensor with the file; a collective.

    A float32 model holds the file's bfloat16 values exactly, so its export is compared in float32.
    """
    file = load_file(Path(model) / "model.safetensors")
    exported, different = [], []
    for name, tensor in trainer.export_hf_weights():
        exported.append(name)
        if name in file and not torch.equal(tensor, file[name].to(tensor.dtype)):
            different.append(name)
    return RoundTrip(exported, sorted(file.keys() - set(exported)), different)


def measure_float32(
    groups: ParallelGroups, model: str, batch: RolloutBatch, cuts: Sequence[str]
) -> tuple[RoundTrip, dict[str, Measured]]:
    """The round trip, then log-probs and two steps for every cut of the batch."""
    trip, found = None, {}
    for cut in cuts:
        settings, layout = CUTS[cut]
        trainer = new_trainer(groups, model, {"train_dtype": "float32", **settings}, layout)
        trip = trip or round_trip(trainer, model)
        log_probs = trainer.compute_log_probs(batch).values
        steps = [trainer.train_step(batch) for _ in range(2)]
        assert all(step.updated for step in steps)
        found[cut] = Measured(log_probs, [step.metrics for step in steps])
        # Two gigabytes that refer to each other in circles, before the next two.
        del trainer
        gc.collect()
    assert trip is not None
    return trip, found


def measure_bfloat16(
    groups: ParallelGroups, model: str, batch: RolloutBatch
) -> tuple[RoundTrip, Measured]:
    """The round trip and log-probs."""
    settings, layout = CUTS["packed"]
    trainer = new_trainer(groups, model, {"train_dtype": "bfloat16", **settings}, layout)
    return round_trip(trainer, model), Measured(trainer.compute_log_probs(batch).values)


@dataclass(frozen=True)
class Curve:
    """log_probs: [response tokens of all samples] before every step and after the last."""

    log_probs: list[Tensor]
    base: RoundTrip


def training_curve(
    groups: ParallelGroups,
    model: str,
    batch: RolloutBatch,
    settings: Mapping[str, Any],
    steps: int,
    merged_to: str,
) -> Curve:
    """Train on one batch; write what is exported at the end to a file of torch."""
    settings = {"train_dtype": "float32", "max_tokens_per_gpu": 200, **settings}
    trainer = new_trainer(groups, model, settings)
    log_probs = []
    for _ in range(steps):
        step = trainer.train_step(batch, with_log_probs=True)
        assert step.updated and step.log_probs is not None
        log_probs.append(step.log_probs.values)
    log_probs.append(trainer.compute_log_probs(batch).values)
    weights = {name: value.detach().clone() for name, value in trainer.export_hf_weights()}
    torch.save(weights, merged_to)
    with adapters_off(trainer.chunks):
        return Curve(log_probs, round_trip(trainer, model))


def saved_bytes(
    groups: ParallelGroups, model: str, batch: RolloutBatch, train_dtype: str
) -> tuple[float, int]:
    """Bytes that a train step keeps per token for its backward pass, and what the formula says."""
    from plugin.megatron_backend.step.token_budget import activation_bytes_per_token

    settings = {"train_dtype": train_dtype, "max_tokens_per_gpu": 2048}
    trainer = new_trainer(groups, model, settings)
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.train_step(batch)
    weights = {p.untyped_storage().data_ptr() for c in trainer.chunks for p in c.parameters()}
    total = sum(size for place, size in storages.items() if place not in weights)
    tokens = sum(len(sample) for sample in batch.columns["unconcat_tokens"])
    return total / tokens, activation_bytes_per_token(trainer.hf_config, trainer.config)
