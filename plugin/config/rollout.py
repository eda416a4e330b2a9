"""Flags of rollouts: generation, the groups that are trained on, several turns."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from plugin.config.engines import ENGINES, WeightTransport
from plugin.config.flags import (
    FlagGroup,
    Needs,
    absolute_code,
    expect,
    flag,
    needs_flag,
    runtime_flag,
)

if TYPE_CHECKING:
    from plugin.config.job_config import JobConfig


#: From this length on weights do not wait for responses, unless --partial-rollouts says otherwise.
LONG_RESPONSE = 4096
_interrupts = Needs("--partial-rollouts", lambda config: config.interrupts_responses)


@dataclass(frozen=True)
class RolloutFlags(FlagGroup):
    title: ClassVar[str] = "rollouts"

    rollout_engine: str = flag(
        "transformers",
        "what generates; sglang, vllm_server: servers of the job; http: --rollout-url",
        names=ENGINES,
        path=absolute_code,
        common_in="train eval",
    )
    num_rollout_engines: int = flag(1, "engines; prompts are distributed over them", at_least=1)
    min_rollout_engines: int | None = runtime_flag(
        None,
        "start and continue with this many engines while the cluster has no room for the others, "
        "which join as soon as it has; none = start with all, continue with at least 1; --colocate "
        "needs all",
        at_least=1,
    )
    rollout_num_gpus_per_engine: int = flag(
        1,
        "GPUs, or CPU slots, that one engine is spread over (tensor parallel); vLLM can span nodes",
        at_least=1,
    )
    rollout_batch_size: int = flag(32, "prompts per rollout", at_least=1, common_in="train")
    n_samples_per_prompt: int = flag(
        8, "responses per prompt (one group)", at_least=1, common_in="train"
    )
    num_rollouts: int = runtime_flag(
        100, "rollout batches to train on", at_least=1, common_in="train"
    )
    max_prompt_length: int = flag(
        1024, "tokens a prompt may have; longer ones are an error", at_least=1, common_in="eval"
    )
    max_response_length: int = flag(
        1024, "tokens a response may have", at_least=1, common_in="train"
    )
    rollout_top_p: float = flag(1.0, "nucleus sampling; 1 = off", above=0, at_most=1)
    rollout_top_k: int | None = flag(
        None, "sample among the k most likely tokens; none = off", at_least=1
    )
    use_rollout_sampling_mask: Literal["auto", "on", "off"] = flag(
        "auto",
        "have the engine report the ids that top-p and top-k kept, and compute every log-prob over "
        "them; auto = on where the engine truncates and can report them",
        needs=Needs(
            "--rollout-top-p below 1 or --rollout-top-k", lambda config: config.truncates_sampling
        ),
    )
    return_rollout_log_probs: bool = flag(
        True, "have the engine report the log-prob of every sampled token"
    )
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "dtype of the engine's weights; auto = the trainer's", common_in="eval"
    )
    rollout_quantization: Literal["none", "int8"] = flag(
        "none", "int8 = the engine's linear layers keep 8-bit weights, one scale per output row"
    )
    rollout_max_batch: int = flag(256, "responses an engine generates at once", at_least=1)
    async_rollouts: bool = flag(False, "generate while the trainer trains", common_in="train")
    max_weight_staleness: int | None = flag(
        None, "async: drop samples more weight versions old than this; none = 1", at_least=0
    )
    partial_rollouts: bool | None = flag(
        None,
        "new weights interrupt running responses, which continue with them; each token keeps the "
        f"weight version that sampled it; none = where responses may have {LONG_RESPONSE} tokens, "
        "tokens may be 2 versions old, and an engine in the job's hands can pause",
        needs=needs_flag("async_rollouts"),
    )
    partial_rollout_mode: Literal["recompute", "continue"] = flag(
        "recompute",
        "recompute = prefill interrupted responses again with the new weights; continue = keep the "
        "KV cache of the old ones",
        needs=_interrupts,
    )
    max_token_staleness: int | None = flag(
        None,
        "mask tokens more weight versions old than this, and drop groups only if a response has "
        "no other; none = drop groups with a token beyond --max-weight-staleness",
        at_least=0,
        needs=_interrupts,
    )

    weight_sync: Literal["auto", WeightTransport] = flag(
        "auto",
        "how engines get new weights: over a process group with the trainer's ranks (broadcast; "
        "delta = only the elements that changed), by CUDA "
        "IPC from a rank on the same device, from files in --rollout-weights-dir, or "
        "through Ray's object store; auto = broadcast, ipc with --colocate, or the next of these "
        "that the engine supports",
    )
    full_weights_every: int = flag(
        50,
        "with deltas: of so many weight versions, one is sent in full",
        at_least=1,
        needs=Needs("--weight-sync delta", lambda config: config.weight_sync == "delta"),
    )
    verify_weights: str = flag(
        "first",
        "have engine and trainer score the same short response, and end the job if they differ by "
        "more than their dtypes explain: first = with the first weights of every engine that is "
        "started, every:N = also with every N-th weight version, off",
    )

    max_error_reschedule_attempts: int | None = flag(
        None,
        "times a group with a failed or empty response is sampled again before it is dropped; "
        "none = no limit, or 3 times where the reward failed",
        at_least=0,
    )
    rollout_timeout: float | None = runtime_flag(
        None,
        "seconds in which an engine that has requests must generate a token, or one that reports "
        "whole responses only such a response, before it is replaced; none = 600, or as long as "
        "such a response may take",
        above=0,
    )

    def check(self) -> None:
        expect(
            re.fullmatch(r"first|off|every:[1-9]\d*", self.verify_weights) is not None,
            f"--verify-weights is {self.verify_weights}; choose first, off, or every:N with a "
            "number such as every:10",
        )
        expect(
            (self.min_rollout_engines or 1) <= self.num_rollout_engines,
            f"--min-rollout-engines is {self.min_rollout_engines} with --num-rollout-engines "
            f"{self.num_rollout_engines}; lower the first or raise the second",
        )
        expect(
            self.max_weight_staleness is None or self.async_rollouts,
            f"--max-weight-staleness is {self.max_weight_staleness} but rollouts are synchronous "
            "and never stale; add --async-rollouts",
        )
        expect(
            (self.max_token_staleness or 0) <= self.staleness_limit,
            f"--max-token-staleness is {self.max_token_staleness} and --max-weight-staleness "
            f"{self.staleness_limit}: no token gets that old; lower the first or raise the second",
        )

    def verifies_weights(self, version: int, *, verified: bool) -> bool:
        """Whether an engine that gets `version` has to show that it computes with it.

        verified: whether it has shown that before
        """
        if self.verify_weights == "off":
            return False
        interval = self.verify_weights.partition(":")[2]
        return not verified or (bool(interval) and version % int(interval) == 0)

    @property
    def truncates_sampling(self) -> bool:
        """Whether the engine samples from a part of the vocabulary."""
        return self.rollout_top_p < 1 or self.rollout_top_k is not None

    @property
    def staleness_limit(self) -> int:
        """The largest weight age, in versions, that is trained on."""
        if not self.async_rollouts:
            return 0
        return 1 if self.max_weight_staleness is None else self.max_weight_staleness


#: Default limit of refills per rollout, in batches of prompts.
_REFILL_BATCHES = 10
_refill_flag = partial(flag, needs=needs_flag("dynamic_sampling"))


@dataclass(frozen=True)
class SamplingFlags(FlagGroup):
    title: ClassVar[str] = "groups and responses that are trained on"

    dynamic_sampling: bool = flag(
        False, "drop groups whose rewards are all equal, and sample other prompts in their place"
    )
    max_refills_per_rollout: int | None = _refill_flag(
        None,
        "prompts that are sampled in place of such groups, per rollout; none = "
        f"{_REFILL_BATCHES} times --rollout-batch-size",
        at_least=1,
    )
    at_refill_limit: Literal["train", "error"] = _refill_flag(
        "train",
        "train = the batch is completed with groups of equal rewards, which are counted; error = "
        "the job ends",
    )
    over_sampling_batch_size: int | None = _refill_flag(
        None,
        "prompts sampled at once for a synchronous rollout; the first --rollout-batch-size of them "
        "with a spread of rewards are trained on, the others are sampled again for the next "
        "rollout; none = no more than needed",
        at_least=1,
    )
    abort_surplus_groups: bool = flag(
        False,
        "train on the first --rollout-batch-size finished groups with a spread of rewards and "
        "abort the rest of the round, whose prompts are sampled again; faster, but batches depend "
        "on timing and favor short responses",
        needs=needs_flag("over_sampling_batch_size"),
    )
    overlong_filtering: bool = flag(
        False,
        "responses cut at --max-response-length have loss mask 0; their rewards still count in the "
        "baseline of their group",
    )
    overlong_buffer_length: int | None = flag(
        None,
        "soft overlong penalty: the reward falls linearly over so many last tokens before "
        "--max-response-length",
        at_least=1,
    )
    overlong_penalty_factor: float = flag(
        1.0,
        "what a response of --max-response-length loses",
        above=0,
        needs=needs_flag("overlong_buffer_length"),
    )

    def first_round_size(self, rollout_batch_size: int) -> int:
        """Prompts that a synchronous rollout begins with."""
        return self.over_sampling_batch_size or rollout_batch_size

    def refill_limit(self, rollout_batch_size: int) -> int:
        """Prompts that may be sampled in place of dropped groups, per rollout."""
        return self.max_refills_per_rollout or _REFILL_BATCHES * rollout_batch_size


def check_sampling(config: JobConfig) -> None:
    """Check which groups and responses are trained on against the flags of the rollouts."""
    batch, wanted = config.rollout_batch_size, config.over_sampling_batch_size
    expect(
        not config.dynamic_sampling or config.n_samples_per_prompt > 1,
        "--dynamic-sampling with --n-samples-per-prompt 1: the one reward of a group has no "
        "spread, so every group would be dropped; sample at least 2",
    )
    expect(
        wanted is None or wanted > batch,
        f"--over-sampling-batch-size is {wanted}, and --rollout-batch-size {batch} are trained "
        "on; it must be larger, or drop it",
    )
    expect(
        wanted is None or not config.async_rollouts,
        f"--over-sampling-batch-size {wanted} with --async-rollouts: the engines are ahead of "
        "the trainer already; raise --max-weight-staleness instead",
    )
    longest, buffer = config.max_response_length, config.overlong_buffer_length
    expect(
        buffer is None or buffer <= longest,
        f"--overlong-buffer-length is {buffer}, longer than --max-response-length {longest}; "
        "lower it",
    )


#: A task of the user's own may read any flag, and only such a task has several turns.
_turn_flag = partial(
    flag,
    needs=Needs("--task-path with a multi-turn task", lambda config: config.task_path is not None),
)


@dataclass(frozen=True)
class ConversationFlags(FlagGroup):
    title: ClassVar[str] = "several turns (multi-turn tasks)"

    max_turns: int = _turn_flag(16, "policy turns per trajectory", at_least=1)
    max_context_length: int | None = _turn_flag(
        None,
        "tokens of a whole conversation: a turn starts only if its context and "
        "--max-response-length fit; none = no limit",
        at_least=2,
    )
    preserve_all_thinking: bool = _turn_flag(
        False, "keep the thinking of older turns that the chat template would strip"
    )
    preserve_thinking_between_tool_calls: bool = _turn_flag(
        False, "keep it until a new user message arrives"
    )
    chat_template_kwargs: str | None = flag(
        None,
        'JSON object passed to the chat template, e.g. {"enable_thinking": false}; for multi-turn '
        "tasks and --apply-chat-template",
    )
    environment_timeout: float = _turn_flag(
        60.0, "seconds that one step of an environment may take; then its trajectory fails", above=0
    )
    environment_threads: int = _turn_flag(
        16, "environments that an engine steps at the same time", at_least=1
    )

    def check(self) -> None:
        self.template_arguments()

    def template_arguments(self) -> dict[str, Any]:
        """What the chat template is called with besides messages and tools."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            arguments = json.loads(self.chat_template_kwargs)
        except ValueError:
            arguments = None
        expect(
            isinstance(arguments, dict),
            f"--chat-template-kwargs is {self.chat_template_kwargs!r}; it must be a JSON object "
            "such as "
            '{"enable_thinking": false}',
        )
        return dict(arguments)
