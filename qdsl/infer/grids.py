"""Finds codes of rows of a grid that no tensor holds: magnitudes of neighbouring columns, with separate signs.

Vectors with the same magnitudes have the same code.  So a code's bits are those that agree wherever vectors agree, and the codes
then give the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qdsl.infer.elements import Element
from qdsl.infer.fit import Blocks, CodeMeaning, smallest_integers
from qdsl.infer.labels import TOLERANCE, Values
from qdsl.infer.numbers import Field
from qdsl.infer.records import Record
from qdsl.infer.solve import Solution, find_scales
from qdsl.infer.tiles import Layout, StoredBytes, Tile

BLOCKS = (64, 32, 16, 8)                                         # columns that share a scale
RECORDS = (256, 128, 64, 32)                                     # columns of a record
WIDTHS = (8, 4)                                                  # columns of a vector
MOST_LEVELS, MOST_BITS = 8, 12                                   # of the levels of magnitudes, and of the bits of a code
PAIRS = 64                                                       # pairs of equal vectors needed to find the bits of a code
SAMPLES = 1 << 14                                                # records that are compared, or blocks that give the levels
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MagnitudeLevels:
    """The level index of each weight's magnitude [N, K], -1 if undetermined; `columns` weights of a row share a scale."""

    levels: tuple[float, ...]
    columns: int
    index: npt.NDArray[np.int16]


def solve_grid_rows(packed: str, elements: Mapping[str, Element], values: Values) -> Solution | None:
    """The fields and the formula for codes into a grid, or None."""
    stored = elements[packed].stored
    for size in (size for size in BLOCKS if values.shape[1] % size == 0):
        magnitudes = find_levels(np.abs(values), size)
        if magnitudes is None:
            continue
        for columns in (columns for columns in RECORDS if values.shape[1] % columns == 0 and columns >= size):
            view = Tile(1, columns).tiled_bytes(stored, (values.shape[0], values.shape[1]))
            for width in WIDTHS if view is not None else ():
                solution = _grid_solution(packed, elements, values, magnitudes, columns, width)
                if solution is not None:
                    return solution
    return None


def find_levels(magnitudes: Values, size: int) -> MagnitudeLevels | None:
    """The levels of magnitudes up to a scale per `size` columns; None if the blocks have no levels in common."""
    groups = magnitudes.reshape(-1, size)
    some = np.sort(groups[::max(1, len(groups) // SAMPLES)], 1)
    steps = np.diff(some, axis=1) > TOLERANCE * some[:, -1:]
    count = steps.sum(1) + 1
    most = int(count.max())
    if not 2 <= most <= MOST_LEVELS or not some.min() > 0:
        return None
    full = some[count == most]
    different = full[np.concatenate([np.ones((len(full), 1), bool), steps[count == most]], 1)].reshape(-1, most)
    ratios = different / different[:, -1:]
    levels = np.median(ratios, 0)
    if np.abs(ratios - levels).max() > TOLERANCE:
        return None
    levels = smallest_integers(levels)
    largest = groups.max(1, keepdims=True)
    index, ways = np.full(groups.shape, -1, np.int16), np.zeros(len(groups), np.int8)
    for top in range(most):
        wanted = groups * (levels[top] / largest).astype(np.float32)
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, wanted).astype(np.int16)
        fits = (np.abs(levels.astype(np.float32)[nearest] - wanted) <= 2 * TOLERANCE * levels[-1]).all(1)
        index[fits] = nearest[fits]
        ways += fits
    if not ways.all():
        return None
    index[ways > 1] = -1                                         # ambiguous blocks, such as 1 1 2 and 2 2 4
    return MagnitudeLevels(tuple(float(level) for level in levels), size, index.reshape(magnitudes.shape))


def _grid_solution(packed: str, elements: Mapping[str, Element], values: Values, magnitudes: MagnitudeLevels, columns: int,
                   width: int) -> Solution | None:
    stored, shape = elements[packed].stored, (values.shape[0], values.shape[1])
    count = len(magnitudes.levels)
    parts = magnitudes.index.reshape(shape[0], -1, width)
    vectors = np.where((parts >= 0).all(2), parts.astype(np.int64) @ count ** np.arange(width), -1)
    bits = _record_bits(stored, shape, columns)
    codes = _match_vector_codes(bits, vectors.reshape(len(bits), -1))
    if codes is None:
        return None
    numbers = codes.read_codes(stored, (vectors.shape[0], vectors.shape[1]))
    grid = _vector_of_code(numbers, vectors, codes.bits)
    signs = _match_signs(bits, values.reshape(len(bits), columns) < 0)
    if grid is None or signs is None:
        return None
    levels = np.array(magnitudes.levels)[grid[numbers][..., None] // count ** np.arange(width) % count].reshape(shape)
    sign, sign_field, term, tables = _sign_field(packed, signs, columns, bits.shape[1])
    blocks = Blocks(1, magnitudes.columns)
    scale = (np.abs(values) / levels).reshape(shape[0], -1, magnitudes.columns)
    largest = levels.reshape(scale.shape).argmax(2)[..., None]
    meaning = CodeMeaning("u8", levels, blocks, np.take_along_axis(scale, largest, 2)[..., 0].astype(np.float64), None)
    used = np.where((codes.source >= 0) | (sign.source >= 0), 0, -1)
    record = Record(packed, None, stored, Layout(Tile(1, columns), 1, used), shape)
    others = {name: element for name, element in elements.items() if name != packed}
    fields, factor = next(find_scales(meaning, shape, others, [record]), ((), ""))
    if not factor:
        return None
    code = Field("q", f"u{codes.bits}", Blocks(1, width), packed, codes)
    return Solution((code, sign_field, *fields), factor.format(f"(grid[q, k % {width}] * {term})"), {
        "level": magnitudes.levels, "codes": tuple(float(row) for row in grid),
        "grid": f"i<{len(grid)} j<{width}: level[codes[i] // {count}**j % {count}]", **tables})


def _record_bits(stored: StoredBytes, shape: tuple[int, int], columns: int) -> npt.NDArray[np.uint8]:
    """All records as bits [records, bits]."""
    view = Tile(1, columns).tiled_bytes(stored, shape)
    assert view is not None
    return np.unpackbits(view.reshape(-1, view.shape[2]), axis=1, bitorder="little")


def _match_vector_codes(bits: npt.NDArray[np.uint8], vectors: Places) -> Layout | None:
    """The layout of vectors' codes [records, vectors of a record]: each code's bits agree wherever its vector is the same."""
    some = slice(None, None, max(1, len(bits) // SAMPLES))
    bits, vectors = bits[some], vectors[some]
    candidates = (bits != bits[0]).any(0)
    agree = np.zeros((vectors.shape[1], bits.shape[1]), bool)
    for place, vector in enumerate(vectors.T):
        order = vector.argsort(kind="stable")
        same = (np.diff(vector[order]) == 0) & (vector[order][1:] >= 0)
        if same.sum() < PAIRS:
            return None
        agree[place] = candidates & ~(bits[order[1:][same]] != bits[order[:-1][same]]).any(0)
    agree &= agree.sum(0) == 1                                   # the bits of other fields hardly ever change
    counts = agree.sum(1)
    if counts.min() != counts.max() or not 2 <= counts[0] <= MOST_BITS:
        return None
    vector_at, bit_at = np.nonzero(agree)
    source = np.full(bits.shape[1], -1)
    source[bit_at] = vector_at * counts[0] + np.tile(np.arange(counts[0]), len(counts))
    return Layout(Tile(1, vectors.shape[1]), int(counts[0]), source)


def _vector_of_code(codes: npt.NDArray[np.int16], vectors: Places, bits: int) -> Places | None:
    """The vector of every code, 0 for codes that do not occur; None if a code has several vectors."""
    grid = np.zeros(1 << bits, np.int64)
    grid[codes[vectors >= 0]] = vectors[vectors >= 0]
    return grid if ((grid[codes] == vectors) | (vectors < 0)).all() else None


def _match_signs(bits: npt.NDArray[np.uint8], negative: npt.NDArray[np.bool_]) -> tuple[Places, int] | None:
    """The positions of sign bits, 1 for negative weights; and the number of columns whose signs have even parity (0: none).

    The last column of such a group stores no sign, and its position is -1.
    """
    some = slice(None, None, max(1, len(bits) // 1024))
    signs = negative[some].astype(np.float32) * 2 - 1
    agreement = (bits[some].astype(np.float32) * 2 - 1).T @ signs / len(signs)
    places = np.where(agreement.max(0) == 1, agreement.argmax(0), -1)
    if (places >= 0).all():
        return places, 0
    even = not (negative.reshape(-1, 8).sum(1) & 1).any()
    return (places, 8) if even and ((places < 0) == (np.arange(len(places)) % 8 == 7)).all() else None


def _sign_field(packed: str, signs: tuple[Places, int], columns: int, bits: int) -> tuple[Layout, Field, str, Mapping[str, str]]:
    """The signs' layout and field, the factor of a magnitude in the formula, and its table."""
    places, group = signs
    source = np.full(bits, -1)
    if not group:
        source[places] = np.arange(columns)
        layout = Layout(Tile(1, columns), 1, source)
        return layout, Field("sign", "u1", Blocks(1, 1), packed, layout), "(1 - 2 * sign)", {}
    source[places[places >= 0]] = np.arange(columns // group * (group - 1))
    layout = Layout(Tile(1, columns // group), group - 1, source)
    table = f"i<{1 << group - 1} j<{group}: 1 - 2 * ((i + {1 << group - 1} * parity(i)) // 2**j % 2)"
    return layout, Field("sign", f"u{group - 1}", Blocks(1, group), packed, layout), f"signs[sign, k % {group}]", {"signs": table}
