"""tests/parallel/test_metrics_ranks.py on CUDA and NCCL."""

from tests.parallel.test_metrics_ranks import *  # noqa: F403

NUM_GPUS = 4
