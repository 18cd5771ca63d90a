"""A storage as the kernels for matrix units see it: the layout of codes and of group numbers, and the scaling of sums.

emit/triton/matrix_unit.py prints the functions that a plan needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp

from qdsl.compiler.emit.tensors import is_read_by_dtype
from qdsl.compiler.emit.triton import records
from qdsl.compiler.emit.triton.codebook import Codebook, StoredTable, table_form
from qdsl.compiler.emit.triton.records import RecordWords
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import AffineDecode, Field, Program, Tensor
from qdsl.compiler.passes.derive_planar import (
    PLANAR,
    PLANES,
    axis_blocks,
    blocks_per_number,
    coordinate,
    float_of_table,
    is_code,
    is_stored,
)
from qdsl.core.numbers import Number

CHUNK = 128                                                      # columns whose codes fill 16 words of a 4-bit plane
SHORT = (16, 32, 64)                                             # block lengths of which a chunk has several
LOCALS = frozenset((
    "tensors", "row", "K", "chunk", "more", "F", "g", "N", "BASE", "fields", "sum", "ones", "total", "factor", "head", "lane",
    "both", "low", "high", "lanes", "bitplanes", "codebook", "records", "tl"))


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """A field of groups as a kernel reads it: blocks of rows and columns as text ('1' none, '' not subscripted).

    kind: how its numbers are stored, as in group_numbers.number.
    """

    name: str
    tensor: str
    rows: str
    columns: str
    kind: str
    optional: str | None
    table: str = ""                                              # the lookup table of its integers
    shared: int = 1                                              # flat blocks that share a number, counted over all rows
    at: int | None = None                                        # the lowest bit, if another field shares its bytes

    @property
    def varies(self) -> bool:
        """Whether it has several values along K."""
        return self.columns != ""


@dataclass(frozen=True)
class MatrixUnitPlan:
    """The kernels' view of a planar program."""

    program: Program
    affine: AffineDecode
    code: Number
    groups: tuple[GroupNumbers, ...]
    stored: str = ""                                             # the tensor, if rows are stored 8-bit codes
    book: Codebook | StoredTable | None = None                   # the lookup table of codes
    record: RecordWords | None = None                            # set if records hold codes and groups
    power: float = 1.0                                           # of two: weights are this times the affine formula

    @property
    def planes(self) -> list[tuple[str, int, int]]:
        """Name, width and lowest bit of each plane."""
        if self.stored:
            return [(argument(self.stored), 8, 0)]
        widths = PLANES[self.code.bits]
        lows = [sum(widths[:i]) for i in range(len(widths))]
        name = argument(self.affine.code)
        names = [name if len(widths) == 1 else f"{name}_{i}" for i in range(len(widths))]
        return list(zip(names, widths, lows, strict=True))

    @property
    def first(self) -> int:
        """The index of the codes' first tensor in the storage."""
        names = [argument(tensor.name) for tensor in self.program.tensors]
        return names.index(self.planes[0][0]) if self.record is None else 0

    @cached_property
    def blocks(self) -> list[str]:
        """Blocks of columns of the groups that vary along K."""
        return [group.columns for group in self.groups if group.varies]

    @cached_property
    def sizes(self) -> dict[str, list[int]]:
        """Every value that a block can have, by its text; -1, the whole axis, counts as every value."""
        values = {p.name.value: [int(v) for v in p.values if isinstance(v, int)] for p in self.program.spec.params}
        return {b: [int(b)] if b.isdigit() else [v if v > 0 else 1 << 30 for v in values[b]] for b in self.blocks}

    def serves(self, size: int) -> bool:
        """Whether the kernels support a block of so many columns."""
        return size >= self.least and (size in SHORT or size % CHUNK == 0)

    @property
    def supported(self) -> bool:
        """Whether the kernels support some size of every block; other sizes use the kernels for any storage."""
        return all(any(map(self.serves, sizes)) for sizes in self.sizes.values())

    @property
    def least(self) -> int:
        """The smallest block that the kernels support: lanes of stored rows hold columns of all groups of a chunk."""
        return CHUNK if self.stored else 16

    @property
    def integer(self) -> bool:
        """Whether float16 operands count from 0."""
        return self.book.is_int and not self.book.is_split if self.book else not self.code.is_float

    @property
    def has_parts(self) -> bool:
        """Whether codes are small floats whose parts index the bytes of operands."""
        return self.code.is_float and self.code.bits == 4 and self.book is None and self.record is None

    @property
    def lies(self) -> tuple[int, int]:
        """Width of a plane, and bits of codes that are operands without conversion; 0 if operands are computed, -1 for two."""
        if self.book and self.book.is_split:
            return 8, -1
        return (self.planes[0][1], self.code.bits) if self.integer and not self.book else (8, 0)

    @property
    def base(self) -> tuple[int, int]:
        """The difference of operands and codes, for float16 and bfloat16."""
        if not self.integer:
            return 0, 0
        if self.book:
            return self.book.base
        sign = 1 << (self.code.bits - 1) if self.code.kind == "signed" else 0
        return sign, sign + (128 * 17 if self.code.bits == 8 else 128)

    @property
    def unit(self) -> tuple[float, float]:
        """The factor of sums at the end, for float16 and bfloat16."""
        if self.integer:
            return 2.0 ** 24, 1.0
        if self.book:
            return 2.0 ** 24 if self.book.is_split else float(self.book.unit), 1.0
        return self.power * 2.0 ** (15 - ((1 << (self.exponent - 1)) - 1)), self.power

    @property
    def exponent(self) -> int:
        """The exponent bits of codes that are floats."""
        return int(self.code.name[1])

    @cached_property
    def outer(self) -> list[GroupNumbers]:
        """The groups whose numbers scale a sum after the loop: factors that are constant along K, or all if nothing varies."""
        if self.late:
            return list(self.groups)
        products = [{argument(f.removeprefix("/")) for f in product} for _, product in (*self.affine.scale, *self.affine.offset)]
        return [g for g in self.groups if not g.varies and all(g.name in product for product in products)]

    @property
    def inner(self) -> list[GroupNumbers]:
        """The groups whose numbers scale a sum inside the loop along K."""
        return [group for group in self.groups if group not in self.outer]

    @property
    def divisors(self) -> set[str]:
        """Names of the groups that sums are divided by."""
        terms = (*self.affine.scale, *self.affine.zero, *self.affine.offset)
        return {argument(f[1:]) for _, product in terms for f in product if f[0] == "/"}

    @property
    def has_tiles(self) -> bool:
        """Whether the kernel for many rows of x serves it."""
        return self.record is None and not self.stored

    @property
    def tall(self) -> bool:
        """Whether that kernel has registers for sums of 128 rows of x: one 4-bit plane, and at most a scale per sum."""
        large = all(max(sizes) >= CHUNK for sizes in self.sizes.values())
        return large and self.integer and self.code.bits == 4 and self.exact_zero is not None and not self.affine.offset

    @property
    def eight(self) -> str:
        """The type of codes that a kernel multiplies by 8-bit x; '' without that kernel.

        Zeros and offsets need sums of x, which are computed for whole rows.
        """
        simple = self.late or not (self.affine.zero or self.affine.offset)
        return self.code.name if self.stored and simple and self.code.name in ("e4m3", "i8") else ""

    @property
    def takes_sums(self) -> bool:
        """Whether something is added to codes, or to weights."""
        return bool(self.affine.zero or self.affine.offset)

    @property
    def exact_zero(self) -> int | None:
        """The zero, if it is an integer that operands can include: bfloat16 holds integers up to 256."""
        zero = self.affine.zero
        if not zero:
            return 0
        value, lowest = zero[0][0], -(1 << self.code.bits - 1) if self.code.kind == "signed" else 0
        simple = [p for _, p in zero] == [()] and value == int(value) and \
            -256 <= lowest + value <= 256 - (1 << self.code.bits) + 1
        return int(value) if self.integer and not self.book and simple else None

    @property
    def point(self) -> GroupNumbers | None:
        """The zero point, if operands can have it subtracted: an unsigned integer of few bits per group."""
        zero = self.affine.zero
        if not self.has_tiles or self.code.kind != "unsigned" or self.book:
            return None
        if [(c, len(fields)) for c, fields in zero] != [(-1.0, 1)]:
            return None
        group = next(g for g in self.groups if g.name == argument(zero[0][1][0]))
        number = self.program.field(zero[0][1][0]).number
        return group if group.varies and group.at is None and number is not None and number.kind == "unsigned" else None

    @property
    def sums_in_tiles(self) -> bool:
        """Whether the kernel for many rows needs sums of x, for zeros or offsets that its operands do not include."""
        return (self.exact_zero is None and self.point is None) or bool(self.affine.offset)

    @property
    def late(self) -> bool:
        """Whether nothing varies along K, so that sums are scaled once, at the end."""
        return not self.blocks


def argument(name: str) -> str:
    """The kernel's name of a tensor."""
    return f"{name}_" if name in LOCALS or name.endswith("_g") else name


def matrix_unit_plan(program: Program) -> MatrixUnitPlan | None:
    """The plan of a storage; None for other layouts of codes, or groups that are not runs of 16, 32, 64 or m * 128 columns.

    Besides the planar storage: storages with 8-bit codes and group numbers in rows, or with 4-bit codes and group numbers in
    records.
    """
    affine = program.affine
    if affine is None or (affine.columns and program.storage != PLANAR):
        return None
    code = program.field(affine.code).number
    record = records.record_layout(program)
    if record is not None and code is not None:
        groups = tuple(_group_of(program, program.field(name), record.tensor) for name in affine.fields)
        return MatrixUnitPlan(program, affine, code, groups, record=record)
    tensors = {name: _tensor_holding_only(program, name) for name in (affine.code, *affine.fields)}
    shares = {}
    if program.storage == PLANAR:
        tensors[affine.code] = ""
        shares = {name: share for name in affine.fields if (share := _share_of_bytes(program, name)) is not None}
        tensors |= {name: tensor for name, (tensor, _) in shares.items()}
    elif not is_code(code) or code is None or code.bits != 8 or affine.table:
        return None
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if code is None or len(present) < len(tensors):
        return None
    groups = tuple(replace(_group_of(program, program.field(name), present[name]), at=shares[name][1] if name in shares else None)
                   for name in affine.fields)
    code, affine, power = _codes_as_float(program, code, affine)
    book = _codebook_of(program, affine.table, 1 << code.bits) if affine.table else None
    plan = MatrixUnitPlan(program, affine, code, groups, present[affine.code], book, power=power)
    return plan if plan.supported and (book is not None or not affine.table) else None


def _codebook_of(program: Program, table: str, entries: int) -> Codebook | StoredTable | None:
    """The lookup table of codes; None if kernels do not support it."""
    if not is_stored(program, table):
        return table_form(program, table, entries)
    field = program.field(table)
    rows = dict(pair for index in field.index if (pair := coordinate(program, index)) is not None)
    return StoredTable(next(tensor.name for tensor in program.tensors if tensor.placements[0].field == table), rows.get("n", ""),
                       entries) if field.table == (entries,) else None


def _codes_as_float(program: Program, code: Number, affine: AffineDecode) -> tuple[Number, AffineDecode, float]:
    """The code's type, the affine formula, and a power of two to multiply it by.

    A table with the numbers of a small float times a power of two is treated as that float.
    """
    small = float_of_table(program, affine.table) if affine.table and not affine.zero else None
    if small is None:
        return code, affine, 1.0
    scale = tuple((coefficient * small[1], product) for coefficient, product in affine.scale)
    power = scale[0][0] if len(scale) == 1 and not affine.offset and frexp(scale[0][0])[0] == 0.5 else 1.0
    return small[0], replace(affine, scale=tuple((c / power, product) for c, product in scale), table=""), power


def _tensor_holding_only(program: Program, name: str) -> str | None:
    """The tensor whose elements, row by row, hold exactly the bits of a field."""
    field = program.field(name)
    bits = 32 if field.number is None else field.number.bits
    for tensor in program.tensors:
        order = [digit for axis in tensor.axes for digit in axis.digits]
        names = list(tensor.placements[0].vars) if tensor.placements else []
        if [p.field for p in tensor.placements] == [name] and tensor.words == 1 and [d for d in order if d in names] == names \
                and tensor.stored is None and tensor.section is None and all(tile == 1 for tile in tensor.placements[0].extents) \
                and not tensor.placements[0].flat and sum(part.width for part in tensor.placements[0].slices) == bits \
                and _is_by_rows(program, tensor, field):
            return tensor.name
    return None


def _share_of_bytes(program: Program, name: str) -> tuple[str, int] | None:
    """The tensor whose bytes hold a field and another one, and the field's lowest bit; None if it has its own tensor."""
    for tensor in program.tensors:
        placed = next((placement for placement in tensor.placements if placement.field == name), None)
        if placed is not None and len(tensor.placements) > 1 and tensor.element.bits == 8:
            return tensor.name, placed.slices[0].bit((0,) * len(placed.extents))
    return None


def _is_by_rows(program: Program, tensor: Tensor, field: Field) -> bool:
    """Whether a tensor of single elements has them by rows and blocks of columns."""
    if any(ix.flat_of(index) is not None for index in field.index):
        axes = 1 + (blocks_per_number(program, field) == 1)
        return axis_blocks(program, field) is not None and len(tensor.placements[0].vars) == axes
    return all(coordinate(program, i) or str(i) == "k" for i in field.index)


def _group_of(program: Program, field: Field, tensor: str) -> GroupNumbers:
    assert field.number is not None and program.affine is not None
    blocks = dict(axis_blocks(program, field) or [])
    default = program.defaults.get(field.name)
    default = default if default is not None else program.where.get(field.name)
    return GroupNumbers(argument(field.name), tensor, blocks.get("n", ""), blocks.get("k", ""), _group_kind(program, field),
                        None if default is None else str(default), program.affine.lookups.get(field.name, ""),
                        blocks_per_number(program, field))


def _group_kind(program: Program, field: Field) -> str:
    """The kind of a field's numbers: an integer's width, the name of an 8-bit float, or 0 for other floats."""
    assert field.number is not None
    if not field.number.is_float:
        return str(field.number.bits)
    return f'"{field.number.name}"' if field.number.bits == 8 and not is_read_by_dtype(program, field) else "0"
