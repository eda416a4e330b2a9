"""Which teacher scores a sample, and what is refused before a job starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.cluster import array_transport
from plugin.cluster.array_transport import only, store
from plugin.cluster.model_source import policy_source
from plugin.config import JobConfig
from plugin.controller.batch import MiniBatch
from plugin.controller.passes import Teachers, _stored_scores
from plugin.controller.preflight.job_checks import check_job
from plugin.errors import BatchError, ConfigError
from plugin.ragged import Ragged
from tests.ray.tokenizer_files import save_character_tokenizer
from tests.unit.teachers.stand_in_teacher import StandInTeacher

RESPONSES = (2, 1, 3, 1, 2, 4)


class FakeTeacher:
    """Gives every token -(its own number) - the token's id / 100; remembers the sizes that it was asked about."""

    def __init__(self, number: float) -> None:
        self.number, self.asked = number, []

    def score(self, batch: RolloutBatch) -> dict[str, Ragged]:
        self.asked.append(len(batch))
        tokens, lengths = batch.columns["unconcat_tokens"], batch.columns["response_lengths"]
        own = [-self.number - t[-n:] / 100 for t, n in zip(tokens, lengths.tolist(), strict=True)]
        return {"teacher_log_probs": Ragged.of(own)}


def samples() -> RolloutBatch:
    """Six samples of three groups, with ids that tell them apart."""
    totals = [1 + r for r in RESPONSES]
    return RolloutBatch(
        {
            "unconcat_tokens": [torch.arange(n) + 10 * i for i, n in enumerate(totals)],
            "total_lengths": totals,
            "response_lengths": list(RESPONSES),
            "loss_masks": [torch.ones(r, dtype=torch.int64) for r in RESPONSES],
            "group_index": [0, 0, 1, 1, 2, 2],
        }
    )


def test_every_sample_is_scored_by_the_teacher_of_its_prompt() -> None:
    math, code = FakeTeacher(1.0), FakeTeacher(2.0)
    # Prompts 40, 41 and 42 are those of the groups 0, 1 and 2.
    names = {40: "code", 41: "math", 42: "code"}
    teachers = Teachers({"math": math.score, "code": code.score}, names.__getitem__)
    halves = [MiniBatch(0, 0, np.array([0, 1, 2])), MiniBatch(0, 1, np.array([3, 4, 5]))]
    again = [MiniBatch(1, 0, np.array([1, 3, 5])), MiniBatch(1, 1, np.array([0, 2, 4]))]
    for updates in ([MiniBatch(0, 0)], [*halves, *again]):
        batch = teachers.added_to(samples(), updates, [40, 41, 42])
        for i, (tokens, values) in enumerate(
            zip(batch.columns["unconcat_tokens"], batch.columns["teacher_log_probs"], strict=True)
        ):
            number = 1.0 if i in (2, 3) else 2.0
            torch.testing.assert_close(values, -number - tokens[1:] / 100)
    # The first epoch's mini-batches are scored one by one, as they are trained on; later ones not again.
    assert math.asked == [2, 1, 1] and code.asked == [4, 2, 2]


def test_what_a_teacher_says_is_checked_before_a_rank_sees_it() -> None:
    class Broken(FakeTeacher):
        def score(self, batch: RolloutBatch) -> dict[str, Ragged]:
            values = super().score(batch)["teacher_log_probs"]
            values.values[4] = torch.nan
            return {"teacher_log_probs": values}

    with pytest.raises(BatchError, match="teacher_log_probs of sample 2 is nan at position 1"):
        Teachers({"teacher": Broken(1.0).score}).added_to(samples(), [MiniBatch(0, 0)], [0, 1, 2])


def test_what_a_server_says_is_checked_and_stored_and_the_teacher_reads_tokens_that_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects: list[Any] = []

    def stored(batch: RolloutBatch) -> RolloutBatch:
        return store(batch, [np.arange(len(batch))], lambda a: objects.append(a) or objects[-1])  # type: ignore[func-returns-value]

    monkeypatch.setattr(array_transport, "_of_ray", list)
    server, trainer = FakeTeacher(1.0), SimpleNamespace(stored=stored)
    in_the_job = FakeTeacher(2.0)
    teachers = Teachers(
        {
            "http": partial(_stored_scores, server.score, trainer),
            "in": partial(_stored_scores, in_the_job.score, trainer),
        },
        lambda prompt: "http" if prompt == 41 else "in",
    )
    batch = stored(samples())
    added = teachers.added_to(batch, [MiniBatch(0, 0)], [40, 41, 42])
    assert not added.here().columns.keys() & {"teacher_log_probs", "unconcat_tokens"}
    arrived = only(added, "teacher_log_probs", "unconcat_tokens").columns
    for i, (tokens, values) in enumerate(
        zip(arrived["unconcat_tokens"], arrived["teacher_log_probs"], strict=True)
    ):
        torch.testing.assert_close(values, -(1.0 if i in (2, 3) else 2.0) - tokens[1:] / 100)
    server.number = float("nan")
    with pytest.raises(BatchError, match="teacher_log_probs of sample 0 is nan at position 0"):
        teachers.added_to(batch, [MiniBatch(0, 0)], [40, 41, 42])


def saved(directory: Path, **changes: Any) -> Path:
    """The tiny model as a Hugging Face directory with its tokenizer."""
    from transformers import AutoModelForCausalLM

    config = policy_source(JobConfig.from_sources({})).as_config()
    config.update(changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    save_character_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    saved(root / "policy")
    # The same tokenizer with padded embeddings: the same vocabulary.
    saved(root / "padded", vocab_size=32)
    saved(root / "short", vocab_size=12)
    other = saved(root / "other")
    file = other / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(text))
    bare = saved(root / "bare", vocab_size=32)
    for name in bare.glob("tokenizer*"):
        name.unlink()
    return root


def rows(path: Path, *teachers: str | None) -> str:
    lines = [{"prompt": f"{i}=", **({"domain": t} if t else {})} for i, t in enumerate(teachers)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def settings(models: Path, data: str, **more: Any) -> dict[str, Any]:
    return {
        "hf_checkpoint": str(models / "policy"),
        "prompt_data": data,
        "teacher_tau": 1.0,
        "advantage_estimator": "none",
        "n_samples_per_prompt": 1,
        "max_prompt_length": 16,
        "max_response_length": 6,
        **more,
    }


def test_a_teacher_with_another_vocabulary_is_refused_before_the_start(
    models: Path, tmp_path: Path
) -> None:
    data = rows(tmp_path / "rows.jsonl", None, None)
    for name, message in (
        (
            "other",
            "has a different vocabulary: '1' has the id 1 in the policy's tokenizer and the id 2",
        ),
        ("bare", "has a vocabulary of 32 tokens, the policy of 15"),
        ("short", r"short has logits for 12 ids, and the tokenizer has 15"),
        ("absent", f"^--teacher-hf-checkpoint {models}/absent holds no config.json"),
    ):
        given = settings(models, data, teacher_hf_checkpoint=str(models / name))
        with pytest.raises(ConfigError, match=message):
            check_job(JobConfig.from_sources(given))
    for name in ("policy", "padded"):
        given = settings(models, data, teacher_hf_checkpoint=str(models / name))
        parts = check_job(JobConfig.from_sources(given))
        assert list(parts.teachers) == ["teacher"]
    with pytest.raises(ConfigError, match="--distill-topk is 99, and the model has 15 ids"):
        check_job(JobConfig.from_sources({**given, "distill_topk": 99}))


@pytest.fixture
def server() -> Iterator[StandInTeacher]:
    found = StandInTeacher("sglang", vocab=15)
    yield found
    found.close()


def test_a_row_without_a_known_teacher_is_an_error_with_its_number(
    models: Path, tmp_path: Path, server: StandInTeacher
) -> None:
    given = settings(models, rows(tmp_path / "rows.jsonl", "math", "code"))
    given |= {
        "teachers": [f"math={models / 'padded'}", f"code={server.url}"],
        "teacher_server": "sglang",
        "teacher_key": "domain",
    }
    parts = check_job(JobConfig.from_sources(given))
    assert list(parts.teachers) == ["math"] and len(server.asked) == 1
    rows(tmp_path / "rows.jsonl", "math", "chess")
    with pytest.raises(ConfigError, match=r"2: its teacher 'domain' is 'chess'; --teachers names math, code"):  # fmt: skip
        check_job(JobConfig.from_sources(given))
    rows(tmp_path / "rows.jsonl", "math", None)
    with pytest.raises(ConfigError, match="no 'domain'; it has prompt; name the column with --tea"):
        check_job(JobConfig.from_sources(given))


def test_directories_of_teachers_become_whole_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    given = ["math=models/math", "code=http://127.0.0.1:1"]
    config = JobConfig(
        teachers=tuple(given), teacher_key="k", teacher_tau=1.0, prompt_data="x", hf_checkpoint="y"
    )
    whole = config.with_absolute_paths()
    assert whole.teachers == ("math=/models/math", "code=http://127.0.0.1:1")
