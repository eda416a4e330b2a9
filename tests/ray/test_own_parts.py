"""A job with parts of the user's own: engine and estimator by path, and what they warn of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.small_jobs import run_small

PARTS = """
import warnings
import torch
from plugin.rollout.engines.transformers_engine import TransformersEngine

class Engine(TransformersEngine):
    def load_weights(self, version, bucket, *, last):
        warnings.warn("the engine loads weights")
        super().load_weights(version, bucket, last=last)

def engine(config, hf_config, name):
    return Engine(hf_config, name=name)

def estimator(rewards, group_index, loss_masks, config):
    return [r * torch.ones(len(mask)) for r, mask in zip(rewards - rewards.mean(), loss_masks)]

def hook(args, *, pg_loss, loss_masks, **kwargs):
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == 1:
        warnings.warn("the hook has doubts")
    return pg_loss, loss_masks, {}
"""


def test_an_engine_and_an_estimator_by_path_train_and_their_warnings_reach_the_driver_once(
    two_nodes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    run_small(
        two_nodes,
        tmp_path / "run",
        num_nodes=1,
        num_gpus_per_node=2,
        rollout_engine=f"{file}:engine",
        advantage_estimator=f"{file}:estimator",
        use_tis=True,
        custom_tis_function_path=f"{file}:hook",
    )
    warned = capsys.readouterr().err.splitlines()
    assert [line for line in warned if "the engine loads" in line] == [
        "warning: engine 0: the engine loads weights"
    ]
    [of_the_rank] = [line for line in warned if "the hook has doubts" in line]
    assert of_the_rank.startswith("warning: rank 1 on ")
