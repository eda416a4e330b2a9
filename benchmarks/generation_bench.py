"""Generation with responses of 16 to 512 tokens and a long tail: a running batch against chunks.

In chunks an engine is given as many responses as fit and nothing more until the longest of them has ended. In a running
batch a response joins as soon as one has ended. Both generate the same tokens on one thread with the transformers engine,
in turns, and the median of each counts.

`python -m benchmarks.generation_bench --hf-checkpoint DIR [--engines "transformers engine" vllm generate]` measures a
model of one's own: the seconds of prompts and of a decode step, beside vLLM (in an environment that has it),
transformers' `generate` and what the machine needs at least.

`--long 512 4096 32768` measures one of many tokens: what a token of a prompt of this length, and a step after it, cost
our engine, and the memory that both take. Without --hf-checkpoint a tiny model, which has positions for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.measure import peak_extra_bytes
from plugin.config import JobConfig
from plugin.config.model import DtypeName
from plugin.engines.choice import bytes_per_position
from plugin.engines.protocol import Finished, GenerationRequest, RolloutEngine, SamplingParameters
from plugin.engines.transformers.decode_batch import left_padded
from plugin.engines.transformers.engine import TransformersEngine
from plugin.weights.buckets import pack_buckets

SHORTEST, LONGEST = 16, 512
STOP = LONGEST + 1
SAMPLES_PER_PROMPT = 4
_STEPS = 16


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
    config = tiny_config(1024)
    engine = EndingEngine(config.to_dict(), max_batch=max_batch)
    load_weights(engine, Qwen3ForCausalLM(config))
    return engine


def tiny_config(positions: int) -> Qwen3Config:
    """A Qwen3 of 4 layers."""
    return Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
    )


def load_weights(engine: RolloutEngine, model: torch.nn.Module) -> None:
    """Send the weights of `model` as version 0."""
    buckets = list(pack_buckets(model.state_dict().items()))
    for number, bucket in enumerate(buckets):
        engine.load_weights(0, bucket, last=number == len(buckets) - 1)


def measure_engines(
    checkpoint: str, dtype: str, rows: int, length: int, repeats: int, engines: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Milliseconds of reading the prompts and of a decode step, wall and processor, by engine.

    The engines take turns with the same prompts, new ones every time because vLLM remembers some.
    A step is what each of `length` further tokens adds to the first.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    ways = {name: _WAYS[name](model, dtype, rows) for name in engines}
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for repeat in range(-1, repeats):
        for name, run in ways.items():
            row = []
            for number, tokens in enumerate((1, 1 + length)):
                prompts = random_prompts(rows, model.config.vocab_size, 2 * repeat + number)
                wall, processor = time.perf_counter(), time.process_time()
                run(prompts, tokens)
                row += [time.perf_counter() - wall, time.process_time() - processor]
            if repeat >= 0:  # the first turn compiles and allocates
                times[name].append(row)
    best = {
        name: [min(column) for column in zip(*rows_, strict=True)] for name, rows_ in times.items()
    }
    results = {
        name: {
            "prompts, wall": 1e3 * wall,
            "prompts, processor": 1e3 * processor,
            "step, wall": 1e3 * (wall_all - wall) / length,
            "step, processor": 1e3 * (processor_all - processor) / length,
        }
        for name, (wall, processor, wall_all, processor_all) in best.items()
    }
    return results | {"floor": step_floor(model, rows)}


def measure_long(
    checkpoint: str | None, dtype: DtypeName, lengths: Sequence[int], rows: int
) -> Iterator[dict[str, float]]:
    """For each length of prompts: milliseconds of a prompt token and of a step, and MiB in use."""
    if checkpoint is None:
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(tiny_config(max(lengths) + 64)).to(getattr(torch, dtype))
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    engine = TransformersEngine(model.config.to_dict(), dtype=dtype, max_batch=rows)
    run = _run_of(engine, model.eval())
    draw = torch.Generator().manual_seed(0)
    run([(1, 2, 3)] * rows, 2)
    for length in lengths:
        shape = (rows, length)
        prompts = [
            tuple(row)
            for row in torch.randint(model.config.vocab_size, shape, generator=draw).tolist()
        ]
        seconds = []
        for tokens in (1, 1 + _STEPS):
            began = time.process_time()
            used = peak_extra_bytes(partial(run, prompts, tokens))
            seconds.append(time.process_time() - began)
        width = bytes_per_position(model.config.to_dict(), dtype)
        yield {
            "tokens of a prompt": length,
            "ms per prompt token": 1e3 * seconds[0] / (rows * length),
            "ms per step": 1e3 * (seconds[1] - seconds[0]) / _STEPS,
            "MiB at most": used / 2**20,
            "MiB of keys and values": rows * length * width / 2**20,
        }


def step_floor(model: Any, rows: int) -> dict[str, float]:
    """Milliseconds that a step's matrix products and the reading of its weights take at least."""
    dtype = model.dtype
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    numbers = sum(weight.numel() for weight in weights)
    left, right = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    words = torch.ones(2**27, dtype=torch.int32)
    product, reading = _fastest(lambda: left @ right), _fastest(words.max)
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # faster in float32 on AMD's CPUs
        packed = torch.ops.mkldnn._reorder_linear_weight(right, None)
        multiply = partial(torch.ops.mkldnn._linear_pointwise, left, packed, None, "none", [], "")
        product = min(product, _fastest(multiply))
    return {
        "products": 1e3 * product * rows * numbers / 1024**3,
        "weights read once": 1e3 * reading * numbers * dtype.itemsize / words.nbytes,
    }


def _fastest(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def random_prompts(rows: int, vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of 24 to 43 tokens."""
    draw = torch.Generator().manual_seed(seed + 10)
    lengths = torch.randint(24, 44, (rows,), generator=draw).tolist()
    return [tuple(torch.randint(vocabulary, (n,), generator=draw).tolist()) for n in lengths]


Run = Callable[[list[tuple[int, ...]], int], Any]


def _run_of(engine: RolloutEngine, model: Any) -> Run:
    load_weights(engine, model)

    def run(prompts: list[tuple[int, ...]], tokens: int) -> Any:
        requests = [GenerationRequest(prompt, (i,), i) for i, prompt in enumerate(prompts)]
        return engine.generate(requests, SamplingParameters(max_response_length=tokens))

    return run


def _ours(model: Any, dtype: DtypeName, rows: int) -> Run:
    engine = TransformersEngine(model.config.to_dict(), dtype=dtype, max_batch=rows)
    return _run_of(engine, model)


def _vllm(model: Any, dtype: DtypeName, rows: int) -> Run:
    from plugin.engines.vllm.engine import VllmEngine

    flags = {"rollout_engine": "vllm", "rollout_max_batch": rows, "max_context_length": 512}
    config = JobConfig().unchecked_copy(**flags, rollout_dtype=dtype)
    return _run_of(VllmEngine(config, model.config.to_dict(), "vllm"), model)


def _generate(model: Any, dtype: DtypeName, rows: int) -> Run:
    def run(prompts: list[tuple[int, ...]], tokens: int) -> Any:
        padded, mask = left_padded(prompts)
        return model.generate(
            padded,
            attention_mask=mask.long(),
            do_sample=True,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )

    return run


_WAYS = {"transformers engine": _ours, "vllm": _vllm, "generate": _generate}


def main() -> None:
    """Print a table for a model directory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation_bench")
    parser.add_argument("--hf-checkpoint", help="model directory; none = a tiny model, for --long")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=24, help="tokens after the first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--engines", nargs="+", choices=list(_WAYS), default=list(_WAYS)[::2])
    parser.add_argument("--long", nargs="+", type=int, help="tokens of prompts; see above")
    options = parser.parse_args()
    if options.hf_checkpoint is None and options.long is None:
        parser.error("--hf-checkpoint is needed, or --long")
    torch.set_num_threads(options.threads)
    for dtype in options.dtype:
        if options.long is not None:
            print(f"{dtype}, {options.rows} rows, {options.threads} threads, processor time")
            for row in measure_long(options.hf_checkpoint, dtype, options.long, options.rows):
                print("  " + ", ".join(f"{what} {value:.4g}" for what, value in row.items()))
            continue
        print(f"{dtype}, {options.rows} rows, {options.threads} threads, milliseconds")
        sizes = (options.rows, options.length, options.repeats)
        results = measure_engines(options.hf_checkpoint, dtype, *sizes, options.engines)
        for name, row in results.items():
            print(f"  {name}: " + ", ".join(f"{what} {ms:.0f}" for what, ms in row.items()))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
