"""The losses and corrections of this package inside other training frameworks, a module for each.

No other package imports these modules, and most import their framework only when used.
slime and miles need no adapter: they load `plugin.ppo_utils.*` and
`plugin.loss.policy_loss_function` by path.
"""
