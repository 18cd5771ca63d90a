"""Finds the positions of code bits in a stored tensor by matching a small tile of bits with a small tile of codes.

A layout repeats: a position of a stored tile holds one bit of one code of the weight's tile, the same in every tile.  A few
hundred tiles tell all bits apart, whatever the size of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)
Codes = npt.NDArray[np.int16]
Bits = npt.NDArray[np.float32]
SAMPLES = 256                                                    # tiles that are compared
SMALL_TILE = 32                                                  # weights of a small tile; more such tiles are compared
FEWEST = 24                                                      # fewest tiles that tell bits apart
TRIED = 96                                                       # tiles that are compared at first
MOST_BITS = 4608                                                 # bits of a stored tile whose codes may lie anywhere
MOST_LARGE, LEAST_LARGE = 1 << 15, 16                            # bits of a tile with regular codes; its fewest rows and columns
AGREEMENT = 0.7                                                  # required agreement of a stored bit and a code's; 0 is chance
EPSILON = 1e-4                                                   # prefers bits that equal the labels to their complements
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 32, 64, 128)
COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 32, 64, 128, 256, 512, 1024)
PARTS = (1, 2, 4, 8, 10, 3, 5, 6, 7)


@dataclass(frozen=True)
class Labels:
    """The codes [N, K] as far as the values tell: integers of `bits` bits, and where they are certain (None: everywhere).

    top: the integers are the highest bits of wider codes, and each code's bits are contiguous.
    """

    codes: Codes
    bits: int
    known_at: npt.NDArray[np.bool_] | None = None
    top: bool = False


@dataclass(frozen=True)
class StoredBytes:
    """A stored tensor: its bytes in order, its shape, and the bytes of an element.

    others: tensors with more bits of the same codes; their tiles follow those of this one.
    """

    data: npt.NDArray[np.uint8]
    shape: tuple[int, ...]
    width: int
    others: tuple[StoredBytes, ...] = ()

    @property
    def parts(self) -> tuple[StoredBytes, ...]:
        """This tensor by itself, and the others."""
        return (replace(self, others=()), *self.others) if self.others else (self,)


@dataclass(frozen=True)
class Tile:
    """A tile of the weight: `rows` neighbouring rows by `columns`, in `parts` that are N / parts rows apart.

    across: the order of tiles is down the rows first.  stacked: a tile's elements lie along the first axis of the tensor.
    """

    rows: int
    columns: int
    parts: int = 1
    across: bool = False
    stacked: bool = False

    @property
    def size(self) -> int:
        """The number of weights in the tile."""
        return self.rows * self.columns * self.parts

    @property
    def is_row(self) -> bool:
        """Whether the tile is part of one row, and the tiles of a row follow one another."""
        return self.rows == self.parts == 1 and not self.across and not self.stacked

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The numbers of tiles along rows and columns; the last tile of an axis may be short."""
        return -(-shape[0] // (self.rows * self.parts)), -(-shape[1] // self.columns)

    def tiled_bytes(self, tensor: StoredBytes, shape: tuple[int, int]) -> npt.NDArray[np.uint8] | None:
        """The tensor's bytes by tiles [tiles along rows, along columns, ..., bytes], a view; None if tiles do not fit."""
        first, second = self.grid(shape)[::-1] if self.across else self.grid(shape)
        total = len(tensor.data)
        if total % (first * second * tensor.width) or not total:
            return None
        size = total // (first * second)
        if not self.stacked:
            view: npt.NDArray[np.uint8] = tensor.data.reshape(first, second, size)
        elif tensor.shape[-1] != second or size == tensor.width or len(tensor.shape) != 2:
            return None
        else:
            view = tensor.data.reshape(first, size // tensor.width, second, tensor.width).transpose(0, 2, 1, 3)
        return view.swapaxes(0, 1) if self.across else view

    def views(self, tensor: StoredBytes, shape: tuple[int, int]) -> list[npt.NDArray[np.uint8]]:
        """`tiled_bytes` of each part of the tensor; empty if the tiles do not divide a part."""
        views = [view for part in tensor.parts if (view := self.tiled_bytes(part, shape)) is not None]
        return views if len(views) == len(tensor.parts) else []

    def tiled_weights(self, array: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """An array [N, K] by whole tiles [tiles along rows, along columns, parts, rows, columns], a view."""
        n, k = array.shape
        rows, columns = n // (self.rows * self.parts), k // self.columns
        parts = array.reshape(self.parts, n // self.parts, k)[:, :rows * self.rows, :columns * self.columns]
        return parts.reshape(self.parts, rows, self.rows, columns, self.columns).transpose(1, 3, 0, 2, 4)


@dataclass(frozen=True)
class Layout:
    """Positions of codes: for every bit of a stored tile its code bit in the weight's tile, weight * bits + bit, or -1."""

    tile: Tile
    bits: int
    source: npt.NDArray[np.int64]

    def repeat_columns(self, times: int) -> Layout:
        """The same layout for tiles with `times` times the columns, if neighbouring tiles follow one another."""
        tile = replace(self.tile, columns=self.tile.columns * times)
        weight, bit = np.divmod(np.tile(self.source, (times, 1)), self.bits)
        row, column = np.divmod(weight, self.tile.columns)
        column += np.arange(times)[:, None] * self.tile.columns
        source = (row * tile.columns + column) * self.bits + bit
        return Layout(tile, self.bits, np.where(self.source < 0, -1, source).reshape(-1))

    def without_low_bit(self) -> Layout:
        """The layout of codes without their lowest bit, which becomes padding."""
        weight, bit = np.divmod(self.source, self.bits)
        source = np.where((self.source < 0) | (bit == 0), -1, weight * (self.bits - 1) + bit - 1)
        return replace(self, bits=self.bits - 1, source=source)

    def read_codes(self, tensor: StoredBytes, shape: tuple[int, int]) -> Codes:
        """Reads the codes [N, K] from a stored tensor."""
        n, k = shape
        rows, columns = self.tile.grid(shape)
        views = [view.reshape(rows, columns, -1) for view in self.tile.views(tensor, shape)]
        stored = np.concatenate(views, 2) if len(views) > 1 else views[0]
        codes = np.zeros((rows, columns, self.tile.size), np.int16)
        for place in np.flatnonzero(self.source >= 0):
            weight, bit = divmod(int(self.source[place]), self.bits)
            codes[..., weight] |= (stored[..., place // 8] >> (place % 8) & 1).astype(np.int16) << bit
        tiles = codes.reshape(rows, columns, self.tile.parts, self.tile.rows, self.tile.columns).transpose(2, 0, 3, 1, 4)
        return tiles.reshape(self.tile.parts, rows * self.tile.rows, -1)[:, :n // self.tile.parts, :k].reshape(n, k)


def match_layout(draws: Sequence[tuple[StoredBytes, Labels]], tiles: Sequence[Tile] | None = None) -> Layout | None:
    """The layout with the smallest tile in which every bit of the labels has one position in the stored tensor; None if none.

    draws: stored tensors of one layout, with the labels of their codes; several tensors serve as more tiles.
    """
    n, k = draws[0][1].codes.shape
    known_at = draws[0][1].known_at
    share = 1.0 if known_at is None else max(float(known_at.mean()), 0.05)
    for tile in tiles or candidate_tiles((n, k), draws[0][0]):
        few = _sample_draws(draws, tile, int(TRIED / share))
        if few is None or not _may_match(*few, draws[0][1].bits):
            continue
        sampled = _sample_draws(draws, tile, int(SAMPLES / share) * (1 if tile.size > SMALL_TILE else 8))
        places = None if sampled is None else label_places(*sampled, draws[0][1].bits)
        layout = None if places is None or sampled is None else layout_at_places(tile, draws[0][1], places, sampled[0].shape[1])
        if layout is not None:
            return layout
    return None


def candidate_tiles(shape: tuple[int, int], tensor: StoredBytes) -> Iterator[Tile]:
    """Tiles that the tensor may consist of, small ones first."""
    tiles = [Tile(rows, columns, parts) for rows in ROWS for columns in COLUMNS for parts in PARTS
             if rows * parts <= shape[0] and columns <= shape[1] and shape[0] % parts == 0 and (parts == 1 or rows == 1)
             and (columns == 1 or rows & rows - 1 == 0)]
    for tile in sorted(tiles, key=lambda tile: (tile.size * (1 + (tile.parts > 1)), tile.columns)):
        first, second = tile.grid(shape)
        total = sum(len(part.data) for part in tensor.parts)
        if total % (first * second):
            continue
        bits = 8 * total // (first * second)
        is_large = bits > MOST_BITS
        if is_large and (bits > MOST_LARGE or min(tile.rows, tile.columns) < LEAST_LARGE):
            continue
        for across in (False, True) if min(first, second) > 1 else (False,):
            for stacked in (False, True)[:1 if is_large else 2]:
                yield Tile(tile.rows, tile.columns, tile.parts, across, stacked)


def _sample_draws(draws: Sequence[tuple[StoredBytes, Labels]], tile: Tile, count: int) -> tuple[Bits, Bits] | None:
    """Bits of about `count` tiles of all draws, as `sample_tiles` returns them; None where there are too few."""
    sampled = [pair for stored, labels in draws if (pair := sample_tiles(stored, labels, tile, -(-count // len(draws))))]
    if sum(len(bits) for bits, _ in sampled) < FEWEST:
        return None
    bits, labels = (np.concatenate(arrays) for arrays in zip(*sampled, strict=True))
    return bits, labels


def sample_tiles(stored: StoredBytes, labels: Labels, tile: Tile, most: int) -> tuple[Bits, Bits] | None:
    """Bits of some tiles, as 1 and -1, 0 for unknown: those stored [tiles, bits] and those of codes [tiles, weights * bits]."""
    n, k = labels.codes.shape
    views = tile.views(stored, (n, k))
    codes = tile.tiled_weights(labels.codes)
    rows, columns = codes.shape[:2]
    if not views or not rows * columns:
        return None
    random = np.random.default_rng(0)
    some = random.permutation(rows * columns)[:most] if rows * columns < 1 << 12 else \
        np.unique(random.integers(0, rows * columns, most))
    at = np.unravel_index(some, (rows, columns))
    data = np.concatenate([view[at].reshape(len(some), -1) for view in views], 1)
    bits = np.unpackbits(data, axis=1, bitorder="little")
    chosen = codes[at].reshape(len(some), -1, 1)
    signs = (chosen >> np.arange(labels.bits, dtype=np.int16) & 1).astype(np.float32) * 2 - 1
    if labels.known_at is not None:
        signs *= tile.tiled_weights(labels.known_at)[at].reshape(len(some), -1, 1)
    return bits.astype(np.float32) * 2 - 1, signs.reshape(len(some), -1)


def _may_match(bits: Bits, labels: Bits, first: int) -> bool:
    """Whether some stored bits agree with the labels of the tile's first weight, by a few tiles; too few of them say nothing."""
    if bits.shape[1] < labels.shape[1]:
        return False
    count = np.abs(labels[:, :first]).sum(0)
    return bool((np.abs(bits.T @ labels[:, :first]).max(0) >= AGREEMENT * 0.7 * count).all())


def label_places(bits: Bits, labels: Bits, planes: int) -> npt.NDArray[np.int64] | None:
    """The place of every label among the stored bits, or None where a label has no place of its own.

    planes: labels of a weight.
    """
    count = np.abs(labels).sum(0)
    if count.min() < FEWEST or bits.shape[1] < labels.shape[1]:
        return None
    weights = labels.shape[1] // planes
    some = [0, *(1 << digit for digit in range((weights - 1).bit_length()))]
    columns = (np.array(some)[:, None] * planes + np.arange(planes)).reshape(-1)
    agreement = _agreement(bits, labels[:, columns], count[columns])
    if agreement.max(0).min() < AGREEMENT:
        return None
    places = _regular_places(agreement.argmax(0).reshape(-1, planes), weights)
    if places is not None and places.min() >= 0 and places.max() < bits.shape[1] and len(np.unique(places)) == len(places) and \
            (np.abs(np.einsum("tl,tl->l", bits[:, places], labels)) >= AGREEMENT * count).all():
        return places
    if bits.shape[1] > MOST_BITS:
        return None
    agreement = _agreement(bits, labels, count)
    places = agreement.argmax(0)
    if agreement.max(0).min() < AGREEMENT:
        return None
    return places if len(np.unique(places)) == len(places) else _distinct_places(agreement)


def _agreement(bits: Bits, labels: Bits, count: Bits) -> Bits:
    """How far each stored bit agrees with each label [bits, labels], 0 to 1; for a complement a little less."""
    agreement = bits.T @ labels / count
    return np.where(agreement < 0, -agreement - EPSILON, agreement)


def _regular_places(some: npt.NDArray[np.int64], weights: int) -> npt.NDArray[np.int64] | None:
    """Places of all labels where each digit of a weight's number in the tile, in base 2, adds its own step.

    some: places [digits + 1, planes] of the first weight and of those with one digit; None for tiles of other sizes.
    """
    if weights & weights - 1:
        return None
    places = np.broadcast_to(some[0], (weights, some.shape[1])).copy()
    for digit, step in enumerate(some[1:] - some[0]):
        places += (np.arange(weights) >> digit & 1)[:, None] * step
    return places.reshape(-1)


def _distinct_places(agreement: Bits) -> npt.NDArray[np.int64] | None:
    """Places of labels of which some agree with several bits equally: the place behind that of the label before, if it is one."""
    places: list[int] = []
    for column in agreement.T:
        best = np.flatnonzero(column >= column.max() - EPSILON / 2)
        options = [int(place) for place in best if place not in places]
        if not options:
            return None
        places.append(places[-1] + 1 if places and places[-1] + 1 in options else options[0])
    return np.array(places)


def layout_at_places(tile: Tile, labels: Labels, places: npt.NDArray[np.int64], size: int) -> Layout:
    """The layout of labels at these places of a stored tile of `size` bits."""
    source = np.full(size, -1)
    if not labels.top:
        source[places] = np.arange(len(places))
        return Layout(tile, labels.bits, source)
    ends = np.sort(places)
    width = min([int(ends[0]) + 1, 8, *np.diff(ends).tolist()])
    for weight, end in enumerate(places):
        source[end - width + 1:end + 1] = np.arange(width) + weight * width
    return Layout(tile, width, source)
