"""Levels of stored tables that weights choose, one weight at a time: the schemes that are k-means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qdsl.analyze.check import spec_bits as oracle
from tests.support import slow_schemes as schemes
from tests.support.slow_numbers import Codes, value
from tests.support.slow_numbers import nearest as nearest_code

if TYPE_CHECKING:
    from tests.support.slow_reading import Reading


def of_blocks(reading: Reading, weight: npt.NDArray[np.float32], code: str, levels: str, importance: Any) -> dict[str, Codes]:
    """Codes, and the stored table of each block, of which a field's subscripts ahead of its last one tell."""
    index = next(f for f in reading.spec.fields if f.name.value == levels).typed.index[:-1]
    blocks: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for n, k in np.ndindex(*reading.shape):
        blocks.setdefault(tuple(oracle.evaluate(i, {**reading.env, "n": n, "k": k}) for i in index), []).append((n, k))
    fields = {code: np.zeros(reading.shape, np.int64), levels: np.zeros(reading.stored_tables[levels], np.int64)}
    kinds = {"code": reading.kind(code), "levels": reading.kind(levels)}
    for block, places in blocks.items():
        counts = [1.0 if importance is None else float(importance[k]) for _, k in places]
        chosen, fields[levels][block] = schemes.kmeans([weight[place] for place in places], counts, kinds)
        for place, own in zip(places, chosen, strict=True):
            fields[code][place] = own
    return fields


def of_all(reading: Reading, weight: npt.NDArray[np.float32], roles: Mapping[str, str], importance: Any) -> dict[str, Codes]:
    """Codes, scales of blocks, and one table of levels that all weights over their scales share."""
    code, scale, levels = (roles[role] for role in ("code", "scale", "levels"))
    shapes = {f.name.value: oracle.field_shape(reading.spec, f, reading.env) for f in reading.spec.fields}
    fields = {name: np.zeros(shapes[name], np.int64) for name in (code, scale)}
    at = {place: elements[scale] for place, _, elements in reading.places(fields)}
    largest: dict[tuple[int, ...], np.float32] = {}
    for place, block in at.items():
        largest[block] = max(largest.get(block, np.float32(0)), abs(weight[place]))
    stored = {block: schemes.stored_scale(value, reading.kind(scale)) for block, value in largest.items()}
    units = [weight[place] / stored[block][1] if stored[block][1] else np.float32(0) for place, block in at.items()]
    counts = [float(stored[block][1]) * float(stored[block][1]) * (1.0 if importance is None else float(importance[place[1]]))
              for place, block in at.items()]
    chosen, table = schemes.kmeans(units, counts, {"code": reading.kind(code), "levels": reading.kind(levels)})
    for place, own in zip(at, chosen, strict=True):
        fields[code][place] = own
    for block, (word, _) in stored.items():
        fields[scale][block] = word
    return {**fields, levels: np.array(table)}


def of_vectors(reading: Reading, weight: npt.NDArray[np.float32], code: str, levels: str, importance: Any) -> dict[str, Codes]:
    """Codes, and the stored table of vectors that k-means finds, from vectors at even distances in rows of vectors."""
    entries, length = reading.stored_tables[levels]
    shape = {f.name.value: oracle.field_shape(reading.spec, f, reading.env) for f in reading.spec.fields}[code]
    rows, columns = (extent // count for extent, count in zip(reading.shape, shape, strict=True))
    places = [[(rows * t + i, columns * u + j) for i in range(rows) for j in range(columns)] for t, u in np.ndindex(*shape)]
    vectors = [[float(weight[place]) for place in own] for own in places]
    counts = [[1.0 if importance is None else float(importance[k]) for _, k in own] for own in places]

    def nearest(table: list[list[float]]) -> list[int]:
        costs = ([added((a - b) * (a - b) * count for a, b, count in zip(own, entry, by, strict=True)) for entry in table]
                 for own, by in zip(vectors, counts, strict=True))
        return [row.index(min(row)) for row in costs]

    distinct = vectors if len(vectors) <= entries else sorted([list(own) for own in {*map(tuple, vectors)}])
    few = len(distinct) <= entries                               # further entries repeat the last vector
    table = list(distinct) if few else [vectors[(2 * i + 1) * len(vectors) // (2 * entries)] for i in range(entries)]
    for _ in range(0 if few else 12):
        chosen, moved = nearest(table), [list(entry) for entry in table]
        for i, entry in enumerate(moved):
            own = [n for n, at in enumerate(chosen) if at == i]
            for d in range(length):
                total = added(counts[n][d] for n in own)
                entry[d] = added(vectors[n][d] * counts[n][d] for n in own) / total if total > 0 else entry[d]
        table = moved
    words = [[nearest_code(reading.kind(levels), np.float32(v)) for v in entry] for entry in table]
    stored = [[float(value(reading.kind(levels), word)) for word in entry] for entry in words]
    return {code: np.array(nearest(stored)).reshape(shape), levels: np.array(words + words[-1:] * (entries - len(words)))}


def added(values: Iterable[float]) -> float:
    """The sum in order, each rounded: Python's own sum keeps what that loses."""
    total = 0.0
    for one in values:
        total += one
    return total
