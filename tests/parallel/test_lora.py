"""LoRA on ranks: steps do not depend on the layout, the base never changes, adapters are those of a merged model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from plugin.config import TrainerConfig
from plugin.megatron_backend.lora.adapters import Adapters, adapters_off, low_ranks
from plugin.megatron_backend.lora.peft import export_adapters, save_peft_directory
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer
from tests.parallel import tiny_models
from tests.parallel.rank_pool import RankError
from tests.parallel.test_layout_equality import (
    PER_SAMPLE,
    PER_TOKEN,
    RECOMPUTE,
    SMALL_BUDGET,
    check_equal,
)
from tests.parallel.training_jobs import (
    SMOOTH_ADAM,
    Case,
    Layout,
    Outcome,
    RunRanks,
    Start,
    exported,
    new_trainer,
    uneven_batch,
    weights_of,
)

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
SHARDED = {"use_distributed_optimizer": True}
SP = {"sequence_parallel": True}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
TP2_EP2 = {**TP2, **EP2, "expert_tensor_parallel_size": 1}
TP2_WHOLE_EXPERTS = {**TP2, "expert_tensor_parallel_size": 1}


def dense(**settings: Any) -> Case:
    # B begins with 0 and A has no gradient before the second step.
    return Case(settings={**PER_SAMPLE, **SMALL_BUDGET, **LORA, **settings}, steps=3)


def moe(**settings: Any) -> Case:
    return Case("qwen3_moe", settings={**PER_TOKEN, **SMALL_BUDGET, **LORA, **settings}, steps=3)


ATTENTION = {"lora_target": "q_proj,v_proj"}
# name -> (layout, cases)
LAYOUTS: dict[str, tuple[Layout, dict[str, Case]]] = {
    "TP2": (Layout(2, TP2), {"sequence parallel": dense(**SP), "q and v": dense(**ATTENTION)}),
    "PP2": (Layout(2, PP2), {"recompute": dense(**RECOMPUTE)}),
    "DP2": (Layout(2), {"distributed optimizer": dense(**SHARDED)}),
    "EP2": (Layout(2, EP2), {"distributed optimizer": moe(**SHARDED)}),
    "CP2": (Layout(2, {"context_parallel_size": 2}), {"dense": dense(), "moe": moe()}),
    "MoE PP2": (Layout(2, PP2), {"moe": moe(**RECOMPUTE)}),
    "MoE DP2": (Layout(2), {"moe": moe(), "distributed optimizer": moe(**SHARDED)}),
    "MoE EP2": (Layout(2, EP2), {"moe": moe()}),
    "TP2, experts cut": (Layout(2, TP2), {"moe": moe(**SP)}),
    "TP2, experts whole": (Layout(2, TP2_WHOLE_EXPERTS), {"moe": moe(**SP)}),
    "TP2 EP2": (Layout(2, TP2_EP2), {"moe": moe(**SP, **SHARDED)}),
    "TP2 SP recompute": (Layout(2, TP2), {"dense": dense(**SP, **RECOMPUTE)}),
    "VPP": (
        Layout(2, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
        {"dense": dense(**SHARDED)},
    ),
}
BY_DEFAULT = ("TP2", "PP2", "DP2", "EP2")


@pytest.fixture(scope="module")
def one_process() -> dict[str, Outcome]:
    return {}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in LAYOUTS],
)
def test_a_step_of_adapters_is_that_of_one_process(
    run_ranks: RunRanks, one_process: dict[str, Outcome], name: str
) -> None:
    layout, cases = LAYOUTS[name]
    outcomes = check_equal(run_ranks, one_process, layout, cases)
    for case_name, case in cases.items():
        weights, start = outcomes[case_name].weights, weights_of(case.family)
        assert weights is not None
        moved = {key for key, value in weights.items() if not torch.equal(value, start[key])}
        chosen = case.settings.get("lora_target")
        assert moved == {
            key
            for key in start
            if key.endswith("_proj.weight")
            and (chosen is None or key.split(".")[-2] in chosen.split(","))
        }


def train_with_adapters(groups: ParallelGroups, start: Start) -> dict[str, Any]:
    """Two steps, and what of the base, the optimizer and the buffers they touched."""
    plain = new_trainer(groups, start, {**PER_SAMPLE, **SP})
    before = plain.compute_log_probs(start.batch).values
    trainer = new_trainer(groups, start, {**PER_SAMPLE, **LORA, **SP})
    of_new = trainer.compute_log_probs(start.batch).values
    for _ in range(2):
        assert trainer.train_step(start.batch).updated
    adapters = sum(p.numel() for _, _, low in low_ranks(trainer.chunks) for p in low.parameters())
    assert trainer.optimizer is not None
    inner = trainer.optimizer.optimizer.chained_optimizers[0].optimizer
    with adapters_off(trainer.chunks):
        base = exported(trainer)
    after = trainer.compute_log_probs(start.batch).values
    with adapters_off(trainer.chunks):
        without = trainer.compute_log_probs(start.batch).values
    return {
        "log probs": (before, of_new, without, trainer.compute_base_log_probs(start.batch).values),
        "after": after,
        "base": base,
        "adapters": adapters,
        "moments": sum(state["exp_avg"].numel() for state in inner.state.values()),
        "gradients": sum(b.numel_unpadded for b in vars(trainer.chunks[0])["buffers"]),
        "trainable": sum(p.numel() for p in trainer.chunks[0].parameters() if p.requires_grad),
    }


def test_new_adapters_change_no_bit_and_training_them_none_of_the_base(run_ranks: RunRanks) -> None:
    start = Start.of("qwen3")
    for found in run_ranks(train_with_adapters, 2, start, **TP2):
        before, *others = found["log probs"]
        for same in others:
            assert torch.equal(before, same)
        assert (found["after"] - before).abs().max() > 1e-3
        assert all(torch.equal(value, start.weights[n]) for n, value in found["base"].items())
        sizes = {found[name] for name in ("adapters", "moments", "gradients", "trainable")}
        assert len(sizes) == 1 and 0 < sizes.pop() < 20_000


def gradients_of_adapters(
    groups: ParallelGroups, start: Start, temperature: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """By matrix: its gradient, and what the merged weight's gradient dW makes of it.

    W + s B A: dA = s B^T dW and dB = s dW A^T.
    """
    settings = {**PER_SAMPLE, "clip_grad": 0.0, "lr": 1e-12, "rollout_temperature": temperature}
    trainer = new_trainer(groups, start, {**settings, **LORA})
    for _, _, low in low_ranks(trainer.chunks):
        torch.nn.init.normal_(low.lora_B, std=0.02)
    merged = new_trainer(groups, replace(start, weights=exported(trainer)), settings)
    for one in (trainer, merged):
        one.train_step(start.batch)
    of_weight = {name: p.main_grad for name, p in unwrap(merged.chunks[0]).named_parameters()}
    found = {}
    for name, layer in unwrap(trainer.chunks[0]).named_modules():
        if isinstance(adapters := getattr(layer, "lora", None), Adapters):
            rows = of_weight[f"{name}.weight"].unflatten(0, (adapters.groups, -1))
            for part, own in zip(adapters.parts, rows.split(adapters.widths, 1), strict=True):
                gradient, scale = own.flatten(0, 1), adapters.scale
                a, b = part.lora_A, part.lora_B
                found[f"{part.name} A"] = a.main_grad, scale * b.detach().t() @ gradient
                found[f"{part.name} B"] = b.main_grad, scale * gradient @ a.detach().t()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_gradients_of_both_matrices_are_those_of_the_merged_weight(
    run_ranks: RunRanks, temperature: float
) -> None:
    (found,) = run_ranks(gradients_of_adapters, 1, Start.of("qwen3"), temperature)
    assert len(found) == 4 * 7 * 2
    for name, (mine, expected) in found.items():
        assert expected.abs().max() > 1e-6, name
        close = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=close, msg=name)


def strides_of_gradients(groups: ParallelGroups, start: Start) -> list[tuple[Any, Any]]:
    """Of every gradient that a frozen layer multiplies: its strides, and those of its shape."""
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

    trainer = new_trainer(groups, start, {**PER_SAMPLE, **LORA, "lora_target": "q_proj"})
    found, backward = [], LinearWithFrozenWeight.backward

    def watched(ctx: Any, gradient: Tensor) -> Any:
        found.append((gradient.stride(), torch.empty(gradient.shape).stride()))
        return backward(ctx, gradient)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearWithFrozenWeight, "backward", staticmethod(watched))
        trainer.train_step(start.batch)
    return found


def test_no_frozen_layer_multiplies_its_gradient_row_by_row(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(strides_of_gradients, 1, Start.of("qwen3"))
    assert len(found) >= 4 * 4
    assert all(strides == plain for strides, plain in found), found


#: The advantage's term and entropy; its gradient exists on both sides of every point.
SMOOTH_LOSS = {"policy_loss": "reinforce", "entropy_coef": 0.1, "clip_grad": 0.0}
COLD = {**SMOOTH_LOSS, **LORA, "rollout_temperature": 0.25}


def slope_of_the_loss(groups: ParallelGroups, start: Start) -> tuple[float, float]:
    """Of a step along the adapters' gradient, at temperature 0.25: measured, and the gradient's norm."""
    trainer = new_trainer(groups, start, {**COLD, "lr": 1e-12})
    matrices: list[Any] = [p for _, _, low in low_ranks(trainer.chunks) for p in low.parameters()]
    generator = torch.Generator().manual_seed(0)
    for _, _, low in low_ranks(trainer.chunks):
        with torch.no_grad():
            low.lora_B.normal_(std=0.02, generator=generator)
    norm = trainer.train_step(start.batch).grad_norm
    here = [p.detach().clone() for p in matrices]
    direction = [p.main_grad / norm for p in matrices]
    losses = []
    for length in (0.02, -0.02):
        with torch.no_grad():
            for matrix, place, along in zip(matrices, here, direction, strict=True):
                matrix.copy_(place + length * along)
        losses.append(trainer.train_step(start.batch).metrics["loss"])
    return (losses[0] - losses[1]) / 0.04, norm


def test_the_adapters_gradient_at_a_low_temperature_is_the_slope_of_the_loss(
    run_ranks: RunRanks,
) -> None:
    (found,) = run_ranks(slope_of_the_loss, 1, Start.of("qwen3"))
    slope, norm = found
    assert slope == pytest.approx(norm, rel=1e-2)


def three_steps(groups: ParallelGroups, start: Start, settings: Any) -> list[Any]:
    """Log-probs, loss, gradient norm and entropy before each of three steps."""
    trainer = new_trainer(groups, start, settings)
    found: list[Any] = []
    for _ in range(3):
        found.append(trainer.compute_log_probs(start.batch).values)
        metrics = trainer.train_step(start.batch).metrics
        found.append(torch.tensor([metrics[n] for n in ("loss", "grad_norm", "entropy_loss")]))
    return found


def test_adapters_at_temperature_a_quarter_train_as_with_a_head_four_times_as_large(
    run_ranks: RunRanks,
) -> None:
    start = Start.of("qwen3")
    sharp = {**start.weights, "lm_head.weight": 4 * start.weights["lm_head.weight"]}
    (cold,) = run_ranks(three_steps, 1, start, COLD)
    (warm,) = run_ranks(
        three_steps, 1, replace(start, weights=sharp), {**COLD, "rollout_temperature": 1.0}
    )
    for mine, theirs in zip(cold, warm, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def filled(groups: ParallelGroups, config: Any, state: Any, settings: Any) -> MegatronTrainer:
    sizes = {"tensor_model_parallel_size": groups.tp_size}
    trainer = MegatronTrainer(TrainerConfig(**sizes, **settings), config, groups)
    trainer.load_hf_weights(state)
    return trainer


def write_adapter(groups: ParallelGroups, config: Any, state: Any, directory: str) -> Any:
    """Write adapters whose B is not 0; the merged weights."""
    trainer = filled(groups, config, state, LORA)
    with torch.no_grad():
        for number, (_, _, low) in enumerate(low_ranks(trainer.chunks)):
            low.lora_B.normal_(std=0.2, generator=torch.Generator().manual_seed(number))
    settings = unwrap(trainer.chunks[0]).lora
    save_peft_directory(Path(directory), trainer.chunks, settings, groups, None)
    return exported(trainer)


def adapted(
    groups: ParallelGroups, config: Any, state: Any, directory: str, settings: Any
) -> dict[str, Any]:
    """Log-probs with the adapters of a directory, these as they are exported again, and after a step."""
    trainer = filled(groups, config, state, {**LORA, **SMOOTH_ADAM, **settings})
    trainer.load_adapters(directory)
    before = {name: value.clone() for name, value in export_adapters(trainer.chunks, groups)}
    batch = uneven_batch(5)
    batch = batch.with_column("log_probs", batch.columns["rollout_log_probs"])
    log_probs = trainer.compute_log_probs(uneven_batch()).values
    norm = trainer.train_step(batch).grad_norm
    after = {name: value.clone() for name, value in export_adapters(trainer.chunks, groups)}
    return {"log probs": log_probs, "before": before, "after": after, "norm": norm}


def dense_log_probs(groups: ParallelGroups, config: Any, state: Any) -> Tensor:
    return filled(groups, config, state, {}).compute_log_probs(uneven_batch()).values


FAMILIES = {
    "qwen3": ({}, {}),
    "qwen3_moe": (EP2, {}),
    "qwen2": (TP2, SP),
    "glm4": (TP2, SP),
    "glm4_moe": (TP2_EP2, SP),
    "deepseek_v3": (TP2_EP2, SP),
    "gemma3_text": (TP2, SP),
    "gpt_oss": (EP2, {}),
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("qwen3_moe", "gemma3_text") else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_adapters_compute_what_the_merged_model_computes(
    run_ranks: RunRanks, tmp_path: Path, family: str
) -> None:
    config = tiny_models.ALL_FAMILIES[family]()
    sizes, settings = FAMILIES[family]
    state, directory = tiny_models.hf_state_dict(config), str(tmp_path / "adapter")
    (merged,) = run_ranks(write_adapter, 1, config, state, directory)
    # PEFT's formula, on PEFT's names
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = dict(state)
    for name in state:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapters:
            a, b = (adapters.pop(f"{layer}.lora_{half}.weight") for half in "AB")
            assert a.shape == (4, state[name].shape[1])
            expected[name] = state[name] + 8.0 / 4 * b @ a
    assert not adapters, "adapters of layers that the model does not have"
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=2e-6, msg=name)
    (want,) = run_ranks(dense_log_probs, 1, config, expected)
    (base,) = run_ranks(dense_log_probs, 1, config, state)
    assert (want - base).abs().max() > 0.05
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    arguments = config, state, directory
    [one] = run_ranks(adapted, 1, *arguments, {})
    for found in (one, *run_ranks(adapted, 2, *arguments, settings, **sizes)):
        torch.testing.assert_close(found["log probs"], want, rtol=0, atol=1e-5)
        assert found["before"].keys() == written.keys()
        assert all(torch.equal(found["before"][name], written[name]) for name in written)
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-5)
        for name, value in one["after"].items():
            torch.testing.assert_close(found["after"][name], value, rtol=0, atol=1e-6, msg=name)
    assert any((one["after"][name] - value).abs().max() > 1e-3 for name, value in written.items())


@pytest.mark.slow
def test_adapters_on_tensor_and_pipeline_ranks_compute_what_the_merged_model_computes(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    config, settings = tiny_models.ALL_FAMILIES["qwen3_moe"](), {**SP, **PP2}
    state, directory = tiny_models.hf_state_dict(config), str(tmp_path / "adapter")
    (merged,) = run_ranks(write_adapter, 1, config, state, directory)
    (want,) = run_ranks(dense_log_probs, 1, config, merged)
    for found in run_ranks(adapted, 4, config, state, directory, settings, **TP2, **PP2):
        torch.testing.assert_close(found["log probs"], want, rtol=0, atol=1e-5)


def save_with_adapters(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], root: str
) -> list[dict[str, float]]:
    trainer = new_trainer(groups, start, {**PER_TOKEN, **LORA, **settings})
    for _ in range(2):
        trainer.train_step(start.batch)
    trainer.save_checkpoint(root, 2, {})
    return [trainer.train_step(start.batch).metrics for _ in range(2)]


def resume_with_adapters(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], root: str
) -> list[dict[str, float]]:
    trainer = new_trainer(groups, start, {**PER_TOKEN, **LORA, **settings})
    trainer.load_checkpoint(root)
    return [trainer.train_step(start.batch).metrics for _ in range(2)]


def resume_wrongly(groups: ParallelGroups, start: Start, root: str) -> list[str]:
    """What is said to adapters of another base, of another rank, and to a model without."""
    changed = {name: value.clone() for name, value in start.weights.items()}
    changed["model.layers.2.mlp.experts.1.up_proj.weight"][3, 5] += 1e-3
    other = Start(start.family, changed, start.batch)
    said = []
    for first, settings in ((other, LORA), (start, {**LORA, "lora_rank": 2}), (start, {})):
        trainer = new_trainer(groups, first, {**PER_TOKEN, **settings})
        try:
            trainer.load_checkpoint(root)
        except Exception as error:
            said.append(str(error))
    return said


def test_a_checkpoint_holds_adapters_alone_and_resumes_on_any_layout(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    start, root = Start.of("qwen3_moe"), tmp_path / "checkpoints"
    straight = run_ranks(save_with_adapters, 2, start, SHARDED, str(root), **EP2)
    dcp_to_torch_save(root / "step_0000002" / "model", tmp_path / "whole.pt")
    tensors = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all("lora_" in name for name in tensors)
    assert {name.split(".")[0] for name in tensors} == {"lora", "optimizer"}
    again = run_ranks(resume_with_adapters, 2, start, SHARDED, str(root), **EP2)
    assert again == straight, "not the same bits on the same layout"
    moved = run_ranks(resume_with_adapters, 2, start, SP, str(root), **TP2_WHOLE_EXPERTS)
    for name in ("loss", "grad_norm"):
        for mine, theirs in zip(moved[0], straight[0], strict=True):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
    (said,) = run_ranks(resume_wrongly, 1, start, str(root))
    assert "of a base with fingerprint" in said[0]
    assert "adapters of rank 4, here 2; set --lora-rank" in said[1]
    assert "holds adapters, and this run trains all weights; set --lora-rank 4" in said[2]


def test_a_target_that_the_model_lacks_is_an_error_with_those_it_has(run_ranks: RunRanks) -> None:
    config = tiny_models.tiny_glm4()
    settings = {**SMOOTH_ADAM, **LORA, "lora_target": "gate_proj"}
    with pytest.raises(RankError, match="has q_proj, k_proj, v_proj, o_proj, down_proj"):
        run_ranks(filled, 1, config, tiny_models.hf_state_dict(config), settings)
