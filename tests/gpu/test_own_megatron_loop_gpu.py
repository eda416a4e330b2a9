"""tests/parallel/test_own_megatron_loop.py on CUDA and NCCL."""

from tests.parallel.test_own_megatron_loop import *  # noqa: F403

NUM_GPUS = 2
