"""Every metric that a run records: what it is, what it is divided by, and where it is drawn.

The report's charts, the progress line and docs/reference/metrics.md follow from these tables. A
formula is computed where its section says; a new metric is one row here (a test refuses a job that
records one without), and a line in a chart if its own small one is not enough. Metrics of a user's
own hooks, losses and code need no row: the report draws each by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Better = Literal["", "higher", "lower"]
#: What every line of metrics.jsonl has, whatever else a job adds.
REQUIRED_METRICS = (
    *("step", "reward", "loss", "grad_norm"),
    *("mismatch_kl", "staleness", "tokens_per_second"),
)


@dataclass(frozen=True)
class Metric:
    """One row.

    name: parts in `<>` stand for any text, e.g. `eval/<set>/mean`
    formula: in words; over: the denominator of a mean or share; empty = not divided
    better: the direction to hope for, all else being equal
    own_chart: drawn by itself if no chart shows it; not so bookkeeping
    """

    name: str
    formula: str
    unit: str = ""
    over: str = ""
    better: Better = ""
    own_chart: bool = True

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"<[^>]+>", ".+", re.escape(self.name)))

    def matches(self, name: str) -> bool:
        return self._pattern.fullmatch(name) is not None


@dataclass(frozen=True)
class Section:
    """Metrics of one origin; source: the module that computes them."""

    title: str
    source: str
    metrics: tuple[Metric, ...]


def _bookkeeping(name: str, formula: str, unit: str = "") -> Metric:
    return Metric(name, formula, unit, own_chart=False)


def _tokens(name: str, formula: str, unit: str = "", better: Better = "") -> Metric:
    """A mean over the tokens with a loss mask of 1."""
    return Metric(name, formula, unit, _TOKENS, better)


def _share(name: str, formula: str, over: str, better: Better = "") -> Metric:
    return Metric(name, formula, "share", over, better)


def _mismatch(name: str, formula: str, unit: str = "", over: str | None = None) -> Metric:
    extreme = name.endswith(("_max", "_min")) or unit == "tokens"
    over = ("" if extreme else _TOKENS) if over is None else over
    return Metric(f"mismatch/{name}", formula, unit, over, own_chart=False)


def _weighted(name: str, formula: str, unit: str = "", better: Better = "") -> Metric:
    """A mean with the weights of the loss itself."""
    return Metric(name, formula, unit, "as --loss-reduction", better)


_TOKENS, _SLICE = "unmasked tokens", "tokens of the slice"
#: Parts of `mismatch/...` that also exist of cur against rollout, and their formulas.
_OF_RATIO = {
    "ratio_mean": "mean ratio",
    "ratio_max": "largest ratio, over all ranks",
    "ratio_min": "smallest ratio, over all ranks",
    "ess_share": "effective sample size (Σr)² / Σr² of the ratios, as a share of the tokens",
    "chi2": "mean of ratio² minus 1",
    "k1": "KL(rollout ‖ policy) by the mean of rollout − policy",
    "k2": "KL(rollout ‖ policy) by half the mean of (rollout − policy)²",
    "k3": "KL(rollout ‖ policy) by the mean of ratio − 1 − log ratio",
}

SECTIONS: tuple[Section, ...] = (
    Section(
        "Progress and time",
        "plugin/controller/training_loop.py",
        (
            _bookkeeping("step", "optimizer steps so far; of an evaluation, the step before it"),
            _bookkeeping("rollout", "rollouts trained on before this one"),
            _bookkeeping("update_epoch", "pass over the rollout, from 0 (several epochs)"),
            _bookkeeping("mini_batch", "number of the mini-batch in its epoch, from 0"),
            _bookkeeping("epoch", "passes over --prompt-data, dropped rows included"),
            _bookkeeping("weight_version", "version of the trainer's weights before the step"),
            _bookkeeping("lr", "learning rate of the step"),
            _bookkeeping("entropy_coef", "entropy bonus of the step (--entropy-target)"),
            _bookkeeping("skipped", "1 if the step changed nothing (bad gradient), else 0"),
            _bookkeeping("engine_restarts", "rollout engines replaced so far"),
            _bookkeeping("rollout_engines", "rollout engines that are there, or about to be"),
            _bookkeeping("trainer_restarts", "restarts of the trainer from a checkpoint so far"),
            Metric(
                "tokens_per_second",
                "response tokens of the step",
                "tokens/s",
                "wall clock",
                "higher",
            ),
            _bookkeeping("seconds", "wall-clock time of the step", "s"),
            _bookkeeping("seconds_training", "of these, the update of policy and critic", "s"),
            _bookkeeping(
                "seconds_transport", "of that, the batch to the ranks and results back", "s"
            ),
            _bookkeeping("seconds_waiting", "waiting for the rollout", "s"),
            _bookkeeping("seconds_preparing", "advantages, masks and checks of the batch", "s"),
            _bookkeeping("seconds_log_probs", "log-prob passes of trainer and other models", "s"),
            _bookkeeping("seconds_log_probs_saved", "estimate for a pass that was not run", "s"),
            _bookkeeping("seconds_values", "value pass of the critic", "s"),
            _bookkeeping("seconds_critic", "update of the critic", "s"),
            _bookkeeping("seconds_weight_sync", "sending the newest weights to the engines", "s"),
            _bookkeeping("seconds_evaluating", "all sets of an evaluation", "s"),
            _bookkeeping("weight_sync", "weight transport, by name"),
            Metric("weight_sync_bytes", "bytes of the newest weights as they were sent", "bytes"),
            _share(
                "weight_changed_share",
                "elements that differ from the version before in the engine's dtype; of a version "
                "that was sent as a delta (`--weight-sync delta`)",
                "elements of the model",
            ),
            _bookkeeping(
                "weight_repairs",
                "how often an engine got a version again, because its checksums differed",
            ),
        ),
    ),
    Section(
        "Rewards and responses",
        "plugin/controller/batch.py",
        (
            Metric("reward", "reward without overlong penalty", "", "responses", better="higher"),
            Metric("reward_std", "standard deviation of the reward", "", "responses"),
            Metric("reward/<part>", "one of several rewards, before its weight", "", "responses"),
            Metric("overlong_penalty", "penalty of long responses", "", "responses"),
            _share(
                "uniform_group_share", "groups of equal rewards: no advantage", "groups", "lower"
            ),
            Metric("response_length", "tokens of a response", "tokens", "samples"),
            Metric("truncated_share", "responses that were cut off", "share", "responses"),
            _bookkeeping("turns", "mean number of turns per trajectory"),
            _bookkeeping("samples_per_trajectory", "mean number of samples per trajectory"),
            Metric("staleness", "weight version, trainer − token", "versions", _TOKENS, "lower"),
            Metric("staleness_max", "the same of the oldest token", "versions"),
            _share("interrupted_share", "responses of several weight versions", "responses"),
            _tokens("stale_token_share", "tokens masked by --max-token-staleness", "share"),
            Metric("kept_ids_per_token", "ids kept by top-p/top-k", "ids", "response tokens"),
        ),
    ),
    Section(
        "Prompts and groups",
        "plugin/controller/queue/rollout_queue.py",
        (
            _bookkeeping("prompts_issued", "prompts so far = trained + dropped + under way"),
            _bookkeeping("prompts_trained", "prompts trained on so far"),
            _bookkeeping("prompts_under_way", "prompts issued and not yet trained on"),
            _bookkeeping("dropped_stale", "prompts dropped: sampled by weights that are too old"),
            _bookkeeping("dropped_failed", "prompts dropped: response or reward failed"),
            _bookkeeping("dropped_uniform", "prompts dropped: all rewards equal"),
            _bookkeeping("groups_resampled", "groups sampled again after a failure"),
            _bookkeeping("groups_resent", "groups sent again because an engine died"),
            _bookkeeping("groups_surplus", "over-sampled groups that were not needed"),
            _bookkeeping("groups_kept_uniform", "groups of equal rewards that were trained on"),
            Metric("failed_rewards", "groups of which a reward failed, so far", "groups"),
            Metric("reward_generated", "reward before dynamic sampling chose", "", "groups"),
        ),
    ),
    Section(
        "The optimizer step",
        "plugin/megatron_backend/trainer.py",
        (
            Metric("grad_norm", "L2 norm of the whole gradient, before clipping"),
            Metric("loss_scale", "dynamic loss scale of float16 training"),
            Metric("skipped_steps", "steps that changed nothing, so far", "steps"),
            _bookkeeping("num_tokens", "tokens with a loss mask of 1", "tokens"),
            _bookkeeping("num_microbatches", "microbatches per rank"),
            _bookkeeping("padding_microbatch_share", "of all microbatches on all ranks", "share"),
        ),
    ),
    Section(
        "The loss and its terms",
        "plugin/loss/objective.py",
        (
            _weighted("loss", "the whole objective with all terms", ""),
            _weighted("pg_loss", "policy loss after corrections", ""),
            _weighted("entropy_loss", "entropy of the policy", "nats"),
            _weighted("kl_loss", "KL from the reference model", "nats"),
            _weighted("rollout_kl", "KL from the rollout policy", "nats"),
            _weighted("distill_kl", "KL from the teacher over its likeliest ids", "nats", "lower"),
            _tokens("teacher_kl", "cur − teacher at the sampled tokens", "nats", "lower"),
            _tokens("ppo_kl", "train − cur: k1 of the updates on this rollout", "nats"),
            _tokens("ois", "π_cur / π_train"),
            _tokens("mismatch_kl", "k3 of KL(rollout ‖ cur)", "nats", "lower"),
            Metric("masked_mismatch_kl", "mismatch_kl of these", "nats", "dropped tokens"),
            Metric("unmasked_mismatch_kl", "mismatch_kl of these", "nats", "kept tokens"),
            _tokens("train_rollout_logprob_abs_diff", "|train − rollout|", "nats", "lower"),
            _tokens("old_log_prob_error", "|approximate − own| old log-prob", "nats", "lower"),
        ),
    ),
    Section(
        "Policy losses",
        "plugin/loss/policy_losses.py and rollout_losses.py",
        (
            _tokens("pg_clipfrac", "tokens whose policy ratio was clipped", "share"),
            _tokens("is_masked", "tokens dropped by loss or correction", "share"),
            _tokens("is_masked_high", "tokens dropped above the band", "share"),
            _tokens("is_masked_low", "tokens dropped below the band", "share"),
            _tokens("covariance", "(A − mean A)(log π − mean log π), clip_cov and kl_cov", "nats"),
            _tokens("kl_cov_pulled", "tokens pulled to the old policy (kl_cov)", "share"),
            _tokens("cispo/ratio_clamped_mean", "weight after clipping"),
            Metric("cispo/ratio_max", "largest π_cur / π_train"),
            Metric("cispo/ratio_min", "smallest π_cur / π_train"),
            _tokens("vespo/phi", "weight of the token's sequence"),
            _tokens("dro/pull", "pull to the rollout policy"),
        ),
    ),
    Section(
        "Score centering",
        "plugin/loss/score_centering.py",
        (
            _tokens(
                "score_centering/head_mass", "q(H): sampler's probability of its likeliest ids"
            ),
            _tokens("score_centering/cur_head_mass", "p(H): the current policy's of the same ids"),
            _tokens("score_centering/tail_ratio", "rho = (1 − q(H)) / (1 − p(H))"),
            _tokens("score_centering/size", "sum over H of |A (q w − rho w(tail) p)|"),
        ),
    ),
    Section(
        "Corrections",
        "plugin/ppo_utils/corrections.py",
        (
            _tokens("tis", "importance ratio before clipping"),
            _tokens("tis_abs", "|importance ratio − 1|"),
            _tokens("tis_clipfrac", "tokens whose ratio is outside the clip", "share"),
            _tokens("tis_clip_found", "clip that --tis-clip auto chose"),
            _tokens("m2", "squared log-ratio (M2PO)", "nats²"),
            _tokens("binary_kl", "larger of the two binary KLs of the token (KPop)", "nats"),
            _tokens("ess_share", "ESS share that bounds the weights", "share"),
            _tokens("geometric_ratio", "geometric mean ratio of the token's sequence"),
            _tokens("rejected_by_<rule>", "tokens outside the band of a rejection rule", "share"),
            _tokens("opsm_clipfrac", "tokens of sequences dropped by OPSM", "share"),
            _tokens("prob_diff_abs", "|π_cur − π_rollout|"),
            _tokens("chain/<stage>/removed", "tokens that the stage dropped", "share"),
            _tokens("chain/<stage>/weighted", "tokens whose weight the stage changed", "share"),
            _tokens("chain/<stage>/weight", "product of the weights up to the stage"),
            _tokens("<hook>_function/<metric>", "a metric whose name an earlier stage has taken"),
        ),
    ),
    Section(
        "Mismatch of rollout and trainer",
        "plugin/ppo_utils/mismatch_metrics.py",
        (
            _mismatch("tokens", "tokens with a loss mask of 1", "tokens"),
            *(_mismatch(name, formula) for name, formula in _OF_RATIO.items()),
            *(
                _mismatch(f"ratio_p{percent}", f"{int(percent)} % of the ratios are lower")
                for percent in ("01", "05", "25", "50", "75", "95", "99")
            ),
            _mismatch("ess", "effective sample size (Σr)² / Σr² of the ratios", "tokens"),
            _mismatch("weight_mean", "weight after correction, 0 where dropped"),
            _mismatch("weight_max", "largest weight"),
            _mismatch("weight_min", "smallest weight"),
            _mismatch("weight_ess", "effective sample size of the weights", "tokens"),
            _mismatch("weight_ess_share", "the same as a share of the tokens", "share"),
            _mismatch("abs_log_ratio", "|train − rollout|", "nats"),
            _mismatch("multiplicative_error", "exp |train − rollout|; 1 = the same probabilities"),
            _mismatch(
                "reverse_k3", "KL(policy ‖ rollout) by ratio · log ratio − ratio + 1", "nats"
            ),
            _mismatch("js", "Jensen-Shannon divergence of policy and rollout", "nats"),
            _mismatch("train_perplexity", "exp of the mean −train of the sampled tokens"),
            _mismatch("rollout_perplexity", "exp of the mean −rollout of the sampled tokens"),
            _mismatch("perplexity_gap", "train_perplexity − rollout_perplexity"),
            _mismatch("kept_share", "tokens that loss and corrections keep", "share"),
            _mismatch("masked_low_share", "tokens dropped with a ratio below 1", "share"),
            _mismatch("masked_high_share", "tokens dropped with a ratio of 1 or more", "share"),
            _mismatch("clipped_low_share", "tokens whose weight a bound raised", "share"),
            _mismatch("clipped_high_share", "tokens whose weight a bound lowered", "share"),
            *(
                _mismatch(f"{sign}_advantage_removed", "dropped", "share", f"Σ|A| of {sign} A")
                for sign in ("positive", "negative")
            ),
            *(_mismatch(f"cur/{name}", f"{text}; π_cur") for name, text in _OF_RATIO.items()),
            *(
                Metric(f"mismatch/{slice_}/<metric>", f"the same {what}", "", _SLICE, "", False)
                for slice_, what in (
                    ("by_position/<range>", "at these positions in the response"),
                    ("by_staleness/<range>", "of tokens sampled by weights this old"),
                    ("by_rollout_prob/<range>", "of tokens with this probability when sampled"),
                )
            ),
        ),
    ),
    Section(
        "Routing replay",
        "plugin/megatron_backend/routing/router_replay.py",
        (
            _share("replay/agreement", "experts equal to live routing", "choices", "higher"),
            _share("replay/agreement/layer_<i>", "the same of one MoE layer", "choices", "higher"),
            _share("replay/coverage", "tokens whose routes were replayed", "all tokens", "higher"),
            Metric("replay/live_tokens", "tokens without a recorded route", "tokens"),
        ),
    ),
    Section(
        "Critic",
        "plugin/controller/passes.py and plugin/megatron_backend/critic.py",
        (
            _weighted("critic/loss", "value loss", "", "lower"),
            _tokens("critic/clipped", "tokens whose value change was clipped", "share"),
            Metric("critic/explained_variance", "1 − Var(return − value) / Var(return)"),
            _tokens("critic/value", "value before the update"),
            _tokens("critic/return", "return that the value is trained towards"),
            Metric("critic/grad_norm", "L2 norm of the critic's gradient, before clipping"),
            Metric("critic/lr", "learning rate of the critic"),
            Metric("critic/loss_scale", "dynamic loss scale of float16 training"),
            Metric("critic/skipped", "1 if the step changed nothing"),
            Metric("critic/skipped_steps", "steps that changed nothing, so far", "steps"),
        ),
    ),
    Section(
        "Evaluation",
        "plugin/observe/evaluation_metrics.py and plugin/controller/evaluation.py",
        (
            Metric("eval/<set>/mean", "reward, mean of means", "", "prompts", "higher"),
            _share("eval/<set>/pass@<k>", "one of k is right, unbiased", "prompts", "higher"),
            Metric("eval/<set>/<score>/ci_low", "lower end of the 95 % interval over prompts"),
            Metric("eval/<set>/<score>/ci_high", "upper end of the 95 % interval over prompts"),
            Metric("eval/<set>/prompts", "prompts evaluated", "prompts"),
            Metric(
                "eval/<set>/failed_prompts",
                "prompts left out after failures",
                "prompts",
                "",
                "lower",
            ),
            Metric("eval/<set>/response_length", "tokens of a response", "tokens", "responses"),
            _share("eval/<set>/truncated_share", "responses that were cut off", "responses"),
        ),
    ),
)
METRICS: tuple[Metric, ...] = tuple(row for section in SECTIONS for row in section.metrics)
_EXACT = {row.name: row for row in METRICS}
_PATTERNS = tuple(row for row in METRICS if "<" in row.name)


def row_of(name: str) -> Metric | None:
    """The row of a recorded metric; None if it is the user's own."""
    return _EXACT.get(name) or next((row for row in _PATTERNS if row.matches(name)), None)


@dataclass(frozen=True)
class Chart:
    """One chart of the report.

    lines: label -> metrics, of which the first that a run has recorded is drawn
    bands: (low metric, high metric, opacity); mark: a horizontal reference line
    floor, ceiling: values that the axis always shows
    optional: left out without data
    """

    id: str
    title: str
    note: str
    lines: dict[str, tuple[str, ...]]
    bands: tuple[tuple[str, str, float], ...] = ()
    log: bool = False
    floor: float | None = None
    ceiling: float | None = None
    mark: float | None = None
    missing: str = "Not recorded in this run"
    optional: bool = False

    @property
    def metrics(self) -> set[str]:
        """Names of all metrics that it shows."""
        shown = {name for names in self.lines.values() for name in names}
        return shown | {name for low, high, _ in self.bands for name in (low, high)}


_NEEDS_ROLLOUT = "Not recorded: it needs the rollout engine's log-probs"
CHARTS: tuple[Chart, ...] = (
    Chart(
        "reward",
        "Reward",
        "Mean reward of the samples trained on.",
        {"reward": ("reward",)},
    ),
    Chart(
        "mismatch_kl",
        "Mismatch KL",
        "KL of the rollout policy from the trained one, per token (k3). Noise of the engine stays "
        "flat; growth is a warning.",
        {"current policy": ("mismatch_kl",), "start of the step": ("mismatch/k3",)},
        log=True,
        missing=_NEEDS_ROLLOUT,
    ),
    Chart(
        "teacher_kl",
        "Distance from the teacher",
        "Reverse KL per token: its estimate by the sampled tokens, and over the likeliest ids.",
        {"sampled tokens": ("teacher_kl",), "likeliest ids": ("distill_kl",)},
        optional=True,
    ),
    Chart(
        "ratio_percentiles",
        "Ratio percentiles",
        "π_train / π_rollout before any correction: median, 25–75 %, 5–95 % and 1–99 %.",
        {"median": ("mismatch/ratio_p50",)},
        bands=(
            ("mismatch/ratio_p01", "mismatch/ratio_p99", 0.12),
            ("mismatch/ratio_p05", "mismatch/ratio_p95", 0.16),
            ("mismatch/ratio_p25", "mismatch/ratio_p75", 0.25),
        ),
        log=True,
        mark=1.0,
        missing=_NEEDS_ROLLOUT,
    ),
    Chart(
        "ess",
        "Effective sample size",
        "ESS / N of the token weights: 1 means every token counts, 0.5 that half the batch is "
        "wasted.",
        {
            "after correction": ("mismatch/weight_ess_share",),
            "before correction": ("mismatch/ess_share",),
        },
        ceiling=1.0,
        missing=_NEEDS_ROLLOUT,
    ),
    Chart(
        "clipped",
        "Clipped fraction",
        "Tokens whose weight or policy ratio was bounded.",
        {
            "policy loss": ("pg_clipfrac",),
            "weight, high": ("mismatch/clipped_high_share", "tis_clipfrac"),
            "weight, low": ("mismatch/clipped_low_share",),
        },
        floor=0.0,
    ),
    Chart(
        "masked",
        "Masked fraction",
        "Tokens that a correction dropped, by the side on which their ratio left the band.",
        {
            "all": ("is_masked",),
            "too high": ("is_masked_high", "mismatch/masked_high_share"),
            "too low": ("is_masked_low", "mismatch/masked_low_share"),
        },
        floor=0.0,
        missing="Not recorded: no correction that masks is in use",
    ),
    Chart(
        "rollout_kl",
        "Rollout KL",
        "The KL term between the current and the rollout policy, as the loss sees it.",
        {"rollout KL": ("rollout_kl",)},
        log=True,
        missing="Not recorded: --use-rollout-kl-loss is off",
    ),
    Chart(
        "grad_norm",
        "Gradient norm",
        "Of the whole model, before clipping. Spikes that follow a rise of the mismatch are "
        "off-policy noise.",
        {"gradient norm": ("grad_norm",)},
        log=True,
    ),
    Chart(
        "staleness",
        "Weight staleness",
        "How many weight versions the rollouts were behind the trainer.",
        {"mean": ("staleness",), "oldest": ("staleness_max",)},
        floor=0.0,
    ),
    Chart(
        "throughput",
        "Throughput",
        "Tokens per second of wall clock.",
        {"tokens/s": ("tokens_per_second",)},
        floor=0.0,
    ),
    Chart("loss", "Loss", "The whole loss, all terms.", {"loss": ("loss",)}),
    Chart(
        "entropy",
        "Entropy",
        "Mean entropy of the policy at the sampled tokens.",
        {"entropy": ("entropy_loss",)},
        optional=True,
    ),
    Chart(
        "extremes",
        "Largest and smallest ratio",
        "True extremes over every rank, before correction.",
        {"largest": ("mismatch/ratio_max",), "smallest": ("mismatch/ratio_min",)},
        log=True,
        mark=1.0,
        optional=True,
    ),
    Chart(
        "response_length",
        "Response length",
        "Mean number of response tokens.",
        {"tokens": ("response_length",)},
        floor=0.0,
        optional=True,
    ),
)


def evaluation_chart(name: str, ks: Iterable[object]) -> Chart:
    """The chart of an evaluated set: mean with its interval, and pass@k of some k."""
    prefix = f"eval/{name}/"
    return Chart(
        prefix,
        f"Evaluation on {name}",
        "Mean reward and pass@k on prompts that are not trained on; the band is the 95 % interval "
        "of the mean.",
        {line: (prefix + line,) for line in ("mean", *(f"pass@{k}" for k in ks))},
        bands=((f"{prefix}mean/ci_low", f"{prefix}mean/ci_high", 0.18),),
    )


#: (dimension of `mismatch/<dimension>/<range>/k3`, title, note)
SLICE_CHARTS = (
    ("by_position", "By position in the response", "k3 of the tokens at these positions."),
    ("by_staleness", "By weight staleness", "k3 of the tokens sampled by weights this old."),
    (
        "by_rollout_prob",
        "By rollout probability",
        "k3 of the tokens whose probability was in this range when sampled.",
    ),
)
#: The numbers above the charts.
TILES = {
    "reward": "reward",
    "mismatch KL": "mismatch_kl",
    "ESS / N": "mismatch/ess_share",
    "staleness": "staleness",
    "tokens / s": "tokens_per_second",
}
#: The progress line, the most telling first: label, metrics of which the first recorded is shown,
#: format.
CONSOLE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward",), "{:.3f}"),
    ("length", ("response_length",), "{:.0f}"),
    ("truncated", ("truncated_share",), "{:.0%}"),
    ("grad norm", ("grad_norm",), "{:.3g}"),
    ("mismatch kl", ("mismatch_kl",), "{:.1e}"),
    ("clipped", ("is_masked", "tis_clipfrac", "pg_clipfrac"), "{:.1%}"),
    ("loss", ("loss",), "{:+.4f}"),
    ("tokens/s", ("tokens_per_second",), "{:.0f}"),
    ("staleness", ("staleness",), "{:.1f}"),
)


def drawn_in(row: Metric) -> list[str]:
    """Where a metric is shown, besides metrics.jsonl and TensorBoard."""
    every = (*CHARTS, evaluation_chart("<set>", ["<k>"]))
    charts = [chart for chart in every if any(map(row.matches, chart.metrics))]
    places = [f"chart {chart.title}" for chart in charts]
    for dimension, title, _ in SLICE_CHARTS:
        if row.name.startswith(f"mismatch/{dimension}/"):
            places.append(f"chart {title} (k3)")
    if row.name in TILES.values():
        places.append("tile")
    places += [f"progress line ({label})" for label, names, _ in CONSOLE if row.name in names]
    if not charts and row.own_chart and not row.name.startswith("eval/"):
        places.append("own chart")
    return places
