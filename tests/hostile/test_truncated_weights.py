"""A weight file that was cut off is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plugin.config import JobConfig
from plugin.errors import WeightError
from plugin.launch.model_source import directory_source


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_a_truncated_safetensors_file_is_one_line_that_names_it(tmp_path: Path, kept: int) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(8)}, file)
    assert directory_source(str(tmp_path), "--hf-checkpoint", JobConfig()).directory == str(
        tmp_path
    )
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightError) as caught:
        directory_source(str(tmp_path), "--hf-checkpoint", JobConfig())
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
