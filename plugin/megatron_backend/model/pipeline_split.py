"""How many layers each pipeline stage holds. Imports no Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugin.config import TrainerConfig
from plugin.errors import ConfigError


def split_arguments(config: TrainerConfig) -> dict[str, Any]:
    """Arguments of Megatron's `TransformerConfig` that cut the model into uneven stages."""
    return {
        "num_layers_in_first_pipeline_stage": config.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": config.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": config.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": config.account_for_loss_in_pipeline_split,
    }


def layers_per_stage(arguments: Mapping[str, Any]) -> list[int]:
    """Decoder layers of every pipeline stage, as Megatron cuts them; a `ConfigError` if it cannot.

    94 layers over 4 stages with 23 in the first and in the last: [23, 24, 24, 23].
    arguments: of Megatron's `TransformerConfig`
    """
    layers, stages = arguments["num_layers"], arguments["pipeline_model_parallel_size"]
    chunks = arguments["virtual_pipeline_model_parallel_size"] or 1
    first, last = (arguments[f"num_layers_in_{end}_pipeline_stage"] for end in ("first", "last"))
    embedding, loss = (
        int(arguments[f"account_for_{part}_in_pipeline_split"]) for part in ("embedding", "loss")
    )
    middle = stages - (first is not None) - (last is not None)
    rest = layers + embedding + loss - (first or 0) - (last or 0)
    even = rest // middle if middle else 0
    split = [even] * stages
    split[0] = even - embedding if first is None else first
    if last is not None:
        split[-1] = last
    elif stages > 1:
        split[-1] -= loss
    fits = rest == even * middle and rest >= middle * chunks
    if not fits or any((size or 0) % chunks for size in (even, first, last)) or min(split) < 0:
        raise ConfigError(_does_not_fit(arguments, chunks))
    return split


def _does_not_fit(arguments: Mapping[str, Any], chunks: int) -> str:
    layers, stages = arguments["num_layers"], arguments["pipeline_model_parallel_size"]
    pieces = stages * chunks
    option = f"--pipeline-model-parallel-size {stages}"
    if chunks > 1:
        option += f" x --virtual-pipeline-model-parallel-size {chunks}"
    for end in ("first", "last"):
        size = arguments[f"num_layers_in_{end}_pipeline_stage"]
        option += "" if size is None else f" with --decoder-{end}-pipeline-num-layers {size}"
    for part in ("embedding", "loss"):
        if arguments[f"account_for_{part}_in_pipeline_split"]:
            option += f" with --account-for-{part}-in-pipeline-split"
    fitting = [str(n) for n in range(1, min(layers, 2 * pieces) + 1) if layers % n == 0]
    # Stages at the ends hold the embedding and the LM head, so they get the smaller share.
    ends = _equal_ends(layers, stages, chunks)
    hint = (
        ""
        if ends is None
        else (
            f" evenly, but fits with --decoder-first-pipeline-num-layers {ends} "
            f"--decoder-last-pipeline-num-layers {ends}"
        )
    )
    return (
        f"{option}: the model's num_hidden_layers is {layers}, which cannot be divided by "
        f"{pieces}{hint}; it can by {', '.join(fitting)}"
    )


def _equal_ends(layers: int, stages: int, chunks: int) -> int | None:
    """The largest size of both end stages, below that of the others, that leaves an even rest."""
    if stages < 3:
        return None
    for size in range(layers // stages, 0, -1):
        rest = layers - 2 * size
        if size % chunks == 0 and rest % ((stages - 2) * chunks) == 0:
            return size
    return None
