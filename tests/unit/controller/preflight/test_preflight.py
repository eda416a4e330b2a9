"""What the driver finds out before anything starts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.batch_types import RolloutSample
from plugin.config import JobConfig
from plugin.config.engines import ENGINES
from plugin.config.import_paths import load_function
from plugin.controller.batch import advantages_of
from plugin.controller.preflight.job_checks import check_job
from plugin.engines.choice import make_engine, sampling_parameters
from plugin.environments.trajectory import Rollouts, Trajectory
from plugin.errors import BatchError, ConfigError, HookLoadError
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from plugin.tasks.loading import load_task
from plugin.tasks.prompt_data import DatasetTask

TASK = CopyDigitsTask(CharacterTokenizer(ALPHABET))


def test_the_default_job_passes() -> None:
    parts = check_job(JobConfig.from_sources({}))
    assert parts.sampling.log_probs
    assert parts.reference is None and not parts.teachers
    assert parts.policy.directory is None


def test_a_feature_that_needs_log_probs_turns_them_on_with_a_warning() -> None:
    off = JobConfig(return_rollout_log_probs=False)
    assert not sampling_parameters(off, TASK.stop_token_ids).log_probs
    needing = JobConfig(return_rollout_log_probs=False, policy_loss="icepop")
    with pytest.warns(UserWarning, match="--policy-loss icepop needs the engine's log-probs"):
        assert sampling_parameters(needing, TASK.stop_token_ids).log_probs


def test_sampling_follows_the_flags() -> None:
    config = JobConfig(
        rollout_temperature=0.5, max_response_length=7, use_rollout_routing_replay=True
    )
    parameters = sampling_parameters(config, TASK.stop_token_ids)
    assert (parameters.temperature, parameters.max_response_length) == (0.5, 7)
    assert parameters.routed_experts


def test_the_weights_of_the_tiny_model_depend_on_the_seed_only() -> None:
    sources = [check_job(JobConfig.from_sources({"seed": seed})).policy for seed in (1, 1, 5)]
    first, again, other = (source.random_weights()["lm_head.weight"] for source in sources)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_what_the_driver_checks_of_the_tiny_model_is_what_transformers_makes_of_it(
    family: str,
) -> None:
    source = check_job(JobConfig.from_sources({"embedded_model": family})).policy
    config = source.as_config()
    assert source.hf_config == {name: getattr(config, name) for name in source.hf_config}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"use_tis": True, "custom_tis_function_path": "no.such.hook"}, HookLoadError, "no module"),
        ({"task_path": "no.such.Task"}, HookLoadError, "no module"),
        ({"task_path": "math.gcd"}, Exception, "gcd|integer|Tokenizer"),
        ({"use_wandb": True}, ConfigError, "wandb package is not installed"),
        ({"use_rollout_routing_replay": True}, ConfigError, "has no experts"),
        ({"detect_routing": True}, ConfigError, "has no experts"),
        (
            {"separable_fast_path": "on", "policy_loss": "gspo"},
            ConfigError,
            "gspo is not token-separable; use auto or off",
        ),
        (
            {"separable_fast_path": "on", "tensor_model_parallel_size": 2},
            ConfigError,
            "split over 2 tensor parallel ranks",
        ),
        ({"hf_checkpoint": "/does/not/exist"}, ConfigError, "holds no config.json"),
        ({"max_prompt_length": 2}, Exception, "prompt 0 has 4 tokens"),
    ],
)
def test_what_cannot_work_is_found_on_the_driver(
    settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_job(JobConfig.from_sources(settings))


def test_a_task_of_the_users_own_file_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "my_task.py"
    file.write_text(
        "from plugin.tasks.protocol import Prompt\n"
        "class Ones:\n"
        "    def __init__(self, config, tokenizer):\n"
        "        self.stop_token_ids = (tokenizer.eos_token_id,)\n"
        "    def prompt(self, index):\n"
        "        return Prompt((1, 2))\n"
        "    def reward(self, prompt, response):\n"
        "        return float(response[0] == 1)\n"
    )
    parts = check_job(JobConfig.from_sources({"task_path": f"{file}:Ones"}))
    assert parts.task.prompt(3).tokens == (1, 2)


def test_a_model_directory_without_prompts_has_nothing_to_train_on(tmp_path: Path) -> None:
    import transformers

    from tests.parallel.tiny_models import tiny_qwen3

    tiny_qwen3().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="add --prompt-data or --task-path"):
        load_task(JobConfig(hf_checkpoint=str(tmp_path)), TASK)
    assert transformers.AutoConfig.from_pretrained(tmp_path).vocab_size == 96


def test_the_shape_of_routes_comes_from_the_model() -> None:
    moe = {"embedded_model": "qwen3_moe", "use_rollout_routing_replay": True}
    assert check_job(JobConfig.from_sources(moe)).route_shape == (2, 2, 4)


MULTI_TURN = (
    "class Talk:\n"
    "    stop_token_ids = (14,)\n"
    "    tools = ()\n"
    "    def __init__(self, config, tokenizer):\n"
    "        tokenizer.chat_template = '{% for m in messages %}{{ m.content }}={% endfor %}'\n"
    "    def messages(self, index):\n"
    "        return [{'role': 'user', 'content': '1' * (index + 3)}]\n"
    "    def environment(self, index, seed):\n"
    "        raise AssertionError('the driver starts no environment')\n"
)


def test_a_multi_turn_task_is_tried_by_its_first_prompt_alone(tmp_path: Path) -> None:
    file = tmp_path / "talk.py"
    file.write_text(MULTI_TURN)
    parts = check_job(JobConfig.from_sources({"task_path": f"{file}:Talk"}))
    assert parts.task.prompt(1).tokens == (1, 1, 1, 1, 10)
    assert parts.sampling.stop_token_ids == (14,)
    with pytest.raises(BatchError, match="prompt 0 has 4 tokens"):
        check_job(JobConfig.from_sources({"task_path": f"{file}:Talk", "max_prompt_length": 3}))


@pytest.mark.parametrize(
    ("correct", "wrong", "message"),
    [
        ("tools = ()", "other = ()", "a Talk without tools; a task has"),
        ("tokenizer.chat_template", "template", "this tokenizer has no chat template"),
    ],
)
def test_an_incomplete_multi_turn_task_is_found_on_the_driver(
    tmp_path: Path, correct: str, wrong: str, message: str
) -> None:
    file = tmp_path / "talk.py"
    file.write_text(MULTI_TURN.replace(correct, wrong))
    with pytest.raises(ConfigError, match=message):
        check_job(JobConfig.from_sources({"task_path": f"{file}:Talk"}))


@pytest.mark.parametrize("text", ["[1]", "{", "enable_thinking=false"])
def test_template_arguments_are_a_json_object(text: str) -> None:
    with pytest.raises(ConfigError, match="it must be a JSON object such as"):
        JobConfig(chat_template_kwargs=text)
    assert JobConfig(chat_template_kwargs='{"a": false}').template_arguments() == {"a": False}


CENTERED = """
import torch

def centered(rewards, group_index, loss_masks, config):
    # lambd scales, to see that the flags arrive.
    torch.cat(loss_masks)  # a list of tensors
    value = (rewards - rewards.mean()) * config.lambd
    return [torch.where(mask != 0, v, 0.0) for v, mask in zip(value, loss_masks)]

def of_samples(rewards, group_index, loss_masks, config):
    return rewards

def infinite(rewards, group_index, loss_masks, config):
    return [mask / 0.0 for mask in loss_masks]

def fails(rewards, group_index, loss_masks, config):
    raise ValueError("no such reward")

def without_masks(rewards, group_index):
    return rewards
"""


def test_an_advantage_estimator_of_the_users_own_is_used(tmp_path: Path) -> None:
    file = tmp_path / "estimators.py"
    file.write_text(CENTERED)
    settings = {"advantage_estimator": f"{file}:centered", "n_samples_per_prompt": 1, "lambd": 0.5}
    config = JobConfig.from_sources(settings)
    check_job(config)
    sample = RolloutSample(torch.tensor([7, 1, 2]), 2, torch.ones(2))
    rollouts = Rollouts.of([[Trajectory((sample,), reward)] for reward in (1.0, 0.0)])
    advantages = advantages_of(config, rollouts)
    # (1 - 0.5) * 0.5 and (0 - 0.5) * 0.5
    assert [a.tolist() for a in advantages] == [[0.25, 0.25], [-0.25, -0.25]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("of_samples", r"response lengths \[1, 2, 3, .* one finite tensor \[response\] per sample"),
        ("infinite", "one finite tensor"),
        ("fails", "failed on an example of 16 samples(.|\n)*no such reward"),
        ("without_masks", r"cannot be called as fn\(rewards, group_index, loss_masks, config\)"),
        ("missing", "has no 'missing'; it has centered"),
    ],
)
def test_an_estimator_that_cannot_work_is_found_on_the_driver(
    tmp_path: Path, function: str, message: str
) -> None:
    file = tmp_path / "estimators.py"
    file.write_text(CENTERED)
    with pytest.raises(HookLoadError, match=message):
        check_job(JobConfig.from_sources({"advantage_estimator": f"{file}:{function}"}))


ENGINE = """
from plugin.engines.transformers.engine import TransformersEngine

def small_batches(config, hf_config, name):
    return TransformersEngine(hf_config, max_batch=2, name=f"my {name}")

def without_name(config, hf_config):
    return None
"""


def test_an_engine_of_the_users_own_goes_through_the_same_door(tmp_path: Path) -> None:
    file = tmp_path / "engines.py"
    file.write_text(ENGINE)
    # It gets the whole configuration and may read flags that belong to one of the built-in engines.
    settings = {"rollout_engine": f"{file}:small_batches", "rollout_url": "http://127.0.0.1:1"}
    config = JobConfig.from_sources(settings)
    parts = check_job(config)
    engine = make_engine(config, parts.policy.hf_config, "engine 0")
    assert engine.health().name == "my engine 0"


def test_an_engine_that_cannot_be_made_is_found_on_the_driver(tmp_path: Path) -> None:
    file = tmp_path / "engines.py"
    file.write_text(ENGINE)
    with pytest.raises(HookLoadError, match=r"cannot be called as fn\(config, hf_config, name\)"):
        check_job(JobConfig.from_sources({"rollout_engine": f"{file}:without_name"}))
    with pytest.raises(
        ConfigError,
        match="is 'vlm'; choose one of transformers, vllm, http, sglang, vllm_server, or",
    ):
        JobConfig.from_sources({"rollout_engine": "vlm"})


@pytest.mark.parametrize("name", ENGINES)
def test_every_built_in_engine_has_a_factory(name: str) -> None:
    factory = load_function(ENGINES[name].factory)
    required = [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]
    assert required == ["config", "hf_config", "name"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambd": 0.9}, "--advantage-estimator grpo would ignore it; drop it"),
        ({"n_samples_per_prompt": 1}, "a group of one has no baseline"),
    ],
)
def test_an_estimator_that_the_job_cannot_feed_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources(settings)


def test_template_arguments_without_a_template_are_refused() -> None:
    settings = {"chat_template_kwargs": '{"enable_thinking": false}'}
    with pytest.raises(ConfigError, match="no chat template is rendered; add --prompt-data"):
        check_job(JobConfig.from_sources(settings))


def test_template_arguments_reach_the_template_of_prompt_data(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "12", "answer": "3"}')
    tokenizer = CharacterTokenizer(ALPHABET)
    tokenizer.chat_template = "{{ messages[0].content }}{% if mark %}{{ mark }}{% endif %}"
    settings = {"hf_checkpoint": "unused", "prompt_data": str(data), "apply_chat_template": True}
    plain = load_task(JobConfig.from_sources(settings), tokenizer)
    marked = load_task(
        JobConfig.from_sources({**settings, "chat_template_kwargs": '{"mark": "+"}'}), tokenizer
    )
    assert isinstance(plain, DatasetTask) and isinstance(marked, DatasetTask)
    assert tokenizer.decode(plain.prompt(0).tokens) == "12"
    assert tokenizer.decode(marked.prompt(0).tokens) == "12+"
