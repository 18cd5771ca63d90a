"""Infers codes into a stored table: the index of each value among the levels of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from qdsl.infer.elements import Element
from qdsl.infer.fit import Blocks
from qdsl.infer.labels import Values
from qdsl.infer.numbers import Field
from qdsl.infer.tiles import Codes, Labels, Layout, Tile

MOST_BITS = 8                                                    # bits of a code
TRIED = 1 << 12                                                  # values that suffice to reject most tensors
FLOATS = ("f16", "bf16", "f32")


def match_stored_tables(values: Values, tensors: Mapping[str, Element], most_bits: float) -> Iterator[tuple[Labels, Field]]:
    """Yields tensors that contain all values [N, K], as a table of 2**bits levels for some rows each, with the resulting codes.

    most_bits: stored bits per weight.
    """
    n, k = values.shape
    for name, element in tensors.items():
        if element.kind not in FLOATS:
            continue
        levels = element.numbers(element.kind).astype(np.float32)
        for bits in range(1, min(MOST_BITS, int(most_bits)) + 1):
            count = levels.size >> bits
            if count << bits != levels.size or not count or n % count:
                continue
            codes = _codes_in_tables(values, levels.reshape(count, -1))
            if codes is not None:
                width = 8 * element.stored.width
                layout = Layout(Tile(1, 1 << bits), width, np.arange(width << bits))
                field = Field("levels", element.kind, Blocks(n // count, k), name, layout, entries=(1 << bits,))
                yield Labels(codes, bits, _is_single(levels.reshape(count, -1), codes)), field


def _codes_in_tables(values: Values, tables: Values) -> Codes | None:
    """The code of every value in its rows' table, the lowest among equal levels; None if a value is not in the table."""
    parts = values.reshape(len(tables), -1)
    codes = np.empty(parts.shape, np.int16)
    step = max(1, TRIED // len(tables))
    for chosen in (np.arange(0, parts.shape[1], -(-parts.shape[1] // step)), slice(None)):
        for i, (part, levels) in enumerate(zip(parts, tables, strict=True)):
            order = levels.argsort(kind="stable")
            ordered = levels[order]
            places = np.searchsorted(ordered, part[chosen]).clip(max=len(ordered) - 1)
            if (ordered[places] != part[chosen]).any():
                return None
            codes[i, chosen] = order[places]
    return codes.reshape(values.shape)


def _is_single(tables: Values, codes: Codes) -> np.typing.NDArray[np.bool_]:
    """Whether no other code has the same level."""
    single = np.stack([(levels[:, None] == levels).sum(1) == 1 for levels in tables])
    return np.take_along_axis(single, codes.reshape(len(tables), -1).astype(np.int64), 1).reshape(codes.shape)
