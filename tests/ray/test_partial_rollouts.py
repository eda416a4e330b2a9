"""A job whose weights arrive while its engine decodes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plugin.engines.transformers.engine import TransformersEngine
from tests.ray.small_jobs import run_small


class SlowEngine(TransformersEngine):
    """Takes so long for a token that every update finds it decoding; keeps all its weights."""

    kept: Path

    def load_weights(self, version: int, bucket: Any, *, last: bool) -> None:
        super().load_weights(version, bucket, last=last)
        if last:
            torch.save(self._model.state_dict(), self.kept / f"version-{version}.pt")

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return super()._forward(*arguments, **options)


def make_slow_engine(config: Any, hf_config: Any, name: str) -> SlowEngine:
    engine = SlowEngine(dict(hf_config), interrupts=config.partial_rollout_mode, name=name)
    engine.kept = Path(config.run_dir)
    (engine.kept / "hf_config.json").write_text(json.dumps(dict(hf_config)))
    return engine


@pytest.mark.slow
def test_every_token_of_an_interrupted_response_has_the_log_prob_of_its_version(
    two_nodes: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    result = run_small(
        two_nodes,
        run_dir,
        num_rollouts=4,
        max_response_length=12,
        rollout_engine="tests.ray.test_partial_rollouts:make_slow_engine",
        async_rollouts=True,
        partial_rollouts=True,
        policy_loss="icepop",
        dump_log_probs=str(tmp_path / "dump"),
    )
    assert max(line["interrupted_share"] for line in result.history) > 0
    for line in result.history:
        dropped = line["dropped_stale"] + line["dropped_failed"]
        under_way = line["prompts_issued"] - line["prompts_trained"] - dropped
        assert line["prompts_under_way"] == under_way
        assert line["staleness_max"] <= 1
    rows = [
        row
        for file in sorted((tmp_path / "dump").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]
    versions = {version for row in rows for version in row["weight_versions"]}
    assert any(len(set(row["weight_versions"])) > 1 for row in rows)
    for version in versions:
        check_log_probs(version, rows, run_dir)


def check_log_probs(version: int, rows: list[dict[str, Any]], run_dir: Path) -> None:
    """Compare the log-probs of tokens of `version` with those that its weights give."""
    config = AutoConfig.for_model(**json.loads((run_dir / "hf_config.json").read_text()))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(torch.load(run_dir / f"version-{version}.pt"))
    for row in rows:
        tokens, length = torch.tensor(row["tokens"]), row["response_length"]
        mine = torch.tensor(row["weight_versions"]) == version
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, -length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[-length:, None])[:, 0]
        reported = torch.tensor(row["rollout_log_probs"])
        assert torch.allclose(reported[mine], expected[mine], atol=1e-5)
