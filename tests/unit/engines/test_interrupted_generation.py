"""Weights that change between two decode steps: what is sampled, stamped and recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.engines.protocol import (
    Generation,
    GenerationRequest,
    SamplingParameters,
    check_generations,
)
from plugin.engines.transformers.engine import TransformersEngine
from plugin.engines.transformers.sampling import sampling_log_probs
from plugin.engines.weight_changes import PausePoint
from plugin.errors import EngineError, WeightError
from plugin.weights.buckets import pack_buckets
from tests.parallel.tiny_models import FAMILIES, hf_model, hf_state_dict
from tests.unit.engines.tiny_engines import (
    PARAMETERS,
    REQUESTS,
    load,
    loaded_engine,
    reference_log_probs,
)

#: Decode steps before which new weights arrive: the tokens sampled before keep their version.
CHANGES = (3, 6)


@contextmanager
def weights_arriving(
    engine: TransformersEngine, family: str, steps: tuple[int, ...]
) -> Iterator[None]:
    """Version n comes from another thread while forward pass number `steps[n - 1]` runs."""
    passes, threads = 0, []

    def arrive(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes in steps:
            version = steps.index(passes) + 1
            state = hf_state_dict(FAMILIES[family](), seed=version)
            threads.append(threading.Thread(target=load, args=(engine, state, version)))
            threads[-1].start()
            while not engine._pause_point._changes_waiting:
                threads[-1].join(0.001)

    hook = engine._model.register_forward_pre_hook(arrive)
    try:
        yield
    finally:
        hook.remove()
        for thread in threads:
            thread.join()


def interrupted(
    family: str, mode: str, parameters: SamplingParameters = PARAMETERS
) -> list[tuple[GenerationRequest, Generation]]:
    engine = loaded_engine(family, interrupts=mode)
    with weights_arriving(engine, family, CHANGES):
        answers = engine.generate(REQUESTS, parameters)
    check_generations(REQUESTS, answers, parameters)
    assert engine.health().weight_version == 2
    return [(r, g) for r, answer in zip(REQUESTS, answers, strict=True) for g in answer]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_log_prob_is_that_of_the_weights_that_its_token_is_stamped_with(family: str) -> None:
    models = [hf_model(FAMILIES[family](), seed=seed) for seed in (0, 1, 2)]
    seen: set[int] = set()
    for request, generation in interrupted(family, "recompute"):
        versions = generation.token_versions()
        # Pass 1 reads the prompt and gives token 0, so pass 3 gives token 2, the last of version 0.
        assert versions.tolist() == ([0] * 3 + [1] * 3 + [2] * 4)[: len(versions)]
        assert generation.log_probs is not None
        for version, model in enumerate(models):
            mine = versions == version
            expected = reference_log_probs(model, request, generation, PARAMETERS)
            assert torch.allclose(generation.log_probs[mine], expected[mine], atol=1e-5)
        other = reference_log_probs(models[0], request, generation, PARAMETERS)[versions > 0]
        assert not torch.allclose(generation.log_probs[versions > 0], other, atol=1e-2) or not len(
            other
        )
        seen |= set(versions.tolist())
    assert seen == {0, 1, 2}


def test_a_response_that_goes_on_keeps_the_keys_and_values_of_the_old_weights() -> None:
    models = [hf_model(FAMILIES["qwen3"](), seed=seed) for seed in (0, 1, 2)]
    for request, generation in interrupted("qwen3", "continue"):
        expected = log_probs_with_one_cache(models, request, generation)
        assert generation.log_probs is not None
        assert torch.allclose(generation.log_probs, expected, atol=1e-5)
    whole = reference_log_probs(models[2], request, generation, PARAMETERS)
    assert not torch.allclose(generation.log_probs[6:], whole[6:], atol=1e-4)


def log_probs_with_one_cache(
    models: list[Any], request: GenerationRequest, generation: Generation
) -> Tensor:
    """Token by token, each by the model of its version, over the cache that all of them wrote."""
    cache, read, rows = None, torch.tensor([request.prompt]), []
    for token, version in zip(
        generation.tokens.tolist(), generation.token_versions().tolist(), strict=True
    ):
        with torch.no_grad():
            output = models[version](read, past_key_values=cache, use_cache=True)
        cache, read = output.past_key_values, torch.tensor([[token]])
        rows.append(sampling_log_probs(output.logits[:, -1], PARAMETERS)[0, token])
    return torch.stack(rows)


def test_routes_are_those_of_the_pass_that_sampled_the_next_token() -> None:
    recorded = SamplingParameters(max_response_length=9, routed_experts=True)
    models = [hf_model(FAMILIES["qwen3_moe"](), seed=seed) for seed in (0, 1, 2)]
    for request, generation in interrupted("qwen3_moe", "recompute", recorded):
        tokens = torch.cat([torch.tensor(request.prompt), generation.tokens])
        routes = torch.stack([routes_of(model, tokens) for model in models])
        # The prompt's routes and those before token t are of the version that sampled token t.
        first = generation.token_versions()[0].expand(len(request.prompt) - 1)
        version = torch.cat([first, generation.token_versions()])
        expected = routes[version, torch.arange(len(version))]
        assert generation.routed_experts is not None
        assert torch.equal(generation.routed_experts[:-1].long(), expected)
        assert not torch.equal(generation.routed_experts[:-1].long(), routes[2, :-1])


def routes_of(model: Any, tokens: Tensor) -> Tensor:
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: seen.append(out[-1]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def test_responses_go_on_with_the_old_weights_while_new_ones_are_incomplete() -> None:
    engine = loaded_engine(interrupts="recompute")
    alone = engine.generate(REQUESTS, PARAMETERS)
    buckets = list(pack_buckets(hf_state_dict(FAMILIES["qwen3"](), 1).items(), bucket_bytes=20_000))
    engine.load_weights(1, buckets[0], last=False)
    again = engine.generate(REQUESTS, PARAMETERS)
    for first, second in zip(chain(*alone), chain(*again), strict=True):
        assert torch.equal(first.tokens, second.tokens)
        assert set(second.token_versions().tolist()) == {0}
    # A version whose sender died is forgotten when the next one comes.
    load(engine, hf_state_dict(FAMILIES["qwen3"](), 2), version=2)
    assert engine.health().weight_version == 2


def test_a_version_that_ends_incomplete_ends_the_generation() -> None:
    engine = loaded_engine(interrupts="recompute")
    state = hf_state_dict(FAMILIES["qwen3"](), 1)
    del state["model.norm.weight"]
    with pytest.raises(WeightError, match=r"without 1 tensors.*model\.norm\.weight"):
        load(engine, state, version=1)
    with pytest.raises(EngineError, match="half of a new version"):
        engine.generate(REQUESTS, PARAMETERS)


def test_a_change_waits_for_a_pause_and_goes_before_the_next_generation() -> None:
    point, order = PausePoint(), []
    inside, done = threading.Event(), threading.Event()

    def change() -> None:
        with point.changing():
            order.append("change")

    def generate() -> None:
        with point.generating():
            inside.set()
            done.wait(10)
            order.append("generated")

    first = started(generate)
    assert inside.wait(10)
    changes = started(change)
    while not point._changes_waiting:
        changes.join(0.001)
    inside.clear()
    second = started(generate)
    assert not inside.wait(0.1) and order == []
    done.set()
    for thread in (first, changes, second):
        thread.join(10)
    assert order == ["generated", "change", "generated"]


def started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread
