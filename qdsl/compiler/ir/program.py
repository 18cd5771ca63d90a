"""What a format means: one typed program for each storage and each choice of the parameters that shape its bits.

Passes fill a `Program` from left to right (params, fields, tensors, values, units); printers read it and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qdsl.compiler.ir.index import Domain, Index, product_of
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.source import Span, Text
from qdsl.core.layout import Line, Slice
from qdsl.core.numbers import Number


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its type (None for an index into `groups`), and what it is subscripted by for weight [n, k].

    `kind` is the type as the spec names it: a number type, 'index', or a parameter that lists types.  `index` is over n, k,
    size parameters and the names of index fields (a gather); `extents` is the shape of the field.  A stored table has constant
    extents behind those of its index: the weights of a block share it, or all of them, and decode reads its entries.
    by_places: its k is the place where a column is stored, in storages that have an order of columns.
    """

    name: str
    kind: str
    number: Number | None
    index: tuple[Index, ...]
    extents: tuple[Index, ...]
    groups: Index | None
    span: Span
    by_places: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code, 32 where a parameter decides the type."""
        return self.number.bits if self.number else 32

    @property
    def table(self) -> tuple[int, ...]:
        """The shape of a stored table; () of any other field."""
        return tuple(extent.const for extent in self.extents[len(self.index):])


@dataclass(frozen=True, slots=True)
class Var:
    """A digit of a tensor's axis: `t < extent`.  `exact` says that the extent divides evenly, so nothing is padding.

    spare: whole records may be padding, `ceil(K/1024)*8` of 128 columns each.
    """

    name: str
    extent: Index
    exact: bool
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One physical axis: the product of its digits, slowest first; '' stands for the word.

    extent: how many elements it has where the last record is cut off after the last word that holds something.
    """

    digits: tuple[str, ...]
    extent: Index | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a field lies in a tensor: per coordinate its digits, and the slices of a record.

    digits: of a coordinate, slowest first, the names of variables, and '' for what a record holds, extents[axis] elements.
    ('t', '') is the plain case, coordinate = extent * t + local; ('', 't') a record of elements that are t's extent apart.
    `flat` says that the one coordinate is the position n * K + k of a two-dimensional field.  `slices` is
    empty until the layouts are inferred.  copies: of bits that the record holds again.
    """

    field: str
    digits: tuple[tuple[str, ...], ...]
    extents: tuple[int, ...]
    flat: bool
    slices: tuple[Slice, ...] = ()
    copies: tuple[Slice, ...] = ()

    @property
    def vars(self) -> tuple[str, ...]:
        """The variables that carry the field from record to record, those of slower digits first."""
        return tuple(dict.fromkeys(digit for digits in self.digits for digit in digits if digit))

    @property
    def plain(self) -> bool:
        """Whether each coordinate has one variable or none, and a record holds consecutive elements."""
        return all(digits[1:] in ((), ("",)) and (len(digits) > 1 or not digits[0]) for digits in self.digits)

    @property
    def tiles(self) -> tuple[tuple[str, int], ...]:
        """Of a plain placement, per coordinate (variable or '', elements of a record)."""
        assert self.plain
        return tuple((digits[0], extent) for digits, extent in zip(self.digits, self.extents, strict=True))

    @property
    def ranges(self) -> int:
        """How many ranges of elements have slices of their own."""
        return len({part.start for part in self.slices})

    @property
    def cuts(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices of the same bits together, in all ranges of elements."""
        slices_by_bit: dict[int, tuple[Slice, ...]] = {}
        for part in self.slices:
            slices_by_bit[part.lo] = (*slices_by_bit.get(part.lo, ()), part)
        return tuple(slices_by_bit.values())


@dataclass(frozen=True, slots=True)
class Change:
    """stored = packed + amount modulo 2^bits, or packed ^ amount, on the words of a tensor (`field` None) or on one field.

    `op` is '+' or '^'; amount is signed.
    """

    field: str | None
    op: str
    amount: int

    def text(self, value: str, sign: int, bits: int = 0) -> str:
        """What the file holds of what the record packs (sign 1) or the reverse (sign -1), for the text of a value.

        bits: the amount is shown as a number of that many bits, of which the caller keeps the lowest; 0 for that of a word.
        """
        if self.op == "^":
            return f"{value} ^ {self.amount % (1 << bits) if bits else hex(self.amount)}"
        amount = sign * self.amount
        return f"{value} {'-' if amount < 0 else '+'} {abs(amount) if bits else hex(abs(amount))}"


@dataclass(frozen=True, slots=True)
class Stream:
    """The entropy code that holds a tensor's elements (core/codecs.py); tensors: what the storage calls those of the code."""

    coding: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Section:
    """Where a tensor lies in the stored tensor that holds it: its first element, and how many elements there are.

    Both count along a row (by_rows), which then is the first axis of the section too, or through the whole stored tensor.
    is_plane: sections are alike, and the axis ahead of theirs, or behind that of rows, counts them.
    """

    holder: str
    by_rows: bool
    first: Index
    length: Index
    is_plane: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: records of `record_bits`, each along the word digit of an axis, in elements of `element`.

    `kind` is the element type as the spec names it.  omitted: it is left out where its field has the value of a missing one.
    seen: the axes that files give it, where they are others.  section: of a tensor that another one holds, where; `aliases` and
    `seen` are then those of the holder.  within: the integers of files, which hold several elements each.
    """

    name: str
    kind: str
    element: Number
    vars: tuple[Var, ...]
    axes: tuple[Axis, ...]
    lines: tuple[Line, ...]
    record_bits: int
    placements: tuple[Placement, ...]
    stored: Change | None
    optional: bool
    omitted: bool
    aliases: tuple[str, ...]
    span: Span
    record_span: Span
    stream: Stream | None = None
    seen: tuple[Text, ...] = ()
    section: Section | None = None
    within: str = ""

    @property
    def stored_name(self) -> str:
        """What files call the tensor, or the one that holds it."""
        return self.section.holder if self.section is not None else self.name

    @property
    def words(self) -> int:
        """Elements of one record."""
        return self.record_bits // self.element.bits

    def var(self, name: str) -> Var:
        """The variable of a name."""
        return next(var for var in self.vars if var.name == name)

    def axis_extent(self, axis: Axis) -> Index:
        """How many elements an axis has."""
        digits = [self.var(digit).extent if digit else Index(self.words) for digit in axis.digits]
        return product_of(digits) if axis.extent is None else axis.extent


@dataclass(frozen=True, slots=True)
class Value:
    """One step of decode.  `op` is 'field', 'const', 'table', 'neg' or an operator; integers carry their range, f32 has none.

    A table of rows has one argument too, the row: the column is k modulo the row's length.  'entry' is the same of a stored
    table, `const` the number of the plane of rows, those of the axes before the last two.  'digit' is the column by its digit, k
    // const % (range's end + 1).  `index` is what the value varies over; two values meet at the finer of their subscripts.
    """

    op: str
    args: tuple[int, ...]
    name: str
    const: int | float
    range: tuple[int, int] | None
    index: tuple[Index, ...]
    span: Span = field(compare=False)

    @property
    def is_int(self) -> bool:
        """Whether the value is an integer, whose range is known."""
        return self.range is not None


Terms = tuple[tuple[float, tuple[str, ...]], ...]               # a sum of products of fields: coefficient, names or '/name'


@dataclass(frozen=True, slots=True)
class Affine:
    """w = (scale * (code + zero) + offset) * columns, where code is a field of every weight and the rest belongs to groups.

    table: what the code is looked up in first, '' for none.  columns: a field of every column, '/name' where it divides, '' for
    none; kernels meet x with it in place of the weight.  lookups: the tables in which other fields are looked up first.
    """

    code: str
    scale: Terms
    zero: Terms
    offset: Terms
    table: str = ""
    columns: str = ""
    lookups: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of scale, zero and offset."""
        parts = (self.scale, self.zero, self.offset)
        return tuple(dict.fromkeys(f.removeprefix("/") for part in parts for _, product in part for f in product))


@dataclass(frozen=True, slots=True)
class Factor:
    """What single weights get of a field that `columns` of them share: the entries of a table's row, or the field itself.

    numbers: the distinct values that a weight can get, in rising order.
    """

    field: str
    table: str
    columns: int
    numbers: tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowCodes:
    """A code per weight in place of fields that a few columns share.

    Places of numbers, one per factor, are the digits of a joint number, the first factor's the highest.  order: the joint
    number that each code stands for.
    """

    code: str
    factors: tuple[Factor, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BranchTensor:
    """The tensor of a branch's field.

    kind: its element type as the spec names it.  digits: their extents in storage order, slowest first.  order: of every
    coordinate of the field its digits, slowest first, as places in `digits`.  axes: the shape in files.  half: of a tensor of
    words that holds two fields the type and the first bit of this one, 'f16@16'.
    """

    role: str
    name: str
    kind: str
    digits: tuple[Index, ...]
    order: tuple[tuple[int, ...], ...]
    axes: tuple[Index, ...]
    aliases: tuple[str, ...]
    half: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the field lies in the tensor as it is."""
        return self.order == tuple((place,) for place in range(len(self.digits)))


@dataclass(frozen=True, slots=True)
class Branch:
    """What is added to the decoded weight: a kind of core/branches.py, and the tensors of its fields in the kind's order."""

    kind: str
    tensors: tuple[BranchTensor, ...]
    ordered: bool = False


Constant = int | float | str | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Encode:
    """The scheme that chooses codes: its roles (role -> field), options, and what it needs to know of decode.

    Constants are numbers, names of tables, and of what depends on one field alone the numbers for all its codes.
    `open` names the options that a caller of quantize may give too; importance: it may give that.
    """

    scheme: str
    roles: Mapping[str, str]
    options: Mapping[str, str | int | float]
    constants: Mapping[str, Constant]
    open: tuple[str, ...]
    importance: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """A digit that a kernel unrolls: weight `axis` moves by `weight` for each of its `extent` values."""

    name: str
    axis: str
    weight: int
    extent: int


@dataclass(frozen=True, slots=True)
class Units:
    """How a kernel walks the weight: by words of `tensor`, whose variable along `last` is contiguous in memory.

    `digits` are the variables of the unit, slowest first: (name, weight in k, extent or None).  `lanes` are the weights
    of one unit.  `whole` says that the words of a record are loaded together because elements straddle them.
    """

    tensor: str
    last: str
    tiles: Mapping[str, int]
    digits: tuple[tuple[str, int, int | None], ...]
    lanes: tuple[Lane, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Program:
    """`params` has the structural parameters' values; `sizes` names the others; `dims` are the derived extents.

    row_codes: of a program whose fields are not the format's, how its code makes some of those.
    """

    spec: Spec
    storage: str
    params: Mapping[str, int | str]
    sizes: tuple[str, ...]
    dims: Mapping[str, Index] = field(default_factory=dict)
    domain: Domain = field(default_factory=Domain)
    fields: tuple[Field, ...] = ()
    where: Mapping[str, Index] = field(default_factory=dict)
    defaults: Mapping[str, Index] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    values: tuple[Value, ...] = ()
    affine: Affine | None = None
    encode: Encode | None = None
    units: Units | None = None
    row_codes: RowCodes | None = None
    plus: tuple[Branch, ...] = ()

    @property
    def unstored(self) -> Mapping[str, Index]:
        """The values of fields that no tensor holds, or that an optional one does."""
        return {**self.defaults, **self.where}

    @property
    def appended(self) -> tuple[str, ...]:
        """Fields of floats [n, extent] that decode does not read: numbers of a row behind its K columns."""
        read = {value.name for value in self.values}
        return tuple(field.name for field in self.fields if field.name not in read and field.number is not None
                     and field.number.is_float and len(field.table) == 1 and list(map(str, field.index)) == ["n"])

    def field(self, name: str) -> Field:
        """The field of a name."""
        return next(field for field in self.fields if field.name == name)

    def row_axis(self, value: Value) -> str:
        """The axis, 'n' or 'k', along which the entries of a stored table's row lie."""
        columns = self.field(value.name).table[-1]
        return "n" if f"n // {columns}" in map(str, self.field(self.values[value.args[0]].name).index) else "k"

    @property
    def stored(self) -> Mapping[str, tuple[Tensor, ...]]:
        """The tensors that files have: by name the tensor itself, or its sections in their order."""
        holders: dict[str, tuple[Tensor, ...]] = {}
        for tensor in self.tensors:
            holders[tensor.stored_name] = (*holders.get(tensor.stored_name, ()), tensor)
        return holders

    def tensor(self, name: str) -> Tensor:
        """The stored tensor, or the section, of a name."""
        return next(tensor for tensor in self.tensors if tensor.name == name)
