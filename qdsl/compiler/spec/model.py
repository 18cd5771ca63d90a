"""A spec as its author wrote it: parsed, with positions, not yet checked for meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qdsl.compiler.spec.grammar import CallExpr, Expr, FieldType, RecordLine, Shape
from qdsl.compiler.spec.source import Source, Span, Text
from qdsl.core.shapes import ANY

Data = bool | int | str | list["Data"] | dict[str, "Data"]


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter and its values, the default first: integers or names of number types.

    is_open: any other positive number is valid, too.
    """

    name: Text
    values: tuple[int | str, ...]
    is_open: bool = False

    @property
    def written(self) -> tuple[int | str, ...]:
        """The values as generated files list them."""
        return (*self.values, ANY) if self.is_open else self.values


@dataclass(frozen=True, slots=True)
class Dim:
    """A derived extent (`G: ceil(K / group)`) or a constant of the parameters (`P: lcm(bits, 32) / bits`)."""

    name: Text
    value: Expr


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers that decode looks up: all integers, or all float32; a flat list, or rows of columns, row by row.

    loops, formula: how they were computed, if they are not listed.
    """

    name: Text
    values: tuple[int, ...] | tuple[float, ...]
    shape: tuple[int, ...]
    loops: tuple[str, ...] = ()
    formula: Expr | None = None

    @property
    def is_int(self) -> bool:
        return isinstance(self.values[0], int)


@dataclass(frozen=True, slots=True)
class Field:
    """A field's name, type and subscripts."""

    name: Text
    typed: FieldType


@dataclass(frozen=True, slots=True)
class StoredOperation:
    """A stored operation: the file's value for a packed value; `target` is 'word' or a field, under conditions on parameters."""

    when: tuple[tuple[Text, tuple[int | str, ...]], ...]
    target: Text
    value: Expr


@dataclass(frozen=True, slots=True)
class SectionHolder:
    """A stored tensor that holds others one after the other: in every row (by_rows), or in the whole tensor.

    seen: its shape in files.  is_planes: the sections are alike, and an axis of the tensor counts them.
    """

    name: Text
    by_rows: bool
    aliases: tuple[Text, ...]
    seen: tuple[Text, ...]
    is_planes: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a storage.  run: the axis of record tensors in short form, whose records hold consecutive elements.

    stream: the entropy code that holds its elements, in tensors of its own.  seen: its shape in files.  inside: the stored tensor
    of which it is a section.  ordered: whether its columns are places, if the spec says so.
    """

    name: Text
    shape: Shape | None
    run: Text | None
    record: tuple[RecordLine, ...]
    record_text: Text
    optional: Expr | None
    aliases: tuple[Text, ...]
    stored: tuple[StoredOperation, ...]
    stream: CallExpr | None = None
    omitted: bool = False
    seen: tuple[Text, ...] = ()
    inside: SectionHolder | None = None
    ordered: bool | None = None

    @property
    def stored_name(self) -> Text:
        """The name in files of the tensor, or of the tensor that holds it."""
        return self.inside.name if self.inside is not None else self.name


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage.  where: fixes parameters, and values of fields that are not stored; only: allowed values of parameters.

    shape: the tensor that holds N and K.  options: options of the encode scheme that its producers choose.  least: of dims.
    transient: it is made for a machine when a weight is loaded, and never in files.  order: the tensor that may state the stored
    order of columns, and the type of its elements.
    """

    name: Text
    where: tuple[tuple[Text, Expr], ...]
    tensors: tuple[Tensor, ...]
    only: tuple[tuple[Text, tuple[int | str, ...]], ...] = ()
    shape: Text | None = None
    options: tuple[tuple[Text, Text], ...] = ()
    least: tuple[tuple[Text, int], ...] = ()
    transient: bool = False
    order: Text | None = None
    order_type: str = "i32"


@dataclass(frozen=True, slots=True)
class Branch:
    """A term added to the decoded weight: a kind of core/branches.py, and the tensors that hold its fields in every storage."""

    kind: Text
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A number that the author claims about the layout."""

    name: Text
    value: float


@dataclass(frozen=True, slots=True)
class Spec:
    """A spec, checked only for its shape.  fixed: N or K, if all weights have the same."""

    source: Source
    name: Text
    title: str
    origin: str
    params: tuple[Param, ...]
    dims: tuple[Dim, ...]
    tables: tuple[Table, ...]
    fields: tuple[Field, ...]
    decode: Expr
    decode_text: str
    encode: CallExpr | None
    storages: tuple[Storage, ...]
    detect: Mapping[str, Data]
    claims: tuple[Claim, ...]
    fixed: Mapping[str, int] = field(default_factory=dict)
    plus: tuple[Branch, ...] = ()

    @property
    def span(self) -> Span:
        """The position of the format's name."""
        return self.name.span

    @property
    def branch_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for branch in self.plus for tensor in branch.tensors)

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name.value == name)
