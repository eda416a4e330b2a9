"""A reference whose weights wait in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.observe.run_record import read_run
from tests.ray.small_jobs import run_small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_resting_reference_gives_the_same_steps(two_nodes: str, tmp_path: Path) -> None:
    settings = {"num_nodes": 1, "use_kl_loss": True, "kl_loss_coef": 0.5}
    for name, rests in (("held", False), ("resting", True)):
        run_small(two_nodes, tmp_path / name, **settings, reference_offload=rests)
    held, resting = (read_run(tmp_path / name).steps for name in ("held", "resting"))
    for metric in ("loss", "kl_loss", "grad_norm"):
        assert [s[metric] for s in held] == [s[metric] for s in resting], metric
    assert held[-1]["kl_loss"] != 0.0
