"""The compiler's representation of a format: one typed program per storage and choice of the parameters that change the bits.

Passes fill in a `Program` from left to right (params, fields, tensors, values, units); printers read only the Program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qdsl.compiler.ir.index import Domain, Index, product_of
from qdsl.compiler.spec.model import Spec, Storage
from qdsl.compiler.spec.source import Span, Text
from qdsl.core.layout import FieldSlice, RecordLine
from qdsl.core.numbers import Number


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its type (None for an index into `groups`), and its subscripts for weight [n, k].

    kind: the type as the spec names it: a number type, 'index', or a parameter that lists types.  index: subscripts over n, k,
    size parameters and the names of index fields (a gather).  extents: the shape of the field.  A stored table has constant
    extents after those of its index: it is shared by a block or by all weights, and decode reads its entries.  by_places: in
    storages with an order of columns, its k is the place of a stored column.
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
        """Bits of a code, 32 if a parameter decides the type."""
        return self.number.bits if self.number else 32

    @property
    def table(self) -> tuple[int, ...]:
        """The shape of a stored table; () for other fields."""
        return tuple(extent.const for extent in self.extents[len(self.index):])


@dataclass(frozen=True, slots=True)
class AxisDigit:
    """A digit of a tensor's axis: `t < extent`.  exact: the extent divides evenly, so that there is no padding.

    spare: whole records may be padding, as in `ceil(K/1024)*8` records of 128 columns.
    """

    name: str
    extent: Index
    exact: bool
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One physical axis: the product of its digits, slowest first; '' is the word.

    extent: the number of elements if the last record ends after its last used word.
    """

    digits: tuple[str, ...]
    extent: Index | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a field in a tensor: per coordinate its digits, and the slices of a record.

    digits: of a coordinate, slowest first: names of variables, and '' for the extents[axis] elements in a record.  ('t', '') is
    the plain case, coordinate = extent * t + local; in ('', 't') a record holds elements that are t's extent apart.  flat: the
    only coordinate is the position n * K + k of a two-dimensional field.  slices: empty until the layouts are inferred.  copies:
    slices of bits that the record repeats.
    """

    field: str
    digits: tuple[tuple[str, ...], ...]
    extents: tuple[int, ...]
    flat: bool
    slices: tuple[FieldSlice, ...] = ()
    copies: tuple[FieldSlice, ...] = ()

    @property
    def vars(self) -> tuple[str, ...]:
        """The variables that select the record of an element, slower digits first."""
        return tuple(dict.fromkeys(digit for digits in self.digits for digit in digits if digit))

    @property
    def plain(self) -> bool:
        """Whether each coordinate has at most one variable, and a record holds consecutive elements."""
        return all(digits[1:] in ((), ("",)) and (len(digits) > 1 or not digits[0]) for digits in self.digits)

    @property
    def tiles(self) -> tuple[tuple[str, int], ...]:
        """For a plain placement, per coordinate (variable or '', elements of a record)."""
        assert self.plain
        return tuple((digits[0], extent) for digits, extent in zip(self.digits, self.extents, strict=True))

    @property
    def ranges(self) -> int:
        """How many ranges of elements have separate slices."""
        return len({part.start for part in self.slices})

    @property
    def cuts(self) -> tuple[tuple[FieldSlice, ...], ...]:
        """The slices of all ranges of elements, grouped by equal bits."""
        slices_by_bit: dict[int, tuple[FieldSlice, ...]] = {}
        for part in self.slices:
            slices_by_bit[part.lo] = (*slices_by_bit.get(part.lo, ()), part)
        return tuple(slices_by_bit.values())


@dataclass(frozen=True, slots=True)
class StoredChange:
    """stored = packed + amount modulo 2^bits, or packed ^ amount, on the words of a tensor (`field` None) or on one field.

    `op` is '+' or '^'; amount is signed.
    """

    field: str | None
    op: str
    amount: int

    def text(self, value: str, sign: int, bits: int = 0) -> str:
        """The text of the stored value for a packed value (sign 1) or the reverse (sign -1).

        bits: print the amount as a number of that many bits, of which the caller keeps the lowest; 0 for those of a word.
        """
        if self.op == "^":
            return f"{value} ^ {self.amount % (1 << bits) if bits else hex(self.amount)}"
        amount = sign * self.amount
        return f"{value} {'-' if amount < 0 else '+'} {abs(amount) if bits else hex(abs(amount))}"


@dataclass(frozen=True, slots=True)
class Stream:
    """The entropy code that holds a tensor's elements (core/codecs.py); tensors: the storage's names of the code's tensors."""

    coding: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TensorSection:
    """The section of a stored tensor that holds another tensor: its first element, and the number of elements.

    Both count along a row (by_rows), which is then also the first axis of the section, or through the whole stored tensor.
    is_plane: all sections are alike, and an axis before theirs, or after that of rows, counts them.
    """

    holder: str
    by_rows: bool
    first: Index
    length: Index
    is_plane: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: records of `record_bits`, each along the word digit of an axis, in elements of `element`.

    kind: the element type as the spec names it.  omitted: it is absent if its field has its default value.  seen: the axes in
    files, if different.  section: the part of another tensor that holds it; `aliases` and `seen` are then those of that tensor.
    within: the integer type in files that holds several elements.
    """

    name: str
    kind: str
    element: Number
    vars: tuple[AxisDigit, ...]
    axes: tuple[Axis, ...]
    lines: tuple[RecordLine, ...]
    record_bits: int
    placements: tuple[Placement, ...]
    stored: StoredChange | None
    optional: bool
    omitted: bool
    aliases: tuple[str, ...]
    span: Span
    record_span: Span
    stream: Stream | None = None
    seen: tuple[Text, ...] = ()
    section: TensorSection | None = None
    within: str = ""

    @property
    def stored_name(self) -> str:
        """The name in files of the tensor, or of the tensor that holds it."""
        return self.section.holder if self.section is not None else self.name

    @property
    def words(self) -> int:
        """Elements per record."""
        return self.record_bits // self.element.bits

    def var(self, name: str) -> AxisDigit:
        return next(var for var in self.vars if var.name == name)

    def axis_extent(self, axis: Axis) -> Index:
        """The number of elements of an axis."""
        digits = [self.var(digit).extent if digit else Index(self.words) for digit in axis.digits]
        return product_of(digits) if axis.extent is None else axis.extent


@dataclass(frozen=True, slots=True)
class Value:
    """One step of decode.  `op` is 'field', 'const', 'table', 'neg' or an operator; integers have a range, f32 has none.

    A table of rows has one argument too, the row; the column is k modulo the row's length.  'entry' is the same for a stored
    table; `const` is the index along the axes before the last two.  'digit' is a digit of the column, k // const % (range's end +
    1).  index: the subscripts over which the value varies; an operation takes the finer subscripts of its two operands.
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
        """Whether the value is an integer, with a known range."""
        return self.range is not None


Terms = tuple[tuple[float, tuple[str, ...]], ...]               # a sum of products of fields: coefficient, names or '/name'


@dataclass(frozen=True, slots=True)
class AffineDecode:
    """Decode as w = (scale * (code + zero) + offset) * columns; every weight has a code, and groups have the rest.

    table: the table that the code indexes first, or ''.  columns: a field of every column, '/name' if it divides, or ''; kernels
    multiply x by it instead of the weight.  lookups: tables that other fields index first.
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
class CodeFactor:
    """The share of a single weight in a field for `columns` weights: entries of a table row, or the field itself.

    numbers: the distinct values that a weight can have, in rising order.
    """

    field: str
    table: str
    columns: int
    numbers: tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowCodes:
    """A code per weight that replaces fields which a few columns share.

    A joint number has one digit per factor, the index of its value; the first factor's digit is the highest.  order: the joint
    number of each code.
    """

    code: str
    factors: tuple[CodeFactor, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BranchTensor:
    """The tensor of a branch's field.

    kind: its element type as the spec names it.  digits: their extents in storage order, slowest first.  order: for every
    coordinate of the field its digits, slowest first, as indices into `digits`.  axes: the shape in files.  half: if a word holds
    two fields, the type and first bit of this one.
    """

    role: str
    name: str
    kind: str
    digits: tuple[Index, ...]
    order: tuple[tuple[int, ...], ...]
    axes: tuple[Index, ...]
    aliases: tuple[str, ...]
    half: tuple[str, int] | None = None

    @property
    def stored_kind(self) -> str:
        """The element type, or the type and first bit of half a word: 'f16@16'."""
        return f"{self.half[0]}@{self.half[1]}" if self.half else self.kind

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is the field itself."""
        return self.order == tuple((place,) for place in range(len(self.digits)))


@dataclass(frozen=True, slots=True)
class Branch:
    """A term added to the decoded weight: a kind of core/branches.py, and the tensors of its fields in the kind's order."""

    kind: str
    tensors: tuple[BranchTensor, ...]
    ordered: bool = False


Constant = int | float | str | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Encode:
    """The scheme that chooses codes: its roles (role -> field), options, and constants of decode.

    Constants are numbers, names of tables, and, for parts of decode that depend on one field, the numbers for all its codes.
    open: the options that a caller of quantize may set; importance: the caller may pass one.
    """

    scheme: str
    roles: Mapping[str, str]
    options: Mapping[str, str | int | float]
    constants: Mapping[str, Constant]
    open: tuple[str, ...]
    importance: bool


@dataclass(frozen=True, slots=True)
class UnrolledDigit:
    """A digit that a kernel unrolls: each of its `extent` values moves `axis` by `weight`."""

    name: str
    axis: str
    weight: int
    extent: int


@dataclass(frozen=True, slots=True)
class IterationUnits:
    """How a kernel iterates over the weight: by words of `tensor`, whose variable along `last` is contiguous in memory.

    digits: the variables of the unit, slowest first: (name, weight in k, extent or None).  lanes: the weights of a unit.  whole:
    the words of a record are loaded together because elements straddle them.
    """

    tensor: str
    last: str
    tiles: Mapping[str, int]
    digits: tuple[tuple[str, int, int | None], ...]
    lanes: tuple[UnrolledDigit, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A format in one storage.  params: the structural parameters.  sizes: the other ones.  dims: derived extents.

    row_codes: how its code encodes fields of the format that it replaces, if any.
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
    affine: AffineDecode | None = None
    encode: Encode | None = None
    units: IterationUnits | None = None
    row_codes: RowCodes | None = None
    plus: tuple[Branch, ...] = ()

    @property
    def authored(self) -> Storage:
        """The program's storage, as the spec has it."""
        return next(storage for storage in self.spec.storages if storage.name.value == self.storage)

    @property
    def unstored(self) -> Mapping[str, Index]:
        """The values of fields that no tensor, or an optional tensor, holds."""
        return {**self.defaults, **self.where}

    @property
    def appended(self) -> tuple[str, ...]:
        """Float fields [n, extent] that decode does not read: plain numbers of a row behind its K columns."""
        read = {value.name for value in self.values}
        return tuple(field.name for field in self.fields if field.name not in read and field.number is not None
                     and field.number.is_float and len(field.table) == 1 and list(map(str, field.index)) == ["n"])

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def row_axis(self, value: Value) -> str:
        """The axis, 'n' or 'k', along which the entries of a stored table's row lie."""
        columns = self.field(value.name).table[-1]
        return "n" if f"n // {columns}" in map(str, self.field(self.values[value.args[0]].name).index) else "k"

    @property
    def stored(self) -> Mapping[str, tuple[Tensor, ...]]:
        """The tensors in files: by name the tensor itself, or its sections in order."""
        holders: dict[str, tuple[Tensor, ...]] = {}
        for tensor in self.tensors:
            holders[tensor.stored_name] = (*holders.get(tensor.stored_name, ()), tensor)
        return holders

    def tensor(self, name: str) -> Tensor:
        """The stored tensor, or the section, with this name."""
        return next(tensor for tensor in self.tensors if tensor.name == name)
