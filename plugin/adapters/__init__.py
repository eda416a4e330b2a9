"""This package's losses inside other training frameworks: one thin module each.

A module needs its framework only where it says so; none of them is imported by the rest of the package. slime
and miles need no adapter: they load `plugin.ppo_utils.*` and `plugin.loss.policy_loss_function` by path.
"""
