"""Rollouts of small real models with real faults: the data behind the detectors' confusion table.

A character-level Qwen3 (and a Qwen3-MoE) is trained briefly on the source text of Python's standard library.
It is then sampled by an "engine" that is a copy in another precision, at another temperature, with truncation or
with older weights; the trainer recomputes the log-probs in float32. Nothing is simulated with added noise.
"""

from __future__ import annotations

import argparse as argparse_module
import copy
import inspect
import json
import random
import textwrap
import typing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 128
PROMPT, RESPONSE = 16, 64


@dataclass
class Rollouts:
    """Columns of one step, named as in a rollout batch; `trainer_version` is the trainer's."""

    columns: dict[str, list[Any]]
    trainer_version: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def corpus() -> Tensor:
    """[characters] int64 of a few standard library modules."""
    modules = (argparse_module, inspect, random, textwrap, typing, json)
    text = "".join(inspect.getsource(module) for module in modules)
    codes = [code for code in text.encode("ascii", "ignore") if code < VOCABULARY]
    return torch.tensor(codes)


def small_model(*, moe: bool = False, seed: int = 0) -> torch.nn.Module:
    """An untrained character model of two layers (four for MoE, so that layers can be told apart)."""
    torch.manual_seed(seed)
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4 if moe else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
    }
    if not moe:
        return Qwen3ForCausalLM(Qwen3Config(**shared))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts, decoder_sparse_step=1))


def pretrain(model: torch.nn.Module, steps: int, *, rate: float = 3e-3, seed: int = 0) -> None:
    """Next-character training on random windows of the corpus."""
    text = corpus()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for _ in range(steps):
        batch = windows(text, 16, 96, generator)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, length] random stretches of the text."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts])


def quantized_int8(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose matrices are rounded to int8 with one scale per output row."""
    engine = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in engine.parameters():
            if parameter.dim() >= 2:
                scale = parameter.abs().amax(-1, keepdim=True) / 127
                parameter.copy_((parameter / scale.clamp(min=1e-12)).round() * scale)
    return engine


def in_bfloat16(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that computes in bfloat16."""
    return copy.deepcopy(model).to(torch.bfloat16)


@torch.no_grad()
def sample(
    engine: torch.nn.Module,
    prompts: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Tokens [N, PROMPT + RESPONSE] and log-probs [N, RESPONSE] of the distribution sampled from."""
    generator = torch.Generator().manual_seed(seed)
    tokens, cache, log_probs = prompts, None, []
    for _ in range(RESPONSE):
        step = tokens if cache is None else tokens[:, -1:]
        output = engine(input_ids=step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        scores = _truncated(output.logits[:, -1].float() / temperature, top_p, top_k)
        distribution = scores.log_softmax(-1)
        chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
        log_probs.append(distribution.gather(1, chosen)[:, 0])
        tokens = torch.cat((tokens, chosen), 1)
    return tokens, torch.stack(log_probs, 1)


def _truncated(scores: Tensor, top_p: float, top_k: int) -> Tensor:
    """Scores with -inf outside the smallest set of mass top_p and outside the top_k."""
    ordered, order = scores.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    drop = probabilities.cumsum(-1) - probabilities > top_p
    if top_k:
        drop[:, top_k:] = True
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)


@torch.no_grad()
def trainer_log_probs(model: torch.nn.Module, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """[N, RESPONSE] in float32."""
    logits = model(input_ids=tokens).logits.float()[:, PROMPT - 1 : -1] / temperature
    targets = tokens[:, PROMPT:, None]
    return logits.log_softmax(-1).gather(2, targets)[..., 0]


@torch.no_grad()
def routed_experts(model: torch.nn.Module, tokens: Tensor, topk: int = 2) -> Tensor:
    """[N, tokens, layers, topk] of a MoE model."""
    output = model(input_ids=tokens, output_router_logits=True)
    layers = [
        scores.view(*tokens.shape, -1).topk(topk, -1).indices for scores in output.router_logits
    ]
    return torch.stack(layers, 2)


def sample_corpus(
    engine: torch.nn.Module, *, samples: int, seed: int, **sampling: Any
) -> tuple[Tensor, Tensor]:
    """What `sample` gives for random prompts of the corpus."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return sample(engine, windows(corpus(), samples, PROMPT, generator), seed=seed, **sampling)


def rollouts(
    trainer: torch.nn.Module,
    engine: torch.nn.Module,
    *,
    samples: int = 32,
    seed: int = 0,
    trainer_temperature: float = 1.0,
    weight_version: int = 0,
    trainer_version: int = 0,
    sampled: tuple[Tensor, Tensor] | None = None,
    **sampling: Any,
) -> Rollouts:
    """One step: prompts from the corpus, responses from `engine` (or as given), log-probs of both."""
    tokens, engine_log_probs = sampled or sample_corpus(
        engine, samples=samples, seed=seed, **sampling
    )
    columns: dict[str, list[Any]] = {
        "unconcat_tokens": list(tokens),
        "total_lengths": [PROMPT + RESPONSE] * samples,
        "response_lengths": [RESPONSE] * samples,
        "loss_masks": [torch.ones(RESPONSE, dtype=torch.int64) for _ in range(samples)],
        "rollout_log_probs": list(engine_log_probs),
        "log_probs": list(trainer_log_probs(trainer, tokens, trainer_temperature)),
        "weight_versions": [weight_version] * samples,
    }
    return Rollouts(columns, trainer_version)
