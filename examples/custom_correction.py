"""A correction of your own in forty lines: weights that saturate smoothly instead of being clipped.

    python examples/custom_correction.py                                    # what it does to a few ratios
    megatron-tis train --use-tis --custom-tis-function-path examples/custom_correction.py:soft_tis_function
    # slime, on a cluster: --use-tis --custom-tis-function-path examples.custom_correction.soft_tis_function

A hook receives the per-token loss and the log-probs of the three policies, and returns the weighted
loss, the masks (smaller if it rejects tokens) and per-token metrics. It is called for every microbatch
and must not keep state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def soft_tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """weight = 2 sigmoid(train - rollout): 1 at no mismatch, never above 2, and no token is dropped."""
    with torch.no_grad():  # a weight carries no gradient
        log_r = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
        weight = 2 * torch.sigmoid(log_r)
    return pg_loss * weight, loss_masks, {"soft_tis": weight}


if __name__ == "__main__":
    ratios = torch.tensor([0.1, 0.5, 1.0, 2.0, 10.0])
    loss, _, metrics = soft_tis_function(
        None,
        pg_loss=torch.ones(5),
        train_log_probs=[ratios.log()],
        rollout_log_probs=[torch.zeros(5)],
        loss_masks=[torch.ones(5)],
    )
    for ratio, weight in zip(ratios.tolist(), loss.tolist(), strict=True):
        print(f"ratio {ratio:5.1f} -> weight {weight:.3f}")
