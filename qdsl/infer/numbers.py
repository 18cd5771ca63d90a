"""Finds scales and offsets whose values are known, in tensors and in records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qdsl.core.numbers import number
from qdsl.infer.elements import Element, Section
from qdsl.infer.fit import Blocks, Numbers
from qdsl.infer.tiles import Layout, Tile

CLOSE = 1e-4                                                     # relative: two numbers of 11 bits differ by more
MOST_TILE = 512                                                  # numbers in a tile
FITTING = 0.98                                                   # fraction of the tiles in which a number must be the wanted one
TILE_ROWS, TILE_COLUMNS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Field:
    """A field of the spec: its number type, the weights that share a value, its tensor, and its layout in the tensor.

    zero: decode subtracts it from the field's integers, after `times`.  entries: the axes of a stored table.  section: the part
    of the tensor that holds the field, if not the whole.
    """

    name: str
    kind: str
    blocks: Blocks
    tensor: str
    layout: Layout
    zero: int = 0
    entries: tuple[int, ...] = ()
    times: int = 1
    section: Section | None = None

    def has_place_of(self, other: Field) -> bool:
        """Whether the other field reads the same bits."""
        alike = (self.kind, self.blocks, self.tensor, self.section) == (other.kind, other.blocks, other.tensor, other.section)
        return alike and self.layout.tile == other.layout.tile and np.array_equal(self.layout.source, other.layout.source)

    @property
    def term(self) -> str:
        """The field's term in the decode formula."""
        name = self.name if self.times == 1 else f"{self.times} * {self.name}"
        return f"({name} {'-' if self.zero > 0 else '+'} {abs(self.zero)})" if self.zero else name


def close(numbers: Numbers, wanted: Numbers) -> npt.NDArray[np.bool_]:
    """Whether numbers are close to the wanted ones; a wanted NaN is unknown and matches any number."""
    with np.errstate(invalid="ignore"):
        return (np.abs(numbers - wanted) <= CLOSE * np.abs(wanted)) | np.isnan(wanted)


def locate_numbers(element: Element, kind: str, wanted: Numbers) -> Layout | None:
    """The layout of the wanted numbers [rows, columns] among a tensor's elements, or None."""
    numbers = element.numbers(kind)
    form = number(kind)
    tiles = [Tile(rows, columns, 1, across) for rows in TILE_ROWS for columns in TILE_COLUMNS for across in (False, True)
             if rows <= wanted.shape[0] and columns <= wanted.shape[1]]
    for tile in sorted(tiles, key=lambda tile: tile.size):
        first, second = tile.grid((wanted.shape[0], wanted.shape[1]))[::-1 if tile.across else 1]
        size = numbers.size // (first * second)
        if numbers.size % (first * second) or not tile.size <= size <= MOST_TILE:
            continue
        view = numbers.reshape(first, second, size)
        view = view.swapaxes(0, 1) if tile.across else view
        places = _number_places(view, tile.tiled_weights(wanted))
        if places is not None and close(_gather_tiles(view, tile, places, wanted.shape), wanted).mean() >= FITTING:
            source = np.full((size, form.bits), -1)
            source[places] = np.arange(tile.size * form.bits).reshape(-1, form.bits)
            return Layout(tile, form.bits, source.reshape(-1))
    return None


def _gather_tiles(view: Numbers, tile: Tile, places: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Numbers:
    """Reads the numbers at these positions of all tiles, including short tiles at the ends."""
    rows, columns = view.shape[:2]
    tiles = view[:, :, places].reshape(rows, columns, tile.rows, tile.columns)
    return tiles.transpose(0, 2, 1, 3).reshape(rows * tile.rows, -1)[:shape[0], :shape[1]]


def _number_places(view: Numbers, wanted: Numbers) -> npt.NDArray[np.int64] | None:
    """The position of each of a tile's numbers in storage, or None; view [rows, columns, stored], wanted by tiles."""
    rows, columns = wanted.shape[:2]
    if not rows * columns:
        return None
    # Tiles are drawn at random: equal steps may all lie on the diagonal, where both orders of tiles agree.
    some = np.random.default_rng(0).permutation(rows * columns)[:64 if view.shape[2] > 16 else 1024]
    at = np.unravel_index(some, (rows, columns))
    stored, needed = view[at], wanted[at].reshape(len(some), -1)
    if not close(stored, needed[:, :1]).mean(0).max() >= FITTING:
        return None
    fitting = close(stored[:, :, None], needed[:, None, :]).mean(0) >= FITTING
    return _regular_places(fitting) if fitting.shape[1] & fitting.shape[1] - 1 == 0 else _first_fitting_places(fitting)


def _first_fitting_places(fitting: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """The first free position that fits, for every wanted number [places, wanted]."""
    places: list[int] = []
    for free in fitting.T:
        options = [place for place in np.flatnonzero(free).tolist() if place not in places]
        if not options:
            return None
        places.append(options[0])
    return np.array(places)


def _regular_places(fitting: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """Positions for which every binary digit of a number's index adds a fixed step.  Works also if numbers are equal."""
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


def fields_in_tensors(name: str, wanted: Numbers, blocks: Blocks, tensors: Mapping[str, Element]) -> Iterator[Field]:
    """Yields the wanted numbers as a field of every tensor that holds them, alone or before or after other data."""
    for tensor, element in tensors.items():
        for kind in element.kinds():
            for section in (None, *_end_sections(element, wanted.shape)):
                layout = locate_numbers(element.cut_section(section, wanted.shape[0]), kind, wanted)
                if layout is not None:
                    yield Field(name, kind, blocks, tensor, layout, section=section)
                    break


def _end_sections(element: Element, shape: tuple[int, ...]) -> Iterator[Section]:
    """Yields the first and the last part of a tensor, and of its rows, with as many elements as wanted numbers."""
    width, total = element.stored.width, len(element.stored.data)
    for by_rows in (False, True):
        rows = shape[0] if by_rows else 1
        size, whole = width * shape[0] * shape[1] // rows, total // rows
        if whole * rows == total and size < whole and (not by_rows or element.stored.shape[0] == rows > 1):
            yield from (Section(by_rows, start, start + size) for start in (0, whole - size))
