"""The losses and corrections of this package inside other training frameworks, a module for each.

No other package imports these modules, and most import their framework only when used.
slime, miles and vime need none: they load `plugin.ppo_utils.*` and
`plugin.loss.policy_loss_function` by path. `slime` only joins several corrections into one path.
"""
