"""Training runs in one process: a small policy learns to add, an engine with older or coarser weights samples.

The task is the addition of two 8-digit numbers, digit by digit from the right; the reward of a response is its share
of right digits. The policy, a small transformer, is first trained by examples to get about three quarters of the
digits right, so that what follows are the small steps of fine-tuning. Losses, corrections, advantages, log-probs and
the thresholds over a batch are the package's own; what is simulated is the engine: weights that are `staleness`
rollouts old, held in float32, bfloat16 or int8, with its own routes and its own truncated sampling.

All seeds of a run are one stack (`policy`): they share prompts and the stream of random numbers with every other
arm, and nothing else with each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.evidence.arms import Arm
from benchmarks.evidence.engine import SEEDS, Rollout, Setting, decode, numbers, sample
from benchmarks.evidence.policy import LENGTH, NOTHING, StackedAdder
from plugin.config import LossConfig
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.loss import compute_loss
from plugin.loss.hook_chain import batch_declarations, statistics_of
from plugin.loss.interfaces import LossInputs, LossOutputs
from plugin.loss.partial_objective import separable_obstacle
from plugin.ppo_utils.importance_ratio import k3
from plugin.sharding.parallel_context import SINGLE_PROCESS
from plugin.sharding.sequence_shards import SequenceShards

STEPS, WARM_STEPS, EVALUATE_EVERY, EVALUATED = 120, 800, 10, 96
LEARNING_RATE, WARM_LEARNING_RATE = 3e-3, 5e-3
#: Share of digits that are random in the examples: what is left to learn from rewards.
WRONG_EXAMPLES = 0.3


Watcher = Callable[[int, Rollout, Tensor, Tensor], None]


def run(
    arm: Arm, setting: Setting, *, steps: int | None = None, watch: Watcher | None = None
) -> dict[str, Any]:
    """Train all seeds; report reward at the end, over time, and what the method did on the way.

    watch: called with step, rollout, the trainer's log-probs before the step and at its last update
    """
    began, config = time.process_time(), arm.config
    generator = torch.Generator().manual_seed(7)
    policy = StackedAdder(SEEDS, mixture=setting.mixture)
    policy.load_state_dict(warmed_weights(setting.mixture))
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    behind: deque[dict[str, Tensor]] = deque(maxlen=setting.staleness + 1)
    rewards, records = [_evaluate(policy, setting)], []
    for step in range(STEPS if steps is None else steps):
        behind.append({name: value.detach().clone() for name, value in policy.state_dict().items()})
        rollout = sample(behind[0], setting, generator)
        train = None
        if setting.updates > 1 or watch is not None:
            with torch.no_grad():
                train = _log_probs(policy, rollout, setting)
        for index in range(setting.updates):
            part = rollout.part(index, setting.updates)
            old = None if train is None else train.chunk(setting.updates, 1)[index]
            cur = _log_probs(policy, part, setting)
            losses, kept = _losses(config, part, cur, old)
            optimizer.zero_grad()
            losses.sum().backward()
            norms = _clip_gradients(policy)
            optimizer.step()
            records.append(_record(part, cur.detach(), kept, norms))
        if watch is not None:
            assert train is not None
            watch(step, rollout, train, cur.detach())
        if (step + 1) % EVALUATE_EVERY == 0:
            rewards.append(_evaluate(policy, setting))
    row = {
        "arm": arm.name,
        **asdict(setting),
        **_summary(torch.stack(rewards), torch.stack(records)),
    }
    return {**row, "processor_seconds": round(time.process_time() - began, 1)}


def _log_probs(policy: StackedAdder, rollout: Rollout, setting: Setting) -> Tensor:
    """[seeds, samples, LENGTH] of the written digits, by the trainer."""
    routes = (
        rollout.routes.flatten(1, 2)
        if setting.route_replay and rollout.routes is not None
        else None
    )
    logits, _ = policy(rollout.seen, routes=routes)
    mask = rollout.kept.flatten(0, 2) if setting.mask_replay else None
    logs, _ = log_probs_and_entropy(
        logits.flatten(0, 2), rollout.written.flatten(), with_entropy=False, keep_mask=mask
    )
    return logs.view_as(rollout.written)


def _losses(
    config: LossConfig, part: Rollout, cur: Tensor, old: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Per seed [seeds] the mean loss of its tokens and the share of them that was kept."""
    train = cur.detach() if old is None else old
    advantages = part.advantages[:, :, None].expand_as(cur)
    columns = (cur, train, part.log_probs, advantages)
    if not batch_declarations(config):
        outputs = _objective(config, *columns)
        return outputs.total.view(SEEDS, -1).mean(1), outputs.policy.kept.view(
            SEEDS, -1
        ).float().mean(1)
    # A threshold over the batch is that of one seed's batch.
    single = [_objective(config, *(c[seed : seed + 1] for c in columns)) for seed in range(SEEDS)]
    return torch.stack([o.total.mean() for o in single]), torch.stack(
        [o.policy.kept.float().mean() for o in single]
    )


def _objective(
    config: LossConfig, cur: Tensor, train: Tensor, rollout: Tensor, advantages: Tensor
) -> LossOutputs:
    # A token-separable loss cannot tell responses apart; as one response they cost less.
    apart = separable_obstacle(config) is not None
    shards, mask, masks = _shards(cur.numel(), LENGTH if apart else cur.numel())
    from_engine = config.train_log_probs == "rollout"
    inputs = LossInputs(
        mask=mask,
        shards=shards,
        cur_log_probs=cur.flatten(),
        train_log_probs=train.flatten(),
        proximal_log_probs=(rollout if from_engine else train).flatten(),
        rollout_log_probs=rollout.flatten(),
        advantages=advantages.flatten(),
        loss_masks=masks,
    )
    inputs = replace(inputs, statistics=statistics_of(config, inputs))
    return compute_loss(config, inputs, with_metrics=False)


@cache
def _shards(tokens: int, length: int) -> tuple[SequenceShards, Tensor, list[Tensor]]:
    lengths, mask = [length] * (tokens // length), torch.ones(tokens, dtype=torch.bool)
    shards = SequenceShards.of(lengths, lengths, torch.device("cpu"), SINGLE_PROCESS)
    return shards, mask, list(mask.split(length))


def _clip_gradients(policy: nn.Module) -> Tensor:
    """Bound every seed's gradient to norm 1; one that is not finite becomes 0. Norms before [seeds]."""
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    scale = torch.where(norms.isfinite(), 1 / norms.clamp(min=1.0), 0.0)
    for gradient in gradients:
        finite = gradient if bool(norms.isfinite().all()) else gradient.nan_to_num(0, 0, 0)
        gradient.copy_(finite * scale.view(-1, *[1] * (gradient.dim() - 1)))
    return norms


def _record(part: Rollout, cur: Tensor, kept: Tensor, norms: Tensor) -> Tensor:
    """[seeds, 5]: gradient norm, ESS / N, kept share, KL of the engine from the policy, reward of the rollout."""
    log_r = (cur - part.log_probs).flatten(1).clamp(-20, 20)
    ratio = log_r.exp()
    ess = ratio.sum(1).square() / (ratio.shape[1] * ratio.square().sum(1))
    return torch.stack([norms, ess, kept.detach(), k3(-log_r).mean(1), part.rewards.mean(1)], 1)


def _summary(rewards: Tensor, records: Tensor) -> dict[str, Any]:
    """Lists by seed, and curves as means over seeds; rewards [evaluations, seeds], records [updates, seeds, 5]."""
    norms, ess, kept, kl, _ = records.unbind(2)

    def curve(values: Tensor) -> list[float]:
        parts = values.mean(1).chunk(len(rewards) - 1) if len(rewards) > 1 else [values]
        return [float(f"{float(part.mean()):.3g}") for part in parts]

    return {
        "final": _rounded(rewards[-1]),
        "area": _rounded(rewards.mean(0)),
        "largest_gradient_norm": _rounded(norms.amax(0)),
        "ess_share": _rounded(ess.mean(0)),
        "kept_share": _rounded(kept.mean(0)),
        "rewards": [_rounded(column, 3) for column in rewards.t()],
        "kept_curve": curve(kept),
        "kl_curve": curve(kl),
        "ess_curve": curve(ess),
    }


def _rounded(values: Tensor, digits: int = 4) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


@cache
def warmed_weights(mixture: bool) -> dict[str, Tensor]:
    """The policies after training by examples: where every run starts."""
    torch.set_num_threads(1)
    torch.manual_seed(1000)
    generator = torch.Generator().manual_seed(1000)
    policy = StackedAdder(SEEDS, mixture=mixture)
    optimizer = torch.optim.Adam(policy.parameters(), lr=WARM_LEARNING_RATE)
    for _ in range(WARM_STEPS):
        digits, right = numbers(32, generator)
        wrong = torch.rand(right.shape, generator=generator) < WRONG_EXAMPLES
        total = torch.where(wrong, torch.randint(10, right.shape, generator=generator), right)
        written = torch.cat([torch.full_like(total[:, :, :1], NOTHING), total[:, :, :-1]], 2)
        logits, _ = policy(torch.cat([digits, written[..., None]], -1))
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), total.flatten())
        optimizer.zero_grad()
        (SEEDS * loss).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


@torch.no_grad()
def _evaluate(policy: StackedAdder, setting: Setting) -> Tensor:
    """[seeds] share of right digits, sampled as the engine samples, on prompts that are the same throughout a run."""
    generator = torch.Generator().manual_seed(99)
    digits, total = numbers(EVALUATED, generator)
    return decode(policy, digits, total, setting, generator).rewards.mean(1)
