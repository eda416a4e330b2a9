"""Which groups are dropped for lack of reward spread, and how many prompts take their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from plugin.config import JobConfig
from plugin.errors import TrainingError

if TYPE_CHECKING:
    from plugin.controller.queue.groups import Group


class DynamicSampling:
    """Decides for one rollout at a time; without --dynamic-sampling every group stays.

    round_size: groups that a synchronous rollout may have under way, those that stay included
    log: prints a message for a person
    """

    round_size: int

    def __init__(self, config: JobConfig, log: Callable[[str], None]) -> None:
        self._config, self._log = config, log
        self._first_round = config.first_round_size(config.rollout_batch_size)
        self._rollouts_at_limit = 0
        self.begin_rollout()

    def begin_rollout(self) -> None:
        """Reset the state of the previous rollout."""
        self.round_size = self._first_round
        self._allowed = self._config.refill_limit(self._config.rollout_batch_size)
        self._at_limit = False

    def has_reward_spread(self, group: Group) -> bool:
        """Whether its rewards differ and not all of its responses are masked."""
        if self._config.overlong_filtering and bool(group.truncated.all()):
            return False
        return bool(group.rewards.max() > group.rewards.min())

    def drop_from_round(self, groups: Sequence[Group]) -> list[int]:
        """Numbers of the groups to drop from the complete rounds of a synchronous rollout.

        As many of the first ones stay as the batch lacks and refills are not allowed for. The
        result does not depend on the order in which the groups came.
        """
        if not self._config.dynamic_sampling:
            return []
        uniform = sorted(group.index for group in groups if not self.has_reward_spread(group))
        useful = len(groups) - len(uniform)
        missing = max(0, self._config.rollout_batch_size - useful)
        stay = max(0, missing - self._allowed)
        if stay:
            self._note_limit()
        self.round_size = useful + stay
        if missing:
            refills = min(self._first_round - self.round_size, self._allowed)
            self.round_size += refills
            self._allowed -= refills
        return uniform[stay:]

    def drops_on_arrival(self, group: Group) -> bool:
        """Whether a group of an asynchronous rollout is dropped; another prompt may be issued."""
        if not self._config.dynamic_sampling or self.has_reward_spread(group):
            return False
        if not self._allowed:
            self._note_limit()
            return False
        self._allowed -= 1
        return True

    def _note_limit(self) -> None:
        batch = self._config.rollout_batch_size
        cause = (
            f"{self._config.refill_limit(batch)} prompts were sampled in place of groups with "
            "equal rewards, the limit of --max-refills-per-rollout"
        )
        if self._config.at_refill_limit == "error":
            raise TrainingError(
                f"{cause}, and fewer than {batch} groups have a spread of rewards; use prompts "
                "solved sometimes but not always, raise the limit, or complete batches with such "
                "groups: --at-refill-limit train"
            )
        if self._at_limit:
            return
        self._at_limit = True
        self._rollouts_at_limit += 1
        # The 1st, 2nd, 4th, 8th, ...: a task that is solved must not flood the log.
        if self._rollouts_at_limit & (self._rollouts_at_limit - 1) == 0:
            self._log(f"{cause}; the batch is completed with such groups")
