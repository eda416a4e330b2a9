"""Flags of teachers: what they name, and what cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.config.teachers import TeacherSpec
from plugin.errors import ConfigError

SERVED = {"teacher_tau": 1.0, "teacher_url": "http://127.0.0.1:8000"}


def test_teachers_are_directories_or_servers() -> None:
    config = JobConfig.from_sources(
        {
            "teachers": ["math=models/math", "code=http://127.0.0.1:1,http://127.0.0.1:2/"],
            "teacher_key": "domain",
            "prompt_data": "rows.jsonl",
            "hf_checkpoint": "model",
            "distill_topk": 4,
        }
    )
    assert config.teacher_specs == (
        TeacherSpec("math", "--teachers math", "models/math"),
        TeacherSpec("code", "--teachers code", urls=("http://127.0.0.1:1", "http://127.0.0.1:2")),
    )
    assert config.loads_teachers and config.asks_teacher_servers and config.distills
    assert not JobConfig().distills and not JobConfig(distill_topk=4, distill_coef=0.0, teacher_url="http://127.0.0.1:1").distills  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher_tau": 1.0}, "--teacher-tau is 1.0 without a teacher; add --teacher-hf-check"),
        ({"distill_topk": 4}, "--distill-topk is 4 without a teacher"),
        ({"teacher_url": "http://127.0.0.1:1"}, "would do nothing; set --teacher-tau or --distill"),
        ({**SERVED, "rollout_temperature": 0.7}, "--rollout-temperature is 0.7 with a teacher beh"),
        (
            {**SERVED, "rollout_top_k": 5},
            "--rollout-top-k with a teacher behind HTTP",
        ),
        ({**SERVED, "teacher_hf_checkpoint": "x"}, "--teacher-hf-checkpoint with --teacher-url"),
        ({"teacher_url": "http://u:secret@h:1"}, "--teacher-url holds a password or key"),
        ({"teacher_url": "h:1"}, "--teacher-url holds 'h:1'; expected http://host:port"),
        ({**SERVED, "teacher_api_key_env": "sk-12"}, "must be the name of an environment variab"),
        ({"teachers": ["a=x", "b=y"], "teacher_tau": 1.0}, "nothing says which one a prompt has"),
        ({"teachers": ["a=x", "a=y"], "teacher_tau": 1.0}, "--teachers names 'a' twice"),
        ({"teachers": ["x"]}, "--teachers is 'x'; expected NAME=DIRECTORY or NAME=URL"),
        (
            {"teachers": ["a=x"], "teacher_key": "k", "teacher_tau": 1.0},
            "--teacher-key k is a column of --prompt-data",
        ),
        ({"teacher_max_batch": 8}, "--teacher-max-batch 8 would do nothing"),
        ({"reference_offload": True}, "needs --use-kl-loss or a teacher that the job loads"),
        ({**SERVED, "reference_offload": True}, "needs --use-kl-loss or a teacher that the job"),
        ({"advantage_estimator": "none"}, "without a teacher: nothing would be learned"),
        (
            {**SERVED, "advantage_estimator": "none", "dynamic_sampling": True},
            "--dynamic-sampling with --advantage-estimator none",
        ),
        (
            {**SERVED, "advantage_estimator": "none", "eval_data": ["held:8"]},
            "--eval-data with --advantage-estimator none and no --reward",
        ),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources(given)


def test_a_teacher_alone_needs_neither_rewards_nor_groups() -> None:
    from plugin.rewards.reward_set import RewardSet

    alone = {**SERVED, "advantage_estimator": "none", "n_samples_per_prompt": 1}
    config = JobConfig.from_sources(alone)
    rewards = RewardSet.of(config)
    assert rewards.specs == () and rewards.load().label_problem({}) is None
    assert [spec.reward for spec in RewardSet.of(JobConfig()).specs] == ["exact"]
