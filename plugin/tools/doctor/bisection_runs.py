"""Builds engine and trainer, runs the same tokens through both and compares their layers.

Done dtype by dtype: first both sides in float32, where rounding is a millionth and anything else
stands out; then as they are run, which shows what rounding adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugin.cluster.model_source import ModelSource, directory_source, policy_source
from plugin.config import JobConfig, TrainerConfig
from plugin.controller.local_engine import load_directory, load_tensors
from plugin.engines.transformers.engine import TransformersEngine
from plugin.megatron_backend.parallel_groups import ParallelGroups, one_process
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.tools.doctor.bisect_flags import BisectFlags
from plugin.tools.doctor.bisection import Bisection, Verdict, bisect, judge
from plugin.tools.doctor.layer_trace import (
    LayerTrace,
    load_trace,
    save_trace,
    trace_engine,
    trace_trainer,
)

#: From a dtype and the trainer, whose weights it may take: the engine's model.
EngineModel = Callable[[Any, MegatronTrainer], nn.Module]


def run_bisect(options: BisectFlags) -> tuple[list[Bisection], Verdict]:
    """One comparison per pair of dtypes, and the verdict."""
    config = JobConfig(hf_checkpoint=options.hf_checkpoint, embedded_model=options.embedded_model)
    source = policy_source(config)
    hf_config = source.as_config()
    given: LayerTrace | EngineModel
    if options.hidden_states is not None:
        given = load_trace(Path(options.hidden_states), hf_config)
    else:
        given = _engine_builder(options, source, config)
    weights = source.directory or source.random_weights()
    with one_process() as groups:
        passes = bisect_passes(
            groups,
            hf_config,
            weights,
            given,
            random_sequences(hf_config),
            dtypes=[("float32", "float32"), (options.train_dtype, options.rollout_dtype)],
            save=None if options.save_hidden_states is None else Path(options.save_hidden_states),
            decodes=options.engine_pass == "decode",
        )
    return passes, verdict_of(passes)


def verdict_of(passes: Sequence[Bisection]) -> Verdict:
    """The first fault: what shows in float32 is not rounding. Without one, the last verdict."""
    verdicts = [judge(bisection) for bisection in passes]
    return next((verdict for verdict in verdicts if verdict.fault), verdicts[-1])


def bisect_passes(
    groups: ParallelGroups,
    hf_config: Any,
    weights: str | Mapping[str, Tensor],
    engine: LayerTrace | EngineModel,
    sequences: Sequence[Tensor],
    *,
    dtypes: Sequence[tuple[Any, Any]],
    save: Path | None = None,
    decodes: bool = False,
) -> list[Bisection]:
    """Compare at every (trainer's, engine's) dtype; a recorded trace keeps its own dtype.

    save: where the engine's trace of the last pass is written
    decodes: the engine takes token after token, as when it samples; otherwise all as a prompt
    """
    if isinstance(engine, LayerTrace):
        precision = precision_of(engine)
        dtypes = [(train_dtype, precision) for train_dtype, _ in dtypes]
        sequences = engine.sequences()
    passes = []
    for train_dtype, rollout_dtype in dict.fromkeys(dtypes):
        config = TrainerConfig(train_dtype=train_dtype)
        trainer = MegatronTrainer(config, hf_config, groups, trainable=False)
        trainer.load_hf_weights(weights)
        if isinstance(engine, LayerTrace):
            trace = engine
        else:
            trace = trace_engine(engine(rollout_dtype, trainer), sequences, decodes=decodes)
        found = bisect(
            trace,
            trace_trainer(trainer, sequences),
            trace_trainer(trainer, sequences, trace),
            train_dtype=train_dtype,
            rollout_dtype=rollout_dtype,
            topk=getattr(hf_config, "num_experts_per_tok", None),
        )
        passes.append(found)
        del trainer  # before the next pass builds its own
    if save is not None:
        save_trace(trace, save)
    return passes


def _engine_builder(options: BisectFlags, source: ModelSource, config: JobConfig) -> EngineModel:
    """The transformers engine, with the trainer's weights or those of another directory."""
    other = None
    if options.engine_hf_checkpoint is not None:
        other = directory_source(options.engine_hf_checkpoint, "--engine-hf-checkpoint", config)

    def build(dtype: Any, trainer: MegatronTrainer) -> nn.Module:
        engine = TransformersEngine(
            (other or source).hf_config, dtype=dtype, quantization=options.rollout_quantization
        )
        if other is None:
            load_tensors(engine, trainer.export_hf_weights())
        else:
            load_directory(engine, Path(str(other.directory)))
        return engine.model

    return build


def random_sequences(hf_config: Any) -> list[Tensor]:
    """Four sequences of different lengths, up to 64 tokens or what the model takes."""
    generator = torch.Generator().manual_seed(0)
    longest = min(64, hf_config.max_position_embeddings)
    lengths = [max(2, longest - 5 * number) for number in range(4)]
    return [torch.randint(hf_config.vocab_size, (n,), generator=generator) for n in lengths]


def precision_of(trace: LayerTrace) -> str:
    """The dtype that the states were computed in, whatever they are stored in."""
    values = trace.states["layers.0.output"]
    for name in ("bfloat16", "float16"):
        if torch.equal(values.to(getattr(torch, name)).float(), values):
            return name
    return "float32"
