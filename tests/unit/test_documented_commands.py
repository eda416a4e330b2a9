"""Every documented `megatron-tis train` command fits the machines that the text around it names."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.placement import check_cluster, check_machine, plan_resources
from plugin.config import JobConfig

ROOT = Path(__file__).parents[2]
NODE = {"CPU": 128.0, "GPU": 8.0}
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


@pytest.mark.parametrize(("words", "nodes"), documented_commands())
def test_a_documented_command_fits_the_machines_that_are_named(
    words: list[str], nodes: int | None
) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    JobConfig.add_arguments(parser)
    settings = vars(parser.parse_args(words))
    file = settings.pop("config")
    config = JobConfig.from_sources(settings, ROOT / file if file else None)
    if config.address is None:
        check_machine(config, cores=8, gpus=0)
        check_machine(config, cores=8, gpus=8)
    else:
        assert nodes is not None, "say on how many `nodes of 8 GPUs` the command runs"
        check_cluster(plan_resources(config, use_gpus=True), [NODE] * nodes)


def test_the_commands_are_found() -> None:
    places = {str(command.id).split(":")[0] for command in documented_commands()}
    assert {"README.md", "docs/multi_node.md", "examples/recipes/grpo.yaml"} <= places
