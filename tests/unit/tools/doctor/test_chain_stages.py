"""The table of a chain's stages, and what it is made of."""

from __future__ import annotations

import torch

from plugin.config import LossConfig
from plugin.loss import compute_loss, loss_inputs
from plugin.tools.doctor.run_diagnosis import chain_lines, chain_rows
from tests.unit.loss.sample_batches import logs

HOOK = "plugin.ppo_utils."


def test_every_stage_says_what_it_removed_and_weighted() -> None:
    # train / rollout = 0.1, 1, 1.5, 4. rejection keeps 0.5 to 2: the first and the last go; of the rest TIS (cap 1.2)
    # changes 1.5 -> 1.2 and leaves the 1.
    config = LossConfig(
        use_tis=True,
        tis_clip=1.2,
        custom_tis_function_path=f"{HOOK}rejection_function,{HOOK}vanilla_tis_function",
    )
    batch = {
        "total_lengths": [5],
        "response_lengths": [4],
        "loss_masks": [torch.ones(4, dtype=torch.int64)],
        "advantages": [torch.tensor([1.0, 0.0, -1.0, 1.0])],  # a loss of 0 is weighted too
        "rollout_log_probs": [torch.full((4,), -3.0)],
        "log_probs": [logs(0.1, 1.0, 1.5, 4.0) - 3.0],
    }
    cur = torch.full((4,), -3.0).requires_grad_()
    outputs = compute_loss(config, loss_inputs(config, batch, cur), with_weights=True)
    found = {n: m.values.tolist() for n, m in outputs.metrics.items() if n.startswith("chain/")}
    assert found["chain/1_rejection/removed"] == [1.0, 0.0, 0.0, 1.0]
    assert found["chain/1_rejection/weighted"] == [0.0] * 4
    assert found["chain/1_rejection/weight"] == [0.0, 1.0, 1.0, 0.0]
    assert found["chain/2_vanilla_tis/removed"] == [0.0] * 4
    assert found["chain/2_vanilla_tis/weighted"] == [0.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(
        torch.tensor(found["chain/2_vanilla_tis/weight"]), torch.tensor([0.0, 1.0, 1.2, 0.0])
    )


def test_a_single_correction_has_no_table() -> None:
    assert chain_rows({"loss": 1.0, "tis": 1.0}) == []


def test_the_table_is_in_the_order_of_the_chain() -> None:
    step = {
        "chain/10_veto/removed": 0.5,
        "chain/10_veto/weighted": 0.0,
        "chain/10_veto/weight": 0.5,
        "chain/2_vanilla_tis/removed": 0.0,
        "chain/2_vanilla_tis/weighted": 0.25,
        "chain/2_vanilla_tis/weight": 1.0125,
        "loss": 3.0,
    }
    lines = chain_lines(chain_rows(step))
    assert lines[1].split() == ["2", "vanilla_tis", "0.00%", "25.00%", "1.0125"]
    assert lines[2].split() == ["10", "veto", "50.00%", "0.00%", "0.5000"]
