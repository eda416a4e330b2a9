"""Checks of teachers before the job starts: above all, that their vocabulary is the policy's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugin.cluster.model_source import ModelSource, directory_source
from plugin.config import JobConfig
from plugin.config.flags import expect
from plugin.config.teachers import TeacherSpec
from plugin.errors import ConfigError
from plugin.tasks.loading import tokenizer_in
from plugin.teachers.http_teacher import HttpTeacher

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def checked_teachers(
    config: JobConfig, policy: ModelSource, tokenizer: Any, log: Callable[[str], None]
) -> dict[str, ModelSource]:
    """The teachers that the job loads, by name; a `ConfigError` for one that cannot teach.

    tokenizer: of the policy; log: prints a message
    """
    vocabulary = policy.hf_config["vocab_size"]
    k = config.distill_topk
    expect(
        k is None or k <= vocabulary,
        f"--distill-topk is {k}, and the model has {vocabulary} ids; lower it",
    )
    loaded = {}
    for spec in config.teacher_specs:
        if spec.directory is None:
            HttpTeacher(config, spec, vocabulary).check(tokenizer, log)
        else:
            loaded[spec.name] = _loaded(config, spec, policy, tokenizer)
    return loaded


def _loaded(
    config: JobConfig, spec: TeacherSpec, policy: ModelSource, tokenizer: Any
) -> ModelSource:
    assert spec.directory is not None
    source = directory_source(spec.directory, spec.option, config)
    longest = source.hf_config.get("max_position_embeddings")
    ours = policy.hf_config.get("max_position_embeddings")
    wanted = config.max_context_length or config.max_prompt_length + config.max_response_length
    wanted = min(wanted, ours or wanted)
    expect(
        longest is None or longest >= wanted,
        f"{spec.option} has {longest} positions, and prompt and response may have {wanted} tokens; "
        "lower --max-response-length, or use another teacher",
    )
    directory = Path(source.directory or spec.directory)
    theirs, size = source.hf_config["vocab_size"], policy.hf_config["vocab_size"]
    has_own = config.hf_checkpoint is not None
    if has_own and any((directory / name).is_file() for name in _TOKENIZER_FILES):
        _compare_tokenizers(spec, tokenizer, tokenizer_in(str(directory), spec.option))
        ids = max(tokenizer.get_vocab().values()) + 1
        expect(
            theirs >= max(ids, config.distill_topk or 0),
            f"{spec.option} {spec.directory} has logits for {theirs} ids, and the tokenizer has "
            f"{ids}, --distill-topk {config.distill_topk}; use a teacher with at least as many",
        )
        return source
    expect(
        theirs == size,
        f"{spec.option} has a vocabulary of {theirs} tokens, the policy of {size}; log-probs of "
        "the same tokens can be compared only with one tokenizer",
    )
    return source


def _compare_tokenizers(spec: TeacherSpec, ours: Any, theirs: Any) -> None:
    """Refuse a tokenizer with other ids; sizes of embeddings may differ, they are padded."""
    mine, other = ours.get_vocab(), theirs.get_vocab()
    if mine == other:
        return
    different = sorted(
        (token for token in mine.keys() | other.keys() if mine.get(token) != other.get(token)),
        key=lambda token: (mine.get(token, len(mine)), token),
    )
    token = different[0]
    here, there = (
        "no id" if number is None else f"the id {number}"
        for number in (mine.get(token), other.get(token))
    )
    raise ConfigError(
        f"{spec.option} has a different vocabulary: {token!r} has {here} in the policy's tokenizer "
        f"and {there} in the teacher's, {len(different)} tokens differ; log-probs of the same "
        "tokens can be compared only with one tokenizer: use a teacher that has it"
    )
