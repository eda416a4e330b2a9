"""Flags of the teachers of on-policy distillation: where they are, and which one a prompt has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from plugin.config.flags import FlagGroup, Needs, absolute_path, expect, flag, needs_flag
from plugin.config.servers import check_key_variable, check_urls, parse_urls

#: What the only teacher is called.
ONLY_TEACHER = "teacher"


@dataclass(frozen=True)
class TeacherSpec:
    """One teacher: a model directory that the job loads, or the addresses of servers that have it.

    option: the flag that it was given with, for messages
    """

    name: str
    option: str
    directory: str | None = None
    urls: tuple[str, ...] = ()


_server_flag = partial(
    flag,
    needs=Needs(
        "a teacher behind HTTP (--teacher-url, or --teachers NAME=URL)",
        lambda config: config.asks_teacher_servers,
    ),
)


@dataclass(frozen=True)
class TeacherFlags(FlagGroup):
    title: ClassVar[str] = "teachers (on-policy distillation)"

    teacher_hf_checkpoint: str | None = flag(
        None, "teacher of --teacher-tau and --distill-topk, loaded by the job", path=absolute_path
    )
    teacher_url: str | None = flag(
        None,
        "URLs of servers that have the teacher, separated by commas; requests are balanced over "
        "them",
    )
    teacher_server: Literal["vllm", "sglang"] = _server_flag("vllm", "server software")
    teachers: tuple[str, ...] = flag(
        (),
        "one of several teachers, NAME=DIRECTORY or NAME=URL[,URL]; --teacher-key selects one per "
        "prompt",
        path=lambda text: _absolute_teacher(text),
    )
    teacher_key: str | None = flag(
        None,
        "column of --prompt-data with the name of the prompt's teacher",
        needs=needs_flag("teachers"),
    )
    teacher_request_timeout: float = _server_flag(
        600.0, "seconds a server may take for one sample, to its last byte", above=0
    )
    teacher_request_retries: int = _server_flag(
        3, "retries of a sample before the job ends", at_least=0
    )
    teacher_max_batch: int = _server_flag(
        64, "samples that are requested at the same time", at_least=1
    )
    teacher_api_key_env: str | None = _server_flag(
        None, "environment variable with the servers' API key, which is sent as a bearer token"
    )

    def check(self) -> None:
        check_key_variable("--teacher-api-key-env", self.teacher_api_key_env)
        names = [spec.name for spec in self.teacher_specs]
        for name in names:
            expect(names.count(name) == 1, f"--teachers names {name!r} twice; name each once")
        expect(
            len(names) < 2 or self.teacher_key is not None,
            f"--teachers names {', '.join(names)}, and nothing says which one a prompt has; add "
            "--teacher-key",
        )
        for spec in self.teacher_specs:
            check_urls(
                spec.option,
                spec.urls,
                key_option="--teacher-api-key-env",
                travels="prompts, responses",
            )

    @property
    def teacher_specs(self) -> tuple[TeacherSpec, ...]:
        """The teachers, in the order in which they are given."""
        directory = self.teacher_hf_checkpoint
        given = {
            "--teacher-hf-checkpoint": directory,
            "--teacher-url": self.teacher_url,
            "--teachers": self.teachers,
        }
        options = [option for option, value in given.items() if value]
        expect(len(options) < 2, f"{' with '.join(options)}: both name teachers; drop one")
        if directory:
            return (TeacherSpec(ONLY_TEACHER, "--teacher-hf-checkpoint", directory),)
        if self.teacher_url:
            return (TeacherSpec(ONLY_TEACHER, "--teacher-url", urls=parse_urls(self.teacher_url)),)
        return tuple(map(_parsed, self.teachers))

    @property
    def asks_teacher_servers(self) -> bool:
        """Whether a teacher is behind HTTP."""
        return any(spec.urls for spec in self.teacher_specs)

    @property
    def loads_teachers(self) -> bool:
        """Whether the job holds a teacher's weights."""
        return any(spec.directory for spec in self.teacher_specs)


def _absolute_teacher(text: str) -> str:
    spec = _parsed(text)
    return text if spec.directory is None else f"{spec.name}={absolute_path(spec.directory)}"


def _parsed(text: str) -> TeacherSpec:
    name, equals, place = (part.strip() for part in text.partition("="))
    expect(
        bool(equals and place and re.fullmatch(r"[\w.-]+", name)),
        f"--teachers is {text!r}; expected NAME=DIRECTORY or NAME=URL[,URL], a NAME of letters, "
        "digits, _, . and -",
    )
    option = f"--teachers {name}"
    if re.match(r"\w+://", place):
        return TeacherSpec(name, option, urls=parse_urls(place))
    return TeacherSpec(name, option, place)
