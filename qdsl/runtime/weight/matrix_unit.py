"""What the kernel families for matrix units (runtime/gpu/kernels) take from a storage: a record for each of them.

Generated modules make these records (compiler/emit/triton/matrix_unit.py), and `MatrixUnitKernels.constants` makes the constants
of a launch of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdsl.runtime.weight.tables import Table

CHUNK = 128                                                      # columns whose codes fill 16 words of a 4-bit plane
SHORT = (16, 32, 64)                                             # block lengths of which a chunk has several
RAW = 126                                                        # the exponent of the factor that raw numbers lack
SMALL_FLOATS = ("e8m0", "e8m0h", "ue4m3", "e4m3")                # 8-bit types that are stored as bytes
LOOKED_UP, SHARED = -5, -6                                       # further kinds of numbers (group_numbers.loaded)
PART = 32                                                        # kind of bits in a byte: PART * (lowest bit + 1) + width


@dataclass(frozen=True, slots=True)
class GroupField:
    """How kernels read a number of a group of weights, such as its scale.

    tensor: of the storage.  rows, columns: how many share a number, as numbers or size parameters; 0 is the whole axis.  kind:
    how it is stored: bits of an integer, one of SMALL_FLOATS, or 0 for a float, by its dtype.  default: the number if the tensor
    is missing.  table: the lookup table of its integers.  shared: how many blocks, counted over all rows, share a float.  at: an
    integer's lowest bit, if other fields have bits in its bytes.
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
        """The field as a constexpr: index of its tensor, rows, columns, kind (group_numbers.number), default.

        Two more for kinds that need them: the index of its table, after the tensors, and the integers' kind; or the blocks per
        number.
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
class Levels:
    """The lookup table of codes: loaded into registers by a function, or `stored`, with so many entries.

    stored: in a tensor of the weight, for all of it or for blocks of rows, or a table of the format.
    """

    load: Any = None
    stored: GroupField | Table | None = None
    entries: int = 0

    def __post_init__(self) -> None:
        if (self.load is None) == (self.stored is None) or (self.stored is None) != (self.entries == 0):
            raise ValueError("levels are loaded by a function, or stored with a number of entries")


@dataclass(frozen=True, slots=True)
class Codes:
    """How kernels make operands of codes.

    numbers: the function that converts codes.  words: the one that loads a chunk's words.  width: of the first plane of codes.
    bits: of codes that are operands without conversion, 0 for computed operands, -1 for two per code; signed: they are.  unit,
    base: the factor of the sums, and the difference of operands and codes, for float16 and bfloat16; a unit of 0: float16 is not
    supported.
    """

    numbers: Any
    words: Any = None
    width: int = 4
    bits: int = 4
    signed: bool = False
    unit: tuple[float, float] = (2.0 ** 24, 1.0)
    base: tuple[int, int] = (0, 128)
    levels: Levels | None = None

    def __post_init__(self) -> None:
        if self.width not in (1, 2, 4, 8) or not (-1 <= self.bits <= 0 or self.width <= self.bits <= 8):
            raise ValueError(f"codes have a first plane of 1, 2, 4 or 8 bits, and up to 8 bits: {self.width}, {self.bits}")

    @property
    def stored_levels(self) -> GroupField | Table | None:
        """Where the lookup table of codes is stored; None without one."""
        return None if self.levels is None else self.levels.stored


@dataclass(frozen=True, slots=True)
class Sums:
    """How kernels scale sums of products with codes.

    scale, finish: functions, once per group and once per row, with the numbers in group_fields and row_fields.  blocks: columns
    per value, for each field that varies along K, as numbers or size parameters.  ones: `finish` takes the sums of x.
    """

    scale: Any = None
    finish: Any = None
    group_fields: tuple[GroupField, ...] = ()
    row_fields: tuple[GroupField, ...] = ()
    blocks: tuple[str, ...] = ()
    ones: bool = False


@dataclass(frozen=True, slots=True)
class Skinny:
    """The kernel for up to 8 rows of x.  in_order: codes are bytes in row order."""

    kernel: Any
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Gemv:
    """The kernel for one row of x.  raw: numbers in bfloat16 without their last step, a product with 2^RAW; it then scales x."""

    kernel: Any
    raw: Any = None


@dataclass(frozen=True, slots=True)
class TileGemm:
    """The kernel for many rows of x.

    zero: the number that it adds to codes, for float16 and bfloat16; exact: this subtracts their zero point, or `point` does, the
    index in group_fields of a zero point.  sums: it needs the sums of x.  spans: by plane, how many bits higher the second chunk
    of a span is.  tall: it can keep sums of 128 rows of x in registers for groups of 128 columns or more; else of 64.
    """

    kernel: Any
    point: int | None = None
    zero: tuple[int, int] = (0, -128)
    exact: bool = False
    sums: bool = False
    spans: tuple[int, ...] = (0, 0, 0)
    tall: bool = False

    def __post_init__(self) -> None:
        if self.point is not None and not self.exact:
            raise ValueError("a kernel that subtracts the zero point of groups has exact codes")


@dataclass(frozen=True, slots=True)
class W8A8:
    """A kernel that multiplies 8-bit x by a weight's 8-bit codes.

    type: of both, 'e4m3' or 'i8'.  codes: the tensor of the weight's codes.  groups: x has a scale per 128 columns, else per row.
    sums: the kernel takes the sums of x's codes.
    """

    kernel: Any
    type: str
    codes: str
    groups: bool = False
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Records:
    """Records of 256 columns that hold codes and numbers of groups, in 32-bit words.

    tensor: of any element type.  size: words per record.  codes: index of the first word of codes.  head: indices at
    which four words with numbers of groups begin.  fields, start: the storage's functions that take numbers out of these
    words, and that return the first pair of columns of a run.
    """

    tensor: str
    fields: Any
    start: Any
    size: int
    codes: int
    head: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatrixUnitKernels:
    """A storage's kernels for matrix units, by family; None for a family that does not serve it.

    records: the layout of records that hold codes and numbers of groups, for `gemv_records`.
    """

    codes: Codes
    sums: Sums = Sums()
    skinny: Skinny | None = None
    gemv: Gemv | None = None
    tile_gemm: TileGemm | None = None
    w8a8: W8A8 | None = None
    records: Records | None = None

    def kernel(self, kind: str) -> Any:
        """The kernel of a family that serves the storage: 'skinny', 'gemv' or 'tile_gemm'."""
        return getattr(self, kind).kernel

    @property
    def tables(self) -> tuple[Table, ...]:
        """The lookup tables of numbers of groups and of codes."""
        fields = (*self.sums.group_fields, *self.sums.row_fields)
        read = (self.codes.stored_levels, *(group.table for group in fields))
        return tuple(dict.fromkeys(table for table in read if isinstance(table, Table)))

    @property
    def least(self) -> int:
        """The shortest block that the kernels support."""
        return CHUNK if self.skinny is not None and self.skinny.in_order else 16

    def serves(self, size: int) -> bool:
        """Whether the kernels support blocks of so many columns."""
        return size >= self.least and (size in SHORT or size % CHUNK == 0)

    def constants(self, kind: str, half: bool, sizes: Mapping[str, int], tensors: Sequence[str], r: int = 1,
                  is_scaled: bool = False) -> dict[str, Any]:
        """Constants of kernel `kind` ('skinny', 'gemv', 'tile_gemm', 'w8a8'); half: x is float16, not bfloat16.

        tensors: the names of the kernel's tensors.  r: tiles of rows per program.  is_scaled: `tile_gemm` rounds scaled weights.
        """
        place, codes, sums = int(not half), self.codes, self.sums
        converted = {"numbers": codes.numbers, "WIDTH": codes.width, "BITS": codes.bits, "SIGNED": codes.signed,
                     "UNIT": codes.unit[place], "BASE": codes.base[place]}
        if (records := self.records) is not None:
            return {**converted, "fields": records.fields, "scale": sums.scale, "start": records.start, "RECORD": records.size,
                    "CODES": records.codes, "HEAD": records.head}
        group_fields, row_fields = (tuple(field.constants(tensors, sizes, self.tables) for field in fields)
                                    for fields in (sums.group_fields, sums.row_fields))
        scaled = {"scale": sums.scale, "finish": sums.finish, "FIELDS": group_fields, "ROW_FIELDS": row_fields}
        if kind == "w8a8":
            return scaled
        loaded = {**converted, **scaled, "words": codes.words, **self._levels(tensors, sizes)}
        blocks = self.sizes(sizes)
        if kind == "gemv" and self.gemv is not None:
            is_lifted = self.gemv.raw is not None and not half and r > 1    # scaling x pays if several tiles share it
            lifted = {"numbers": self.gemv.raw, "LIFT": RAW} if is_lifted else {"LIFT": 0}
            return {**loaded, **lifted, "STEP": min([64, *blocks])}
        loaded["SIZE"] = CHUNK if (least := min(blocks, default=CHUNK)) >= CHUNK else min(32, least)    # columns per sum
        if kind == "skinny" and self.skinny is not None:
            return {**loaded, "ONES": sums.ones, "IN_ORDER": self.skinny.in_order}
        assert kind == "tile_gemm" and self.tile_gemm is not None
        tiled = self.tile_gemm
        constants = {**loaded, "BASE": None if tiled.exact else 0, "POINT": tiled.point, "ZERO": tiled.zero[place],
                     "ONES": tiled.sums, "SPANS": tiled.spans}
        if not is_scaled:
            return constants
        base = (0 if codes.signed else -128) if codes.bits == 8 and not half else codes.base[place]     # lanes.whole_bytes
        return {**constants, "POINT": None, "BASE": base, "ONES": bool(base or tiled.exact or tiled.sums)}

    def _levels(self, tensors: Sequence[str], sizes: Mapping[str, int]) -> dict[str, Any]:
        """The function that loads the lookup table of codes; or the table's place, rows and entries."""
        stored = self.codes.stored_levels
        at = (len(tensors), 0) if isinstance(stored, Table) else stored and stored.constants(tensors, sizes)[:2]
        levels = self.codes.levels
        return {"table": levels and levels.load, "LEVELS": at and levels and (*at, levels.entries)}

    def sizes(self, sizes: Mapping[str, int]) -> list[int]:
        """The block lengths as numbers, for these size parameters."""
        return [int(block) if block.isdigit() else sizes[block] for block in self.sums.blocks]

    def trip(self, sizes: Mapping[str, int]) -> int:
        """Columns of w per warp in one loop iteration of `gemv`."""
        return 256 if self.records is not None else max(256, 8 * min([64, *self.sizes(sizes)]))
