"""The Megatron model computes what transformers computes, on every layout, before and after training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import ConfigError, WeightError
from plugin.megatron_backend.hf_weights.export import export_hf_weights, save_hf_checkpoint
from plugin.megatron_backend.hf_weights.loading import load_hf_weights
from plugin.megatron_backend.model import families
from plugin.megatron_backend.model.builder import build_model
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.full_disk import largest_file
from tests.parallel.rank_pool import RankError
from tests.parallel.schedule_runs import forward_log_probs, loaded_model, train_one_step
from tests.parallel.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    hf_log_probs,
    hf_model,
    hf_state_dict,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tests.parallel.training_jobs import further

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
ETP = "expert_tensor_parallel_size"

WITH_SP = TrainerConfig(sequence_parallel=True, tensor_model_parallel_size=2)

# name -> (ranks, parallel sizes, settings)
LAYOUTS: dict[str, tuple[int, dict[str, int], TrainerConfig]] = {
    "one rank": (1, {}, TrainerConfig()),
    "TP2": (2, {TP: 2}, TrainerConfig()),
    "TP2+SP": (2, {TP: 2}, WITH_SP),
    "PP2": (2, {PP: 2}, TrainerConfig()),
    "PP2 x VPP2": (2, {PP: 2, VPP: 2}, TrainerConfig()),
    "TP2+SP x PP2": (4, {TP: 2, PP: 2}, WITH_SP),
}
MOE_LAYOUTS = LAYOUTS | {
    "EP2": (2, {EP: 2}, TrainerConfig()),
    "EP2, allgather dispatcher": (
        2,
        {EP: 2},
        TrainerConfig(moe_token_dispatcher_type="allgather"),
    ),
    "EP2 x PP2": (4, {EP: 2, PP: 2}, TrainerConfig()),
    "EP2 x TP2+SP": (4, {EP: 2, TP: 2}, WITH_SP),
    "EP2 x TP2+SP, experts not cut": (
        4,
        {EP: 2, TP: 2, ETP: 1},
        WITH_SP,
    ),
}
# A MoE model under TP needs SP.
del MOE_LAYOUTS["TP2"]

# One rank of every family, every way of cutting dense layers and every way of cutting experts; the rest with `-m slow`.
DEFAULT_CASES = {
    "qwen3": ("one rank", "PP2 x VPP2", "TP2+SP x PP2"),
    "llama": ("one rank", "TP2"),
    "qwen3_moe": (
        *("one rank", "EP2, allgather dispatcher", "EP2 x PP2"),
        *("EP2 x TP2+SP", "EP2 x TP2+SP, experts not cut"),
    ),
}
CASES = [
    pytest.param(
        family,
        layout,
        id=f"{family}, {layout}",
        marks=() if layout in DEFAULT_CASES[family] else pytest.mark.slow,
    )
    for family in FAMILIES
    for layout in (MOE_LAYOUTS if family == "qwen3_moe" else LAYOUTS)
]


def microbatches(count: int = 2, batch: int = 2, length: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, VOCAB_SIZE, (batch, length), generator=generator) for _ in range(count)
    ]


def log_probs_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    tokens: list[Tensor],
    settings: TrainerConfig,
) -> list[Tensor] | None:
    # The allgather dispatcher takes rows of one length only.
    one_length = settings.moe_token_dispatcher_type == "allgather"
    overrides = {"variable_seq_lengths": False} if one_length else {}
    chunks = loaded_model(config, state, groups, settings, **overrides)
    return forward_log_probs(chunks, tokens, groups)


def assert_log_probs_match(results: list[Any], expected: list[Tensor]) -> None:
    from_last_stage = [result for result in results if result is not None]
    assert from_last_stage
    for result in from_last_stage:
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_log_probs_equal_those_of_transformers(run_ranks: Any, family: str, layout: str) -> None:
    config = FAMILIES[family]()
    ranks, sizes, settings = MOE_LAYOUTS[layout] if family == "qwen3_moe" else LAYOUTS[layout]
    tokens = microbatches()
    model = hf_model(config)
    results = run_ranks(
        log_probs_on_rank, ranks, config, hf_state_dict(config), tokens, settings, **sizes
    )
    assert_log_probs_match(results, [hf_log_probs(model, rows) for rows in tokens])


@pytest.mark.parametrize("layout", ["TP2", "PP2 x VPP2", *further("one rank", "PP2")])
def test_tied_embeddings_and_a_vocabulary_that_tp_does_not_divide_match_transformers(
    run_ranks: Any, layout: str
) -> None:
    # 95 = 2 * 48 - 1: the second TP rank holds one row of padding, which must not enter the softmax.
    config = tiny_qwen3(vocab_size=95, tie_word_embeddings=True)
    ranks, sizes, settings = LAYOUTS[layout]
    tokens = [rows.clamp(max=94) for rows in microbatches()]
    results = run_ranks(
        log_probs_on_rank, ranks, config, hf_state_dict(config), tokens, settings, **sizes
    )
    model = hf_model(config)
    assert_log_probs_match(results, [hf_log_probs(model, rows) for rows in tokens])


@pytest.mark.parametrize("normalized", [True, False])
def test_moe_with_dense_layers_matches_for_both_kinds_of_top_k_weights(
    run_ranks: Any, normalized: bool
) -> None:
    config = tiny_qwen3_moe(mlp_only_layers=[0], norm_topk_prob=normalized)
    tokens = microbatches()
    results = run_ranks(
        log_probs_on_rank, 2, config, hf_state_dict(config), tokens, TrainerConfig(), **{EP: 2}
    )
    model = hf_model(config)
    assert_log_probs_match(results, [hf_log_probs(model, rows) for rows in tokens])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        },
    ],
    ids=["linear", "llama3", "llama3 with other constants", "yarn"],
)
def test_scaled_rope_matches_transformers(run_ranks: Any, rope: dict[str, Any]) -> None:
    config = tiny_llama(rope_parameters=rope)
    tokens = microbatches(length=64)
    results = run_ranks(
        log_probs_on_rank, 1, config, hf_state_dict(config), tokens, TrainerConfig()
    )
    model = hf_model(config)
    assert_log_probs_match(results, [hf_log_probs(model, rows) for rows in tokens])


def added_family_on_rank(
    groups: ParallelGroups, config: Any, state: dict[str, Tensor], tokens: list[Tensor]
) -> tuple[list[Tensor] | None, list[str]]:
    entry = families.ModelFamily(
        "MistralForCausalLM", "mbridge.models.llama:LLaMABridge", families.decoder_arguments
    )
    families.FAMILIES["ministral"] = entry
    config.model_type = "ministral"
    try:
        chunks = loaded_model(config, state, groups)
        names = [name for name, _ in export_hf_weights(chunks, groups)]
        return forward_log_probs(chunks, tokens, groups), names
    finally:
        del families.FAMILIES["ministral"]


def test_a_family_is_added_with_one_entry_of_the_table(run_ranks: Any) -> None:
    from transformers import MistralConfig

    shape = {name: value for name, value in tiny_llama().to_dict().items() if name in SHAPE}
    config = MistralConfig(**shape, sliding_window=None)
    state, tokens = hf_state_dict(config), microbatches()
    results = run_ranks(added_family_on_rank, 2, config, state, tokens, **{TP: 2})
    model = hf_model(config)
    expected = [hf_log_probs(model, rows) for rows in tokens]
    assert_log_probs_match([log_probs for log_probs, _ in results], expected)
    assert all(sorted(names) == sorted(state) for _, names in results)


SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "initializer_range", "rms_norm_eps"),
)


def export_after_training_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    tokens: list[Tensor],
    settings: TrainerConfig,
    use_distributed_optimizer: bool,
    directory: str,
) -> tuple[float, list[Tensor] | None, list[str]]:
    chunks = loaded_model(config, state, groups, settings)
    per_rank = len(tokens) // groups.dp_size
    own = tokens[groups.dp_rank * per_rank : (groups.dp_rank + 1) * per_rank]
    optimizer = TrainerConfig(lr=1e-2, use_distributed_optimizer=use_distributed_optimizer)
    wrapped, grad_norm = train_one_step(chunks, own, groups, optimizer)
    save_hf_checkpoint(directory, wrapped, groups, shard_bytes=20_000)
    names = [name for name, _ in export_hf_weights(wrapped, groups)]
    return grad_norm, forward_log_probs(wrapped, tokens, groups), names


TRAINING_CASES = [
    pytest.param("qwen3", "one rank", False, marks=pytest.mark.slow),
    ("qwen3", "TP2+SP x PP2", True),
    ("qwen3", "PP2 x VPP2", False),
    ("llama", "TP2", False),
    ("qwen3_moe", "EP2", True),
    pytest.param("qwen3_moe", "EP2 x PP2", False, marks=pytest.mark.slow),
    ("qwen3_moe", "EP2 x TP2+SP", False),
]


@pytest.mark.parametrize(("family", "layout", "distributed_optimizer"), TRAINING_CASES)
def test_what_is_exported_after_a_training_step_is_what_transformers_loads(
    run_ranks: Any, tmp_path: Path, family: str, layout: str, distributed_optimizer: bool
) -> None:
    from transformers import AutoModelForCausalLM

    config, tokens = FAMILIES[family](), microbatches(count=4)
    state = hf_state_dict(config)
    ranks, sizes, settings = MOE_LAYOUTS[layout] if family == "qwen3_moe" else LAYOUTS[layout]
    directory = str(tmp_path / "exported")
    results = run_ranks(
        export_after_training_on_rank,
        ranks,
        config,
        state,
        tokens,
        settings,
        distributed_optimizer,
        directory,
        **sizes,
    )
    assert len(list(Path(directory).glob("*.safetensors"))) > 1, "the test should cover sharding"
    assert json.loads(Path(directory, "config.json").read_text())["architectures"]
    reloaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = [hf_log_probs(reloaded, rows) for rows in tokens]
    assert_log_probs_match([result[1] for result in results], expected)
    before = hf_log_probs(hf_model(config), tokens[0])
    assert (expected[0] - before).abs().max() > 1e-2, "the step must have changed the model"
    for _, _, names in results:
        assert sorted(names) == sorted(state), "every rank exports every parameter once"


def test_export_of_a_tied_padded_model_on_two_stages_gives_back_what_was_loaded(
    run_ranks: Any,
) -> None:
    config = tiny_qwen3(vocab_size=95, tie_word_embeddings=True)
    state = hf_state_dict(config)
    for exported in run_ranks(round_trip_on_rank, 4, config, state, **{TP: 2, PP: 2}):
        assert sorted(exported) == sorted(state)
        for name, tensor in state.items():
            torch.testing.assert_close(exported[name], tensor, rtol=0, atol=0)


def round_trip_on_rank(
    groups: ParallelGroups, config: Any, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    chunks = loaded_model(config, state, groups)
    return {name: tensor.clone() for name, tensor in export_hf_weights(chunks, groups)}


def test_the_fused_expert_tensors_of_a_transformers_model_load_like_its_checkpoint(
    run_ranks: Any,
) -> None:
    config = tiny_qwen3_moe()
    in_memory = dict(hf_model(config).state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in in_memory)
    (exported,) = run_ranks(round_trip_on_rank, 1, config, in_memory)
    for name, tensor in hf_state_dict(config).items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=0)


def test_a_checkpoint_directory_loads_like_its_state_dict(run_ranks: Any, tmp_path: Path) -> None:
    config = tiny_qwen3_moe()
    hf_model(config).save_pretrained(tmp_path / "source", max_shard_size="40KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    results = run_ranks(round_trip_on_rank, 2, config, str(tmp_path / "source"), **{EP: 2})
    for exported in results:
        for name, tensor in hf_state_dict(config).items():
            torch.testing.assert_close(exported[name], tensor, rtol=0, atol=0)


def save_with_tokenizer_on_rank(groups: ParallelGroups, tokenizer: str, target: str) -> None:
    chunks = build_model(tiny_llama(), TrainerConfig(), groups)
    for replace in (False, True):
        save_hf_checkpoint(target, chunks, groups, tokenizer_from=tokenizer, replace=replace)


def test_a_saved_checkpoint_takes_the_tokenizer_along(run_ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    kept = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for name in (*kept, "model.safetensors"):
        (tmp_path / "base" / name).write_text(name)
    target = tmp_path / "saved"
    run_ranks(save_with_tokenizer_on_rank, 2, str(tmp_path / "base"), str(target), **{TP: 2})
    assert [(target / name).read_text() for name in kept] == list(kept)
    assert not (target / "model.safetensors").exists(), "weights come from the model only"
    assert {path.name for path in tmp_path.iterdir()} == {"base", "saved"}


def test_a_tied_model_leaves_no_trace_on_an_untied_one_built_later(run_ranks: Any) -> None:
    (names,) = run_ranks(names_of_tied_then_untied_on_rank, 1)
    assert "lm_head.weight" in names


def names_of_tied_then_untied_on_rank(groups: ParallelGroups) -> list[str]:
    tied = tiny_qwen3(tie_word_embeddings=True)
    loaded_model(tied, hf_state_dict(tied), groups)
    untied = tiny_qwen3(tie_word_embeddings=False)
    chunks = loaded_model(untied, hf_state_dict(untied), groups)
    return [name for name, _ in export_hf_weights(chunks, groups)]


def load_on_rank(groups: ParallelGroups, config: Any, source: Any) -> None:
    load_hf_weights(build_model(config, TrainerConfig(), groups), source, groups)


def fail_to_load(run_ranks: Any, config: Any, source: Any) -> WeightError:
    with pytest.raises(RankError) as failure:
        run_ranks(load_on_rank, 1, config, source)
    assert isinstance(failure.value.__cause__, WeightError)
    return failure.value.__cause__


def test_weights_of_another_model_are_refused_with_names_and_shapes(
    run_ranks: Any, tmp_path: Path
) -> None:
    config = tiny_qwen3()
    state = hf_state_dict(config)
    wrong_shape = state | {"model.norm.weight": torch.ones(31)}
    assert "model.norm.weight [31]" in str(fail_to_load(run_ranks, config, wrong_shape))
    wrong_vocab = state | {"lm_head.weight": torch.ones(90, 32)}
    assert "lm_head.weight [90, 32]" in str(fail_to_load(run_ranks, config, wrong_vocab))
    incomplete = {name: t for name, t in state.items() if "layers.2.mlp.up_proj" not in name}
    assert "layers.2.mlp.up_proj" in str(fail_to_load(run_ranks, config, incomplete))
    deeper = hf_state_dict(tiny_qwen3(num_hidden_layers=5))
    assert "5 layers but the model has 4" in str(fail_to_load(run_ranks, config, deeper))
    assert "no *.safetensors" in str(fail_to_load(run_ranks, config, str(tmp_path)))
    assert "not a directory" in str(fail_to_load(run_ranks, config, str(tmp_path / "none")))


def save_on_rank(
    groups: ParallelGroups, config: Any, directory: str, most_bytes: int | None = None
) -> str:
    chunks = build_model(config, TrainerConfig(), groups)
    try:
        with largest_file(most_bytes):
            save_hf_checkpoint(directory, chunks, groups)
    except WeightError as error:
        return str(error)
    return "saved"


def test_a_failed_save_is_an_error_on_every_rank_and_leaves_the_target_alone(
    run_ranks: Any, tmp_path: Path
) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "keep.txt").write_text("mine")
    messages = run_ranks(save_on_rank, 2, tiny_llama(), str(tmp_path / "occupied"), **{TP: 2})
    assert all("not empty" in message for message in messages)
    assert (tmp_path / "occupied" / "keep.txt").read_text() == "mine"
    full = [tiny_llama(), str(tmp_path / "full"), 1000]
    messages = run_ranks(save_on_rank, 2, *full, **{TP: 2})
    assert all("File too large" in message for message in messages)
    assert [path.name for path in tmp_path.iterdir()] == ["occupied"]


def build_on_rank(groups: ParallelGroups, config: Any, settings: TrainerConfig) -> str:
    try:
        build_model(config, settings, groups)
    except ConfigError as error:
        return str(error)
    return "built"


def test_layouts_that_do_not_fit_the_model_are_refused_by_name(run_ranks: Any) -> None:
    def refusal(config: Any, settings: TrainerConfig, **sizes: int) -> str:
        return run_ranks(build_on_rank, 2, config, settings, **sizes)[0]

    three_layers = tiny_llama(num_hidden_layers=3)
    assert "num_hidden_layers" in refusal(three_layers, TrainerConfig(), **{PP: 2})
    one_kv_head = tiny_llama(num_key_value_heads=1)
    assert "num_key_value_heads" in refusal(one_kv_head, TrainerConfig(), **{TP: 2})
    three_experts = tiny_qwen3_moe(num_experts=3)
    assert "num_experts" in refusal(three_experts, TrainerConfig(), **{EP: 2})
    assert "--sequence-parallel" in refusal(tiny_qwen3_moe(), TrainerConfig(), **{TP: 2})
    assert "there is only one" in refusal(tiny_llama(), WITH_SP, **{PP: 2})
    assert "no experts" in refusal(tiny_llama(), TrainerConfig(), **{EP: 2})
