"""The loss of a microbatch reads nothing back from the device, so that a GPU never waits for the host.

Counted through a dispatch mode: on CUDA each of these operations would stop the host until the device is done.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plugin.config import LossConfig
from plugin.loss import policy_loss_function
from plugin.loss.normalization import token_weights, weighted_sum
from plugin.sharding.sequence_shards import SequenceShards

SYNCHRONIZING = (
    "_local_scalar_dense",  # .item(), float(), bool(), .tolist()
    "nonzero",  # its result's shape depends on values; also indexing with a bool mask
    "masked_select",
    "unique",
)


class SyncCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.split(".")[0] in SYNCHRONIZING or (name == "index" and _has_bool_index(args)):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _has_bool_index(args: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def batch_and_logits() -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    totals, responses, vocab = [9, 5], [6, 3], 17

    def near(count: int) -> torch.Tensor:
        return -2.8 + 0.1 * torch.rand(count, generator=generator)

    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.randint(0, vocab, (t,), generator=generator) for t in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": [torch.tensor([1, 1, 0, 1, 1, 1]), torch.tensor([1, 0, 1])],
        "advantages": [torch.randn(r, generator=generator) for r in responses],
    }
    for name in ("rollout_log_probs", "log_probs", "ref_log_probs"):
        batch[name] = [near(r) for r in responses]
    return batch, torch.randn(1, 14, vocab, generator=generator).mul_(0.1).requires_grad_()


CHAIN = ",".join(
    f"plugin.ppo_utils.{name}_function"
    for name in (
        "vanilla_tis",
        "icepop",
        "sequence_tis",
        "geometric_mask",
        "rejection",
        "veto",
        "opsm",
        "dppo_tv_mask",
    )
)
SETTINGS = {
    "ppo with every correction": {"use_tis": True, "custom_tis_function_path": CHAIN},
    "reinforce with off-policy IS": {
        "policy_loss": "reinforce",
        "use_tis": True,
        "custom_tis_function_path": "plugin.ppo_utils.off_policy_is_function",
    },
    **{
        name: {"policy_loss": name}
        for name in ("cispo", "gspo", "icepop", "dppo_tv", "dppo", "ipo_kl", "sapo")
    },
}


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept ids"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_microbatch_does_not_synchronize_with_the_host(name: str, kept: bool) -> None:
    config = LossConfig(
        **SETTINGS[name],
        validate_batch="never",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        use_rollout_kl_loss=True,
        rollout_kl_loss_coef=0.1,
        entropy_coef=0.01,
    )
    batch, logits = batch_and_logits()
    if kept:
        batch["rollout_kept_counts"] = [torch.full((r,), 3) for r in batch["response_lengths"]]
        batch["rollout_kept_ids"] = [torch.arange(3).repeat(r) for r in batch["response_lengths"]]
        for ids, r in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
            ids[-r:] %= 3
    shards = SequenceShards.of(batch["total_lengths"], batch["response_lengths"], logits.device)
    mask = shards.local_mask(batch["loss_masks"])
    reducer = weighted_sum(token_weights(shards, mask, batch["loss_masks"], per_token=False))
    policy_loss_function(
        config, batch, logits, reducer
    )  # the first call of a hook checks its gradient
    with SyncCounter() as counter:
        loss, _ = policy_loss_function(config, batch, logits, reducer)
        loss.backward()
    assert counter.seen == []


def test_the_counter_sees_a_synchronization() -> None:
    with SyncCounter() as counter:
        values = torch.ones(3)
        float(values.sum())
        values[values > 0]
    assert counter.seen == ["_local_scalar_dense", "index"]
