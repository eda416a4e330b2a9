"""Every documented `megatron-tis train` command fits its machines and its model, and has the environment of its kind of job."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.cluster import interfaces
from plugin.cluster.interfaces import set_network
from plugin.cluster.placement import (
    check_cluster,
    check_machine,
    on_this_machine,
    plan_resources,
)
from plugin.config import JobConfig
from plugin.config.device_defaults import Capabilities, cuda_environment, on_device
from plugin.megatron_backend.model.layout_rules import check_model, with_engine_for

ROOT = Path(__file__).parents[2]
NODE = {"CPU": 128.0, "GPU": 8.0}
H100 = Capabilities(cuda=True, transformer_engine=True, compute_capability=(9, 0))


def _shape(model_type: str, **sizes: Any) -> dict[str, Any]:
    """What cutting a model depends on, of its published config.json."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    first = dict(zip(names, sizes.pop("sizes"), strict=True))
    common = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu"}
    further = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    positions = {"max_position_embeddings": 40960, "rope_parameters": rope}
    return {"model_type": model_type, **common, **further, **positions, **first, **sizes}


PUBLISHED = {
    "qwen3-0.6b": _shape("qwen3", sizes=(1024, 3072, 28, 16), tie_word_embeddings=True),
    "qwen3-8b": _shape("qwen3", sizes=(4096, 12288, 36, 32)),
    "qwen3-8b-base": _shape("qwen3", sizes=(4096, 12288, 36, 32)),
    "qwen3-14b-base": _shape("qwen3", sizes=(5120, 17408, 40, 40)),
    "llama-3.1-8b-instruct": _shape("llama", sizes=(4096, 14336, 32, 32), vocab_size=128256),
    "qwen3-30b-a3b-base": _shape(
        "qwen3_moe",
        sizes=(2048, 6144, 48, 32),
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
EXAMPLES = ROOT / "examples"
FILES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *EXAMPLES.rglob("*.yaml"),
        *EXAMPLES.glob("*.py"),
    ]
)


def documented_commands() -> list[Any]:
    """(words after `megatron-tis train`, number of nodes that the text before it names or None)."""
    found = []
    for file in FILES:
        lines = [line.removeprefix("#").strip() for line in file.read_text().splitlines()]
        text = "\n".join(lines).replace("\\\n", " ")
        for match in re.finditer(r"^megatron-tis train( --.*)?$", text, re.M):
            words = shlex.split(match.group(1) or "", comments=True)
            nodes = re.findall(r"(\d+) nodes? of 8 GPUs", text[: match.start()])
            place = f"{file.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
            found.append(pytest.param(words, int(nodes[-1]) if nodes else None, id=place))
    return found


def parsed(words: list[str]) -> JobConfig:
    """The configuration of a command; what does not go together is an error here."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    JobConfig.add_arguments(parser)
    settings = vars(parser.parse_args(words))
    file = settings.pop("config")
    return JobConfig.from_sources(settings, ROOT / file if file else None)


@pytest.mark.parametrize(("words", "nodes"), documented_commands())
def test_a_documented_command_fits_the_machines_that_are_named(
    words: list[str], nodes: int | None
) -> None:
    config = parsed(words)
    if config.address is None:
        # One GPU is enough for a rank and an engine that can take turns.
        workers = config.num_rollout_engines * config.rollout_num_gpus_per_engine
        rests = config.engine_traits.sleeps and not (config.async_rollouts or config.syncs_adapters)
        least = config.world_size if rests and workers <= config.world_size else 8
        for gpus in {0, least, 8}:
            check_machine(on_this_machine(config, gpus=gpus), cores=8, gpus=gpus)
    else:
        assert nodes is not None, "say on how many `nodes of 8 GPUs` the command runs"
        check_cluster(plan_resources(config, use_gpus=True), [NODE] * nodes)


@pytest.mark.parametrize(("words", "nodes"), documented_commands())
def test_a_documented_command_cuts_its_model_and_has_the_environment_of_its_kind_of_job(
    words: list[str], nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parsed(words)
    name = Path(config.hf_checkpoint or "").name
    if name in PUBLISHED:
        model = SimpleNamespace(**PUBLISHED[name])
        check_model(model, config)
        on_gpus = on_device(config, with_engine_for(model, config, H100))
        assert on_gpus.transformer_impl == "transformer_engine"
        # Written for GPUs: an engine at speed, and as many tokens at a time as fit.
        if config.address is not None:
            assert config.rollout_engine != "transformers"
            assert config.max_tokens_per_gpu == "auto"
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(interfaces, "interface_of", lambda address: "own0")
    set_network(config, "10.0.0.7", gloo_stays_here=config.num_nodes == 1)
    alone, many = config.address is None, config.num_nodes > 1
    expected = {
        "NCCL_SOCKET_IFNAME": "=lo" if alone else "=own0",
        "GLOO_SOCKET_IFNAME": "own0" if many else "lo",
    }
    if "sglang" in words:
        expected["NCCL_CUMEM_ENABLE"] = "0"
    assert {
        name: value
        for name, value in environment.items()
        if name in (*expected, "NCCL_CUMEM_ENABLE")
    } == expected
    queue = cuda_environment(config).get("CUDA_DEVICE_MAX_CONNECTIONS")
    cuts = config.tensor_model_parallel_size > 1 or config.context_parallel_size > 1
    assert queue == ("1" if cuts else None)


def test_the_commands_are_found() -> None:
    places = {str(command.id).split(":")[0] for command in documented_commands()}
    assert {"README.md", "docs/multi_node.md", "examples/recipes/grpo.yaml"} <= places
