"""The arms of the suite: every loss and every correction at its defaults, and a few settings that matter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.evidence.engine import Setting
from plugin.config import LossConfig
from plugin.tools.compare.replay import method_pairs

WIDE = (("eps_clip", 1.0), ("eps_clip_high", 4.0))
ROLLOUT_KL = (("use_rollout_kl_loss", True), ("rollout_kl_loss_coef", 0.1))


@dataclass(frozen=True)
class Arm:
    """A loss, a correction or none, and flags that are not at their defaults."""

    loss: str
    hook: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        parts = [self.loss if self.hook is None else f"{self.loss} + {self.hook}"]
        return ", ".join(parts + [_shown(name, value) for name, value in self.settings])

    @property
    def config(self) -> LossConfig:
        path = self.hook and f"plugin.ppo_utils.{self.hook}_function"
        return LossConfig(
            policy_loss=self.loss,
            use_tis=self.hook is not None,
            custom_tis_function_path=path,
            validate_batch="never",
            **dict(self.settings),
        )


def _shown(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return flag if value is True else f"{flag} {value if isinstance(value, str) else f'{value:g}'}"


#: Besides the defaults: bounds that are loose, tight or found from the batch, a pull to the engine's policy, and the
#: engine's log-probs as the old ones.
SETTINGS = (
    Arm("ppo", "vanilla_tis", (("tis_clip", 1.0),)),
    Arm("ppo", "vanilla_tis", (("tis_clip", 5.0),)),
    Arm("ppo", "vanilla_tis", (("tis_clip", "auto:ess=0.9"),)),
    Arm("ppo", "vanilla_tis", ROLLOUT_KL),
    Arm("reinforce", "off_policy_is", WIDE),
    Arm("ppo", None, (("use_rollout_logprobs", True),)),
    Arm("ppo", "opsm", (("use_rollout_logprobs", True),)),
)
#: Their ratio is cur / train, which is 1 where a rollout is used for one update: there they have the gradient of `ppo`
#: (a test compares them), and its runs are theirs. On the engine's own policy all others have it.
EQUAL_TO_PPO = ("reinforce", "cispo", "gspo", "sapo", "ppo + opsm", "gmpo", "kl_cov")
#: Drops tokens whatever the engine is.
NEVER_PPO = ("clip_cov",)
#: Losses that are newer than the data; take one out to have it run.
NOT_RUN: tuple[str, ...] = ()
#: At least one arm of every kind: what the settings beyond staleness are measured with first.
CORE = (
    Arm("ppo"),
    Arm("icepop"),
    Arm("dppo_tv"),
    Arm("vespo"),
    Arm("topr"),
    Arm("minpro"),
    Arm("ppo", "vanilla_tis"),
    Arm("ppo", "icepop"),
    Arm("ppo", "m2po"),
    Arm("ppo", "sequence_tis"),
    *SETTINGS[2:6],
)


@cache
def arms() -> tuple[Arm, ...]:
    """All of them, in the order in which they are run."""
    pairs = ((loss, hook) for loss, hook in method_pairs() if loss not in NOT_RUN)
    return (*(Arm(loss, hook) for loss, hook in pairs), *SETTINGS)


def equals_ppo(arm: Arm, setting: Setting) -> bool:
    """Whether a run of this arm is a run of `ppo`."""
    same_policy = setting.updates == 1 and setting == Setting(
        top_p=setting.top_p, mask_replay=setting.top_p < 1
    )
    return arm.name not in ("ppo", *NEVER_PPO) and (
        same_policy or (setting.updates == 1 and arm.name in EQUAL_TO_PPO)
    )
