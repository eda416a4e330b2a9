"""tests/parallel/test_context_and_virtual_pipeline.py on CUDA and NCCL."""

from tests.parallel.test_context_and_virtual_pipeline import *  # noqa: F403

NUM_GPUS = 4
