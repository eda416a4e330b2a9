"""`megatron-tis plan`: memory, communication and time of a job, planned on a laptop.

Nothing is started: no Ray, no engine, no weights are read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from plugin.commands.train import COMMON_FLAGS
from plugin.config import JobConfig
from plugin.config.flags import FlagGroup, expect, flag
from plugin.errors import ConfigError, MegatronTisError

if TYPE_CHECKING:
    from plugin.tools.plan.job_plan import JobPlan, Models

#: Every rank is a member of the planned process groups.
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class PlanFlags(FlagGroup):
    """The flags of the plan itself."""

    title: ClassVar[str] = "plan"

    hf_config: str | None = flag(None, "config.json of the model, instead of --hf-checkpoint")
    hf_index: str | None = flag(
        None,
        "its model.safetensors.index.json, whose names are checked; none = the one beside "
        "config.json, if any",
    )
    ranks: str = flag("all-distinct", "one rank of every kind, or these, as in 0,512")
    gpu: str | None = flag("h100-80g", "whose memory and links to compare with; none = CPU ranks")
    lengths: str | None = flag(
        None,
        "tokens of prompts and responses: a file with a line `prompt response` per sample, or "
        "lognormal:MEDIAN:SIGMA; none = lognormal around a third of --max-response-length",
    )
    json: bool = flag(False, "print the plan as JSON")
    html: str | None = flag(None, "file for the plan as one page")
    force: bool = flag(False, "replace an existing --html file")
    search: bool = flag(
        False, "try the layouts that these ranks allow, and rank them by the estimated step time"
    )
    search_limit: int = flag(
        24, "layouts that --search plans, the fastest by formula first", at_least=1
    )

    def check(self) -> None:
        expect(
            not self.search or self.gpu is not None,
            "--search compares times on a GPU; give --gpu NAME",
        )

    def rank_numbers(self) -> list[int] | None:
        """The ranks of --ranks; None for one of every kind."""
        if self.ranks == "all-distinct":
            return None
        try:
            return list(dict.fromkeys(int(word) for word in self.ranks.split(",")))
        except ValueError:
            raise ConfigError(
                f"--ranks is {self.ranks}; give all-distinct, or numbers such as 0,512"
            ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`, and those of the plan."""
    parser.usage = "megatron-tis plan [-h | --help-all] [--config FILE] [--FLAG VALUE ...]"
    parser.epilog = "Every flag of train is a flag of plan; --help-all shows them."
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings; flags on the command line win"
    )
    PlanFlags.add_arguments(parser)
    JobConfig.add_arguments(parser, in_short_help=COMMON_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if the job fits, 1 if it does not."""
    import warnings

    warnings.simplefilter("ignore")  # of packages that a plan does not use
    from plugin.observe.html_page import refuse_overwriting, write_page
    from plugin.tools.plan.estimates import gpu_named

    options = PlanFlags(**PlanFlags.given_in(args))
    gpu = None if options.gpu is None else gpu_named(options.gpu)
    ranks = options.rank_numbers()
    page = None if options.html is None else Path(options.html).expanduser()
    if page is not None:
        refuse_overwriting(page, options.force)
    flags = JobConfig.given_in(args)
    if options.hf_config is not None:
        # A model given by its config alone counts as a checkpoint.
        flags["hf_checkpoint"] = str(Path(options.hf_config).expanduser().parent)
    try:
        config = JobConfig.from_sources(flags, args.config)
    except ConfigError as error:
        raise _with_layouts(error, flags, args.config, options) from error
    expect(
        config.world_size <= _MOST_RANKS,
        f"the job has {config.world_size:,} trainer ranks, and {_MOST_RANKS:,} are planned at "
        "most; lower the parallel sizes, --num-nodes or --num-gpus-per-node",
    )
    models, index = load_models(config, options)
    from plugin.tools.plan.checkpoint_coverage import require_coverage
    from plugin.tools.plan.report import as_json, as_text, plan_html

    progress = Progress()
    if options.search:
        return _search(config, models, gpu, options, progress)
    plan = checked_plan(config, models, options.lengths, gpu, ranks, progress)
    if ranks is None:
        require_coverage(plan.claims, models.policy, index)
    advice: list[Any] = []
    if plan.fits is False:
        from plugin.tools.plan.job_plan import best_flags

        advice = best_flags(plan, models, progress)
    progress.end()
    report = as_json(plan, advice)
    print(json.dumps(report, indent=2) if options.json else "\n".join(as_text(report)))
    if page is not None:
        write_page(page, plan_html(report), force=options.force)
    return 0 if plan.fits is not False else 1


def _search(
    config: JobConfig, models: Models, gpu: Any, options: PlanFlags, progress: Progress
) -> int:
    from plugin.megatron_backend.cpu_runtime import import_megatron

    import_megatron()
    from plugin.tools.plan.report import search_json, search_text
    from plugin.tools.plan.search import search_layouts
    from plugin.tools.plan.workload import sample_lengths

    lengths = sample_lengths(config, options.lengths, models.policy.max_position_embeddings)
    found = search_layouts(
        config, models, lengths, gpu, limit=options.search_limit, begin=progress.layout
    )
    progress.end()
    if options.json:
        print(json.dumps(search_json(found), indent=2))
    else:
        print("\n".join(search_text(found, options.search_limit)))
    return 0 if any(candidate.fits for candidate in found.planned) else 1


def _with_layouts(
    error: ConfigError, flags: Mapping[str, Any], config_file: str | None, options: PlanFlags
) -> ConfigError:
    """The error and, if another layout would fix it, the nearest such layouts."""
    from plugin.tools.plan.layouts import LAYOUT_FLAGS

    try:
        config = JobConfig.from_sources(
            {name: value for name, value in flags.items() if name not in LAYOUT_FLAGS}, config_file
        )
        models, _ = load_models(config, options)
    except ConfigError:
        return error
    wanted = {name: int(value) for name, value in flags.items() if str(value).isdigit()}
    return _with_nearest(error, wanted, config, models)


def _with_nearest(
    error: ConfigError, wanted: dict[str, int], config: JobConfig, models: Models
) -> ConfigError:
    """The error with the layouts that work and are nearest to the wanted sizes."""
    from plugin.tools.plan.layouts import nearest_layouts

    near = "; ".join(nearest_layouts(wanted, config, models.policy))
    hint = f"; layouts that work on {config.world_size} ranks: {near}" if near else ""
    return ConfigError(f"{error}{hint}")


def load_models(config: JobConfig, options: PlanFlags) -> tuple[Models, set[str] | None]:
    """Configs of policy, reference and teachers, and the names in the policy's index, if any."""
    from plugin.cluster.model_source import policy_source
    from plugin.megatron_backend.lora.targets import check_lora
    from plugin.tools.plan.checkpoint_coverage import index_names, read_hf_config
    from plugin.tools.plan.job_plan import Models

    file = None
    if options.hf_config is not None:
        file = Path(options.hf_config).expanduser()
    elif config.hf_checkpoint is not None:
        file = Path(config.hf_checkpoint).expanduser() / "config.json"
    policy = policy_source(config).as_config() if file is None else read_hf_config(file)
    check_lora(policy, config)
    index = None if options.hf_index is None else Path(options.hf_index).expanduser()
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
