"""tests/parallel/test_separable_path_on_ranks.py on CUDA and NCCL."""

from tests.parallel.test_separable_path_on_ranks import *  # noqa: F403

NUM_GPUS = 2
