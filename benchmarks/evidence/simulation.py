"""One training run in one process: a small policy learns to add, an engine with older or coarser weights samples.

The task is the addition of two 8-digit numbers, digit by digit from the right; the reward of a response is its share
of right digits. The policy, a small network over the digits around a position and the digit it has just written, is
first trained by examples to get about three quarters of the digits right, so that what follows are the small steps of
fine-tuning. Losses, corrections, advantages and log-ratios are the package's own (`plugin.loss.compute_loss`); what is
simulated is the engine: weights that are `staleness` updates old, held in float32, bfloat16 or int8.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plugin.compare.replay import Method
from plugin.loss import compute_loss, loss_inputs
from plugin.ppo_utils import grpo_advantages
from plugin.rollout.engines.int8_weights import through_int8

DIGITS, PROMPTS, GROUP = 8, 16, 8
STEPS, WARM_STEPS, EVALUATE_EVERY = 120, 150, 10
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Cell:
    """One run: a method (a loss, and a correction or none) in one setting."""

    loss: str
    hook: str | None
    staleness: int
    engine: str
    updates: int
    seed: int

    @property
    def method(self) -> str:
        return self.loss if self.hook is None else f"{self.loss} + {self.hook}"


class Adder(nn.Module):
    """Logits [n, 10] of the next digit from [n, 5] digits: both at its place, both before it, the last written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5 * 11, 16)
        self.layers = nn.Sequential(nn.Linear(80, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # fmt: skip

    def forward(self, seen: Tensor) -> Tensor:
        return self.layers(self.embed(seen + 11 * torch.arange(5)).flatten(1))


def run_cell(cell: Cell) -> dict[str, Any]:
    """Train; report reward at the end, over time, and what the method did on the way."""
    torch.set_num_threads(1)
    began = time.process_time()
    torch.manual_seed(1000 + cell.seed)
    policy = Adder()
    _warm_up(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    config = Method.of(cell.loss, cell.hook).config
    behind: deque[dict[str, Tensor]] = deque(maxlen=cell.staleness + 1)
    rewards, norms, shares, kept = [_evaluate(policy, cell.seed)], [], [], []
    for step in range(STEPS):
        behind.append(copy.deepcopy(policy.state_dict()))
        batch = _rollout(_engine(behind[0], cell.engine))
        if cell.updates > 1:
            with torch.no_grad():
                batch["log_probs"] = list(_log_probs(policy, batch).split(DIGITS))
        for _ in range(cell.updates):
            cur = _log_probs(policy, batch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs = compute_loss(config, loss_inputs(config, batch, cur))
            optimizer.zero_grad()
            outputs.total.mean().backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            norms.append(float(norm))
            if bool(norm.isfinite()):
                optimizer.step()
            ratio = (cur.detach() - torch.cat(batch["rollout_log_probs"])).clamp(-20, 20).exp()
            shares.append(float(ratio.sum() ** 2 / (ratio.numel() * ratio.square().sum())))
            kept.append(float(outputs.policy.kept.float().mean()))
        if (step + 1) % EVALUATE_EVERY == 0:
            rewards.append(_evaluate(policy, cell.seed))
    best, last = max(rewards), rewards[-1]
    return {
        **asdict(cell),
        "start": rewards[0],
        "final": last,
        "area": sum(rewards) / len(rewards),
        "collapsed": last < rewards[0] - 0.05 or last < best - 0.2,
        "largest_gradient_norm": max(norms),
        "ess_share": sum(shares) / len(shares),
        "kept_share": sum(kept) / len(kept),
        "processor_seconds": time.process_time() - began,
    }


def _numbers(count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Two numbers [count, DIGITS] by digits from the right, and the digits of their sum."""
    digits = torch.randint(10, (2, count, DIGITS), generator=generator)
    total, carry = [], torch.zeros(count, dtype=torch.int64)
    for place in range(DIGITS):
        here = digits[0, :, place] + digits[1, :, place] + carry
        total.append(here % 10)
        carry = here // 10
    return digits, torch.stack(total, 1)


def _seen(digits: Tensor, written: Tensor, place: int) -> Tensor:
    """[n, 5]: what the policy sees before it writes at `place`; 10 stands for nothing."""
    nothing = torch.full_like(written[:, 0], 10)
    before = [digits[i, :, place - 1] if place else nothing for i in (0, 1)]
    last = written[:, place - 1] if place else nothing
    return torch.stack([digits[0, :, place], digits[1, :, place], *before, last], 1)


def _warm_up(policy: Adder) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for _ in range(WARM_STEPS):
        digits, total = _numbers(64)
        seen = torch.cat([_seen(digits, total, place) for place in range(DIGITS)])
        loss = nn.functional.cross_entropy(policy(seen), total.t().reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _engine(weights: dict[str, Tensor], kind: str) -> Adder:
    engine = Adder()
    engine.load_state_dict(weights)
    if kind == "bfloat16":
        return engine.to(torch.bfloat16)
    if kind == "int8":
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                if parameter.dim() == 2 and "embed" not in name:
                    parameter.copy_(through_int8(parameter))
    return engine


@torch.no_grad()
def _rollout(engine: Adder) -> dict[str, Any]:
    """GROUP responses to each of PROMPTS prompts, with the engine's log-probs and group-relative advantages."""
    digits, total = (x.repeat_interleave(GROUP, -2) for x in _numbers(PROMPTS))
    count = PROMPTS * GROUP
    written, log_probs = torch.zeros(count, DIGITS, dtype=torch.int64), torch.zeros(count, DIGITS)
    seen = []
    for place in range(DIGITS):
        seen.append(_seen(digits, written, place))
        logs = engine(seen[-1]).float().log_softmax(-1)
        written[:, place] = torch.multinomial(logs.exp(), 1)[:, 0]
        log_probs[:, place] = logs.gather(1, written[:, place, None])[:, 0]
    rewards = (written == total).float().mean(1)
    groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
    masks = list(torch.ones(count, DIGITS, dtype=torch.int64))
    return {
        "seen": torch.stack(seen, 1).flatten(0, 1),
        "written": written.flatten(),
        "total_lengths": [DIGITS + 1] * count,
        "response_lengths": [DIGITS] * count,
        "loss_masks": masks,
        "advantages": list(grpo_advantages(rewards, groups)[:, None].expand(count, DIGITS)),
        "rollout_log_probs": list(log_probs),
    }


def _log_probs(policy: Adder, batch: dict[str, Any]) -> Tensor:
    """[T]: of the written digits, by the policy."""
    logs = policy(batch["seen"]).log_softmax(-1)
    return logs.gather(1, batch["written"][:, None])[:, 0]


@torch.no_grad()
def _evaluate(policy: Adder, seed: int) -> float:
    """Share of right digits, sampled, on prompts that are the same throughout the run."""
    generator = torch.Generator().manual_seed(seed)
    digits, total = _numbers(256, generator)
    written = torch.zeros(256, DIGITS, dtype=torch.int64)
    for place in range(DIGITS):
        chances = policy(_seen(digits, written, place)).softmax(-1)
        written[:, place] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return float((written == total).float().mean())
