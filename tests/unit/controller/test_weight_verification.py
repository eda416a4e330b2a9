"""Engines with one wrong tensor are stopped before a step; healthy ones never are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plugin.batch_types import RolloutBatch
from plugin.cluster.engine_pool import EnginePool, Probed
from plugin.config import JobConfig
from plugin.controller.local_engine import load_tensors
from plugin.controller.weight_verification import WeightVerification, make_probe
from plugin.engines.protocol import GenerationFailure, GenerationRequest, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.engines.weight_changes import ProbeAnswer, WeightProbe, answer_probe
from plugin.errors import FindingError
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run
from plugin.ragged import Ragged
from plugin.tasks.protocol import Prompt
from plugin.weights.checksums import checksum
from tests.planted_faults import FAULTS, NO_WEIGHT, FaultyEngine

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    initializer_range=0.2,
)


def realistic_model() -> LlamaForCausalLM:
    """Small, but every tensor matters as in a trained model: large weights, norms that differ from one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    return model


MODEL = realistic_model()


def tensors(model: LlamaForCausalLM = MODEL) -> dict[str, torch.Tensor]:
    return {n: w for n, w in model.state_dict().items() if n != "lm_head.weight"}


class Trainer:
    """Scores a batch with a whole forward pass of the model, as the ranks do."""

    on_gpu = False

    def __init__(self, dtype: str) -> None:
        self.dtype, self.passes = dtype, 0
        self._model = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
        self._model.load_state_dict(MODEL.state_dict())
        self._model.to(getattr(torch, dtype))

    def log_probs(self, name: str, batch: RolloutBatch) -> Ragged:
        self.passes += 1
        rows = []
        for tokens, length in zip(
            batch.columns["unconcat_tokens"], batch.columns["response_lengths"], strict=True
        ):
            logits = self._model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
            rows.append(logits.gather(-1, tokens[1:, None])[-int(length) :, 0])
        return Ragged.of(rows)


class Verified:
    """A verification over engines in this process.

    version: of the trainer; the engines have 0
    """

    def __init__(self, run_dir: Path, *, trainer: str = "float32", **settings: Any) -> None:
        config = JobConfig(train_dtype=trainer, **{"rollout_dtype": "float32", **settings})
        task = SimpleNamespace(prompt=lambda _: Prompt((5, 6, 7, 8)), stop_token_ids=())
        parts: Any = SimpleNamespace(
            task=task,
            sampling=SamplingParameters(max_response_length=20),
            route_shape=None,
            policy=SimpleNamespace(hf_config=CONFIG.to_dict()),
        )
        self.said: list[str] = []
        self.files = RunFiles(run_dir, config.as_dict(), tensorboard=False)
        self.engines: Any = SimpleNamespace(poll=lambda: None, set_verified=self._note)
        self.engines.take_probed = lambda: self.probed
        self.engines.probe_returned_servers = lambda: None
        self.verified: list[int] = []
        self.probed: list[Probed] = []
        self.trainer = Trainer(trainer)
        dtype = getattr(torch, config.rollout_dtype)
        sums = {name: checksum(tensor, dtype) for name, tensor in tensors().items()}
        weights: Any = SimpleNamespace(checksums=sums, version=0)
        console: Any = SimpleNamespace(log=self.said.append, warn=self.said.append)
        self.verification = WeightVerification(
            *(config, parts, self.trainer, self.engines, weights, self.files, console)
        )

    def _note(self, probed: Probed) -> None:
        self.verified.append(probed.engine)

    def ask(self, engine: TransformersEngine) -> list[ProbeAnswer]:
        """What an engine answers once it has the weights."""
        load_tensors(engine, tensors().items())
        return answer_probe(engine, self.engines.probe)

    def check(self, *engines: TransformersEngine, version: int = 0) -> None:
        self.probed = [Probed(i, None, self.ask(engine)) for i, engine in enumerate(engines)]
        self.verification.check(version, 0)


@pytest.mark.parametrize("kind", FAULTS)
def test_an_engine_with_a_wrong_tensor_is_stopped_by_the_probe_alone(
    kind: str, tmp_path: Path
) -> None:
    job = Verified(tmp_path)
    with pytest.raises(FindingError, match="engine 0 does not compute with the trainer's weights"):
        job.check(FaultyEngine(CONFIG.to_dict(), kind))
    assert job.verified == [] and job.said == []
    [finding] = read_run(tmp_path).findings
    assert finding["unmistakable"] and "doctor --bisect" in finding["what_to_try"]


@pytest.mark.parametrize("kind", FAULTS)
def test_an_engine_with_a_wrong_tensor_is_stopped_in_bfloat16_too(
    kind: str, tmp_path: Path
) -> None:
    job = Verified(tmp_path, trainer="bfloat16", rollout_dtype="bfloat16")
    with pytest.raises(FindingError, match=r"limit 0\.1 for bfloat16"):
        job.check(FaultyEngine(CONFIG.to_dict(), kind, dtype="bfloat16"))


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind not in NO_WEIGHT])
def test_checksums_name_the_tensors_that_differ(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FindingError) as stopped:
        Verified(tmp_path).check(FaultyEngine(CONFIG.to_dict(), kind, checksums=True))
    named = {
        "stale_head": ": lm_head.weight",
        "permuted_embedding": ": lm_head.weight, model.embed_tokens.weight",
        "missing_query": ": model.layers.2.self_attn.q_proj.weight",
        "scaled_output": ": model.layers.2.self_attn.o_proj.weight",
        "swapped_gate_and_up": "model.layers.2.mlp.gate_proj.weight, model.layers.2.mlp.up_proj",
        "swapped_key_and_value": "model.layers.2.self_attn.k_proj.weight, model.layers.2.self",
        "default_norms": "4 of 38 tensors of the engine differ",
        "swapped_layers": "18 of 38 tensors of the engine differ",
        "rounded_weights": "of 38 tensors of the engine differ",
    }[kind]
    assert named in str(stopped.value), str(stopped.value)


def test_equal_checksums_point_at_what_is_no_weight(tmp_path: Path) -> None:
    with pytest.raises(FindingError, match=r"have the trainer's checksums, so look at .* rotary"):
        Verified(tmp_path).check(FaultyEngine(CONFIG.to_dict(), "wrong_rope", checksums=True))


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        ("float32", {}),
        ("float32", {"dtype": "bfloat16"}),
        ("float32", {"dtype": "float16"}),
        ("bfloat16", {"dtype": "bfloat16"}),
        ("bfloat16", {}),
        ("float32", {"quantization": "int8"}),
    ],
)
def test_healthy_engines_raise_no_alarm(
    trainer: str, engine: dict[str, str], tmp_path: Path
) -> None:
    settings = {f"rollout_{name}": value for name, value in engine.items()}
    job = Verified(tmp_path, trainer=trainer, **settings)
    job.check(*(TransformersEngine(CONFIG.to_dict(), **engine) for _ in range(2)))  # type: ignore[arg-type]
    assert job.verified == [0, 1] and job.trainer.passes == 1
    assert job.said[0].startswith("engine 0 computes with the trainer's weights: mean |log-prob")
    assert ("tensors have its checksums" in job.said[0]) == ("quantization" not in engine)


def test_an_engine_whose_trainer_has_moved_on_is_judged_loosely_and_again(tmp_path: Path) -> None:
    job = Verified(tmp_path)
    job.check(TransformersEngine(CONFIG.to_dict()), version=1)
    assert job.verified == [] and "limit 2e+00" in job.said[0]
    with pytest.raises(FindingError, match="the trainer has moved on"):
        job.check(FaultyEngine(CONFIG.to_dict(), "stale_head"), version=1)


def test_an_engine_that_could_not_answer_stays_unverified(tmp_path: Path) -> None:
    job = Verified(tmp_path)
    [answer] = job.ask(TransformersEngine(CONFIG.to_dict()))
    failed = ProbeAnswer("http://b", [GenerationFailure("it is busy")])
    job.probed = [Probed(0, None, [replace(answer, server="http://a"), failed])]
    job.verification.check(0, 0)
    assert job.verified == []
    assert job.said[0] == "engine 0 (http://b) is not verified yet: it is busy"
    assert job.said[1].startswith("engine 0 (http://a) computes with")


def test_the_probe_is_a_few_short_responses_of_the_full_distribution() -> None:
    sampling = SamplingParameters(
        temperature=0.5, top_p=0.9, max_response_length=4, sampling_mask=True, log_probs=False
    )
    parts: Any = SimpleNamespace(
        task=SimpleNamespace(prompt=lambda _: Prompt((5, 6))), sampling=sampling
    )
    probe = make_probe(JobConfig(), parts)
    assert probe is not None and probe.request is not None
    assert len(probe.request.seeds) == 4 and probe.checksums
    assert probe.parameters == SamplingParameters(temperature=0.5, max_response_length=4)
    assert make_probe(JobConfig(verify_weights="off"), parts) is None
    own = JobConfig(rollout_engine="my.engine:make")
    assert make_probe(own, parts) is None  # it may not report log-probs at all


def pool_of(config: JobConfig, *, verified: list[bool]) -> Any:
    pool: Any = object.__new__(EnginePool)
    pool._config, pool.probe, pool._is_asleep = config, "probe", False
    pool._engines = [
        SimpleNamespace(actor=i, is_verified=v, starting=None, is_absent=False)
        for i, v in enumerate(verified)
    ]
    pool._probed, pool._loads = [], {}
    return pool


def test_an_engine_is_asked_until_it_is_verified_and_then_at_every_nth_version() -> None:
    pool = pool_of(JobConfig(), verified=[True, False])
    pool._newest = 4
    assert [pool._probe_for(0), pool._probe_for(1)] == [None, "probe"] and pool.any_probe_due
    pool.set_verified(Probed(1, 1, []))
    assert not pool.any_probe_due
    pool = pool_of(JobConfig(verify_weights="every:2"), verified=[True])
    asked = []
    for pool._newest in range(5):
        asked.append(pool._probe_for(0))
    assert asked == ["probe", None, "probe", None, "probe"]
    # Asleep it has no memory for a response, but for its weights.
    pool._is_asleep = True
    pool.probe = WeightProbe(GenerationRequest((1,), (2,)), SamplingParameters(), checksums=True)
    assert pool._probe_for(0) == replace(pool.probe, request=None)
    pool.probe = replace(pool.probe, checksums=False)
    assert pool._probe_for(0) is None and pool.any_probe_due
    off = pool_of(JobConfig(verify_weights="off"), verified=[False])
    off._newest = 0
    assert not off.any_probe_due


def test_answers_of_an_engine_that_was_replaced_count_for_nothing() -> None:
    pool = pool_of(JobConfig(), verified=[False])
    answer = ProbeAnswer("", ["response"])  # type: ignore[list-item]
    pool._note_probed(0, "an earlier actor", [answer])
    pool._note_probed(0, 0, [ProbeAnswer("", (), {"a": 1}), answer])
    assert pool.take_probed() == [Probed(0, 0, [answer])] and pool.take_probed() == []
    pool.set_verified(Probed(0, "an earlier actor", []))
    assert not pool._engines[0].is_verified


def test_a_server_that_came_back_between_two_versions_is_asked_before_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"rollout_engine": "http", "rollout_url": "http://127.0.0.1:1"}
    pool = pool_of(JobConfig(**settings, rollout_weights_dir="/tmp/weights"), verified=[True, True])
    awaits, asked = {0: False, 1: True}, []
    answer = ProbeAnswer("", ["response"])  # type: ignore[list-item]

    def answers(numbers: Any, method: str, *arguments: Any) -> dict[int, Any]:
        asked.append((method, list(numbers), arguments))
        return {n: awaits[n] if method == "awaits_probe" else [answer] for n in numbers}

    monkeypatch.setattr(pool, "_answers", answers)
    pool.probe_returned_servers()
    assert asked == [("awaits_probe", [0, 1], ()), ("answer_probe", [1], ("probe",))]
    assert pool.take_probed() == [Probed(1, 1, [answer])]
