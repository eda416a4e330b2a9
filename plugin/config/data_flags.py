"""Flags about what a job trains on: prompts, their format, and the rows that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from plugin.config.flags import FlagGroup, Needs, expect, flag, needs_flag

#: A task of the user's own may read any flag.
_PROMPTS = needs_flag("prompt_data") | needs_flag("task_path")
_TEMPLATE = Needs(
    "--apply-chat-template", lambda config: config.apply_chat_template or config.task_path
)


@dataclass(frozen=True)
class DataFlags(FlagGroup):
    title: ClassVar[str] = "data"

    task_path: str | None = flag(
        None, "task to train on: pkg.mod.Task, pkg.mod:Task or file.py:Task; runs that code"
    )
    prompt_data: str | None = flag(
        None,
        "rows to train on: a .jsonl, .parquet or .arrow file, a pattern of such files in quotes, "
        "or a directory (of files, or of Hugging Face's save_to_disk); needs --hf-checkpoint",
    )
    prompt_key: str = flag(
        "prompt", "column with the prompt: text, or a list of chat messages", needs=_PROMPTS
    )
    label_key: str = flag(
        "answer",
        "column with what a response is compared with; reward_model.ground_truth is a field inside "
        "of a column",
        needs=_PROMPTS,
    )
    apply_chat_template: bool = flag(
        False, "render --prompt-data through the tokenizer's chat template", needs=_PROMPTS
    )
    system_prompt: str | None = flag(
        None,
        "system message of every prompt, unless a row's messages begin with their own",
        needs=_TEMPLATE,
    )
    tools_key: str | None = flag(
        None,
        "column with the tools that the chat template shows: a list of JSON schemas, or JSON text",
        needs=_TEMPLATE,
    )
    bad_rows: Literal["error", "skip"] = flag(
        "error",
        "rows of --prompt-data that are no JSON, lack a column, are too long or not rendered by "
        "the template: error = end before the start and name them; skip = leave them out",
    )
    shuffle_data: bool = flag(
        True,
        "every pass over --prompt-data has its own order, from --seed; off = the files' order",
        needs=_PROMPTS,
    )
    num_epochs: float | None = flag(
        None,
        "passes over --prompt-data, instead of --num-rollouts",
        above=0,
        needs=needs_flag("prompt_data"),
    )

    def check(self) -> None:
        expect(
            self.task_path is None or self.prompt_data is None,
            "--task-path with --prompt-data: a task brings its own prompts; drop one of the two",
        )
        expect(
            self.bad_rows == "error" or self.prompt_data is not None,
            f"--bad-rows {self.bad_rows} is about --prompt-data, which is not given; drop it",
        )
        expect(
            self.prompt_key != self.label_key,
            f"--prompt-key and --label-key are both {self.prompt_key!r}; the answer would be the "
            "prompt: name another column",
        )
