"""tests/parallel/test_padding_microbatches.py on CUDA and NCCL."""

from tests.parallel.test_padding_microbatches import *  # noqa: F403

NUM_GPUS = 2
