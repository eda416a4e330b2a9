"""Settings of the whole suite."""

import torch
from hypothesis import HealthCheck, settings

# The cases are tiny: threads would cost more than they bring, and several suites may share a machine.
torch.set_num_threads(1)
settings.register_profile(
    "suite",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")
