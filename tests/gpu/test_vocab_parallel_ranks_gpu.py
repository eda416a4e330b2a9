"""tests/parallel/test_vocab_parallel_ranks.py on CUDA and NCCL."""

from tests.parallel.test_vocab_parallel_ranks import *  # noqa: F403

NUM_GPUS = 4
