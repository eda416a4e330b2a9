"""Sample with every engine, score with every trainer, and write one row per pair to `data.json`."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_mismatch.engines import (
    ALONE,
    PREFILLED,
    SETTINGS,
    TRUNCATED,
    Setting,
    chat_prompts,
    sampled,
)
from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.config import TrainerConfig
from plugin.config.model import DtypeName
from plugin.megatron_backend.parallel_groups import one_process
from plugin.megatron_backend.trainer import MegatronTrainer

DATA = Path(__file__).with_name("data.json")
TRAINERS: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")
POSITIONS, ENTROPIES, RANKS = (0, 8, 16, 32, 64), (0.0, 0.01, 0.1, 0.5, 1.0, 2.0), (1, 2, 6, 21)
#: Prompts of which responses are also generated one after the other.
_ALONE = 12

#: Of one response: positions, the policy's entropies and ranks of its tokens, both sides' log-probs.
Scored = dict[str, Tensor]


def measure(model: Path, prompts: int, length: int, *, again: bool) -> None:
    """Add the rows that are missing; an end in the middle costs the row under way."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    requests, stop = chat_prompts(tokenizer, prompts), tokenizer.convert_tokens_to_ids("<|im_end|>")
    data = {"prompts": prompts, "length": length, "rows": [], "company": []}
    if DATA.exists() and not again:
        data = json.loads(DATA.read_text())
    known = {row["engine"] for kind in ("rows", "company") for row in data[kind]}
    with tempfile.TemporaryDirectory(prefix="real_mismatch_") as root:
        for setting in (*SETTINGS, TRUNCATED):
            alone = ALONE.get(setting)
            if {setting.name, alone.name if alone else setting.name} <= known:
                continue
            _progress(setting.name)
            rest = (model, stop, length, Path(root))
            samples = _in_own_process(setting, requests, *rest)
            if setting.name not in known:
                data["rows"] += [_rounded(row) for row in _rows(setting, model, samples)]
            if alone and alone.name not in known:
                _progress(alone.name)
                found = in_company(samples, _in_own_process(alone, requests[:_ALONE], *rest))
                data["company"].append({"engine": alone.name} | _rounded(found))
            DATA.write_text(json.dumps(data, indent=1) + "\n")


def _in_own_process(setting: Setting, *arguments: Any) -> list[RolloutSample]:
    """vLLM is once in a process; memory of any engine ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        return one.submit(sampled, setting, *arguments).result()


def _rows(
    setting: Setting, model: Path, samples: Sequence[RolloutSample]
) -> Iterator[dict[str, Any]]:
    """By trainer; then of the engine's own log-probs in one pass."""
    shape = _distributions(model, samples)
    batch = RolloutBatch.from_samples(samples)
    for dtype in TRAINERS:
        found = scored(model, dtype, batch)
        row: dict[str, Any] = {"engine": setting.name, "trainer": dtype}
        if setting == TRUNCATED:
            unmasked = RolloutBatch({k: v for k, v in batch.columns.items() if "kept" not in k})
            yield row | {"replay": True} | statistics(samples, found, shape)
            found = scored(model, dtype, unmasked)
            row["replay"] = False
        yield row | statistics(samples, found, shape)
    if setting in PREFILLED:
        own = [sample.metadata["prefill"] for sample in samples]
        yield {"engine": setting.name, "trainer": "its own prefill"} | statistics(
            samples, own, shape
        )


def scored(model: Path, dtype: DtypeName, batch: RolloutBatch) -> list[Tensor]:
    """Log-probs [response] of every sample by a trainer (Megatron-Core) of this dtype."""
    from transformers import AutoConfig

    with one_process() as groups:
        config = TrainerConfig(train_dtype=dtype, max_tokens_per_gpu=2048)
        hf_config = AutoConfig.from_pretrained(model)
        trainer = MegatronTrainer(config, hf_config, groups, trainable=False)
        trainer.load_hf_weights(str(model))
        found = trainer.compute_log_probs(batch)
    return list(found.values.split(found.lengths.tolist()))


@torch.no_grad()
def _distributions(model: Path, samples: Sequence[RolloutSample]) -> list[Scored]:
    """Entropy of the policy at every token, in float32, and the token's rank in it."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for sample in samples:
        logits = network(sample.tokens[None]).logits[0, -sample.response_length - 1 : -1]
        logs = logits.log_softmax(-1)
        own = logs.gather(1, sample.tokens[-sample.response_length :, None])
        found.append(
            {
                "position": torch.arange(sample.response_length),
                "entropy": -(logs.exp() * logs).sum(-1),
                "rank": (logs > own).sum(-1) + 1,
            }
        )
    return found


def statistics(
    samples: Sequence[RolloutSample], train: Sequence[Tensor], shape: Sequence[Scored]
) -> dict[str, Any]:
    """Mismatch of log-probs [response]: of all tokens, by sequence, and in bins."""
    log_ratios = [
        (own - sample.rollout_log_probs).double()  # type: ignore[operator]
        for own, sample in zip(train, samples, strict=True)
    ]
    log_ratio = torch.cat(log_ratios)
    values, ratio = {"k3": _k3(log_ratio), "abs": log_ratio.abs()}, log_ratio.exp()
    by_sequence = torch.stack([_k3(part).mean() for part in log_ratios])
    whole = torch.stack([part.sum() for part in log_ratios]).exp()
    row: dict[str, Any] = {
        "tokens": log_ratio.numel(),
        "k3": float(values["k3"].mean()),
        "k3_error": float(by_sequence.std() / len(log_ratios) ** 0.5),
        "abs_log_ratio": float(values["abs"].mean()),
        "multiplicative_error": float(log_ratio.abs().exp().mean() - 1),
        "largest_ratio": float(log_ratio.abs().max().exp()),
        "ess_share": _ess(ratio),
        "sequence_ess_share": _ess(whole),
        "outside_20_percent": float(((ratio < 0.8) | (ratio > 1.2)).double().mean()),
        "outside_factor_2": float(((ratio < 0.5) | (ratio > 2)).double().mean()),
    }
    for name, starts in (("position", POSITIONS), ("entropy", ENTROPIES), ("rank", RANKS)):
        place = torch.cat([one[name] for one in shape]).double()
        bins = torch.bucketize(place, torch.tensor(starts, dtype=torch.float64), right=True) - 1
        row[f"by_{name}"] = [
            {
                "from": start,
                "tokens": int((bins == number).sum()),
                **{what: float(value[bins == number].mean()) for what, value in values.items()},
            }
            for number, start in enumerate(starts)
            if bool((bins == number).any())
        ]
    return row


def in_company(
    together: Sequence[RolloutSample], alone: Sequence[RolloutSample]
) -> dict[str, float]:
    """The same prompts and seeds, generated beside others and by themselves: up to where they part."""
    same, differences = 0, []
    for one, other in zip(together, alone, strict=False):
        a, b = (s.tokens[-s.response_length :] for s in (one, other))
        shared = min(len(a), len(b))
        equal = (a[:shared] == b[:shared]).int().cumprod(0)
        same += len(a) == len(b) and bool(equal.all())
        rows = (s.rollout_log_probs[:shared][equal.bool()] for s in (one, other))  # type: ignore[index]
        first, second = rows
        differences.append((first - second).abs().double())
    joined = torch.cat(differences)
    return {
        "responses": len(alone),
        "same_tokens": same,
        "compared_tokens": joined.numel(),
        "abs_difference": float(joined.mean()),
        "largest_difference": float(joined.max()),
        "bitwise_equal": float((joined == 0).double().mean()),
    }


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio


def _ess(weights: Tensor) -> float:
    return float(weights.sum() ** 2 / (weights**2).sum() / weights.numel())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
