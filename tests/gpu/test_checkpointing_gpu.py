"""tests/parallel/test_checkpointing.py on CUDA and NCCL."""

from tests.parallel.test_checkpointing import *  # noqa: F403

NUM_GPUS = 2
