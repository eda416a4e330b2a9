"""What the driver spends to have responses scored: decoding itself, by its workers, by actors on a cluster.

    python -m benchmarks.reward_bench --tokenizer runs/real_model/model

Processor seconds, so that a loaded machine changes them little; queue, scorers and workers are the job's own. The
first row of a length is what the driver did before its workers decoded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from plugin.batch_types import RolloutSample
from plugin.cluster.array_transport import from_arrays, to_arrays
from plugin.cluster.reward_nodes import RewardNodes
from plugin.config import JobConfig
from plugin.controller.queue.groups import Attempt, Group, GroupScoring
from plugin.environments.trajectory import Rollouts, Trajectory
from plugin.observe.console import Console
from plugin.rewards.pool import PoolScorer
from plugin.rewards.reward_set import reward_input
from plugin.rewards.scorers import Ids, Scorer, TextScorer, local_pool
from plugin.rewards.text_rewards import PortableTokenizer, TextSource
from plugin.tasks.loading import load_dataset_task, tokenizer_in
from plugin.tasks.prompt_data import DatasetTask
from plugin.tasks.protocol import Prompt

GROUP = 16


class DecodingScorer(PoolScorer):
    """Decodes on the driver's thread; its workers get text."""

    def __init__(self, task: DatasetTask, config: JobConfig) -> None:
        super().__init__(local_pool(task.rewards, config))
        self._task = task

    def submit(self, prompt: Prompt, response: Ids, *, truncated: bool) -> int:
        ids = np.asarray(response).tolist()
        return self.enqueue(reward_input(self._task, prompt, ids, truncated=truncated))


def answer(length: int, vocabulary: int) -> Rollouts:
    """A group's responses of random tokens, as they come from an engine."""
    samples = [
        RolloutSample(
            torch.randint(vocabulary, (length + 8,)),
            length,
            torch.ones(length),
            rollout_log_probs=-torch.rand(length),
        )
        for _ in range(GROUP)
    ]
    rollouts = Rollouts.of([[Trajectory((sample,)) for sample in samples]])
    return from_arrays(Rollouts, to_arrays(rollouts))


def spent(scorer: Scorer, task: DatasetTask, length: int, responses: int) -> tuple[float, float]:
    """Processor seconds of this thread and of this process for so many responses."""
    made, prompt = answer(length, task.tokenizer.vocab_size), task.prompt(0)
    scoring = GroupScoring(scorer)

    def score(groups: range) -> None:
        open_groups = set(groups)
        for index in groups:
            made.rewards[:] = np.nan
            scoring.begin(Group(Attempt(index, prompt=prompt), made, slice(0, GROUP)))
        while open_groups:
            open_groups -= {group.index for group in scoring.finished(1.0)}

    score(range(1))  # workers that are still starting
    thread, process = time.thread_time(), time.process_time()
    score(range(1, 1 + responses // GROUP))
    return time.thread_time() - thread, time.process_time() - process


def by_actors(source: TextSource, config: JobConfig) -> tuple[RewardNodes, Callable[[], None]]:
    """Reward workers on a cluster of two nodes on this machine, and what ends it."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    nodes = RewardNodes(Console(), source, config)
    nodes.begin({node["NodeID"]: 1.0 for node in ray.nodes()})

    def end() -> None:
        nodes.close()
        ray.shutdown()
        cluster.shutdown()

    return nodes, end


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokenizer", default="runs/real_model/model")
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        rows = directory / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
        config = JobConfig.from_sources(
            {
                "hf_checkpoint": options.tokenizer,
                "prompt_data": str(rows),
                "reward": ["numeric"],
                "reward_workers": 2,
            }
        )
        tokenizer = tokenizer_in(options.tokenizer, "--tokenizer")
        task = load_dataset_task(config, tokenizer, lambda _: None)
        source = TextSource(task.rewards, PortableTokenizer.of(tokenizer), task.stop_token_ids)
        nodes, end = by_actors(source, config)
        cleanup.callback(end)
        local = local_pool(source, config)
        cleanup.callback(local.close)
        decoding = DecodingScorer(task, config)
        cleanup.callback(decoding.close)
        scorers: dict[str, Scorer] = {
            "the driver, scored by its workers": decoding,
            "workers on its machine": TextScorer(task, local),
            "actors on two nodes": TextScorer(task, nodes),
        }
        print("| tokens | decoded by | driver's thread | driver's process |\n|---|---|---|---|")
        for length in options.lengths:
            for name, scorer in scorers.items():
                thread, process = spent(scorer, task, length, options.responses)
                print(f"| {length} | {name} | {thread:.3f} s | {process:.3f} s |", flush=True)


if __name__ == "__main__":
    main()
