"""The doctor's layouts on real ranks: agreement is seen, and so is its absence."""

from __future__ import annotations

import pytest

from plugin.tools.doctor.layout_agreement import parse_layout, run_layouts


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_two_stages_agree_with_one_process_and_an_impossible_layout_is_named() -> None:
    # 2 stages of 3 chunks each cannot split 4 layers.
    results = run_layouts([parse_layout("pp2"), parse_layout("pp2vpp3")], timeout=500)
    reference, stages, impossible = results
    assert reference.agrees and stages.agrees, f"{reference}\n{stages}\n{stages.error}"
    assert max(stages.differences.values()) < 1e-5
    assert impossible.error and not impossible.agrees
