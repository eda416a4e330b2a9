"""Recipes: settings, cluster commands and the nodes that these name fit together."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from plugin.cluster.placement import check_cluster, plan_resources
from plugin.config import JobConfig
from plugin.errors import ClusterError

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
NODE = {"CPU": 128.0, "GPU": 8.0}

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)


def header(recipe: Path) -> str:
    """The comment at the top of a recipe, without its marks."""
    lines = recipe.read_text().splitlines()
    return "\n".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def commands(recipe: Path) -> list[list[str]]:
    """The train commands in the header, as words."""
    found = re.findall(r"^megatron-tis train .*$", header(recipe).replace("\\\n", " "), re.M)
    return [shlex.split(line)[2:] for line in found]


def configuration(words: list[str]) -> JobConfig:
    """What `megatron-tis train` makes of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    JobConfig.add_arguments(parser)
    settings = vars(parser.parse_args(words))
    return JobConfig.from_sources(settings, ROOT / settings.pop("config"))


def test_there_are_five_recipes_and_the_page_shows_each() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    names = {recipe.stem for recipe in RECIPES}
    assert names == {"grpo", "dapo", "dr_grpo", "gspo_moe_replay", "async_icepop"}
    assert all(f"examples/recipes/{name}.yaml" in page for name in names)


@each_recipe
def test_the_command_on_this_machine_is_the_file_alone(recipe: Path) -> None:
    here, _ = commands(recipe)
    assert here == ["--config", str(recipe.relative_to(ROOT))]
    config = configuration(here)
    assert config.hf_checkpoint is None and config.address is None and config.world_size == 1


@each_recipe
def test_the_cluster_command_is_valid_and_fits_the_nodes_it_names(recipe: Path) -> None:
    _, words = commands(recipe)
    config = configuration(words)
    assert config.address == "auto" and config.hf_checkpoint and config.prompt_data
    (nodes,) = map(int, re.findall(r"On a cluster, (\d+) nodes? of 8 GPUs", header(recipe)))
    plan = plan_resources(config, use_gpus=True)
    check_cluster(plan, [NODE] * nodes)
    with pytest.raises(ClusterError):
        check_cluster(plan, [NODE] * (nodes - 1))


@each_recipe
def test_both_sizes_of_a_recipe_have_the_same_algorithm(recipe: Path) -> None:
    small, large = map(configuration, commands(recipe))
    for name in (
        *("policy_loss", "eps_clip", "eps_clip_high", "icepop_ratio_low", "icepop_ratio_high"),
        *("advantage_estimator", "grpo_std_normalization", "reduction", "async_rollouts"),
        *("use_kl_loss", "kl_loss_coef", "kl_loss_type", "dynamic_sampling"),
        *("use_rollout_routing_replay", "overlong_penalty_factor"),
    ):
        assert getattr(small, name) == getattr(large, name), name


def test_the_cluster_sizes_are_those_of_the_sources() -> None:
    """Numbers that the papers and public scripts give; the headers name these."""
    large = {recipe.stem: configuration(commands(recipe)[1]) for recipe in RECIPES}

    updates = {name: config.updates_per_rollout for name, config in large.items()}
    expected = {"grpo": 1, "dapo": 16, "dr_grpo": 8, "gspo_moe_replay": 4, "async_icepop": 1}
    assert updates == expected
    grpo, dapo, dr = large["grpo"], large["dapo"], large["dr_grpo"]
    assert (grpo.n_samples_per_prompt, grpo.kl_loss_coef) == (64, 0.04)
    assert (dapo.eps_clip, dapo.clip_high) == (0.2, 0.28)
    assert dapo.max_response_length - (dapo.overlong_buffer_length or 0) == 16384
    assert (dr.rollout_batch_size, dr.max_response_length) == (128, 3000)
    gspo = large["gspo_moe_replay"]
    assert (gspo.eps_clip, gspo.clip_high) == (3e-4, 4e-4)
    icepop = large["async_icepop"]
    assert (icepop.icepop_ratio_low, icepop.icepop_ratio_high) == (0.5, 5.0)
    assert {config.lr for config in large.values()} == {1e-6}
