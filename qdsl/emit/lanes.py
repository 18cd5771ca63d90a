"""Matmul kernels for matrix units: the planar storage's codes as operands, and decode's line applied once per group.

A storage gets up to three kernels, and two functions with which they load words and make numbers of them.  `few` multiplies
up to 8 rows of x, which are the columns of the matrix instruction.  `row` is for one row of x and numbers that vary along K:
there the columns of the instruction are runs of columns of w, so that one instruction serves eight of them.  `many` is for
more rows of x, which pass through shared memory.  runtime/lanes.py says how the bits lie.

A storage whose records hold codes and numbers together (emit/records.py) gets a `row` that reads them as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from qdsl.emit import records
from qdsl.emit.codebook import Codebook, codebook
from qdsl.emit.records import Record
from qdsl.emit.templates import render
from qdsl.emit.tensors import is_read_by_dtype
from qdsl.ir import index as ix
from qdsl.ir.program import Affine, Field, Program, Tensor, Terms
from qdsl.numbers import Number
from qdsl.passes.derive_planar import PLANAR, PLANES, coordinate, coordinates, is_code

CHUNK = 128                                                      # columns that share 16 words of a plane of 4 bits
LOCALS = frozenset((
    "x", "bias", "out", "M", "N", "K", "R", "W", "WN", "WK", "F", "BM", "SIZE", "UNIT", "BASE", "ZERO", "EVEN", "STAGES",
    "UNROLL", "WHOLE", "STEP", "TRIP", "at", "t", "many", "codebook",
    "w", "g", "c", "n", "m", "first", "flip", "acc", "ones", "step", "j", "chunk", "columns", "sums", "new", "r", "row", "words",
    "total", "u", "sum", "lanes", "tl", "half", "i", "digit", "to", "code", "range", "tiles", "start", "point",
    "BN", "x_scale", "x_sum", "narrow", "records", "record", "p", "head", "lane", "both", "low", "high"))


@dataclass(frozen=True, slots=True)
class Group:
    """A field of groups as a kernel reads it: blocks of rows and columns as text ('1' none, '' not subscripted).

    kind: how its numbers are stored, as lanes.number takes it.
    """

    name: str
    tensor: str
    rows: str
    columns: str
    kind: str
    optional: str | None

    @property
    def varies(self) -> bool:
        """Whether it has several values along K."""
        return self.columns != ""


@dataclass(frozen=True)
class Plan:
    """What the kernels of a planar program do."""

    program: Program
    affine: Affine
    code: Number
    groups: tuple[Group, ...]
    stored: str = ""                                             # the tensor of a storage whose rows are codes of 8 bits
    book: Codebook | None = None                                 # the numbers that codes are looked up in
    record: Record | None = None                                 # of a storage whose records hold codes and groups

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

    @cached_property
    def blocks(self) -> list[str]:
        """Blocks of columns of the groups that vary along K."""
        return [group.columns for group in self.groups if group.varies]

    @cached_property
    def sizes(self) -> dict[str, list[int]]:
        """Every value that a block can have, by its text; -1, the whole axis, as many as there are."""
        values = {p.name.value: [int(v) for v in p.values if isinstance(v, int)] for p in self.program.spec.params}
        return {b: [int(b)] if b.isdigit() else [v if v > 0 else 1 << 30 for v in values[b]] for b in self.blocks}

    @property
    def smallest(self) -> int:
        return min((v for found in self.sizes.values() for v in found if v >= self.least), default=1 << 30)

    @property
    def size(self) -> str:
        """Columns of a chunk that share one sum, in `few`: the whole chunk where groups are as large, else 32 or 16."""
        small = min(32, self.smallest)
        if self.stored or self.smallest >= CHUNK:
            return str(CHUNK)
        if all(v < CHUNK for found in self.sizes.values() for v in found if len(found) > 1):
            return str(small)
        named = dict.fromkeys(block for block in self.blocks if not block.isdigit())
        if any(block.isdigit() and int(block) < CHUNK for block in self.blocks):
            return str(small)
        return f"{CHUNK} if {' and '.join(f'{block} >= {CHUNK}' for block in named)} else {small}"

    @property
    def supported(self) -> bool:
        every = [v for found in self.sizes.values() for v in found if v >= self.least]
        return all(max(found) >= self.least for found in self.sizes.values()) and \
            all(v in (16, 32, 64) or v % CHUNK == 0 for v in every)

    @property
    def least(self) -> int:
        """The smallest block that the kernels serve: lanes of rows as they are stored hold columns of all groups of a chunk."""
        return CHUNK if self.stored else 16

    @property
    def step(self) -> str:
        """Columns of w per column of the instruction, in `row`."""
        named = [block for block in dict.fromkeys(self.blocks) if not block.isdigit()]
        known = min([64, *(int(block) for block in self.blocks if block.isdigit())])
        return f"min({', '.join([str(known), *named])})" if named else str(known)

    @property
    def integer(self) -> bool:
        """Whether float16's operands count from 0."""
        return self.book.is_int if self.book else not self.code.is_float

    @property
    def lies(self) -> tuple[int, int]:
        """Width of a plane, and bits of codes that are operands where they lie in words; 0 bits where operands are made."""
        return (self.planes[0][1], self.code.bits) if self.integer and not self.book else (8, 0)

    @property
    def special(self) -> int:
        """Bits that all are set in codes that are no finite number; 0 where there are none."""
        return {"e4m3": 0x7F, "e5m2": 0x7C}.get(self.code.name, 0)

    @property
    def base(self) -> tuple[int, int]:
        """What operands have more than codes: with float16, and with bfloat16."""
        if not self.integer:
            return 0, 0
        if self.book:
            return self.book.base, 0
        sign = 1 << (self.code.bits - 1) if self.code.kind == "signed" else 0
        return sign, sign + (128 * 17 if self.code.bits == 8 else 128)

    @property
    def unit(self) -> tuple[str, str]:
        """What sums are multiplied with in the end: with float16, and with bfloat16."""
        if self.integer:
            return "16777216.0", "1.0"
        if self.book:
            return f"{self.book.unit}", "1.0"
        return f"{2.0 ** (15 - ((1 << (self.exponent - 1)) - 1))}", "1.0"

    @property
    def exponent(self) -> int:
        return int(self.code.name[1])

    @property
    def mantissa(self) -> int:
        return int(self.code.name[3])

    @cached_property
    def outer(self) -> list[Group]:
        """Factors of scale and offset that are the same all along K."""
        products = [{argument(f.removeprefix("/")) for f in product}
                    for _, product in (*self.affine.scale, *self.affine.offset)]
        return [g for g in self.groups if not g.varies and all(g.name in product for product in products)]

    @property
    def divisors(self) -> set[str]:
        """Names of the groups that sums are divided by."""
        terms = (*self.affine.scale, *self.affine.zero, *self.affine.offset)
        return {argument(f[1:]) for _, product in terms for f in product if f[0] == "/"}

    @property
    def has_few(self) -> bool:
        return self.record is None

    @property
    def has_row(self) -> bool:
        return not self.stored and not self.late

    @property
    def has_many(self) -> bool:
        return self.has_few and not self.stored and self.smallest >= 32

    @property
    def tall(self) -> bool:
        """Whether `many` has registers for sums of 128 rows of x: codes are one plane of 4 bits, and sums are scaled at most."""
        large = all(max(found) >= CHUNK for found in self.sizes.values())
        return large and self.integer and self.code.bits == 4 and self.exact_zero is not None and not self.affine.offset

    @property
    def narrow(self) -> str:
        """The type in which 8 bits of x meet codes of 8 bits; '' where there is no such kernel.

        Zeros and offsets ask for sums of x, which are made for whole rows.
        """
        simple = self.late or not (self.affine.zero or self.affine.offset)
        return self.code.name if self.stored and simple and self.code.name in ("e4m3", "i8") else ""

    @property
    def takes_sums(self) -> bool:
        """Whether something is added to codes, or to weights."""
        return bool(self.affine.zero or self.affine.offset)

    @property
    def exact_zero(self) -> int | None:
        """The zero, where it is an integer that operands can have on top of codes."""
        zero = self.affine.zero
        if not zero:
            return 0
        value = zero[0][0]
        simple = [p for _, p in zero] == [()] and value == int(value) and abs(value) < 256
        return int(value) if self.integer and not self.book and simple else None

    @property
    def point(self) -> Group | None:
        """The zero point, where operands can have it taken off their codes: an unsigned integer per group, of few bits."""
        zero = self.affine.zero
        if self.code.kind != "unsigned" or self.code.bits == 8 or self.book:
            return None
        if [(c, len(fields)) for c, fields in zero] != [(-1.0, 1)]:
            return None
        group = next(g for g in self.groups if g.name == argument(zero[0][1][0]))
        number = self.program.field(zero[0][1][0]).number
        return group if group.varies and not group.optional and number is not None and number.kind == "unsigned" else None

    @property
    def sums_in_many(self) -> bool:
        return (self.exact_zero is None and self.point is None) or bool(self.affine.offset)

    @property
    def late(self) -> bool:
        """Whether nothing varies along K, so that sums are scaled once, in the end."""
        return not self.blocks


def argument(name: str) -> str:
    """What a kernel calls a tensor."""
    return f"{name}_" if name in LOCALS or name.endswith("_g") else name


def plan(program: Program) -> Plan | None:
    """The plan of a storage; None where codes lie otherwise, or groups are no runs of 16, 32, 64 or m * 128 columns.

    Besides the planar one that is every storage in which codes of 8 bits and the numbers of groups lie row by row, or codes
    of 4 bits and the numbers of groups in records.
    """
    affine = program.affine
    if affine is None:
        return None
    code = program.field(affine.code).number
    record = records.record(program)
    if record is not None and code is not None:
        found = tuple(_group(program, program.field(name), record.tensor) for name in affine.fields)
        return Plan(program, affine, code, found, record=record)
    tensors = {name: _alone(program, name) for name in (affine.code, *affine.fields)}
    if program.storage == PLANAR:
        tensors[affine.code] = ""
    elif not is_code(code) or code is None or code.bits != 8 or affine.table:
        return None
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if code is None or len(held) < len(tensors):
        return None
    groups = tuple(_group(program, program.field(name), held[name]) for name in affine.fields)
    book = codebook(program, affine.table) if affine.table else None
    made = Plan(program, affine, code, groups, held[affine.code], book)
    return made if made.supported and (book is not None or not affine.table) else None


def _alone(program: Program, name: str) -> str | None:
    """The tensor whose elements, row by row, are all bits of a field and nothing else."""
    field = program.field(name)
    bits = 32 if field.number is None else field.number.bits
    for tensor in program.tensors:
        order = [digit for axis in tensor.axes for digit in axis.digits]
        names = list(tensor.placements[0].vars) if tensor.placements else []
        if [p.field for p in tensor.placements] == [name] and tensor.words == 1 and [d for d in order if d in names] == names \
                and tensor.stored is None and all(tile == 1 for tile in tensor.placements[0].extents) \
                and not tensor.placements[0].flat and sum(part.width for part in tensor.placements[0].slices) == bits \
                and _is_by_rows(program, tensor, field):
            return tensor.name
    return None


def _is_by_rows(program: Program, tensor: Tensor, field: Field) -> bool:
    """Whether a tensor of single elements has them by rows and blocks of columns."""
    if any(ix.flat_of(index) is not None for index in field.index):
        return coordinates(program, field) is not None and len(tensor.placements[0].vars) == 2
    return all(coordinate(program, i) or str(i) == "k" for i in field.index)


def _group(program: Program, field: Field, tensor: str) -> Group:
    assert field.number is not None
    found = dict(coordinates(program, field) or [])
    default = program.defaults.get(field.name)
    default = default if default is not None else program.where.get(field.name)
    return Group(argument(field.name), argument(tensor), found.get("n", ""), found.get("k", ""),
                 _kind(program, field), None if default is None else str(default))


def _kind(program: Program, field: Field) -> str:
    """The width of an integer, the name of a float of 8 bits, or 0 for one that Triton has and one that its dtype tells."""
    assert field.number is not None
    if not field.number.is_float:
        return str(field.number.bits)
    return f'"{field.number.name}"' if field.number.bits == 8 and not is_read_by_dtype(program, field) else "0"


def lanes(program: Program) -> list[str]:
    """The lines of the lane-tile kernels of a storage; none where it has none."""
    made = plan(program)
    if made is None:
        return []
    if made.record is not None:
        return _stored_row(made, made.record)
    return render(
        "lanes", **_shared(made), arguments=", ".join(argument(t.name) for t in program.tensors),
        planes=", ".join(name for name, _, _ in made.planes), words=_words(made), table=_table(made), size=made.size,
        step=made.step, row=made.has_row, natural=bool(made.stored), late=made.late,
        ones=made.integer or bool(made.affine.zero or made.affine.offset),
        loads=lambda how: _loads(made, how), apply=lambda index, ones, exact=False: _apply(made, index, ones, exact),
        finish=_finish(made), many=made.has_many, many_ones=made.sums_in_many, many_zero=_zero(made), point=_point(made),
        many_flips=_flips(made, "lanes.warps(W)[1]"), many_words=_many_words(made), many_finish=_finish(made, True),
        many_blocks=not made.late and any(group.rows for group in made.groups if group not in made.outer),
        many_rows=any(group.rows for group in (made.groups if made.late else made.outer)))


def _stored_row(made: Plan, record: Record) -> list[str]:
    """The lines of the kernel for one row of x and records as they are stored."""
    tensor = argument(record.tensor)
    loads = [line for name in made.affine.fields
             for line in records.field_lines(record, made.program.field(name), f"{argument(name)}_g")]
    return render(
        "records", **_shared(made), arguments=tensor, tensor=tensor, record_size=record.size, codes=record.codes,
        start=records.start_text(record), head=records.head_text(record), loads=loads, apply=_apply(made, "", "sums", False))


def _shared(made: Plan) -> dict[str, object]:
    """What every kernel says of codes and constants."""
    unit = made.unit
    return {"storage": made.program.storage, "code": _code(made.affine), "line": _line(made), "numbers": _numbers(made),
            "sizes": "".join(f"{size}: tl.constexpr, " for size in made.program.sizes),
            "integer": made.integer, "base": made.base, "flips": _flips(made), "width": made.lies[0], "bits": made.lies[1],
            "unit": f"{unit[0]} if F == tl.float16 else {unit[1]}" if unit[0] != unit[1] else unit[0]}


def narrow(program: Program) -> list[str]:
    """The lines of the kernel that multiplies 8 bits of x with codes of 8 bits; none where a storage has none."""
    made = plan(program)
    if made is None or not made.narrow:
        return []
    scale = _text(made.affine.scale, {}, made.outer)
    factor = "" if scale == "1.0" else f" * ({scale})" if " + " in scale or " - " in scale else f" * {scale}"
    return render(
        "narrow", storage=program.storage, arguments=", ".join(argument(t.name) for t in program.tensors), code=made.affine.code,
        sizes="".join(f"{size}: tl.constexpr, " for size in program.sizes), codes=argument(made.stored), line=_line(made),
        integer=made.integer, exact=made.integer and made.late, late=made.late, ones=made.takes_sums,
        loads=_loads(made, "narrow"), scale=factor, finish=_finish(made, True))


# -- codes ------------------------------------------------------------------------------------------------------------


def _words(made: Plan) -> str:
    """The words that hold a chunk of 128 columns, as a tuple."""
    found = []
    for name, width, _ in made.planes:
        if width == 8:
            found += [f"lanes.words({name}, row, K // 64, 2 * chunk, 2 * more{' + 1' if half else ''})" for half in range(2)]
        elif width == 4:
            found.append(f"lanes.words({name}, row, K // 128, chunk, more)")
        elif width == 2:
            found.append(f"lanes.words({name}, row, tl.cdiv(K, 256), chunk // 2, more // 2)")
        else:
            found.append(f"lanes.late_words({name}, row, K, chunk, more, {LATE[made.planes[0][1]]})")
    return ", ".join(found) + ("," if len(found) == 1 else "")


def _many_words(made: Plan) -> str:
    """The words of a chunk that is a number, not a digit of the text: planes of few bits are shifted."""
    call = f"_words_{made.program.storage}({', '.join(name for name, _, _ in made.planes)}, row, K, chunk)"
    steps = [TURNS.get((made.planes[0][1], width), 0) for _, width, _ in made.planes]
    return call if not any(steps) else f"many.turned({call}, chunk, {', '.join(map(str, [*steps, 0, 0][:3]))})"


def _point(made: Plan) -> str:
    """The pairs that are taken off the codes of a chunk or group, or None."""
    group = made.point
    if group is None:
        return "None"
    return (f"many.points({group.tensor}, {_row_of(group)}, lanes.count(K, {group.columns}), chunk * 128 + u * SIZE, "
            f"{group.columns}, SIZE, F)")


def _zero(made: Plan) -> str:
    """What is added to a code of many rows' operands, less what they have more than it."""
    if not made.integer or made.point is not None:               # a zero point has what operands have more, too
        return "0"
    halves, brains = ((made.exact_zero or 0) - base for base in made.base)
    return str(halves) if made.code.bits == 8 else f"{halves} if F == tl.float16 else {brains}"


# The bit at which half 2 * j + h of a span of 256 columns begins, by the widths of the first plane and of a plane; and by
# how many bits the second span of a plane of one bit lies higher (orders of passes/derive_planar.py).
FIRST_BIT = {(8, 8): "0", (4, 4): "4 * (half % 2)", (4, 2): "4 * (half % 2) + 2 * (half // 2)",
             (4, 1): "4 * (half % 2) + half // 2", (2, 2): "2 * half", (2, 1): "2 * half", (1, 1): "half"}
LATE = {4: 2, 2: 1, 1: 4}
TURNS = {(4, 2): 2, (4, 1): 1, (2, 2): 4, (2, 1): 4, (1, 1): 2}  # by how many bits the second chunk of a span lies higher


def _numbers(made: Plan) -> list[str]:
    """Lines that return the numbers of pairs i of a half, from its words."""
    first = made.planes[0][1]
    signed = made.code.kind == "signed"
    if made.book is not None:
        return _looked_up(made.book)
    if not made.integer:
        at = f"{FIRST_BIT[first, first]} + 8 * i" if first < 8 else "8 * i"
        word = "words[half % 2]" if first == 8 else "words[0]"
        return [f"return lanes.float_numbers({word}, {at}, {made.exponent}, {made.mantissa}, F)"]
    if first == 8:
        return ["code = lanes.field(words[half % 2], 4 * digit + 8 * i, 0, 8 if F == tl.float16 else 4)",
                f"return lanes.numbers(code, flip, {signed}, F)"]
    lines = []
    for place, (_, width, low) in enumerate(made.planes):
        at = f"{FIRST_BIT[first, width]} + 8 * i"
        text = f"lanes.field(words[{place}], {at}, to{f' + {low}' if low else ''}, {width})"
        lines.append(f"code |= {text}" if place else f"code = {text}")
    return [*lines, f"return lanes.numbers(code, flip, {signed}, F)"]


def _looked_up(book: Codebook) -> list[str]:
    """Lines that return what a table has for codes."""
    if not book.is_int:
        return ["return codebook.floats(words[0], half % 2, i, flip, F)"]
    return ["if F == tl.float16:", "    return codebook.bytes(words[0], half % 2, i, flip)",
            "else:", "    return codebook.floats(words[0], half % 2, i, flip, F)"]


def _table(made: Plan) -> list[str]:
    """Lines that return a table's words."""
    if made.book is None:
        return []
    texts = [", ".join(f"{word:#x}" for word in words)
             for words in (made.book.bytes if made.book.is_int else made.book.floats("f16"), made.book.floats("bf16"))]
    return ["if F == tl.float16:", f"    return codebook.table(g, N, {texts[0]})",
            "else:", f"    return codebook.table(g, N, {texts[1]})"]


def _flips(made: Plan, g: str = "g") -> str:
    """What numbers are made with beside words, as a tuple."""
    if made.book is not None:
        return f"_table_{made.program.storage}({g}, N, F)"
    return f"lanes.flips(N, {made.lies[0]}, {made.lies[1]}, {made.code.kind == 'signed'}, F)"


# -- numbers of groups ------------------------------------------------------------------------------------------------


def _row_of(group: Group) -> str:
    return "row" if group.rows == "1" else f"lanes.blocks(row, {group.rows})" if group.rows else "lanes.same(row)"


def _load(made: Plan, group: Group, how: str) -> str:
    """A field's value per column of the instruction ('row'), or a tuple of values per group of a chunk ('few')."""
    if not group.varies:
        return _constant(group, how in ("many", "narrow"))
    if how == "narrow":
        where = "n" if group.rows == "1" else f"narrow.block(n, m, {group.rows}, BN)" if group.rows else "tl.zeros_like(m)"
        return (f"many.of_rows({group.tensor}, {where}, lanes.count(K, {group.columns}), chunk * 128, {group.columns}, "
                f"{group.kind})")
    head = f"{group.tensor}, {_row_of(group)}, lanes.count(K, {group.columns}), chunk"
    if how == "many":
        where = "n" if group.rows == "1" else f"n // {group.rows or 'N'}"
        return (f"many.of_rows({group.tensor}, {where}, lanes.count(K, {group.columns}), chunk * 128 + u * SIZE, "
                f"{group.columns}, {group.kind})")
    if how == "few":
        return f"lanes.by_group({head}, SIZE, {group.columns}, {group.kind})"
    return f"lanes.by_column({head}, K, STEP, {group.columns}, {group.kind})"


def _constant(group: Group, many: bool = False) -> str:
    """A field that is the same all along K."""
    if not group.rows:
        return f"lanes.number(tl.load({group.tensor}), {group.kind})"
    if many:
        return f"many.of_rows({group.tensor}, {'n' if group.rows == '1' else f'n // {group.rows}'}, 1, 0, 1, {group.kind})"
    return f"lanes.of_row({group.tensor}, {_row_of(group)}, {group.kind})"


def _value(group: Group, text: str, how: str = "") -> list[str]:
    """Lines that set a field's value, or its default where the tensor is missing, in the same form."""
    if group.optional is None:
        return [f"{group.name}_g = {text}"]
    name, default = f"{group.name}_g", f"{float(group.optional)}"
    default = f"lanes.in_each({default}, SIZE)" if how == "few" and group.varies else default
    return [f"if {group.tensor} is None:", f"    {name} = {default}", "else:", f"    {name} = {text}"]


def _loads(made: Plan, how: str) -> list[str]:
    """Lines that load the fields of groups which a sum is scaled with inside the loop."""
    left = [*made.outer, *([made.point] if how == "many" else [])]
    return [line for group in ([] if made.late else made.groups) if group not in left
            for line in _value(group, _load(made, group, how), how)]


def _finish(made: Plan, many: bool = False) -> list[str]:
    """Lines that scale `sum` with what is the same all along K."""
    groups = made.groups if made.late else made.outer
    lines = [line for group in groups for line in _value(group, _constant(group, many))]
    if made.late:
        return [*lines, *_line_of(made, {}, [], "ones", many)]
    divided = [f"{group.name}_g" for group in groups if group.name in made.divisors]
    return [*lines, f"sum *= {_quotient([f'{group.name}_g' for group in groups if group.name not in made.divisors], divided)}"] \
        if groups else []


def _apply(made: Plan, index: str, ones: str, many: bool) -> list[str]:
    """Lines that make of `sum` what is added up along K: scale * (sum + zero * ones) + offset * ones."""
    if made.late:
        return []
    where = {group.name: index for group in made.groups if group.varies}
    return _line_of(made, where, made.outer, ones, many)


def _line_of(made: Plan, index: Mapping[str, str], without: list[Group], ones: str, many: bool) -> list[str]:
    affine = made.affine
    lines: list[str] = []
    if many:
        if affine.zero and made.exact_zero is None and made.point is None:
            lines.append(f"sum += {_text(affine.zero, index, [], True)} * {ones}")
    elif affine.zero:
        zero = _text(affine.zero, index, [])
        constant = all(not product for _, product in affine.zero)
        lines.append(f"sum += ({zero} - BASE) * {ones}" if constant else f"sum += lanes.shifted({zero}, BASE) * {ones}")
    elif made.integer:
        lines += ["if BASE != 0:", f"    sum -= BASE * {ones}"]
    scale = _text(affine.scale, index, without)
    if scale != "1.0":
        lines.append(f"sum *= {scale}")
    if affine.offset:
        lines.append(f"sum += {ones} * {_text(affine.offset, index, without, True)}")
    return lines


def _text(terms: Terms, index: Mapping[str, str], without: list[Group], tight: bool = False, held: bool = True) -> str:
    """A sum of products over the fields: over what was loaded of them, or as the spec names them."""
    names = {group.name for group in without}
    text = ""
    for coefficient, product in terms:
        read = {f: f.removeprefix("/") for f in product}
        texts = {f: name if not held else f"{argument(name)}_g{index.get(argument(name), '')}"
                 for f, name in read.items() if argument(name) not in names}
        size = abs(coefficient)
        factors = [texts[f] for f in product if f in texts and f[0] != "/"]
        divisors = [texts[f] for f in product if f in texts and f[0] == "/"]
        shown = _quotient([*([f"{size}"] if size != 1 else []), *factors], divisors)
        text += (" - " if coefficient < 0 else " + ") + shown if text else ("-" if coefficient < 0 else "") + shown
    return f"({text})" if (tight and " " in text) or (text.startswith("-") and tight) else text


def _quotient(factors: list[str], divisors: list[str]) -> str:
    """A product divided by others, one after the other."""
    return " / ".join([" * ".join(factors) or "1.0", *divisors])


def _line(made: Plan) -> str:
    """The line that decode is, as the docstring says it."""
    scale, zero, offset = (_text(part, {}, [], held=False) for part in (made.affine.scale, made.affine.zero, made.affine.offset))
    code = _code(made.affine)
    inner = f"({code}{_signed(zero)})" if zero else code
    text = inner if scale == "1.0" else f"({scale}) * {inner}" if " + " in scale or " - " in scale else f"{scale} * {inner}"
    return text + (_signed(offset) if offset else "")


def _code(affine: Affine) -> str:
    return f"{affine.table}[{affine.code}]" if affine.table else affine.code


def _signed(text: str) -> str:
    return f" - {text[1:]}" if text.startswith("-") else f" + {text}"
