"""Prompt files and other JSONL: every row is checked at the start, by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.errors import ConfigError
from plugin.observe.run_record import read_run
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer
from plugin.tasks.prompt_data import PromptDataset
from plugin.tasks.prompt_format import PromptFormat, lookup, no_column
from plugin.tools.compare.dump_reading import open_dump
from tests.ray.tokenizer_files import save_character_tokenizer

pytestmark = pytest.mark.hostile


TOKENIZER = CharacterTokenizer(ALPHABET)
GOOD = '{"prompt": "12=", "answer": "12"}'


def label_problem(row: Any) -> str | None:
    try:
        lookup(row, "answer")
    except KeyError:
        return no_column(row, "answer", "--label-key")
    return None


def open_data(path: Path, tokenizer: Any = TOKENIZER, **settings: Any) -> PromptDataset:
    return PromptDataset(path, tokenizer, **{"row_problem": label_problem, **settings})


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


BAD_ROWS = {
    "too long": ('{"prompt": "123456789", "answer": ""}', "has 9 tokens, more than 8; shorten it or raise --max-prompt-length"),
    "empty": ('{"prompt": "", "answer": ""}', "no tokens"),
    "a number": ('{"prompt": 5, "answer": ""}', "of type int; it must be text"),
    "null": ('{"prompt": null, "answer": ""}', "of type NoneType"),
    "messages": ('{"prompt": [{"role": "user", "content": "1"}], "answer": ""}', "render it with --apply-chat-template"),
    "not encodable": ('{"prompt": "xyz", "answer": ""}', "the tokenizer fails on it"),
    "half a surrogate pair": ('{"prompt": "\\ud800", "answer": ""}', "the tokenizer fails on it"),
    "no answer": ('{"prompt": "1"}', "no 'answer'"),
    "a list": ("[1]", "list instead of a JSON object"),
    "cut off": ('{"prompt": "1', "not JSON"),
    "nested deeply": ("[" * 100_000, "nested too deeply"),
    "Latin-1": ('{"prompt": "é", "answer": ""}'.encode("latin-1"), "not UTF-8 at byte 46 of the file; if it is ISO-8859-1, convert it with: iconv"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_not_found_in_the_middle_of_a_job(tmp_path: Path, case: str) -> None:
    row, message = BAD_ROWS[case]
    file = write(tmp_path / "p.jsonl", GOOD, row, GOOD)
    with pytest.raises(ConfigError) as raised:
        open_data(file, max_prompt_length=8)
    assert str(raised.value).startswith(f"--prompt-data {file}, line 2: ")
    assert message in str(raised.value) and "--bad-rows skip" in str(raised.value)


def test_skipped_rows_are_never_sampled_and_are_reported_once(tmp_path: Path) -> None:
    bad = [row for row, _ in BAD_ROWS.values()]
    file = write(tmp_path / "p.jsonl", GOOD, *bad, GOOD)
    said: list[str] = []
    task = open_data(file, max_prompt_length=8, bad_rows="skip", log=said.append)
    assert {task.prompt(index).tokens for index in range(10)} == {tuple(TOKENIZER.encode("12="))}
    assert (
        f"{len(bad)} of {len(bad) + 2} rows are left out (1 too long); the first is line 2: "
        in said[0]
    )
    assert said[1:] == [f"--prompt-data {file}: 1 of 14 rows repeat the prompt of an earlier row"]
    with pytest.raises(ConfigError, match=r"line 1: .*11 of 12 rows are bad besides \(lines 2, 3, 4, 5, 6, \.\.\.\)$"):  # fmt: skip
        open_data(write(tmp_path / "none.jsonl", *bad), max_prompt_length=8, bad_rows="skip")


def hf_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    save_character_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def test_a_row_that_the_template_or_the_tokenizer_refuses_does_not_hide_among_many(
    tmp_path: Path,
) -> None:
    tokenizer = hf_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.content }}{% endfor %}="
    )
    rows = [{"prompt": [{"role": "user", "content": "1" * (i % 40)}]} for i in range(2500)]
    rows[1700] = {"prompt": [{"role": "tool", "content": "1"}]}
    rows[2100] = {"prompt": "2" * 60}
    rows[2200] = {"prompt": "\ud800"}
    file = write(tmp_path / "p.jsonl", *map(json.dumps, rows))
    with pytest.raises(ConfigError, match=r"line 1701: the chat template fails on it .*no tools.*2 of 2500 rows are bad besides \(lines 2101, 2201\)"):  # fmt: skip
        open_data(
            file,
            tokenizer,
            prompt_format=PromptFormat(chat=True),
            row_problem=lambda _: None,
            max_prompt_length=50,
        )


def test_a_hugging_face_tokenizer_gives_the_same_prompts_alone_and_in_a_check(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "p.jsonl", GOOD)
    task = open_data(file, hf_tokenizer(tmp_path), max_prompt_length=3)
    assert task.prompt(0).tokens == tuple(TOKENIZER.encode("12="))
    with pytest.raises(ConfigError, match="has 3 tokens, more than 2"):
        open_data(file, hf_tokenizer(tmp_path), max_prompt_length=2)


def test_bad_rows_without_a_prompt_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="--bad-rows skip is about --prompt-data"):
        JobConfig(bad_rows="skip")


SEPARATORS = "a\u2028b\u2029c\u0085d\x1ce\x0bf"


def test_a_separator_of_unicode_does_not_cut_a_row(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "1=", "answer": SEPARATORS}, ensure_ascii=False)
    # json.dumps escapes what is below U+0020 even so.
    task = open_data(write(tmp_path / "p.jsonl", row))
    assert task.prompt(0).data["answer"] == SEPARATORS
    run = tmp_path / "run"
    run.mkdir()
    write(
        run / "metrics.jsonl", json.dumps({"step": 1, "note": SEPARATORS}, ensure_ascii=False), ""
    )
    record = read_run(run)
    assert [step["note"] for step in record.steps] == [SEPARATORS]
    sample = {"rollout_log_probs": [-1.0], "train_log_probs": [-1.0], "text": SEPARATORS}
    dump = open_dump([write(tmp_path / "dump.jsonl", json.dumps(sample, ensure_ascii=False), "  ")])
    assert sum(len(block.lengths) for block, _ in dump.blocks()) == 1
    assert dump.problems == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_another_encoding_is_not_taken_for_broken_json(
    tmp_path: Path, encoding: str
) -> None:
    text = f"{GOOD}\n{GOOD}\n".encode(encoding)
    for name, read in (
        ("p.jsonl", lambda path: open_data(path)),
        ("skip.jsonl", lambda path: open_data(path, bad_rows="skip")),
    ):
        file = write(tmp_path / name, text)
        with pytest.raises(
            ConfigError, match=f"line 1: not UTF-8 at byte .*iconv -f UTF-16 -t UTF-8 {name}"
        ):
            read(file)
    write(tmp_path / "metrics.jsonl", text)
    assert "if it is UTF-16, convert" in read_run(tmp_path).problems[0]
    dump = open_dump([write(tmp_path / "dump.jsonl", text)])
    assert list(dump.blocks()) == [] and "if it is UTF-16, convert" in dump.problems[0]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    task = open_data(write(tmp_path / "p.jsonl", GOOD.encode("utf-8-sig")))
    assert task.prompt(0).data["answer"] == "12"


def test_one_deeply_nested_line_does_not_cost_the_metrics_or_the_dump(tmp_path: Path) -> None:
    deep = '{"step": ' + "[" * 100_000
    write(tmp_path / "metrics.jsonl", '{"step": 1}', deep, '{"step": ' + "9" * 400 + "}")
    record = read_run(tmp_path)
    assert [step["step"] for step in record.steps] == [1]
    assert "line 2 is skipped: nested too deeply" in record.problems[0]
    good = '{"rollout_log_probs": [-1.0], "train_log_probs": [-1.0]}'
    dump = open_dump([write(tmp_path / "dump.jsonl", deep, good)])
    assert sum(len(block.lengths) for block, _ in dump.blocks()) == 1
    assert "row 0: nested too deeply" in dump.problems[0]
