"""The losses and corrections of this package inside other training frameworks, a module for each.

A module needs its framework only where it says so; none is imported by the rest of the package.
slime and miles need no adapter: they load `plugin.ppo_utils.*` and
`plugin.loss.policy_loss_function` by path.
"""
