"""What is checked of an engine before any actor starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plugin.config import JobConfig
from plugin.engines.choice import check_engine, check_engine_size, installed_arguments
from plugin.errors import ConfigError


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported, with the source that names its arguments."""
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('too slow to import')\n")
    (package / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n"
        "    model: str = 'x'\n"
        "    block_size: int = 16\n"
        "    shared: ClassVar[int] = 3\n"
        "    def method(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return package


def test_argument_names_are_read_without_importing_the_engine(fake_vllm: Path) -> None:
    assert installed_arguments("vllm") == {"model", "block_size"}
    (fake_vllm / "engine" / "arg_utils.py").write_text("# moved elsewhere\n")
    assert installed_arguments("vllm") is None


def test_an_argument_that_the_installed_engine_lacks_is_refused(fake_vllm: Path) -> None:
    check_engine(JobConfig(rollout_engine="vllm", vllm_args=("block_size=32",)))
    with pytest.raises(ConfigError, match="no argument block_sise; did you mean block_size"):
        check_engine(JobConfig(rollout_engine="vllm", vllm_args=("block_sise=32",)))


@pytest.mark.parametrize(("size", "fits"), [(2, True), (4, True), (3, False), (8, False)])
def test_the_size_of_an_engine_divides_the_heads(size: int, fits: bool) -> None:
    # 4 heads and 2 of keys and values: of 4 workers two share each of the latter.
    model = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = JobConfig(rollout_engine="vllm", rollout_num_gpus_per_engine=size)
    if fits:
        check_engine_size(config, model)
        return
    with pytest.raises(ConfigError, match=f"is {size}; the model has 4 .*shared by 1, 2, 4"):
        check_engine_size(config, model)
