"""Where the numbers of groups lie: scales and offsets that are known by value are looked for in tensors and in records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qdsl.core.numbers import number
from qdsl.infer.fit import Blocks, Numbers
from qdsl.infer.tiles import Labels, Layout, Stored, Tile, match

CLOSE = 1e-4                                                     # relative: two numbers of 11 bits differ by more
WHOLE = 0.02                                                     # how far from an integer a quotient of scales may be
MOST_TILE = 512                                                  # numbers in a tile
FITTING = 0.98                                                   # of the tiles, in which a number must be the wanted one
TILE_ROWS, TILE_COLUMNS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16)
SMALL = ("e8m0", "e4m3", "e8m0h", "ue4m3")                       # floats that files have as bytes


@dataclass(frozen=True)
class Field:
    """A field of the spec: its number type, which weights share a value, the tensor that holds it, and where in that.

    zero: what decode takes off its integers.  entries: of a stored table of levels, their number; 0 for numbers.
    """

    name: str
    kind: str
    blocks: Blocks
    tensor: str
    layout: Layout
    zero: int = 0
    entries: int = 0

    @property
    def term(self) -> str:
        """The field in decode."""
        return f"({self.name} {'-' if self.zero > 0 else '+'} {abs(self.zero)})" if self.zero else self.name


@dataclass(frozen=True)
class Element:
    """A stored tensor, what its elements are ('f16', 'i32'), and of codes also what is not yet accounted for."""

    kind: str
    stored: Stored

    def kinds(self) -> list[str]:
        """Number types that the elements may be of."""
        if self.kind in ("u8", "i8"):
            return [self.kind, *SMALL]
        return [self.kind]

    def numbers(self, kind: str) -> Numbers:
        """The elements as numbers, in order."""
        return decoded(self.stored.data, kind)


def decoded(data: npt.NDArray[np.uint8], kind: str) -> Numbers:
    """Bytes as numbers of a type of 8, 16 or 32 bits; the last axis of `data` holds the bytes of one, or of several in order."""
    plain = {"f16": "<f2", "f32": "<f4", "i32": "<i4", "u32": "<u4", "i16": "<i2", "u16": "<u2", "i8": "i1", "u8": "u1"}
    data = np.ascontiguousarray(data)
    with np.errstate(invalid="ignore"):
        if kind in plain:
            return data.view(plain[kind]).astype(np.float64)
        if kind == "bf16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    form = number(kind)
    assert form is not None and form.bits == 8
    return np.array([form.decode(code) for code in range(256)])[data]


def close(numbers: Numbers, wanted: Numbers) -> npt.NDArray[np.bool_]:
    """Where numbers are the wanted ones; one that is wanted but unknown, NaN, is any."""
    with np.errstate(invalid="ignore"):
        return (np.abs(numbers - wanted) <= CLOSE * np.abs(wanted)) | np.isnan(wanted)


def locate(element: Element, kind: str, wanted: Numbers) -> Layout | None:
    """Where the wanted numbers [rows, columns] are among a tensor's elements, or None."""
    numbers = element.numbers(kind)
    form = number(kind)
    assert form is not None
    tiles = [Tile(rows, columns, 1, across) for rows in TILE_ROWS for columns in TILE_COLUMNS for across in (False, True)
             if rows <= wanted.shape[0] and columns <= wanted.shape[1]]
    for tile in sorted(tiles, key=lambda tile: tile.size):
        first, second = tile.grid((wanted.shape[0], wanted.shape[1]))[::-1 if tile.across else 1]
        size = numbers.size // (first * second)
        if numbers.size % (first * second) or not tile.size <= size <= MOST_TILE:
            continue
        view = numbers.reshape(first, second, size)
        places = _places(view.swapaxes(0, 1) if tile.across else view, tile.weights(wanted))
        if places is not None:
            source = np.full((size, form.bits), -1)
            source[places] = np.arange(tile.size * form.bits).reshape(-1, form.bits)
            return Layout(tile, form.bits, source.reshape(-1))
    return None


def _places(view: Numbers, wanted: Numbers) -> npt.NDArray[np.int64] | None:
    """For every number of a tile its place among those stored, or None: view [rows, columns, stored], wanted by tiles."""
    rows, columns = wanted.shape[:2]
    if not rows * columns:
        return None
    # At random: equal steps may meet the diagonal alone, on which the two orders of tiles are the same.
    some = np.random.default_rng(0).permutation(rows * columns)[:64 if view.shape[2] > 16 else 1024]
    at = np.unravel_index(some, (rows, columns))
    stored, needed = view[at], wanted[at].reshape(len(some), -1)
    if not close(stored, needed[:, :1]).mean(0).max() >= FITTING:
        return None
    fitting = close(stored[:, :, None], needed[:, None, :]).mean(0) >= FITTING
    return _regular(fitting) if fitting.shape[1] & fitting.shape[1] - 1 == 0 else _first(fitting)


def _first(fitting: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """For every wanted number the first free place that fits [places, wanted]."""
    places: list[int] = []
    for free in fitting.T:
        options = [place for place in np.flatnonzero(free).tolist() if place not in places]
        if not options:
            return None
        places.append(options[0])
    return np.array(places)


def _regular(fitting: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """Places at which every digit of a number's place in the tile, in base 2, adds a step of its own; numbers may be alike."""
    def extended(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        count = len(places)
        if count == fitting.shape[1]:
            return places
        for place in np.flatnonzero(fitting[:, count]).tolist():
            more = places + (place - places[0])
            if more.min() >= 0 and more.max() < len(fitting) and fitting[more, np.arange(count, 2 * count)].all() and \
                    not np.isin(more, places).any():
                whole = extended(np.concatenate([places, more]))
                if whole is not None:
                    return whole
        return None

    for start in np.flatnonzero(fitting[:, 0]).tolist():
        whole = extended(np.array([start]))
        if whole is not None:
            return whole
    return None


def in_tensors(name: str, wanted: Numbers, blocks: Blocks, tensors: Mapping[str, Element]) -> Iterator[Field]:
    """The wanted numbers as a field, for every tensor that has them."""
    for tensor, element in tensors.items():
        for kind in element.kinds():
            layout = locate(element, kind, wanted)
            if layout is not None:
                yield Field(name, kind, blocks, tensor, layout)


def in_record(name: str, wanted: Numbers, blocks: Blocks, record: Record) -> list[Field]:
    """The wanted numbers as a field of the records that hold the codes, or as a number of the record times small integers."""
    count = record.layout.tile.columns // blocks.columns
    if count * blocks.columns != record.layout.tile.columns or blocks.rows > 1 or blocks.apart or not record.is_row:
        return []
    tile = Tile(1, count)
    tiles = tile.weights(wanted).reshape(*record.bytes.shape[:2], count)
    for kind in ("f16", "bf16", "f32", *SMALL):
        slots = dict(record.slots(kind))
        places = [next((place for place, values in slots.items() if close(values, tiles[..., i]).mean() >= FITTING), None)
                  for i in range(count)]
        if all(place is not None for place in places):
            return [Field(name, kind, blocks, record.tensor, record.at(tile, kind, [8 * int(place or 0) for place in places]))]
    if count > 1:
        for place, values in record.slots("f16"):
            fields = _products(name, wanted, tiles, blocks, record, place, values)
            if fields:
                return fields
    return []


def _products(name: str, wanted: Numbers, tiles: Numbers, blocks: Blocks, record: Record, place: int,
              values: Numbers) -> list[Field]:
    """The wanted numbers as products of the number at a place of a record and small integers elsewhere in it."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        counts = tiles / values[..., None]
        wrong = np.abs(counts - np.rint(counts)) > WHOLE
    counts = np.where(np.isnan(tiles), np.nan, counts)
    if not np.isfinite(counts[~np.isnan(counts)]).all() or np.nanmax(np.abs(counts)) > 255 or wrong[~np.isnan(counts)].any():
        return []
    whole = np.rint(np.nan_to_num(counts)).astype(np.int16).reshape(wanted.shape)
    bits = int(whole.max()).bit_length() if whole.min() >= 0 else max(int(whole.max()), -int(whole.min()) - 1).bit_length() + 1
    middle = 1 << bits - 1 if whole.min() < 0 else 0
    layout = match([(record.stored, Labels(whole + middle, bits, ~np.isnan(wanted)))], [Tile(1, tiles.shape[2])])
    if layout is None:
        return []
    codes = layout.read(record.stored, (wanted.shape[0], wanted.shape[1]))
    zero = next((offset for offset in (middle, 0) if _is_off_by(codes, whole, wanted, offset)), None)
    kind = f"i{bits}" if zero is None else f"u{bits}"
    outer = Blocks(1, record.layout.tile.columns)
    return [Field(f"super_{name}", "f16", outer, record.tensor, record.at(Tile(1, 1), "f16", [8 * place])),
            Field(name, kind, blocks, record.tensor, layout, zero or 0)]


def _is_off_by(codes: npt.NDArray[np.int16], whole: npt.NDArray[np.int16], wanted: Numbers, offset: int) -> bool:
    return bool((codes - whole == offset)[~np.isnan(wanted)].all())


@dataclass(frozen=True)
class Record:
    """The records of codes, and which of their bytes hold something else: bytes [rows, records of a row, bytes]."""

    tensor: str
    stored: Stored
    layout: Layout
    shape: tuple[int, int]

    @property
    def is_row(self) -> bool:
        """Whether a record holds neighbouring columns of one row, whole bytes of which are free."""
        tile = self.layout.tile
        return tile.rows == tile.parts == 1 and not tile.across and not tile.stacked and self.shape[1] % tile.columns == 0

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All records."""
        view = self.layout.tile.stored(self.stored, self.shape)
        assert view is not None
        return view

    def slots(self, kind: str) -> Iterator[tuple[int, Numbers]]:
        """Places, in bytes, where a number may lie, and the number there in every record."""
        form = number(kind)
        assert form is not None
        size = form.bits // 8
        free = [bool((part < 0).all()) for part in self.layout.source.reshape(-1, 8)]
        for place in range(len(free) - size + 1):
            if all(free[place:place + size]):
                yield place, decoded(self.bytes[..., place:place + size], kind).reshape(self.bytes.shape[:2])

    def at(self, tile: Tile, kind: str, places: list[int]) -> Layout:
        """The layout of numbers at these bits of a record."""
        form = number(kind)
        assert form is not None
        source = np.full(len(self.layout.source), -1)
        for i, place in enumerate(places):
            source[place:place + form.bits] = np.arange(form.bits) + i * form.bits
        return Layout(tile, form.bits, source)
