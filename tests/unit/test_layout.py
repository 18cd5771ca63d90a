"""Layouts, records and slices: each post-condition that qdsl/core/layout.py states, against a count of every single bit."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qdsl.core import layout as module
from qdsl.core.layout import (
    Affine,
    CoverageClash,
    FieldSlice,
    Layout,
    RecordBit,
    RecordItem,
    RecordLine,
    RecordPiece,
    coalesce,
    find_clash,
    merge_pieces,
    record_bits,
    record_pieces,
    refine,
    split_at_words,
    strided_layout,
    vector_width,
)
from tests.support.layouts import (
    STRIDES,
    Record,
    almost,
    bits_of,
    boundaries,
    layouts,
    layouts_through,
    positions,
    records,
    slices,
    straddles,
    words_of_slices,
)

SOURCES = Path(module.__file__).parents[1]
PROPERTY = settings(max_examples=250, deadline=None, derandomize=True)


# -- layouts -------------------------------------------------------------------------------------------------------------


def test_quants_of_q4_k_lie_in_nibbles_of_four_rows_of_bytes() -> None:
    """(32,2,4):(8,4,256)@128 is what the module's docstring says it is."""
    quants = Layout(((32, 8), (2, 4), (4, 256)), 128)
    assert str(quants) == "(32,2,4):(8,4,256)@128"
    assert [quants(i) for i in range(256)] == [128 + 8 * (i % 32) + 4 * (i // 32 % 2) + 256 * (i // 64) for i in range(256)]
    assert (quants.size, quants.first, quants.last) == (256, 128, 128 + 8 * 31 + 4 + 256 * 3)


def test_a_layout_of_one_element_has_a_text() -> None:
    assert str(Layout((), 5)) == "(1):(0)@5"


def test_an_extent_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="extents are at least 1"):
        Layout(((2, 1), (0, 1)))


@PROPERTY
@given(layouts())
def test_a_layout_counts_as_nested_loops_do(layout: Layout) -> None:
    places = positions(layout)
    assert layout.size == len(places)
    assert [layout(i) for i in range(layout.size)] == places


@PROPERTY
@given(layouts())
def test_first_and_last_are_the_least_and_largest_position(layout: Layout) -> None:
    assert (layout.first, layout.last) == (min(positions(layout)), max(positions(layout)))


@PROPERTY
@given(layouts())
def test_coalesce_keeps_the_map_and_no_mode_too_many(layout: Layout) -> None:
    coalesced = coalesce(layout)
    assert positions(coalesced) == positions(layout)
    assert all(extent > 1 for extent, _ in coalesced.modes)
    assert all(after[1] != before[0] * before[1] for before, after in pairwise(coalesced.modes))


@PROPERTY
@given(layouts(largest=48))
def test_no_layout_of_the_same_map_has_fewer_modes_than_the_coalesced_one(layout: Layout) -> None:
    assert len(coalesce(layout).modes) == min(len(other.modes) for other in layouts_through(positions(layout)))


@PROPERTY
@given(layouts())
def test_factor_finds_the_coalesced_layout_of_any_layout(layout: Layout) -> None:
    assert strided_layout(positions(layout)) == coalesce(layout)


@PROPERTY
@given(st.one_of(almost(), st.lists(st.integers(0, 3), max_size=12)))
@example([0, 1, 2, 4])
@example([0, 1, 2, 3, 8, 9, 10, 12])
@example([7])
def test_factor_is_none_exactly_where_no_layout_has_the_positions(wanted: list[int]) -> None:
    layout = strided_layout(wanted)
    assert (layout is None) == (not wanted or not any(layouts_through(wanted)))
    assert layout is None or positions(layout) == wanted


@PROPERTY
@given(st.data())
def test_refine_keeps_the_map_and_cuts_where_it_can(data: st.DataObject) -> None:
    """None exactly where no layout of the same map has all of the boundaries."""
    layout = coalesce(data.draw(layouts(largest=72)))
    weights = [i for i in range(1, layout.size + 1) if layout.size % i == 0]
    some = st.one_of(st.sampled_from(weights), st.integers(1, 2 * layout.size))
    cuts = data.draw(st.lists(some, max_size=3))
    wanted = {cut for cut in cuts if cut < layout.size}
    refined = refine(layout, cuts)
    possible = any(wanted <= boundaries(other) for other in layouts_through(positions(layout)))
    assert (refined is not None) == possible
    if refined is not None:
        assert positions(refined) == positions(layout)
        assert wanted <= boundaries(refined)


@PROPERTY
@given(layouts(), st.lists(st.integers(1, 100), max_size=4))
def test_refine_of_a_layout_that_is_not_coalesced_keeps_its_boundaries(layout: Layout, cuts: list[int]) -> None:
    refined = refine(layout, cuts)
    if refined is not None:
        assert positions(refined) == positions(layout)
        assert {cut for cut in cuts if cut < layout.size} | boundaries(layout) <= boundaries(refined)



# -- records -------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(records())
def test_pieces_of_a_walk_are_adjacent(record: Record) -> None:
    at = 0
    for piece in record_pieces(tuple(record.lines)):
        assert piece.at == at
        at += piece.width
    assert at == sum(prod(e for _, e in line.loops) * sum(item.width for item in line.items) for line in record.lines)


@PROPERTY
@given(records())
def test_a_walk_turns_the_rightmost_loop_fastest(record: Record) -> None:
    """Every piece against loops that are counted by division."""
    expected: list[tuple[str | None, tuple[int, ...], int, int, int, int]] = []
    for number, line in enumerate(record.lines):
        for step in range(prod(extent for _, extent in line.loops)):
            values, left = {"tile": 0}, step
            for name, extent in reversed(line.loops):
                values[name], left = left % extent, left // extent
            for position, item in enumerate(line.items):
                index = tuple(form.const + sum(c * values[name] for name, c in form.terms) for form in item.index)
                lo = item.lo.const + sum(c * values[name] for name, c in item.lo.terms)
                expected.append((item.field, index, lo, item.width, number, position))
    assert [(p.field, p.index, p.lo, p.width, p.line, p.item) for p in record_pieces(tuple(record.lines))] == expected


def test_an_affine_form_knows_its_coefficients() -> None:
    form = Affine(3, (("i", 8), ("j", -1)))
    assert (form({"i": 2, "j": 5}), form.coefficient("j"), form.coefficient("k")) == (14, -1, 0)


# -- coverage ------------------------------------------------------------------------------------------------------------


def first_clash(pieces: Sequence[RecordPiece], box: tuple[int, ...], bits: Sequence[int]) -> CoverageClash | None:
    """Every element and bit of the box in order, then whatever lies outside of it."""
    inside = list(product(product(*map(range, box)), sorted(bits)))
    outside = sorted(set(bits_of(pieces)) - set(inside))
    for index, bit in [*inside, *outside]:
        owners = tuple(p for p in pieces if p.index == index and p.lo <= bit < p.lo + p.width)
        if len(owners) != 1 or (index, bit) in outside:
            return CoverageClash(index, bit, owners)
    return None


@PROPERTY
@given(records())
def test_a_record_that_stores_every_bit_once_has_no_clash(record: Record) -> None:
    for field, (box, bits) in record.fields.items():
        assert find_clash(record.pieces(field), box, range(bits)) is None


@PROPERTY
@given(records(), st.data())
def test_the_first_clash_of_a_broken_record_is_reported(record: Record, data: st.DataObject) -> None:
    """After a piece is dropped, stored twice, moved to another element or bit, made wider, or the box is changed."""
    field = data.draw(st.sampled_from(sorted(record.fields)))
    box, bits = record.fields[field]
    pieces = record.pieces(field)
    wanted = list(range(bits))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(pieces) - 1))
        piece = pieces[at]
        axis = data.draw(st.integers(0, len(box) - 1)) if box else 0
        change = data.draw(st.sampled_from(("drop", "again", "low", "wide", "bits") + (("element", "box") if box else ())))
        by = data.draw(st.sampled_from((-1, 1)))
        if change == "drop" and len(pieces) > 1:
            del pieces[at]
        elif change == "again":
            pieces.insert(data.draw(st.integers(0, len(pieces))), piece)
        elif change == "element":
            index = tuple(i + by * (a == axis) for a, i in enumerate(piece.index))
            pieces[at] = RecordPiece(field, index, piece.lo, piece.width, piece.at, piece.line, piece.item)
        elif change in ("low", "wide"):
            lo, width = piece.lo + (by if change == "low" else 0), piece.width + (change == "wide")
            pieces[at] = RecordPiece(field, piece.index, lo, width, piece.at, piece.line, piece.item)
        elif change == "bits":
            wanted = wanted[1:] if by < 0 else [*wanted, bits]
        elif change == "box":
            box = tuple(extent + by * (a == axis) for a, extent in enumerate(box))
    clash = find_clash(pieces, box, wanted)
    assert clash == first_clash(pieces, box, wanted)
    complete = Counter(bits_of(pieces)) == Counter(product(product(*map(range, box)), wanted))
    assert (clash is None) == complete


# -- slices of fields ----------------------------------------------------------------------------------------------------


def test_scales_of_q4_k_are_gathered_into_two_slices() -> None:
    """Six bits: whole in the low bits of the first four bytes, and cut in four and two bits for the last four elements."""
    j = Affine(0, (("j", 1),))
    late = Affine(4, (("j", 1),))
    scales = [
        RecordLine((("j", 4),), (RecordItem("s", (j,), Affine(), 6), RecordItem("s", (late,), Affine(4), 2))),
        RecordLine((("j", 4),), (RecordItem("m", (j,), Affine(), 6), RecordItem("m", (late,), Affine(4), 2))),
        RecordLine((("j", 4),), (RecordItem("s", (late,), Affine(), 4), RecordItem("m", (late,), Affine(), 4))),
    ]
    pieces = list(record_pieces(tuple(scales)))
    slices = {field: merge_pieces([piece for piece in pieces if piece.field == field]) for field in "sm"}
    assert {field: [(part.lo, part.width, str(part)) for part in parts or ()] for field, parts in slices.items()} == {
        "s": [(0, 4, "(4,2):(8,64)@0"), (4, 2, "(4,2):(8,2)@4")],
        "m": [(0, 4, "(4,2):(8,36)@32"), (4, 2, "(4,2):(8,2)@36")],
    }


def test_a_slice_of_two_coordinates_has_a_text() -> None:
    part = FieldSlice(0, 4, 16, (Layout(((8, 4),)), Layout(((2, 64), (3, 256)))))
    assert (str(part), part.extents, part.bit((3, 5))) == ("(8):(4) x (2,3):(64,256)@16", (8, 6), 16 + 12 + 64 + 512)
    assert str(FieldSlice(0, 4, 16, (Layout(), Layout(((2, 8),))))) == "(2):(8)@16"
    assert str(FieldSlice(0, 4, 16, ())) == "(1):(0)@16"


@PROPERTY
@given(records())
def test_gathered_slices_hold_every_bit_of_every_piece(record: Record) -> None:
    for field, (box, bits) in record.fields.items():
        pieces = record.pieces(field)
        slices = merge_pieces(pieces)
        assert slices is not None
        assert [bit for part in slices for bit in range(part.lo, part.lo + part.width)] == list(range(bits))
        assert {part.extents for part in slices} == {box}
        owner = {bit: part for part in slices for bit in range(part.lo, part.lo + part.width)}
        for piece in pieces:
            for t in range(piece.width):
                part = owner[piece.lo + t]
                assert part.bit(piece.index) + piece.lo + t - part.lo == piece.at + t


@PROPERTY
@given(records())
def test_neighbouring_slices_lie_apart_in_some_element(record: Record) -> None:
    """So a field has no slice more than it needs."""
    for field, (box, _) in record.fields.items():
        for low, high in pairwise(merge_pieces(record.pieces(field)) or ()):
            assert any(high.bit(index) != low.bit(index) + low.width for index in product(*map(range, box)))


@PROPERTY
@given(st.lists(st.integers(1, 4), max_size=2), st.data())
def test_gather_is_none_exactly_where_positions_are_not_strided(box: list[int], data: st.DataObject) -> None:
    """Against every layout of every axis; positions need not be strided, nor need axes add up."""
    indices = list(product(*map(range, box)))
    strides = [data.draw(STRIDES) for _ in box]
    where = {index: 100 + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices}
    for index in data.draw(st.lists(st.sampled_from(indices), max_size=2)):
        where[index] += data.draw(st.integers(-4, 4))
    offset = where[indices[0]]
    lines = [[where[tuple(i if a == axis else 0 for a in range(len(box)))] - offset for i in range(extent)]
             for axis, extent in enumerate(box)]
    strided = all(any(layouts_through(line)) for line in lines)
    added = all(offset + sum(line[i] for line, i in zip(lines, index, strict=True)) == at for index, at in where.items())
    slices = merge_pieces([RecordPiece("f", index, 0, 1, at, 0, 0) for index, at in where.items()])
    assert (slices is not None) == (strided and added)
    assert slices is None or all(slices[0].bit(index) == at for index, at in where.items())


@PROPERTY
@given(records())
def test_spread_says_what_lies_at_every_bit(record: Record) -> None:
    pieces = list(record_pieces(tuple(record.lines)))
    size = sum(piece.width for piece in pieces)
    expected = [None if p.field is None else RecordBit(p.field, (p.index,), p.lo + t) for p in pieces for t in range(p.width)]
    assert record_bits({field: merge_pieces(record.pieces(field)) or () for field in record.fields}, size) == expected


# -- digits and ranges ---------------------------------------------------------------------------------------------------


@st.composite
def ranged(draw: st.DrawFn) -> tuple[list[RecordLine], int]:
    """Lines that store elements of 2 bits one range after the other, as bytes of base-3 digits or as bits."""
    lines: list[RecordLine] = []
    first = 0
    for _ in range(draw(st.integers(1, 4))):
        bytes_, digits = draw(st.integers(1, 5)), draw(st.integers(1, 5))
        by_digit = draw(st.booleans())                           # neighbours lie in a byte, or in bytes one after the other
        items = []
        for place in range(digits):
            index = Affine(first + place, (("l", digits),)) if by_digit else Affine(first + bytes_ * place, (("l", 1),))
            items.append(RecordItem("q", (Affine(), index), Affine(), 2, place, place == digits - 1))
        if draw(st.booleans()):
            items = [RecordItem(item.field, item.index, item.lo, item.width) for item in items]
            items += [RecordItem(None, (), Affine(), 8 - 2 * digits % 8)] if 2 * digits % 8 else []
        lines.append(RecordLine((("l", bytes_),), tuple(items)))
        first += bytes_ * digits
    return draw(st.permutations(lines)), first


def test_digits_of_a_byte_lie_at_one_bit() -> None:
    index = [(Affine(i),) for i in range(3)]
    digits = tuple(RecordItem("q", element, Affine(), 2, place, place == 2) for place, element in enumerate(index))
    pieces = list(record_pieces((RecordLine((("l", 2),), (*digits, RecordItem(None, (), Affine(), 4))),)))
    assert [(p.at, p.place) for p in pieces] == [(0, 0), (0, 1), (0, 2), (8, None), (12, 0), (12, 1), (12, 2), (20, None)]


@PROPERTY
@given(ranged())
def test_every_element_is_in_one_range(drawn: tuple[list[RecordLine], int]) -> None:
    """Digits at their byte and place, bits at theirs, each once; and back."""
    lines, count = drawn
    pieces = [piece for piece in record_pieces(tuple(lines)) if piece.field]
    slices = merge_pieces(pieces)
    assert slices is not None
    where = {piece.index[-1]: piece for piece in pieces}
    assert sorted(part.start + i for part in slices for i in range(part.extents[-1])) == list(range(count))
    for part in slices:
        for i in range(part.extents[-1]):
            piece = where[part.start + i]
            assert (part.lo, part.width, part.bit((0, i))) == (0, 2, piece.at)
            assert (part.place((0, i)) if part.places else None) == piece.place
            assert part.room == (2 if piece.place is None else 8)
        taken = {bit for i in range(part.extents[-1]) for bit in range(part.bit((0, i)), part.bit((0, i)) + part.room)}
        assert part.filled == len(taken)
    size = max(piece.at for piece in pieces) + 8
    bits = record_bits({"q": slices}, size)
    for piece in pieces:
        if piece.place is None:
            assert [bits[piece.at + t] for t in range(2)] == [RecordBit("q", (piece.index,), t) for t in range(2)]
        else:
            rows = [bits[piece.at + t] for t in range(8)]
            assert all(row is not None and row.digits and row.bit == t and row.elements[piece.place or 0] == piece.index
                       for t, row in enumerate(rows))


def test_a_slice_of_digits_has_a_text() -> None:
    part = FieldSlice(0, 2, 256, (Layout(), Layout(((16, 8), (5, 0)))), 160, (Layout(), Layout(((16, 0), (5, 1)))))
    assert str(part) == "from 160: (16,5):(8,0)@256 digit (16,5):(0,1)"
    assert (part.filled, part.bit((0, 17)), part.place((0, 17))) == (128, 264, 1)


# -- words ---------------------------------------------------------------------------------------------------------------


def check_split(part: FieldSlice, word: int) -> bool:
    """Whether the slice was cut; where it was, every element against its word and its place there."""
    cut = split_at_words(part, word)
    if cut is None:
        return False
    inside, words = cut
    assert (inside.lo, inside.width, len(words.dims)) == (part.lo, part.width, len(part.dims))
    for index in product(*map(range, part.extents)):
        assert part.bit(index) == word * words.bit(index) + inside.bit(index)
        assert 0 <= inside.bit(index) <= word - part.width
    return True


@pytest.mark.parametrize("modes", [((6, 12),), ((4, 20), (3, 8)), ((2, 4), (4, 24))])
def test_a_digit_that_returns_to_a_word_after_several_steps_is_split(modes: tuple[tuple[int, int], ...]) -> None:
    """Its stride is no multiple of the word, and a multiple of its stride is."""
    layout = Layout(modes)
    assert check_split(FieldSlice(0, 4, -min(layout.first, 0), (layout,)), 8)


@PROPERTY
@given(slices(), st.sampled_from((3, 6, 8, 16, 32, 64)))
@example(FieldSlice(0, 8, 24, ()), 8)                           # a field of one element, in a later word
def test_a_slice_is_cut_at_words_or_not_at_all(part: FieldSlice, word: int) -> None:
    if check_split(part, word):
        assert not straddles(part, word)


@PROPERTY
@given(words_of_slices())
@example((FieldSlice(0, 4, 32, (Layout(((4, 8), (2, 36))),)), 8))  # Q4_K's mins: the second half moves four bytes and four bits
@example((FieldSlice(0, 4, 4, (Layout(((2, -4), (3, 8))),)), 8))  # the first element in the high bits
def test_a_slice_that_is_laid_into_words_can_be_cut_at_them(laid: tuple[FieldSlice, int]) -> None:
    assert check_split(*laid)


@PROPERTY
@given(st.one_of(slices(), words_of_slices().map(lambda laid: laid[0])), st.integers(1, 600), st.sampled_from((16, 32, 128)))
def test_no_wider_load_serves_a_slice(part: FieldSlice, record: int, limit: int) -> None:
    serving = [width for width in (1, 2, 4, 8, 16, 32, 64, 128)
               if width <= limit and record % width == 0 and split_at_words(part, width) is not None]
    assert vector_width(part, record, limit) == max(serving, default=None)


@pytest.mark.parametrize("width, offset, record, wanted", [
    (4, 0, 1152, 128), (4, 0, 1088, 64), (8, 16, 272, 16), (16, 0, 528, 16), (6, 0, 192, None)])
def test_known_loads(width: int, offset: int, record: int, wanted: int | None) -> None:
    assert vector_width(FieldSlice(0, width, offset, (Layout(((32, width),)),)), record) == wanted


# -- the module ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["core/layout.py", "core/numbers.py"])
def test_only_the_standard_library_is_imported(name: str) -> None:
    imports: set[str] = set()
    for node in ast.walk(ast.parse((SOURCES / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports.add((node.module or "").split(".")[0] if node.level == 0 else "a relative import")
    assert imports and imports <= sys.stdlib_module_names
