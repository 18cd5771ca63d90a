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


def of_vectors(reading: Reading, weight: npt.NDArray[np.float32], roles: Mapping[str, str], importance: Any) -> dict[str, Codes]:
    """Codes, scales of rows, and the stored tables of vectors that k-means finds, each from vectors at even distances."""
    shapes = {f.name.value: oracle.field_shape(reading.spec, f, reading.env) for f in reading.spec.fields}
    own = [roles[role] for role in ("code", "residual") if role in roles]
    names = [roles["levels"], roles.get("residuals", roles["levels"])][:len(own)]
    rows, columns = (extent // count for extent, count in zip(reading.shape, shapes[own[0]], strict=True))
    fields = {name: np.zeros(reading.stored_tables[name], np.int64) for name in names}
    scales = [1.0] * reading.shape[0]
    if "scale" in roles:
        stored = [schemes.stored_scale(np.abs(row).max(), reading.kind(roles["scale"])) for row in weight]
        fields[roles["scale"]], scales = np.array([word for word, _ in stored]), [float(scale) for _, scale in stored]
    places = [[(rows * t + i, columns * u + j) for i in range(rows) for j in range(columns)]
              for t, u in np.ndindex(*shapes[own[0]])]
    vectors = [[float(weight[n, k]) / scales[n] if scales[n] else 0.0 for n, k in part] for part in places]
    columns_count = [1.0] * reading.shape[1] if importance is None else [float(count) for count in importance]
    counts = [[columns_count[k] * (scales[n] * scales[n]) for n, k in part] for part in places]
    tables: list[list[list[float]]] = [[]] * len(own)
    parts, chosen, few = [[[0.0] * len(at) for at in places]] * len(own), [[0]] * len(own), [False] * len(own)
    for turn in range(4 if len(own) == 2 else 1):
        for i, name in enumerate(names):
            wanted = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(vectors, parts[1 - i], strict=True)] \
                if len(own) == 2 else vectors
            entries, kind = reading.stored_tables[name][-2], reading.kind(name)
            if turn == 0:                                        # all vectors where they are few; further entries repeat the last
                distinct = wanted if len(wanted) <= entries else sorted([list(x) for x in {*map(tuple, wanted)}])
                few[i] = len(distinct) <= entries
                tables[i] = distinct if few[i] else [wanted[(2 * e + 1) * len(wanted) // (2 * entries)] for e in range(entries)]
            tables[i] = tables[i] if few[i] else fitted(wanted, counts, tables[i], 4 if len(own) == 2 else 12)
            words = [[nearest_code(kind, np.float32(v)) for v in entry] for entry in tables[i]]
            tables[i] = [[float(value(kind, word)) for word in entry] for entry in words]
            chosen[i] = nearest_vectors(wanted, counts, tables[i])
            parts[i] = [tables[i][code] for code in chosen[i]]
            fields[name][(i,) if fields[name].ndim == 3 else ...] = words + words[-1:] * (entries - len(words))
    return {**fields, **{name: np.array(codes).reshape(shapes[name]) for name, codes in zip(own, chosen, strict=True)}}


def fitted(vectors: list[list[float]], counts: list[list[float]], table: list[list[float]], rounds: int) -> list[list[float]]:
    """A table after rounds of Lloyd's algorithm."""
    for _ in range(rounds):
        chosen, moved = nearest_vectors(vectors, counts, table), [list(entry) for entry in table]
        for i, entry in enumerate(moved):
            own = [n for n, at in enumerate(chosen) if at == i]
            for d in range(len(entry)):
                total = added(counts[n][d] for n in own)
                entry[d] = added(vectors[n][d] * counts[n][d] for n in own) / total if total > 0 else entry[d]
        table = moved
    return table


def nearest_vectors(vectors: list[list[float]], counts: list[list[float]], table: list[list[float]]) -> list[int]:
    """The nearest entry of each vector."""
    costs = ([added((a - b) * (a - b) * count for a, b, count in zip(own, entry, by, strict=True)) for entry in table]
             for own, by in zip(vectors, counts, strict=True))
    return [row.index(min(row)) for row in costs]


def added(values: Iterable[float]) -> float:
    """The sum in order, each rounded: Python's own sum keeps what that loses."""
    total = 0.0
    for one in values:
        total += one
    return total
