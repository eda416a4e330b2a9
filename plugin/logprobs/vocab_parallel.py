"""Log-probability of the sampled tokens and entropy of the policy, from vocabulary-parallel logits.

The logits are read once in the forward pass, and read and written once in the backward pass;
between the two only a few numbers per row are kept. Sharded over `n` ranks this takes two
collectives of `[T]` and `[2 or 3, T]` numbers forward, and none backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.row_gradients import BlockGradients, RowSettings, summarize_rows
from plugin.logprobs.row_ids import EntropyOf
from plugin.logprobs.vocab_shards import group_size
from plugin.ragged import Ragged

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    inplace_grad: bool = False,
    keep_mask: torch.Tensor | None = None,
    kept: Ragged | None = None,
    entropy_of: EntropyOf = "full",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each row's token and entropy of each row of `softmax(logits / temperature)`.

    Args:
        logits: `[T, V/tp]` float32, bfloat16 or float16; this rank's columns of the vocabulary.
            Never changed by the forward pass.
        tokens: `[T]` int64 ids in the whole vocabulary. Any other id (padding) has log-probability
            -inf; it is never an index error.
        group: ranks over which the vocabulary is sharded, in order of the columns and in equal
            parts; None if it is not.
        temperature: divides the logits.
        with_entropy: also return the entropy; it carries a gradient only with `entropy_grad`.
        inplace_grad: the backward pass overwrites the logits with their gradient and so allocates
            nothing. Only for a caller that owns the logits and does not need them any more; a
            second backward pass raises.
        keep_mask: bool `[T, V/tp]`; the distribution is renormalized over the columns that are True
            (top-k, top-p). A token that is not kept is a `BatchError` on every rank: it cannot have
            been sampled. Give rows that were not sampled the id -1.
        kept: the same in compressed rows, at a cost that grows with the kept ids: one entry per
            row, its ids in the whole vocabulary, each once; an empty entry keeps all. A token that
            is not kept has log-probability -inf.
        entropy_of: with `kept`, the distribution whose entropy is returned: full or kept.

    Returns:
        `log_probs` `[T]` float32 and `entropy` `[T]` float32, or None without `with_entropy`.

    All arithmetic is float32. A row whose incoming gradient is exactly 0 gets a gradient of exactly
    0, also when its logits hold NaN or inf. A row that holds only -inf has no distribution: its
    log-prob and its entropy are NaN.
    """
    if keep_mask is not None:
        if kept is not None:
            raise ConfigError("kept and keep_mask both truncate the distribution; pass one of them")
        if keep_mask.shape != logits.shape or keep_mask.dtype != torch.bool:
            raise BatchError(
                f"keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}; it must be bool "
                f"{list(logits.shape)}, like the logits. Slice it to this rank's columns of the "
                "vocabulary."
            )
        logits = logits.masked_fill(~keep_mask, -torch.inf)
    log_probs, entropy, _ = log_probs_of_ids(
        *(logits, tokens, None),
        group=group,
        temperature=temperature,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        inplace_grad=inplace_grad,
        kept=kept,
        entropy_of=entropy_of,
    )
    if keep_mask is not None:
        _require_kept(log_probs, tokens, logits.shape[1] * group_size(group))
    return log_probs, entropy


def log_probs_of_ids(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor | None,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    inplace_grad: bool = False,
    kept: Ragged | None = None,
    entropy_of: EntropyOf = "full",
    ids_of: EntropyOf = "full",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`log_probs_and_entropy`, and the log-probs `[T, k]` of further ids of every row.

    ids: `[T, k]` in the whole vocabulary, different ones in a row; the token may be among them.
        None = no further ids. An id outside the vocabulary, such as -1, may be there several times;
        its log-prob means nothing and must get no gradient.
    ids_of: with `kept`, the distribution that their log-probs are of: full, also where the token's
        is truncated, or kept, which then has to hold them
    The rest is as there; one more collective of `[T, k]` numbers where the vocabulary is sharded.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype not in FLOAT_DTYPES:
        raise BatchError(
            f"logits are {logits.dtype} {list(logits.shape)}; they must be [T, V/tp] with V/tp > 0 "
            "and float32, bfloat16 or float16. Flatten batch and sequence dimensions first."
        )
    if tokens.shape != logits.shape[:1] or tokens.dtype != torch.int64:
        raise BatchError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}; they must be int64 "
            f"[{logits.shape[0]}], one per row of the logits. Drop the first token and the last "
            "row of logits of every sample."
        )
    check_settings(temperature, with_entropy, entropy_grad)
    # Kernels write whole rows: strided rows, or rows that share memory, are copied.
    overlapping = logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]
    if logits.stride(-1) != 1 or overlapping:
        logits = logits.contiguous()
    settings = RowSettings(group, 1.0 / temperature, with_entropy, entropy_grad, entropy_of, ids_of)
    ids = None if ids is None else ids.to(tokens.device)
    return _LogProbsAndEntropy.apply(logits, tokens, kept, ids, settings, inplace_grad)


def at_rows(ids: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """`[count, k]`: the ids `[n, k]` at `rows`, 0 in the other rows, which are not read."""
    return ids.new_zeros(count, ids.shape[1]).index_copy_(0, rows, ids)


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        kept: Ragged | None,
        ids: torch.Tensor | None,
        settings: RowSettings,
        inplace_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        log_probs, entropy, id_log_probs, state = summarize_rows(
            logits, tokens, kept, ids, settings
        )
        ctx.settings, ctx.inplace_grad, ctx.consumed = settings, inplace_grad, False
        ctx.set_materialize_grads(False)
        ctx.state = state.for_backward(settings.entropy_grad)
        ctx.save_for_backward(logits)
        if entropy is not None and not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, id_log_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        grad_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        if ctx.consumed:
            raise ConfigError(
                "second backward pass through log_probs_and_entropy(inplace_grad=True): the first "
                "one replaced the logits by their gradient. Call it with inplace_grad=False to "
                "use the graph twice."
            )
        (logits,) = ctx.saved_tensors
        out = logits.detach() if ctx.inplace_grad else torch.empty_like(logits)
        grads = (grad_log_probs, grad_entropy, grad_ids)
        BlockGradients.of(ctx.state, *grads, ctx.settings).write(logits, out)
        if ctx.inplace_grad:
            ctx.consumed = True
            # A kernel may write through a raw pointer, which autograd does not see; any other
            # operation that saved these logits must fail its version check rather than read a
            # gradient.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None, None


def _require_kept(log_probs: torch.Tensor, tokens: torch.Tensor, vocabulary: int) -> None:
    """Raise on every rank of the group, which all know the joined log-probs `[T]`."""
    dropped = (log_probs == -torch.inf) & (tokens >= 0) & (tokens < vocabulary)
    if bool(dropped.any()):
        row = int(dropped.nonzero()[0])
        raise BatchError(
            f"token {int(tokens[row])} of row {row} has probability 0 under keep_mask; a sampled "
            "token is always kept. Keep it in the mask, or give a row that was not sampled the id "
            "-1"
        )


def check_settings(temperature: float, with_entropy: bool, entropy_grad: bool) -> None:
    """Refuse a temperature that is not positive, or the gradient of an entropy not requested."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature is {temperature}; it must be positive and finite. Log-probs of greedily "
            "sampled tokens are those of temperature 1."
        )
    if entropy_grad and not with_entropy:
        raise ConfigError(
            "entropy_grad=True with with_entropy=False: there is no entropy to differentiate. "
            "Pass with_entropy=True."
        )
