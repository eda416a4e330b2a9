"""The real model in bfloat16: an engine with one wrong tensor of 272 is stopped, a healthy one is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plugin.cluster.model_source import policy_source
from plugin.config import JobConfig
from plugin.controller.local_engine import load_directory
from plugin.controller.weight_verification import make_probe, probe_batch, scores_of
from plugin.engines.protocol import Generation, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.engines.weight_changes import answer_probe
from plugin.megatron_backend.cpu_runtime import import_megatron
from plugin.observe.findings import Finding
from plugin.observe.probe_diagnosis import ProbedModel, limit_for, probe_finding
from plugin.tasks.loading import load_tokenizer
from plugin.tasks.protocol import Prompt
from tests.planted_faults import FAULTS

MODEL = Path(__file__).parents[2] / "runs" / "real_model" / "model"
QUESTION = "What is 17 + 4 - 12? Answer with a number."

pytestmark = [
    pytest.mark.skipif(not MODEL.exists(), reason="the real model is not there: make train-real"),
    pytest.mark.timeout(900),
]


class Pair:
    """Trainer and engine with the same weights, both in bfloat16, and the probe of a job."""

    def __init__(self, trainer: Any, config: JobConfig) -> None:
        self._trainer, self._config = trainer, config
        source = policy_source(config)
        chat = [{"role": "user", "content": QUESTION}]
        tokens = load_tokenizer(config).apply_chat_template(chat, add_generation_prompt=True)
        task = SimpleNamespace(prompt=lambda _: Prompt(tuple(tokens["input_ids"])))
        parts: Any = SimpleNamespace(task=task, sampling=SamplingParameters())
        probe = make_probe(config, parts)
        assert probe is not None
        self._probe = probe
        self.engine = TransformersEngine(source.hf_config, dtype="bfloat16")
        load_directory(self.engine, MODEL)
        self._weights = {n: w.clone() for n, w in self.engine.model.state_dict().items()}
        self._frequencies = self.engine.model.model.rotary_emb.inv_freq.clone()  # type: ignore[union-attr]

    @torch.no_grad()
    def finding_of(self, kind: str | None) -> Finding | None:
        model: Any = self.engine.model
        model.lm_head.weight = model.model.embed_tokens.weight
        model.load_state_dict(self._weights)
        model.model.rotary_emb.inv_freq.copy_(self._frequencies)
        if kind is not None:
            FAULTS[kind](model)
        [answer] = answer_probe(self.engine, self._probe)
        batch = probe_batch(self._probe, [a for a in answer.answers if isinstance(a, Generation)])
        scores = scores_of(batch, list(self._trainer.compute_log_probs(batch)))
        print(f"{kind}: mean |log-prob difference| {scores.mean:.3g}")
        known = ProbedModel(vocab_size=49152, is_tied=True)
        limit = limit_for(self._config, "bfloat16")
        return probe_finding("engine 0", scores, limit, known, self._config)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    import_megatron()
    from plugin.megatron_backend.parallel_groups import one_process
    from plugin.megatron_backend.trainer import MegatronTrainer

    settings: dict[str, Any] = {"train_dtype": "bfloat16", "rollout_dtype": "bfloat16"}
    config = JobConfig(hf_checkpoint=str(MODEL), prompt_data="unused", **settings)
    hf_config = policy_source(config).as_config()
    torch.set_num_threads(2)
    with one_process() as groups:
        trainer = MegatronTrainer(
            config, hf_config, groups, layout="padded", trainable=False, seed=0
        )
        trainer.load_hf_weights(str(MODEL))
        yield Pair(trainer, config)


def test_a_healthy_engine_raises_no_alarm(pair: Pair) -> None:
    assert pair.finding_of(None) is None


@pytest.mark.parametrize("kind", FAULTS)
def test_an_engine_with_a_wrong_tensor_is_stopped(pair: Pair, kind: str) -> None:
    finding = pair.finding_of(kind)
    assert finding is not None
    if kind == "stale_head":
        assert finding.likely_cause.startswith("the tied LM head")
