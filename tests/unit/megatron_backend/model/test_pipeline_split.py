"""How many layers a pipeline stage holds, against Megatron-Core's own count."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from plugin.config import TrainerConfig
from plugin.errors import ConfigError
from plugin.megatron_backend.model.layout_rules import layers_per_stage, split_arguments

PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"


def arguments(layers: int, **settings: Any) -> dict[str, Any]:
    config = TrainerConfig(**settings)
    sizes = {name: getattr(config, name) for name in (PP, VPP)}
    return {"num_layers": layers, **sizes, **split_arguments(config)}


@pytest.mark.parametrize(
    ("layers", "settings", "expected"),
    [
        (4, {PP: 2}, [2, 2]),
        # 94 = 23 + 24 + 24 + 23
        (94, {PP: 4, FIRST: 23, LAST: 23}, [23, 24, 24, 23]),
        (94, {PP: 4, LAST: 22}, [24, 24, 24, 22]),
        # 94 + embedding + head = 96 = 4 x 24
        (94, {PP: 4, EMBEDDING: True, LOSS: True}, [23, 24, 24, 23]),
        (7, {PP: 2, LOSS: True}, [4, 3]),
        (3, {PP: 2, FIRST: 1}, [1, 2]),
        (6, {PP: 2, VPP: 2, FIRST: 2}, [2, 4]),
    ],
)
def test_a_stage_holds_as_many_layers_as_megatron_builds(
    layers: int, settings: dict[str, Any], expected: list[int]
) -> None:
    given = arguments(layers, **settings)
    assert layers_per_stage(given) == expected
    config = TransformerConfig(hidden_size=8, num_attention_heads=1, pipeline_dtype=float, **given)
    chunks = range(settings.get(VPP, 1))
    built = [
        sum(
            get_num_layers_to_build(config, chunk if VPP in settings else None, rank)
            for chunk in chunks
        )
        for rank in range(settings[PP])
    ]
    assert built == expected


@pytest.mark.parametrize(
    ("layers", "settings", "message"),
    [
        (
            94,
            {PP: 4},
            "--decoder-first-pipeline-num-layers 23 --decoder-last-pipeline-num-layers 23",
        ),
        (8, {PP: 3, FIRST: 2, LAST: 6}, "num-layers 2 with --decoder-last-pipeline-num-layers 6"),
        (6, {PP: 2, VPP: 2, FIRST: 3}, "with --decoder-first-pipeline-num-layers 3"),
        (4, {PP: 2, LOSS: True}, "with --account-for-loss-in-pipeline-split"),
        (4, {PP: 2, FIRST: 4}, "num_hidden_layers is 4"),
    ],
)
def test_a_split_that_does_not_add_up_is_refused(
    layers: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_per_stage(arguments(layers, **settings))


def test_layers_of_a_stage_are_counted_in_one_way_only() -> None:
    with pytest.raises(ConfigError, match="keep one of the two"):
        TrainerConfig(**{PP: 2, FIRST: 1, LOSS: True})
    with pytest.raises(ConfigError, match="with two stages one determines the other"):
        TrainerConfig(**{PP: 2, FIRST: 1, LAST: 3})
