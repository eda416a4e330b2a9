"""An unknown flag that Megatron-LM or slime has is answered with its name here."""

from __future__ import annotations

import dataclasses

import pytest

from plugin.cli import main
from plugin.config import JobConfig
from plugin.config.other_frameworks import OTHER_SPELLINGS, spelled_here
from plugin.errors import ConfigError

FIELDS = {field.name for field in dataclasses.fields(JobConfig)}


@pytest.mark.parametrize("name", OTHER_SPELLINGS)
def test_what_is_named_exists_here_and_the_other_name_does_not(name: str) -> None:
    assert name not in FIELDS
    assert spelled_here(name, FIELDS) is not None


def test_the_command_line_names_the_flag_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--fp16"])
    assert "unknown flag --fp16; here it is --train-dtype float16" in capsys.readouterr().err


def test_a_configuration_file_gets_the_same_answer() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'rm_type'; here it is --reward"):
        JobConfig.from_sources({"rm_type": "math"})


def test_a_command_without_that_flag_does_not_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["samples", "--fp16"])
    assert "--train-dtype" not in capsys.readouterr().err
