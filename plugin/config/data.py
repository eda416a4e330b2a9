"""Flags of what a job trains on: prompts and their format, and rewards."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from plugin.config.flags import (
    FlagGroup,
    Needs,
    absolute_code,
    absolute_path,
    expect,
    flag,
    needs_flag,
    runtime_flag,
)
from plugin.config.import_paths import function_name, is_import_path

BUILT_IN_REWARDS = (
    *("exact", "numeric", "gsm8k", "boxed", "choice", "json_schema", "code_tests"),
    *("length_penalty", "http"),
)


_WEIGHT = re.compile(r"(?P<reward>.+):(?P<weight>[-+]?[\d.][\d.e+-]*)")


@dataclass(frozen=True)
class RewardSpec:
    """One reward.

    reward: a built-in name, or the import path of a function
    name: what its metric is called, `reward/<name>`
    """

    reward: str
    weight: float = 1.0

    @property
    def name(self) -> str:
        return function_name(self.reward)


def parse_rewards(texts: tuple[str, ...], option: str = "--reward") -> tuple[RewardSpec, ...]:
    """The rewards that `texts` name; a `ConfigError` for an unknown one, or one named twice."""
    specs = tuple(_parsed(text.strip(), option) for text in texts)
    names = [spec.name for spec in specs]
    for name in names:
        expect(
            names.count(name) == 1,
            f"{option}: two rewards are called {name!r}; name it once, or rename your function",
        )
    return specs


def _parsed(text: str, option: str) -> RewardSpec:
    found = _WEIGHT.fullmatch(text)
    reward, weight = (found["reward"], found["weight"]) if found else (text, "1")
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    expect(
        math.isfinite(number) and number != 0,
        f"{option} {text}: the weight {weight!r} must be a finite number other than 0",
    )
    expect(
        reward in BUILT_IN_REWARDS or is_import_path(reward),
        f"{option} is {text!r}; choose one of {', '.join(BUILT_IN_REWARDS)}, or give the import "
        "path of your own: pkg.mod:fn or file.py:fn; a weight follows a colon, as in "
        "length_penalty:0.1",
    )
    return RewardSpec(reward, number)


def _asks_server(config: RewardFlags) -> bool:
    return any(spec.reward == "http" for spec in parse_rewards(config.reward))


#: A task of the user's own may read any flag.
_PROMPTS = needs_flag("prompt_data") | needs_flag("task_path")
_row_flag = partial(flag, needs=_PROMPTS, common_in="eval")


_TEMPLATE = Needs(
    "--apply-chat-template", lambda config: config.apply_chat_template or config.task_path
)


@dataclass(frozen=True)
class DataFlags(FlagGroup):
    title: ClassVar[str] = "data"

    task_path: str | None = flag(
        None,
        "task to train on: pkg.mod.Task, pkg.mod:Task or file.py:Task; runs that code",
        path=absolute_code,
        common_in="eval",
    )
    prompt_data: str | None = flag(
        None,
        "rows to train on: a .jsonl, .parquet or .arrow file, a pattern of such files in quotes, "
        "or a directory (of files, or of Hugging Face's save_to_disk); needs --hf-checkpoint",
        path=absolute_path,
        common_in="train",
    )
    prompt_key: str = _row_flag(
        "prompt", "column with the prompt: text, or a list of chat messages"
    )
    label_key: str = _row_flag(
        "answer",
        "column with what a response is compared with; a dot selects a field inside a column: "
        "reward_model.ground_truth",
    )
    apply_chat_template: bool = _row_flag(
        False, "render --prompt-data through the tokenizer's chat template"
    )
    system_prompt: str | None = flag(
        None,
        "system message of every prompt, unless a row's messages begin with their own",
        needs=_TEMPLATE,
        common_in="eval",
    )
    tools_key: str | None = flag(
        None,
        "column with the tools that the chat template shows: a list of JSON schemas, or JSON text",
        needs=_TEMPLATE,
    )
    bad_rows: Literal["error", "skip"] = flag(
        "error",
        "rows of --prompt-data that are not JSON, lack a column, are too long or fail in the chat "
        "template: error = list them and stop before training; skip = leave them out",
        common_in="eval",
    )
    shuffle_data: bool = flag(
        True,
        "shuffle every pass over --prompt-data, seeded by --seed; off = file order",
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


@dataclass(frozen=True)
class RewardFlags(FlagGroup):
    title: ClassVar[str] = "rewards"

    reward: tuple[str, ...] = flag(
        (),
        "reward of --prompt-data, NAME or NAME:WEIGHT; their weighted sum counts; none = exact; "
        f"NAME: {', '.join(BUILT_IN_REWARDS)}, or the path of fn(response, row) -> float, pkg.mod:"
        "fn or file.py:fn, which runs that code",
        needs=needs_flag("prompt_data"),
        path=absolute_code,
        common_in="train eval",
    )
    reward_function_path: str | None = flag(
        None,
        "one more --reward: pkg.mod.fn, pkg.mod:fn or file.py:fn; runs that code",
        path=absolute_code,
        common_in="eval",
    )
    reward_url: str | None = flag(
        None,
        "server that --reward http asks",
        needs=Needs("--reward http", _asks_server),
        common_in="eval",
    )
    reward_timeout: float = runtime_flag(
        60.0,
        "seconds that the rewards of one response may take; then its group is sampled again",
        above=0,
        common_in="eval",
    )
    reward_workers: int | Literal["auto"] = runtime_flag(
        "auto",
        "processes that compute rewards, with --address on any node; auto = for --prompt-data one "
        "per core (on a cluster half of each node's free CPUs), at most 8; for --task-path none: "
        "its rewards are then computed on the driver",
        at_least=1,
        needs=_PROMPTS,
        common_in="eval",
    )
    reward_memory: int = runtime_flag(
        4096,
        "megabytes that a process of --reward-workers may use beyond what it needs to start",
        at_least=16,
        needs=_PROMPTS,
        common_in="eval",
    )

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        """The rewards that the flags name, none where they leave it to the default."""
        path = self.reward_function_path
        return parse_rewards(self.reward if path is None else (*self.reward, path))

    def check(self) -> None:
        if self.reward_function_path is not None:
            parse_rewards((*self.reward, self.reward_function_path), "--reward-function-path")
        expect(
            not _asks_server(self) or self.reward_url is not None,
            "--reward http needs --reward-url; add it",
        )
        if self.reward_url is not None:
            # The value is not shown: it would carry the secret into the logs.
            expect(
                not {"@", "?"} & set(self.reward_url),
                "--reward-url holds a password or key (user:password@ or ?key=...), which run "
                "files and the process list would show; put a proxy that adds it before the server",
            )
            parts = urlsplit(self.reward_url)
            expect(
                parts.scheme in ("http", "https") and bool(parts.hostname),
                f"--reward-url is {self.reward_url!r}; expected http://host:port/path",
            )
