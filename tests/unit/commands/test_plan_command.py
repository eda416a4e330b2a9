"""`megatron-tis plan`: what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugin.cli import main
from tests.unit.tools.plan.model_facts import MODELS, parameters_by_hand

SMALL = MODELS["Qwen3-30B-A3B"] | {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_experts": 8,
    "moe_intermediate_size": 128,
    "vocab_size": 1000,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return str(file)


LAYOUT = (
    *("--num-nodes", "4", "--num-gpus-per-node", "8", "--sequence-parallel"),
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    *("--expert-model-parallel-size", "4", "--max-tokens-per-gpu", "2048"),
)


def planned(capsys: Any, *words: str) -> dict[str, Any]:
    main(["plan", "--json", *words])
    return json.loads(capsys.readouterr().out)


def test_json_has_the_whole_model_and_every_kind_of_rank(capsys: Any, model: str) -> None:
    plan = planned(capsys, "--hf-config", model, *LAYOUT)
    assert plan["total_parameters"] == parameters_by_hand(SMALL)
    assert (plan["world_size"], plan["fits"]) == (32, True)
    assert plan["layout"]["short"] == "TP2 PP2 EP4 SP"
    first, last = plan["ranks"]
    assert (first["kind"], first["count"], first["example_rank"]) == (
        "stage 0: embedding, layers 1-2",
        16,
        0,
    )
    assert (last["kind"], last["example_rank"]) == ("stage 1: layers 3-4, loss", 16)
    parts = {"parameters", "gradients", "main_parameters", "optimizer", "activations", "logits"}
    for rank in plan["ranks"]:
        assert set(rank["bytes"]) == parts | {"other"}
        assert rank["peak_bytes"] == sum(rank["bytes"].values())
        # bfloat16 weights, float32 gradients; buffers are padded
        assert rank["bytes"]["gradients"] == 2 * rank["bytes"]["parameters"]
        assert 2 * rank["parameters"] <= rank["bytes"]["parameters"] < 2.2 * rank["parameters"]
    assert {"weight_sync", "batch", "collectives"} <= plan.keys()
    assert plan["weight_sync"]["bytes"] == 2 * plan["total_parameters"]
    groups = {(entry["group"], entry["operation"]) for entry in plan["collectives"]}
    assert {("expert", "all_to_all"), ("tensor", "reduce_scatter"), ("pipeline", "send")} <= groups


def test_recompute_a_smaller_budget_and_shards_lower_the_parts_they_should(
    capsys: Any, model: str
) -> None:
    def parts(*words: str) -> dict[str, int]:
        return planned(capsys, "--hf-config", model, *LAYOUT, *words)["ranks"][0]["bytes"]

    base = parts()
    recomputed = parts(
        *("--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    )
    assert recomputed["activations"] < 0.7 * base["activations"]
    assert recomputed["optimizer"] == base["optimizer"]
    halved = parts("--max-tokens-per-gpu", "1024")
    assert 0.4 < halved["activations"] / base["activations"] < 0.7
    whole = parts("--no-use-distributed-optimizer")
    # 8 data parallel ranks share the dense state, 4 the experts' (16 ranks of a stage over EP4)
    assert 3 * base["optimizer"] < whole["optimizer"] < 9 * base["optimizer"]


@pytest.mark.parametrize("flag", ["--use-routing-replay", "--use-rollout-routing-replay"])
def test_replayed_routes_are_planned(capsys: Any, model: str, flag: str) -> None:
    assert planned(capsys, "--hf-config", model, *LAYOUT, flag)["fits"]


def test_a_reference_counts_unless_it_is_offloaded(capsys: Any, model: str) -> None:
    words = ("--hf-config", model, "--use-kl-loss", "--kl-loss-coef", "0.1", "--gpu", "none")
    held = planned(capsys, *words)["ranks"][0]
    assert held["bytes"]["other"] == 4 * held["parameters"]  # float32
    offloaded = planned(capsys, *words, "--reference-offload")["ranks"][0]
    assert offloaded["bytes"]["other"] == 0
    # Of a long step the activations give way to it; those of a short one are smaller.
    lengths = Path(model).with_name("lengths.txt")
    lengths.write_text("8 8\n")
    words += ("--reference-offload", "--lengths", str(lengths), "--micro-batch-size", "1")
    short = planned(capsys, *words)["ranks"][0]
    assert 0 < short["bytes"]["other"] < 4 * short["parameters"]


def test_what_does_not_fit_names_three_flags_that_help(capsys: Any, tmp_path: Path) -> None:
    # 2.2 B parameters of 16 bytes each, and the logits of 1,024 tokens
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["Qwen3-8B"] | {"num_hidden_layers": 6}))
    code = main(
        [
            *("plan", "--json", "--hf-config", str(file), "--gpu", "rtx4090-24g"),
            *("--max-tokens-per-gpu", "1024", "--num-gpus-per-node", "4"),
            *("--no-use-distributed-optimizer", "--max-response-length", "512"),
        ]
    )
    plan = json.loads(capsys.readouterr().out)
    assert (code, plan["fits"]) == (1, False)
    assert len(plan["advice"]) == 3
    peaks = [advice["peak_bytes"] for advice in plan["advice"]]
    assert peaks == sorted(peaks)
    assert peaks[-1] < plan["ranks"][0]["peak_bytes"]


def test_the_text_says_whether_it_fits(capsys: Any, model: str) -> None:
    assert main(["plan", "--hf-config", model]) == 0
    text = capsys.readouterr().out
    assert "it fits: the fullest rank takes" in text
    assert "stage 0: embedding, layers 1-4, loss" in text
    assert "by formula or assumption" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpu", "h10"], "--gpu h10 is not known; did you mean h100-80g?"),
        (["--ranks", "x"], "--ranks is x; give all-distinct"),
        (["--ranks", "9"], "--ranks names 9, the job has ranks 0 to 0"),
        (["--lengths", "normal:3"], "--lengths normal:3 is no file"),
        (["--lengths", "lognormal:3"], "write lognormal:MEDIAN:SIGMA"),
        (["--lengths", "lognormal:nan:1"], "the median must be at least 1 token"),
        (
            ["--tensor-model-parallel-size", "3", "--num-gpus-per-node", "8"],
            "layouts that work on 8 ranks: TP4 SP; TP2 SP",
        ),
        (
            ["--pipeline-model-parallel-size", "3", "--num-gpus-per-node", "6"],
            "layouts that work on 6 ranks: PP3[1..1]; PP2;",
        ),
    ],
)
def test_bad_input_is_refused_with_the_fix(
    capsys: Any, model: str, words: list[str], message: str
) -> None:
    assert main(["plan", "--hf-config", model, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not a readable config.json"),
        ('{"hidden_size": 4}', "has no model_type"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not supported"),
        ('{"model_type": "no-such-model"}', "is not a config that transformers takes"),
        (json.dumps(SMALL | {"num_hidden_layers": -3}), "num_hidden_layers is -3, and a model has"),
        (json.dumps(SMALL | {"num_hidden_layers": 10**4}), "is 10000, and a model has 1 to 1,000"),
        (json.dumps(SMALL | {"num_experts": 10**7}), "and a model has 1 to 4,096"),
        (json.dumps(SMALL | {"hidden_size": "many"}), "expected int, got str"),
        (json.dumps(SMALL | {"num_key_value_heads": 3}), "num_attention_heads is 32 and its num_k"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    capsys: Any, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert main(["plan", "--hf-config", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_rank_that_does_not_build_is_an_error_of_one_line(
    capsys: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("7 is not divisible by 2\nsecond line")

    monkeypatch.setattr("plugin.tools.plan.job_plan.StageRun.measure", fails)
    assert main(["plan", "--hf-config", model]) == 2
    said = capsys.readouterr().err
    assert "a rank does not build: AssertionError: 7 is not divisible by 2; change" in said


def test_the_ranks_of_a_context_parallel_group_do_the_attention_of_one_rank(
    capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["Qwen3-0.6B"] | {"num_hidden_layers": 1, "vocab_size": 512}))
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("512 1536\n")  # which two ranks cut without padding
    words = ("--hf-config", str(file), "--num-gpus-per-node", "2", "--fused-lm-head", "off")
    words += ("--lengths", str(lengths))
    whole = planned(capsys, *words, "--max-tokens-per-gpu", "4096")
    cut = planned(capsys, *words, "--max-tokens-per-gpu", "2048", "--context-parallel-size", "2")
    one, half = (plan["ranks"][0]["flops"] / plan["batch"]["microbatches"] for plan in (whole, cut))
    assert 2 * half == one
    assert cut["ranks"][0]["example_rank"] == 1  # which has no prompts, so more rows to score


def test_chosen_ranks_leave_the_whole_model_as_it_is(capsys: Any, model: str) -> None:
    plan = planned(capsys, "--hf-config", model, *LAYOUT, "--ranks", "16")
    assert [rank["example_rank"] for rank in plan["ranks"]] == [16]
    assert plan["total_parameters"] == parameters_by_hand(SMALL)


def test_lengths_come_from_a_file(capsys: Any, model: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100 300\n200 400\n")
    words = ("--lengths", str(file), "--rollout-batch-size", "2", "--n-samples-per-prompt", "2")
    plan = planned(capsys, "--hf-config", model, "--max-tokens-per-gpu", "1000", *words)
    # samples of 400, 600, 400, 600 tokens: two microbatches of 1,000
    assert (plan["batch"]["samples"], plan["batch"]["microbatches"]) == (4, 2)
    assert plan["batch"]["tokens_of_the_fullest_rank"] == 2000


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_planned(
    capsys: Any, model: str
) -> None:
    assert main(["plan", "--hf-config", model, "--html", f"{model}/plan.html"]) == 2
    said = capsys.readouterr()
    assert "plan.html cannot be written: " in said.err and said.out == ""


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (b"\xff\xfe", "is not readable"),
        (b"1 2\n3\n", "line 2 is '3'"),
        (b"99999999999999999999999 5", "line 1 is '99999999999999999999999 5'"),
        ("² 5".encode(), "line 1 is '² 5'"),
    ],
)
def test_lengths_that_are_none_are_refused(
    capsys: Any, model: str, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(content)
    assert main(["plan", "--hf-config", model, "--lengths", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_an_index_that_lacks_a_tensor_is_refused(capsys: Any, model: str) -> None:
    index = Path(model).with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "a"}}))
    assert main(["plan", "--hf-config", model]) == 2
    assert "is not in the checkpoint" in capsys.readouterr().err


def test_adapters_leave_gradients_and_optimizer_state_for_themselves_alone(
    capsys: Any, model: str
) -> None:
    words = ("--hf-config", model, *LAYOUT, "--use-kl-loss", "--kl-loss-coef", "0.1")
    whole = planned(capsys, *words)["ranks"]
    lora = planned(capsys, *words, "--lora-rank", "8")["ranks"]
    for before, after in zip(whole, lora, strict=True):
        adapters = after["parameters"] - before["parameters"]
        assert before["trained_parameters"] == before["parameters"]
        assert after["trained_parameters"] == adapters > 0
        # float32 gradients, with padding; and of the rest of the optimizer at most this share
        assert 4 * adapters <= after["bytes"]["gradients"] < 5 * adapters
        for part in ("main_parameters", "optimizer"):
            assert after["bytes"][part] < 0.2 * before["bytes"][part], part
        # the reference is the policy without its adapters
        copy = before["bytes"]["other"] - after["bytes"]["other"]
        assert copy == pytest.approx(before["bytes"]["parameters"], rel=0.01)
    main(["plan", *words, "--lora-rank", "8"])
    assert "trained" in capsys.readouterr().out.split("stage 0")[0]


def test_a_recomputed_moe_layer_keeps_its_input_alone(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    words = ("--hf-config", str(file), "--max-tokens-per-gpu", "2048", "--gpu", "h100-80g")
    words += ("--recompute-granularity", "full", "--recompute-method", "uniform")
    words += ("--recompute-num-layers", "1", "--rollout-batch-size", "1")
    held = []
    for layers in (8, 16):
        file.write_text(json.dumps(SMALL | {"num_hidden_layers": layers, "num_experts": 16}))
        held.append(planned(capsys, *words)["ranks"][0]["bytes"]["activations"])
    # 2,048 tokens: 256 numbers in bfloat16, and 8 places of int64 that Megatron's dispatcher keeps
    assert (held[1] - held[0]) / 8 == pytest.approx(2048 * (256 * 2 + 8 * 8), rel=0.02)
