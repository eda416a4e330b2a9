"""Vocabulary-parallel log-probs on real ranks equal those of one process. Tensors are on the rank's own device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.ragged import Ragged
from tests.parallel.training_jobs import RunRanks

ROWS, COLUMNS = 13, 64
SEQUENCE_PARALLEL = {"sequence_parallel": True}


def seeded(seed: int) -> torch.Generator:
    """A generator on the default device, which `all_claims` sets."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def whole_problem(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = seeded(5)
    logits = (torch.randn(ROWS, COLUMNS, generator=generator) * 4).to(dtype)
    tokens = torch.randint(COLUMNS, (ROWS,), generator=generator)
    keep = torch.rand(ROWS, COLUMNS, generator=generator) < 0.4
    keep[torch.arange(ROWS), tokens] = True
    keep[2, : COLUMNS // 2] = False  # at TP2 the first shard keeps nothing of this row
    tokens[2] = -1  # and it was not sampled: log-probability -inf
    keep[2, -1] = True
    logits[4, 9] = -torch.inf
    tokens[6] = COLUMNS + 3  # outside the vocabulary of every rank
    return {"logits": logits, "tokens": tokens, "keep": keep}


def loss_and_results(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    keep: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        source * 1,
        tokens,
        group=group,
        temperature=0.8,
        entropy_grad=True,
        keep_mask=keep,
        inplace_grad=inplace,
    )
    assert entropy is not None
    usable = torch.isfinite(log_probs)
    weights = torch.linspace(-1, 1, ROWS)
    (log_probs[usable] @ weights[usable] + entropy @ weights.flip(0)).backward()
    assert source.grad is not None
    return log_probs.detach(), entropy.detach(), source.grad


def equal_to_one_process(rank: int, size: int) -> None:
    width = COLUMNS // size
    mine = slice(rank * width, (rank + 1) * width)
    for dtype in (torch.float32, torch.bfloat16):
        whole = whole_problem(dtype)
        for keep in (None, whole["keep"]):
            for inplace in (False, True):
                one = loss_and_results(whole["logits"], whole["tokens"], keep, None, inplace)
                part = loss_and_results(
                    whole["logits"][:, mine].contiguous(),
                    whole["tokens"],
                    None if keep is None else keep[:, mine].contiguous(),
                    dist.group.WORLD,
                    inplace,
                )
                torch.testing.assert_close(part[0], one[0])
                torch.testing.assert_close(part[1], one[1])
                torch.testing.assert_close(part[2], one[2][:, mine])


def kept_ids_equal_one_process_in_two_collectives(rank: int, size: int) -> None:
    whole = whole_problem(torch.float32)
    logits, tokens = whole["logits"], whole["tokens"].clamp(0, COLUMNS - 1)
    keep = whole["keep"].clone()
    keep[torch.arange(ROWS), tokens] = True
    for untruncated in ([0, 5], []):
        keep[untruncated] = False  # rows of the whole vocabulary beside the others
        kept = Ragged(keep.nonzero()[:, 1].int(), keep.sum(1))
        mine = slice(rank * COLUMNS // size, (rank + 1) * COLUMNS // size)
        for options in ({"entropy_grad": True}, {"entropy_grad": True, "entropy_of": "kept"}):
            results = []
            for columns, group in ((logits, None), (logits[:, mine], dist.group.WORLD)):
                source = columns.clone().requires_grad_()
                with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as counted:
                    log_probs, entropy = log_probs_and_entropy(
                        source, tokens, group=group, kept=kept, **options
                    )
                    (log_probs.sum() - 0.5 * entropy.sum()).backward()
                assert counted.call_count == (2 if group is not None else 0)
                results.append((log_probs.detach(), entropy.detach(), source.grad))
            one, part = results
            torch.testing.assert_close(part[:2], one[:2])
            torch.testing.assert_close(part[2], one[2][:, mine])
        keep[untruncated] = whole["keep"][untruncated]
        keep[torch.arange(ROWS), tokens] = True


def products_of_kept_ids_equal_one_process(rank: int, size: int) -> None:
    generator = seeded(3)
    hidden = torch.randn(8, 5, generator=generator)
    weight = torch.randn(COLUMNS, 5, generator=generator)
    tokens = torch.arange(8) * 7
    ids = torch.stack([tokens, (tokens + 1) % COLUMNS, (tokens + 40) % COLUMNS], 1)
    kept = Ragged(ids.sort(1).values.flatten(), [3] * 8)
    with torch.no_grad():
        one, _ = log_probs_and_entropy(hidden @ weight.t(), tokens, kept=kept)
        for hidden_rows, options in ((hidden, {}), (hidden.chunk(size)[rank], SEQUENCE_PARALLEL)):
            found, _ = fused_log_probs_and_entropy(
                hidden_rows,
                weight.chunk(size)[rank],
                tokens,
                kept=kept,
                with_entropy=False,
                group=dist.group.WORLD,
                **options,
            )
            torch.testing.assert_close(found, one)


def two_collectives_forward_none_backward(rank: int, size: int) -> None:
    logits = torch.randn(5, 8, requires_grad=True)
    real = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", side_effect=real) as counted:
        log_probs, entropy = log_probs_and_entropy(
            logits, torch.arange(5), group=dist.group.WORLD, entropy_grad=True
        )
        assert entropy is not None
        assert counted.call_count == 2
        (log_probs.sum() + entropy.sum()).backward()
        assert counted.call_count == 2


def a_nan_row_is_nan_on_every_rank_and_poisons_no_gradient(rank: int, size: int) -> None:
    logits = torch.zeros(3, 8)
    if rank == size - 1:
        logits[1, 2] = torch.nan
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        logits, torch.zeros(3, dtype=torch.int64), group=dist.group.WORLD, entropy_grad=True
    )
    assert entropy is not None
    assert torch.equal(log_probs.isnan(), torch.tensor([False, True, False]))
    (log_probs[[0, 2]].sum() + entropy[[0, 2]].sum()).backward()
    assert logits.grad is not None and torch.equal(logits.grad[1], torch.zeros(8))
    assert torch.isfinite(logits.grad).all()


def no_rows_run_without_a_collective_that_hangs(rank: int, size: int) -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    tokens = torch.zeros(0, dtype=torch.int64)
    log_probs_and_entropy(logits, tokens, group=dist.group.WORLD)[0].sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 8)


def fused_head_equals_one_process(rank: int, size: int) -> None:
    generator = seeded(9)
    rows, columns, width = 16, COLUMNS * 3, 5
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(columns, width, generator=generator)
    tokens = torch.randint(columns, (rows,), generator=generator)
    row_mask = torch.arange(rows) % 4 != 1
    coefficients = torch.linspace(-1, 1, rows)

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, **options: object
    ) -> tuple[torch.Tensor, ...]:
        hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, entropy = fused_log_probs_and_entropy(
            hidden, weight, tokens, row_mask=row_mask, entropy_grad=True, temperature=1.2, **options
        )
        assert entropy is not None
        (log_probs @ coefficients + entropy @ coefficients.flip(0)).backward()
        assert hidden.grad is not None and weight.grad is not None
        return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad

    one = run(hidden, weight)
    part = weight.chunk(size)[rank]
    for budget in (1 << 20, 700):
        options = {"group": dist.group.WORLD, "memory_budget_bytes": budget}
        sharded = run(hidden, part, **options)
        torch.testing.assert_close(sharded[:3], one[:3])
        torch.testing.assert_close(sharded[3], one[3].chunk(size)[rank])
        partial = run(hidden, part, reduce_hidden_grad=False, **options)[2]
        dist.all_reduce(partial)
        torch.testing.assert_close(partial, one[2])
        sequence = run(hidden.chunk(size)[rank], part, sequence_parallel=True, **options)
        torch.testing.assert_close(sequence[:2], one[:2])
        torch.testing.assert_close(sequence[2], one[2].chunk(size)[rank])
        torch.testing.assert_close(sequence[3], one[3].chunk(size)[rank])


def all_claims(groups: ParallelGroups) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rank, size = groups.rank, groups.world_size
    with device:
        equal_to_one_process(rank, size)
        kept_ids_equal_one_process_in_two_collectives(rank, size)
        products_of_kept_ids_equal_one_process(rank, size)
        two_collectives_forward_none_backward(rank, size)
        a_nan_row_is_nan_on_every_rank_and_poisons_no_gradient(rank, size)
        no_rows_run_without_a_collective_that_hangs(rank, size)
        fused_head_equals_one_process(rank, size)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_results_gradients_and_collectives(run_ranks: RunRanks, size: int) -> None:
    run_ranks(all_claims, size)
