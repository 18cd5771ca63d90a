"""Finds codes whose meaning changes from block to block.  Equal values of a block have equal codes, hence equal bits.

This needs no levels, signs or order: two weights' code bits are those that agree wherever the two weights do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qdsl.infer.labels import Values
from qdsl.infer.tiles import Layout, StoredBytes, Tile

BLOCK = 16                                                       # columns in which equal values have equal codes
PAIRS = 40                                                       # pairs of equal weights needed to find the bits of their codes
RECORDS_COMPARED = 1 << 12
MOST_BITS = 8
Bits = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


def match_equal_values(stored: StoredBytes, values: Values, columns: int) -> Layout | None:
    """The layout of codes in records of `columns` columns, found by comparing equal weights; None if there is none."""
    shape = (values.shape[0], values.shape[1])
    tile = Tile(1, columns)
    view = tile.tiled_bytes(stored, shape) if columns % BLOCK == 0 == shape[1] % columns else None
    if view is None:
        return None
    some = slice(None, None, max(1, values.size // columns // RECORDS_COMPARED))
    bits = np.unpackbits(view.reshape(-1, view.shape[2])[some], axis=1, bitorder="little").astype(np.float32) * 2 - 1
    varying = np.flatnonzero(np.abs(bits.mean(0)) < 0.9)
    weights = values.reshape(-1, columns)[some]
    source = np.full(bits.shape[1], -1)
    width = 0
    for start in range(0, columns, BLOCK):
        places = _block_code_places(bits[:, varying], weights[:, start:start + BLOCK])
        if places is None or (width and places.shape[1] != width):
            return None
        width = places.shape[1]
        taken = varying[places]
        if (source[taken] >= 0).any():
            return None
        source[taken] = (start + np.arange(BLOCK))[:, None] * width + np.arange(width)
    return Layout(tile, width, source)


def _block_code_places(bits: Bits, weights: Values) -> Places | None:
    """The positions of a block's code bits [weights, bits of a code], ordered as the first weight's; None if undetermined."""
    first: Places | None = None
    places = []
    for other in range(1, weights.shape[1]):
        same = bits[(weights[:, 0] == weights[:, other]) & (weights[:, 0] != 0)]
        if len(same) < PAIRS:
            return None
        left = same if first is None else same[:, first]
        agree = left.T @ same == len(same)
        agree[np.arange(len(agree)), np.arange(len(agree)) if first is None else first] = False
        if first is None:
            first = np.flatnonzero(agree.any(1))
            # Each bit of a pair names the other; if codes lie in order, the lower position belongs to the first weight.
            pairs = [(a, int(agree[a].argmax())) for a in first if agree[a].sum() == 1]
            first = np.array([a for a, b in pairs if a < b])
            if not 1 < len(first) <= MOST_BITS or 2 * len(first) != len(pairs):
                return None
            agree = agree[first]
        if (agree.sum(1) != 1).any():
            return None
        places.append(agree.argmax(1))
    assert first is not None
    whole = np.stack([first, *places])
    return whole if len(np.unique(whole)) == whole.size else None
