"""What a job does when something is wrong: the cause on the driver, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.errors import MegatronTisError
from tests.ray.small_jobs import run_small

FAILS_ON_RANK_1 = """
import torch.distributed as dist

def hook(args, *, pg_loss, loss_masks, **kwargs):
    # Without a graph it is only tried out at set-up, also on the driver.
    if pg_loss.grad_fn is not None and dist.get_rank() == 1:
        raise ValueError("the hook fails on rank 1")
    return pg_loss, loss_masks, {}
"""


def test_an_error_on_one_rank_reaches_the_driver_and_frees_the_cluster(
    two_nodes: str, tmp_path: Path
) -> None:
    hook = tmp_path / "failing.py"
    hook.write_text(FAILS_ON_RANK_1)
    with pytest.raises(MegatronTisError, match="the hook fails on rank 1"):
        run_small(
            two_nodes,
            tmp_path / "run",
            num_gpus_per_node=1,
            use_tis=True,
            custom_tis_function_path=f"{hook}:hook",
        )
    import ray

    ray.init(address=two_nodes, log_to_driver=False)
    try:
        _wait_until_free(5.0)
    finally:
        ray.shutdown()


def _wait_until_free(cpus: float) -> None:
    import time

    import ray

    for _ in range(500):
        if ray.available_resources().get("CPU", 0) == cpus:
            return
        time.sleep(0.2)
    raise AssertionError(f"still reserved: {ray.available_resources()}")


@pytest.mark.slow
def test_missing_log_probs_are_turned_on_with_a_warning(two_nodes: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="they are turned on"):
        result = run_small(
            two_nodes,
            tmp_path / "run",
            num_nodes=1,
            num_rollouts=1,
            use_tis=True,
            return_rollout_log_probs=False,
        )
    assert "tis" in result.history[0]
