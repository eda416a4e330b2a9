"""Trains a tiny model under several parallel layouts and compares each with one process.

All ranks are started once; for every layout the first ranks join a fresh process group, load the
same weights, compute log-probs and take one training step. The layouts must agree on loss, gradient
norm and log-probs.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugin.errors import ConfigError

if TYPE_CHECKING:
    from plugin.cluster.model_source import ModelSource

VOCABULARY = 96
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
#: Largest difference of a layout that agrees.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class LayoutSpec:
    """A parallel layout by name: `tp2pp2` is tensor parallel 2 and pipeline parallel 2.

    family: of the model that is trained under it
    """

    name: str
    sizes: dict[str, int]
    dp: int = 1
    sequence_parallel: bool = False
    family: str = "qwen3"

    @property
    def ranks(self) -> int:
        dense = self.sizes.get("tp", 1) * self.sizes.get("cp", 1)
        return math.lcm(dense * self.dp, self.sizes.get("ep", 1)) * self.sizes.get("pp", 1)

    def parallel_sizes(self) -> dict[str, Any]:
        return {_SIZES[name]: size for name, size in self.sizes.items()}


@dataclass
class LayoutResult:
    """What a layout gave; `agrees` is judged against one process with the same model."""

    layout: str
    ranks: int
    agrees: bool = False
    loss: float = math.nan
    grad_norm: float = math.nan
    log_probs: list[float] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["log_probs"]
        return values | ({"loss": None, "grad_norm": None} if self.error else {})

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
    """`tp2`, `pp2vpp2`, `tp2sp`, `ep2`, `dp2tp2`; sp without tp or vpp without pp is an error."""
    name = text.strip().lower()
    parts = _PART.findall(name)
    if not parts or "".join("".join(part) for part in parts) != name:
        raise ConfigError(
            f"--layouts {text!r}: expected parts like tp2, pp2, vpp2, cp2, ep2, dp2 and sp, e.g. "
            "tp2pp2 or tp2sp"
        )
    sizes = {kind: int(size) for kind, size, _ in parts if kind and kind != "dp"}
    dp = next((int(size) for kind, size, _ in parts if kind == "dp"), 1)
    sequence_parallel = any(flag for _, _, flag in parts)
    if any(size < 1 for size in (*sizes.values(), dp)):
        raise ConfigError(f"--layouts {text!r}: sizes start at 1")
    if sequence_parallel and sizes.get("tp", 1) < 2:
        raise ConfigError(f"--layouts {text!r}: sp splits over tensor parallel ranks; write tp2sp")
    if "vpp" in sizes and sizes.get("pp", 1) < 2:
        raise ConfigError(f"--layouts {text!r}: vpp splits pipeline stages; write pp2vpp2")
    family = "qwen3_moe" if "ep" in sizes else "qwen3"
    return LayoutSpec(name, sizes, dp, sequence_parallel, family)


def default_layouts(max_ranks: int | None = None) -> list[LayoutSpec]:
    """The default layouts that need at most `max_ranks` ranks.

    Without `max_ranks` as many as this machine has: one per GPU, or on CPU one per core, at least 2
    and at most 4.
    """
    if max_ranks is None:
        import torch

        cores = min(max(os.cpu_count() or 1, 2), 4)
        max_ranks = torch.cuda.device_count() if torch.cuda.is_available() else cores
    specs = [parse_layout(name) for name in DEFAULT_LAYOUTS]
    return [spec for spec in specs if spec.ranks <= max_ranks]


def run_layouts(specs: Sequence[LayoutSpec], *, timeout: float = 600.0) -> list[LayoutResult]:
    """Run one process per model family as the reference, then every layout, and judge them."""
    families = list(dict.fromkeys(spec.family for spec in specs))
    plan = [LayoutSpec(f"one process, {family}", {}, family=family) for family in families]
    plan += specs
    with tempfile.TemporaryDirectory(prefix="megatron-tis-doctor-") as directory:
        _spawn(directory, plan, timeout)
        results = [_collected(Path(directory), i, spec) for i, spec in enumerate(plan)]
    references = dict(zip(families, results, strict=False))
    for reference in references.values():
        reference.agrees = not reference.error
    for result, spec in zip(results[len(families) :], specs, strict=True):
        _judge(result, references[spec.family])
    return results


def _spawn(directory: str, plan: Sequence[LayoutSpec], timeout: float) -> None:
    import torch.multiprocessing as multiprocessing

    ranks = max(spec.ranks for spec in plan)
    context = multiprocessing.spawn(
        _rank_main, args=(directory, plan, timeout), nprocs=ranks, join=False
    )
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=1.0) and time.monotonic() <= deadline:
            pass
    except Exception:
        # A rank that died has written no result; the layouts without one are reported as failed.
        return
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _rank_main(rank: int, directory: str, plan: Sequence[LayoutSpec], timeout: float) -> None:
    import torch

    torch.set_num_threads(1)
    # Megatron warns at import about every optional package; the checks have named what matters.
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = str(rank)
    for number, spec in enumerate(plan):
        if rank >= spec.ranks:
            continue
        try:
            result = _run_layout(rank, spec, Path(directory), number, timeout)
        except BaseException:
            result = {"error": traceback.format_exc()}
        if rank == 0 or "error" in result:
            Path(directory, f"{number}-{rank}.json").write_text(json.dumps(result))


def _run_layout(
    rank: int, spec: LayoutSpec, directory: Path, number: int, timeout: float
) -> dict[str, Any]:
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
        model = _tiny_model(spec.family)
        trainer = MegatronTrainer(config, model.as_config(), groups)
        trainer.load_hf_weights(model.random_weights())
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
    responses = [5, 9, 3, 12, 7, 4]
    totals = [length + 2 + i for i, length in enumerate(responses)]
    noise = partial(torch.randn, generator=generator)
    return RolloutBatch(
        {
            "unconcat_tokens": [
                torch.randint(VOCABULARY, (total,), generator=generator) for total in totals
            ],
            "total_lengths": totals,
            "response_lengths": responses,
            "loss_masks": [torch.ones(length, dtype=torch.int64) for length in responses],
            "advantages": [noise(length) for length in responses],
            "rollout_log_probs": [
                0.2 * noise(length) - math.log(VOCABULARY) for length in responses
            ],
        }
    )


def _tiny_model(family: str) -> ModelSource:
    """A random model whose heads, layers and experts the layouts can cut."""
    from plugin.cluster.model_source import ModelSource

    sizes = {
        "model_type": family,
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
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        sizes |= {"decoder_sparse_step": 1}
    return ModelSource(sizes, seed=3)


def _collected(directory: Path, number: int, spec: LayoutSpec) -> LayoutResult:
    found = [json.loads(path.read_text()) for path in directory.glob(f"{number}-*.json")]
    errors = [content for content in found if "error" in content]
    if not found:
        errors = [{"error": "no rank finished; it hung or was killed"}]
    return LayoutResult(spec.name, spec.ranks, **(errors or found)[0])


def _judge(result: LayoutResult, reference: LayoutResult) -> None:
    """Relative differences of loss and gradient norm, the largest of any log-prob."""
    if result.error or reference.error:
        nothing = f"{reference.layout} failed, so there is nothing to compare with"
        result.error = result.error or nothing
        return

    def relative(value: float, wanted: float, smallest: float) -> float:
        return abs(value - wanted) / max(abs(wanted), smallest)

    pairs = zip(result.log_probs, reference.log_probs, strict=True)
    result.differences = {
        "loss": relative(result.loss, reference.loss, 1e-3),
        "gradient norm": relative(result.grad_norm, reference.grad_norm, 1e-6),
        "log-probs": max((abs(a - b) for a, b in pairs), default=math.inf),
    }
    result.agrees = all(value <= _TOLERANCE for value in result.differences.values())
