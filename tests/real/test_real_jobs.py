"""Whole jobs on the real model: every engine samples from the trainer's weights, and a stopped job goes on as if it had not stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.real.real_jobs import train, vllm_python

pytestmark = pytest.mark.timeout(1500)

Note = Callable[[str], None]

#: Mismatch KL per token that the dtypes explain: (low, high). bfloat16 of both sides is not bit by bit the same, so 0 would mean that
#: one side's log-probs were taken from the other.
FLOAT32 = (0.0, 1e-6)
BFLOAT16 = (1e-6, 1e-2)

#: Large enough that the first update moves the policy further than dtypes explain: a KL of about 0.1. In bfloat16 an update that is
#: small against a weight's last bit is rounded away in the first step, because the checkpoint's weights are bfloat16.
LEARNING_RATES = {"float32": 1e-5, "bfloat16": 8e-5}

#: Engine -> dtype of engine and trainer. The job that is resumed below has transformers in float32.
ENGINES = {"transformers": "bfloat16", "vllm": "float32", "vllm_server": "bfloat16"}


def check_rollouts(lines: list[dict[str, Any]], dtype: str, note: Note, name: str) -> None:
    """Two updates on each of two rollouts: the first at the level of the dtypes, the second further off.

    The second update compares the policy that the first one made with the responses of before, which is what the
    first update of the next rollout would compare if the engine had kept its weights.
    """
    low, high = FLOAT32 if dtype == "float32" else BFLOAT16
    mismatch = [line["mismatch_kl"] for line in lines]
    note(
        f"{name}, {dtype}: mismatch KL by update {' '.join(f'{kl:.1e}' for kl in mismatch)}; "
        f"rewards {' '.join(format(line['reward'], '.2f') for line in lines[::2])}"
    )
    assert len(lines) == 4
    for line in lines:
        assert line["staleness"] == 0 and line["reward"] > 0 and line["grad_norm"] > 0
    assert low < mismatch[0] < high
    # After an update that made answers nearly certain little is left to round.
    assert 0 < mismatch[2] < high
    assert mismatch[1] > high, "the update is too small to show whether the engine got it"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_samples_from_the_weights_that_it_trains(
    tmp_path: Path, model: str, note: Note, engine: str
) -> None:
    dtype = ENGINES[engine]
    settings = {
        "rollout-engine": engine,
        "train-dtype": dtype,
        "rollout-dtype": dtype,
        "num-rollouts": 2,
        "num-updates-per-rollout": 2,
        "lr": LEARNING_RATES[dtype],
        "save-at-end": False,
    }
    python = {"python": vllm_python()} if engine.startswith("vllm") else {}
    lines = train(tmp_path / "run", model, settings, **python)
    check_rollouts(lines, dtype, note, engine)
    for line in (tmp_path / "run" / "samples.jsonl").open():
        samples = json.loads(line)["samples"]
        assert any(re.match(r"\d+ \+ \d+ = \d+", sample["response"]) for sample in samples), samples


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_likeliest_ids_of_an_engine_are_centered_against_the_trainers(
    tmp_path: Path, model: str, note: Note, engine: str
) -> None:
    settings = {
        "rollout-engine": engine,
        "train-dtype": "float32",
        "rollout-dtype": "float32",
        "policy-loss": "reinforce",
        "score-centering-topk": 20,
        "num-rollouts": 1,
        "num-updates-per-rollout": 2,
        "lr": LEARNING_RATES["float32"],
        "save-at-end": False,
    }
    python = {"python": vllm_python()} if engine.startswith("vllm") else {}
    first, second = train(tmp_path / "run", model, settings, **python)
    names = ("head_mass", "cur_head_mass", "tail_ratio", "size")
    found = [[line[f"score_centering/{name}"] for name in names] for line in (first, second)]
    for number, (q, p, ratio, size) in enumerate(found):
        note(f"{engine}, update {number}: q {q:.6f}, p {p:.6f}, rho {ratio:.4f}, size {size:.2e}")
    (q, p, ratio, size), (same, _, _, larger) = found
    # Both have the same weights at first: the same 20 ids have the same probabilities.
    assert 0.9 < q < 1 and q == pytest.approx(p, abs=1e-4) and ratio == pytest.approx(1, abs=0.05)
    # Then the policy moves, and the sampler's head stays.
    assert same == q and larger > 30 * size


def weights_of(directory: Path | str) -> dict[str, Tensor]:
    [file] = Path(directory).glob("*.safetensors")
    return load_file(file)


def test_a_job_that_was_stopped_and_resumed_is_the_one_that_was_not(
    tmp_path: Path, model: str, note: Note
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = {"lr": 1e-5, "train-dtype": "float32", "save-interval": 2, "save-hf": True}
    expected = train(whole, model, {**settings, "num-rollouts": 3})
    train(parts, model, {**settings, "num-rollouts": 2})
    found = train(parts, model, {**settings, "num-rollouts": 3, "resume": True})
    for name in ("loss", "grad_norm", "reward", "mismatch_kl"):
        assert [line[name] for line in found] == [line[name] for line in expected], name
    assert all(line["mismatch_kl"] < FLOAT32[1] and line["reward"] > 0 for line in expected)
    mine, theirs, start = (weights_of(path) for path in (parts / "model", whole / "model", model))
    assert mine.keys() == theirs.keys() == start.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    # The trainer is float32, and so is what it writes.
    moved = sum(not torch.equal(theirs[name], start[name].float()) for name in theirs)
    note(f"resumed after 2 of 3 rollouts: same bits; {moved} of {len(start)} tensors trained")
    assert moved > len(start) / 2
