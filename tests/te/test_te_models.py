"""Every family with Transformer Engine's own layers: which weights a tensor parallel rank holds a part of, and what is exported."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import TrainerConfig
from plugin.megatron_backend.hf_weights.export import export_hf_weights, export_own_part
from plugin.megatron_backend.model import family_layers
from tests.parallel import tiny_models
from tests.te.te_models import built, uses_te

#: Layouts of rank 0: name -> flags and ranks. Experts are whole where they have no tensor parallel ranks of their own.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "TP2": (
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_tensor_parallel_size": 1,
        },
        2,
    ),
    "TP2, experts too": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    "EP2": ({"expert_model_parallel_size": 2}, 2),
    "TP2 EP2": (
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        2,
    ),
}
#: Families that Transformer Engine cannot compute: local layers, see `layout_rules.engine_fault`.
LOCAL = {"gpt_oss", "qwen3_next"}
FAMILIES = {**tiny_models.ALL_FAMILIES, "moonlight": tiny_models.tiny_moonlight}
MOE = {"qwen3_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "moonlight", "gpt_oss"}
CASES = [
    (family, layout)
    for family in sorted(set(FAMILIES) - LOCAL)
    for layout in LAYOUTS
    if family in MOE or layout == "TP2"
]


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", sorted(LOCAL))
def test_a_family_that_it_cannot_compute_gets_local_layers(family: str) -> None:
    told = pytest.warns(UserWarning, match="without Transformer Engine's layers")
    with told, built(FAMILIES[family](), TrainerConfig()) as (model, _):
        assert not uses_te(model)


@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] != "EP2"])
def test_a_weight_is_marked_tensor_parallel_exactly_where_a_rank_holds_a_part_of_it(
    family: str, layout: str
) -> None:
    hf_config, (flags, ranks) = FAMILIES[family](), LAYOUTS[layout]
    with built(hf_config, TrainerConfig()) as (whole, _):
        whole_shapes = shapes(whole)
        assert uses_te(whole)
    with built(hf_config, TrainerConfig(**flags), ranks) as (model, groups):
        for name, parameter in model.named_parameters():
            marked = bool(getattr(parameter, "tensor_model_parallel", False))
            if ".experts." in name:
                # Whole ones are of this rank alone, too: it sees other tokens than its neighbor. How they are cut is
                # told by their names, see `export.entry_of`.
                assert marked, name
                continue
            assert marked == (tuple(parameter.shape) != whole_shapes[name]), name
            if marked:
                sizes = list(parameter.shape)
                sizes[parameter.partition_dim] *= groups.tp_size
                assert tuple(sizes) == whole_shapes[name], name


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_export_has_the_names_and_shapes_of_the_checkpoint(family: str, layout: str) -> None:
    hf_config, (flags, ranks) = FAMILIES[family](), LAYOUTS[layout]
    with built(hf_config, TrainerConfig(transformer_impl="local")) as (local, groups):
        expected = {
            name: tuple(tensor.shape) for name, tensor in export_hf_weights([local], groups)
        }
    with built(hf_config, TrainerConfig(**flags), ranks) as (model, groups):
        exported = {
            name: tuple(tensor.shape) for name, tensor in export_hf_weights([model], groups)
        }
        own = [
            entry
            for entry in export_own_part([model], groups, round_bytes=1 << 20)
            if entry is not None
        ]
    assert exported == expected
    assert {name: tuple(tensor.shape) for name, tensor in own}.items() <= expected.items()


@pytest.mark.parametrize("family", ["deepseek_v3", "moonlight"])
def test_transformer_engine_itself_marks_the_projections_into_the_latents(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the marks would be: without it, this suite would notice a Transformer Engine that needs no correction."""
    monkeypatch.setattr(family_layers, "_unmark_whole_weights", lambda model: None)
    flags, ranks = LAYOUTS["TP2"]
    with built(FAMILIES[family](), TrainerConfig(**flags), ranks) as (model, _):
        down = [p for name, p in model.named_parameters() if "_down_proj" in name]
        assert down and all(parameter.tensor_model_parallel for parameter in down)


def test_the_norms_of_the_latents_have_their_own_epsilon() -> None:
    hf_config = tiny_models.tiny_deepseek_v3()
    assert hf_config.rms_norm_eps == 1e-3
    with built(hf_config, TrainerConfig()) as (model, _):
        attention = model.decoder.layers[0].self_attention
        assert attention.linear_q_up_proj.eps == attention.linear_kv_up_proj.eps == 1e-6


@pytest.mark.parametrize(
    ("family", "exchange"),
    [
        ("mistral", "a2a"),
        ("gemma3_text", "a2a"),
        ("qwen2", "a2a"),
        ("qwen3", "p2p"),
        ("deepseek_v3", "p2p"),
    ],
)
def test_the_attention_of_every_layer_has_the_exchange_that_its_windows_need(
    family: str, exchange: str
) -> None:
    with built(FAMILIES[family](), TrainerConfig(context_parallel_size=2), 2) as (model, _):
        attentions = [layer.self_attention.core_attention for layer in model.decoder.layers]
        assert {attention.cp_comm_type for attention in attentions} == {exchange}
        windows = {attention.window_size for attention in attentions}
        assert (windows != {(-1, 0)}) == (exchange == "a2a")


@pytest.mark.parametrize(("settings", "fuses"), [({}, True), ({"lora_rank": 4}, False)])
def test_its_linear_layers_add_up_weight_gradients_without_apex_and_the_head_does_not(
    settings: dict[str, Any], fuses: bool
) -> None:
    for family in ("qwen3", "qwen3_moe", "deepseek_v3"):
        with built(FAMILIES[family](), TrainerConfig(**settings)) as (model, _):
            found = {
                module.fuse_wgrad_accumulation
                for module in model.modules()
                if hasattr(module, "fuse_wgrad_accumulation")
            }
            assert found == {fuses}
            assert not model.output_layer.gradient_accumulation_fusion
