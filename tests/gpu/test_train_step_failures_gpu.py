"""tests/parallel/test_train_step_failures.py on CUDA and NCCL."""

from tests.parallel.test_train_step_failures import *  # noqa: F403

NUM_GPUS = 4
