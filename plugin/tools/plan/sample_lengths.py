"""Lengths of prompts and responses that a plan reckons with: from a file, or a distribution."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plugin.config import JobConfig
from plugin.errors import ConfigError
from plugin.ragged import Integers

_DEFAULT_SIGMA = 0.8
#: No sample has more tokens than this has digits for.
_NUMBER = re.compile("[0-9]{1,12}")
_FORM = "one line per sample with the tokens of prompt and response, such as: 310 1840"


@dataclass(frozen=True)
class SampleLengths:
    """prompts, responses: [N] tokens of each sample of one optimizer step."""

    prompts: Integers
    responses: Integers

    @property
    def totals(self) -> Integers:
        return self.prompts + self.responses

    @property
    def response_share(self) -> float:
        """Response tokens over all tokens."""
        return float(self.responses.sum() / self.totals.sum())


def sample_lengths(config: JobConfig, source: str | None, longest: int) -> SampleLengths:
    """The samples of one optimizer step.

    source: a file, `lognormal:MEDIAN:SIGMA` for responses, or None for one whose median is a third
        of --max-response-length
    longest: positions of the model
    """
    count = config.global_batch_size or config.responses_per_rollout
    if source is None or source.startswith("lognormal"):
        prompts, responses = _lognormal(config, source, count)
    else:
        prompts, responses = _from_file(source, count)
    prompts = np.clip(prompts, 1, max(1, longest - 1))
    responses = np.clip(responses, 1, np.maximum(1, longest - prompts))
    return SampleLengths(prompts, responses)


def _lognormal(config: JobConfig, source: str | None, count: int) -> tuple[Integers, Integers]:
    median, sigma = config.max_response_length / 3, _DEFAULT_SIGMA
    if source not in (None, "lognormal"):
        try:
            _, first, second = str(source).split(":")
            median, sigma = float(first), float(second)
        except ValueError:
            raise ConfigError(
                f"--lengths {source} is not a distribution; write lognormal:MEDIAN:SIGMA, such as "
                "lognormal:2000:0.8, or name a file"
            ) from None
        if not 1 <= median < 1e12 or not 0 <= sigma < 10:
            raise ConfigError(
                f"--lengths {source}: the median must be at least 1 token and below 1e12, sigma in "
                "[0, 10)"
            )
    generator = np.random.default_rng(config.seed)
    responses = np.minimum(
        generator.lognormal(np.log(median), sigma, count), config.max_response_length
    )
    prompts = np.full(count, max(1, config.max_prompt_length // 4))
    return prompts.astype(np.int64), responses.astype(np.int64)


def _from_file(source: str, count: int) -> tuple[Integers, Integers]:
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"--lengths {source} is no file; give {_FORM}; or lognormal:MEDIAN:SIGMA")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {source} is not readable ({error}); give {_FORM}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(_NUMBER.fullmatch(word) for word in words):
            raise ConfigError(
                f"--lengths {source}, line {number} is {line.strip()!r}; give {_FORM}"
            )
        rows.append([int(word) for word in words])
    if not rows:
        raise ConfigError(f"--lengths {source} is empty; give {_FORM}")
    table = np.array(rows, np.int64)[np.arange(count) % len(rows)]
    return table[:, 0], table[:, 1]
