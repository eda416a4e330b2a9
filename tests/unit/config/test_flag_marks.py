"""What a flag says of itself: that it names files, may change on resume, is shown in short help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from plugin.config import JobConfig
from plugin.config.flags import field_type

FIELDS = {item.name: item for item in dataclasses.fields(JobConfig)}
#: A relative value of every flag with a path mark that is not simply a file or a directory.
RELATIVE = {
    "eval_data": ("set:rows.jsonl",),
    "teachers": ("math=models/teacher",),
    **dict.fromkeys(("task_path", "reward_function_path", "policy_loss"), "own.py:fn"),
    **dict.fromkeys(("advantage_estimator", "rollout_engine"), "own.py:fn"),
    **dict.fromkeys(("custom_tis_function_path", "custom_detector_path"), "a.fn, own.py:fn"),
    "reward": ("exact", "own.py:fn:0.5"),
}


def test_every_flag_that_names_files_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    marked = [name for name, item in FIELDS.items() if item.metadata["path"] is not None]
    # Unchecked: most of these do not fit together, and absolute names need no other flag.
    for name in marked:
        several = field_type(JobConfig, name)[0] == tuple[str, ...]
        relative = RELATIVE.get(name, "some/where")
        absolute = FIELDS[name].metadata["path"]
        made = tuple(map(absolute, relative)) if several else (absolute(relative),)
        assert any(f"{tmp_path}/" in text for text in made), name
        assert tuple(map(absolute, made)) == made, f"{name}: absolute names stay"
    assert {*RELATIVE, "hf_checkpoint", "prompt_data", "lora_path"} <= set(marked)


def test_names_that_end_like_a_files_flag_are_marked() -> None:
    endings = ("_hf_checkpoint", "_path", "_dir", "prompt_data")
    texts = [n for n in FIELDS if field_type(JobConfig, n)[0] is str and n.endswith(endings)]
    unmarked = {name for name in texts if FIELDS[name].metadata["path"] is None}
    assert unmarked == {"run_dir"}  # of the driver alone, which resolves it


def test_the_flags_that_may_change_on_resume() -> None:
    assert {n for n, item in FIELDS.items() if item.metadata["may_change_on_resume"]} == {
        *("resume", "resume_from", "overwrite", "run_dir", "address", "num_rollouts", "name"),
        *("save_interval", "save_at_end", "keep_checkpoints", "dump_log_probs"),
        "async_save",
        *(
            "start_timeout",
            "load_timeout",
            "step_timeout",
            "weight_timeout",
            "ray_timeout",
            "rollout_timeout",
            "max_restarts",
            "group_journal",
            "min_rollout_engines",
            "network_interface",
        ),
        *("use_wandb", "wandb_project", "save_hf", "save_hf_interval"),
        *("log_samples", "reward_workers", "reward_timeout", "reward_memory"),
        *("rollout_url", "rollout_weights_dir"),
        *("rollout_request_timeout", "rollout_request_retries", "least_response_speed"),
        *("rollout_api_key_env", "threads_per_rank"),
        *("eval_data", "eval_interval", "eval_at_start", "n_samples_per_eval_prompt", "keep_best"),
        *("eval_temperature", "eval_top_p", "eval_max_response_length"),
        *("eval_pass_at", "eval_pass_reward"),
    }


def test_evaluation_shows_the_flags_that_decide_a_score() -> None:
    shown = JobConfig.common_flags("eval")
    assert {"eval_data", "reward", "task_path", "rollout_engine", "seed"} <= shown
    assert not shown & {"lr", "use_tis", "num_rollouts", "resume", "tensor_model_parallel_size"}
    every = {word for item in FIELDS.values() for word in item.metadata["common_in"].split()}
    assert every == {"train", "eval"}


def test_files_become_absolute_and_import_paths_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = JobConfig(
        use_tis=True,
        custom_tis_function_path="plugin.ppo_utils.icepop_function, mine/hook.py:fn",
        task_path="task.py:Task",
        hf_checkpoint="models/tiny",
    )
    absolute = config.with_absolute_paths()
    assert absolute.hook_names() == [
        "plugin.ppo_utils.icepop_function",
        f"{tmp_path}/mine/hook.py:fn",
    ]
    assert absolute.task_path == f"{tmp_path}/task.py:Task"
    assert absolute.hf_checkpoint == f"{tmp_path}/models/tiny"


def test_a_configuration_without_files_is_unchanged() -> None:
    config = JobConfig(use_tis=True, custom_tis_function_path="package.module:hook")
    assert config.with_absolute_paths() == config
