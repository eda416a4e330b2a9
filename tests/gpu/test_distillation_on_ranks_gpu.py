"""tests/parallel/test_distillation_on_ranks.py on CUDA and NCCL."""

from tests.parallel.test_distillation_on_ranks import *  # noqa: F403

NUM_GPUS = 2
