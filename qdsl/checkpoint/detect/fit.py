"""Fits tensors to formats: lists all interpretations of a module's tensors, or the nearest miss.  Does not import torch.

A candidate is a format, a storage, parameters and a shape whose tensors have these names, dtypes and shapes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from qdsl.checkpoint.detect.header_claims import flatten_settings
from qdsl.checkpoint.detect.rules import EXPERTS, EXTENTS, OWN, Reading, content_error, from_tensors, is_block, is_same, readings
from qdsl.checkpoint.detect.tensor_names import WEIGHT
from qdsl.core.shapes import is_unlisted, shared_blocks, slicing_step
from qdsl.core.stored import OF_X, Description, LayoutMismatch, StorageFit, TensorInfo, element_dtype, match_names, storage_fits

CLAIMED = 100                                                    # LayoutMismatch.reached if a tensor itself names the format
EXTENT = 2                                                       # of a length that does not divide an axis
UNKNOWN = -1                                                     # LayoutMismatch.reached if a header names another format
WIDE = {"float16": 2, "bfloat16": 2, "float32": 4}               # bytes per number of types in which bytes may be stored
# Tensors of layers of many formats that do not belong to the weight.
NOT_OF_WEIGHT = ("bias", "input_scale", "output_scale", "input_global_scale", "input_zero_point", *OF_X)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One interpretation of a module's tensors."""

    format: Description
    fit: StorageFit
    experts: int | None

    @property
    def has_scale(self) -> bool:
        """Whether every scale is stored; without scales a weight is a plain cast."""
        return not self.format.missing_scales(self.fit.storage, self.fit.params, self.fit.tensors)

    @property
    def label(self) -> str:
        """Format, storage and parameters, for messages."""
        return f"{self.format.name}.{self.fit.storage}" + "".join(f" {key}={value}" for key, value in self.fit.params.items())

    def is_value(self, name: str, value: object) -> bool:
        """Whether a parameter has this value."""
        own = self.fit.params[name]
        return type(value) is type(own) and value == own

    def means(self, name: str, value: object) -> bool:
        """Whether a parameter is equivalent to this value: the block of a whole axis may be its size, or -1."""
        if name not in self.format.sizes or type(value) is not int:
            return self.is_value(name, value)
        wanted, own = (self.format.sizes_for(params, self.fit.shape)[name] for params in ({name: value}, self.fit.params))
        return wanted == own


@dataclass(frozen=True, slots=True)
class Evidence:
    """A module's tensors and their contents, as input of detection.

    entries: dtypes and shapes by the last parts of names.  contents: of small tensors.  claims: the header's metadata of the
    weight, or None.  shape: the caller's (N, K) or (E, N, K), or ().  lengths: settings of the weight with block lengths that
    specs do not list, by format.
    """

    entries: Mapping[str, TensorInfo]
    contents: Mapping[str, Any]
    claims: Mapping[str, Any] | None
    shape: tuple[int, ...] = ()
    lengths: Mapping[str, Sequence[Reading]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """The parts that decide which formats fit, as a key for caching: most layers of a checkpoint share it."""
        contents = ((leaf, repr(_without_numbers(content))) for leaf, content in self.contents.items())
        return (*sorted(self.entries.items(), key=lambda item: item[0]), *contents, repr(self.claims), self.shape,
                repr(self.lengths))


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason why tensors do not fit a format, and how close the fit is.

    is_claimed: small tensors name the format.  nearness: how many tensors have names and dtypes of one storage.
    """

    is_claimed: bool
    nearness: int
    reason: LayoutMismatch

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """The order of misses: the user reads the reason of the nearest."""
        return self.is_claimed, self.nearness > 0, self.reason.reached, self.nearness


def candidates(formats: Sequence[Description], evidence: Evidence) -> list[Candidate]:
    """All candidates among the formats.  If small tensors match a format's rule, only such formats are tried.

    A scale per row may be a row itself, [1, N]; if N is K, too, it could as well be one per column, and fits nothing.
    """
    every = _candidates(formats, evidence)
    upright = {} if every else {leaf: entry for leaf, entry in evidence.entries.items() if entry.shape[-2:-1] == (1,)
                                and any(leaf in format.columns for format in formats)}
    if upright:
        columns = {leaf: replace(entry, shape=(*entry.shape[:-2], entry.shape[-1], 1)) for leaf, entry in upright.items()}
        every = [candidate for candidate in _candidates(formats, replace(evidence, entries={**evidence.entries, **columns}))
                 if candidate.fit.shape[0] != candidate.fit.shape[1]]
    keys = evidence.contents.keys()
    return [candidate for candidate in every if keys & candidate.format.detect.get("tensors", {}).keys()] or every


def _candidates(formats: Sequence[Description], evidence: Evidence) -> list[Candidate]:
    every: list[Candidate] = []
    for format in formats:
        with suppress(LayoutMismatch):
            every += candidates_of(format, evidence)
    return every


def candidates_of(format: Description, evidence: Evidence, storage: str | None = None) -> list[Candidate]:
    """All candidates of one format, or of one storage, that agree with the claims.  Raises LayoutMismatch."""
    shape, experts, params, numbers = _from_contents(format, evidence.contents)
    if shape is None and len(evidence.shape) in (2, 3):
        shape, experts = (evidence.shape[-2], evidence.shape[-1]), evidence.shape[0] if len(evidence.shape) == 3 else None
    entries = {**dict.fromkeys(numbers, TensorInfo("float32", ())), **evidence.entries}
    if any(isinstance(content, Mapping) for content in evidence.contents.values()):
        entries = {leaf: _as_bytes(entry) if leaf in format.in_bytes else entry for leaf, entry in entries.items()}
    if shape is not None and experts is not None:
        return _through_experts(format, entries, shape, experts, params)
    if evidence.claims is None:
        return _with_unlisted(format, entries, shape, storage, params, evidence.lengths.get(format.name, ()))
    return _candidates_of_claims(format, entries, shape, params, evidence.claims)


def _candidates_of_claims(format: Description, entries: Mapping[str, TensorInfo], shape: tuple[int, int] | None,
                          params: Mapping[str, int | str], claims: Mapping[str, Any]) -> list[Candidate]:
    """The candidates of a format that agree with a header's claims.  Raises LayoutMismatch."""
    allowed: list[Candidate] = []
    nearest = LayoutMismatch(UNKNOWN, f"{format.name}: the header speaks of something else")
    for reading in readings(format.detect.get("header"), [*format.params, *EXTENTS], claims, stacks=True):
        extents = [reading.values.get(dim) for dim in EXTENTS]
        whole = [extent for extent in extents if type(extent) is int and extent >= 0]
        try:
            whole_shape = (whole[0], whole[1]) if len(whole) == 2 else shape
            fit = _all_candidates(format, entries, whole_shape, reading.storage or None, params)
        except LayoutMismatch as miss:
            nearest = max(nearest, miss, key=lambda mismatch: mismatch.reached)
            continue
        fit += _of_unlisted(format, entries, whole_shape, params, reading, fit)
        allowed += [candidate for candidate in fit if _agrees(candidate, reading)]
        other = LayoutMismatch(CLAIMED, f"the header says {claims_text(claims)}; the tensors fit {fit[0].label}")
        nearest = max(nearest, other, key=lambda mismatch: mismatch.reached)
    if not allowed:
        raise nearest
    return allowed


def _agrees(candidate: Candidate, reading: Reading) -> bool:
    """Whether N, K, parameters and the number of experts agree with a header; a block is of one of them, or of all."""
    for key, front in reading.fronts.items():
        allowed = (candidate.experts, 1) if is_block(key) else (candidate.experts,)
        if type(front) is not type(candidate.experts) or front not in allowed:
            return False
    (n, k), params = candidate.fit.shape, candidate.fit.params
    own: Mapping[str, object] = {**params, **candidate.format.sizes_for(params, (n, k)), "N": n, "K": k}
    return all(type(value) is type(own[name]) and value == own[name] for name, value in reading.values.items())


def claims_text(claims: Mapping[str, Any]) -> str:
    """A header's claims about a weight, in a few words."""
    plain = {key: value for key, value in flatten_settings(claims).items() if isinstance(value, int | str)
             or (isinstance(value, list) and all(isinstance(number, int) for number in value))}
    return ", ".join(f"{key} = {str(value)[:60]}" for key, value in list(plain.items())[:8])


def nearest_miss(formats: Sequence[Description], evidence: Evidence, configs: Sequence[Mapping[str, Any]], is_foreign: bool,
                 reason: str) -> LayoutMismatch:
    """Why tensors fit no format: the reason of the nearest format that settings, a header or the tensors' names refer to.

    configs: settings of the checkpoint and of groups; if they name storages of a format, it has no others.  is_foreign: whether a
    producer other than qdsl wrote them.  reason: the answer if no format is near.
    """
    misses: list[Miss] = []
    for format in formats:
        claims = [(settings, reading) for settings in configs
                  for reading in readings(format.detect.get("config"), list(format.params), settings)]
        storages = {reading.storage or None for _, reading in claims}
        foreign = [reading for settings, reading in claims if not is_same(settings.get("quant_method"), OWN)]
        if evidence.claims is None and not storages and (is_foreign or not _has_names(format, evidence.entries)):
            continue
        tensor_rules = format.detect.get("tensors", {})
        is_claimed = bool(evidence.contents) and evidence.contents.keys() <= tensor_rules.keys() and \
            from_tensors(format, evidence.contents) is not None
        for storage in storages or [None]:
            try:
                candidates_of(format, evidence, storage)
            except LayoutMismatch as miss:
                misses.append(Miss(is_claimed, _count_matching(format, evidence.entries), miss))
        misses += [Miss(is_claimed, _count_matching(format, evidence.entries), miss)
                   for miss in _stated_misses(format, evidence, foreign)]
    nearest = max(misses, key=lambda miss: miss.rank, default=Miss(False, 0, LayoutMismatch(UNKNOWN, reason)))
    as_near = dict.fromkeys(str(miss.reason) for miss in misses if miss.rank == nearest.rank)
    return LayoutMismatch(nearest.reason.reached, "; ".join(as_near)) if is_foreign and len(as_near) == 2 else nearest.reason


def _stated_misses(format: Description, evidence: Evidence, foreign: Sequence[Reading]) -> Iterator[LayoutMismatch]:
    """Why tensors that fit a format do not fit it with the parameters that settings state."""
    shape = None if len(evidence.shape) != 2 else (evidence.shape[0], evidence.shape[1])
    for reading in foreign:
        params = {name: value for name, value in reading.values.items() if value in format.params.get(name, ())}
        if params:
            try:
                _all_candidates(format, evidence.entries, shape, reading.storage or None, params)
            except LayoutMismatch as miss:
                yield miss


def _all_candidates(format: Description, entries: Mapping[str, TensorInfo], shape: tuple[int, int] | None, storage: str | None,
                    params: Mapping[str, int | str]) -> list[Candidate]:
    """All candidates of a format, as one weight or as experts.  Raises LayoutMismatch."""
    for experts in _expert_counts(format, entries):
        with suppress(LayoutMismatch):
            return [Candidate(format, fit, experts) for fit in storage_fits(format, {
                leaf: _entry_of_expert(entry, experts) for leaf, entry in entries.items()}, shape, storage, params)]
    return [Candidate(format, fit, None) for fit in storage_fits(format, entries, shape, storage, params)]


def _with_unlisted(format: Description, entries: Mapping[str, TensorInfo], shape: tuple[int, int] | None, storage: str | None,
                   params: Mapping[str, int | str], lengths: Sequence[Reading]) -> list[Candidate]:
    """All candidates of a format, also with block lengths that only settings state.  Raises LayoutMismatch."""
    every: list[Candidate] = []
    nearest: LayoutMismatch | None = None
    try:
        every += _all_candidates(format, entries, shape, storage, params)
    except LayoutMismatch as miss:
        nearest = miss
    for reading in lengths:
        try:
            every += _of_unlisted(format, entries, shape, params, reading, every)
        except LayoutMismatch as miss:                           # its reason names the length that the settings state
            nearest = miss if nearest is None or miss.reached >= EXTENT else nearest
    if nearest is not None and not every:
        raise nearest
    return every


def _of_unlisted(format: Description, entries: Mapping[str, TensorInfo], shape: tuple[int, int] | None,
                 params: Mapping[str, int | str], reading: Reading, others: Sequence[Candidate]) -> list[Candidate]:
    """Candidates with a reading's block lengths that are not listed, unless others mean the same.  Raises LayoutMismatch."""
    lengths = {name: value for name, value in reading.values.items() if is_unlisted(format.params.get(name, ()), value)}
    if not lengths or any(all(other.means(name, value) for name, value in lengths.items()) for other in others):
        return []
    return _all_candidates(format, entries, shape, reading.storage or None, {**params, **lengths})


def _entry_of_expert(entry: TensorInfo, experts: int) -> TensorInfo:
    """A tensor of one expert; a tensor without the experts' axis belongs to all."""
    if entry.shape[:1] != (experts,):
        return entry
    size = len(entry.values) // experts
    is_repeated = entry.values == entry.values[:size] * experts
    return replace(entry, shape=entry.shape[1:], values=entry.values[:size] if is_repeated else entry.values)


def _from_contents(format: Description, contents: Mapping[str, Any],
                   ) -> tuple[tuple[int, int] | None, int | None, dict[str, int | str], list[str]]:
    """(N, K), E, parameters, and the one-number tensors that small tensors state; None, or absent, if they do not.

    Raises LayoutMismatch.
    """
    values = from_tensors(format, contents)
    if values is None:
        raise LayoutMismatch(CLAIMED, f"{format.name}: {content_error(format, contents)}")
    for name, value in values.items():
        if not _is_possible(format, name, value):
            raise LayoutMismatch(CLAIMED + 1, f"{format.name}: {', '.join(contents)} says {name} = {value}")
    shape = (values["N"], values["K"]) if {*EXTENTS} <= values.keys() else None
    return (shape, values.get(EXPERTS), {name: value for name, value in values.items() if name in format.params},
            [name for name in values if name in format.singles])


def _is_possible(format: Description, name: str, value: object) -> bool:
    """Whether N, K, E, a parameter or a tensor of one number may have this value."""
    if name in format.singles:
        return _is_float32(value)
    if name in (EXPERTS, *EXTENTS):
        return isinstance(value, int) and type(value) is int and value >= (1 if name == EXPERTS else 0)
    return type(value) in (int, str) and value in format.params[name]


def _is_float32(value: object) -> bool:
    """Whether a value is a number in float32's range."""
    try:
        return type(value) in (int, float) and len(struct.pack("<f", value)) == 4
    except (OverflowError, struct.error):
        return False


def _as_bytes(entry: TensorInfo) -> TensorInfo:
    """A tensor as bytes if the file stores them as larger numbers; complete settings make its dtype irrelevant."""
    size = WIDE.get(entry.dtype)
    return entry if size is None else TensorInfo("uint8", (size * math.prod(entry.shape),))


def _without_numbers(content: Any) -> Any:
    """JSON content without numbers that do not affect the fit."""
    if not isinstance(content, Mapping):
        return content
    return {key: float if isinstance(value, float) else value for key, value in content.items()}


def _count_matching(format: Description, entries: Mapping[str, TensorInfo]) -> int:
    """How many tensors have a name and dtype of one of the format's storages."""
    return max(sum(entries[key].dtype in [element_dtype(str(kind)) for kind in format.params.get(layout[name].dtype,
                                                                                              (layout[name].dtype,))]
                   for name, key in match_names(layout, entries).items()) for layout in format.layouts)


def _has_names(format: Description, entries: Mapping[str, TensorInfo]) -> bool:
    """Whether all tensors, not just 'weight', have names of a storage or of tensors that any layer may have."""
    rules = format.detect.get("tensors", {})
    names = {leaf for leaf in entries if leaf not in NOT_OF_WEIGHT and leaf not in rules}
    return not rules.keys().isdisjoint(entries) or (
        not names <= {WEIGHT} and any(names <= {*match_names(layout, entries).values()} for layout in format.layouts))


def _through_experts(format: Description, entries: Mapping[str, TensorInfo], shape: tuple[int, int], experts: int,
                     params: Mapping[str, int | str]) -> list[Candidate]:
    """All candidates for tensors in which experts are concatenated.

    Raises LayoutMismatch, also if a block has weights of two experts.
    """
    one = {leaf: replace(entry, shape=(entry.shape[0] // experts, *entry.shape[1:]))
           if entry.shape and entry.shape[0] % experts == 0 else entry for leaf, entry in entries.items()}
    matches = storage_fits(format, one, shape, None, params)
    for fit in matches:
        axes = [axis for stored in format.layout(fit.storage, fit.params).values() for axis in stored.axes]
        step = slicing_step(axes, "N", format.sizes_for(fit.params, shape), shape[1])
        if shape[0] % step:
            raise LayoutMismatch(CLAIMED + 1, f"{format.name}.{fit.storage}: experts of {shape[0]} rows {shared_blocks(step)}")
    return [Candidate(format, fit, experts) for fit in matches]


def _expert_counts(format: Description, entries: Mapping[str, TensorInfo]) -> list[int]:
    """The possible numbers of experts: the first extent of all tensors of a storage, if they have an additional axis."""
    counts: list[int] = []
    for layout in format.layouts:
        keys = match_names(layout, entries)
        shapes = [(entries[key].shape, len(layout[name].axes)) for name, key in keys.items()
                  if any(axis.dim != "1" for axis in layout[name].axes)]
        firsts = {shape[:1] if len(shape) > axes and all(extent == 1 for extent in shape[1 + axes:]) else ()
                  for shape, axes in shapes}
        if len(firsts) == 1 and any(len(shape) == 1 + axes for shape, axes in shapes) and all(
                stored.optional or name in keys for name, stored in layout.items()):
            counts += list(next(iter(firsts)))
    return list(dict.fromkeys(counts))
