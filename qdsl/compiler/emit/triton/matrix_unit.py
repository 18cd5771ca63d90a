"""Prints the short functions of a storage that complete the kernel families for matrix units.

The kernels are written by hand, one per family, in runtime/gpu/kernels.  gpu/kernels/lanes.py defines the bit layout, and
gpu/kernels/bitplanes.py has functions that load words and make numbers of them.  A storage gets functions that apply decode's
affine formula to a product of codes, once per group.

A storage whose records hold codes and numbers together (compiler/emit/triton/records.py) gets functions that read records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qdsl.compiler.emit.formula import constant
from qdsl.compiler.emit.lines import WORD
from qdsl.compiler.emit.literals import bare_tuple, not_empty, quoted, tupled
from qdsl.compiler.emit.templates import render
from qdsl.compiler.emit.triton import records
from qdsl.compiler.emit.triton.codebook import Codebook, StoredTable
from qdsl.compiler.emit.triton.matrix_unit_layout import GroupNumbers, MatrixUnitPlan, argument, matrix_unit_plan
from qdsl.compiler.emit.triton.records import RecordWords
from qdsl.compiler.ir.program import AffineDecode, Program, Terms
from qdsl.compiler.passes.derive_planar import IN_REGISTERS

FUNCTIONS = ("words", "table", "start", "fields", "scale", "finish")


def matrix_unit_functions(program: Program) -> list[str]:
    """The lines of a storage's functions for the kernel families; none where it has none."""
    plan = matrix_unit_plan(program)
    if plan is None:
        return []
    if plan.record is not None:
        return _record_functions(plan, plan.record)
    lines = render(
        "lanes", storage=program.storage, code=_code(plan.affine), first=plan.first, bits=plan.code.bits, table=_table_code(plan),
        line=_formula_line(plan),
        functions=[(name, what, bare_tuple(group.name for group in groups), body)
                   for name, what, groups, body in _sum_functions(plan) if not _shared_name(groups, body)])
    return lines if any(lines) else []


def _record_functions(plan: MatrixUnitPlan, record: RecordWords) -> list[str]:
    """The lines of the functions for records as they are stored."""
    loads = [line for name in plan.affine.fields
             for line in records.field_lines(record, plan.program.field(name), f"{argument(name)}_g")]
    names, scale = [group.name for group in plan.groups], _scaled_sum_lines(plan, [])
    return render("records", storage=plan.program.storage, line=_formula_line(plan),
                  start=records.start_text(record), fields=[*loads, f"return {bare_tuple(f'{name}_g' for name in names)}"],
                  values=bare_tuple(names), scale=[] if _shared_name(plan.groups, scale) else scale)


def kernels_record(plan: MatrixUnitPlan) -> str:
    """The record of a storage's kernels (runtime/weight/matrix_unit.py)."""
    storage = plan.program.storage
    raw = {"raw": f"bitplanes.raw_{plan.code.name}"} if plan.has_parts and not plan.takes_sums else {}
    families = {"skinny": {} if plan.record is None else None, "gemv": None if plan.stored or plan.late else raw,
                "tile_gemm": _storage_traits(plan) if plan.has_tiles else None}
    shown = (f"{quoted(name)}: {{{', '.join(f'{quoted(key)}: {value}' for key, value in options.items())}}}"
             for name, options in families.items() if options is not None)
    parts = [_codes_record(plan), _sums_record(plan), f"{{{', '.join(shown)}}}"]
    if plan.eight:
        more = ("" if plan.late else "groups=True", "sums=True" if plan.takes_sums else "")
        parts.append("eight=" + _call("EightBit", quoted(plan.eight), quoted(plan.stored), *more))
    if (record := plan.record) is not None:
        parts.append(f'records=Records("{record.tensor}", _fields_{storage}, _start_{storage}, size={record.size}, '
                     f"codes={record.codes}, head={record.loads})")
    return _call("MatrixUnitKernels", *parts)


def _call(name: str, *arguments: str) -> str:
    """A call with those arguments that are not empty."""
    return f"{name}({', '.join(filter(None, arguments))})"


def _codes_record(plan: MatrixUnitPlan) -> str:
    signed = plan.code.kind == "signed" and plan.integer and not plan.book
    return _call(
        "Codes", _code_converter(plan), f"words={_words(plan)}" if plan.record is None else "",
        f"width={plan.lies[0]}, bits={plan.lies[1]}" if plan.lies != (4, 4) else "", "signed=True" if signed else "",
        f"unit={plan.unit}" if plan.unit != (2.0 ** 24, 1.0) else "", f"base={plan.base}" if plan.base != (0, 128) else "",
        _levels_text(plan), "in_order=True" if plan.stored else "")


def _sums_record(plan: MatrixUnitPlan) -> str:
    storage = plan.program.storage
    if plan.record is not None:
        functions = [f"scale={_shared_name(plan.groups, _scaled_sum_lines(plan, [])) or f'_scale_{storage}'}"]
    else:
        functions = [f"{name}={_shared_name(groups, body) or f'_{name}_{storage}'}"
                     for name, _, groups, body in _sum_functions(plan)]
        functions += [f"{name}=({bare_tuple(map(_group_text, groups))})"
                      for name, groups in (("group_fields", plan.inner), ("row_fields", plan.outer)) if groups]
    takes_ones = plan.late and plan.record is None and (plan.integer or plan.takes_sums)
    return _call("Sums", *functions, f"blocks={tupled(list(dict.fromkeys(plan.blocks)))}" if plan.blocks else "",
                 "ones=True" if takes_ones else "")


def _storage_traits(plan: MatrixUnitPlan) -> dict[str, object]:
    """What a storage says to the family of many rows."""
    spans = LOOKED_UP_SPANS if plan.book and plan.code.high < IN_REGISTERS else SPANS
    steps = tuple(spans.get((plan.planes[0][1], width), 0) for _, width, _ in plan.planes)
    return {**({"point": plan.inner.index(plan.point)} if plan.point else {}),
            **({"zero": _zero_fraction(plan)} if _zero_fraction(plan) != (0, -128) else {}),
            **not_empty(exact=bool(plan.affine.zero) and _is_exact(plan), sums=plan.sums_in_tiles, spans=any(steps) and steps,
                        tall=plan.tall)}


# -- codes ------------------------------------------------------------------------------------------------------------


def _words(plan: MatrixUnitPlan) -> str:
    """The function that loads the words of a chunk of 128 columns, with codes from the storage's first tensors."""
    return f"bitplanes.words_{plan.code.bits}" if plan.first == 0 else f"_words_{plan.program.storage}"


def _code_converter(plan: MatrixUnitPlan) -> str:
    """The function that turns codes into numbers."""
    if plan.book is not None:
        return f"bitplanes.{plan.book.function}"
    return f"bitplanes.{'ordered_' if plan.record and plan.code.is_float else ''}{plan.code.name}"


def _is_exact(plan: MatrixUnitPlan) -> bool:
    """Whether operands of many rows have the zero point subtracted."""
    return plan.exact_zero is not None or plan.point is not None


def _zero_fraction(plan: MatrixUnitPlan) -> tuple[int, int]:
    """The number to add to codes for operands of many rows, minus the operands' base: for float16 and bfloat16."""
    if not plan.integer or plan.point is not None:               # a zero point includes the operands' base
        return 0, 0
    halves, brains = plan.base
    if plan.code.bits == 8:                                      # whole bytes are signed (lanes.whole_bytes)
        brains = halves - 128
    return (plan.exact_zero or 0) - halves, (plan.exact_zero or 0) - brains


# By how many bits the second chunk of a span of 256 columns is higher, by the widths of the first plane and of a plane (orders of
# compiler/passes/derive_planar.py).
SPANS = {(4, 2): 2, (4, 1): 1, (2, 2): 4, (2, 1): 4, (1, 1): 2}
LOOKED_UP_SPANS = {(2, 2): 2, (2, 1): 2, (4, 1): 1}              # the same for codes that index a table


def _table_code(plan: MatrixUnitPlan) -> list[str]:
    """Lines that return a table's words, and the byte that makes its integers numbers."""
    if not isinstance(plan.book, Codebook):
        return []
    halves, brains = (_table_text(plan.book, kind) for kind in ("f16", "bf16"))
    return ["if F == tl.float16:", f"    return {halves}", "else:", f"    return {brains}"]


def _table_text(book: Codebook, kind: str) -> str:
    """The call that loads a table's words into registers, for numbers of 'f16' or 'bf16'."""
    words: Sequence[int | None]
    if book.is_split:
        first, *words = book.halves(kind)
    elif book.is_short or (book.is_int and kind == "f16"):
        first, words = 0 if kind == "f16" else 0x43434343, book.bytes
    else:
        low, high = (_without_repeats(part) for part in book.floats(kind))
        first, words = 0, [*low, *high]                          # high bytes have separate words
    return f"codebook.table(g, N, {first:#x}, ({bare_tuple('None' if word is None else f'{word:#x}' for word in words)}))"


def _without_repeats(words: list[int]) -> list[int | None]:
    """Words of a table's bytes, four or more; None for missing ones, and for an upper half equal to the lower one."""
    if len(words) > 4:
        return [*words]
    lower, upper = words[:2], words[2:]
    kept = lower if upper == lower else words
    return [*kept, *[None] * (4 - len(kept))]


# -- numbers of groups ------------------------------------------------------------------------------------------------


def _levels_text(plan: MatrixUnitPlan) -> str:
    """The argument with the lookup table of codes; '' without one."""
    book = plan.book
    if isinstance(book, StoredTable):
        stored = f"{constant(book.name)}.halves({book.entries}, {book.unit})" if book.name else \
            f'GroupField("{book.tensor}", {_block(book.rows)}, 0)'
        return f"levels=Levels(stored={stored}, entries={book.entries})"
    load = f"_table_{plan.program.storage}" if book is not None else "codebook.two_part_table" if plan.has_parts else ""
    return f"levels=Levels({load})" if load else ""


def _block(text: str) -> str:
    """A block of rows or columns for GroupField: a number, the name of a size, or 0 for all."""
    return (text if text.isdigit() else f'"{text}"') if text else "0"


def _group_text(group: GroupNumbers) -> str:
    """How a family reads a field's values."""
    rows, columns = _block(group.rows), _block(group.columns)
    arguments = [f'"{group.tensor}"', rows, columns, *([group.kind] if group.kind != "0" else [])]
    arguments += [f"table={constant(group.table)}"] if group.table else []
    arguments += [f"shared={group.shared}"] if group.shared > 1 else []
    arguments += [] if group.at is None else [f"at={group.at}"]
    return f"GroupField({', '.join(arguments)}{'' if group.optional is None else f', default={float(group.optional)}'})"


# Functions of runtime/gpu/kernels/group_sums.py by their lines; $0 is the first field, and so on.
_BASE = ("if BASE != 0:", "    sum -= BASE * ones")
SHARED = {
    ("return lanes.plus(total, sum * $0)",): "scaled",
    (*_BASE, "return lanes.plus(total, sum * $0)"): "scaled_codes",
    ("sum += (-$1 - BASE) * ones", "return lanes.plus(total, sum * $0)"): "with_zero",
    ("total = lanes.plus(total, sum * $0)", "return total + ones * lanes.offset($1, $0, BASE)"): "with_offset",
    ("factor = $0 * $1", "total = lanes.plus(total, sum * factor)",
     "return total + ones * lanes.offset(-$2 * $3, factor, BASE)"): "nested_with_minimum",
}


def _shared_name(groups: Sequence[GroupNumbers], body: Sequence[str]) -> str:
    """The shared function with these lines; '' if there is none."""
    places = {group.name: f"${place}" for place, group in enumerate(groups)}
    function = SHARED.get(tuple(WORD.sub(lambda word: places.get(word[0], word[0]), line) for line in body))
    return f"group_sums.{function}" if function else ""


def _sum_functions(plan: MatrixUnitPlan) -> list[tuple[str, str, Sequence[GroupNumbers], list[str]]]:
    """The functions that scale sums: name, kind of sum, numbers, and lines."""
    scale = [] if plan.late else _scaled_sum_lines(plan, plan.outer)      # none where nothing varies along K
    functions = (("scale", "group", plan.inner, scale), ("finish", "row", plan.outer, _row_scale_lines(plan)))
    return [function for function in functions if function[-1]]


def _row_scale_lines(plan: MatrixUnitPlan) -> list[str]:
    """Lines that scale `sum` by the numbers that are constant along K."""
    if plan.late:
        return _scaled_sum_lines(plan, [])
    names = [group.name for group in plan.outer]
    factors = [name for name in names if name not in plan.divisors]
    product = _quotient(factors, [name for name in names if name not in factors])
    return [f"return lanes.plus(total, sum * {_tight(product)})"] if names else []


def _scaled_sum_lines(plan: MatrixUnitPlan, without: list[GroupNumbers]) -> list[str]:
    """Lines that compute scale * (sum + zero * ones) + offset * ones from a sum of products of codes, without some factors."""
    affine = plan.affine
    lines: list[str] = []
    if affine.zero:
        zero = _terms_text(affine.zero, [])
        lines = [f"sum += ({zero} - BASE) * ones"]
        if plan.has_tiles and _is_exact(plan):
            lines = ["if BASE is not None:                             # else operands have no zero point any more",
                     f"    {lines[0]}"]
    elif plan.integer and not affine.offset:
        lines = [*_BASE]
    factor = _tight(_terms_text(affine.scale, without))
    value = "sum" if factor == "1.0" else f"sum * {factor}"
    if not affine.offset:
        return [*lines, f"return lanes.plus(total, {value})"] if lines or value != "sum" else []
    if affine.zero or not plan.integer:
        offset = _tight(_terms_text(affine.offset, without))
        return [*lines, f"total = lanes.plus(total, {value})", f"return total + ones * {offset}"]
    if " " in factor:                                            # the difference of numbers and codes enters the offset
        lines, value, factor = [f"factor = {factor[1:-1]}"], "sum * factor", "factor"
    return [*lines, f"total = lanes.plus(total, {value})",
            f"return total + ones * lanes.offset({_terms_text(affine.offset, without)}, {factor}, BASE)"]


def _terms_text(terms: Terms, without: list[GroupNumbers], spec: Mapping[str, str] | None = None) -> str:
    """A sum of products over the fields, with their variables in functions, or as a spec has them.

    spec: the lookup tables of fields.
    """
    names = {group.name for group in without}
    text = ""
    for coefficient, product in terms:
        read = {f: f.removeprefix("/") for f in product}
        texts = {f: argument(name) if spec is None else f"{spec[name]}[{name}]" if name in spec else name
                 for f, name in read.items() if argument(name) not in names}
        size = abs(coefficient)
        factors = [texts[f] for f in product if f in texts and f[0] != "/"]
        divisors = [texts[f] for f in product if f in texts and f[0] == "/"]
        shown = _quotient([*([f"{size}"] if size != 1 else []), *factors], divisors)
        text += (" - " if coefficient < 0 else " + ") + shown if text else ("-" if coefficient < 0 else "") + shown
    return text


def _quotient(factors: list[str], divisors: list[str]) -> str:
    """A product divided by several divisors, in order."""
    return " / ".join([" * ".join(factors) or "1.0", *divisors])


def _tight(text: str) -> str:
    """A formula in parentheses if it needs them as a factor."""
    return f"({text})" if " " in text or text.startswith("-") else text


def _formula_line(plan: MatrixUnitPlan) -> str:
    """Decode's affine formula, for the docstring."""
    parts = (plan.affine.scale, plan.affine.zero, plan.affine.offset)
    scale, zero, offset = (_terms_text(part, [], plan.affine.lookups) for part in parts)
    code = _code(plan.affine)
    inner = f"({code}{_signed(zero)})" if zero else code
    text = inner if scale == "1.0" else f"({scale}) * {inner}" if " + " in scale or " - " in scale else f"{scale} * {inner}"
    return text + (_signed(offset) if offset else "")


def _code(affine: AffineDecode) -> str:
    return f"{affine.table}[{affine.code}]" if affine.table else affine.code


def _signed(text: str) -> str:
    return f" - {text[1:]}" if text.startswith("-") else f" + {text}"
