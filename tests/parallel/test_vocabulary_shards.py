"""Vocabulary shards on real ranks that do not fit each other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.megatron_backend.parallel_groups import ParallelGroups

pytestmark = pytest.mark.hostile


def messages_of(groups: ParallelGroups) -> list[str]:
    tokens, group = torch.arange(3), dist.group.WORLD
    columns = 4 + groups.rank
    keep = torch.ones(3, 4, dtype=torch.bool)
    keep[1, 1] = groups.rank != 0  # only the first rank holds token 1 and knows
    messages = []
    for call in (
        lambda: log_probs_and_entropy(torch.zeros(3, columns), tokens, group=group),
        lambda: fused_log_probs_and_entropy(
            torch.zeros(3, 2), torch.zeros(columns, 2), tokens, group=group
        ),
        lambda: log_probs_and_entropy(torch.zeros(3, 4), tokens, group=group, keep_mask=keep),
    ):
        try:
            call()
        except (BatchError, ConfigError) as error:
            messages.append(str(error))
    return messages


def test_uneven_shards_and_dropped_tokens_never_pass_on_any_rank(run_ranks) -> None:
    for rank, messages in enumerate(run_ranks(messages_of, 2)):
        uneven = f"shards have 4 to 5 columns, this rank's {4 + rank}"
        assert [uneven in message for message in messages] == [True, True, False]
        assert "token 1 of row 1 has probability 0" in messages[2]
