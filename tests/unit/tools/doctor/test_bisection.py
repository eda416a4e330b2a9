"""Local differences by hand, verdicts, files of hidden states, and what the command prints and refuses."""

from __future__ import annotations

import argparse
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugin.cli import main
from plugin.commands import doctor as doctor_command
from plugin.errors import BatchError, ConfigError
from plugin.tools.doctor.bisection import Bisection, bisect, judge, jump_of
from plugin.tools.doctor.bisection_report import as_page, as_text
from plugin.tools.doctor.layer_trace import LayerTrace, load_trace, save_trace

HIDDEN = 4


def trace(layers: int = 3, experts: int = 3) -> LayerTrace:
    """Two sequences of 5 and 3 tokens; every state has norm 2 per token."""
    states: dict[str, torch.Tensor] = {"embedding": torch.ones(8, HIDDEN)}
    for i in range(layers):
        for part in ("attention", "middle", "mlp", "output"):
            states[f"layers.{i}.{part}"] = torch.ones(8, HIDDEN)
        # Tokens 0 to 3 go to expert 0, the others to expert 1.
        router = torch.zeros(8, experts)
        router[:4, 0], router[4:, 1] = 3.0, 3.0
        states[f"layers.{i}.router"] = router
    states["log_probs"] = torch.full((6,), -1.0)
    return LayerTrace(torch.arange(8), np.array([5, 3]), states)


def compared(forced: LayerTrace) -> Bisection:
    return bisect(trace(), trace(), forced, train_dtype="float32", rollout_dtype="float32", topk=1)


def test_equal_traces_have_no_difference() -> None:
    bisection = compared(trace())
    assert all(part.local == 0 for part in bisection.parts)
    verdict = judge(bisection)
    assert not verdict.fault and "no layer computes something else" in verdict.text
    assert bisection.log_prob_difference == 0 and bisection.accumulated == [0, 0, 0]


def test_a_local_difference_is_relative_to_what_the_engine_added() -> None:
    forced = trace()
    # One of 8 tokens is off by (0.2, 0, 0, 0): sqrt(0.2**2 / (8 * 2**2)) = 0.0353553
    forced.states["layers.1.attention"][6, 0] += 0.2
    part = compared(forced).of_layer(1)["attention"]
    assert part.local == pytest.approx(0.2 / 32**0.5) and part.is_fault
    # Token 6 is position 1 of the second sequence; positions 1 to 3 have 3 + 2 tokens of norm 2.
    assert part.by_position == pytest.approx((0, 0.2 / 20**0.5, 0))
    verdict = judge(compared(forced))
    assert (verdict.layer, verdict.part) == (1, "attention") and "RoPE" in verdict.cause


def test_a_difference_at_the_first_token_is_no_matter_of_positions() -> None:
    forced = trace()
    forced.states["layers.0.attention"] += 0.1
    assert "values and output projection" in judge(compared(forced)).cause


def test_experts_are_not_blamed_for_what_their_router_does() -> None:
    forced = trace()
    # Tokens 0 and 1 go to expert 2 and come back with something else.
    forced.states["layers.2.router"][:2, 2] = 5.0
    forced.states["layers.2.mlp"][:2] += 1.0
    bisection = compared(forced)
    assert bisection.of_layer(2)["mlp"].local == 0
    verdict = judge(bisection)
    assert (verdict.layer, verdict.part) == (2, "router") and "25.0%" in verdict.cause


def test_experts_whose_every_token_is_off_are_named() -> None:
    forced = trace()
    forced.states["layers.1.mlp"][4:] *= 1.5
    verdict = judge(compared(forced))
    assert (verdict.layer, verdict.part) == (1, "mlp") and "expert 1 is off" in verdict.cause


def test_the_same_part_of_most_layers_is_one_finding_without_a_layer() -> None:
    forced = trace()
    for i in range(3):
        forced.states[f"layers.{i}.attention"][6:] *= 1.1
    verdict = judge(compared(forced))
    assert (verdict.fault, verdict.layer, verdict.part) == (True, None, "attention")
    for i in range(3):
        forced.states[f"layers.{i}.mlp"] *= 1.1
    both = judge(compared(forced))
    assert both.part is None and "quantized" in both.cause


def test_one_layer_among_many_that_round_alike_stands_out_in_low_precision() -> None:
    forced = trace(layers=5)
    engine = trace(layers=5)
    for i in range(5):
        forced.states[f"layers.{i}.mlp"] *= 1.006
    forced.states["layers.3.mlp"] *= 1.05
    found = bisect(engine, engine, forced, train_dtype="float32", rollout_dtype="bfloat16", topk=1)
    # Five times the median of 0.006 is 0.03; layer 3 has 1.006 * 1.05 - 1 = 0.0563.
    assert found.of_layer(3)["mlp"].limit == pytest.approx(0.03, rel=1e-3)
    assert (judge(found).layer, judge(found).part) == (3, "mlp")


def test_layers_are_judged_whole_where_their_parts_are_unknown() -> None:
    def outputs(shift: float) -> LayerTrace:
        whole = trace()
        whole.states = {
            name: values * (2.0 if name.endswith("2.output") else 1.0)
            for name, values in whole.states.items()
            if name.endswith("output") or name == "embedding"
        }
        whole.states["layers.2.output"] += shift
        return whole

    found = bisect(
        outputs(0), outputs(0), outputs(0.5), train_dtype="float32", rollout_dtype="float32"
    )
    # Layer 2 adds 1 to each number; the trainer's adds 1.5.
    assert found.of_layer(2)["layer"].local == pytest.approx(0.5)
    assert (judge(found).layer, judge(found).part) == (2, "layer")


HF = SimpleNamespace(num_hidden_layers=3, hidden_size=HIDDEN, vocab_size=8)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_trace_comes_back_from_its_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"states.{suffix}"
    save_trace(trace(), file)
    loaded = load_trace(file, HF)
    assert loaded.lengths.tolist() == [5, 3] and loaded.has_parts
    assert all(torch.equal(v, loaded.states[name]) for name, v in trace().states.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.output": None}, "no array `layers.1.output`"),
        ({"layers.7.mlp": torch.ones(8, HIDDEN)}, "`layers.7.mlp` is none"),
        ({"layers.1.mlp": torch.ones(8, 5)}, r"`layers.1.mlp` has shape \[8, 5\]"),
        ({"layers.1.mlp": torch.full((8, HIDDEN), torch.nan)}, "not finite"),
        ({"log_probs": torch.ones(8)}, r"`log_probs` has shape \[8\]"),
    ],
)
def test_a_file_that_is_not_of_this_model_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    broken = trace()
    broken.states = {n: v for n, v in {**broken.states, **change}.items() if v is not None}
    file = tmp_path / "states.npz"
    save_trace(broken, file)
    with pytest.raises(BatchError, match=message):
        load_trace(file, HF)


def test_tokens_and_lengths_of_a_file_have_to_fit(tmp_path: Path) -> None:
    wrong = trace()
    wrong.lengths = np.array([5, 4])
    save_trace(wrong, tmp_path / "a.npz")
    with pytest.raises(BatchError, match=r"lengths \[5, 4\] of 8 tokens"):
        load_trace(tmp_path / "a.npz", HF)
    save_trace(trace(), tmp_path / "b.npz")
    with pytest.raises(BatchError, match=r"tokens outside 0..4"):
        load_trace(tmp_path / "b.npz", SimpleNamespace(**{**vars(HF), "vocab_size": 5}))
    (tmp_path / "c.npz").write_bytes(b"no archive")
    with pytest.raises(BatchError, match="cannot be read"):
        load_trace(tmp_path / "c.npz", HF)
    with pytest.raises(ConfigError, match=r"'.pt'; hidden states are"):
        load_trace(tmp_path / "d.pt", HF)


def _archive(path: Path, **arrays: Any) -> None:
    np.savez(path, **arrays)


def _cut(path: Path, to: int) -> None:
    save_trace(trace(), path)
    path.write_bytes(path.read_bytes()[:to])


#: what is wrong with a file of hidden states -> its suffix, and what makes it
BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a directory": ("npz", Path.mkdir),
    "a pipe": ("npz", os.mkfifo),
    "a device": ("safetensors", lambda path: path.symlink_to("/dev/zero")),
    "missing": ("npz", lambda path: None),
    "empty": ("safetensors", Path.touch),
    "text": ("safetensors", lambda path: path.write_text("layers.0.output: 1")),
    "a header of exabytes": ("safetensors", lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f{}")),
    "cut off": ("safetensors", lambda path: _cut(path, 300)),
    "a cut off archive": ("npz", lambda path: _cut(path, 300)),
    "objects": ("npz", lambda path: _archive(path, tokens=np.array([{}], dtype=object))),
    "texts": ("npz", lambda path: _archive(path, tokens=np.array(["1", "2"]))),
    "nothing": ("npz", _archive),
    "no tokens": ("npz", lambda path: _archive(path, tokens=np.zeros(0), lengths=np.zeros(0))),
    "numbers that are no ids": ("npz", lambda path: _archive(path, tokens=np.full(5, np.nan))),
    "a million lengths": ("npz", lambda path: _archive(path, tokens=np.ones(9), lengths=np.ones(1_000_000))),
    "compressed zeros": ("npz", lambda path: np.savez_compressed(path, tokens=np.zeros((1 << 28,), np.int8))),
}  # fmt: skip


@pytest.mark.hostile
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_of_hidden_states_is_one_line_in_little_memory(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix, make = BROKEN[what]
    file = tmp_path / f"states.{suffix}"
    make(file)
    tracemalloc.start()
    try:
        assert main(["doctor", "--bisect", "--hidden-states", str(file)]) == 2
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert line.startswith("megatron-tis: ") and str(file) in line and len(line) < 600
    assert output.out == ""


def test_table_and_page_point_at_the_layer() -> None:
    forced = trace()
    forced.states["layers.1.mlp"][4:] *= 1.5
    bisection = compared(forced)
    verdict = judge(bisection)
    text = as_text([bisection], verdict)
    lines = text.splitlines()
    assert "float32 trainer, float32 engine" in lines[0]
    marked = [line for line in lines if "!" in line]
    assert len(marked) == 1 and marked[0].startswith("1 ")
    assert "FOUND: the MLP of layer 1" in text
    html = as_page([bisection], verdict)
    assert '"label":"layer 1: MLP"' in html and "likely cause" in html


def doctor(*words: str) -> int:
    parser = argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    return doctor_command.run(parser.parse_args(list(words)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hf-checkpoint", "model"), "--hf-checkpoint would do nothing without --bisect"),
        (("--bisect", "--layouts", "tp2"), "checks nothing else"),
        (
            ("--bisect", "--hidden-states", "a.npz", "--rollout-quantization", "int8"),
            "--rollout-quantization with --hidden-states",
        ),
        (("--bisect", "--save-hidden-states", "a.pt"), "end it in .safetensors or .npz"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        doctor(*words)


def test_the_jump_is_where_the_accumulated_difference_grows_most() -> None:
    # The embedding first; below the floor a factor means nothing.
    assert jump_of([0, 1e-9, 1e-7, 1e-3, 3e-3], 1e-5) == 2
    assert jump_of([0, 0.2, 0.1, 0.1], 1e-5) == 0
    assert jump_of([0, 1e-9, 1e-7, 1.5e-5], 1e-5) is None
