"""Generation with responses of 16 to 512 tokens and a long tail: a running batch against chunks.

In chunks an engine is given as many responses as fit and nothing more until the longest of them has ended. In a running
batch a response joins as soon as one has ended. Both generate the same tokens on one thread with the transformers engine,
in turns, and the median of each counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from plugin.engines.protocol import Finished, GenerationRequest, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.weights.buckets import pack_buckets

SHORTEST, LONGEST = 16, 512
STOP = LONGEST + 1
SAMPLES_PER_PROMPT = 4


class EndingEngine(TransformersEngine):
    """Ends a response when it is as long as the first token of its prompt says."""

    def _sample(self, slots: Tensor, logits: Tensor) -> list[Finished]:
        table = self._table
        targets = torch.tensor([table._owners[slot].prompt[0] for slot in slots.tolist()])
        ends = table._lengths[slots] + 1 >= targets
        logits[:, STOP] = torch.where(ends, torch.inf, -torch.inf).nan_to_num(1e4, 1e4, -1e4)
        return super()._sample(slots, logits)


def measure_generation(quick: bool) -> dict[str, Any]:
    """Seconds and processor seconds of both ways, and the tokens they generated."""
    max_batch, prompts, repeats = (8, 8, 1) if quick else (32, 48, 3)
    engine, requests = make_engine(max_batch), make_requests(prompts, quick)
    longest = max(request.prompt[0] for request in requests)
    parameters = SamplingParameters(max_response_length=longest, stop_token_ids=(STOP,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    chunk = max_batch // SAMPLES_PER_PROMPT
    ways: dict[str, Callable[[], Any]] = {
        "chunks": lambda: [
            engine.generate(requests[start : start + chunk], parameters)
            for start in range(0, prompts, chunk)
        ],
        "running batch": lambda: engine.generate(requests, parameters),
    }
    engine.generate(requests[:2], parameters)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    before = engine.health().generated_tokens
    for _ in range(repeats):
        for name, run in ways.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    torch.set_num_threads(threads)
    tokens = (engine.health().generated_tokens - before) // (2 * repeats)
    lengths = sorted(request.prompt[0] for request in requests)
    return {
        "max_batch": max_batch,
        "responses": prompts * SAMPLES_PER_PROMPT,
        "tokens": tokens,
        "lengths": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "seconds": {name: statistics.median(w for w, _ in runs) for name, runs in times.items()},
        "processor": {name: statistics.median(p for _, p in runs) for name, runs in times.items()},
    }


def make_requests(prompts: int, quick: bool) -> list[GenerationRequest]:
    """Prompts whose first token is the length of their responses; most are short, a few long."""
    draw = torch.Generator().manual_seed(0)
    spread = torch.rand(prompts, generator=draw, dtype=torch.float64) ** 2
    top = 64 if quick else LONGEST
    lengths = (SHORTEST * (top / SHORTEST) ** spread).round().int().tolist()
    lengths[prompts // 3] = top
    return [
        GenerationRequest(
            (length, *range(2, 34)), tuple(SAMPLES_PER_PROMPT * i + j for j in range(4)), i
        )
        for i, length in enumerate(lengths)
    ]


def make_engine(max_batch: int) -> EndingEngine:
    """A small Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    engine = EndingEngine(config.to_dict(), max_batch=max_batch)
    buckets = list(pack_buckets(Qwen3ForCausalLM(config).state_dict().items()))
    for number, bucket in enumerate(buckets):
        engine.load_weights(0, bucket, last=number == len(buckets) - 1)
    return engine
