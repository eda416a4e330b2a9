"""LoRA on the real model beside full training: both learn from the same rewards, adapters without a change of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.rewards.built_in import numeric
from tests.real import chat_samples, layout_runs
from tests.real.conftest import SECONDS
from tests.real.layout_runs import Curve

pytestmark = pytest.mark.timeout(2 * SECONDS)

#: (question, two responses, the right answer); the model mostly gets such sums wrong
PAIRS = (
    ("What is 48 + 37?", ("48 + 37 = 85", "48 + 37 = 75"), 85),
    ("What is 59 + 26?", ("59 + 26 = 75", "59 + 26 = 85"), 85),
    ("What is 67 + 18?", ("67 + 18 = 85", "67 + 18 = 75"), 85),
)
STEPS = 5
METHODS: dict[str, dict[str, Any]] = {
    "full training": {"lr": 1e-5},
    "LoRA": {"lr": 3e-4, "lora_rank": 16},
}
LOSS = {"policy_loss": "reinforce", "calculate_per_token_loss": True, "adam_eps": 1e-8}


@pytest.fixture(scope="module")
def pairs(tokenizer: Any) -> tuple[RolloutBatch, list[float]]:
    """Two responses per question with their rewards, which are the advantages: wrong answers weigh nothing.

    With a baseline REINFORCE would push wrong answers down without end, and that would be all the curve shows.
    """
    conversations, rewards = [], []
    for question, answers, label in PAIRS:
        conversations += [(question, answer) for answer in answers]
        rewards += [numeric(answer, {}, label=label) for answer in answers]
    rows = chat_samples.chat_rows(tokenizer, conversations)
    reported = [torch.full((len(response),), -1.0) for _, response in rows]
    return chat_samples.rollout_batch(rows, rewards, reported), rewards


def likelihoods(curve: Curve, batch: RolloutBatch, rewards: list[float]) -> list[list[float]]:
    """[2][steps + 1]: mean log-prob of right and of wrong responses, before every step and after the last."""
    lengths = batch.columns["response_lengths"].tolist()
    sums = torch.tensor([[part.sum() for part in step.split(lengths)] for step in curve.log_probs])
    return [sums[:, torch.tensor(rewards) == reward].mean(1).tolist() for reward in (1, 0)]


@pytest.fixture(scope="module")
def curves(
    rank_pool: Any,
    model: str,
    pairs: tuple[RolloutBatch, list[float]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Curve, Path]]:
    """What each method computed, and the file with the weights that it exported."""
    directory, found = tmp_path_factory.mktemp("curves"), {}
    for name, settings in METHODS.items():
        file = directory / f"{name}.pt"
        arguments = (model, pairs[0], {**LOSS, **settings}, STEPS, str(file))
        [curve] = rank_pool.run_ranks(layout_runs.training_curve, 1, *arguments, timeout=SECONDS)
        found[name] = curve, file
    return found


@pytest.mark.parametrize("method", METHODS)
def test_rewarded_answers_become_likelier(
    curves: dict[str, tuple[Curve, Path]],
    pairs: tuple[RolloutBatch, list[float]],
    note: Callable[[str], None],
    method: str,
) -> None:
    right, wrong = likelihoods(curves[method][0], *pairs)
    for name, values in (("right", right), ("wrong", wrong)):
        text = " ".join(f"{value:.2f}" for value in values)
        note(f"log-prob of {name} answers by step, {method}: {text}")
    assert right[-1] > right[0] + 2.0
    assert right[-1] > right[2] > right[0], "not one step alone"


def test_adapters_leave_the_model_as_it_was(curves: dict[str, tuple[Curve, Path]]) -> None:
    base = curves["LoRA"][0].base
    assert base.missing == [] and base.different == []
    assert len(curves["full training"][0].base.different) == len(base.exported)


def test_the_merged_model_computes_what_the_adapters_do(
    curves: dict[str, tuple[Curve, Path]],
    pairs: tuple[RolloutBatch, list[float]],
    model: str,
    note: Callable[[str], None],
) -> None:
    curve, file = curves["LoRA"]
    merged = chat_samples.transformers_model(model, torch.float32)
    missing, unknown = merged.load_state_dict(torch.load(file), strict=False)
    assert missing == ["lm_head.weight"] and unknown == []
    merged.tie_weights()
    columns = pairs[0].columns
    rows = [
        (tokens[:-length].tolist(), tokens[-length:].tolist())
        for tokens, length in zip(
            columns["unconcat_tokens"], columns["response_lengths"].tolist(), strict=True
        )
    ]
    found = torch.cat(chat_samples.response_log_probs(merged, rows))
    largest = float((found - curve.log_probs[-1]).abs().max())
    note(f"merged model in transformers against adapters in the trainer: max |d| {largest:.1e}")
    assert largest < 1e-4
