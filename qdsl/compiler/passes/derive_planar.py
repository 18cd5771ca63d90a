"""The planar storage: a format's fields laid out for matrix units.

Does: writes one more storage in the language of specs, if decode is affine in a code (factor_decode), or in a code that replaces
table rows (expand_codes), whose bits fit registers.  The storage has the code in planes of 4, 2 and 1 bits (or 8), with each
chunk of 128 columns in the order of a warp's lanes (gpu/kernels/lanes.py).  Every other field has a tensor, row by row, in bytes
or its own float type; two small integers of the same blocks share bytes.  The storage then goes through the passes like any
other, which prove that it holds each bit once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import frexp, gcd

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Field, Program
from qdsl.compiler.passes.expand_codes import expand_codes
from qdsl.compiler.passes.factor_decode import why_not_affine
from qdsl.compiler.passes.samples import axis_divisor
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Storage, Tensor
from qdsl.compiler.spec.source import Span, Text
from qdsl.core.numbers import Number, number

PLANAR, ORDER = "planar", "order"
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
# Columns of a record, its loops, and the place of its chunks of 128 columns, by the width of the first plane and of a plane. Bits
# of later planes are as far apart as the first plane's codes, so that one shift moves a pair of them into place.
ORDERS = {
    (8, 8): (128, "h<2 c<4 u<4 e<2 i<2", "128*t"),
    (4, 4): (128, "c<4 u<4 e<2 i<2 h<2", "128*t"),
    (4, 2): (256, "c<4 u<4 e<2 i<2 h<2 j<2", "256*t + 128*j"),
    (4, 1): (512, "c<4 u<4 e<2 i<2 h<2 j<4", "512*t + 128*j"),
    (2, 2): (256, "c<4 u<4 e<2 i<2 j<2 h<2", "256*t + 128*j"),
    (2, 1): (512, "c<4 u<4 e<2 i<2 j<2 h<2 l<2", "512*t + 256*l + 128*j"),
    (1, 1): (512, "c<4 u<4 e<2 i<2 l<2 j<2 h<2", "512*t + 256*l + 128*j"),
}
# A 4-bit float in two parts, each of which selects a byte (gpu/kernels/codebook.py).
FLOAT_ORDER = (128, "c<4 u<4 i<2 e<2 p<2 h<2", "128*t")
LOOKED_UP = ("u2", "u3", "u4", "u5", "u6", "u7", "u8")           # codes that index a table
IN_REGISTERS = 32                                                # longest table in registers; longer ones are loaded from memory
LOOKED_UP_ORDERS = {                                             # four bytes are looked up at a time (gpu/kernels/codebook.py)
    (4, 4): (128, "c<4 u<4 i<2 e<2 h<2", "128*t"),
    (4, 1): (512, "c<4 u<4 i<2 e<2 h<2 j<4", "512*t + 128*j"),
    (2, 2): (256, "c<4 u<4 i<2 e<2 h<2 j<2", "256*t + 128*j"),
    (2, 1): (512, "c<4 u<4 i<2 e<2 h<2 j<2 l<2", "512*t + 256*l + 128*j"),
}
FLOAT_CODES = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")           # shifts alone turn their bits into a 16-bit float
X_FLOATS = {"f32", "bf16", "f16"}                                # of column factors that x is multiplied by
GROUP_FLOATS = ("f32", "bf16", "f16", "e8m0", "e8m0h", "e4m3", "ue4m3")


def derive_planar(programs: Sequence[Program]) -> Program | None:
    """A program of the same params with the planar storage, before its passes; None if the format has none.

    programs: the format's other storages, with one choice of params.  Blocks that are whole in all of them are whole here.
    """
    program = _with_codes(programs)
    if isinstance(program, str) or program.affine is None or _why_not_planar(program):
        return None
    affine, whole = program.affine, _divisor(programs)
    code = program.field(affine.code)
    others = (affine.columns.removeprefix("/"), affine.table if is_stored(program, affine.table) else "")
    groups = [program.field(name) for name in (*affine.fields, *filter(None, others))]
    span = program.spec.span
    shares = _byte_shares(program)
    tensors = [*_plane_tensors(program, code, affine.table, span),
               *(_plain_tensor(program, field, whole, span, shares.get(field.name)) for field in groups
                 if field not in shares.values())]
    where = [(_text(field.name, span), g.expression(_text(str(index), span)))
             for field in program.fields if field.groups is not None and (index := _in_order(program, field)) is not None]
    fixed = [(_text(key, span), g.expression(_text(str(value), span))) for key, value in program.params.items()]
    storage = Storage(_text(PLANAR, span), (*fixed, *where), tuple(tensors))
    spec = replace(program.spec, storages=(storage,), claims=())
    return Program(spec, PLANAR, program.params, program.sizes, row_codes=program.row_codes)


def why_no_planar(programs: Sequence[Program]) -> str:
    """Why a format has no planar storage, in one line; '' if it has one for some choice of params."""
    if any(program.storage == PLANAR for program in programs):
        return ""
    program = _with_codes([program for program in programs if program.params == programs[0].params])
    return program if isinstance(program, str) else _why_not_planar(program)


def _with_codes(programs: Sequence[Program]) -> Program | str:
    """The last program with a code per weight, and values for fields that some storage lacks; or why there is none."""
    missing = {key: value for other in programs for key, value in (*other.where.items(), *other.defaults.items())}
    return expand_codes(replace(programs[-1], defaults=missing), _divisor(programs))


def _divisor(programs: Sequence[Program]) -> int:
    """The number that K is a multiple of if every storage has whole blocks."""
    return gcd(*(axis_divisor("K", [var.extent for tensor in other.tensors for var in tensor.vars]) for other in programs))


def _why_not_planar(program: Program) -> str:
    """The first condition of the planar storage that a format violates; '' if it meets all."""
    affine = program.affine
    if affine is None:
        return why_not_affine(program)
    code = program.field(affine.code)
    if not is_code(code.number, affine.table):
        types = f"{LOOKED_UP[0]} to {LOOKED_UP[-1]}" if affine.table else f"u1 to u8, i1 to i8, {', '.join(FLOAT_CODES)}"
        return f"code '{code.name}' is {code.number.name if code.number else 'an index'}, and matrix units take {types}"
    if wrong := next(filter(None, (_why_bad_group(program, name) for name in affine.fields)), ""):
        return wrong
    if affine.columns and program.field(affine.columns.removeprefix("/")).kind not in X_FLOATS | program.params.keys():
        return f"'{affine.columns.removeprefix('/')}' meets x, and is no {', '.join(sorted(X_FLOATS))}"
    if is_stored(program, affine.table) and (wrong := _why_bad_table(program, program.field(affine.table))):
        return wrong
    for field in program.fields:
        if field.number and field.name not in (affine.code, *affine.fields, affine.columns.removeprefix("/"), affine.table):
            return f"field '{field.name}' is stored, and decode does not read it"
        if field.number is None and (field.groups is None or _in_order(program, field) is None):
            return f"no storage says what '{field.name}' is for columns in order ('optional:' or 'where:')"
    return ""


def is_stored(program: Program, table: str) -> bool:
    return any(field.name == table for field in program.fields)


def _why_bad_table(program: Program, table: Field) -> str:
    """Why kernels cannot look codes up in a stored table; '' if they can: it has rows, of 16-bit or 32-bit floats."""
    if table.kind not in X_FLOATS | program.params.keys():
        return f"stored table '{table.name}' is no {', '.join(sorted(X_FLOATS))}"
    if len(table.index) > 1 or any((coordinate(program, index) or "k")[0] == "k" for index in table.index):
        return f"kernels look codes up in a table of the whole weight or of rows, and '{table.name}' is neither"
    return ""


def _why_bad_group(program: Program, name: str) -> str:
    """Why kernels cannot read a field of groups; '' if they can."""
    assert program.affine is not None
    if any((atom := ix.flat_of(index)) is not None and atom.op == "mod" for index in program.field(name).index):
        return f"weights that share a '{name}' lie far apart, so that each column of a row has its own"
    if not _is_whole_table(program, name):
        return f"table '{program.affine.lookups[name]}' has no number for every value of '{name}'"
    if not _is_group(program, program.field(name)):
        return f"kernels cannot read '{name}' by rows and columns: its type or its subscript is not one that they load"
    return ""


def _text(value: str, span: Span) -> Text:
    return Text(value, (span,))


def order_name(program: Program) -> str:
    """The name of the tensor that may hold an order of the columns; '' without one.

    A planar program has one if only an index field tells which values columns share; another program if its spec names it.
    """
    authored = next((storage.order for storage in program.spec.storages if storage.name.value == program.storage), None)
    if authored is not None:
        return authored.value
    if program.storage != PLANAR or program.affine is None or sum(field.groups is not None for field in program.fields) != 1:
        return ""
    read = [program.field(name) for name in program.affine.fields]
    if any("k" in at.names() for field in read if not field.by_places for at in field.index):
        return ""
    name = ORDER
    while any(tensor.name == name for tensor in program.tensors):
        name += "_"
    return name


def is_code(number: Number | None, table: str = "") -> bool:
    """Whether the planar storage supports codes of this type, which are numbers or index a table."""
    if number is None or (table and number.name not in LOOKED_UP):
        return False
    return number.name in FLOAT_CODES if number.is_float else number.bits in PLANES


def _is_group(program: Program, field: Field) -> bool:
    """Whether a kernel can read a group's field in its stored form, by rows and columns."""
    number = field.number
    if number is None or (number.is_float and number.name not in GROUP_FLOATS) or (not number.is_float and number.bits > 8):
        return False
    if number.kind == "signed" and number.bits < 8:
        return False
    return len(field.index) <= 2 and axis_blocks(program, field) is not None


def _is_whole_table(program: Program, name: str) -> bool:
    """Whether the table that a group's field indexes, if any, has a number for each of its values."""
    assert program.affine is not None
    word, kind = program.affine.lookups.get(name), program.field(name).number
    return word is None or (kind is not None and kind.kind == "unsigned" and program.spec.table(word).shape == (kind.high + 1,))


def blocks_per_number(program: Program, field: Field) -> int:
    """How many of the shortest blocks of the flat position share a number of a field; 1 for the field with these blocks."""
    assert program.affine is not None
    blocks = [program.field(name).index for name in (field.name, *program.affine.fields)]
    flat = [ix.as_index(atom.args[1]) for index in blocks if len(index) == 1 and (atom := ix.flat_of(index[0])) is not None]
    own = flat[0] if flat and len(field.index) == 1 and ix.flat_of(field.index[0]) is not None else None
    return 1 if own is None else max(m for other in flat if (m := _multiple(own, other)))


def _multiple(index: Index, of: Index) -> int:
    """How many times one expression is another; 0 if it is no multiple."""
    pairs = [(index.const, of.const), *((c, dict(of.terms).get(atom, 0)) for atom, c in index.terms)]
    ratios = {whole // part if part and whole % part == 0 else 0 for whole, part in pairs if whole or part}
    return ratios.pop() if len(ratios) == 1 and len(index.terms) == len(of.terms) else 0


def axis_blocks(program: Program, field: Field) -> list[tuple[str, str]] | None:
    """The axis and block of every coordinate; blocks of the flat position are blocks of a row if rows hold whole blocks.

    None if a subscript is something else.  For a field that several blocks share (`shared`), those blocks.
    """
    flat = [atom for index in field.index if (atom := ix.flat_of(index)) is not None]
    if flat:
        if flat[0].op != "div":
            return None
        block = ix.as_index(flat[0].args[1])
        many = blocks_per_number(program, field)
        block = Index(block.const // many, tuple((atom, c // many) for atom, c in block.terms))
        return [("n", "1"), ("k", str(block).replace(" ", ""))]
    pairs = [coordinate(program, index) for index in field.index]
    return None if None in pairs else [pair for pair in pairs if pair is not None]


def coordinate(program: Program, index: Index) -> tuple[str, str] | None:
    """The axis of a subscript and its block, '1' without one: for n, n // b, k // b, or an index field."""
    if (block := ix.block_of(index)) is not None:
        return None if block == ("k", Index(1)) else (block[0], str(block[1]).replace(" ", ""))
    field = next((field for field in program.fields if field.name == ix.gathered_by(index)), None)
    in_order = _in_order(program, field) if field is not None else None
    return None if in_order is None else coordinate(program, in_order)


def _in_order(program: Program, field: Field) -> Index | None:
    return program.defaults.get(field.name) or program.where.get(field.name)


def float_of_table(program: Program, table: str) -> tuple[Number, float] | None:
    """The 4-bit float with the numbers of a table, and the power of two between them; None if there is none.

    The sign of zero may differ, because no sum of products shows it.
    """
    values = [] if is_stored(program, table) else [float(value) for value in program.spec.table(table).values[:16]]
    for name in FLOAT_CODES:
        kind = number(name)
        if kind.bits == 4 and len(values) == 16:
            numbers = [kind.decode(code) for code in range(16)]
            unit = max(values) / max(numbers)
            if frexp(unit)[0] == 0.5 and values == [unit * value for value in numbers]:
                return kind, unit
    return None


def _plane_tensors(program: Program, code: Field, table: str, span: Span) -> Iterator[Tensor]:
    assert code.number is not None
    widths = PLANES[code.number.bits]
    is_float = float_of_table(program, table) is not None if table else code.number.is_float
    by_bytes = table and not is_float and code.number.high < IN_REGISTERS
    low = 0
    for place, width in enumerate(widths):
        name = code.name if len(widths) == 1 else f"{code.name}_{place}"
        part = f".at({low}):{width}" if len(widths) > 1 else ""
        columns, loops, at = (LOOKED_UP_ORDERS if by_bytes else ORDERS)[widths[0], width]
        if is_float and widths == (4,):
            (columns, loops, at), part = FLOAT_ORDER, ".at(2*p):2"
        shape = f"i32[n<N, t<ceil(K/{columns}) word]"
        yield _tensor(name, shape, f"{loops}: {code.name}[n, {at} + 32*u + 16*i + 8*h + 2*c + e]{part}", span)
        low += width


def _byte_shares(program: Program) -> dict[str, Field]:
    """Fields that share bytes with others, by the names of those: unsigned integers of the same blocks, always stored."""
    assert program.affine is not None
    shares: dict[str, Field] = {}
    alone: list[Field] = []
    for field in map(program.field, program.affine.fields):
        if field.number is None or field.number.kind != "unsigned" or field.name in program.defaults or not field.index \
                or ix.flat_of(field.index[0]) is not None:
            continue
        holder = next((other for other in alone if other.index == field.index and other.bits + field.bits <= 8), None)
        if holder is None:
            alone.append(field)
        else:
            alone.remove(holder)
            shares[holder.name] = field
    return shares


def _plain_tensor(program: Program, field: Field, divisor: int, span: Span, other: Field | None = None) -> Tensor:
    """A tensor of one field, rows first; integers below 8 bits are bytes, with `other` above.  K is a multiple of `divisor`."""
    assert field.number is not None
    pairs = [("k", "1")] if field.index == (ix.name("k"),) else axis_blocks(program, field) or []
    flat = len(field.index) < len(pairs)                         # then K is a multiple of the block in this storage
    if flat and blocks_per_number(program, field) > 1:
        atom = ix.flat_of(field.index[0])
        assert atom is not None
        shape, item = f"{field.kind}[h<ceil(N*K/({atom.args[1]}))]", f"{field.name}[h]"
        return _tensor(field.name, shape, item, span)
    names = {"n": "r", "k": "g"}
    axes, subscripts = [], []
    for axis, block in sorted(pairs, reverse=True):
        whole = axis.upper()
        even = flat or (axis == "k" and block.isdigit() and divisor % int(block) == 0)
        axes.append(f"{names[axis]}<{whole if block == '1' else f'{whole}/{block}' if even else f'ceil({whole}/{block})'}")
    for axis, _ in pairs:
        subscripts.append(names[axis])
    for extent in field.table:
        axes.append(f"i<{extent}")
        subscripts.append("i")
    if flat:
        subscripts = [f"K/{pairs[1][1]}*{names['n']} + {names['k']}"]
    element = field.kind if field.number.is_float else "i8" if field.number.kind == "signed" else "u8"
    spare = 0 if field.number.is_float else 8 - field.number.bits - (other.bits if other is not None else 0)
    place = f"[{', '.join(subscripts)}]" if subscripts else ""
    item = " ".join(f"{part.name}{place}" for part in (field, other) if part is not None)
    shape = f"{element}[{', '.join(axes)}]"
    default = program.defaults.get(field.name)
    return _tensor(field.name, shape, item + (f" pad:{spare}" if spare else ""), span, None if default is None else str(default))


def _tensor(name: str, shape: str, record: str, span: Span, optional: str | None = None) -> Tensor:
    text = _text(record, span)
    default = None if optional is None else g.expression(_text(optional, span))
    return Tensor(_text(name, span), g.shape(_text(shape, span)), None, g.parse_record(text), text, default, (), ())
