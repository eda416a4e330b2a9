"""The checks that `train` makes before anything starts, one line each, without a job."""

from __future__ import annotations

from plugin.config import JobConfig
from plugin.errors import MegatronTisError
from plugin.tools.doctor.environment_checks import Check


def configuration_checks(file: str | None) -> list[Check]:
    """Check a configuration of `train` up to the first thing that cannot work."""
    if file is None:
        return [Check("configuration", "ok", "none given; --config FILE checks one")]
    from plugin.cluster.placement import plan_on_cluster
    from plugin.cluster.ray_cluster import cluster
    from plugin.controller.preflight.job_checks import check_job

    begun = ["configuration"]
    try:
        config = JobConfig.from_sources({}, file).with_absolute_paths()
        check_job(config, log=lambda _: None, begin=begun.append)
        if config.address is not None:
            begun.append("room in the cluster")
            with cluster(config) as connected:
                connected()
                plan_on_cluster(config)
    except Exception as error:
        # The user's own task or engine may raise anything.
        known = isinstance(error, MegatronTisError)
        detail = str(error) if known else f"{type(error).__name__}: {error}"
        passed, failed = begun[:-1], [Check(begun[-1], "fail", detail, f"correct {file}")]
    else:
        passed, failed = begun, []
    details = {} if failed else {"configuration": _described(config, file)}
    return [Check(name, "ok", details.get(name, f"{file} passes")) for name in passed] + failed


def _described(config: JobConfig, file: str) -> str:
    engines = f"{config.num_rollout_engines} x {config.rollout_engine}"
    return (
        f"{file} is valid: --policy-loss {config.policy_loss}, {config.world_size} trainer ranks, "
        f"engines {engines}"
    )
