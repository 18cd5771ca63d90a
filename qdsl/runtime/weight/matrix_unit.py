"""What the kernel families for matrix units (runtime/gpu/families) take from a storage.

Generated modules make these records (compiler/emit/triton/matrix_unit.py), and `MatrixUnitKernels.constants` makes the constants
of a launch of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdsl.runtime.weight.tables import Table

CHUNK = 128                                                      # columns whose codes fill 16 words of a 4-bit plane
SHORT = (16, 32, 64)                                             # block lengths of which a chunk has several
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
    supported.  in_order: codes are bytes in row order.
    """

    numbers: Any
    words: Any = None
    width: int = 4
    bits: int = 4
    signed: bool = False
    unit: tuple[float, float] = (2.0 ** 24, 1.0)
    base: tuple[int, int] = (0, 128)
    levels: Levels | None = None
    in_order: bool = False

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
class EightBit:
    """Codes that a kernel multiplies by 8-bit x.

    type: of both, 'e4m3' or 'i8'.  codes: the tensor of the weight's codes.  groups: x has a scale per 128 columns, else per row.
    sums: the kernel takes the sums of x's codes.
    """

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
    """A storage's part of the kernels for matrix units.

    families: those that serve it by name, and what it says to each.  eight: codes for products with 8-bit x.  records: the layout
    of records that hold codes and numbers of groups.
    """

    codes: Codes
    sums: Sums = Sums()
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    eight: EightBit | None = None
    records: Records | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        """The lookup tables of numbers of groups and of codes."""
        fields = (*self.sums.group_fields, *self.sums.row_fields)
        read = (self.codes.stored_levels, *(group.table for group in fields))
        return tuple(dict.fromkeys(table for table in read if isinstance(table, Table)))

    @property
    def least(self) -> int:
        """The shortest block that the kernels support."""
        return CHUNK if self.codes.in_order else 16

    def serves(self, size: int) -> bool:
        """Whether the kernels support blocks of so many columns."""
        return size >= self.least and (size in SHORT or size % CHUNK == 0)

    def constants(self, is_half: bool, sizes: Mapping[str, int], tensors: Sequence[str]) -> dict[str, Any]:
        """Constants that say how codes become numbers, and how sums are scaled.  is_half: x is float16, not bfloat16.

        tensors: the names of the kernel's tensors.
        """
        place, codes = int(not is_half), self.codes
        converted = {"numbers": codes.numbers, "WIDTH": codes.width, "BITS": codes.bits, "SIGNED": codes.signed,
                     "UNIT": codes.unit[place], "BASE": codes.base[place]}
        if (records := self.records) is not None:
            return {**converted, "fields": records.fields, "scale": self.sums.scale, "start": records.start,
                    "RECORD": records.size, "CODES": records.codes, "HEAD": records.head}
        stored, levels = codes.stored_levels, codes.levels
        at = (len(tensors), 0) if isinstance(stored, Table) else stored and stored.constants(tensors, sizes)[:2]
        return {**converted, **self.scaled(sizes, tensors), "words": codes.words, "table": levels and levels.load,
                "LEVELS": at and levels and (*at, levels.entries)}

    def scaled(self, sizes: Mapping[str, int], tensors: Sequence[str]) -> dict[str, Any]:
        """Those of them that say how sums are scaled."""
        group_fields, row_fields = (tuple(field.constants(tensors, sizes, self.tables) for field in fields)
                                    for fields in (self.sums.group_fields, self.sums.row_fields))
        return {"scale": self.sums.scale, "finish": self.sums.finish, "FIELDS": group_fields, "ROW_FIELDS": row_fields}

    def sizes(self, sizes: Mapping[str, int]) -> list[int]:
        """The block lengths as numbers, for these size parameters."""
        return [int(block) if block.isdigit() else sizes[block] for block in self.sums.blocks]

    def columns_per_sum(self, sizes: Mapping[str, int]) -> int:
        """Columns whose products have one sum before it is scaled."""
        least = min(self.sizes(sizes), default=CHUNK)
        return CHUNK if least >= CHUNK else min(32, least)
