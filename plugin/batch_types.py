"""Samples, batches and microbatches, and one table of their fields.

`FIELDS` is the single list of what a sample carries. Checking, slicing, splitting and the
construction of padding microbatches all walk it, so that a field added here is added everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugin.errors import BatchError, MegatronTisError
from plugin.ragged import Integers, Ragged, Stored, as_integers, ragged_range
from plugin.vocabulary_ids import (
    HEAD_IDS,
    HEAD_LOG_PROBS,
    KEPT_COUNTS,
    KEPT_IDS,
    TOPK_IDS,
    TOPK_LOG_PROBS,
    SamplerHead,
    check_columns,
    check_topk,
)

Shape = Literal["tokens", "response", "topk", "routes", "kept", "scalar"]
#: Those with one entry per response token.
PER_RESPONSE_TOKEN: tuple[Shape, ...] = ("response", "topk")
#: One entry per sample.
Column = Sequence[Any] | Tensor | NDArray[Any]

#: Rounding may put a log-probability a little above 0.
MAX_LOG_PROB = 0.1
#: No real value of a batch is larger; a sentinel such as -1e30 is.
MAX_ABS_VALUE = 1e4


def is_log_prob(values: Tensor) -> Tensor:
    """Whether each value can be a log-probability: finite, no sentinel, at most about 0."""
    return (values.abs() <= MAX_ABS_VALUE) & (values <= MAX_LOG_PROB)


@dataclass(frozen=True)
class Field:
    """One column of a batch.

    shape: tokens [prompt + response], response [response], topk [response, k], routes [prompt +
        response, moe_layers, topk], kept [kept ids of all response tokens], or scalar (one number
        per sample)
    dtype: of the tensors; None = kept as given (routes: `route_dtype` of the model)
    padding: the value in a padding microbatch
    log_prob: whether the values are log-probabilities
    spreads: whether one number per sample is also accepted and repeated for each of its tokens
    """

    name: str
    shape: Shape
    dtype: torch.dtype | None
    optional: bool = False
    padding: float = 0
    log_prob: bool = False
    spreads: bool = False


FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("unconcat_tokens", "tokens", torch.int64),
        Field("total_lengths", "scalar", torch.int64),
        Field("response_lengths", "scalar", torch.int64),
        Field("loss_masks", "response", torch.int64),
        Field("advantages", "response", torch.float32, optional=True),
        # Of a value model: its predictions before the rollout's updates, and their targets.
        Field("values", "response", torch.float32, optional=True),
        Field("returns", "response", torch.float32, optional=True),
        Field("rollout_log_probs", "response", torch.float32, optional=True, log_prob=True),
        Field("log_probs", "response", torch.float32, optional=True, log_prob=True),
        # Of the trainer's weights of the version that sampled each token.
        Field("proximal_log_probs", "response", torch.float32, optional=True, log_prob=True),
        Field("ref_log_probs", "response", torch.float32, optional=True, log_prob=True),
        Field("teacher_log_probs", "response", torch.float32, optional=True, log_prob=True),
        # The teacher's most likely ids at the position of each token.
        Field(TOPK_IDS, "topk", torch.int32, optional=True),
        Field(TOPK_LOG_PROBS, "topk", torch.float32, optional=True, log_prob=True),
        # Tokens that carry loss, of a batch whose masks are elsewhere.
        Field("loss_token_counts", "scalar", torch.int64, optional=True),
        # The head of the distribution that each token was drawn from; an id of -1 = none.
        Field(HEAD_IDS, "topk", torch.int32, optional=True, padding=-1),
        Field(HEAD_LOG_PROBS, "topk", torch.float32, optional=True),
        Field("rollout_mask_sums", "scalar", torch.float32, optional=True, padding=1),
        Field("rollout_routed_experts", "routes", None, optional=True),
        Field(KEPT_COUNTS, "response", torch.int32, optional=True),
        Field(KEPT_IDS, "kept", torch.int32, optional=True),
        Field("kept_sums", "scalar", torch.int64, optional=True),
        Field("rollout_routed_weights", "routes", torch.float32, optional=True),
        Field("rewards", "scalar", torch.float32, optional=True),
        Field("group_index", "scalar", torch.int64, optional=True, padding=-1),
        # Of the weights that sampled each token; arbitrary where masked.
        Field("weight_versions", "response", torch.int64, optional=True, padding=-1, spreads=True),
    )
}


@dataclass(frozen=True)
class RolloutSample:
    """One trajectory as a rollout engine returns it.

    tokens: [prompt + response] int64; loss_mask: [response], 1 where the policy chose the token
    rollout_log_probs: [response] float32, at the sampling temperature; arbitrary where masked
    routed_experts: [prompt + response, moe_layers, topk] integers, -1 = no route; or None
    routed_weights: as `routed_experts`, float32: the factor of each expert's output
    weight_version: of the weights that sampled each token, [response] int64, arbitrary
        where masked; or one number for all of them
    sampling_mask: [response] entries of ascending token ids, those that truncated sampling kept;
        an empty one = the whole vocabulary; or None
    head: the likeliest ids of the distributions that the [response] tokens were drawn from; or None

    Example: prompt [5, 6], response [7, 8, 9] whose middle token came from a tool: tokens
    [5, 6, 7, 8, 9], response_length 3, loss_mask [1, 0, 1].
    """

    tokens: Tensor
    response_length: int
    loss_mask: Tensor
    reward: float = 0.0
    group_index: int = 0
    weight_version: int | Tensor = 0
    rollout_log_probs: Tensor | None = None
    routed_experts: Tensor | None = None
    sampling_mask: Ragged | None = None
    routed_weights: Tensor | None = None
    head: SamplerHead | None = None
    metadata: dict[str, Any] = dataclass_field(default_factory=dict)


class RolloutBatch:
    """Samples as columns: `columns[name][i]` belongs to sample i; only used fields are present.

    Per-token columns are `Ragged`: one tensor with all samples end to end, and their lengths.
    Columns of one number per sample are tensors [N]. Lists of tensors or numbers are joined. A
    `Stored` column is in Ray's object store; it is checked where its values are.
    """

    columns: dict[str, Any]

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = {
            name: _as_column(name, values, columns.get("response_lengths"))
            for name, values in columns.items()
        }

    @classmethod
    def from_samples(cls, samples: Sequence[RolloutSample]) -> RolloutBatch:
        """Columns from samples; an optional field that only some samples have is an error."""
        columns: dict[str, list[Any]] = {
            "unconcat_tokens": [sample.tokens for sample in samples],
            "total_lengths": [sample.tokens.numel() for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "loss_masks": [sample.loss_mask for sample in samples],
            "rewards": [sample.reward for sample in samples],
            "group_index": [sample.group_index for sample in samples],
            "weight_versions": [sample.weight_version for sample in samples],
        }
        masks = [sample.sampling_mask for sample in samples]
        counts = [None if mask is None else torch.from_numpy(mask.lengths).int() for mask in masks]
        heads = [sample.head for sample in samples]
        for name, values in (
            ("rollout_log_probs", [sample.rollout_log_probs for sample in samples]),
            ("rollout_routed_experts", [sample.routed_experts for sample in samples]),
            (KEPT_COUNTS, counts),
            (KEPT_IDS, [None if mask is None else mask.values.int() for mask in masks]),
            ("rollout_routed_weights", [sample.routed_weights for sample in samples]),
            (HEAD_IDS, [None if head is None else head.ids for head in heads]),
            (HEAD_LOG_PROBS, [None if head is None else head.log_probs for head in heads]),
        ):
            absent = [i for i, value in enumerate(values) if value is None]
            if absent and len(absent) < len(values):
                raise BatchError(
                    f"sample {absent[0]} has no {name} but others have; either every sample "
                    "carries it or none"
                )
            if values and not absent:
                columns[name] = values
        if KEPT_COUNTS in columns:
            columns["kept_sums"] = [int(kept.sum()) for kept in columns[KEPT_COUNTS]]
        batch = cls(columns)
        batch.check()
        return batch

    def __len__(self) -> int:
        return len(self.columns["total_lengths"])

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def select(self, indices: Sequence[int] | Integers) -> RolloutBatch:
        """The samples at `indices`, in that order; neighbors are views."""
        chosen = as_integers(indices)
        numbers = torch.from_numpy(chosen)
        columns: dict[str, Any] = {}
        known: dict[Shape, tuple[Ragged, Tensor]] = {}
        stored: dict[int, Stored] = {}
        neighbors = bool(len(chosen)) and bool((np.diff(chosen) == 1).all())
        for name, values in self.columns.items():
            if isinstance(values, Stored):  # one for all columns of the same objects
                if id(values) not in stored:
                    stored[id(values)] = values.select(chosen)
                columns[name] = stored[id(values)]
                continue
            if not isinstance(values, Ragged):
                columns[name] = values[numbers]
                continue
            if neighbors:
                columns[name] = values.select(chosen)
                continue
            # Columns of one shape have one set of places, which is most of the work.
            shape = FIELDS[name].shape
            like, places = known.get(shape, (None, None))
            if like is None or not np.array_equal(like.lengths, values.lengths):
                places = values.places_of(chosen)
                known[shape] = values, places
            columns[name] = values.select(chosen, places)
        return RolloutBatch(columns)

    def with_column(self, name: str, values: Column) -> RolloutBatch:
        """A batch with one more (or a replaced) column."""
        if name not in FIELDS:
            raise BatchError(f"unknown field {name!r}; fields are {', '.join(FIELDS)}")
        if len(values) != len(self):
            raise BatchError(f"{name} has {len(values)} entries for {len(self)} samples")
        return RolloutBatch({**self.columns, name: values})

    def without_column(self, name: str) -> RolloutBatch:
        """A batch with one column less."""
        return RolloutBatch({other: v for other, v in self.columns.items() if other != name})

    def concatenated(self, *others: RolloutBatch) -> RolloutBatch:
        """This batch followed by others with the same fields."""
        for other in others:
            if self.columns.keys() != other.columns.keys():
                different = sorted(self.columns.keys() ^ other.columns.keys())
                raise BatchError(
                    f"batches differ in the fields {', '.join(different)}; both must carry the same"
                )
        joined: dict[str, Any] = {}
        stored: dict[int, Stored] = {}
        for name, values in self.columns.items():
            parts = [values, *(other.columns[name] for other in others)]
            if isinstance(values, Stored):
                if id(values) not in stored:
                    stored[id(values)] = Stored.concatenated(parts)
                joined[name] = stored[id(values)]
            else:
                joined[name] = (
                    Ragged.concatenated(parts) if isinstance(values, Ragged) else torch.cat(parts)
                )
        return RolloutBatch(joined)

    @property
    def stored(self) -> dict[str, Stored]:
        """The columns whose values are elsewhere."""
        return {n: values for n, values in self.columns.items() if isinstance(values, Stored)}

    def here(self) -> RolloutBatch:
        """The batch without the columns whose values are elsewhere."""
        away = self.stored
        if not away:
            return self
        return RolloutBatch({n: v for n, v in self.columns.items() if n not in away})

    def check(self, numbers: Integers | None = None, *, vocabulary: int | None = None) -> None:
        """Check lengths and values of every field; a `BatchError` names field, sample and position.

        Per-token values are checked where the loss mask is 1; masked positions may hold anything.
        numbers: [N] sample numbers for error messages; None = their places in the batch
        vocabulary: size of the model's, which kept ids are checked against
        """
        numbers = np.arange(len(self)) if numbers is None else numbers
        for name, field in FIELDS.items():
            if name not in self.columns:
                if field.optional:
                    continue
                raise BatchError(f"the batch has no {name}; it is required")
            if len(self.columns[name]) != len(self):
                raise BatchError(
                    f"{name} has {len(self.columns[name])} entries for {len(self)} samples"
                )
        unknown = sorted(self.columns.keys() - FIELDS.keys())
        if unknown:
            raise BatchError(f"unknown field {unknown[0]!r}; fields are {', '.join(FIELDS)}")
        # Where tokens and masks are elsewhere, all is checked by the rank that fetches it.
        if len(self) and not self.stored.keys() & {"unconcat_tokens", "loss_masks"}:
            self.here()._check_values(numbers, vocabulary)

    def _check_values(self, numbers: Integers, vocabulary: int | None) -> None:
        self._check_lengths(numbers)
        self._check_tokens(numbers)
        self._check_numbers(numbers)
        tokens: Ragged = self.columns["unconcat_tokens"]
        responses = as_integers(self.columns["response_lengths"])
        places = ragged_range(tokens.starts + tokens.lengths - responses, responses)
        response_tokens = as_integers(tokens.values)[places]
        check_columns(self.columns, response_tokens, numbers, vocabulary)
        check_topk(self.columns, numbers, vocabulary)

    def _check_lengths(self, numbers: Integers) -> None:
        totals, responses = (
            as_integers(self.columns[name]) for name in ("total_lengths", "response_lengths")
        )
        for i in np.flatnonzero((responses < 0) | (responses >= np.maximum(totals, 1)))[:1]:
            raise BatchError(
                f"sample {numbers[i]} has total length {totals[i]} and response length "
                f"{responses[i]}; a response follows at least one prompt token"
            )
        for name, values in self.columns.items():
            shape = FIELDS[name].shape
            if shape in ("scalar", "kept"):
                continue
            expected = responses if shape in PER_RESPONSE_TOKEN else totals
            for i in np.flatnonzero(values.lengths != expected)[:1]:
                raise BatchError(
                    f"{name} of sample {numbers[i]} has length {values.lengths[i]}, expected "
                    f"{expected[i]} (total {totals[i]}, response {responses[i]})"
                )

    def _check_tokens(self, numbers: Integers) -> None:
        tokens: Ragged = self.columns["unconcat_tokens"]
        ids = tokens.values
        if not _is_integer(ids.dtype):
            raise BatchError(
                f"unconcat_tokens are {ids.dtype}; token ids are integers, convert them"
            )
        if bool((ids < 0).any()):
            sample, position, value = _first(ids < 0, tokens)
            raise BatchError(
                f"unconcat_tokens of sample {numbers[sample]} is {value} at position {position}; "
                "a token id is at least 0. Drop padding before building the batch"
            )

    def _check_numbers(self, numbers: Integers) -> None:
        mask = self.columns["loss_masks"].values != 0
        for name, column in self.columns.items():
            field = FIELDS[name]
            if name == "rollout_routed_experts" and not _is_integer(column.values.dtype):
                raise BatchError(
                    f"{name} are {column.values.dtype}; experts are integers, convert them"
                )
            if field.spreads and not _is_integer(column.values.dtype):
                raise BatchError(
                    f"{name} are {column.values.dtype}; versions are integers, convert them"
                )
            if name == "rollout_routed_weights":
                self._check_route_weights(numbers)
            if field.dtype != torch.float32 or field.shape == "routes" or name == HEAD_LOG_PROBS:
                continue  # a head is checked with its ids
            if field.shape == "scalar":
                if not bool(column.isfinite().all()):
                    i = int((~column.isfinite()).nonzero()[0])
                    raise BatchError(
                        f"{name} of sample {numbers[i]} is {float(column[i])}; it must be finite. "
                        "Repair its source or drop the sample"
                    )
                continue
            values = column.values
            counts = mask[:, None] if field.shape == "topk" else mask
            bad = counts & ~(values.abs() <= MAX_ABS_VALUE)
            bound = "finite"
            if field.log_prob:
                bad |= counts & ~(values <= MAX_LOG_PROB)
                bound = f"a log-probability (finite, at most {MAX_LOG_PROB})"
            if bool(bad.any()):
                sample, position, value = _first(bad, column)
                raise BatchError(
                    f"{name} of sample {numbers[sample]} is {value} at position {position}, where "
                    f"the loss mask is 1; it must be {bound}. Mask the token or repair the source "
                    f"of {name}"
                )

    def _check_route_weights(self, numbers: Integers) -> None:
        weights: Ragged = self.columns["rollout_routed_weights"]
        routes: Ragged | None = self.columns.get("rollout_routed_experts")
        if routes is None:
            raise BatchError(
                "the batch has rollout_routed_weights and no rollout_routed_experts: weights of "
                "which experts? Give both or none"
            )
        if weights.values.shape != routes.values.shape:
            raise BatchError(
                f"rollout_routed_weights have shape {list(weights.values.shape[1:])} per token, "
                f"rollout_routed_experts {list(routes.values.shape[1:])}; give one weight per "
                "expert"
            )
        if not weights.values.dtype.is_floating_point:
            raise BatchError(
                f"rollout_routed_weights are {weights.values.dtype}; give floating point numbers"
            )
        values = weights.values
        good = ((values >= 0) & values.isfinite()).all(dim=2) & (values > 0).any(dim=2)
        wrong = ~good & ~no_route(routes.values)
        if bool(wrong.any()):
            place, layer = wrong.nonzero()[0].tolist()
            sample, token = weights.place_of(place)
            raise BatchError(
                f"rollout_routed_weights of sample {numbers[sample]}, token {token}, MoE layer "
                f"{layer} are {weights.values[place, layer].tolist()}; weights are finite, at "
                "least 0 and not all 0. Repair the engine that reports them"
            )


def _as_column(name: str, values: Column, response_lengths: Column | None) -> Any:
    field = FIELDS.get(name)
    if field is None:
        return values  # `check` names it
    if isinstance(values, Stored):
        return values
    if field.shape == "scalar":
        return torch.as_tensor(values, dtype=field.dtype)
    if field.spreads and response_lengths is not None and not isinstance(values, Ragged):
        values = spread(values, response_lengths)
    if isinstance(values, Ragged):
        return values
    wrong = [i for i, value in enumerate(values) if not isinstance(value, (Tensor, list, tuple))]
    if wrong:
        raise BatchError(
            f"{name} of sample {wrong[0]} is {values[wrong[0]]!r}; give one tensor per sample"
        )
    if not len(values):
        return Ragged(torch.zeros(0, dtype=field.dtype or torch.int64), [])
    if field.shape == "routes" and len({value.dtype for value in values}) > 1:
        # Engines may report routes in different dtypes, and torch cannot concatenate every pair.
        values = [value.to(field.dtype or torch.int64) for value in values]
    try:
        return Ragged.of(list(values))
    except (RuntimeError, ValueError) as error:
        raise BatchError(f"{name} of the samples do not fit together: {error}") from error


def spread(values: Column, lengths: Column) -> Column:
    """`values` per token: a number becomes as many of it as its sample has response tokens.

    values: [N] numbers, or N of numbers and [response] tensors; lengths: [N]
    """
    sizes = as_integers(lengths)
    if len(values) != len(sizes):
        raise BatchError(
            f"{len(values)} weight versions for {len(sizes)} samples; give one of each"
        )
    if isinstance(values, (Tensor, np.ndarray)) and values.ndim == 1:
        repeats = torch.from_numpy(sizes).clamp(min=0)
        return Ragged(torch.as_tensor(values).repeat_interleave(repeats), sizes)
    return [
        torch.full((max(size, 0),), int(value)) if isinstance(value, (int, np.integer)) else value
        for value, size in zip(values, sizes.tolist(), strict=True)
    ]


def _first(wrong: Tensor, column: Ragged) -> tuple[int, int, float]:
    """Sample, position in it and value of the first place of `column` where `wrong` is True."""
    place = tuple(wrong.nonzero()[0].tolist())
    return *column.place_of(place[0]), column.values[place].item()


def no_route(routes: Tensor) -> Tensor:
    """[tokens, moe_layers] bool: where a token of [tokens, moe_layers, topk] routes has none.

    "No route" is a row filled with -1: the token chooses live. In an unsigned type every value is
    an expert.
    """
    return (routes.long() == -1).all(dim=2)


def route_dtype(num_experts: int) -> torch.dtype:
    """The one type of a model's routes: the smallest signed one that holds every expert."""
    if num_experts <= 1 << 7:
        return torch.int8
    return torch.int16 if num_experts <= 1 << 15 else torch.int32


def holds_experts(dtype: torch.dtype, num_experts: int) -> bool:
    """Whether routes of this type can name every expert; in a smaller one some would wrap."""
    return _is_integer(dtype) and torch.iinfo(dtype).max >= num_experts - 1


def route_faults(routes: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """[tokens, moe_layers] bool each: routes with an expert out of range, and with one twice."""
    ordered = routes.long().sort(dim=2).values
    outside = (ordered[..., 0] < 0) | (ordered[..., -1] >= num_experts)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(dim=2)
    has_route = ~no_route(routes)
    return outside & has_route, repeated & has_route


def check_routes(
    routes: Ragged,
    *,
    layers: int,
    topk: int,
    experts: int,
    total_lengths: Column,
    error: type[MegatronTisError] = BatchError,
    name: Callable[[int], str] = "sample {}".format,
) -> None:
    """Raise `error` unless routes have the model's shape, and distinct experts in range or none.

    routes: [tokens, layers, topk] per sample; name: what the error calls sample i
    """
    values, lengths = routes.values, as_integers(total_lengths)
    per_token = tuple(values.shape[1:])
    wrong_shape = (routes.lengths != lengths) | (per_token != (layers, topk))
    for i in np.flatnonzero(wrong_shape)[:1]:
        raise error(
            f"routes of {name(i)} have shape {(int(routes.lengths[i]), *per_token)}, "
            f"expected {(int(lengths[i]), layers, topk)}: [tokens, moe layers, topk]; the engine "
            "and the trainer must run the same model"
        )
    if not holds_experts(values.dtype, experts):
        raise error(
            f"routes are {values.dtype}, which does not hold experts 0..{experts - 1}; make the "
            f"engine report {route_dtype(experts)}"
        )
    outside, repeated = route_faults(values, experts)
    for wrong, problem in (
        (
            outside,
            f"are {{}}; the model has experts 0..{experts - 1}, and a row of -1 in a signed type "
            "means no route",
        ),
        (repeated, f"name an expert twice: {{}}; each token goes to {topk} different experts"),
    ):
        if bool(wrong.any()):
            place, layer = wrong.nonzero()[0].tolist()
            sample, token = routes.place_of(place)
            raise error(
                f"routes of {name(sample)}, token {token}, MoE layer {layer} "
                + problem.format(values[place, layer].tolist())
            )
    missing = no_route(values)
    partly = missing.any(dim=1) & ~missing.all(dim=1)
    if bool(partly.any()):
        sample, token = routes.place_of(int(partly.nonzero()[0]))
        raise error(
            f"token {token} of {name(sample)} has routes in some layers only; give all or none"
        )


def with_checked_routes(batch: RolloutBatch, shape: tuple[int, int, int]) -> RolloutBatch:
    """The batch with its routes in the one type of the model; shape: (MoE layers, topk, experts).

    Every token has distinct experts in range in every MoE layer, or no route at all. Routes that
    are elsewhere are as they were stored.
    """
    if "rollout_routed_experts" not in batch:
        raise BatchError(
            "--use-rollout-routing-replay needs rollout_routed_experts and the batch has none; "
            "use an engine that reports them, or --use-routing-replay"
        )
    routes = batch.columns["rollout_routed_experts"]
    if isinstance(routes, Stored):
        return batch
    layers, topk, experts = shape
    totals = batch.columns["total_lengths"]
    check_routes(routes, layers=layers, topk=topk, experts=experts, total_lengths=totals)
    one_type = routes.like(routes.values.to(route_dtype(experts)))
    return batch.with_column("rollout_routed_experts", one_type)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


@dataclass
class Microbatch:
    """What one call of a forward step works on: a batch and whether it is padding.

    A padding microbatch has the fields, dtypes and collectives of a real one and contributes
    nothing. The flag is explicit: a real sample whose mask is all zero is not padding.
    """

    batch: RolloutBatch
    is_padding: bool = False

    @classmethod
    def padding_like(cls, batch: RolloutBatch) -> Microbatch:
        """One prompt token and one masked response token, with every field that `batch` has."""
        columns = {name: [_padding(FIELDS[name], values)] for name, values in batch.columns.items()}
        return cls(RolloutBatch(columns), True)


def _padding(field: Field, like: Any) -> Any:
    """The value of `field` for one prompt and one response token, in the dtype of `like`."""
    if field.name == "total_lengths":
        return 2
    if field.name == "response_lengths":
        return 1
    if field.shape == "scalar":
        return int(field.padding) if field.dtype == torch.int64 else float(field.padding)
    if field.shape == "routes":
        layers, topk = like.values.shape[1:]
        if field.name == "rollout_routed_weights":
            return torch.full((2, layers, topk), 1 / topk, dtype=like.values.dtype)
        # Distinct experts: a duplicate would send a token twice to one expert.
        return torch.arange(topk).expand(2, layers, topk).contiguous().to(like.values.dtype)
    if field.shape == "kept":
        return torch.zeros(0, dtype=field.dtype)  # the whole vocabulary
    if field.shape == "topk":
        return torch.full((1, *like.values.shape[1:]), field.padding, dtype=field.dtype)
    return torch.full((2 if field.shape == "tokens" else 1,), field.padding, dtype=field.dtype)
