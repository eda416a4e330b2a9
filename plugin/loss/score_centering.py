"""Score centering: cancels the drift that sampling from another policy adds to an update.

At one position, let p be the current policy, q the one that sampled, s(v) = grad log p(v) the score
of token v, and w(v) what the loss and its corrections multiply the score of v with. The expected
update of a policy gradient is

    E_q[A w s] = E_q[A] E_q[w s] + Cov_q(A, w s)

On-policy the first term is 0. Where p and q differ it moves the policy whatever the advantages say
about the choice of this token. The mean of w s is known without sampling, so it is subtracted:

    loss + A * sum over v of sg(q(v) w(v)) log p(v)

Of q only the head H is known, its likeliest ids. Outside of H it is taken for rho p, the current
policy's tail with the sampler's mass. As the scores have mean 0 under p, the tail becomes a sum
over H, too:

    loss + A * sum over H of sg(q w - rho w(tail) p) log p,    rho = (1 - q(H)) / (1 - p(H))

w(v) is not written down a second time: the policy loss and the token-separable corrections are
evaluated on every id of the head as if it had been sampled. What looks at more than one token, such
as a mask of whole sequences, is no weight of a token but a part of the advantage: it multiplies the
loss of the position and the term above alike.

Reference: Marek and Ryabinin 2026, "Score Centering Stabilizes Off-policy Reinforcement Learning",
arXiv 2609.20807, by the descriptions of miles, slime and NeMo-RL, which agree; the paper itself was
not read. From these: both tails have at least the mass 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.loss.hook_chain import HookChain, hook_chain
from plugin.loss.inputs import token_place, topk_columns
from plugin.loss.interfaces import Head, LossInputs
from plugin.loss.policy_losses import resolve_policy_loss
from plugin.sharding.parallel_context import SINGLE_PROCESS, use_parallel_context
from plugin.sharding.sequence_shards import SequenceShards
from plugin.vocabulary_ids import HEAD_IDS, HEAD_LOG_PROBS

#: Least mass of either tail: float32 log-probs are not more precise.
LEAST_TAIL = 1e-6


class RolloutHead(NamedTuple):
    """The sampler's likeliest ids [T, k] int64 of the local tokens, and their log-probs.

    An id below 0 is none.
    """

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(
        cls, config: LossConfig, batch: Mapping[str, Any], shards: SequenceShards
    ) -> RolloutHead | None:
        """The head of a batch, or None where the loss uses none."""
        if not config.score_centering_topk:
            return None
        config.require_head({name for name, values in batch.items() if values is not None})
        ids, log_probs = topk_columns(batch, (HEAD_IDS, HEAD_LOG_PROBS), shards)
        return cls(ids.long(), log_probs.float())

    def check(self, mask: Tensor, shards: SequenceShards) -> None:
        """Raise a `BatchError` for the first unmasked token with a value that is not a log-prob."""
        sound = (self.ids < 0) | ((self.log_probs > -1e4) & (self.log_probs < 0.1))
        bad = mask & ~(sound.all(1) & (self.ids >= 0).any(1))
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            sample, position = token_place(token, shards)
            raise BatchError(
                f"{HEAD_LOG_PROBS} are {self.log_probs[token].tolist()} of the ids "
                f"{self.ids[token].tolist()} at sample {sample}, position {position}, where the "
                "loss mask is 1; they must be log-probabilities of at least one id. Mask the token "
                "or repair the engine"
            )

    def at_policy(self, cur: Tensor, mask: Tensor) -> Head:
        """With the current log-probs [T, k] of the ids; nothing masked or absent stays."""
        found = mask[:, None] & (self.ids >= 0)
        return Head(torch.where(found, cur, 0.0), torch.where(found, self.log_probs, 0.0), found)


class Tails(NamedTuple):
    """Masses [T] float64 of the head under q and p, and rho, the ratio of what they leave."""

    rollout_mass: Tensor
    cur_mass: Tensor
    ratio: Tensor

    @classmethod
    def of(cls, head: Head) -> Tails:
        """Of a head [T, k]; without any id both masses are 0 and the ratio is 1."""
        q, p = (probabilities(values, head.found).sum(1) for values in (head.rollout, head.cur))
        tails = [(1.0 - mass).clamp(min=LEAST_TAIL) for mass in (q, p)]
        return cls(q, p, tails[0] / tails[1])


class Centering(NamedTuple):
    """What is added to the loss of every token [T], and its metrics [T]."""

    loss: Tensor
    metrics: dict[str, Tensor]


def probabilities(log_probs: Tensor, found: Tensor) -> Tensor:
    """[T, k] float64 without gradient, 0 where there is no id."""
    return torch.where(found, log_probs.detach().double(), -torch.inf).exp()


def centering_term(head: Head, tails: Tails, weights: Tensor, factor: Tensor) -> Centering:
    """A * sum over H of sg(q w - rho w(tail) p) log p [T], with gradient through log p.

    weights: [T, k + 1] A w of every id of the head and of the tail; factor: [T] of both
    """
    q, p = (probabilities(values, head.found) for values in (head.rollout, head.cur))
    of_head, of_tail = weights[:, :-1].double(), weights[:, -1:].double()
    coefficients = factor.double()[:, None] * (q * of_head - tails.ratio[:, None] * of_tail * p)
    coefficients = torch.where(head.found, coefficients, 0.0)
    # Their log-probs are 0 where there is no id.
    loss = (coefficients.to(head.cur.dtype) * head.cur).sum(1)
    metrics = {
        "score_centering/head_mass": tails.rollout_mass,
        "score_centering/cur_head_mass": tails.cur_mass,
        "score_centering/tail_ratio": tails.ratio,
        "score_centering/size": coefficients.abs().sum(1),
    }
    return Centering(loss, {name: values.float() for name, values in metrics.items()})


def score_centering(inputs: LossInputs, config: LossConfig, args: Any) -> Centering:
    """The term of every token [T], 0 where masked.

    args: the namespace that hooks receive
    """
    head = inputs.head
    if head is None:
        raise ConfigError(
            f"--score-centering-topk is {config.score_centering_topk} and the caller of the loss "
            "gives no log-probs of the sampler's likeliest ids; set it to 0 here"
        )
    tails = Tails.of(head)
    chain = hook_chain(config, args) if config.use_tis else None
    if chain is not None:
        inputs = chain.with_statistics(args, inputs)
    weights = _weights(inputs, head, tails, config, args, chain)
    factor = inputs.mask.float()
    if chain is not None:
        factor = factor * chain.weights_of_others(args, inputs)
    return centering_term(head, tails, weights, factor)


def _weights(
    inputs: LossInputs,
    head: Head,
    tails: Tails,
    config: LossConfig,
    args: Any,
    chain: HookChain | None,
) -> Tensor:
    """[T, k + 1]: A w of every id of the head and of a token of the tail, 0 where masked.

    -d loss / d log p of the policy loss, each id in place of the sampled token.
    """
    candidates = _candidates(inputs, head, tails, config)
    cur = candidates.cur_log_probs
    # One process: every rank has its own tokens, and what is separable does not communicate.
    with torch.enable_grad(), use_parallel_context(SINGLE_PROCESS):
        term = resolve_policy_loss(config.policy_loss)(candidates, config)
        (slope,) = torch.autograd.grad(term.loss.sum(), cur)
        weights = -torch.where(candidates.mask, slope, 0.0)
        if chain is not None:
            weights = weights * chain.weights_of_tokens(args, candidates)
    return weights.view(head.cur.shape[0], head.cur.shape[1] + 1)


def _candidates(inputs: LossInputs, head: Head, tails: Tails, config: LossConfig) -> LossInputs:
    """All ids of all heads and one token of each tail, as the tokens of one sample.

    The tail's ratio is 1 / rho. Losses that look at probabilities see one that no token of the
    tail exceeds: the least likely of the head, or all of the tail.
    """
    least = torch.where(head.found, head.rollout.double(), torch.inf).min(1).values
    left = (1.0 - tails.rollout_mass).clamp(min=LEAST_TAIL).log()
    rollout_tail = torch.minimum(least, left)
    rollout_tail = torch.where(inputs.mask, rollout_tail, 0.0)
    cur_tail = torch.where(inputs.mask, rollout_tail - tails.ratio.log(), 0.0)
    rollout = torch.cat([head.rollout, rollout_tail[:, None].float()], dim=1).flatten()
    cur = torch.cat([head.cur.detach(), cur_tail[:, None].float()], dim=1).flatten()
    mask = torch.cat([head.found, inputs.mask[:, None]], dim=1)
    advantages = torch.where(mask, inputs.advantages[:, None], 0.0).flatten()
    count = [mask.numel()]
    # On the first update the old policy is the current one.
    proximal = rollout if config.train_log_probs == "rollout" else cur
    return LossInputs(
        mask=mask.flatten(),
        shards=SequenceShards.of(count, count, cur.device, SINGLE_PROCESS),
        cur_log_probs=cur.requires_grad_(),
        train_log_probs=cur.detach(),
        advantages=advantages,
        loss_masks=[mask.flatten().long()],
        rollout_log_probs=rollout,
        proximal_log_probs=proximal.detach(),
        statistics=inputs.statistics,
    )
