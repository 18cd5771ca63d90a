"""Converts a weight to another storage of its format, exactly.

Tensors whose bits are at digits in both storages are moved word by word (transpose.py), and identical tensors are shared.  Other
tensors are made from the fields, in tiles of rows if they are most of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qdsl.core.numbers import find_number
from qdsl.core.shapes import slicing_step
from qdsl.core.slices import FieldPiece, PlacedPiece
from qdsl.host import progress
from qdsl.runtime.weight import order, tiles, transpose
from qdsl.runtime.weight.arrays import empty
from qdsl.runtime.weight.assemble import dtypes_and_shapes
from qdsl.runtime.weight.defaults import default_field, is_default
from qdsl.runtime.weight.fields import pack, unpack
from qdsl.runtime.weight.layout import Storage
from qdsl.runtime.weight.packed import PackedWeight, shape_tensor


def convert(packed: PackedWeight, storage: str) -> dict[str, Tensor]:
    """The tensors of a weight in another storage.  Raises FormatError if that cannot hold them."""
    other = PackedWeight(packed.format, storage, {}, packed.shape, packed.params)
    tensors = moved_tensors(packed, other) or by_fields(packed, other)
    left = omitted_tensors(packed, other.layout)
    return {name: tensor for name, tensor in tensors.items() if name not in left}


def moved_tensors(packed: PackedWeight, other: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a weight in the storage of `other`, most of them moved word by word; none if they cannot be."""
    index = {name for name, field in packed.variant.fields.items() if field.groups is not None}
    fixed = {*other.layout.where} - {*packed.layout.where} - index             # fields with one value in the other storage
    fixed |= {layout.order for layout in (packed.layout, other.layout) if packed.order is not None and not layout.is_order_plain}
    return {} if fixed else move_by_words(packed, other)


def with_indices(packed: PackedWeight) -> PackedWeight:
    """A weight as files store it: with its index of columns even if they are in order, unless its storage omits that.

    Readers of GPTQ folders allocate `g_idx` and leave it uninitialized if the file has none.
    """
    layout = packed.layout
    index = {name for name, stored in layout.tensors.items() if stored.dtype == "index" and stored.optional not in layout.omits}
    tensors = {**packed.tensors, **default_tensors(packed, index - packed.tensors.keys())}
    return packed.derive({name: tensors[name] for name in packed.described if name in tensors})


def with_scales(packed: PackedWeight) -> PackedWeight:
    """A weight as files store it: with scales that are 1 and summands that are 0, without which it is taken for a plain cast."""
    missing = packed.format.description.missing_scales(packed.storage, packed.params, packed.tensors)
    return packed.derive({**packed.tensors, **default_tensors(packed, missing)}) if missing else packed


def omitted_tensors(packed: PackedWeight, layout: Storage) -> set[str]:
    """The tensors that another storage omits because their fields have only default values."""
    if not layout.omits or packed.order is not None:
        return set()
    left = default_fields(packed, layout.omits)
    return {name for name, stored in layout.tensors.items() if stored.optional in left}


def default_fields(packed: PackedWeight, names: Collection[str]) -> set[str]:
    """The fields, among `names`, that have only default values."""
    fields = unpack_needed_fields(packed, lambda stored_fields: stored_fields.isdisjoint(names))
    return {name for name in names if name not in fields or is_default(packed.variant, name, fields[name], packed.sizes)}


def unpack_needed_fields(packed: PackedWeight, may_skip: Callable[[set[str]], bool]) -> dict[str, Tensor]:
    """The fields of a weight.  Tensors are read as meta, and give meta fields, if may_skip(their fields) is true."""
    operands: list[Tensor | None] = []
    for name in packed.layout.coded:
        tensor, stored_fields = packed.tensors.get(name), packed.layout.tensors[name].fields
        operands.append(tensor.to("meta") if tensor is not None and stored_fields and may_skip(stored_fields) else tensor)
    return packed.layout.fields_of(operands, packed.extents)


def default_tensors(weight: PackedWeight, names: Collection[str]) -> dict[str, Tensor]:
    """The optional tensors that a weight lacks, as their default values would be stored."""
    if not names:
        return {}
    fields: dict[str, Tensor] = unpack_needed_fields(weight, lambda stored_fields: True)  # meta fields, for their shapes
    for name in names:
        own = str(weight.layout.tensors[name].optional)
        fields[own] = default_field(weight.format.description, weight.variant, own, weight.shape, weight.params, weight.device)
    stored = [name for name in weight.variant.fields if name not in weight.layout.where]
    tensors = weight.layout.tensors_of({name: fields.get(name) for name in stored}, weight.extents)
    return {name: tensors[name].contiguous() for name in names}


# -- by words ---------------------------------------------------------------------------------------------------------


def move_by_words(packed: PackedWeight, other: PackedWeight, changed: ChangedFields | None = None) -> dict[str, Tensor]:
    """The tensors for the storage of `other`, most of them moved word by word; none if moves are not possible.

    changed: if `other` has another format, the conversion of fields that do not keep their bits.
    """
    ordered = _column_orders(packed, other)
    if ordered is None or not math.prod(packed.shape) or packed.layout.streams or other.layout.streams:
        return {}                                                # entropy-coded bits have no fixed place
    moved, columns = ordered
    change = _StorageChange(packed, other, dtypes_and_shapes(other), columns, changed)
    if 2 * change.unpacked_bytes > packed.nbytes:
        return {}
    for name in change.wanted:
        if name not in moved and (tensor := change.tensor(name)) is not None:
            moved[name] = tensor
    left = change.missing_tensors(moved)
    if left and (change.moves_columns(left) or change.size(left) > sum(tensor.nbytes for tensor in moved.values())):
        return {}
    moved.update(change.remaining_tensors(moved) if left else {})
    if any(tensor.is_meta for tensor in moved.values()) and packed.device.type != "meta":
        return {}                                                # tensors whose bits are not at digits may need moved fields
    return _with_shape({name: moved[name] for name in other.layout.tensors if name in moved}, other)


def _with_shape(tensors: dict[str, Tensor], other: PackedWeight) -> dict[str, Tensor]:
    """Add the tensor that stores the shape, if the storage has one."""
    device = next(iter(tensors.values())).device
    return {**tensors, other.layout.shape: shape_tensor(other.shape, device)} if other.layout.shape else tensors


def _column_orders(packed: PackedWeight, other: PackedWeight) -> tuple[dict[str, Tensor], Tensor | None] | None:
    """The tensors that give the order of columns, and the stored place of each column if columns move.

    None if the other storage needs columns in order and these are not.
    """
    into = [name for name, stored in other.layout.tensors.items() if stored.dtype == "index"]
    group = next((field.groups.by(packed.sizes) for field in packed.variant.fields.values() if field.groups is not None), 1)
    if packed.order is not None:
        if other.layout.order:
            return {other.layout.order: packed.order}, None
        return ({into[0]: order.index_of(packed.order, group)}, order.inverse_order(packed.order)) if into else None
    if into or not packed.moved_indices:
        return {}, None
    index = packed.tensors[packed.moved_indices[0]]
    if not other.layout.order or order.why_uneven_groups(index, group):
        return None
    by_group = order.by_groups(index)
    return {other.layout.order: by_group}, by_group.long()


@dataclass(frozen=True, slots=True)
class _PieceMove:
    """A piece of `width` bits of a stored tensor, and its destination.  by: the tensor's name; moves: its columns move too."""

    by: str
    source: PlacedPiece
    result: PlacedPiece
    width: int
    moves: bool

    @property
    def plan(self) -> transpose.MovePlan:
        plan = transpose.plan_move(self.source, self.result, self.width)
        assert plan is not None
        return plan


@dataclass
class ChangedFields:
    """Converts fields of one format to another: `kept` keep their bits; `all` returns all fields, kept ones included."""

    kept: Collection[str]
    all: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass
class _StorageChange:
    """A change of storage to one with the tensors `wanted`.  columns: the stored place of every column, if columns move."""

    packed: PackedWeight
    other: PackedWeight
    wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    columns: Tensor | None
    changed: ChangedFields | None

    @cached_property
    def source_pieces(self) -> dict[str, tuple[FieldPiece, ...]]:
        """The pieces of the source's tensors; none for tensors whose bits are not at digits."""
        return {name: self.packed.layout.tensors[name].slices for name in self.packed.tensors
                if name not in (self.packed.layout.order, self.packed.layout.shape)}

    @property
    def unpacked_bytes(self) -> int:
        """The bytes of the weight's tensors with pieces that no tensor of the result has."""
        kept = {piece.key for name in self.wanted for piece in self.other.layout.tensors[name].slices}
        return sum(self.packed.tensors[name].nbytes for name, pieces in self.source_pieces.items()
                   if any(piece.key not in kept and piece.field not in self.other.layout.where for piece in pieces))

    def tensor(self, name: str) -> Tensor | None:
        """A tensor of the result; None if moves of words cannot make it."""
        stored, (dtype, shape) = self.other.layout.tensors[name], self.wanted[name]
        moves = [self._move(piece, name) for piece in stored.slices]
        moved = [move for move in moves if move is not None]
        if not moved or len(moved) < len(moves) or (len(moved) > 1 and not all(_is_whole(move.plan) for move in moved)):
            return None
        one = moved[0]
        before = self.packed.tensors[one.by]
        adds = self.packed.layout.tensors[one.by].adds
        if len(moved) == 1 and one.source == one.result and not one.moves and adds == stored.adds \
                and (before.dtype, tuple(before.shape)) == (dtype, shape) and before.is_contiguous():
            return before
        filled = sum(move.plan.filled for move in moved) == 8 * dtype.itemsize * math.prod(shape)
        filled_tensor = empty(shape, dtype, before.device)
        if not filled:
            filled_tensor.view(-1).view(torch.uint8).zero_()       # of one number, too
        if not all(self._fill_by_move(filled_tensor, move) for move in moved):
            return None
        return filled_tensor.add_(stored.adds) if stored.adds else filled_tensor

    def _move(self, piece: FieldPiece, name: str) -> _PieceMove | None:
        sources = ((name, source) for name, stored_pieces in self.source_pieces.items() for source in stored_pieces)
        by, before = next(((name, source) for name, source in sources if source.key == piece.key), ("", piece))
        if not by or before.further or piece.further or (self.changed is not None and piece.field not in self.changed.kept):
            return None
        field = self.packed.variant.fields[piece.field]
        kind = find_number(str(self.packed.params.get(field.type, field.type)))
        width = piece.width or (kind.bits if kind is not None else 32)
        source, (dtype, shape) = self.packed.placed(by, before), self.wanted[name]
        result = self.other.layout.tensors[name].placed(piece, shape, 8 * dtype.itemsize, field.axes, self.packed.shape,
                                                        self.packed.sizes)
        if source is None or result is None or transpose.plan_move(source, result, width) is None:
            return None
        moves = self.columns is not None and any(axis.text == "K" for axis in field.axes)
        return _PieceMove(by, source, result, width, moves)

    def _fill_by_move(self, into: Tensor, move: _PieceMove) -> bool:
        tensor = self.packed.tensors[move.by].contiguous()
        adds = self.packed.layout.tensors[move.by].adds
        tensor = tensor - adds if adds else tensor
        share = math.prod(self.packed.shape) * into.nbytes / max(1, self.size(list(self.wanted)))
        if move.moves and self.columns is not None:
            with progress.step_share(share, 2 * tensor.nbytes):        # there and back
                return transpose.gather_columns(move.source, move.result, move.width, self.columns, tensor, into)
        with progress.step_share(share, tensor.nbytes):
            transpose.move_bits(move.plan, tensor, into)
        return True

    # -- what is left -------------------------------------------------------------------------------------------------

    def missing_tensors(self, moved: Mapping[str, Tensor]) -> list[str]:
        """Tensors to make from fields: the required ones, and optional ones whose fields exist."""
        used = {field for name in moved for field in self.other.layout.tensors[name].fields}
        open_ = any(not stored_pieces or not {piece.field for piece in stored_pieces} <= used | set(self.other.layout.where)
                    for stored_pieces in self.source_pieces.values())
        done = {*moved, self.other.layout.order, self.other.layout.shape}
        return [name for name in self.wanted if name not in done and (open_ or not self.other.layout.tensors[name].optional)]

    def moves_columns(self, names: Sequence[str]) -> bool:
        """Whether columns move in these tensors of the result."""
        fields = {field for name in names for field in self.other.layout.tensors[name].fields}
        have_bits = all(self.other.layout.tensors[name].slices for name in names)
        return self.columns is not None and not (have_bits and not any(
            axis.text == "K" for field in fields for axis in self.other.variant.fields[field].axes))

    def size(self, names: Sequence[str]) -> int:
        """The bytes of tensors of the result."""
        return sum(math.prod(self.wanted[name][1]) * self.wanted[name][0].itemsize for name in names)

    def remaining_tensors(self, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that moves of words did not fill, packed from fields.  Fields of moved tensors alone are on meta."""
        stored = self.other.layout.tensors
        done = {field for name in moved for field in stored[name].fields}
        done -= {field for name in self.wanted if name not in moved for field in stored[name].fields}
        fields = unpack_needed_fields(self.packed, lambda stored_fields: stored_fields <= done)
        packed, description = self.packed, self.packed.format.description
        fields |= {name: default_field(description, packed.variant, name, packed.shape, packed.params, packed.device)
                   for name in self.other.layout.always if name not in fields and self.changed is None}
        if self.changed is not None:
            fields = {name: field.to("meta") if name in done else field for name, field in self.changed.all(fields).items()}
        remaining = self.other.layout.tensors_of({name: fields.get(name) for name in self.other.variant.fields
                                             if name not in self.other.layout.where}, self.packed.extents)
        return {name: tensor.contiguous() for name, tensor in remaining.items() if name not in moved}


def _is_whole(plan: transpose.MovePlan) -> bool:
    """Whether a plan writes exactly the bits of its piece."""
    return not plan.clear and all(axis.source is not None for axis in plan.axes)


# -- by fields --------------------------------------------------------------------------------------------------------


def by_fields(packed: PackedWeight, other: PackedWeight) -> dict[str, Tensor]:
    return convert_row_tiles(packed, other, lambda part, start: pack(other.format, unpack(part), other.storage, other.params))


def convert_row_tiles(packed: PackedWeight, other: PackedWeight, make: Callable[[PackedWeight, int], PackedWeight],
                      ) -> dict[str, Tensor]:
    """The tensors of `other`, filled with the tensors of make(part, start) for tiles of rows from `start` on.

    Besides both weights this needs memory for one tile, whole blocks and records of both.
    """
    n, k = packed.shape
    axes = [axis for stored in other.layout.tensors.values() for axis in stored.axes]
    at_once = bool(other.layout.whole or packed.layout.streams or other.layout.streams)
    least = n if at_once else math.lcm(packed.step("N"), slicing_step(axes, "N", other.sizes, k))
    rows = max(1, tiles.TILE // max(1, k) // max(1, least)) * max(1, least)
    if rows >= n:
        return make(packed, 0).tensors
    tensors: dict[str, Tensor] = {}
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        part = make(packed.cut("N", start, stop), start)
        wanted = dtypes_and_shapes(other)
        tensors = tensors or {name: torch.empty(wanted[name][1], dtype=tensor.dtype, device=tensor.device)
                          for name, tensor in part.tensors.items()}
        into = part.derive(tensors, packed.shape).cut("N", start, stop)
        for name, tensor in part.tensors.items():
            into.tensors[name].copy_(tensor)
        progress.advance_units((stop - start) * k)
    return _with_shape(tensors, other)
