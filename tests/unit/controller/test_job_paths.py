"""Files are named from the root before a configuration leaves the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.config import JobConfig
from plugin.controller.job_paths import with_absolute_paths


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
    absolute = with_absolute_paths(config)
    assert absolute.hook_names() == [
        "plugin.ppo_utils.icepop_function",
        f"{tmp_path}/mine/hook.py:fn",
    ]
    assert absolute.task_path == f"{tmp_path}/task.py:Task"
    assert absolute.hf_checkpoint == f"{tmp_path}/models/tiny"


def test_a_configuration_without_files_is_unchanged() -> None:
    config = JobConfig(use_tis=True, custom_tis_function_path="package.module:hook")
    assert with_absolute_paths(config) == config
