"""What replaying routes does to the mismatch, measured on the samples of a dump.

Three forward passes of the same model over the same tokens: routers choose live; they take the
engine's experts; and these are mixed with the engine's weights too. Each is compared with the
log-probs that the engine reported. A sample takes part if the dump has its tokens and its routes
(`--dump-log-probs DIR --dump-routes`); the model has to be the one that the engine sampled with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plugin.batch_types import KEPT_COUNTS, KEPT_IDS, RolloutBatch
from plugin.config import TrainerConfig
from plugin.errors import BatchError, ConfigError
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.parallel_groups import ParallelGroups, one_process
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.observe.console import text_table
from plugin.ppo_utils.mismatch_metrics import record_mismatch, summarize
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.ragged import Ragged
from plugin.tools.compare.dump_columns import DumpBlock
from plugin.tools.compare.dump_reading import Dump

Replay = Literal[False, "ids", "ids+weights"]
_NAMES: dict[Replay, str] = {
    False: "live",
    "ids": "ids replayed",
    "ids+weights": "ids and weights replayed",
}
#: Key of `summarize` -> heading.
_COLUMNS = {
    "k3": "mismatch KL (k3)",
    "abs_log_ratio": "mean |log ratio|",
    "ratio_max": "largest ratio",
    "ess_share": "ESS/N",
}


def routing_mismatch(
    dump: Dump,
    hf_checkpoint: str,
    *,
    train_dtype: Any = "float32",
    temperature: float = 1.0,
    max_tokens: int = 65536,
) -> dict[str, Any]:
    """Samples, tokens and one row of mismatch statistics per routing mode."""
    hf_config = _moe_config(hf_checkpoint)
    batch = routed_batch(dump, max_tokens)
    config = TrainerConfig(
        train_dtype=train_dtype, rollout_temperature=temperature, max_tokens_per_gpu=8192
    )
    with one_process() as groups:
        rows = measured(batch, hf_config, hf_checkpoint, config, groups)
    masks: Ragged = batch.columns["loss_masks"]
    return {"samples": len(batch), "tokens": int((masks.values != 0).sum()), "rows": rows}


def measured(
    batch: RolloutBatch,
    hf_config: Any,
    weights: str | Mapping[str, Tensor],
    config: TrainerConfig,
    groups: ParallelGroups,
) -> list[dict[str, Any]]:
    """Mismatch statistics of every routing mode that the batch allows."""
    modes: list[Replay] = [False, "ids"]
    if "rollout_routed_weights" in batch:
        modes.append("ids+weights")
    config = replace(config, use_rollout_routing_replay=modes[-1])
    trainer = MegatronTrainer(config, hf_config, groups, trainable=False)
    trainer.load_hf_weights(weights)
    rows = []
    for mode in modes:
        trainer.config = replace(config, use_rollout_routing_replay=mode)
        log_probs = trainer.compute_log_probs(batch)
        rows.append({"routing": _NAMES[mode], **_statistics(batch, log_probs)})
    return rows


def _moe_config(hf_checkpoint: str) -> Any:
    from transformers import AutoConfig

    if not (Path(hf_checkpoint) / "config.json").is_file():
        raise ConfigError(
            f"--hf-checkpoint {hf_checkpoint} holds no config.json; give a local Hugging Face "
            "model directory"
        )
    hf_config = AutoConfig.from_pretrained(
        hf_checkpoint, local_files_only=True, trust_remote_code=False
    )
    if "num_moe_experts" not in family_of(hf_config).transformer_arguments(hf_config):
        raise ConfigError(f"--routing with a {hf_config.model_type} model, which has no experts")
    return hf_config


def routed_batch(dump: Dump, max_tokens: int) -> RolloutBatch:
    """The first samples that carry tokens and routes, as a checked batch."""
    parts: list[RolloutBatch] = []
    tokens = 0
    for block, _ in dump.blocks():
        for part in _routed_samples(block):
            if parts and parts[0].columns.keys() != part.columns.keys():
                raise BatchError("some samples of the dump carry weights of routes and some none")
            parts.append(part)
            tokens += int(part.columns["total_lengths"].sum())
            if tokens >= max_tokens:
                break
        if tokens >= max_tokens:
            break
    if not parts:
        raise BatchError(
            "no sample of the dump has both tokens and rollout_routed_experts; write them with "
            "--dump-log-probs DIR --dump-routes"
        )
    batch = parts[0].concatenated(*parts[1:])
    batch.check()
    return batch


def _routed_samples(block: DumpBlock) -> Iterator[RolloutBatch]:
    routes = block.routes.get("rollout_routed_experts")
    weights = block.routes.get("rollout_routed_weights")
    if routes is None or block.sequences is None:
        return
    ends = block.lengths.cumsum()
    for i, sequence in enumerate(block.sequences):
        response = slice(ends[i] - block.lengths[i], ends[i])
        if not block.lengths[i] or len(sequence) <= block.lengths[i]:
            continue
        columns: dict[str, list[Any]] = {
            "unconcat_tokens": [torch.from_numpy(sequence.copy())],
            "total_lengths": [len(sequence)],
            "response_lengths": [int(block.lengths[i])],
            "loss_masks": [torch.from_numpy(block.mask[response].astype("int64"))],
            "rollout_log_probs": [torch.from_numpy(block.rollout[response].copy())],
            "rollout_routed_experts": [torch.from_numpy(routes[i].astype("int32"))],
        }
        for name, column in ((KEPT_COUNTS, "kept_counts"), (KEPT_IDS, "kept_ids")):
            if column in block.kept:
                columns[name] = [torch.from_numpy(block.kept[column][i].astype("int32"))]
        if weights is not None:
            columns["rollout_routed_weights"] = [torch.from_numpy(weights[i].astype("float32"))]
        yield RolloutBatch(columns)


def _statistics(batch: RolloutBatch, log_probs: Ragged) -> dict[str, float]:
    table = StatisticsTable(torch.device("cpu"))
    masks, rollout = (batch.columns[name] for name in ("loss_masks", "rollout_log_probs"))
    record_mismatch(
        table,
        mask=masks.values != 0,
        train_log_probs=log_probs.values,
        rollout_log_probs=rollout.values,
        position=torch.cat([torch.arange(n) for n in masks.lengths.tolist()]),
    )
    found = summarize(table.reduced(None))
    return {key: found[f"mismatch/{key}"] for key in _COLUMNS}


def routing_text(result: dict[str, Any]) -> str:
    """The table for a terminal."""
    rows = [["routing", *_COLUMNS.values()]]
    rows += [[row["routing"], *(f"{row[key]:.3g}" for key in _COLUMNS)] for row in result["rows"]]
    lines = text_table(rows)
    head = f"{result['tokens']:,} tokens in {result['samples']:,} samples\n"
    if len(result["rows"]) < len(_NAMES):
        lines.append("the dump has no rollout_routed_weights: the engine did not report them")
    return "\n".join([head, *lines])
