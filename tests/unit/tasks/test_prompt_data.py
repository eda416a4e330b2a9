"""Datasets on disk: every format gives the same prompts, in the same order, by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plugin.config import JobConfig
from plugin.controller.job import _with_epochs
from plugin.controller.run_directory import warn_of_other_rows
from plugin.errors import ConfigError
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer
from plugin.tasks.loading import load_task
from plugin.tasks.prompt_data import PromptDataset
from plugin.tasks.prompt_format import PromptFormat

TOKENIZER = CharacterTokenizer(ALPHABET)
ROWS: list[dict[str, Any]] = [{"prompt": f"{i}=", "answer": str(i)} for i in range(9)]


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """As datasets writes its files: the stream format."""
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return path


def save_to_disk(directory: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """The layout of `datasets.Dataset.save_to_disk`, in two shards."""
    directory.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:4], rows[4:]), strict=True):
        write_arrow(directory / name, part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def parquet_shards(directory: Path) -> Path:
    directory.mkdir()
    write_parquet(directory / "train-00000-of-00002.parquet", ROWS[:5])
    write_parquet(directory / "train-00001-of-00002.parquet", ROWS[5:])
    write_parquet(directory / "test-00000-of-00001.parquet", ROWS[:1])
    return directory / "train-*.parquet"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda path: write_jsonl(path / "p.jsonl"),
    "parquet": lambda path: write_parquet(path / "p.parquet"),
    "arrow": lambda path: write_arrow(path / "p.arrow"),
    "save_to_disk": lambda path: save_to_disk(path / "dataset"),
    "pattern": lambda path: parquet_shards(path / "shards"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_prompts_in_the_same_order(kind: str, tmp_path: Path) -> None:
    data = PromptDataset(FORMATS[kind](tmp_path), TOKENIZER, seed=1)
    expected = PromptDataset(write_jsonl(tmp_path / "expected.jsonl"), TOKENIZER, seed=1)
    assert [data.prompt(i) for i in range(20)] == [expected.prompt(i) for i in range(20)]
    assert data.fingerprint == expected.fingerprint and len(data) == 9


def test_every_pass_uses_each_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "p.parquet")
    data = PromptDataset(file, TOKENIZER, seed=1)
    passes = [[data.prompt(9 * epoch + i).tokens for i in range(9)] for epoch in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) and len(set(passes[0])) == 9
    assert passes[0] != passes[1]
    # A resumed run asks for a number without the numbers before it.
    assert PromptDataset(file, TOKENIZER, seed=1).prompt(13).tokens == passes[1][4]
    plain = PromptDataset(file, TOKENIZER, seed=1, shuffle=False)
    assert [plain.prompt(i).data["answer"] for i in (0, 1, 9, 11)] == ["0", "1", "0", "2"]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_too_long_and_duplicate_rows_are_counted(
    write: Callable[[Path, list[dict[str, Any]]], Path], tmp_path: Path
) -> None:
    rows = [*ROWS[:3], {"prompt": "123456789=", "answer": ""}, *ROWS[:2]]
    said: list[str] = []
    file = write(tmp_path / f"p.{write.__name__[6:]}", rows)
    data = PromptDataset(file, TOKENIZER, max_prompt_length=4, bad_rows="skip", log=said.append)
    assert len(data) == 5
    assert "1 of 6 rows are left out (1 too long)" in said[0]
    assert "2 of 6 rows repeat the prompt of an earlier row" in said[1]


def test_a_bad_row_of_a_table_is_named_by_file_and_row(tmp_path: Path) -> None:
    rows = [*ROWS[:6], {"prompt": None, "answer": "1"}, {"prompt": "", "answer": "1"}]
    directory = save_to_disk(tmp_path / "dataset", rows)
    message = r"data-00001-of-00002\.arrow, row 2: the prompt is of type NoneType; .*1 of 8 rows are bad besides \(rows 3\); --bad-rows skip"
    with pytest.raises(ConfigError, match=message):
        PromptDataset(directory, TOKENIZER)


CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}*{% endif %}{{ m.content }}{% endfor %}"
    "{% if tools %}+{{ tools | length }}{% endif %}{% if mark %}-{% endif %}="
)


def chat_tokenizer() -> CharacterTokenizer:
    tokenizer = CharacterTokenizer(ALPHABET)
    tokenizer.chat_template = CHAT
    return tokenizer


def rendered(path: Path, **settings: Any) -> list[str]:
    form = PromptFormat(chat=True, **settings)
    data = PromptDataset(path, chat_tokenizer(), form, shuffle=False)
    return [TOKENIZER.decode(data.prompt(i).tokens) for i in range(len(data))]


def test_prompts_are_text_or_messages_through_the_tokenizers_template(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [
        {"prompt": "12", "tools": [tool]},
        {"prompt": [{"role": "user", "content": "34"}], "tools": json.dumps([tool, tool])},
        {"prompt": [{"role": "system", "content": "5"}, {"role": "user", "content": "6"}], "tools": None},
    ]  # fmt: skip
    file = write_jsonl(tmp_path / "p.jsonl", rows)
    assert rendered(file) == ["12=", "34=", "*56="]
    # A row's own system message stays; the others get the flag's.
    assert rendered(file, system_prompt="7") == ["*712=", "*734=", "*56="]
    assert rendered(file, tools_key="tools", template_arguments={"mark": True}) == [
        "12+1-=",
        "34+2-=",
        "*56-=",
    ]


def test_columns_may_have_other_names_and_lie_inside_of_others(tmp_path: Path) -> None:
    row = {
        "question": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }
    settings = {
        "hf_checkpoint": "unused",
        "prompt_data": str(write_parquet(tmp_path / "p.parquet", [row])),
        "prompt_key": "question",
        "label_key": "reward_model.ground_truth",
        "apply_chat_template": True,
    }
    task = load_task(JobConfig.from_sources(settings), chat_tokenizer())
    prompt = task.prompt(0)  # type: ignore[union-attr]
    assert TOKENIZER.decode(prompt.tokens) == "1+1="
    assert task.reward(prompt, TOKENIZER.encode("2$")) == 1.0  # type: ignore[union-attr]
    assert task.reward(prompt, TOKENIZER.encode("3$")) == 0.0  # type: ignore[union-attr]


MISTAKES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no such file": (lambda p: p / "x.jsonl", r"x\.jsonl cannot be read \(No such file"),
    "no such table": (lambda p: p / "x.parquet", r"x\.parquet cannot be read"),
    "empty file": (lambda p: write_jsonl(p / "x.jsonl", []), "holds no row"),
    "empty table": (
        lambda p: write_parquet(p / "x.parquet", ROWS[:1]) and _emptied(p / "x.parquet"),
        "holds no row",
    ),
    "no prompt column": (
        lambda p: write_parquet(p / "x.parquet", [{"question": "1=", "answer": "1"}]),
        r"row 0: no 'prompt'; it has question, answer; name the column with --prompt-key",
    ),
    "no label column": (
        lambda p: write_jsonl(p / "x.jsonl", [{"prompt": "1=", "solution": "1"}]),
        r"line 1: no 'answer'; it has prompt, solution; name the column with --label-key",
    ),
    "not Parquet": (lambda p: _text(p / "x.parquet"), "is not a Parquet file"),
    "not Arrow": (lambda p: _text(p / "x.arrow"), "is not an Arrow file"),
    "no data": (lambda p: p, r"holds no \.parquet, \.arrow or \.jsonl file"),
    "no match": (lambda p: p / "x-*.parquet", "no file has such a name"),
    "splits": (
        lambda p: parquet_shards(p / "shards").parent,
        r"holds the splits test, train; name one of them, such as '.*/train-\*\.parquet'",
    ),
    "a dictionary of splits": (
        lambda p: _splits(p),
        r"holds the splits train, test; name one of them, such as .*/train",
    ),
}


def _emptied(path: Path) -> Path:
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    return path


def _text(path: Path) -> Path:
    path.write_text("no table at all")
    return path


def _splits(path: Path) -> Path:
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return path


@pytest.mark.parametrize("case", MISTAKES)
def test_a_dataset_that_cannot_be_used_is_an_error_with_its_remedy(
    case: str, tmp_path: Path
) -> None:
    make, message = MISTAKES[case]
    settings = {"hf_checkpoint": "unused", "prompt_data": str(make(tmp_path))}
    with pytest.raises(ConfigError, match=message):
        load_task(JobConfig.from_sources(settings), TOKENIZER)


def test_tools_that_are_no_schemas_are_refused(tmp_path: Path) -> None:
    for tools, message in (("{", "not JSON"), ([1], "must be a list of JSON schemas")):
        file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "1", "tools": tools}])
        with pytest.raises(ConfigError, match=message):
            PromptDataset(file, chat_tokenizer(), PromptFormat(chat=True, tools_key="tools"))


def test_epochs_become_rollouts_and_exclude_their_number() -> None:
    settings = {"hf_checkpoint": "m", "prompt_data": "p.jsonl", "rollout_batch_size": 4}
    config = JobConfig.from_sources({**settings, "num_epochs": 2})
    # 2 passes over 9 rows are 18 prompts: 4 batches of 4 and a part of a fifth.
    assert _with_epochs(config, 9).num_rollouts == 5
    with pytest.raises(ConfigError, match="--num-epochs 2 with --num-rollouts 3"):
        JobConfig.from_sources({**settings, "num_epochs": 2, "num_rollouts": 3})


def test_a_run_that_goes_on_with_other_rows_is_warned(tmp_path: Path) -> None:
    one = PromptDataset(write_jsonl(tmp_path / "a.jsonl"), TOKENIZER)
    other = PromptDataset(write_jsonl(tmp_path / "b.jsonl", ROWS[::-1]), TOKENIZER)
    warned: list[str] = []
    warn_of_other_rows(one, {"data": one.fingerprint}, warned.append)
    warn_of_other_rows(one, {}, warned.append)  # of a run on another task, or before the first save
    warn_of_other_rows(None, {"data": one.fingerprint}, warned.append)
    assert warned == []
    warn_of_other_rows(other, {"data": one.fingerprint}, warned.append)
    assert "now mean other rows" in warned[0]
