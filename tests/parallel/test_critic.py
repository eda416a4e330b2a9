"""The value model: the same values, losses and steps on every layout, and after a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.megatron_backend.critic import CriticTrainer, ValueHead
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.tiny_models import hf_model, hf_state_dict, tiny_qwen3
from tests.parallel.training_jobs import SMOOTH_ADAM, uneven_batch

TP, PP, CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
SP = {"sequence_parallel": True, TP: 2}
# name -> (ranks, parallel sizes, settings, layout of rows)
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any], Any]] = {
    "small microbatches": (1, {}, {"micro_batch_size": 2}, "padded"),
    "TP2+SP": (2, {TP: 2}, SP, "packed"),
    "PP2": (2, {PP: 2}, {"micro_batch_size": 3}, "packed"),
    "CP2": (2, {CP: 2}, {"micro_batch_size": 4}, "packed"),
    # 9 samples on 2 ranks, one at a time: one rank fills up with a padding microbatch
    "DP2": (2, {}, {"micro_batch_size": 1}, "packed"),
    "DP2, token mean": (2, {}, {"micro_batch_size": 1, "calculate_per_token_loss": True}, "padded"),
}
CONFIG = tiny_qwen3(tie_word_embeddings=True)


def critic_batch() -> RolloutBatch:
    batch = uneven_batch()
    masks = batch.columns["loss_masks"]
    generator = torch.Generator().manual_seed(5)
    for name in ("values", "returns"):
        batch = batch.with_column(
            name, masks.like(torch.rand(masks.values.shape, generator=generator))
        )
    return batch


def critic(
    groups: ParallelGroups, state: dict[str, Tensor], settings: dict[str, Any], layout: Any
) -> CriticTrainer:
    config = TrainerConfig(**(SMOOTH_ADAM | {"lr": 0.005} | settings))
    trainer = CriticTrainer(config, CONFIG, groups, state, value_clip=0.4, layout=layout)
    for chunk in trainer.chunks:
        head = getattr(unwrap(chunk), "output_layer", None)
        if isinstance(head, ValueHead):
            # Not 0: every position would have one value.
            with torch.no_grad():
                head.weight.copy_(head_weight())
    trainer.optimizer.optimizer.reload_model_params()  # type: ignore[union-attr]
    return trainer


def head_weight() -> Tensor:
    return torch.randn(1, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2)) * 0.1


def two_steps_on_rank(
    groups: ParallelGroups, state: dict[str, Tensor], settings: dict[str, Any], layout: Any
) -> dict[str, Any]:
    trainer, batch = critic(groups, state, settings, layout), critic_batch()
    before = trainer.compute_values(batch)
    results = [trainer.train_critic(batch) for _ in range(2)]
    assert all(result.updated for result in results)
    return {
        "before": before.values,
        "metrics": [result.metrics for result in results],
        "after": trainer.compute_values(batch).values,
    }


_one_process: dict[str, dict[str, Any]] = {}


def one_process(run_ranks: Any, per_token: bool) -> dict[str, Any]:
    settings = {"micro_batch_size": 64, "calculate_per_token_loss": per_token}
    if str(per_token) not in _one_process:
        (_one_process[str(per_token)],) = run_ranks(
            two_steps_on_rank, 1, hf_state_dict(CONFIG), settings, "packed"
        )
    return _one_process[str(per_token)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("TP2+SP", "DP2") else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_values_losses_and_steps_do_not_depend_on_the_layout(run_ranks: Any, name: str) -> None:
    ranks, sizes, settings, layout = LAYOUTS[name]
    want = one_process(run_ranks, settings.get("calculate_per_token_loss", False))
    mask = critic_batch().columns["loss_masks"].values != 0
    for got in run_ranks(
        two_steps_on_rank, ranks, hf_state_dict(CONFIG), settings, layout, **sizes
    ):
        for when in ("before", "after"):
            torch.testing.assert_close(got[when], want[when], rtol=0, atol=1e-5)
        for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    assert (want["after"] - want["before"])[mask].abs().max() > 1e-3, "the steps changed nothing"


def test_a_value_is_said_before_its_token_is_known(run_ranks: Any) -> None:
    batch, model = critic_batch(), hf_model(CONFIG)
    expected = []
    for tokens, response in zip(
        batch.columns["unconcat_tokens"], batch.columns["response_lengths"].tolist(), strict=True
    ):
        with torch.no_grad():
            hidden = model.model(tokens[None]).last_hidden_state[0]
        # the row before each response token
        expected.append((hidden @ head_weight()[0])[-response - 1 : -1])
    got = one_process(run_ranks, False)["before"]
    torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=1e-4)


def test_a_step_goes_towards_the_returns_by_the_clipped_loss(run_ranks: Any) -> None:
    batch, want = critic_batch(), one_process(run_ranks, True)
    columns = batch.columns
    mask = columns["loss_masks"].values != 0
    said, old, came = (
        x[mask].double()
        for x in (want["before"], columns["values"].values, columns["returns"].values)
    )
    near = old + (said - old).clamp(-0.4, 0.4)
    loss = torch.maximum((said - came).square(), (near - came).square()).mean() / 2
    assert want["metrics"][0]["critic/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert want["metrics"][1]["critic/loss"] < want["metrics"][0]["critic/loss"]


def save_on_rank(groups: ParallelGroups, state: dict[str, Tensor], directory: str) -> Tensor:
    trainer, batch = critic(groups, state, SP, "packed"), critic_batch()
    trainer.train_critic(batch)
    trainer.save_checkpoint(directory, 1, {})
    trainer.train_critic(batch)
    return trainer.compute_values(batch).values


def load_on_rank(groups: ParallelGroups, state: dict[str, Tensor], directory: str) -> Tensor:
    trainer, batch = critic(groups, state, {}, "packed"), critic_batch()
    trainer.load_checkpoint(directory)
    trainer.train_critic(batch)
    return trainer.compute_values(batch).values


def test_a_critic_resumes_on_another_layout_with_its_optimizer(
    run_ranks: Any, tmp_path: Path
) -> None:
    arguments = hf_state_dict(CONFIG), str(tmp_path)
    straight = run_ranks(save_on_rank, 2, *arguments, **{TP: 2})[0]
    for resumed in run_ranks(load_on_rank, 2, *arguments, **{PP: 2}):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=1e-5)
