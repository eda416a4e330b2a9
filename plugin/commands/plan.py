"""`megatron-tis plan`: memory, communication and time of a job, planned on a laptop.

Nothing is started: no Ray, no engine, no weights are read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from plugin.commands.train import COMMON_FLAGS
from plugin.config import JobConfig
from plugin.errors import ConfigError, MegatronTisError

if TYPE_CHECKING:
    from plugin.tools.plan.job_plan import JobPlan, Models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`, and those of the plan."""
    parser.usage = "megatron-tis plan [-h | --help-all] [--config FILE] [--FLAG VALUE ...]"
    parser.epilog = "Every flag of train is a flag of plan; --help-all shows them."
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings; flags on the command line win"
    )
    own = parser.add_argument_group("plan")
    own.add_argument(
        "--hf-config", metavar="FILE", help="config.json of the model, instead of --hf-checkpoint"
    )
    own.add_argument(
        "--hf-index",
        metavar="FILE",
        help="its model.safetensors.index.json, whose names are checked (default: the one beside "
        "config.json, if any)",
    )
    own.add_argument(
        "--ranks",
        metavar="all-distinct|N,M",
        default="all-distinct",
        help="one rank of every kind, or these (default: all-distinct)",
    )
    own.add_argument(
        "--gpu",
        metavar="NAME",
        default="h100-80g",
        help="whose memory and links to compare with; none = CPU ranks (default: h100-80g)",
    )
    own.add_argument(
        "--lengths",
        metavar="FILE|lognormal:MEDIAN:SIGMA",
        help="tokens of prompts and responses; a file has a line `prompt response` per sample "
        "(default: lognormal around a third of --max-response-length)",
    )
    own.add_argument("--json", action="store_true", help="print the plan as JSON")
    own.add_argument("--html", metavar="FILE", help="also write it as one page")
    own.add_argument("--force", action="store_true", help="replace an existing --html file")
    own.add_argument(
        "--search",
        action="store_true",
        help="try the layouts that these ranks allow, and rank them by the estimated step time",
    )
    own.add_argument(
        "--search-limit",
        metavar="N",
        type=int,
        default=24,
        help="layouts that --search plans, the fastest by formula first (default: 24)",
    )
    JobConfig.add_arguments(parser, in_short_help=COMMON_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if the job fits, 1 if it does not."""
    import warnings

    warnings.simplefilter("ignore")  # of packages that a plan does not use
    from plugin.observe.html_page import refuse_overwriting, write_page
    from plugin.tools.plan.estimates import gpu_named

    gpu = None if args.gpu == "none" else gpu_named(args.gpu)
    ranks = _ranks(args.ranks)
    if args.search and gpu is None:
        raise ConfigError("--search compares times on a GPU; give --gpu NAME")
    if args.search_limit < 1:
        raise ConfigError(f"--search-limit is {args.search_limit}; it must be at least 1")
    page = None if args.html is None else Path(args.html).expanduser()
    if page is not None:
        refuse_overwriting(page, args.force)
    try:
        config = job_config(args)
    except ConfigError as error:
        raise _with_layouts(error, args) from error
    models, index = load_models(config, args)
    from plugin.tools.plan.checkpoint_coverage import require_coverage
    from plugin.tools.plan.report import as_json, as_text, plan_html

    begin = Progress()
    if args.search:
        return _search(config, models, gpu, args, begin)
    plan = checked_plan(config, models, args.lengths, gpu, ranks, begin)
    if ranks is None:
        require_coverage(plan.claims, models.policy, index)
    advice: list[Any] = []
    if plan.fits is False:
        from plugin.tools.plan.job_plan import best_flags

        advice = best_flags(plan, models, begin)
    begin.end()
    report = as_json(plan, advice)
    print(json.dumps(report, indent=2) if args.json else "\n".join(as_text(report)))
    if page is not None:
        write_page(page, plan_html(report), force=args.force)
    return 0 if plan.fits is not False else 1


def _search(
    config: JobConfig, models: Models, gpu: Any, args: argparse.Namespace, progress: Progress
) -> int:
    from plugin.megatron_backend.cpu_runtime import import_megatron

    import_megatron()
    from plugin.tools.plan.report import search_json, search_text
    from plugin.tools.plan.search import search_layouts
    from plugin.tools.plan.workload import sample_lengths

    lengths = sample_lengths(config, args.lengths, models.policy.max_position_embeddings)
    found = search_layouts(
        config, models, lengths, gpu, limit=args.search_limit, begin=progress.layout
    )
    progress.end()
    if args.json:
        print(json.dumps(search_json(found), indent=2))
    else:
        print("\n".join(search_text(found, args.search_limit)))
    return 0 if any(candidate.fits for candidate in found.planned) else 1


def job_config(args: argparse.Namespace) -> JobConfig:
    """The job's configuration; a model given by its config alone counts as a checkpoint."""
    flags = JobConfig.given_in(args)
    if args.hf_config is not None:
        flags["hf_checkpoint"] = str(Path(args.hf_config).expanduser().parent)
    return JobConfig.from_sources(flags, args.config)


def _with_layouts(error: ConfigError, args: argparse.Namespace) -> ConfigError:
    """The error and, if another layout would fix it, the nearest such layouts."""
    from plugin.tools.plan.layouts import without_layout

    wanted, plain = without_layout(args)
    try:
        config = job_config(plain)
        models, _ = load_models(config, plain)
    except ConfigError:
        return error
    return _with_nearest(error, wanted, config, models)


def _with_nearest(
    error: ConfigError, wanted: dict[str, int], config: JobConfig, models: Models
) -> ConfigError:
    """The error with the layouts that work and are nearest to the wanted sizes."""
    from plugin.tools.plan.layouts import nearest_layouts

    near = "; ".join(nearest_layouts(wanted, config, models.policy))
    hint = f"; layouts that work on {config.world_size} ranks: {near}" if near else ""
    return ConfigError(f"{error}{hint}")


def load_models(config: JobConfig, args: argparse.Namespace) -> tuple[Models, set[str] | None]:
    """Configs of policy, reference and teachers, and the names in the policy's index, if any."""
    from plugin.cluster.model_source import policy_source
    from plugin.megatron_backend.lora.targets import check_lora
    from plugin.tools.plan.checkpoint_coverage import index_names, read_hf_config
    from plugin.tools.plan.job_plan import Models

    file = None
    if args.hf_config is not None:
        file = Path(args.hf_config).expanduser()
    elif config.hf_checkpoint is not None:
        file = Path(config.hf_checkpoint).expanduser() / "config.json"
    policy = policy_source(config).as_config() if file is None else read_hf_config(file)
    check_lora(policy, config)
    index = args.hf_index and Path(args.hf_index).expanduser()
    if index is None and file is not None:
        beside = file.parent / "model.safetensors.index.json"
        index = beside if beside.is_file() else None
    copies = {}
    has_reference = config.use_kl_loss and not config.reference_is_base
    directories = {"reference": config.ref_hf_checkpoint} if has_reference else {}
    directories |= {s.name: s.directory for s in config.teacher_specs if s.directory}
    for name, directory in directories.items():
        own = directory and Path(directory).expanduser() / "config.json"
        copies[name] = read_hf_config(own) if own else policy
    return Models(policy, copies), None if index is None else index_names(index)


def checked_plan(
    config: JobConfig,
    models: Models,
    lengths: str | None,
    gpu: Any,
    ranks: list[int] | None,
    begin: Any,
) -> JobPlan:
    """The plan; a layout that the model cannot be cut into is refused with the nearest that can."""
    from plugin.megatron_backend.cpu_runtime import import_megatron

    import_megatron()
    from plugin.megatron_backend.model.layout_rules import check_model
    from plugin.tools.plan.job_plan import build_error, plan_job
    from plugin.tools.plan.layouts import layout_settings
    from plugin.tools.plan.search import whole_counts
    from plugin.tools.plan.workload import sample_lengths

    try:
        check_model(models.policy, config)
    except ConfigError as error:
        raise _with_nearest(error, layout_settings(config), config, models) from error
    longest = models.policy.max_position_embeddings
    samples = sample_lengths(config, lengths, longest)
    try:
        plan = plan_job(config, models, samples, gpu, ranks=ranks, begin=begin)
    except MegatronTisError:
        raise
    except Exception as error:
        raise ConfigError(
            f"a rank {build_error(error)}; change the model's config.json or the layout, "
            "--traceback shows where"
        ) from error
    if ranks is None:
        return plan
    counts = whole_counts(models.policy)  # of the stages that were not planned, too
    return replace(plan, total_parameters=counts.dense + counts.experts)


def _ranks(words: str) -> list[int] | None:
    if words == "all-distinct":
        return None
    try:
        return list(dict.fromkeys(int(word) for word in words.split(",")))
    except ValueError:
        raise ConfigError(
            f"--ranks is {words}; give all-distinct, or numbers such as 0,512"
        ) from None


_WIDTH = 24


class Progress:
    """Shows progress on standard error: one line on a terminal, one line per layout elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._began: float | None = None

    def __call__(self, what: str) -> None:
        """Show what is planned, on a terminal only."""
        if self._terminal:
            self._rewrite(f"planning {what} ...")

    def layout(self, number: int, total: int, name: str) -> None:
        """Layout `number` of `total` begins."""
        now = time.monotonic()
        self._began = self._began or now
        if not self._terminal:
            print(f"{number}/{total}: {name}", file=self._stream, flush=True)
            return
        full = _WIDTH * (number - 1) // total
        left = ""
        if number > 1:
            seconds = (now - self._began) / (number - 1) * (total - number + 1)
            left = f", {seconds:.0f} s left"
        bar = "#" * full + "-" * (_WIDTH - full)
        self._rewrite(f"[{bar}] {number}/{total} {name}{left}")

    def end(self) -> None:
        """Clear the line."""
        if self._terminal:
            self._rewrite("")

    def _rewrite(self, line: str) -> None:
        print(f"\r{line}\x1b[K", end="", file=self._stream, flush=True)
