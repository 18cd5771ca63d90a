"""Weights in stored form for gemv_records: codes and the numbers of their groups in records of 256 columns.

Requirements: rows hold whole records, of a multiple of 16 bytes.  128 bytes of a record are its codes, 4 bits each; low and high
halves of every 32 of these bytes are two runs of 32 columns.  All numbers of groups, of at least 32 columns, lie in the record's
other words: floats whole, unsigned integers whole or in slices.

Lane c of a row loads the bytes from 32 * c on, so that it holds run 2 * c in low halves and run 2 * c + 1 in high ones.  Runs are
the eight columns of the MMA, whose products give lane c columns 2 * c and 2 * c + 1.  So a lane needs the numbers of its own two
runs, which it extracts from words that every lane of a row loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Domain, Index, name
from qdsl.compiler.ir.program import Field, Placement, Program, Tensor
from qdsl.compiler.passes.derive_planar import coordinate, is_code
from qdsl.core.layout import FieldSlice, Layout, strided_layout
from qdsl.core.numbers import Number

COLUMNS, RUNS, RUN = 256, 8, 32                                  # columns and runs per record, columns per run
WORD, FOUR = 32, 4                                               # bits per word, words per load
FLOATS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
MAGNITUDE = 22                                                   # bits of an integer that the runtime's number() supports


@dataclass(frozen=True, slots=True)
class FieldBits:
    """Bits [lo, lo + width) of a group's field; for each run the word and the bit where they begin."""

    lo: int
    width: int
    words: tuple[int, ...]
    bits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordWords:
    """Records of `size` words in a tensor: the start of codes, the first column of each run, and the parts of fields."""

    tensor: str
    size: int
    codes: int
    starts: Layout
    fields: dict[str, tuple[FieldBits, ...]]

    @property
    def loads(self) -> tuple[int, ...]:
        """The first word of each load of four words that hold the fields."""
        return tuple(sorted({word // FOUR * FOUR for parts in self.fields.values() for part in parts for word in part.words}))

    def place(self, word: int) -> int:
        """The index of a word among the loaded ones."""
        return self.loads.index(word // FOUR * FOUR) * FOUR + word % FOUR


def record_layout(program: Program) -> RecordWords | None:
    """The layout of a storage's records; None if they do not meet the requirements."""
    affine = program.affine
    if affine is None or affine.table or affine.lookups or not affine.fields or len(program.tensors) != 1:
        return None
    tensor = program.tensors[0]
    code = program.field(affine.code)
    placed = {placement.field: placement for placement in tensor.placements if _is_tile(tensor, placement)}
    if not {code.name, *affine.fields} <= placed.keys() or not _holds_rows(tensor):
        return None
    if code.index != (name("n"), name("k")) or code.bits != 4 or not is_code(code.number):
        return None
    runs = _code_starts(placed[code.name])
    if runs is None:
        return None
    first, starts = runs
    fields = {field: _field_parts(program, program.field(field), placed[field], starts) for field in affine.fields}
    parts_of = {field: parts for field, parts in fields.items() if parts is not None}
    layout = strided_layout(starts)
    if layout is None or len(parts_of) < len(fields):
        return None
    return RecordWords(tensor.name, tensor.record_bits // WORD, first // WORD, layout, parts_of)


def _holds_rows(tensor: Tensor) -> bool:
    """Whether it has unchanged bytes or words, with the records of a row consecutive at addresses divisible by 16."""
    return tensor.record_bits % (FOUR * WORD) == 0 and not (tensor.stored or tensor.section or tensor.optional) \
        and not tensor.element.is_float and all(var.exact for var in tensor.vars) \
        and [len(axis.digits) for axis in tensor.axes] == [1, 2] and tensor.axes[1].digits[1] == ""


def _is_tile(tensor: Tensor, placement: Placement) -> bool:
    """Whether a record holds one row of a field, and some of its columns."""
    axes = [axis.digits[0] for axis in tensor.axes if axis.digits]
    return not placement.flat and placement.plain and [var for var, _ in placement.tiles] == axes and placement.tiles[0][1] == 1


def _code_starts(placement: Placement) -> tuple[int, list[int]] | None:
    """The start of a record's codes, aligned to a load, and the first column of each run."""
    if placement.extents[-1] != COLUMNS or [(part.lo, part.width) for part in placement.slices] != [(0, 4)]:
        return None
    columns = {placement.slices[0].bit((0, k)): k for k in range(COLUMNS)}
    first = min(columns)
    runs = [[columns.get(first + 256 * c + 8 * j + 4 * h, -1) for j in range(RUN)] for c, h in product(range(4), range(2))]
    if first % (FOUR * WORD) or any(run != list(range(run[0], run[0] + RUN)) or run[0] < 0 for run in runs):
        return None
    return first, [run[0] for run in runs]


def _field_parts(program: Program, field: Field, placement: Placement, starts: Sequence[int]) -> tuple[FieldBits, ...] | None:
    """The parts of a field with a number per row and group of columns, each inside words."""
    block = COLUMNS // placement.extents[-1]
    where = [coordinate(program, index) for index in field.index]
    if where != [("n", "1"), ("k", str(block))] or block % RUN or not _is_number(field.number, placement.slices):
        return None
    parts: list[FieldBits] = []
    if placement.ranges > 1 or any(part.places for part in placement.slices):
        return None
    for part in placement.slices:
        at = [part.bit((0, start // block)) for start in starts]
        if any(bit % WORD + part.width > WORD for bit in at):
            return None
        parts.append(FieldBits(part.lo, part.width, tuple(bit // WORD for bit in at), tuple(bit % WORD for bit in at)))
    return tuple(parts)


def _is_number(number: Number | None, slices: Sequence[FieldSlice]) -> bool:
    if number is None:
        return False
    if number.is_float:
        return number.name in FLOATS and len(slices) == 1
    return number.kind == "unsigned" and number.bits <= MAGNITUDE


# -- text -------------------------------------------------------------------------------------------------------------


def start_text(record: RecordWords) -> str:
    """The start of run g, in pairs of columns."""
    return ix.text(_layout_index(Layout(tuple((extent, stride // 2) for extent, stride in record.starts.modes),
                                        record.starts.offset // 2), "g", RUNS))


def field_lines(record: RecordWords, field: Field, target: str) -> Iterator[str]:
    """Lines that assign a field's numbers of all runs, [W, 16, 8], from the words `head`; `lane` is c."""
    number = field.number
    assert number is not None
    parts = record.fields[field.name]
    if number.is_float:
        low, high = (_shifted_words(record, parts[0], half, parts[0].bits) for half in range(2))
        yield f"{target} = records.floats(tl.{FLOATS[number.name]}, {low}, {high})"
        return
    step = _odd_run_step(parts, number.bits)
    names = ["both"] if step is not None else ["low", "high"]
    for half, variable in enumerate(names):
        for place, part in enumerate(parts):
            yield f"{variable} {'|=' if place else '='} {_extract_part(record, part, half, step or 0)}"
    shown = "low, high" if step is None else f"both, both >> {step}" if step else "both, both"
    yield f"{target} = records.integers({number.bits}, {shown})"


def _odd_run_step(parts: Sequence[FieldBits], bits: int) -> int | None:
    """How many bits an odd run's number is above the even one's, if one extraction serves both; 0: they are one number."""
    pairs = [(part, j) for part in parts for j in range(0, RUNS, 2)]
    steps = {part.bits[j + 1] - part.bits[j] for part, j in pairs}
    if len(steps) > 1 or any(part.words[j] != part.words[j + 1] for part, j in pairs):
        return None
    step = steps.pop()
    return step if step == 0 or bits <= step < WORD - bits else None


def _extract_part(record: RecordWords, part: FieldBits, half: int, step: int) -> str:
    """A part of a field's number for even (half 0) or odd runs, at its place in the number; odd runs are `step` higher."""
    mask = (1 << part.width) - 1
    mask |= mask << step
    lower = [bit - part.lo for bit in part.bits]
    if min(lower) >= 0:
        return f"{_shifted_words(record, part, half, lower)} & {_hex(mask << part.lo)}"
    return f"({_shifted_words(record, part, half, part.bits)} & {_hex(mask)}) << {part.lo}"


def _hex(mask: int) -> str:
    """A mask as hexadecimal text, in whole bytes."""
    digits = f"{mask:X}"
    return f"0x{digits:0>{len(digits) + len(digits) % 2}}"


def _shifted_words(record: RecordWords, part: FieldBits, half: int, lower: Sequence[int]) -> str:
    """The words with a part for lanes' even or odd runs, each shifted down by its run's bits."""
    text = _choose_by_lane([f"head[{record.place(word)}]" for word in part.words[half::2]])
    layout = strided_layout(lower[half::2])
    moved = ix.text(_layout_index(layout, "lane", 4)) if layout else _choose_by_lane(list(map(str, lower[half::2])))
    return text if moved == "0" else f"{text} >> {moved}"


def _choose_by_lane(texts: Sequence[str]) -> str:
    """The values of the four lanes as one expression."""
    choice = texts[-1]
    for lane, (text, after) in reversed(list(enumerate(pairwise(texts), 1))):
        if text != after:
            choice = f"tl.where(lane < {lane}, {text}, {choice})"
    return choice


def _layout_index(layout: Layout, variable: str, count: int) -> Index:
    """A layout at a variable that is less than `count`."""
    domain = Domain({variable: (0, count - 1)})
    parts, weight = [(Index(layout.offset), 1)], 1
    for extent, stride in layout.modes:
        parts.append((ix.mod(ix.div(name(variable), weight, domain), extent, domain), stride))
        weight *= extent
    return ix.combine(parts)
