"""slime, miles and vime: corrections that their loader cannot find, as one function that it can.

It takes `package.module.function`: no list with commas, no `file.py:function`. In a module of yours
that every node can import:

    # my_corrections.py
    from plugin.adapters.slime import chain

    veto_and_tis = chain("plugin.ppo_utils.veto_function,plugin.ppo_utils.vanilla_tis_function")
    own = chain("/shared/own_corrections.py:soft_mask")

and `--custom-tis-function-path my_corrections.veto_and_tis`. With our whole loss none of this is
needed: it reads such lists itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from plugin.config.import_paths import function_name, load_function
from plugin.loss.hook_chain import load_hook

HookResult = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]


def chain(paths: str) -> Callable[..., HookResult]:
    """One correction that runs those at `paths`, separated by commas, from left to right.

    Each sees loss and masks as the one before left them; a metric whose name is taken gets that of
    its function in front. All are loaded now, so that a wrong path fails at import.
    """
    names = [path.strip() for path in paths.split(",") if path.strip()]
    for name in names:
        load_function(name)
    hooks = [(function_name(name), load_hook(name)) for name in names]

    def run(
        args: Any, *, pg_loss: Tensor, loss_masks: Sequence[Tensor], **values: Any
    ) -> HookResult:
        metrics: dict[str, Tensor] = {}
        for name, hook in hooks:
            pg_loss, loss_masks, found = hook(
                args, pg_loss=pg_loss, loss_masks=loss_masks, **values
            )
            metrics |= {f"{name}/{key}" if key in metrics else key: v for key, v in found.items()}
        return pg_loss, loss_masks, metrics

    run.__name__ = "_then_".join(name for name, _ in hooks)
    return run
