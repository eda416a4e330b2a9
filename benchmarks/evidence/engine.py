"""The simulated engine: it holds weights of some age and precision, samples as it likes, and reports what it did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.evidence.policy import LENGTH, NOTHING, Cache, StackedAdder, engine_weights
from plugin.ppo_utils import grpo_advantages

SEEDS, PROMPTS, GROUP = 5, 16, 8


@dataclass(frozen=True)
class Setting:
    """Where the engine differs from the trainer.

    staleness: rollouts between the engine's weights and the trainer's; updates: on each rollout, one minibatch each
    top_p: below 1 the engine samples from the nucleus and reports log-probs of it; mask_replay: the trainer's
    log-probs are then of the same ids; mixture: a model with experts; route_replay: the trainer takes the engine's
    """

    staleness: int = 0
    engine: str = "float32"
    updates: int = 1
    top_p: float = 1.0
    mask_replay: bool = False
    mixture: bool = False
    route_replay: bool = False


@dataclass
class Rollout:
    """What the engine reports, [seeds, samples, ...]; `advantages` [seeds, samples]."""

    seen: Tensor
    written: Tensor
    log_probs: Tensor
    kept: Tensor
    routes: Tensor | None
    rewards: Tensor
    advantages: Tensor

    def part(self, index: int, parts: int) -> Rollout:
        """Minibatch `index` of `parts`: whole groups."""
        size = self.seen.shape[1] // parts
        rows = slice(index * size, (index + 1) * size)
        return Rollout(**{k: None if v is None else v[:, rows] for k, v in vars(self).items()})


def sample(weights: dict[str, Tensor], setting: Setting, generator: torch.Generator) -> Rollout:
    """GROUP responses to each of PROMPTS prompts, by the engine that holds these weights."""
    digits, total = numbers(PROMPTS, generator)
    digits, total = digits.repeat_interleave(GROUP, 1), total.repeat_interleave(GROUP, 1)
    engine = StackedAdder(SEEDS, mixture=setting.mixture)
    held = engine_weights(weights, setting.engine)
    engine.to(next(iter(held.values())).dtype).load_state_dict(held)
    return decode(engine, digits, total, setting, generator)


@torch.no_grad()
def decode(
    engine: StackedAdder,
    digits: Tensor,
    total: Tensor,
    setting: Setting,
    generator: torch.Generator,
) -> Rollout:
    cache, last = Cache(), torch.full_like(total[:, :, 0], NOTHING)
    seen, written, log_probs, kept, routes = [], [], [], [], []
    for place in range(LENGTH):
        seen.append(torch.cat([digits[:, :, place], last[:, :, None]], -1))
        logits, taken = engine(seen[-1][:, :, None], cache)
        logs, inside = _nucleus(logits[:, :, 0].float().log_softmax(-1), setting.top_p)
        last = torch.multinomial(logs.exp().flatten(0, 1), 1, generator=generator).view_as(last)
        written.append(last)
        log_probs.append(logs.gather(-1, last[:, :, None])[:, :, 0])
        kept.append(inside)
        routes.append(taken)
    answers = torch.stack(written, 2)
    rewards = (answers == total).float().mean(2)
    groups = torch.arange(rewards.numel()) // GROUP
    advantages = grpo_advantages(rewards.flatten(), groups).view_as(rewards)
    experts = None if routes[0] is None else torch.stack(routes, 2)
    return Rollout(
        torch.stack(seen, 2),
        answers,
        torch.stack(log_probs, 2),
        torch.stack(kept, 2),
        experts,
        rewards,
        advantages,
    )


def _nucleus(logs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Log-probs over the smallest set of digits with at least `top_p` of the probability, and that set."""
    if top_p >= 1:
        return logs, torch.ones_like(logs, dtype=torch.bool)
    ordered, order = logs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    inside = torch.zeros_like(logs, dtype=torch.bool).scatter(-1, order, before < top_p)
    return logs.masked_fill(~inside, -torch.inf).log_softmax(-1), inside


def numbers(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs [seeds, count, LENGTH, 2] of digits from the right, and those of their sums [seeds, count, LENGTH]."""
    digits = torch.randint(10, (SEEDS, count, LENGTH, 2), generator=generator)
    total, carry = [], torch.zeros(SEEDS, count, dtype=torch.int64)
    for place in range(LENGTH):
        here = digits[:, :, place].sum(-1) + carry
        total.append(here % 10)
        carry = here // 10
    return digits, torch.stack(total, 2)
