"""Flags that choose the groups and responses that are trained on, in the manner of DAPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from plugin.config.flags import FlagGroup, expect, flag, needs_flag

if TYPE_CHECKING:
    from plugin.config.rollout_flags import RolloutFlags

#: Refills of one rollout, in batches of prompts, where nothing is said.
_REFILL_BATCHES = 10


@dataclass(frozen=True)
class SamplingFlags(FlagGroup):
    title: ClassVar[str] = "groups and responses that are trained on"

    dynamic_sampling: bool = flag(
        False,
        "drop groups whose rewards are all equal, and sample other prompts in their place",
    )
    max_refills_per_rollout: int | None = flag(
        None,
        "prompts that are sampled in place of such groups, per rollout; none = "
        f"{_REFILL_BATCHES} times --rollout-batch-size",
        at_least=1,
        needs=needs_flag("dynamic_sampling"),
    )
    at_refill_limit: Literal["train", "error"] = flag(
        "train",
        "train = the batch is completed with groups of equal rewards, which are counted; error = "
        "the job ends",
        needs=needs_flag("dynamic_sampling"),
    )
    over_sampling_batch_size: int | None = flag(
        None,
        "prompts sampled at once for a synchronous rollout; the first --rollout-batch-size of them "
        "with a spread of rewards are trained on, the other ones sampled anew for the next "
        "rollout; none = no more than needed",
        at_least=1,
        needs=needs_flag("dynamic_sampling"),
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

    def check_sampling(self, rollouts: RolloutFlags) -> None:
        """Check these flags against those of the rollouts."""
        batch, wanted = rollouts.rollout_batch_size, self.over_sampling_batch_size
        expect(
            not self.dynamic_sampling or rollouts.n_samples_per_prompt > 1,
            "--dynamic-sampling with --n-samples-per-prompt 1: the one reward of a group has no "
            "spread, so every group would be dropped; sample at least 2",
        )
        expect(
            wanted is None or wanted > batch,
            f"--over-sampling-batch-size is {wanted}, and --rollout-batch-size {batch} are trained "
            "on; it must be larger, or drop it",
        )
        expect(
            wanted is None or not rollouts.async_rollouts,
            f"--over-sampling-batch-size {wanted} with --async-rollouts: the engines are ahead of "
            "the trainer already; raise --max-weight-staleness instead",
        )
        longest, buffer = rollouts.max_response_length, self.overlong_buffer_length
        expect(
            buffer is None or buffer <= longest,
            f"--overlong-buffer-length is {buffer}, longer than --max-response-length {longest}; "
            "lower it",
        )

    def first_round_size(self, rollout_batch_size: int) -> int:
        """Prompts that a synchronous rollout begins with."""
        return self.over_sampling_batch_size or rollout_batch_size

    def refill_limit(self, rollout_batch_size: int) -> int:
        """Prompts that may be sampled in place of dropped groups, per rollout."""
        return self.max_refills_per_rollout or _REFILL_BATCHES * rollout_batch_size
