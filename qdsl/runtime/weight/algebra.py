"""Rows, slices and joins of packed weights whose tensors cannot be sliced directly: fields are gathered and packed again.

The result is in the source's storage if that can hold it; else in smaller blocks, if a parameter of the format lists them; else
in storage `planar`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from qdsl.core.borders import UNITS, border_step, piece_step, slice_targets, spans_all
from qdsl.core.shapes import Axis
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.weight import branch_pieces, stream_kernels
from qdsl.runtime.weight.arrays import common_tensor
from qdsl.runtime.weight.defaults import default_field
from qdsl.runtime.weight.errors import FormatError
from qdsl.runtime.weight.gather import GatherSource, gather_fields, group_index, group_size, is_scattered, plan_gather
from qdsl.runtime.weight.packed import PackedWeight

# -- rows and pieces --------------------------------------------------------------------------------------------------


def gather_rows(packed: PackedWeight, index: Tensor | Sequence[int]) -> PackedWeight:
    """The weight of these rows, gathered from its tensors if rows are stored separately, else from its fields."""
    if not isinstance(index, Tensor):
        index = torch.tensor(list(index), dtype=torch.int64, device=packed.device)
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise FormatError(f"rows are int64 or int32 [M], not {str(index.dtype)[6:]} {list(index.shape)}")
    if packed.has_branch:
        return branch_pieces.rows_with_branches(packed, packed.base.rows(index), index)
    if not packed.has_separate_rows:
        return _repack_rows(packed, index)
    tensors = {}
    for name, tensor in packed.tensors.items():
        places = [place for place, axis in enumerate(packed.layout.tensors[name].axes) if axis.dim == "N"]
        tensors[name] = tensor.index_select(places[0], index) if places else tensor
    return packed.derive(tensors, (index.shape[0], packed.shape[1]))


def _repack_rows(packed: PackedWeight, index: Tensor) -> PackedWeight:
    """Rows of a weight by its fields.  Raises FormatError if rows share a block."""
    n, k = packed.shape
    any_rows = torch.arange(index.numel(), device="cpu") % 2 * max(0, n - 1)     # for an index on meta: no two share a block
    source = GatherSource(packed, any_rows if index.is_meta else index.cpu().long(), 0, k)
    if source.rows.numel() and not 0 <= int(source.rows.min()) <= int(source.rows.max()) < n:
        raise IndexError(f"rows {int(source.rows.min())} to {int(source.rows.max())} of a weight that has {n}")
    try:
        return _repack_source(source)
    except FormatError as error:
        step = shard_step(packed, "N")
        blocks = f"take whole blocks of {step} rows, or " if step < n else ""
        raise FormatError(f"{_name(packed)} does not have these rows as a weight: {error}; {blocks}take rows of the decoded "
                          "weight (dequantize)") from None


def cut(packed: PackedWeight, dim: str, start: int, stop: int) -> PackedWeight:
    """Rows or columns [start, stop) as views of the tensors.  Raises FormatError with the nearest legal borders."""
    if packed.has_branch:
        return branch_pieces.cut_with_branches(packed, packed.base.cut(dim, start, stop), dim, start, stop)
    if why := packed.why_not_cut(dim, start, stop):
        raise FormatError(_cut_error_text(packed, dim, start, stop, why, packed.step(dim)))
    if (start, stop) == (0, packed.shape[dim == "K"]):
        return packed
    shape = (stop - start, packed.shape[1]) if dim == "N" else (packed.shape[0], stop - start)
    tensors, indices = {}, packed.indices if dim == "K" else []
    for name, tensor in packed.tensors.items():
        for place, axis in enumerate(packed.layout.tensors[name].axes):
            if axis.dim in (dim, "N*K"):
                tensor = tensor.narrow(place, *_axis_range(packed, axis, dim, start, stop))
        if name in indices:
            tensor = tensor - tensor[:1]                         # groups, or columns, count from 0 again
        tensors[name] = tensor
    return packed.derive(tensors, shape)


def _axis_range(packed: PackedWeight, axis: Axis, dim: str, start: int, stop: int) -> tuple[int, int]:
    """The first element, and number of elements, of an axis for rows or columns [start, stop)."""
    if axis.dim == "N*K":
        start, stop = (start * packed.shape[1], stop * packed.shape[1]) if dim == "N" else (0, 0)
    first = axis.elements(start, packed.sizes)
    return first, axis.elements(stop, packed.sizes) - first


@without_autocast
def shard(packed: PackedWeight, dim: str, start: int, stop: int) -> PackedWeight:
    """Rows or columns [start, stop), cut if possible, else by the weight's fields.  Raises FormatError with the nearest borders.

    Prefers blocks that end at both borders, so that slices of a weight are alike, to blocks that extend beyond.
    """
    if packed.has_branch:
        return branch_pieces.cut_with_branches(packed, packed.base.shard(dim, start, stop), dim, start, stop)
    if not packed.why_not_cut(dim, start, stop):
        return packed.cut(dim, start, stop)
    band = stream_kernels.row_band(packed, start, stop) if dim == "N" else None
    if band is not None:
        return band
    if dim == "N" and packed.layout.streams and packed.device.type == "cpu":
        decoded = packed.decode_rows(torch.arange(start, stop, device="cpu"))  # rows of other ranks are not decoded
        if decoded is not None:
            return _repack_source(GatherSource.whole(decoded))
    source = GatherSource.whole(packed)
    rows, first, last = (source.rows[start:stop], 0, source.stop) if dim == "N" else (source.rows, start, stop)
    source = GatherSource(packed, rows, first, last)
    borders = [border for border in (start, stop) if border != packed.shape[dim == "K"]]
    try:
        return _repack_source(source, lambda sizes: _check_blocks_end(packed, dim, borders, sizes))
    except FormatError:
        pass
    try:
        return _repack_source(source)
    except FormatError as error:
        raise FormatError(_cut_error_text(packed, dim, start, stop, str(error), shard_step(packed, dim))) from None


def _repack_source(source: GatherSource, check: Callable[[Mapping[str, int]], None] = lambda sizes: None) -> PackedWeight:
    """The weight of a source's rows and columns, packed again in the first storage and parameters that can hold it.

    check: raises FormatError for size parameters to skip.  Raises FormatError if none is left.
    """
    packed, fields = source.packed, dict[str, Tensor]()

    def make(storage: str, params: dict[str, int | str]) -> PackedWeight:
        sizes = packed.format.sizes(params, source.shape)
        check(sizes)
        gather = plan_gather(source, sizes)
        template = _template(packed, storage, params, source.shape)
        if packed.device.type == "meta":
            return template
        fields.update(fields or packed.format.unpack(packed))
        return _with_notes_and_names(packed.format.pack(gather_fields(source, sizes, gather, fields), storage, **params), packed)

    return _first_allowed(packed, make)


# -- borders ----------------------------------------------------------------------------------------------------------


def shard_step(packed: PackedWeight, dim: str) -> int:
    """The smallest step of rows or columns at whose multiples `shard` works; all of them if only the whole weight works."""
    return min(_piece_step(packed, dim, storage, params) for storage, params in _targets(packed))


def _piece_step(packed: PackedWeight, dim: str, storage: str, params: Mapping[str, int | str]) -> int:
    """The same for one storage and its parameters."""
    n, k = packed.shape
    whole = max(1, n if dim == "N" else k)
    if (dim == "K" or storage != packed.storage) and group_index(packed) is not None:
        return whole                                             # other storages may not support act-order
    step = piece_step(packed.format.description, packed.params, packed.shape, dim, storage, params)
    try:
        for size in {step, whole % step or step}:
            _template(packed, storage, params, (size, k) if dim == "N" else (n, size))
    except FormatError:
        return whole
    return step


def _check_blocks_end(packed: PackedWeight, dim: str, borders: Sequence[int], sizes: Mapping[str, int]) -> None:
    """Raises FormatError for a border inside a block of a divided axis."""
    for name, kind in packed.variant.fields.items():
        for axis in kind.axes:
            step = border_step(axis, sizes, dim, packed.shape)
            if any(border % step for border in borders) and (axis.extent(*packed.shape, packed.sizes) or 0) > 1:
                raise FormatError(f"a border is inside a block of '{name}'")


def _name(packed: PackedWeight) -> str:
    return f"{packed.format.name}.{packed.storage} {list(packed.shape)}"


def _cut_error_text(packed: PackedWeight, dim: str, start: int, stop: int, why: str, step: int) -> str:
    """The error for an illegal slice: the reason, and the nearest legal borders, multiples of `step`."""
    whole = packed.shape[dim == "K"]
    near = [f"the nearest borders to {border} are {border // step * step} and {min(whole, -(-border // step) * step)}"
            for border in dict.fromkeys((start, stop)) if border % step and border != whole]
    return "; ".join((f"{_name(packed)} cannot be cut along {dim} from {start} to {stop}: {why}", *near))


# -- storages and parameters of a result ------------------------------------------------------------------------------


def _targets(packed: PackedWeight) -> Iterator[tuple[str, dict[str, int | str]]]:
    """The storages and parameters to try for a result: the source's own, then smaller blocks, then storage `planar`."""
    return slice_targets(packed.format.description, packed.storage, packed.params, packed.shape)


def _first_allowed(packed: PackedWeight, make: Callable[[str, dict[str, int | str]], PackedWeight]) -> PackedWeight:
    """The result of `make` for the first target that it does not refuse.

    If it refuses all, raises its FormatError for the smallest blocks in the weight's own storage.
    """
    refused: FormatError | None = None
    for storage, params in _targets(packed):
        try:
            return make(storage, params)
        except FormatError as error:
            refused = error if refused is None or storage == packed.storage else refused
    assert refused is not None                                   # the weight's own storage and parameters are a target
    raise refused


def _template(packed: PackedWeight, storage: str, params: Mapping[str, int | str], shape: tuple[int, int]) -> PackedWeight:
    """A weight on meta with another shape, with optional tensors for the same fields.  Raises FormatError."""
    layout = packed.format.variant(params).storages[storage]
    missing = {stored.optional for name, stored in packed.layout.tensors.items() if name not in packed.tensors}
    fields = packed.variant.fields.keys() - missing - {*packed.layout.where} | {*layout.always}
    optional = [name for name, stored in layout.tensors.items() if stored.optional
                and (stored.optional in fields or (name == layout.order and name in packed.tensors))]
    template = packed.format.empty(shape, storage, "meta", optional, **params)
    if why := layout.why_unsupported_shape(shape, template.sizes):
        raise FormatError(f"{packed.format.name}.{storage}: {why}")
    return _with_notes_and_names(template, packed)


def _with_notes_and_names(result: PackedWeight, packed: PackedWeight) -> PackedWeight:
    """The result with the source's notes, and with its tensor names if the storage is the same."""
    result.notes = packed.notes
    result.names = dict(packed.names) if result.storage == packed.storage else {}
    return result


# -- joins ------------------------------------------------------------------------------------------------------------


@without_autocast
def join(parts: Sequence[PackedWeight], dim: str) -> PackedWeight:
    """The weight whose rows or columns are those of the parts, in order.  Raises FormatError."""
    _check_joinable(parts, dim)
    if len(parts) == 1:
        return parts[0]
    if any(part.has_branch for part in parts):
        return branch_pieces.join_with_branches(parts, join([part.base for part in parts], dim), dim)
    joint = _WeightJoin(parts, dim)
    joined = joint.concatenate_tensors()
    if joined is None:
        try:
            joined = _first_allowed(parts[0], joint.repack)
        except FormatError as error:
            raise FormatError(f"these weights of {parts[0].format.name}.{parts[0].storage} cannot be joined along {dim}: {error}"
                              ) from None
    joined.notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return joined


def concatenate_rows(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """The rows of all parts as one weight, if tensors can be concatenated; None if they must be packed again.

    Slicing it at the borders of the parts gives the same bytes back.  It is a copy, except of tensors that all parts share.
    """
    if any(part.has_branch or part.layout.streams or part.tensors.keys() != parts[0].tensors.keys() for part in parts):
        return None
    try:
        _check_joinable(parts, "N")
        return _WeightJoin(parts, "N").concatenate_tensors() if len(parts) > 1 else parts[0]
    except FormatError:
        return None


def _check_joinable(parts: Sequence[PackedWeight], dim: str) -> None:
    """Raises FormatError unless the parts have the same format, storage, parameters, device and other extent."""
    other = "K" if dim == "N" else "N"

    def traits(part: PackedWeight) -> dict[str, object]:
        params = {f"parameter {name}": value for name, value in part.params.items()}
        return {"format": part.format.name, "storage": part.storage, **params, UNITS[other]: part.shape[other == "K"],
                "device": part.device}

    first = traits(parts[0])
    for number, part in enumerate(parts):
        for name, value in traits(part).items():
            if part.format is not parts[0].format and part.format.name == parts[0].format.name:
                raise FormatError(f"part {number} is of another format of the name {part.format.name} than part 0")
            if first.get(name) != value:
                raise FormatError(f"parts must be alike: {name} of part {number} is {value}, of part 0 {first.get(name)}; "
                                  "convert or move them first")


@dataclass
class _WeightJoin:
    """Weights to join along a dim.  fields: those of every part, computed at first use."""

    parts: Sequence[PackedWeight]
    dim: str
    fields: list[dict[str, Tensor]] = field(default_factory=list)

    @cached_property
    def shape(self) -> tuple[int, int]:
        n, k = self.parts[0].shape
        return (self.ends[-1], k) if self.dim == "N" else (n, self.ends[-1])

    @cached_property
    def ends(self) -> list[int]:
        """For every part, its last row or column plus one."""
        return list(accumulate(part.shape[self.dim == "K"] for part in self.parts))

    @cached_property
    def first_columns(self) -> list[int]:
        """For every part, its first column in the joined weight."""
        return [0, *self.ends[:-1]] if self.dim == "K" else [0] * len(self.parts)

    def concatenate_tensors(self) -> PackedWeight | None:
        """The joined weight, every tensor copied once; None if parts end inside blocks or their shared tensors differ."""
        fullest = max(self.parts, key=lambda part: len(part.tensors))            # a part may lack the index of columns in order
        template = _template(fullest, fullest.storage, fullest.params, self.shape)
        step = template.step(self.dim)
        if template.layout.streams or any(end % step and end != self.ends[-1] for end in self.ends) or \
                any(name not in fullest.tensors for part in self.parts for name in part.tensors):
            return None
        tensors: dict[str, Tensor] = dict(fullest.tensors)
        for name in sorted(tensors, key=self._is_divided):       # shared ones first: if they differ, nothing is copied
            joined = tensors[name] if name == template.layout.shape else self._joined_tensor(name)
            if joined is None:
                return None
            tensors[name] = joined
        in_order = {name for name in tensors if all(name in part.in_order or name not in part.tensors for part in self.parts)}
        result = fullest.derive(tensors, self.shape, frozenset(in_order))
        finite = {part.known_finite for part in self.parts}
        result.known_finite = False if False in finite else None if None in finite else True
        return result

    def _joined_tensor(self, name: str) -> Tensor | None:
        """A tensor of the joined weight; None if parts lack it, or if it is shared and differs."""
        stored, is_order = self.parts[0].layout.tensors[name], name == self.parts[0].layout.order
        if is_order or stored.dtype == "index":
            values = [_index_from_column(part, name, 1 if is_order else group_size(part), start)
                      for part, start in zip(self.parts, self.first_columns, strict=True)]
        else:
            values = [part.tensors[name] for part in self.parts if name in part.tensors]
        if len(values) < len(self.parts):
            return None
        places = [place for place, axis in enumerate(stored.axes) if axis.dim in (self.dim, "N*K")]
        return torch.cat(values, places[0]) if places else common_tensor(values)

    def _is_divided(self, name: str) -> bool:
        """Whether a tensor is divided among the parts, instead of shared."""
        return any(axis.dim in (self.dim, "N*K") for axis in self.parts[0].layout.tensors[name].axes)

    def repack(self, storage: str, params: Mapping[str, int | str]) -> PackedWeight:
        """The joined weight, by the fields of all parts.  Raises FormatError."""
        first = self.parts[0]
        sizes = first.format.sizes(params, self.shape)
        for name, kind in first.variant.fields.items():
            for axis in kind.axes:
                if not spans_all(axis, params):
                    self._check_ends(name, axis, sizes)
        sources = [GatherSource.whole(part) for part in self.parts]
        gathers = [plan_gather(source, sizes) for source in sources]
        template = _template(first, storage, params, self.shape)
        if first.device.type == "meta":
            return template
        self.fields = self.fields or _all_fields(self.parts)
        taken = [gather_fields(source, sizes, gather, fields)
                 for source, gather, fields in zip(sources, gathers, self.fields, strict=True)]
        joined = {name: self._joined_field(name, [fields[name] for fields in taken], sizes, params) for name in taken[0]}
        return _with_notes_and_names(first.format.pack(joined, storage, **params), first)

    def _check_ends(self, name: str, axis: Axis, sizes: Mapping[str, int]) -> None:
        """Raises FormatError if a block of a field would span two parts."""
        if axis.dim == "N*K" and is_scattered(self.parts[0].variant):
            raise FormatError(f"one value of '{name}' is for weights all over the matrix")
        step = border_step(axis, sizes, self.dim, self.parts[0].shape)
        ends_rows = axis.dim == "N*K" and self.dim == "K" and self.shape[0] > 1  # then every row of the last part must, too
        if wrong := [end for end in self.ends if end % step and (ends_rows or end != self.ends[-1])]:
            raise FormatError(f"a part would end at {wrong[0]}, inside a block of '{name}': parts are multiples of {step} "
                              f"{UNITS[self.dim]}")

    def _joined_field(self, name: str, values: list[Tensor], sizes: Mapping[str, int], params: Mapping[str, int | str]) -> Tensor:
        """A field of the joined weight: the parts' fields concatenated, or the one that they share."""
        kind = self.parts[0].variant.fields[name]
        if kind.groups is not None:
            values = [value + start // kind.groups.by(sizes) for value, start in zip(values, self.first_columns, strict=True)]
        for place, axis in enumerate(kind.axes):
            if (axis.dim == self.dim and not spans_all(axis, params)) or (axis.dim == "N*K" and self.dim == "N"):
                return torch.cat(values, place)
            if axis.dim == "N*K":
                return torch.cat([value.view(self.shape[0], -1) for value in values], 1).flatten()   # a flat axis is alone
        shared = common_tensor(values)
        if shared is None:
            raise FormatError(f"all {UNITS[self.dim]} share '{name}', which differs between parts; requantize the parts as one "
                              f"weight, or in a format that has it for single {UNITS[self.dim]} or blocks")
        return shared


def _index_from_column(part: PackedWeight, name: str, unit: int, start: int) -> Tensor:
    """An index (unit: columns of a group) or an order (unit 1) of columns, counted from column `start`."""
    value = part.tensors.get(name)
    if value is None:                                            # columns are in order
        value = torch.arange(part.shape[1], dtype=torch.int32, device=part.device) // unit
    return value + start // unit


def _all_fields(parts: Sequence[PackedWeight]) -> list[dict[str, Tensor]]:
    """The fields of every part, with defaults for fields that only other parts store."""
    def default(part: PackedWeight, name: str) -> Tensor:
        return default_field(part.format.description, part.variant, name, part.shape, part.params, part.device)

    unpacked = [part.format.unpack(part) for part in parts]
    names = {name for fields in unpacked for name in fields}
    return [{name: fields[name] if name in fields else default(part, name) for name in part.variant.fields if name in names}
            for part, fields in zip(parts, unpacked, strict=True)]
