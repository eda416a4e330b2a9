"""`--tis-clip auto:ess=0.9`: a bound that follows from the batch."""

from __future__ import annotations

from plugin.errors import ConfigError

_PREFIX = "auto:ess="


def ess_target(tis_clip: float | str) -> float | None:
    """The share of tokens that `auto:ess=SHARE` wants to count; None for a number."""
    if not isinstance(tis_clip, str):
        return None
    try:
        if not tis_clip.startswith(_PREFIX):
            raise ValueError
        share = float(tis_clip.removeprefix(_PREFIX))
        if not 0 < share < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--tis-clip is {tis_clip!r}; expected a number, or auto:ess=SHARE with the effective "
            "sample size to keep as a share of the tokens, between 0 and 1: auto:ess=0.9"
        ) from None
    return share
