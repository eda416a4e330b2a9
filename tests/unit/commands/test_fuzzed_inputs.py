"""Files that are none, settings without end and absurd sizes: one line each, soon, in little memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plugin.cli import main
from plugin.config import JobConfig, TrainerConfig
from plugin.config.flags import read_yaml
from plugin.config.import_paths import load_function
from plugin.errors import ConfigError, HookLoadError, WeightError
from plugin.json_lines import parse_yaml, read_json_lines
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.megatron_backend.lora.targets import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_adapter_directory,
)
from plugin.observe.html_page import refuse_overwriting, write_page
from plugin.tasks.row_files import open_rows
from plugin.tools.plan.workload import SampleLengths, full_microbatch, sample_lengths

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(60)]

#: Nine anchors of nine aliases each: 9^9 values.
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_pipe_or_a_device_or_a_directory_as_config_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe, a socket or a device" in refusal(tmp_path / "pipe")
    assert "a pipe, a socket or a device" in refusal(Path("/dev/zero"))
    assert "directory" in refusal(tmp_path)
    with pytest.raises(OSError, match="a pipe"):
        next(read_json_lines(tmp_path / "pipe"))


def test_a_pipe_in_a_run_directory_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "samples.jsonl")
    assert main(["samples", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"megatron-tis: {tmp_path}/samples.jsonl: it is a pipe")


def test_a_config_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.yaml").open("wb") as file:
        file.truncate(1 << 40)
    assert "more than 64 MB" in refusal(tmp_path / "config.yaml")


def test_samples_that_cannot_be_read_are_not_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1\n')
    assert main(["samples", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "samples.jsonl: line 1 is skipped: not JSON" in line


def test_a_line_of_terabytes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plugin.json_lines._MOST_LINE_BYTES", 1 << 20)
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1, "reward": 0.5, "loss": 0.0}\n')
        file.truncate(1 << 40)
    lines = list(read_json_lines(tmp_path / "metrics.jsonl"))
    assert [line.number for line in lines] == [1, 2] and "longer than 1 MB" in lines[1].problem
    assert main(["report", str(tmp_path)]) == 0
    assert "line 2 is skipped: longer than" in capsys.readouterr().err


def test_anchors_do_not_multiply_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(LAUGHS)
    assert "its anchors stand for more than 100000 values" in refusal(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("a: &a [*a]")
    assert "its anchors stand for" in refusal(tmp_path / "config.yaml")
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


def test_numbers_of_5000_digits_are_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"seed: {'9' * 5000}")
    assert "4300" in refusal(tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text('{"step": ' + "9" * 5000 + "}\n")
    [line] = read_json_lines(tmp_path / "metrics.jsonl")
    assert line.value is None and "not JSON" in line.problem


def test_a_page_is_not_written_into_directories_that_nobody_asked_for(tmp_path: Path) -> None:
    for output in (tmp_path / "new" / "page.html", tmp_path):
        with pytest.raises(ConfigError):
            refuse_overwriting(output, force=True)
        with pytest.raises(ConfigError):
            write_page(output, "text", force=True)
    assert list(tmp_path.iterdir()) == []


def test_a_page_does_not_take_the_place_of_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ConfigError, match="a pipe, a socket or a device; choose a file"):
            refuse_overwriting(output, force=True)


@pytest.mark.parametrize("command", ["report", "doctor", "samples"])
def test_numbers_of_400_digits_in_a_run_are_no_traceback(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = "9" * 400
    sample = f'{{"reward": {huge}, "tokens": {huge}, "rewards": {{"a": -{huge}}}}}'
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text(
            f'{{"step": 1, "reward": {huge}, "loss": -{huge}, "samples": [{sample}]}}\n'
            f'{{"step": {huge}, "reward": 1, "samples": [{sample}]}}\n'
        )
    assert main([command, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert huge not in printed and (command != "samples" or "reward inf (a -inf)" in printed)


@pytest.mark.parametrize("command", ["report", "doctor"])
def test_a_run_of_which_nothing_is_readable_is_no_healthy_run(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for metrics in ("", "\0\0\0", '{"reward": 1}\n'):
        (tmp_path / "metrics.jsonl").write_text(metrics)
        (tmp_path / "config.yaml").write_text("a: [")
        assert main([command, str(tmp_path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"megatron-tis: {tmp_path}: no step was recorded: ")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", ["report", "doctor"])
@pytest.mark.parametrize("settings", ["a: [", "no mapping", "\0", "lr: &a [*a]"])
def test_a_run_without_readable_settings_is_shown_and_fails(
    tmp_path: Path, command: str, settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "loss": 0.0}\n')
    assert main([command, str(tmp_path)]) == 0  # a job wrote none, or nobody copied them
    (tmp_path / "config.yaml").write_text(settings)
    assert main([command, str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "config.yaml: not readable (" in output.out + output.err


@pytest.mark.parametrize("settings", ["a: [", "no mapping", "\0", "lr: &a [*a]"])
def test_a_run_without_readable_settings_is_not_exported(
    tmp_path: Path, settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = tmp_path / "run", tmp_path / "model"
    checkpoint = run / "checkpoints" / "step_0000001"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").write_text(settings)
    for source in (run, checkpoint):
        assert main(["export", str(source), str(target)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "config.yaml" in line
    assert not target.exists()


@pytest.mark.parametrize(
    "sizes",
    [{"global_batch_size": 10**9}, {"rollout_batch_size": 10**12}, {"micro_batch_size": 10**12}],
)
def test_a_step_of_billions_of_samples_is_not_planned(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="1,000,000 are planned at most"):
        sample_lengths(JobConfig().unchecked_copy(**sizes), None, 4096)


def test_a_microbatch_of_quadrillions_of_tokens_is_not_planned() -> None:
    config, one = JobConfig().unchecked_copy(max_tokens_per_gpu=10**15), np.array([4])
    with pytest.raises(ConfigError, match="1,000,000 are planned at most"):
        full_microbatch(config, SampleLengths(one, one), 4096)


def test_steps_of_5000_digits_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "samples": [{"reward": 1}]}\n')
    assert main(["samples", str(tmp_path), "--steps", "9" * 5000]) == 2
    assert len(capsys.readouterr().err) < 300
    assert main(["samples", "9" * 5000]) == 2
    assert len(capsys.readouterr().err) < 300


@pytest.mark.parametrize("name", ["a.parquet", "a.npz", "a.pt", "a.jsonl"])
def test_a_pipe_as_a_dump_is_not_waited_for(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / name)
    assert main(["compare", str(tmp_path / name)]) == 2
    assert "it is a pipe" in capsys.readouterr().err


def test_pipes_and_broken_files_of_data_weights_and_hooks_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "rows.parquet"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"--prompt-data .* cannot be read \(it is a pipe"):
        open_rows(pipe, "--prompt-data")
    (tmp_path / "state.json").write_text('{"_data_files": [{}], "n": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match="4300 digits"):
        open_rows(tmp_path, "--prompt-data")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="it is a pipe"):
        HfDirectory(tmp_path)
    os.mkfifo(tmp_path / "hook.py")
    with pytest.raises(HookLoadError, match="is a file, and :function is missing"):
        load_function(str(tmp_path / "hook.py"))


@pytest.mark.parametrize("text", ['{"a": ', "[" * 100_000, '{"r": ' + "9" * 5000 + "}"])
def test_a_broken_config_of_a_model_or_an_adapter_is_named(tmp_path: Path, text: str) -> None:
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file({"a": torch.zeros(1)}, weights)
    config.write_text(text)
    with pytest.raises(WeightError, match=r"config\.json cannot be read"):
        HfDirectory(tmp_path)
    weights.rename(tmp_path / ADAPTER_WEIGHTS)
    config.rename(tmp_path / ADAPTER_CONFIG)
    with pytest.raises(ConfigError, match=f"--lora-path .*{ADAPTER_CONFIG} is not valid JSON"):
        check_adapter_directory(None, TrainerConfig(lora_path=str(tmp_path), lora_rank=4))


@pytest.mark.parametrize(
    "sizes",
    [
        ("--num-nodes", "1000000000"),
        ("--pipeline-model-parallel-size", "1000000000"),
        ("--tensor-model-parallel-size", "1" + "0" * 400),
        ("--num-gpus-per-node", "9" * 5000),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_planned(sizes: tuple[str, ...]) -> None:
    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    command = [sys.executable, "-m", "plugin", "plan", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limits)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()[-1]) < 1500
