"""One job over several nodes. By default both nodes are simulated on this machine.

    python examples/multi_node_ray.py                       # two nodes of one private Ray cluster, on CPU

On a real cluster:

    ray start --head --port 6379                            # on the first node
    ray start --address FIRST_NODE:6379                     # on every other node
    python examples/multi_node_ray.py --address auto --num-nodes 2 --num-gpus-per-node 8 \\
        --hf-checkpoint /models/qwen3-8b --prompt-data /data/train.jsonl --tensor-model-parallel-size 4 \\
        --pipeline-model-parallel-size 2 --max-tokens-per-gpu 16384 --lr 1e-6

Every flag of `megatron-tis train` is accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from plugin.cli import main

SMALL = ["--num-nodes", "2", "--rollout-batch-size", "16", "--num-rollouts", "20"]


@contextmanager
def two_nodes() -> Iterator[str]:
    """A Ray cluster of two nodes in processes of this machine; gives its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    try:
        cluster.add_node(num_cpus=3)
        yield cluster.address
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    flags = sys.argv[1:]
    if "--address" in flags:
        sys.exit(main(["train", *flags]))
    with two_nodes() as address:
        sys.exit(main(["train", "--address", address, *SMALL, *flags]))
