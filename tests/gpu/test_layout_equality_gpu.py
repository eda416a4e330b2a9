"""tests/parallel/test_layout_equality.py on CUDA and NCCL."""

from tests.parallel.test_layout_equality import *  # noqa: F403

NUM_GPUS = 4
