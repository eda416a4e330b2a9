"""Trains a small model under several parallel layouts and compares each with one process.

All ranks are started once; for every layout the first ranks join a fresh process group, load the same weights,
compute log-probs and take one training step. What the layouts must agree on is loss, gradient norm and log-probs.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError

VOCABULARY, SAMPLES = 96, 6
_PART = re.compile(r"(dp|tp|pp|vpp|cp|ep)(\d+)|(sp)")
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
#: Layouts that are tried when the user names none, as far as the machine holds them.
DEFAULT_LAYOUTS = ("dp2", "tp2", "tp2sp", "pp2", "cp2", "ep2", "tp2pp2", "tp2cp2")


@dataclass(frozen=True)
class LayoutSpec:
    """A parallel layout by name: `tp2pp2` is tensor parallel 2 and pipeline parallel 2."""

    name: str
    sizes: dict[str, int]
    dp: int = 1
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        dense = self.sizes.get("tp", 1) * self.sizes.get("cp", 1)
        return math.lcm(dense * self.dp, self.sizes.get("ep", 1)) * self.sizes.get("pp", 1)

    @property
    def family(self) -> str:
        return "qwen3_moe" if "ep" in self.sizes else "qwen3"

    def parallel_sizes(self) -> dict[str, Any]:
        return {_SIZES[name]: size for name, size in self.sizes.items()}


@dataclass
class LayoutResult:
    """What a layout gave; `agrees` is judged against one process with the same model."""

    layout: str
    ranks: int
    agrees: bool = False
    loss: float | None = None
    grad_norm: float | None = None
    log_probs: list[float] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["log_probs"]
        return values

    def __str__(self) -> str:
        label = f"{self.layout} ({self.ranks} rank{'s' if self.ranks > 1 else ''})"
        if self.error:
            return f"fail  {label}: {self.error.strip().splitlines()[-1]}"
        numbers = f"loss {self.loss:.6f}, gradient norm {self.grad_norm:.6f}"
        if not self.differences:
            return f"  ok  {label}: {numbers}"
        off = ", ".join(f"{name} off by {value:.1e}" for name, value in self.differences.items())
        verdict = "agrees with one process" if self.agrees else "DISAGREES with one process"
        return f"{'  ok' if self.agrees else 'fail'}  {label}: {verdict} ({numbers}; {off})"


def parse_layout(text: str) -> LayoutSpec:
    """`tp2`, `pp2vpp2`, `tp2sp`, `ep2`, `dp2tp2`; sp without tp, or vpp without pp, is a `ConfigError`."""
    name = text.strip().lower()
    parts = _PART.findall(name)
    if not parts or "".join("".join(part) for part in parts) != name:
        raise ConfigError(
            f"--layouts {text!r}: expected parts like tp2, pp2, vpp2, cp2, ep2, dp2 and sp, e.g. tp2pp2 or tp2sp"
        )
    sizes = {kind: int(size) for kind, size, _ in parts if kind and kind != "dp"}
    dp = next((int(size) for kind, size, _ in parts if kind == "dp"), 1)
    sequence_parallel = any(flag for _, _, flag in parts)
    if any(size < 1 for size in (*sizes.values(), dp)):
        raise ConfigError(f"--layouts {text!r}: sizes start at 1")
    if sequence_parallel and sizes.get("tp", 1) < 2:
        raise ConfigError(f"--layouts {text!r}: sp splits over tensor parallel ranks; write tp2sp")
    return LayoutSpec(name, sizes, dp, sequence_parallel)


def default_layouts(max_ranks: int) -> list[LayoutSpec]:
    """The default layouts that need at most `max_ranks` ranks."""
    specs = [parse_layout(name) for name in DEFAULT_LAYOUTS]
    return [spec for spec in specs if spec.ranks <= max_ranks]


def machine_ranks() -> int:
    """How many ranks this machine holds: one per GPU, or on CPU one per core, at least 2 and at most 4."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(max(os.cpu_count() or 1, 2), 4)


def run_layouts(specs: Sequence[LayoutSpec], *, timeout: float = 600.0) -> list[LayoutResult]:
    """Run one process per model family as the reference, then every layout, and judge them."""
    families = list(dict.fromkeys(spec.family for spec in specs))
    references = [LayoutSpec(f"one process, {family}", {}) for family in families]
    plan = [(spec, family) for spec, family in zip(references, families, strict=True)]
    plan += [(spec, spec.family) for spec in specs]
    with tempfile.TemporaryDirectory(prefix="megatron-tis-doctor-") as directory:
        for family in families:
            _save_model(family, Path(directory) / family)
        ranks = max(spec.ranks for spec, _ in plan)
        _spawn(ranks, directory, [(asdict(spec), family) for spec, family in plan], timeout)
        results = [_collected(Path(directory), i, spec) for i, (spec, _) in enumerate(plan)]
    by_family = dict(zip(families, results, strict=False))
    for reference in by_family.values():
        reference.agrees = not reference.error
    for result, (_, family) in zip(results[len(families) :], plan[len(families) :], strict=True):
        _judge(result, by_family[family])
    return results


def _spawn(ranks: int, directory: str, plan: list[Any], timeout: float) -> None:
    import time

    import torch.multiprocessing as multiprocessing

    context = multiprocessing.spawn(
        _rank_main, args=(ranks, directory, plan, timeout), nprocs=ranks, join=False
    )
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                return
    except Exception:
        # A rank that died has written no result; the layouts without one are reported as failed.
        return
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _rank_main(rank: int, ranks: int, directory: str, plan: list[Any], timeout: float) -> None:
    import torch

    torch.set_num_threads(1)
    # Megatron warns at import about every optional package; the doctor has already said what matters.
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = str(rank)
    for number, (description, family) in enumerate(plan):
        spec = LayoutSpec(**description)
        if rank >= spec.ranks:
            continue
        try:
            result = _run_layout(rank, spec, family, Path(directory), number, timeout)
        except BaseException:
            result = {"error": traceback.format_exc()}
        if rank == 0 or "error" in result:
            path = Path(directory) / f"{number}-{rank}.json"
            path.write_text(json.dumps(result))


def _run_layout(
    rank: int, spec: LayoutSpec, family: str, directory: Path, number: int, timeout: float
) -> dict[str, Any]:
    from transformers import AutoConfig

    from plugin.config import TrainerConfig
    from plugin.megatron_backend.parallel_groups import destroy_parallel, init_parallel
    from plugin.megatron_backend.trainer import MegatronTrainer

    groups = init_parallel(
        rank,
        spec.ranks,
        init_method=f"file://{directory}/rendezvous-{number}",
        timeout_seconds=timeout / 2,
        **spec.parallel_sizes(),
    )
    try:
        config = TrainerConfig(
            **spec.parallel_sizes(),
            sequence_parallel=spec.sequence_parallel,
            use_tis=True,
            lr=1e-3,
        )
        hf_config = AutoConfig.from_pretrained(directory / family)
        trainer = MegatronTrainer(config, hf_config, groups)
        trainer.load_hf_weights(directory / family)
        batch = _batch()
        log_probs = trainer.compute_log_probs(batch)
        batch = batch.with_column("log_probs", [value.cpu() for value in log_probs])
        step = trainer.train_step(batch)
    finally:
        destroy_parallel()
    return {
        "loss": step.metrics["loss"],
        "grad_norm": step.grad_norm,
        "log_probs": [float(value) for sample in log_probs for value in sample],
    }


def _batch() -> Any:
    """Six uneven samples with log-probs around those of an untrained model."""
    import torch

    from plugin.batch_types import RolloutBatch

    generator = torch.Generator().manual_seed(11)
    responses = [5, 9, 3, 12, 7, 4][:SAMPLES]
    totals = [length + 2 + i for i, length in enumerate(responses)]
    near_uniform = -math.log(VOCABULARY)
    return RolloutBatch(
        {
            "unconcat_tokens": [
                torch.randint(VOCABULARY, (total,), generator=generator) for total in totals
            ],
            "total_lengths": totals,
            "response_lengths": responses,
            "loss_masks": [torch.ones(length, dtype=torch.int64) for length in responses],
            "advantages": [torch.randn(length, generator=generator) for length in responses],
            "rollout_log_probs": [
                near_uniform + 0.2 * torch.randn(length, generator=generator)
                for length in responses
            ],
        }
    )


def _save_model(family: str, directory: Path) -> None:
    """A tiny random model of a family, written as a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        experts: dict[str, Any] = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
        config: Any = Qwen3MoeConfig(**shared, **experts, decoder_sparse_step=1)
    else:
        config = Qwen3Config(**shared)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)


def _collected(directory: Path, number: int, spec: LayoutSpec) -> LayoutResult:
    result = LayoutResult(spec.name, spec.ranks)
    found = {path: json.loads(path.read_text()) for path in directory.glob(f"{number}-*.json")}
    errors = [content["error"] for content in found.values() if "error" in content]
    if errors or not found:
        result.error = errors[0] if errors else "no rank finished; it hung or was killed"
        return result
    (content,) = found.values()
    result.loss, result.grad_norm = content["loss"], content["grad_norm"]
    result.log_probs = content["log_probs"]
    return result


def _judge(result: LayoutResult, reference: LayoutResult, tolerance: float = 1e-4) -> None:
    """Relative differences of loss and gradient norm, the largest of any log-prob; all within the tolerance."""
    if result.error or reference.error:
        result.error = (
            result.error or f"{reference.layout} failed, so there is nothing to compare with"
        )
        return
    assert result.loss is not None and reference.loss is not None
    assert result.grad_norm is not None and reference.grad_norm is not None
    result.differences = {
        "loss": abs(result.loss - reference.loss) / max(abs(reference.loss), 1e-3),
        "gradient norm": abs(result.grad_norm - reference.grad_norm)
        / max(abs(reference.grad_norm), 1e-6),
        "log-probs": max(
            (abs(a - b) for a, b in zip(result.log_probs, reference.log_probs, strict=True)),
            default=math.inf,
        ),
    }
    result.agrees = all(value <= tolerance for value in result.differences.values())
