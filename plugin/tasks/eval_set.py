"""Prompts that a policy is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass

from plugin.tasks.protocol import Task

#: Prompts of a task from this number on are for evaluation; no rollout gets so far.
FIRST_HELD_OUT = 1 << 40


@dataclass(frozen=True)
class EvalSet:
    """`rows` prompts of `task`, from number `first` on."""

    name: str
    task: Task
    rows: int
    first: int = 0
