"""The description of a format in its generated module: fields, storages and variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qdsl.core.numbers import TORCH_FLOATS
from qdsl.core.shapes import Axis, axis
from qdsl.core.slices import called, fill
from qdsl.core.stored import PLANAR as PLANAR
from qdsl.core.stored import Stored
from qdsl.runtime.weight.branch_tensors import Branch as Branch
from qdsl.runtime.weight.branch_tensors import BranchTensor as BranchTensor
from qdsl.runtime.weight.matrix_unit import GroupField, MatrixUnitKernels
from qdsl.runtime.weight.row_codes import RowCodes
from qdsl.runtime.weight.tables import Table

SPECIAL = {"e4m3": 0x7F, "e5m2": 0x7C}                           # bits that are all set in a NaN or infinite code
FLOATS: dict[str, torch.dtype] = {kind: getattr(torch, name) for kind, name in TORCH_FLOATS.items()}


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """A field: a number type ('u4', 'f16', 'index', or a parameter that lists types) and its axes ('N', 'K/32').

    groups: for an index, the axis of groups; if columns are in order, column k is in group k // its step.
    """

    type: str
    axes: tuple[Axis, ...]
    groups: Axis | None

    def __init__(self, type: str, *axes: str, groups: str | None = None) -> None:
        fill(self, type=type, axes=tuple(map(axis, axes)), groups=axis(groups) if groups else None)


@dataclass(frozen=True, slots=True)
class RowLoops:
    """The C functions of a format for loops over interleaved rows (runtime/cpu/row_loops.h), and what they read of a weight.

    source: the functions.  code: the field with a code per weight, or '' if row_codes computes it.  bits: of a code.  fields:
    numbers of groups, in the functions' order.  lookups: the tables that some fields index.  levels: the field with the table
    that codes index.  columns: the field by which x is multiplied; '/name': divided.
    """

    source: str
    code: str
    bits: int
    fields: tuple[str, ...]
    row_codes: RowCodes | None = None
    lookups: Mapping[str, Table] = field(default_factory=dict)
    levels: str = ""
    columns: str = ""


@dataclass(frozen=True, slots=True)
class Pairs:
    """How kernels join symbols of a stream and uncoded bits to 16-bit weights, eight columns at a time.

    weights: the device function that returns the four pairs of weights.  It takes four pairs of symbols, at bit `at` of the
    halves of a word, and the two words of uncoded bits.  type: of the weights.  stream, uncoded: the tensors of the symbols and
    of the uncoded bits.
    """

    weights: Any
    type: str
    stream: str
    at: int
    uncoded: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """Functions and constants that specialise the kernels for a storage, and their grids.

    decode: decodes a unit, for kernels that take any format (runtime/gpu/kernels).  rows, units: axes with the rows of tiles, and
    the units along K.  last: 'n' or 'k', the axis along which adjacent units are contiguous.  sums: rows per unit.  divides:
    decode divides by stored numbers.  tables: lookup tables of decode, passed after the tensors.  digits, lanes: extents of a
    unit's number within its record, and of its weights.  order: how the row of tiles, the record, the digits and the lanes make
    rows of w and then columns, slowest first; () if they are not digits of a column.  pairs: how kernels of the storage's stream
    (codecs) make weights in registers, if they can.
    """

    decode: Any
    rows: str
    units: str
    last: str
    sums: int = 1
    digits: tuple[int, ...] = ()
    lanes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    divides: bool = False
    tables: tuple[Table, ...] = ()
    matrix_unit: MatrixUnitKernels | None = None
    pairs: Pairs | None = None

    @property
    def every_table(self) -> tuple[Table, ...]:
        """All tables, including those of kernels for matrix units."""
        return (*self.tables, *(() if self.matrix_unit is None else self.matrix_unit.tables))

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of kernels that decode unit by unit."""
        return {"decode": self.decode, "ROWS": self.sums, "AXIS": int(self.last == "k")}

    def rounds_tables(self, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether kernels for matrix units round weights because x's dtype does not hold all numbers of a table.

        tensors: of the weight.
        """
        exact = () if self.matrix_unit is None else self.matrix_unit.tables
        levels = None if self.matrix_unit is None else self.matrix_unit.codes.stored_levels
        if isinstance(levels, GroupField):
            return torch.promote_types(tensors[levels.tensor].dtype, dtype) != dtype
        return any(not torch.equal(table.values.to(dtype).to(table.values.dtype), table.values)
                   for table in self.tables if table not in exact)


@dataclass(frozen=True, slots=True)
class Stream:
    """An entropy code that holds a tensor's elements (streams.py).

    It has the code, the decoded tensor's description, and the storage's names of the code's tensors.
    """

    coding: str
    plain: Stored
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: its tensors in order, and the functions between them and the fields.

    where: fields that this storage omits because they always have their default; always: optional fields that it always stores;
    omits: fields that a quantizer omits if they have their default.  reads, extents: which of N, K and the size parameters unpack
    and pack take.  whole: rows are not separate, so that no slice is possible.  order: the tensor that may state the stored order
    of columns (runtime/weight/order.py); all other tensors are in stored order, except the tensors [K] in `unordered`.  streams:
    tensors of unpack and pack that the storage holds in an entropy code.  shape: the tensor that holds N and K, int64 [2].
    options: options of `encode` that its producers choose.  least: the fewest elements of axes that a weight here has.  fixed: N
    or K, if all weights have the same.  factor: the tensor [K] by which x is multiplied before kernels for matrix units; '/name':
    divided.  special: the tensor whose codes may be NaN or infinite, which kernels for matrix units take as numbers, and the bits
    that are set in such codes.
    """

    unpack: Callable[..., Mapping[str, torch.Tensor | None]]
    pack: Callable[..., Mapping[str, torch.Tensor | None]]
    kernels: Kernels
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    where: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    omits: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    extents: tuple[str, ...] = ()
    whole: bool = False
    order: str = ""
    shape: str = ""
    options: Mapping[str, str | bool | float] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    streams: Mapping[str, Stream] = field(default_factory=dict)
    factor: str = ""
    unordered: tuple[str, ...] = ()
    special: tuple[str, int] | None = None

    def described(self, data: Mapping[str, Any], stored: Mapping[str, Stored], fields: Mapping[str, Field],
                  defaults: Iterable[str]) -> Storage:
        """The storage with what its format's program says of it.  defaults: the fields that have one."""
        tensors = {name: stored[name] for name in data["tensors"]}
        streams = {name: Stream(code, called(Stored, plain), names)
                   for name, (code, plain, names) in data.get("streams", {}).items()}
        further = {key: value for key, value in data.items() if key not in ("tensors", "streams", "transient")}
        further |= {"reads": _keywords(self.unpack), "extents": _keywords(self.pack)}
        special = [(name, SPECIAL[fields[field].type]) for name, stored in tensors.items() for field in stored.fields
                   if fields[field].type in SPECIAL and [axis.text for axis in fields[field].axes] == ["N", "K"]]
        further["special"] = special[0] if special and self.kernels.matrix_unit is not None else None
        own = replace(self, tensors=tensors, streams=streams, **further)
        optional = {field: stored.optional for stored in own.decoded.tensors.values() for field in stored.fields}
        return replace(own, where=tuple(name for name in defaults if name not in optional),
                       always=tuple(name for name in defaults if optional.get(name) == ""))

    @property
    def is_order_plain(self) -> bool:
        """Whether kernels take the tensors next to an order, int32, by which x is permuted first."""
        return not self.unordered and (not self.order or self.tensors[self.order].dtype == "i32")

    @property
    def decoded(self) -> Storage:
        """The storage with decoded tensors instead of streams, as unpack and the kernels take them."""
        if not self.streams:
            return self
        inside = {name: key for key, stream in self.streams.items() for name in stream.names.values()}
        tensors = {inside.get(name, name): self.streams[inside[name]].plain if name in inside else stored
                   for name, stored in self.tensors.items()}
        return replace(self, tensors=tensors, streams={})

    def fields_of(self, tensors: Iterable[torch.Tensor | None], extents: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The fields that unpack returns for the tensors in `coded`; extents: N, K and the size parameters."""
        return _present(self.unpack(*tensors, **{name: extents[name] for name in self.reads}))

    def tensors_of(self, fields: Mapping[str, torch.Tensor | None], extents: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The tensors that pack returns for all its fields, None if one is missing."""
        return _present(self.pack(**fields, **{name: extents[name] for name in self.extents}))

    def why_unsupported_shape(self, shape: tuple[int, int], sizes: Mapping[str, int]) -> str:
        """Why the storage does not support weights of this shape (too few elements, or another N or K); '' if it does."""
        for dim, extent in zip("NK", shape, strict=True):
            if self.fixed.get(dim, extent) != extent:
                return f"it is for weights with {dim} = {self.fixed[dim]}, not {list(shape)}"
        for text, least in self.least.items():
            if (axis(text).extent(*shape, sizes) or 0) < least:
                return f"it is for weights with {text} of {least} or more, not {list(shape)}"
        return ""

    @property
    def coded(self) -> list[str]:
        """The tensors that hold the fields, as unpack and the kernels take them."""
        return [name for name in self.tensors if name not in (self.order, self.shape)]


def _keywords(function: Callable[..., object]) -> tuple[str, ...]:
    """The arguments of a function that have to be named."""
    code = function.__code__
    return code.co_varnames[code.co_argcount:code.co_argcount + code.co_kwonlyargcount]


def _present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The tensors that exist: functions of generated modules return None for missing ones."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class Variant:
    """The part of a format that depends on parameters that change the bits.

    defaults: values of optional fields; None is an index in order.  codes: fields that decode adds, and the code at which it
    returns them, whatever the other fields are.  decode takes fields by name and returns float32 [rows,
    columns].  Blocks must be whole, or alone on their axis: `cuts` are axes whose steps are legal borders; '1' allows none.
    encode takes the weight, and returns the fields that it chooses.  importance: encode uses the importance of columns.  options:
    choices for encode; an empty list means any positive number.  copies: decode returns this field unchanged.  scheme: the scheme
    of encode, if kernels encode rows by it too; roles: the fields that it chooses; settings: its constants and the options of the
    spec.  plus: branches that are added to decoded numbers.  appended: fields [N, extent] of plain numbers behind the K columns
    of a row; decode does not read them, and quantize sets them to 0.  row_loops: the format's part of the loops on a CPU.
    """

    storages: Mapping[str, Storage]
    decode: Callable[..., torch.Tensor]
    encode: Callable[..., dict[str, torch.Tensor]] | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    importance: bool = False
    options: Mapping[str, tuple[str | bool, ...]] = field(default_factory=dict)
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    codes: Mapping[str, int] = field(default_factory=dict)
    cuts: tuple[str, str] = ("N", "K")
    copies: str | None = None
    scheme: str = ""
    roles: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    plus: tuple[Branch, ...] = ()
    appended: tuple[str, ...] = ()
    row_loops: RowLoops | None = None

    def described(self, data: Mapping[str, Any], stored: Mapping[str, Mapping[str, Stored]]) -> Variant:
        """The variant with what its format's program says of it; the module's own has functions only.

        stored: the tensors by storage.
        """
        plus = tuple(Branch(kind, {role: called(BranchTensor, tensor) for role, tensor in parts.items()}, ordered)
                     for kind, parts, ordered in data.get("plus", ()))
        fields = {name: called(Field, field) for name, field in data["fields"].items()}
        storages = {name: storage.described(data["storages"][name], stored[name], fields, data.get("defaults", ()))
                    for name, storage in self.storages.items()}
        further = {key: value for key, value in data.items() if key not in ("plus", "storages", "fields", "only_read")}
        return replace(self, storages=storages, fields=fields, plus=plus, **further)

    @property
    def index_groups(self) -> Axis | None:
        """The number of groups that the index field assigns columns to, as an axis; None without an index."""
        return next((field.groups for field in self.fields.values() if field.groups is not None), None)
