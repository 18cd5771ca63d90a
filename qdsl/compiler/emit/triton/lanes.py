"""What a storage's codes and numbers are to the kernels for matrix units: the short functions that complete a kernel family.

The kernels themselves are written by hand, one per family, in runtime/gpu/kernels.  A storage gets functions that load its
words, make numbers of them, and apply decode's line to a product of codes, once per group; gpu/kernels/lanes.py says how the bits
lie.  `skinny` multiplies few rows of x, `gemv` one row with numbers that vary along K, `tile_gemm` many rows, and `w8a8` rows
of x that are 8 bits like the codes.

A storage whose records hold codes and numbers together (compiler/emit/triton/records.py) gets the functions of `gemv_records`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from qdsl.compiler.emit.literals import bare_tuple, tupled
from qdsl.compiler.emit.templates import render
from qdsl.compiler.emit.tensors import is_read_by_dtype
from qdsl.compiler.emit.triton import records
from qdsl.compiler.emit.triton.codebook import Codebook, codebook
from qdsl.compiler.emit.triton.records import Record
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import Affine, Field, Program, Tensor, Terms
from qdsl.compiler.passes.derive_planar import PLANAR, PLANES, coordinate, coordinates, is_code
from qdsl.core.numbers import Number

FUNCTIONS = ("words", "numbers", "table", "point", "start", "fields", "scale", "finish")
CHUNK = 128                                                      # columns that share 16 words of a plane of 4 bits
LOCALS = frozenset((
    "tensors", "row", "K", "chunk", "more", "words", "half", "i", "digit", "to", "flip", "F", "code", "g", "N", "at", "field",
    "SIZES", "BASE", "fields", "sum", "ones", "head", "lane", "both", "low", "high", "lanes", "codebook", "records", "tl"))


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
    def size(self) -> int:
        """Columns of a chunk that share one sum where a group has fewer than the chunk: 32, or 16."""
        return CHUNK if self.stored or self.smallest >= CHUNK else min(32, self.smallest)

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
    def unit(self) -> tuple[float, float]:
        """What sums are multiplied with in the end: with float16, and with bfloat16."""
        if self.integer:
            return 2.0 ** 24, 1.0
        if self.book:
            return float(self.book.unit), 1.0
        return 2.0 ** (15 - ((1 << (self.exponent - 1)) - 1)), 1.0

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
    def has_tile_gemm(self) -> bool:
        return self.has_few and not self.stored and self.smallest >= 32

    @property
    def tall(self) -> bool:
        """Whether `tile_gemm` has registers for sums of 128 rows of x: one plane of 4-bit codes, sums scaled at most."""
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
        if not self.has_tile_gemm or self.code.kind != "unsigned" or self.code.bits == 8 or self.book:
            return None
        if [(c, len(fields)) for c, fields in zero] != [(-1.0, 1)]:
            return None
        group = next(g for g in self.groups if g.name == argument(zero[0][1][0]))
        number = self.program.field(zero[0][1][0]).number
        return group if group.varies and not group.optional and number is not None and number.kind == "unsigned" else None

    @property
    def sums_in_tile_gemm(self) -> bool:
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
    """The lines of a storage's functions for the kernel families; none where it has none."""
    made = plan(program)
    if made is None:
        return []
    if made.record is not None:
        return _of_record(made, made.record)
    late = made.late
    return render(
        "lanes", storage=program.storage, code=_code(made.affine), tensors=_unpacked(program), words=_words(made),
        numbers=_numbers(made), table=_table(made), line=_line(made), late=late,
        point=_body(made, [f"return {_read(made.point)}"]) if made.point else [],
        fields=[] if late else _body(made, _fields(made)), values=bare_tuple(group.name for group in _inner(made)),
        scale=_line_of(made, made.outer), finish=_body(made, _finish(made)))


def _of_record(made: Plan, record: Record) -> list[str]:
    """The lines of the functions for records as they are stored."""
    loads = [line for name in made.affine.fields
             for line in records.field_lines(record, made.program.field(name), f"{argument(name)}_g")]
    names = [group.name for group in made.groups]
    return render("records", storage=made.program.storage, code=_code(made.affine), line=_line(made), numbers=_numbers(made),
                  start=records.start_text(record), fields=[*loads, f"return {bare_tuple(f'{name}_g' for name in names)}"],
                  values=bare_tuple(names), scale=_line_of(made, []))


def _unpacked(program: Program) -> str:
    """The tensors of a storage, as a tuple is unpacked."""
    return bare_tuple(argument(tensor.name) for tensor in program.tensors)


def _body(made: Plan, lines: list[str]) -> list[str]:
    """Lines of a function, behind those that name the tensors and the size parameters that they read."""
    words = set(re.findall(r"\w+", " ".join(lines)))
    sizes = [f"{argument(size)}: tl.constexpr = SIZES[{place}]" for place, size in enumerate(made.program.sizes)
             if argument(size) in words]
    tensors = [f"{_unpacked(made.program)} = tensors"] if words & {argument(t.name) for t in made.program.tensors} else []
    return [*tensors, *sizes, *lines]


def constants(made: Plan) -> list[str]:
    """What a storage's description says of its functions, and of how they are used."""
    storage, has_few = made.program.storage, made.has_few
    facts = ["skinny" if has_few else "None"]
    facts += [f"gemv={'gemv' if has_few else 'gemv_records'}"] if made.has_row else []
    facts += ["tile_gemm=tile_gemm"] if made.has_tile_gemm else []
    names = ["words", "numbers", *(["table"] if made.book else []), *(["point"] if made.point else []),
             *([] if made.late else ["fields", "scale"]), *(["finish"] if _finish(made) else [])] if has_few else [
                 "start", "numbers", "fields", "scale"]
    facts += [f"{name}=_{name}_{storage}" for name in names]
    facts += [f"blocks={tupled(list(dict.fromkeys(made.blocks)))}"] if made.blocks else []
    facts += ["in_order=True"] if made.stored else []
    facts += [f"size={made.size}"] if has_few and made.size != CHUNK else []
    facts += [f"width={made.lies[0]}", f"bits={made.lies[1]}"] if made.lies != (4, 4) else []
    facts += ["signed=True"] if made.code.kind == "signed" and made.integer and not made.book else []
    facts += [f"unit={made.unit}"] if made.unit != (2.0 ** 24, 1.0) else []
    facts += [f"base={made.base}"] if made.base != (0, 128) else []
    facts += ["ones=True"] if made.late and has_few and (made.integer or made.takes_sums) else []
    facts += ["double=True"] if made.integer and made.code.bits == 8 else []
    if made.has_tile_gemm:
        facts += [f"zero={_zero(made)}"] if _zero(made) != (0, -128) else []
        facts += ["exact=True"] if made.affine.zero and _is_exact(made) else []
        facts += ["sums_in_tile_gemm=True"] if made.sums_in_tile_gemm else []
        steps = [SPANS.get((made.planes[0][1], width), 0) for _, width, _ in made.planes]
        facts += [f"spans={tuple(steps)}"] if any(steps) else []
        facts += ["tall=True"] if made.tall else []
    facts += [f'codes="{made.stored or made.affine.code}"', f"special={made.special}"] if made.special else []
    if made.narrow:
        more = (", groups=True" if not made.late else "") + (", sums=True" if made.takes_sums else "")
        facts.append(f'narrow=Narrow(w8a8, "{made.narrow}", "{made.stored}"{more})')
    if made.record:
        facts.append(f'records=Records("{made.record.tensor}", size={made.record.size}, codes={made.record.codes}, '
                     f"head={made.record.loads})")
    return facts


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


def _is_exact(made: Plan) -> bool:
    """Whether operands of many rows have the zero point taken off."""
    return made.exact_zero is not None or made.point is not None


def _zero(made: Plan) -> tuple[int, int]:
    """What is added to a code of many rows' operands, less what they have more than it: with float16, and with bfloat16."""
    if not made.integer or made.point is not None:               # a zero point has what operands have more, too
        return 0, 0
    halves, brains = ((made.exact_zero or 0) - base for base in made.base)
    return halves, halves if made.code.bits == 8 else brains


# The bit at which half 2 * j + h of a span of 256 columns begins, by the widths of the first plane and of a plane; and by
# how many bits the second span of a plane of one bit lies higher (orders of compiler/passes/derive_planar.py).
FIRST_BIT = {(8, 8): "0", (4, 4): "4 * (half % 2)", (4, 2): "4 * (half % 2) + 2 * (half // 2)",
             (4, 1): "4 * (half % 2) + half // 2", (2, 2): "2 * half", (2, 1): "2 * half", (1, 1): "half"}
LATE = {4: 2, 2: 1, 1: 4}
SPANS = {(4, 2): 2, (4, 1): 1, (2, 2): 4, (2, 1): 4, (1, 1): 2}  # by how many bits the second chunk of a span lies higher


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


# -- numbers of groups ------------------------------------------------------------------------------------------------


def _read(group: Group) -> str:
    """A field's value where the family wants it."""
    rows, columns = ((text if text.isdigit() else argument(text)) if text else "0" for text in (group.rows, group.columns))
    return f"field({group.tensor}, at, {rows}, {columns}, {group.kind})"


def _loads(groups: Iterable[Group]) -> list[str]:
    """Lines that set fields' values, or their defaults where a tensor is missing."""
    lines: list[str] = []
    for group in groups:
        name, text = f"{group.name}_g", _read(group)
        lines += [f"{name} = {text}"] if group.optional is None else [
            f"if {group.tensor} is None:", f"    {name} = {float(group.optional)}", "else:", f"    {name} = {text}"]
    return lines


def _inner(made: Plan) -> list[Group]:
    """The groups whose numbers a sum meets inside the loop along K."""
    return [group for group in made.groups if group not in made.outer]


def _fields(made: Plan) -> list[str]:
    """Lines that return their numbers as a tuple."""
    optional = [group for group in _inner(made) if group.optional is not None]
    texts = (f"{group.name}_g" if group in optional else _read(group) for group in _inner(made))
    return [*_loads(optional), f"return {bare_tuple(texts)}"]


def _finish(made: Plan) -> list[str]:
    """Lines that scale `sum` with what is the same all along K."""
    groups = made.groups if made.late else made.outer
    lines = _loads(groups)
    if made.late:
        return [*lines, *_line_of(made, [], "_g")]
    divided = [f"{group.name}_g" for group in groups if group.name in made.divisors]
    return [*lines, f"sum *= {_quotient([f'{group.name}_g' for group in groups if group.name not in made.divisors], divided)}"] \
        if groups else []


def _line_of(made: Plan, without: list[Group], suffix: str = "") -> list[str]:
    """Lines that make scale * (sum + zero * ones) + offset * ones of a sum of products of codes, without some factors."""
    affine = made.affine
    lines: list[str] = []
    if affine.zero:
        zero = _text(affine.zero, [], suffix)
        constant = all(not product for _, product in affine.zero)
        lines = [f"sum += ({zero} - BASE) * ones" if constant else f"sum += lanes.shifted({zero}, BASE) * ones"]
        if made.has_tile_gemm and _is_exact(made):
            lines = ["if BASE is not None:                             # else operands have no zero point any more",
                     f"    {lines[0]}"]
    elif made.integer:
        lines = ["if BASE != 0:", "    sum -= BASE * ones"]
    scale = _text(affine.scale, without, suffix)
    if scale != "1.0":
        lines.append(f"sum *= {scale}")
    if affine.offset:
        lines.append(f"sum += ones * {_text(affine.offset, without, suffix, True)}")
    return lines


def _text(terms: Terms, without: list[Group], suffix: str | None, tight: bool = False) -> str:
    """A sum of products over the fields: over their values, whose names end so, or as the spec names them."""
    names = {group.name for group in without}
    text = ""
    for coefficient, product in terms:
        read = {f: f.removeprefix("/") for f in product}
        texts = {f: name if suffix is None else f"{argument(name)}{suffix}"
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
    scale, zero, offset = (_text(part, [], None) for part in (made.affine.scale, made.affine.zero, made.affine.offset))
    code = _code(made.affine)
    inner = f"({code}{_signed(zero)})" if zero else code
    text = inner if scale == "1.0" else f"({scale}) * {inner}" if " + " in scale or " - " in scale else f"{scale} * {inner}"
    return text + (_signed(offset) if offset else "")


def _code(affine: Affine) -> str:
    return f"{affine.table}[{affine.code}]" if affine.table else affine.code


def _signed(text: str) -> str:
    return f" - {text[1:]}" if text.startswith("-") else f" + {text}"
