"""`doctor --bisect` finds a planted fault: its layer and its part, whatever it does to the layers after it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.parallel import bisect_jobs, tiny_models
from tests.parallel.bisect_jobs import BFLOAT16, FLOAT32

#: family, fault, where it has to be found
PLANTED: dict[str, tuple[str, tuple[Any, ...], tuple[int | None, str]]] = {
    "int8 output projection": ("qwen3_moe", ("int8", 2, "self_attn.o_proj.weight"), (2, "attention")),
    "int8 queries": ("qwen3", ("int8", 0, "self_attn.q_proj.weight"), (0, "attention")),
    "int8 keys": ("qwen3_moe", ("int8", 3, "self_attn.k_proj.weight"), (3, "attention")),
    "int8 MLP": ("llama", ("int8", 3, "mlp.down_proj.weight"), (3, "mlp")),
    "int8 experts": ("qwen3_moe", ("int8", 1, "mlp.experts.down_proj"), (1, "mlp")),
    "RoPE base of one layer": ("qwen3", ("rope", 1, 1e5), (1, "attention")),
    "RoPE base a little off in one layer": ("llama", ("rope", 3, 9000.0), (3, "attention")),
    "RoPE base of all layers": ("qwen3_moe", ("rope", None, 1e6), (None, "attention")),
    "swapped experts": ("qwen3_moe", ("swapped experts", 2, (0, 1)), (2, "mlp")),
    "swapped experts of the first layer": ("qwen3_moe", ("swapped experts", 0, (2, 3)), (0, "mlp")),
    "swapped router rows": ("qwen3_moe", ("swapped router rows", 1, (0, 3)), (1, "router")),
    "scaled LM head": ("qwen3", ("scaled", None, "lm_head.weight"), (None, "head")),
    "scaled embedding": ("qwen3", ("scaled", None, "model.embed_tokens.weight"), (None, "embedding")),
}  # fmt: skip
QUICK = ("int8 output projection", "RoPE base of one layer", "swapped experts")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANTED],
)
def test_a_planted_fault_is_found_at_its_own_layer(run_ranks, name) -> None:
    family, fault, (layer, part) = PLANTED[name]
    found = run_ranks(bisect_jobs.find, 1, family, fault, [FLOAT32, BFLOAT16])[0]
    assert found["fault"] and (found["layer"], found["part"]) == (layer, part), found["text"]
    # Nothing but the fault is taken for one, although every layer after it has another input.
    marked = [p for p in found["passes"][0]["parts"] if p["is_fault"]]
    assert layer is None or {(p["layer"], p["part"]) for p in marked} == {(layer, part)}
    if fault[0] == "rope":
        assert "RoPE base" in found["cause"]
    if fault[0] == "swapped experts":
        assert f"expert {fault[2][0]} and {fault[2][1]} is off" in found["cause"]


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "llama"))]
)
def test_without_a_fault_nothing_is_found_at_any_dtype(run_ranks, family) -> None:
    dtypes = [FLOAT32, BFLOAT16, ("bfloat16", "bfloat16")]
    found = run_ranks(bisect_jobs.find, 1, family, None, dtypes)[0]
    assert not found["fault"], found["text"]
    exact, rounded, _ = (max(p["local"] for p in b["parts"]) for b in found["passes"])
    assert exact < 1e-5 < 1e-3 < rounded


def test_a_fault_of_the_decode_step_alone_shows_when_the_engine_decodes(run_ranks) -> None:
    fault, dtypes = ("decode position", 2, None), [FLOAT32, BFLOAT16]
    found = run_ranks(bisect_jobs.find, 1, "qwen3_moe", fault, dtypes, True)[0]
    assert (found["fault"], found["layer"], found["part"]) == (True, 2, "attention"), found["text"]
    as_prompt = run_ranks(bisect_jobs.find, 1, "qwen3_moe", fault, dtypes, False)[0]
    assert not as_prompt["fault"], as_prompt["text"]
    clean = run_ranks(bisect_jobs.find, 1, "qwen3_moe", None, dtypes, True)[0]
    assert not clean["fault"], clean["text"]


@pytest.mark.parametrize(
    ("dtype", "suffix", "outputs_only", "part"),
    [
        ("bfloat16", "safetensors", False, "mlp"),
        pytest.param("float32", "npz", True, "layer", marks=pytest.mark.slow),
        pytest.param("bfloat16", "npz", True, "layer", marks=pytest.mark.slow),
    ],
)
def test_hidden_states_of_an_engine_elsewhere_are_enough(
    run_ranks, tmp_path, dtype, suffix, outputs_only, part
) -> None:
    file, fault = str(tmp_path / f"states.{suffix}"), ("swapped experts", 2, (0, 1))
    args = ("qwen3_moe", fault, dtype, file, outputs_only)
    found = run_ranks(bisect_jobs.find_in_file, 1, *args)[0]
    assert (found["fault"], found["layer"], found["part"]) == (True, 2, part), found["text"]
    assert found["passes"][0]["rollout_dtype"] == dtype
    clean = run_ranks(bisect_jobs.find_in_file, 1, "qwen3_moe", None, dtype, file, outputs_only)[0]
    assert not clean["fault"], clean["text"]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plugin", *words], capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_command_compares_two_directories_and_its_own_file(tmp_path) -> None:
    model = tiny_models.hf_model(tiny_models.tiny_qwen3_moe(), seed=3)
    model.save_pretrained(tmp_path / "model")
    bisect_jobs.plant(model, ("swapped experts", 2, (0, 1))).save_pretrained(tmp_path / "engine")
    both = ("--hf-checkpoint", str(tmp_path / "model"))
    page, states = tmp_path / "page.html", tmp_path / "states.safetensors"
    engine = ("--engine-hf-checkpoint", str(tmp_path / "engine"))
    outputs = ("--html", str(page), "--save-hidden-states", str(states))
    found = command("doctor", "--bisect", *both, *engine, *outputs)
    assert found.returncode == 1 and "FOUND: the MLP of layer 2" in found.stdout, found.stderr
    assert '"label":"layer 2: MLP"' in page.read_text()
    again = command("doctor", "--bisect", *both, "--hidden-states", str(states), "--json")
    verdict = json.loads(again.stdout)["verdict"]
    assert again.returncode == 1 and (verdict["layer"], verdict["part"]) == (2, "mlp")
    clean = command("doctor", "--bisect", *both)
    assert clean.returncode == 0 and "is rounding" in clean.stdout, clean.stderr
