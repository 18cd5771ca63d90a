"""Descriptions of a format in its generated module: fields, storages and variants, as data and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qdsl.core.numbers import TORCH_FLOATS
from qdsl.core.shapes import Axis, axis
from qdsl.core.stored import PLANAR as PLANAR
from qdsl.core.stored import Stored
from qdsl.runtime.weight.branches import Branch as Branch
from qdsl.runtime.weight.branches import BranchTensor as BranchTensor
from qdsl.runtime.weight.branches import stored
from qdsl.runtime.weight.tables import Table

CHUNK = 128                                                      # columns that share 16 words of a plane of 4 bits
SHORT = (16, 32, 64)                                             # columns of blocks that a chunk has several of
SMALL_FLOATS = ("e8m0", "e8m0h", "ue4m3", "e4m3")                # of 8 bits, in tensors of bytes
LOOKED_UP, SHARED = -5, -6                                       # kinds of numbers that follow those (group_numbers.loaded)
PART = 32                                                        # in the kind of a byte's part, what its lowest bit + 1 is times
FLOATS: dict[str, torch.dtype] = {kind: getattr(torch, name) for kind, name in TORCH_FLOATS.items()}


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """A field: a number type ('u4', 'f16', 'index', or a parameter that lists types) and its axes ('N', 'K/32').

    groups: for an index, how many groups there are; in order, column k is in group k // its step.
    """

    type: str
    axes: tuple[Axis, ...]
    groups: Axis | None

    def __init__(self, type: str, *axes: str, groups: str | None = None) -> None:
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "axes", tuple(map(axis, axes)))
        object.__setattr__(self, "groups", axis(groups) if groups else None)


@dataclass(frozen=True, slots=True)
class W8A8:
    """A kernel that multiplies 8 bits of x with a weight's codes of 8 bits.

    type: of both, 'e4m3' or 'i8'.  codes: the tensor of the weight's.  groups: x has a scale per 128 columns, else per row.
    sums: the kernel takes the sums of x's codes, too.
    """

    kernel: Any
    type: str
    codes: str
    groups: bool = False
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Records:
    """Records of 256 columns that hold codes and numbers of groups, in words of 32 bits.

    tensor: of any elements.  size: words of a record.  codes: the first of its codes.  head: the first words of the fours that
    hold its other numbers.
    """

    tensor: str
    size: int
    codes: int
    head: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupField:
    """Where kernels read a number of a group of weights, such as its scale.

    tensor: of the storage.  rows, columns: how many of them share a number, as numbers or size parameters; 0 is all of an axis.
    kind: how it is stored, an integer's bits, one of SMALL_FLOATS, or 0 for a float that its dtype tells.  default: the number
    where the tensor is missing.  table: in which its integers are looked up.  shared: how many blocks, counted over all rows,
    have a float in common.  at: an integer's lowest bit, where the other bits of its bytes are another field's.
    """

    tensor: str
    rows: int | str
    columns: int | str
    kind: int | str = 0
    default: float = 0.0
    table: Table | None = None
    shared: int = 1
    at: int | None = None

    def constants(self, tensors: Sequence[str], sizes: Mapping[str, int], tables: Sequence[Table] = (),
                  ) -> tuple[int | float, ...]:
        """The field as a constant of a launch: the place of its tensor, rows, columns, kind (group_numbers.number), default; then
        the place of its table, which follow the tensors, and the kind of what is looked up, or how many blocks share a number.
        """
        kind = self.kind if isinstance(self.kind, int) else -1 - SMALL_FLOATS.index(self.kind)
        kind += 0 if self.at is None else PART * (1 + self.at)
        rows, columns = (sizes[block] if isinstance(block, str) else block for block in (self.rows, self.columns))
        if self.table is not None:
            place = len(tensors) + tables.index(self.table)
            return tensors.index(self.tensor), rows, columns, LOOKED_UP, self.default, place, kind
        if self.shared > 1:
            return tensors.index(self.tensor), rows, columns, SHARED, self.default, self.shared
        return tensors.index(self.tensor), rows, columns, kind, self.default


@dataclass(frozen=True, slots=True)
class MatrixUnitKernels:
    """Kernels for matrix units: `skinny` for up to 8 rows of x, `gemv` for one, `tile_gemm` for more; None where there is none.

    These are families (runtime/gpu/kernels), and the storage's functions complete them: words, numbers, table, scale, finish, and
    of records fields and start.

    group_fields, row_fields: what scale and finish take.  point: the place among group_fields of the zero point, where
    `tile_gemm` takes it off codes.
    blocks: how many columns share a value, of each field that varies along K, as numbers or size parameters.
    size: columns that share a sum where a block is shorter than 128 columns.  in_order: codes are bytes, row by row.
    special: the bits that all are set in a NaN or infinite byte of tensor `codes`.
    width, bits: of the first plane of codes, and of codes that are operands where they lie, 0 for others; signed: they are.
    levels: the table of a weight, of its blocks of rows or of the format that codes are looked up in; entries: how many it has.
    unit, base: what sums are multiplied with in the end, and what operands have more than codes, in float16 and bfloat16; a unit
    of 0 says that float16 has no such numbers.
    ones: `finish` takes the sums of x.  double: bfloat16, whose numbers have 8 bits, takes two products for a code.
    zero: what `tile_gemm` adds to codes, in float16 and bfloat16; exact: it thereby takes off their zero point.
    sums_in_tile_gemm: it needs the sums of x.  spans: by plane, how many bits the second chunk of a span lies higher.
    tall: `tile_gemm` keeps sums of 128 rows of x in registers, where its groups have 128 columns or more; else of 64.
    w8a8: the kernel for x in 8 bits.  records: how they lie where codes and numbers of groups are in records.
    """

    skinny: Any
    gemv: Any = None
    tile_gemm: Any = None
    words: Any = None
    numbers: Any = None
    table: Any = None
    fields: Any = None
    scale: Any = None
    finish: Any = None
    start: Any = None
    levels: GroupField | Table | None = None
    entries: int = 0
    group_fields: tuple[GroupField, ...] = ()
    row_fields: tuple[GroupField, ...] = ()
    point: int | None = None
    blocks: tuple[str, ...] = ()
    in_order: bool = False
    size: int = CHUNK
    width: int = 4
    bits: int = 4
    signed: bool = False
    unit: tuple[float, float] = (2.0 ** 24, 1.0)
    base: tuple[int, int] = (0, 128)
    ones: bool = False
    double: bool = False
    zero: tuple[int, int] = (0, -128)
    exact: bool = False
    sums_in_tile_gemm: bool = False
    spans: tuple[int, ...] = (0, 0, 0)
    tall: bool = False
    codes: str = ""
    special: int = 0
    w8a8: W8A8 | None = None
    records: Records | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that numbers of groups, or codes, are looked up in."""
        read = (self.levels, *(group.table for group in (*self.group_fields, *self.row_fields)))
        return tuple(dict.fromkeys(table for table in read if isinstance(table, Table)))

    @property
    def least(self) -> int:
        """The shortest block that the kernels serve."""
        return CHUNK if self.in_order else 16

    def serves(self, size: int) -> bool:
        """Whether the kernels serve blocks of so many columns."""
        return size >= self.least and (size in SHORT or size % CHUNK == 0)

    def constants(self, kind: str, half: bool, sizes: Mapping[str, int], tensors: Sequence[str]) -> dict[str, Any]:
        """Constants of kernel `kind` ('skinny', 'gemv', 'tile_gemm', 'w8a8'); half: x is float16, not bfloat16.

        tensors: those that the kernel takes, by name.
        """
        place, blocks = int(not half), self.sizes(sizes)
        codes = {"numbers": self.numbers, "WIDTH": self.width, "BITS": self.bits, "SIGNED": self.signed,
                 "UNIT": self.unit[place], "BASE": self.base[place]}
        if self.records is not None:
            return {**codes, "fields": self.fields, "scale": self.scale, "start": self.start, "RECORD": self.records.size,
                    "CODES": self.records.codes, "HEAD": self.records.head}
        group_fields, row_fields = (tuple(field.constants(tensors, sizes, self.tables) for field in fields)
                                    for fields in (self.group_fields, self.row_fields))
        applied = {"scale": self.scale, "finish": self.finish, "FIELDS": group_fields, "ROW_FIELDS": row_fields}
        if kind == "w8a8":
            return applied
        at = (len(tensors), 0) if isinstance(self.levels, Table) else self.levels and self.levels.constants(tensors, sizes)[:2]
        levels = at and (*at, self.entries)
        loaded = {**codes, **applied, "words": self.words, "table": self.table, "LEVELS": levels}
        if kind == "gemv":
            return {**loaded, "STEP": min([64, *blocks])}
        loaded["SIZE"] = CHUNK if min(blocks, default=CHUNK) >= CHUNK else self.size
        if kind == "skinny":
            return {**loaded, "ONES": self.ones, "IN_ORDER": self.in_order}
        return {**loaded, "BASE": None if self.exact else 0, "POINT": self.point, "ZERO": self.zero[place],
                "ONES": self.sums_in_tile_gemm, "SPANS": self.spans}

    def sizes(self, sizes: Mapping[str, int]) -> list[int]:
        """The blocks as numbers, for these size parameters."""
        return [int(block) if block.isdigit() else sizes[block] for block in self.blocks]

    def trip(self, sizes: Mapping[str, int]) -> int:
        """Columns of w that a warp takes in a trip of the loop of `gemv`."""
        return 256 if self.records is not None else max(256, 8 * min([64, *self.sizes(sizes)]))


@dataclass(frozen=True, slots=True)
class Pairs:
    """How kernels combine the symbols of a stream with the other bits into weights of 16 bits, eight columns at a time.

    weights: the device function that returns the four pairs of weights.  It takes four pairs of symbols, at bit `at` of the
    halves of a word, and the two words of the other bits.  type: of the weights.  stream, uncoded: the tensors of the symbols
    and of the other bits.
    """

    weights: Any
    type: str
    stream: str
    at: int
    uncoded: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """Functions and constants that specialize the kernels for a storage, and how their grids cover a weight.

    decode: the function of `dequantize` and `matvec` (runtime/gpu/kernels), which decodes a unit.  rows, units: how many rows of
    tiles and units along K there are, as axes.  last: 'n' or 'k', along which units neighbour in memory.
    sums: rows of a unit.  divides: decode divides by what is stored.  tables: what decode looks up, behind the tensors.
    digits, lanes: extents of a unit's number within its record, and of its weights.  order: which of the row of tiles, the
    record, the digits and the lanes make rows of w and then columns, slowest first; () where these are no digits of a column.
    pairs: what kernels of the storage's stream (codecs) make weights with, where it can be done in registers.
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
        """Those of kernels for matrix units, too."""
        return (*self.tables, *(() if self.matrix_unit is None else self.matrix_unit.tables))

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of `dequantize` and `matvec`."""
        return {"decode": self.decode, "ROWS": self.sums, "AXIS": int(self.last == "k")}

    def rounds(self, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether kernels for matrix units round weights: to x's dtype, where that does not hold all numbers of a table.

        tensors: of the weight.
        """
        exact = () if self.matrix_unit is None else self.matrix_unit.tables
        if self.matrix_unit is not None and isinstance(self.matrix_unit.levels, GroupField):
            return torch.promote_types(tensors[self.matrix_unit.levels.tensor].dtype, dtype) != dtype
        return any(not torch.equal(table.values.to(dtype).to(table.values.dtype), table.values)
                   for table in self.tables if table not in exact)


@dataclass(frozen=True, slots=True, init=False)
class Stream:
    """An entropy code that holds a tensor's elements (streams.py): which, what the tensor would be, and of each of
    the code's tensors what the storage calls it.
    """

    coding: str
    plain: Stored
    names: Mapping[str, str]

    def __init__(self, coding: str, plain: Stored, **names: str) -> None:
        object.__setattr__(self, "coding", coding)
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "names", names)


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: its tensors in order, and the functions between them and the fields.

    where: fields that are not stored because here they always have their default; always: those that are stored, default or
    not, although other storages may leave them out; omits: those that a quantizer leaves out where they have their default.
    reads, extents: which of N, K and the size parameters unpack and pack take.  whole: no row lies by itself, so that nothing
    can be cut.
    order: the tensor that may say in which order columns are stored (runtime/weight/order.py); all else then is of that weight,
    but for the tensors [K] in `unordered`, whose columns are in order.
    streams: tensors that unpack takes and pack makes, and that the storage holds in an entropy code.
    shape: the tensor that says N and K, int64 [2].  options: those of `encode` that its producers choose.
    least: of axes, the fewest elements that a weight here has.  fixed: N or K, where all weights have the same.
    factor: the tensor [K] that kernels for matrix units leave to x, which they take multiplied with it, or divided: '/name'.
    """

    tensors: Mapping[str, Stored]
    unpack: Callable[..., Mapping[str, torch.Tensor | None]]
    pack: Callable[..., Mapping[str, torch.Tensor | None]]
    kernels: Kernels
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

    @property
    def is_order_plain(self) -> bool:
        """Whether weights have their tensors as kernels take them next to an order, int32, in which x is brought first."""
        return not self.unordered and (not self.order or self.tensors[self.order].dtype == "i32")

    @property
    def decoded(self) -> Storage:
        """The storage with decoded tensors in place of streams: what unpack and the kernels take."""
        inside = {name: key for key, stream in self.streams.items() for name in stream.names.values()}
        tensors = {inside.get(name, name): self.streams[inside[name]].plain if name in inside else stored
                   for name, stored in self.tensors.items()}
        return replace(self, tensors=tensors, streams={})

    def fields_of(self, tensors: Iterable[torch.Tensor | None], extents: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The fields that unpack returns for the tensors in `coded`; extents: N, K and the size parameters."""
        return _present(self.unpack(*tensors, **{name: extents[name] for name in self.reads}))

    def tensors_of(self, fields: Mapping[str, torch.Tensor | None], extents: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The tensors that pack returns for all fields that it takes, None where one is missing."""
        return _present(self.pack(**fields, **{name: extents[name] for name in self.extents}))

    def why_not(self, shape: tuple[int, int], sizes: Mapping[str, int]) -> str:
        """Why the storage is not for weights of this shape, too few elements or another N or K; '' where it is."""
        for dim, extent in zip("NK", shape, strict=True):
            if self.fixed.get(dim, extent) != extent:
                return f"it is for weights with {dim} = {self.fixed[dim]}, not {list(shape)}"
        for text, least in self.least.items():
            if (axis(text).extent(*shape, sizes) or 0) < least:
                return f"it is for weights with {text} of {least} or more, not {list(shape)}"
        return ""

    @property
    def coded(self) -> list[str]:
        """The tensors that hold the fields, which unpack and the kernels take."""
        return [name for name in self.tensors if name not in (self.order, self.shape)]


def _present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """What is there: functions of generated modules return None for what is missing."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class Variant:
    """The part of a format that depends on the parameters which shape the bits.

    defaults: values of fields that may be missing; None is an index in order.  decode takes fields by name and returns
    float32 [rows, columns]; its blocks must be whole, or alone on their axis: `cuts` are axes whose steps say where a caller
    cuts, '1' where it cannot.  encode takes the weight, and returns the fields it chooses; importance: it takes those of
    columns, too; options: what a caller may choose about it, none listed where that is any positive number.  copies: decode is
    this field unchanged.
    scheme: what encode calls, where kernels encode rows by it too; roles: the fields that it chooses; settings: its constants
    and the options of the spec.  plus: what is added to the numbers that decode returns.  appended: fields [N, extent] of numbers
    behind the K columns of a row, which decode does not read, and which are 0 where a weight is quantized.
    """

    fields: Mapping[str, Field]
    storages: Mapping[str, Storage]
    decode: Callable[..., torch.Tensor]
    encode: Callable[..., dict[str, torch.Tensor]] | None = None
    importance: bool = False
    options: Mapping[str, tuple[str | bool, ...]] = field(default_factory=dict)
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    cuts: tuple[str, str] = ("N", "K")
    copies: str | None = None
    scheme: str = ""
    roles: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    plus: tuple[Branch, ...] = ()
    appended: tuple[str, ...] = ()

    def tensors(self, storage: str) -> dict[str, Stored]:
        """The tensors that a weight in a storage may have: those of branches are behind its own."""
        return {**self.storages[storage].tensors, **stored(self.plus)}

    @property
    def index_groups(self) -> Axis | None:
        """How many groups columns are put into, by the index field; None without one."""
        return next((field.groups for field in self.fields.values() if field.groups is not None), None)
