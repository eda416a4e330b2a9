"""tests/parallel/test_router_replay.py on CUDA and NCCL."""

from tests.parallel.test_router_replay import *  # noqa: F403

NUM_GPUS = 4
