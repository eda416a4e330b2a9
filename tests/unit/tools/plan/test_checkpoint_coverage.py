"""Every tensor of a checkpoint is read in one place, every parameter has a source; no weights are needed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from plugin.config import JobConfig
from plugin.errors import ConfigError, WeightError
from plugin.tools.plan.checkpoint_coverage import Claims, index_names, require_coverage
from plugin.tools.plan.planned_rank import MetaRank, built_rank, count_parameters
from tests.unit.tools.plan.model_facts import MODELS, PUBLISHED_BILLIONS, parameters_by_hand

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, EP8 = {"sequence_parallel": True}, {"expert_model_parallel_size": 8}
CASES = [("Qwen3-0.6B", TP2 | PP2), ("Qwen3-30B-A3B", TP2 | SP | PP2 | EP8)]
FURTHER = [
    ("Llama-3-8B", {}),
    *((name, {}) for name in ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")),
    *((name, {"tensor_model_parallel_size": 8}) for name in ("Llama-3-70B", "Llama-3.1-405B")),
    ("Qwen3-235B-A22B", {"tensor_model_parallel_size": 4} | SP | PP2 | EP8),
    (
        "DeepSeek-V3",
        {
            "tensor_model_parallel_size": 8,
            "expert_model_parallel_size": 64,
            "pipeline_model_parallel_size": 4,
            "decoder_first_pipeline_num_layers": 15,
            "decoder_last_pipeline_num_layers": 14,
        }
        | SP,
    ),
]


def hf_config(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**(MODELS[name] | changes))


def checkpoint_shapes(planned: MetaRank) -> Any:
    """The tensors of the model's checkpoint, as transformers builds them, by expert."""
    from transformers import AutoModelForCausalLM, initialization

    from plugin.megatron_backend.hf_weights.files import ExpertsByNumber, split_by_expert
    from plugin.megatron_backend.model.families import FAMILIES

    hf_config = planned.trainer.hf_config
    with planned.mode.meta_parameters(), initialization.no_init_weights():
        tensors = AutoModelForCausalLM.from_config(hf_config).state_dict()
        fused = FAMILIES[hf_config.model_type].fused_experts
        return ExpertsByNumber(tensors) if fused else split_by_expert(tensors)


def claims_of(config: Any, sizes: dict[str, Any]) -> tuple[Claims, int]:
    """What all stages claim, and the parameters of the whole model."""
    from plugin.megatron_backend.hf_weights.loading import whole_parameters

    flags = {"train_dtype": "bfloat16", "hf_checkpoint": "model", **sizes}
    job = JobConfig.from_sources(flags)
    claims, total = Claims(), 0
    for stage in range(job.pipeline_model_parallel_size):
        rank = stage * job.world_size // job.pipeline_model_parallel_size
        with built_rank(rank, job.world_size, job, config, "packed", on_gpu=True) as planned:
            shapes = checkpoint_shapes(planned)
            assert count_parameters(planned.trainer.chunks) > 0
            claims.add(planned.trainer.chunks, planned.trainer.groups, shapes)
            total += whole_parameters(planned.trainer.chunks, planned.trainer.groups)
    return claims, total


@pytest.mark.parametrize(
    "name, sizes", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)]
)
def test_public_checkpoints_are_read_whole(name: str, sizes: dict[str, Any]) -> None:
    config = hf_config(name)
    claims, total = claims_of(config, sizes)
    assert claims.problems(config) == []
    assert total == parameters_by_hand(MODELS[name])


def test_facts_about_public_models_agree_with_their_published_sizes() -> None:
    for name, billions in PUBLISHED_BILLIONS.items():
        assert parameters_by_hand(MODELS[name]) / 1e9 == pytest.approx(billions, rel=0.02), name


MORE_FAMILIES = (
    "gemma3_text",
    "qwen2",
    "mistral",
    "glm4",
    "glm4_moe",
    "qwen3",
    "qwen3_moe",
    "llama",
)


@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "gpt_oss"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES),
    ],
)
def test_every_family_is_planned_and_read_whole(family: str) -> None:
    from plugin.tools.plan.estimates import gpu_named
    from plugin.tools.plan.job_plan import Models, plan_job
    from plugin.tools.plan.workload import sample_lengths
    from tests.parallel.tiny_models import ALL_FAMILIES

    config = ALL_FAMILIES[family]()
    sizes = TP2 | PP2 | SP | {"max_tokens_per_gpu": 128, "max_response_length": 64}
    job = JobConfig.from_sources({"hf_checkpoint": "model", **sizes})
    lengths = sample_lengths(job, None, config.max_position_embeddings)
    plan = plan_job(job, Models(config), lengths, gpu_named("h100-80g"))
    assert plan.claims.problems(config) == []
    assert all(kind.bytes["activations"] > 0 for kind in plan.kinds)


def test_an_index_without_a_tensor_is_refused_by_its_name(tmp_path: Any) -> None:
    from plugin.megatron_backend.model.families import family_of

    config = hf_config("Qwen3-0.6B", num_hidden_layers=2)
    claims, _ = claims_of(config, {})
    names = family_of(config).tensor_names(config) - {"model.layers.1.mlp.up_proj.weight"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "file")}))
    with pytest.raises(ConfigError, match=r"layers.1.mlp.up_proj.weight, which .*linear_fc1"):
        require_coverage(claims, config, index_names(index))


def test_a_tensor_that_no_rank_reads_is_refused_by_its_name() -> None:
    from plugin.megatron_backend.model.families import family_of

    config = hf_config("Qwen3-0.6B", num_hidden_layers=2)
    claims, _ = claims_of(config, {})
    names = family_of(config).tensor_names(config) | {"model.layers.0.self_attn.q_proj.bias"}
    with pytest.raises(ConfigError, match=r"q_proj.bias is read by no rank"):
        require_coverage(claims, config, names)


def test_a_stage_that_is_built_twice_is_noticed() -> None:
    config = hf_config("Qwen3-0.6B", num_hidden_layers=2)
    claims, _ = claims_of(config, {})
    claims.parameters["decoder.layers.0.mlp.linear_fc2.weight"] += 1
    assert claims.problems(config) == ["decoder.layers.0.mlp.linear_fc2.weight is held by 2 stages"]


def test_a_tensor_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(planned: MetaRank) -> Any:
        shapes = right(planned)
        shapes["model.layers.0.mlp.down_proj.weight"] = torch.empty(7, 3, device="meta")
        return shapes

    right = checkpoint_shapes
    monkeypatch.setitem(globals(), "checkpoint_shapes", wrong)
    with pytest.raises(WeightError, match=r"down_proj.weight \[7, 3\] does not fit"):
        claims_of(hf_config("Qwen3-0.6B", num_hidden_layers=2), {})


@pytest.mark.parametrize("text", ["{}", "[1]", '{"weight_map": {}}', "not json"])
def test_a_file_that_is_no_index_is_refused(tmp_path: Any, text: str) -> None:
    file = tmp_path / "index.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a model.safetensors.index.json"):
        index_names(file)
