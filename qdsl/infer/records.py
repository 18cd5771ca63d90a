"""Finds numbers of groups in records, in headers and trailers of rows, and as small integers times other numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qdsl.core.numbers import number
from qdsl.infer.elements import SMALL, Element, Section, decode_numbers
from qdsl.infer.fit import Blocks, Numbers
from qdsl.infer.numbers import FITTING, Field, close, fields_in_tensors
from qdsl.infer.tiles import Codes, Labels, Layout, StoredBytes, Tile, match_layout

WHOLE = 0.02                                                     # largest distance of a quotient of scales from an integer
MOST_WHOLE = 255                                                 # largest of these integers
MULTIPLES = (1, 2, 4, 8)                                         # factors that may make quotients integers
TRIED = 1 << 12                                                  # quotients that suffice to reject most outer numbers


@dataclass(frozen=True)
class Record:
    """Records of codes, or headers and trailers of rows, with a mark on the bits that are explained."""

    tensor: str
    section: Section | None
    stored: StoredBytes
    layout: Layout
    shape: tuple[int, int]

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All records [rows, records of a row, bytes]."""
        view = self.layout.tile.tiled_bytes(self.stored, self.shape)
        assert view is not None
        return view

    def numbers_at_offsets(self, kind: str) -> Iterator[tuple[int, Numbers]]:
        """Yields the byte offsets at which a number may lie, and the number there in every record."""
        form = number(kind)
        size = form.bits // 8
        free = [bool((part < 0).all()) for part in self.layout.source.reshape(-1, 8)]
        for place in range(len(free) - size + 1):
            if all(free[place:place + size]):
                yield place, decode_numbers(self.bytes[..., place:place + size], kind).reshape(self.bytes.shape[:2])

    def layout_at(self, tile: Tile, kind: str, places: list[int]) -> Layout:
        """The layout of numbers at these bit positions of a record."""
        form = number(kind)
        source = np.full(len(self.layout.source), -1)
        for i, place in enumerate(places):
            source[place:place + form.bits] = np.arange(form.bits) + i * form.bits
        return Layout(tile, form.bits, source)

    def blocks_per_record(self, blocks: Blocks, rows: int = 1) -> int:
        """The number of blocks of each of its `rows` neighbouring rows in a record; 0 if that is no integer."""
        tile = self.layout.tile
        count = tile.columns // blocks.columns
        is_whole = count * blocks.columns == tile.columns and blocks.rows == 1 and not blocks.apart
        divides = self.shape[0] % rows == 0 and self.shape[1] % tile.columns == 0
        return count if is_whole and divides and replace(tile, rows=1).is_row and tile.rows == rows else 0


def row_end(tensor: str, section: Section, element: Element, shape: tuple[int, int]) -> Record:
    """A header or a trailer of every row, as records in which all bits are free."""
    stored = element.cut_section(section, shape[0]).stored
    return Record(tensor, section, stored, Layout(Tile(1, shape[1]), 1, np.full(8 * len(stored.data) // shape[0], -1)), shape)


def fields_in_records(name: str, wanted: Numbers, blocks: Blocks, records: Sequence[Record],
                      tensors: Mapping[str, Element]) -> tuple[list[Field], str]:
    """The wanted numbers as fields of records, or as outer numbers times small integers; and the formula of their product.

    Returns no fields if none match.
    """
    for record in records:
        field = _plain_field(name, wanted, blocks, record)
        if field is not None:
            return [field], name
    for outer, values in _outer_candidates(name, wanted, blocks, records, tensors):
        for multiple in MULTIPLES if _may_be_integers(wanted, values) else ():
            fields = _product_fields(name, wanted, blocks, records, tensors, outer, values / multiple)
            if fields:
                term = " * ".join(field.term for field in fields)
                return fields, term if multiple == 1 else f"{term} * {1 / multiple}"
    return [], ""


def _plain_field(name: str, wanted: Numbers, blocks: Blocks, record: Record) -> Field | None:
    rows = record.layout.tile.rows
    count = record.blocks_per_record(blocks, rows)
    if not count:
        return None
    tile = Tile(rows, count)
    tiles = tile.tiled_weights(wanted).reshape(*record.bytes.shape[:2], tile.size)
    for kind in ("f16", "bf16", "f32", *SMALL):
        slots = dict(record.numbers_at_offsets(kind))
        places = [next((place for place, values in slots.items() if close(values, tiles[..., i]).mean() >= FITTING), None)
                  for i in range(tile.size)]
        if all(place is not None for place in places):
            layout = record.layout_at(tile, kind, [8 * int(place or 0) for place in places])
            return Field(name, kind, blocks, record.tensor, layout, section=record.section)
    return None


def _outer_candidates(name: str, wanted: Numbers, blocks: Blocks, records: Sequence[Record],
                      tensors: Mapping[str, Element]) -> Iterator[tuple[Field, Numbers]]:
    """Yields numbers of several blocks of a row that may divide the wanted ones, as a field and per block."""
    if blocks.rows > 1 or blocks.apart:
        return
    for record in records:
        count = record.blocks_per_record(blocks)
        outer = Blocks(1, record.layout.tile.columns)
        for kind in ("f16", "f32") if record.section and count > 1 else ("f16",) if count > 1 else ():
            for place, values in record.numbers_at_offsets(kind):
                layout = record.layout_at(Tile(1, 1), kind, [8 * place])
                field = Field(f"super_{name}", kind, outer, record.tensor, layout, section=record.section)
                yield field, values.repeat(count, 1)
    n, columns = wanted.shape
    for tensor, element in tensors.items():
        size = len(element.stored.data) // element.stored.width
        if element.kind in ("f16", "bf16", "f32") and size < wanted.size and size % n == 0 and columns % (size // n) == 0:
            count = columns // (size // n)
            bits = 8 * element.stored.width
            layout = Layout(Tile(1, 1), bits, np.arange(bits))
            yield (Field(f"super_{name}", element.kind, Blocks(1, blocks.columns * count), tensor, layout),
                   element.numbers(element.kind).reshape(n, -1).repeat(count, 1))


def _may_be_integers(wanted: Numbers, values: Numbers) -> bool:
    """Whether a sample of the quotients may be small integers over a power of two."""
    some = slice(None, None, max(1, wanted.size // TRIED))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        counts = wanted.reshape(-1)[some] / values.reshape(-1)[some] * MULTIPLES[-1]
    counts = counts[~np.isnan(counts)]
    return bool(len(counts) and (np.abs(counts) <= MOST_WHOLE * MULTIPLES[-1] + 1).all()
                and (np.abs(counts - np.rint(counts)) <= WHOLE * MULTIPLES[-1]).all())


def _product_fields(name: str, wanted: Numbers, blocks: Blocks, records: Sequence[Record], tensors: Mapping[str, Element],
                    outer: Field, values: Numbers) -> list[Field]:
    """The wanted numbers as products of an outer number and small integers in records or tensors."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        counts = wanted / values
        wrong = np.abs(counts - np.rint(counts)) > WHOLE
    counts = np.where(np.isnan(wanted), np.nan, counts)
    certain = ~np.isnan(counts)
    if not np.isfinite(counts[certain]).all() or np.nanmax(np.abs(counts)) > MOST_WHOLE or wrong[certain].any():
        return []
    whole = np.rint(np.nan_to_num(counts)).astype(np.int16)
    times = 2 if (whole[certain] & 1).all() else 1
    whole = np.where(certain, whole >> times - 1, 0).astype(np.int16)     # whole = times * this + times - 1
    bits = int(whole.max()).bit_length() if whole.min() >= 0 else max(int(whole.max()), -int(whole.min()) - 1).bit_length() + 1
    middle = 1 << bits - 1 if whole.min() < 0 else 0
    for record in records if bits else ():
        layout = _bits(record, blocks, whole + middle, bits, certain)
        if layout is not None:
            codes = layout.read_codes(record.stored, (wanted.shape[0], wanted.shape[1]))
            zero = next((offset for offset in (middle, 0) if (codes - whole == offset)[certain].all()), None)
            kind = f"i{bits}" if zero is None else f"u{bits}"
            return [outer, Field(name, kind, blocks, record.tensor, layout, times * (zero or 0) - times + 1, times=times,
                                 section=record.section)]
        if middle and (signed := _sign_magnitude_fields(name, record, blocks, np.where(certain, counts, 0), certain)):
            return [outer, *signed]
    exact = np.where(certain, whole, np.nan)
    for tensor, element in tensors.items():
        for less in (0, middle) if element.kind in ("i8", "u8") else ():
            for one in fields_in_tensors(name, exact + less, blocks, {tensor: element}):
                if one.kind == element.kind:
                    return [outer, Field(name, one.kind, blocks, tensor, one.layout, times * less - times + 1, times=times,
                                         section=one.section)]
    return []


def _bits(record: Record, blocks: Blocks, labels: Codes, bits: int, certain: npt.NDArray[np.bool_]) -> Layout | None:
    """The layout of `bits`-bit integers, or of their complements, in records."""
    count = record.blocks_per_record(blocks)
    return match_layout([(record.stored, Labels(labels, bits, certain))], [Tile(1, count)]) if count else None


def _sign_magnitude_fields(name: str, record: Record, blocks: Blocks, counts: Numbers,
                           certain: npt.NDArray[np.bool_]) -> list[Field]:
    """Signed integers as a field of magnitudes and a field of sign bits."""
    whole = np.abs(np.rint(counts)).astype(np.int16)
    times = 2 if (whole[certain] & 1).all() else 1
    magnitude, negative = whole >> times - 1, (counts < 0).astype(np.int16)
    bits = int(magnitude.max()).bit_length()
    layout, sign = _bits(record, blocks, magnitude, bits, certain), _bits(record, blocks, negative, 1, certain & (whole > 0))
    if layout is None or sign is None:
        return []
    is_complement = bool((sign.read_codes(record.stored, negative.shape) != negative)[certain & (whole > 0)].all())
    direction = 1 if is_complement else -1                       # 2 * sign - 1, or -2 * sign + 1
    return [Field(name, f"u{bits}", blocks, record.tensor, layout, 1 - times, times=times, section=record.section),
            Field(f"{name}_sign", "u1", blocks, record.tensor, sign, direction, times=2 * direction, section=record.section)]
