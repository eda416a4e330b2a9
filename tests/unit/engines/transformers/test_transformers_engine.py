"""The transformers engine against the same model run over whole sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import JobConfig
from plugin.controller.preflight.job_checks import check_job
from plugin.engines.choice import check_engine_model
from plugin.engines.protocol import (
    Generation,
    GenerationRequest,
    SamplingParameters,
    check_generations,
)
from plugin.engines.transformers.engine import TransformersEngine
from plugin.engines.transformers.sampling import sampling_log_probs
from plugin.errors import ConfigError, EngineError, WeightError
from plugin.weights.buckets import pack_buckets
from tests.parallel.tiny_models import (
    ALL_FAMILIES,
    FAMILIES,
    hf_model,
    hf_state_dict,
    tiny_moonlight,
)
from tests.unit.engines.tiny_engines import (
    PARAMETERS,
    REQUESTS,
    load,
    loaded_engine,
    reference_log_probs,
)


def flat(answers: list[list[Generation]]) -> list[tuple[GenerationRequest, Generation]]:
    return [(r, g) for r, answer in zip(REQUESTS, answers, strict=True) for g in answer]


def versions_of(answers: list[list[Generation]]) -> set[int]:
    return {version for _, g in flat(answers) for version in g.token_versions().tolist()}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_whole_sequence_at_the_sampling_temperature(family: str) -> None:
    model = hf_model(FAMILIES[family]())
    answers = loaded_engine(family).generate(REQUESTS, PARAMETERS)
    check_generations(REQUESTS, answers, PARAMETERS)
    assert {g.finish_reason for _, g in flat(answers)} == {"stop", "length"}
    for request, generation in flat(answers):
        expected = reference_log_probs(model, request, generation, PARAMETERS)
        assert torch.allclose(generation.log_probs, expected, atol=1e-5)


#: No two sizes of a model are equal, so that one that is taken for another shows.
UNEQUAL = {"hidden_size": 40, "head_dim": 12, "intermediate_size": 44}
UNEQUAL_LATENT = UNEQUAL | {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "v_head_dim": 14}
UNEQUAL_CONFIGS = {
    family: make(**(UNEQUAL_LATENT if family == "deepseek_v3" else UNEQUAL))
    for family, make in (ALL_FAMILIES | {"Moonlight": tiny_moonlight}).items()
}
REFUSED = {"qwen3_next"}


@pytest.mark.parametrize("family", sorted(UNEQUAL_CONFIGS.keys() - REFUSED))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_no_family_fails_at_its_first_decode(family: str, dtype: str) -> None:
    config = UNEQUAL_CONFIGS[family]
    check_engine_model(JobConfig(), config.to_dict())
    engine = TransformersEngine(
        config.to_dict(), quantization="int8" if dtype == "int8" else "none"
    )
    load(engine, hf_state_dict(config, 0))
    answers = engine.generate(REQUESTS, PARAMETERS)
    check_generations(REQUESTS, answers, PARAMETERS)
    model = hf_model(config)
    for request, generation in flat(answers):
        expected = reference_log_probs(model, request, generation, PARAMETERS)
        if dtype == "float32":
            assert torch.allclose(generation.log_probs, expected, atol=2e-5)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_that_the_engine_cannot_generate_with_is_refused_before_the_start(
    family: str, tmp_path: Path
) -> None:
    hf_model(ALL_FAMILIES[family]()).save_pretrained(tmp_path)
    settings = {"hf_checkpoint": str(tmp_path), "prompt_data": "none.jsonl"}
    with pytest.raises(ConfigError, match=r"cannot generate with qwen3_next: .* use vllm, http,"):
        check_job(JobConfig.from_sources(settings))


def test_truncated_sampling_reports_the_renormalized_log_probs() -> None:
    truncated = SamplingParameters(top_p=0.7, top_k=12, max_response_length=6)
    model = hf_model(FAMILIES["qwen3"]())
    for request, generation in flat(loaded_engine().generate(REQUESTS, truncated)):
        expected = reference_log_probs(model, request, generation, truncated)
        assert torch.allclose(generation.log_probs, expected, atol=1e-4)
        assert bool(expected.isfinite().all())


@pytest.mark.parametrize("kept", [{"top_p": 0.7, "top_k": 12}, {"min_p": 0.6}])
def test_kept_ids_are_those_that_the_whole_sequence_gives(kept: dict[str, Any]) -> None:
    truncated = SamplingParameters(**kept, max_response_length=6, sampling_mask=True)
    model = hf_model(FAMILIES["qwen3"]())
    answers = loaded_engine().generate(REQUESTS, truncated)
    check_generations(REQUESTS, answers, truncated)
    for request, generation in flat(answers):
        sequence = torch.tensor([*request.prompt, *generation.tokens.tolist()])
        with torch.no_grad():
            logits = model(sequence[None]).logits[0, len(request.prompt) - 1 : -1]
        expected = sampling_log_probs(logits, truncated).isfinite()
        mask = generation.sampling_mask
        assert mask is not None and 0 < max(mask.lengths) < expected.shape[1]
        assert [row.tolist() for row in mask] == [r.nonzero()[:, 0].tolist() for r in expected]
    # Nothing was dropped: no entry, however large the vocabulary.
    everything = replace(truncated, top_p=1.0, top_k=10**6, min_p=0.0)
    for _, generation in flat(loaded_engine().generate(REQUESTS, everything)):
        assert generation.sampling_mask is not None and not generation.sampling_mask.lengths.any()


@pytest.mark.parametrize("top_k", [None, 4])
def test_the_likeliest_ids_are_those_of_the_distribution_sampled_from(top_k: int | None) -> None:
    parameters = SamplingParameters(temperature=0.7, top_k=top_k, max_response_length=6, head=5)
    model = hf_model(FAMILIES["qwen3"]())
    answers = loaded_engine().generate(REQUESTS, parameters)
    check_generations(REQUESTS, answers, parameters)
    for request, generation in flat(answers):
        sequence = torch.tensor([*request.prompt, *generation.tokens.tolist()])
        with torch.no_grad():
            logits = model(sequence[None]).logits[0, len(request.prompt) - 1 : -1]
        expected = sampling_log_probs(logits, parameters).topk(5)
        head = generation.head
        assert head is not None and head.ids.shape == (len(generation.tokens), 5)
        found = expected.values.isfinite()
        assert bool(found.all()) == (top_k is None)
        assert torch.equal(head.ids >= 0, found)
        assert torch.equal(head.ids[found].long(), expected.indices[found])
        assert torch.allclose(head.log_probs[found], expected.values[found], atol=1e-4)
        assert generation.log_probs is not None
        # Where the sampled token is among them, its log-prob is the reported one to the bit.
        same = head.ids.long() == generation.tokens[:, None]
        theirs = generation.log_probs[:, None].expand_as(same)
        assert torch.equal(head.log_probs[same], theirs[same])


def test_a_response_does_not_depend_on_how_requests_are_batched() -> None:
    together = loaded_engine(max_batch=64).generate(REQUESTS, PARAMETERS)
    split = loaded_engine(max_batch=2).generate(REQUESTS, PARAMETERS)
    for (_, a), (_, b) in zip(flat(together), flat(split), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.allclose(a.log_probs, b.log_probs, atol=1e-5)


def test_an_engine_whose_first_responses_have_one_token_generates_them() -> None:
    one = SamplingParameters(max_response_length=1)
    answers = loaded_engine().generate(REQUESTS, one)
    assert [len(g.tokens) for _, g in flat(answers)] == [1] * 6


def test_a_stopped_response_ends_with_the_stop_token_and_has_it_once() -> None:
    for _, generation in flat(loaded_engine().generate(REQUESTS, PARAMETERS)):
        stops = torch.isin(generation.tokens, torch.tensor(PARAMETERS.stop_token_ids))
        assert not bool(stops[:-1].any())
        assert bool(stops[-1]) == (generation.finish_reason == "stop")


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"}]
)
def test_low_precision_gives_real_but_small_mismatch(options: dict[str, str]) -> None:
    model = hf_model(FAMILIES["qwen3"]())
    answers = loaded_engine(**options).generate(REQUESTS, PARAMETERS)
    difference = torch.cat(
        [
            (g.log_probs - reference_log_probs(model, r, g, PARAMETERS)).abs()
            for r, g in flat(answers)
        ]
    )
    assert 1e-4 < float(difference.max()) < 0.5


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_routes_cover_prompt_and_response_and_are_those_of_the_model(quantization: str) -> None:
    recorded = SamplingParameters(
        max_response_length=6,
        stop_token_ids=tuple(range(3, 10)),
        routed_experts=True,
        routed_weights=True,
    )
    config = FAMILIES["qwen3_moe"]()
    model = hf_model(config)
    answers = loaded_engine("qwen3_moe", quantization=quantization).generate(REQUESTS, recorded)
    check_generations(REQUESTS, answers, recorded)
    same = total = 0
    furthest = 0.0
    for request, generation in flat(answers):
        tokens = torch.cat([torch.tensor(request.prompt), generation.tokens])
        seen: list[tuple[Tensor, ...]] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(tokens[None])
        for hook in hooks:
            hook.remove()
        # logits, weights after renormalization, experts
        expected = torch.stack([out[2] for out in seen], dim=1)
        weights = torch.stack([out[1] for out in seen], dim=1)
        assert generation.routed_weights.dtype is torch.float32
        furthest = max(furthest, float((generation.routed_weights - weights).abs().max()))
        assert generation.routed_experts.dtype is torch.int8
        assert generation.routed_experts.shape == expected.shape
        same += int((generation.routed_experts.long() == expected).sum())
        total += expected.numel()
    # Exact in full precision; int8 flips some routes, which is what replay is for.
    assert same == total if quantization == "none" else 0.5 < same / total < 1.0
    assert furthest < 1e-5 if quantization == "none" else furthest > 1e-4


def test_every_token_carries_the_version_that_sampled_it() -> None:
    engine = loaded_engine()
    assert versions_of(engine.generate(REQUESTS, PARAMETERS)) == {0}
    load(engine, hf_state_dict(FAMILIES["qwen3"](), seed=1), version=3)
    answers = engine.generate(REQUESTS, PARAMETERS)
    assert versions_of(answers) == {3}
    other = hf_model(FAMILIES["qwen3"](), seed=1)
    for request, generation in flat(answers):
        expected = reference_log_probs(other, request, generation, PARAMETERS)
        assert torch.allclose(generation.log_probs, expected, atol=1e-5)


def test_half_a_version_cannot_generate() -> None:
    engine = loaded_engine()
    state = hf_state_dict(FAMILIES["qwen3"]())
    first = next(iter(pack_buckets(state.items(), bucket_bytes=20_000)))
    engine.load_weights(1, first, last=False)
    with pytest.raises(EngineError, match="half of a new version"):
        engine.generate(REQUESTS, PARAMETERS)


@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        (0, {}, "versions must grow"),
        (
            1,
            {"drop": "model.norm.weight"},
            "without 1 tensors, the first of them model.norm.weight",
        ),
        (1, {"rename": "model.norm.weight"}, "has no renamed"),
        (1, {"reshape": "model.norm.weight"}, r"shape \[16, 2\], the engine expects \[32\]"),
    ],
)
def test_wrong_weights_are_refused(version: int, change: dict[str, str], message: str) -> None:
    engine = loaded_engine()
    state = hf_state_dict(FAMILIES["qwen3"]())
    if "drop" in change:
        del state[change["drop"]]
    if "rename" in change:
        state["renamed"] = state.pop(change["rename"])
    if "reshape" in change:
        state[change["reshape"]] = state[change["reshape"]].view(16, 2)
    with pytest.raises(WeightError, match=message):
        load(engine, state, version)


def test_an_answer_without_log_probs_is_found_where_they_were_asked_for() -> None:
    silent = SamplingParameters(max_response_length=4, log_probs=False)
    answers = loaded_engine().generate(REQUESTS, silent)
    check_generations(REQUESTS, answers, silent)
    asked = SamplingParameters(max_response_length=4)
    with pytest.raises(EngineError, match="request 0 got none log-probs where"):
        check_generations(REQUESTS, answers, asked)


def test_the_growing_cache_holds_what_the_one_it_replaces_holds() -> None:
    from transformers.cache_utils import DynamicLayer

    from plugin.engines.transformers.growing_cache import GrowingLayer

    ours, theirs = GrowingLayer(), DynamicLayer()
    generator = torch.Generator().manual_seed(0)
    # Past the room of the first and of the second buffer, with rows that leave in between.
    for new, kept in ((5, None), (90, [0, 2, 3]), (1, None), (100, [2, 0]), (1, [1])):
        rows = 4 if ours.get_seq_length() == 0 else len(ours.keys)
        states = torch.randn(2, rows, 2, new, 3, generator=generator)
        for layer in (ours, theirs):
            layer.update(*states)
            if kept is not None:
                layer.batch_select_indices(torch.tensor(kept))
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_long_cache_has_little_more_memory_than_it_holds_and_is_seldom_copied() -> None:
    from plugin.engines.transformers.growing_cache import GrowingLayer

    layer, buffers = GrowingLayer(), []
    for _ in range(4000):
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        if not buffers or buffers[-1] != layer._keys.shape[-2]:
            buffers.append(layer._keys.shape[-2])
    # Rooms of 64 up to 512 positions, then an eighth: 4,000 positions are copied 9 times over.
    assert buffers[-1] < 1.15 * 4000 and sum(buffers) < 10 * 4000


def test_reading_prompts_multiplies_the_lm_head_once_for_all_of_them() -> None:
    """Rows with gaps between them would make torch copy the head for each: gigabytes on a real vocabulary."""
    engine, inputs = loaded_engine(), []
    head = engine.model.get_submodule("lm_head")
    head.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    engine.generate(REQUESTS, PARAMETERS)
    # One row with the ends of all prompts, then a row for each response that goes on.
    assert inputs[0].shape[:2] == (1, 3) and inputs[1].shape[1] == 1
    assert all(one.is_contiguous() for one in inputs)
