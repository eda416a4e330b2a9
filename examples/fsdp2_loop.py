"""The losses without Megatron: a plain FSDP2 loop, uneven microbatches, a KL to the rollout policy.

    python examples/fsdp2_loop.py                                       # one process
    torchrun --nproc-per-node 2 examples/fsdp2_loop.py                  # two ranks on CPU, the same numbers
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 examples/fsdp2_loop.py    # a cluster

Two things make the step independent of how the batch is split: every token is divided by the token
count of the whole batch, known before the step, and a rank with fewer microbatches than others adds
padding ones, because FSDP's collectives need every rank in every forward and backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from plugin.batch_types import Microbatch, RolloutBatch, RolloutSample
from plugin.config import LossConfig
from plugin.loss import policy_loss_function

VOCABULARY, WIDTH = 24, 32
PROMPTS, RESPONSES = (2, 3, 1, 4, 2), (5, 3, 8, 2, 6)
CONFIG = LossConfig(
    policy_loss="icepop",
    icepop_ratio_low=0.5,
    use_rollout_kl_loss=True,
    rollout_kl_loss_coef=0.05,
)


class Block(nn.Module):
    """A residual layer that mixes positions causally; any transformer block would do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        past = hidden.cumsum(0) / torch.arange(1, len(hidden) + 1, device=hidden.device)[:, None]
        return hidden + self.out(torch.tanh(self.mix(past)))


class TinyModel(nn.Module):
    """Tokens [S] to logits [S, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, samples: list[Tensor]) -> Tensor:
        """[T, V]: the samples' logits one after the other, as the loss expects them."""
        rows = []
        for tokens in samples:
            hidden = self.embedding(tokens)
            for block in self.blocks:
                hidden = block(hidden)
            rows.append(self.head(hidden))
        return torch.cat(rows)


def rollout_batch() -> RolloutBatch:
    """Five samples of different length with log-probs of a rollout policy; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    samples = [
        RolloutSample(
            tokens=torch.randint(0, VOCABULARY, (prompt + response,), generator=generator),
            response_length=response,
            loss_mask=torch.ones(response, dtype=torch.int64),
            rollout_log_probs=torch.full((response,), -3.2),
        )
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    batch = RolloutBatch.from_samples(samples)
    advantages = [torch.full((n,), 1.0 if i % 2 else -0.5) for i, n in enumerate(RESPONSES)]
    return batch.with_column("advantages", advantages)


def microbatches(batch: RolloutBatch, rank: int, world: int) -> list[Microbatch]:
    """One sample each; ranks that have fewer than the fullest one are filled up with padding."""
    mine = [Microbatch(batch.select([i])) for i in range(rank, len(batch), world)]
    most = -(-len(batch) // world)
    return mine + [Microbatch.padding_like(batch)] * (most - len(mine))


def train_step(model: nn.Module, optimizer: Any, batch: RolloutBatch) -> float:
    """One update on the whole batch; returns its loss, the same on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = sum(int(mask.sum()) for mask in batch.columns["loss_masks"])
    total = torch.zeros(())
    for microbatch in microbatches(batch, rank, world):
        columns = microbatch.batch.columns
        logits = model(columns["unconcat_tokens"])
        # FSDP averages gradients over ranks, so each rank's share counts `world` times.
        loss, _ = policy_loss_function(CONFIG, columns, logits, lambda x: x.sum() * world / tokens)
        loss.backward()
        total += loss.detach() / world
    dist.all_reduce(total)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description="Policy gradient steps with FSDP2.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--losses", type=Path, help="file for the losses of all steps, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = TinyModel().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = [train_step(model, optimizer, rollout_batch()) for _ in range(options.steps)]
    if dist.get_rank() == 0:
        print("\n".join(f"step {i}: loss {loss:.6f}" for i, loss in enumerate(losses)))
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
