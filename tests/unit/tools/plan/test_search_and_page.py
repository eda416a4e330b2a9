"""Layouts ranked by time, and the page of a plan."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugin.cli import main
from plugin.commands.plan import Progress
from plugin.config import JobConfig
from plugin.controller.preflight.resource_checks import WeightCounts
from plugin.tools.plan.estimates import Gpu, gpu_named
from plugin.tools.plan.job_plan import Models, plan_job
from plugin.tools.plan.layouts import layout_flags, stage_ends
from plugin.tools.plan.report import timeline
from plugin.tools.plan.search import Candidate, RoughModel, plan_by_layers, rough_seconds
from plugin.tools.plan.workload import sample_lengths
from tests.unit.tools.plan.model_facts import MODELS


@pytest.fixture
def model(tmp_path: Path) -> str:
    small = {"num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 1000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["Qwen3-8B"] | small))
    return str(file)


def test_search_ranks_layouts_that_fit_by_time(capsys: Any, model: str) -> None:
    words = [
        *("plan", "--search", "--json", "--hf-config", model, "--num-gpus-per-node", "4"),
        *("--max-tokens-per-gpu", "1024", "--search-limit", "3"),
    ]
    assert main(words) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    layouts = found["layouts"]
    assert len(layouts) == 3 and all(entry["fits"] for entry in layouts)
    times = [entry["step_seconds"] for entry in layouts]
    assert times == sorted(times)
    # TP1: PP1 and PP2 with CP1 and CP2, PP4; TP2: PP1 with CP1 and CP2, PP2; TP4; and the three
    # with PP2 with two chunks of one layer per stage
    assert len(found["left_out"]) == 9 + 3 - 3
    assert all("slower than the 3" in entry["reason"] for entry in found["left_out"])
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["1/3", "2/3", "3/3"]


def test_a_candidate_says_what_its_time_is_made_of() -> None:
    # 6 s and 2 s, and of the 10 s of the step a fifth waits
    candidate = Candidate("TP2", {}, True, 1, 10.0, 6.0, 2.0, "tensor all_gather within nodes", 0.2)
    assert candidate.why == (
        "compute 60%, messages 20% (most: tensor all_gather within nodes), bubble 20%"
    )
    assert replace(candidate, fits=False).why.startswith("too large; compute 60%")
    assert Candidate("TP3", {}, problem="3 does not divide 8").why == "3 does not divide 8"


def test_a_layout_that_does_not_build_is_a_row_and_not_a_traceback(
    capsys: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("split_with_sizes expects 8\nsecond line")

    monkeypatch.setattr("plugin.tools.plan.search.plan_by_layers", fails)
    words = ["plan", "--search", "--hf-config", model, "--search-limit", "1"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "does not build: RuntimeError: split_with_sizes expects 8" in out


def test_what_cannot_fit_is_left_out_with_its_size(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["Qwen3-8B"]))
    words = ["plan", "--search", "--json", "--gpu", "rtx4090-24g", "--hf-config", str(file)]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    # 8.19 B weights of 2 bytes, gradients of 4, optimizer state of 12, and 2 GiB
    assert found["layouts"] == []
    assert [entry["reason"] for entry in found["left_out"]] == [
        "holds at least 139.3 GiB before any activation, a rtx4090-24g has 23.6 GiB"
    ]


def test_the_flags_of_a_layout_leave_out_defaults_alone() -> None:
    settings = {"tensor_model_parallel_size": 2, "context_parallel_size": 1}
    settings |= {"virtual_pipeline_model_parallel_size": None, "sequence_parallel": True}
    assert layout_flags(settings) == "--tensor-model-parallel-size 2 --sequence-parallel"
    assert layout_flags(settings | {"sequence_parallel": False}).endswith("parallel-size 2")


@pytest.mark.parametrize(
    "layers, stages, ends",
    [
        (94, 4, (23, 23)),
        (61, 4, (15, 14)),
        (48, 4, (None, None)),
        (5, 4, (2, 1)),
        (3, 2, (2, None)),
    ],
)
def test_stages_at_the_ends_get_the_smaller_share(
    layers: int, stages: int, ends: tuple[int | None, int | None]
) -> None:
    assert stage_ends(layers, stages) == ends


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": "full"},
        {"virtual_pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": None},
    ],
)
def test_a_plan_by_two_short_models_is_that_of_the_whole_model(changes: dict[str, Any]) -> None:
    from transformers import AutoConfig

    recompute = {}
    if "recompute_granularity" in changes:
        recompute = {"recompute_method": "uniform", "recompute_num_layers": 1}
    sizes = {"hidden_size": 256, "num_experts": 8, "moe_intermediate_size": 64, "vocab_size": 4000}
    model = AutoConfig.for_model(**(MODELS["Qwen3-30B-A3B"] | sizes | {"num_hidden_layers": 12}))
    config = JobConfig.from_sources(
        {
            "hf_checkpoint": "model",
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "decoder_first_pipeline_num_layers": 6,
            "max_tokens_per_gpu": 1000,
            "max_response_length": 512,
            "num_gpus_per_node": 8,
            **changes,
            **recompute,
        }
    )
    lengths, gpu = sample_lengths(config, None, 40960), gpu_named("h100-80g")
    quick = plan_by_layers(config, Models(model), lengths, gpu)
    whole = plan_job(config, Models(model), lengths, gpu, ranks=[0, 4])
    for ours, theirs in zip(quick.kinds, whole.kinds, strict=True):
        assert ours.parameters == theirs.parameters
        assert ours.flops == pytest.approx(theirs.flops, rel=1e-6)
        assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.01)
        for part in ("parameters", "gradients", "optimizer", "activations"):
            assert ours.bytes[part] == pytest.approx(theirs.bytes[part], rel=0.03), part
        for key, (count, size) in theirs.collectives.items():
            assert ours.collectives[key] == pytest.approx((count, size), rel=0.02), key


def test_rough_seconds_by_hand() -> None:
    # 2 GPUs of 1e12 x 0.4 products and 1e9 bytes per second, 1000 tokens, 1e6 active weights:
    # 6e6 * 1000 / 2 / 4e11 = 7.5 ms of products; TP2: 2 * 1000 * 2 tokens' states of 100 numbers in
    # 4 layers, 8 times, half of them to the other rank.
    gpu = Gpu("g", 1, 1.0, 1e9, 1e9)
    model = RoughModel(WeightCounts(1_000_000, 0), 4, 100, 0, 0, 1000)
    job = {"hf_checkpoint": "model", "num_gpus_per_node": 2, "overlap_grad_reduce": True}
    job |= {"use_distributed_optimizer": True, "micro_batch_size": 1}
    plain = JobConfig.from_sources(job)
    assert rough_seconds(model, plain, gpu) == pytest.approx(0.0075)
    tensor = JobConfig.from_sources(job | {"tensor_model_parallel_size": 2})
    states = 2 * 1000 * 100 * 4
    assert rough_seconds(model, tensor, gpu) == pytest.approx(0.0075 + 8 * states / 2 / 1e9)
    # 3 layers over 2 stages: 2 and 1, so a third more time; states of 1000 tokens in 2 bytes to the
    # other stage and gradients back; and as much again to fill the pipeline
    pipeline = JobConfig.from_sources(job | {"pipeline_model_parallel_size": 2})
    uneven, sent = replace(model, layers=3), 4 * 1000 * 100 / 1e9
    assert rough_seconds(uneven, pipeline, gpu) == pytest.approx((0.0075 * 4 / 3 + sent) * 2)
    # Two chunks: half the bubble, twice the messages; of one microbatch a round of two is made.
    virtual = replace(pipeline, virtual_pipeline_model_parallel_size=2)
    interleaved = rough_seconds(model, virtual, gpu)
    assert interleaved == pytest.approx((0.0075 + 2 * sent) * 1.5 * 2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_a_file_one_line_per_layout() -> None:
    terminal, file = Terminal(), io.StringIO()
    for progress in (Progress(terminal), Progress(file)):
        progress("rank 0")
        progress.layout(1, 2, "TP2")
        progress.layout(2, 2, "TP4")
        progress.end()
    assert file.getvalue() == "1/2: TP2\n2/2: TP4\n"
    lines = terminal.getvalue().split("\r")
    assert "[------------------------] 1/2 TP2" in lines[2]
    assert "[############------------] 2/2 TP4, 0 s left" in lines[3]


def test_a_timeline_keeps_the_order_of_1f1b() -> None:
    # two stages, 3 s of a microbatch on each: 1 s forward, 2 s backward
    first, last = timeline([3.0, 3.0], 2)
    assert [(p["kind"], p["number"], p["start"]) for p in first] == [
        ("F", 0, 0.0),
        ("F", 1, 1.0),
        ("B", 0, 4.0),
        ("B", 1, 7.0),
    ]
    assert [(p["kind"], p["number"], p["start"]) for p in last] == [
        ("F", 0, 1.0),
        ("B", 0, 2.0),
        ("F", 1, 4.0),
        ("B", 1, 5.0),
    ]


def test_the_page_is_one_file_that_fetches_nothing(capsys: Any, model: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "--hf-config", model, "--html", str(page)]
    assert main(words) == 0
    text = page.read_text(encoding="utf-8")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert '"peak_bytes"' in text and "stage 0: embedding, layers 1-4, loss" in text
    capsys.readouterr()
    assert main(words) == 2
    assert "exists; add --force" in capsys.readouterr().err


def test_search_without_a_gpu_is_refused(capsys: Any, model: str) -> None:
    assert main(["plan", "--search", "--gpu", "none", "--hf-config", model]) == 2
    assert "--search compares times on a GPU" in capsys.readouterr().err
