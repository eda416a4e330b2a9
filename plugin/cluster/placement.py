"""Where the actors go: one bundle per trainer node and per engine, checked before anything starts.

Trainer ranks are packed: `num_nodes` nodes with `ranks_per_node` ranks each. Engines have bundles
of their own, or with `--colocate` share the trainer's. An engine of several GPUs has them on one
node; one that is larger than every node has a bundle per GPU. Reward workers take CPUs that ranks
and engines leave, on any node. With `--min-rollout-engines` each engine is reserved by itself,
and those that do not fit yet wait for nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from plugin.config import JobConfig
from plugin.config.flags import expect
from plugin.errors import ClusterError, ConfigError

#: How many processes of a job may share the cores of a machine without GPUs.
_SLOTS_PER_CORE, _FEWEST_SLOTS = 8, 16

_POLL_SECONDS = 0.2
#: Ray takes this long to place engines on nodes that are there, after the first ones.
_SETTLING_SECONDS = 5.0

#: Hidden size below which threads lose more to waiting for each other than they gain.
_SMALLEST_FOR_THREADS = 256


@dataclass(frozen=True)
class ResourcePlan:
    """What a job reserves: for each trainer node and each engine ({} when colocated).

    rank, engine: what their actors take of the bundles
    bundles_per_engine: more than 1 where engines are larger than a node
    fewest_engines: without which the job does not start; None = all, which are reserved together
    """

    trainer_nodes: list[dict[str, float]]
    engines: list[dict[str, float]]
    rank: dict[str, float]
    engine: dict[str, float]
    bundles_per_engine: int = 1
    fewest_engines: int | None = None

    @property
    def needed_engines(self) -> list[dict[str, float]]:
        """The bundles of the engines without which the job does not start."""
        if self.fewest_engines is None:
            return self.engines
        return self.engines[: self.fewest_engines * self.bundles_per_engine]

    @property
    def uses_gpus(self) -> bool:
        """Whether trainer ranks compute on GPUs."""
        return "GPU" in self.rank

    @property
    def cpu_slots(self) -> int:
        """CPU slots of the whole job."""
        return int(sum(bundle["CPU"] for bundle in self.trainer_nodes + self.engines))


def plan_resources(
    config: JobConfig, *, use_gpus: bool, gpus_of_a_node: float | None = None
) -> ResourcePlan:
    """The reservations of a job on GPUs, or on CPU slots.

    gpus_of_a_node: of the largest one; None = every engine fits
    """
    cpus, per_node = float(config.cpus_per_rank), config.ranks_per_node
    node = {"CPU": cpus * per_node, **({"GPU": float(per_node)} if use_gpus else {})}
    own = {"CPU": cpus, **({"GPU": 1.0} if use_gpus else {})}
    size, count = config.rollout_num_gpus_per_engine, config.num_rollout_engines
    if not config.colocate:
        larger = use_gpus and gpus_of_a_node is not None and size > gpus_of_a_node
        if larger and config.engine_traits.spans_nodes:
            # vLLM puts one worker into each bundle; the engine's actor only schedules.
            bundles = [own] * size * count
            return ResourcePlan([node] * config.num_nodes, bundles, own, {"CPU": cpus}, size)
        engine = {name: amount * size for name, amount in own.items()}
        if config.engine_traits.asks_servers:
            engine = {"CPU": cpus}  # a client computes nothing itself
        return ResourcePlan([node] * config.num_nodes, [engine] * count, own, engine)
    # Engines reserve nothing: the pool shows them the GPUs of the ranks beside them, and each GPU
    # has one engine at most.
    expect(
        not use_gpus or config.ranks_per_node % size == 0,
        f"--colocate with --rollout-num-gpus-per-engine {size} and {config.ranks_per_node} trainer "
        "ranks per node: an engine's GPUs must be those of ranks of one node; choose a size that "
        "divides the ranks",
    )
    expect(
        not use_gpus or size * count <= config.world_size,
        f"--colocate: {count} engines of {size} GPUs on {config.world_size} GPUs of the trainer; "
        "lower --num-rollout-engines or --rollout-num-gpus-per-engine",
    )
    return ResourcePlan([node] * config.num_nodes, [], own, {"CPU": 0.0})


def torch_threads(
    config: JobConfig, kind: Literal["rank", "engine"], *, hidden_size: int, cores: int
) -> int:
    """Threads of one rank, or of a worker of an engine, on a node with `cores` cores and no GPUs.

    Ranks share the cores, and so do engines, but not with each other: in a synchronous job they
    take turns, and in an asynchronous one a core that waits for the slower kind would be idle.
    Engines are counted as if they were all on this node.
    """
    if config.threads_per_rank != "auto":
        return config.threads_per_rank
    if hidden_size < _SMALLEST_FOR_THREADS:
        return 1
    ranks = config.ranks_per_node
    engines = config.num_rollout_engines * config.rollout_num_gpus_per_engine
    return max(1, cores // (ranks if kind == "rank" else engines))


def most_cpu_slots(cores: int) -> int:
    """Ranks and engines that a machine without GPUs may hold."""
    return max(_FEWEST_SLOTS, _SLOTS_PER_CORE * cores)


def on_this_machine(config: JobConfig, *, gpus: int) -> JobConfig:
    """The configuration with --colocate decided.

    On where a job without `--address` has GPUs for its ranks, but not for the engines beside them,
    and engines that can give up their memory.
    """
    if config.colocate is not None:
        return config
    apart = config.unchecked_copy(colocate=False)
    fits = _gpus_of(plan_resources(apart, use_gpus=True)) <= gpus
    if config.address is not None or fits or config.world_size > gpus:
        return apart
    try:
        shared = replace(config, colocate=True)
        plan_resources(shared, use_gpus=True)
    except ConfigError:
        return apart  # which is refused, with what it would take
    return shared


def _gpus_of(plan: ResourcePlan) -> float:
    """The GPUs that a job reserves."""
    return sum(bundle.get("GPU", 0.0) for bundle in plan.trainer_nodes + plan.engines)


def check_machine(config: JobConfig, *, cores: int, gpus: int) -> None:
    """Refuse a job without `--address` that this one machine cannot hold.

    On GPUs every rank and engine has its own; on CPU several may share a core.
    """
    expect(
        config.num_nodes == 1,
        f"--num-nodes is {config.num_nodes}, and without --address the job runs on this machine "
        "alone; start Ray on every node and pass --address, or drop --num-nodes",
    )
    plan = plan_resources(config, use_gpus=gpus > 0)
    size = config.rollout_num_gpus_per_engine
    of_size = f" of {size} {'GPUs' if gpus else 'workers'}" if size > 1 else ""
    engines = "" if config.colocate else f" and {config.num_rollout_engines} engines{of_size}"
    wanted = f"the job has {config.world_size} trainer ranks{engines}"
    fix = (
        "lower --num-gpus-per-node, the parallel sizes or --num-rollout-engines"
        f"{', or --rollout-num-gpus-per-engine' if size > 1 else ''}, or start a Ray cluster and "
        "pass --address"
    )
    expect(
        _gpus_of(plan) <= gpus,
        f"{wanted}, each with a GPU of its own, and this machine has {gpus}; {fix}, or share them "
        "with --colocate",
    )
    most = most_cpu_slots(cores)
    workers = config.reward_workers
    expect(
        workers == "auto" or workers <= most,
        f"--reward-workers {workers}: processes on {cores} CPU cores, and more than {most} would "
        "starve each other; lower it, or start a Ray cluster and pass --address",
    )
    expect(
        gpus > 0 or plan.cpu_slots <= most,
        f"{wanted}, {plan.cpu_slots} processes on {cores} CPU cores, and more than {most} would "
        f"starve each other; {fix}",
    )


def check_cluster(plan: ResourcePlan, nodes: Sequence[Mapping[str, float]]) -> None:
    """A `ClusterError` that says what the cluster has and what the job needs, unless it fits.

    nodes: total resources of every node
    """
    left = [dict(node) for node in nodes]
    untaken = list(left)
    # Spread: each trainer bundle needs a node that no other trainer bundle has.
    for bundles, candidates in ((plan.trainer_nodes, untaken), (plan.needed_engines, left)):
        for bundle in bundles:
            fitting = [n for n in candidates if all(n.get(k, 0.0) >= v for k, v in bundle.items())]
            if not fitting:
                raise ClusterError(_too_small(plan, nodes))
            for name, amount in bundle.items():
                fitting[0][name] = fitting[0].get(name, 0.0) - amount
            if candidates is untaken:
                untaken[:] = [node for node in untaken if node is not fitting[0]]


def plan_on_cluster(config: JobConfig, *, has_environments: bool = False) -> ResourcePlan:
    """The reservations of a job on the cluster that this process has joined, if it has room.

    has_environments: whether its task has several turns
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    plan = plan_resources(config, use_gpus=largest > 0, gpus_of_a_node=largest)
    if plan.engines and (config.min_rollout_engines or math.inf) < config.num_rollout_engines:
        plan = replace(plan, fewest_engines=config.min_rollout_engines)
    check_cluster(plan, nodes)
    needed = replace(plan, engines=plan.needed_engines)
    left = sum(node.get("CPU", 0.0) for node in nodes) - needed.cpu_slots
    if has_environments:
        check_environments(plan.fewest_engines or environment_cpus(config), left)
    elif config.reward_workers != "auto" and len(nodes) > 1:
        check_reward_workers(config.reward_workers, left)
    return plan


def environment_cpus(config: JobConfig) -> int:
    """CPU slots of the environments, if --task-path has any: one for those of each engine."""
    return config.num_rollout_engines if config.task_path is not None else 0


def check_environments(wanted: int, left: float) -> None:
    """A `ClusterError` if ranks and engines leave too few CPUs for the environments."""
    if wanted > left:
        raise ClusterError(
            f"the environments of --task-path need {wanted} CPUs, one for each engine, and the "
            f"job's ranks and engines leave {left:g} of the cluster; add nodes, start them with a "
            "larger --num-cpus, or lower --cpus-per-rank or --num-rollout-engines"
        )


def check_reward_workers(wanted: int, left: float) -> None:
    """A `ClusterError` if ranks and engines leave fewer than `wanted` CPUs of the cluster."""
    if wanted > left:
        raise ClusterError(
            f"--reward-workers is {wanted}, and the job's ranks and engines leave {left:g} CPUs of "
            "the cluster; lower it or drop it, add nodes, or lower --cpus-per-rank"
        )


def reward_places(
    wanted: int | Literal["auto"], left: Mapping[str, float], most: int
) -> dict[str, int]:
    """How many reward workers each node gets, by node; nodes without any are left out.

    wanted: "auto" = one for two CPUs, and `most` on a node. The others stay free: actors of a
        node that is lost must find room
    left: CPUs that ranks and engines leave on each node
    """
    room = {node: max(0, int(cpus)) for node, cpus in left.items()}
    if wanted == "auto":
        return {node: min(most, cpus // 2) for node, cpus in room.items() if cpus > 1}
    check_reward_workers(wanted, sum(room.values()))
    places: dict[str, int] = {}
    for _ in range(wanted):
        node = max(room, key=lambda one: room[one])
        room[node] -= 1
        places[node] = places.get(node, 0) + 1
    return places


def _too_small(plan: ResourcePlan, nodes: Sequence[Mapping[str, float]]) -> str:
    has = ", ".join(_shown(node) for node in nodes) or "no node"
    engines = ""
    if plan.engines:
        engines = f" and {len(plan.needed_engines)} x ({_shown(plan.engines[0])}) for engines"
    return (
        f"the cluster has {len(nodes)} node{'s' if len(nodes) != 1 else ''} ({has}); the job needs "
        f"{len(plan.trainer_nodes)} x ({_shown(plan.trainer_nodes[0])}) on nodes of their "
        f"own{engines}; add nodes, or lower --num-nodes, --num-gpus-per-node, --cpus-per-rank, "
        "--num-rollout-engines or --rollout-num-gpus-per-engine"
    )


def _shown(resources: Mapping[str, float]) -> str:
    return " + ".join(
        f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in resources
    )


@dataclass
class Reservation:
    """Placement groups of a running job.

    engines: one with the bundles of all engines, or one for each; none where they have no bundles
    trainer_nodes: ordered by node address
    """

    trainer: Any
    engines: list[Any]
    trainer_nodes: list[int]

    def bundle_of_engine(self, number: int, bundles_per_engine: int) -> tuple[Any, int]:
        """An engine's placement group, and its first bundle in it."""
        if len(self.engines) == 1:
            return self.engines[0], number * bundles_per_engine
        return self.engines[number], 0

    def placed_engines(self) -> list[int]:
        """Of the groups in `engines`, those that have nodes."""
        from ray.util import placement_group_table

        table = placement_group_table()
        states = [table.get(group.id.hex(), {}).get("state") for group in self.engines]
        return [number for number, state in enumerate(states) if state == "CREATED"]

    def wait_for_engines(self, fewest: int, timeout: float) -> bool:
        """Wait until so many groups have nodes, and shortly for the others; whether they have."""
        deadline = time.monotonic() + timeout
        while (placed := len(self.placed_engines())) < fewest:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        settled = time.monotonic() + _SETTLING_SECONDS
        while placed < len(self.engines) and time.monotonic() < settled:
            time.sleep(_POLL_SECONDS)
            placed = len(self.placed_engines())
        return True

    def wait_for_nodes(self, timeout: float) -> None:
        """Wait until the trainer's bundles have nodes again after one has left the cluster."""
        import ray

        if not self.trainer.wait(timeout_seconds=timeout):
            has = ", ".join(_shown(node["Resources"]) for node in ray.nodes() if node["Alive"])
            raise ClusterError(
                f"the trainer lost a node and the cluster ({has}) had no room for it within "
                f"{timeout:g} s; add nodes and start again with --resume"
            )
        self.trainer_nodes = _bundles_by_address(self.trainer, ray.nodes())

    def cpus_left(self, *, by_others: bool) -> dict[str, float]:
        """CPUs that the job's ranks and engines leave on each living node, by id.

        by_others: only those that nobody else has; what Ray says of them may be a second old
        """
        import ray
        from ray._private.state import available_resources_per_node
        from ray.util import placement_group_table

        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        left = {node: resources.get("CPU", 0.0) for node, resources in nodes.items()}
        for group in (self.trainer, *self.engines):
            table = placement_group_table(group)
            for number, node in table["bundles_to_node_id"].items():
                if node in left:  # an engine may have none yet
                    left[node] -= table["bundles"][number].get("CPU", 0.0)
        if by_others:
            free = available_resources_per_node()
            left = {n: min(cpus, free.get(n, {}).get("CPU", 0.0)) for n, cpus in left.items()}
        return left

    def release(self) -> None:
        """Give the resources back."""
        from ray.util import remove_placement_group

        for group in (self.trainer, *self.engines):
            remove_placement_group(group)


def reserve(plan: ResourcePlan, timeout: float) -> Reservation:
    """Reserve the plan's bundles on the cluster, or a `ClusterError` after `timeout` seconds."""
    import ray
    from ray.util import placement_group

    strategy = "STRICT_SPREAD" if len(plan.trainer_nodes) > 1 else "STRICT_PACK"
    trainer = placement_group(plan.trainer_nodes, strategy=strategy)
    size = len(plan.engines) if plan.fewest_engines is None else plan.bundles_per_engine
    of_engines = [plan.engines[i : i + size] for i in range(0, len(plan.engines), max(1, size))]
    # The trainer's comes first: engines that take what is there must not leave it without.
    reservation = Reservation(trainer, [], [])
    in_time = trainer.wait(timeout_seconds=timeout)
    if in_time:
        reservation.engines += [placement_group(some, strategy="PACK") for some in of_engines]
        in_time = reservation.wait_for_engines(
            plan.fewest_engines or len(reservation.engines), timeout
        )
    if not in_time:
        reservation.release()
        raise ClusterError(
            "the cluster is large enough but did not free the job's resources within "
            f"{timeout:g} s; wait for other jobs to end, or raise --start-timeout"
        )
    reservation.trainer_nodes = _bundles_by_address(trainer, ray.nodes())
    return reservation


def _bundles_by_address(group: Any, nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bundle numbers ordered by the address (then the id) of the node that holds them."""
    from ray.util import placement_group_table

    place = placement_group_table(group)["bundles_to_node_id"]
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    return sorted(place, key=lambda number: (_numeric(address[place[number]]), place[number]))


def _numeric(address: str) -> tuple[int | str, ...]:
    """Sorts 10.0.0.9 before 10.0.0.10."""
    return tuple(int(part) if part.isdigit() else part for part in address.split("."))
