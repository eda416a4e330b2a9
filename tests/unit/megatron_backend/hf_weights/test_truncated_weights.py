"""A weight file that was cut off is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from plugin.cluster.model_source import directory_source
from plugin.config import JobConfig
from plugin.errors import WeightError
from tests.parallel.tiny_models import hf_state_dict, tiny_llama

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_a_truncated_safetensors_file_is_one_line_that_names_it(tmp_path: Path, kept: int) -> None:
    config = tiny_llama(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(hf_state_dict(config), file)
    assert directory_source(str(tmp_path), "--hf-checkpoint", JobConfig()).directory == str(
        tmp_path
    )
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightError) as caught:
        directory_source(str(tmp_path), "--hf-checkpoint", JobConfig())
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
