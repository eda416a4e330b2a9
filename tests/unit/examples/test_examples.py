"""Every example runs; whole jobs run in CPU size behind the `slow` marker."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plugin.cli import COMMANDS
from plugin.config import JobConfig
from plugin.errors import EngineError
from plugin.loss import load_hook

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
JOBS = sorted(EXAMPLES.glob("*.yaml"))

#: What runs every file of examples/: this module, or the one that is named.
COVERED_ELSEWHERE = {
    *("own_megatron_loop.py", "mismatch_experiment.py"),
    "plot_evaluations.py",  # test_math_words.py
    *("tiny_tool_task.py", "calculator_tool_task.py"),  # test_multi_turn_examples.py
}


def run(*command: str, timeout: float = 280, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True, text=True, cwd=ROOT, timeout=timeout, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def test_every_example_is_named_here() -> None:
    source = Path(__file__).read_text()
    files = {file.name for file in EXAMPLES.iterdir() if file.is_file()} - COVERED_ELSEWHERE
    unnamed = {
        name for name in files if Path(name).stem not in source and not name.endswith(".yaml")
    }
    assert not unnamed


def test_the_custom_correction_is_a_hook_of_forty_lines_that_runs_by_path() -> None:
    output = run(sys.executable, "examples/custom_correction.py")
    assert "ratio   1.0 -> weight 1.000" in output
    assert callable(load_hook(f"{EXAMPLES / 'custom_correction.py'}:soft_tis_function"))
    code = (EXAMPLES / "custom_correction.py").read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


def test_slimes_launch_script_checks_its_flags_without_slime() -> None:
    output = run("bash", "examples/slime_launch.sh", CHECK_ONLY="1", PYTHON=sys.executable)
    assert "policy loss ppo; corrections: plugin.ppo_utils.vanilla_tis_function" in output


def test_the_check_of_slimes_flags_finds_what_cannot_work() -> None:
    sys.path.insert(0, str(ROOT))
    from examples.check_slime_flags import main

    assert main(["--use-tis", "--custom-tis-function-path", "plugin.ppo_utils.no_such"]) == 2
    assert main(["--use-tis", "--tis-clip", "1", "--tis-clip-low", "3"]) == 2
    assert main(["--use-tis", "--tis-clip", "3", "--some-flag-of-slime", "7"]) == 0


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_settings_of_a_job_are_valid_here_and_in_its_cluster_command(job: Path) -> None:
    config = JobConfig.from_sources({}, job)
    assert config.num_rollouts > 1
    text = "\n".join(line.removeprefix("#").strip() for line in job.read_text().splitlines())
    command = re.search(r"--address auto.*?(?=\n\w+: )", text, re.S)
    assert command, "the cluster command stands beside the job"
    words = command.group().replace("\\", " ").split()
    flags: dict[str, Any] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) else "--"
            flags[word[2:].replace("-", "_")] = True if value.startswith("--") else value
    JobConfig.from_sources(flags, job)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_fsdp2_loop_gives_the_same_losses_on_every_number_of_ranks(
    tmp_path: Path, ranks: int
) -> None:
    file = tmp_path / "losses.json"
    launcher = (sys.executable,) if ranks == 1 else (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks)),
    )  # fmt: skip
    run(*launcher, "examples/fsdp2_loop.py", "--steps", "3", "--losses", str(file))
    # the losses of one process; two ranks have microbatches 3 and 2 + 1 padding
    expected = [0.147692, -0.134634, -0.512050]
    assert json.loads(file.read_text()) == pytest.approx(expected, abs=1e-5)


def vllm_output(logprobs: list[dict[int, Any]] | None) -> Any:
    """The fields of vLLM's RequestOutput that the example reads."""
    completion = SimpleNamespace(token_ids=[7, 8], logprobs=logprobs)
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[completion])


def test_vllm_outputs_become_samples_with_their_own_tokens_and_log_probs() -> None:
    sys.path.insert(0, str(ROOT))
    from examples.vllm_rollouts import samples_of

    chosen = [{7: SimpleNamespace(logprob=-0.5)}, {9: None, 8: SimpleNamespace(logprob=-1.5)}]
    (sample,) = samples_of([vllm_output(chosen)], weight_version=3)
    assert sample.tokens.tolist() == [1, 2, 3, 7, 8] and sample.response_length == 2
    assert sample.weight_version == 3
    assert sample.rollout_log_probs is not None
    torch.testing.assert_close(sample.rollout_log_probs, torch.tensor([-0.5, -1.5]))
    with pytest.raises(EngineError, match="logprobs=0"):
        samples_of([vllm_output(None)])


def test_the_vllm_example_says_what_is_missing() -> None:
    pytest.importorskip("transformers")
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    result = subprocess.run(
        [sys.executable, "examples/vllm_rollouts.py", "--hf-checkpoint", "x", "--prompts", "y"],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 2 and "pip install vllm" in result.stderr


def test_the_multi_node_example_is_the_train_command() -> None:
    assert "train" in COMMANDS
    text = (EXAMPLES / "multi_node_ray.py").read_text()
    assert "ray start --head" in text and 'main(["train"' in text


SMALL = ["--num-rollouts", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_runs_to_its_end(job: Path, tmp_path: Path) -> None:
    run(
        *(sys.executable, "-m", "plugin", "train", "--config", str(job)),
        *("--run-dir", str(tmp_path / "run"), *SMALL),
        timeout=560,
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_over_two_nodes_runs_to_its_end(tmp_path: Path) -> None:
    run(
        *(sys.executable, "examples/multi_node_ray.py", "--run-dir", str(tmp_path / "run"), *SMALL),
        timeout=560,
    )
    assert (tmp_path / "run" / "report.html").exists()
