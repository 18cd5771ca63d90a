"""Infers scales stored as 8-bit codes into a table: table[code] * outer scale + an offset of the whole weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from qdsl.infer.elements import Element
from qdsl.infer.fit import Blocks, CodeMeaning
from qdsl.infer.labels import Values
from qdsl.infer.numbers import Field
from qdsl.infer.tiles import Codes, Layout, Tile

FLOATS = ("f16", "bf16", "f32")
CODES = 256
SHARES = 65                                                      # numbers that are tried between a code's bounds
MOST_STEPS = 8                                                   # float32 neighbours of the best one that are tried per side
BLOCKS_PER_CODE = 2                                              # with fewer blocks per code, a match is chance

Float32 = npt.NDArray[np.float32]


def find_nested_scales(meaning: CodeMeaning, codes: Codes, values: Values,
                       tensors: Mapping[str, Element]) -> tuple[tuple[Field, ...], str, tuple[float, ...]] | None:
    """The fields of the scales, their formula with `{}` for the code, and the table `steps`; None if no fields match.

    meaning: its levels are the table's own numbers in float32.
    """
    if meaning.blocks.rows > 1 or meaning.blocks.apart:
        return None
    shape = (values.shape[0], values.shape[1])
    scale = exact_scales(meaning, codes, values)
    for name, element in tensors.items():
        if element.kind != "u8" or element.stored.data.size != scale.size:
            continue
        inner = Field("scale", "u8", meaning.blocks, name, _one_by_one(8))
        for outer, times in _find_outer(meaning, tensors, shape):
            for offset, plus in _weight_offsets(tensors, shape):
                if offset is not None and offset.tensor == outer.tensor:
                    continue
                steps = _solve_table(element.stored.data, scale, times, plus)
                if steps is not None:
                    return ((inner, outer), "{} * (steps[scale] * outer)", steps) if offset is None else \
                        ((inner, outer, offset), "{} * (steps[scale] * outer + offset)", steps)
    return None


def exact_scales(meaning: CodeMeaning, codes: Codes, values: Values) -> Float32:
    """The scales in float32: near each fitted scale, the number that decodes most of its block's values; NaN if undetermined."""
    levels = meaning.blocks.view(meaning.levels.astype(np.float32)[codes])
    wanted = meaning.blocks.view(values)
    near = meaning.scale.reshape(-1).astype(np.float32)
    best, most = near, np.full(len(near), -1)
    for direction in (np.inf, -np.inf):
        number = near
        for _ in range(3):
            count = (levels * number[:, None] == wanted).sum(1)
            best, most = np.where(count > most, number, best), np.maximum(count, most)
            number = np.nextafter(number, np.float32(direction))
    return best


def _one_by_one(bits: int) -> Layout:
    return Layout(Tile(1, 1), bits, np.arange(bits))


def _find_outer(meaning: CodeMeaning, tensors: Mapping[str, Element], shape: tuple[int, int]) -> Iterator[tuple[Field, Float32]]:
    """Yields tensors that may hold one number for several neighbouring scales, and that number for every scale."""
    rows, columns = meaning.blocks.count(shape)
    for name, element in tensors.items():
        width = 8 * element.stored.width
        count = element.stored.data.size // element.stored.width
        size = rows * columns // count
        if element.kind not in FLOATS or size * count != rows * columns or size == 1:
            continue
        if size % columns and columns % size:
            continue
        blocks = Blocks(1, meaning.blocks.columns * size) if columns % size == 0 else Blocks(size // columns, shape[1])
        numbers = element.numbers(element.kind).astype(np.float32)
        if np.isfinite(numbers).all() and numbers.all():
            yield Field("outer", element.kind, blocks, name, _one_by_one(width)), numbers.repeat(size)


def _weight_offsets(tensors: Mapping[str, Element], shape: tuple[int, int]) -> Iterator[tuple[Field | None, np.float32]]:
    """Yields no offset, then every number that applies to the whole weight."""
    yield None, np.float32(0)
    for name, element in tensors.items():
        if element.kind in FLOATS and element.stored.data.size == element.stored.width:
            number = np.float32(element.numbers(element.kind)[0])
            yield Field("offset", element.kind, Blocks(*shape), name, _one_by_one(8 * element.stored.width)), number


def _solve_table(codes: npt.NDArray[np.uint8], scale: Float32, times: Float32, plus: np.float32) -> tuple[float, ...] | None:
    """The table that decodes `codes` to the scales, table * times + plus in float32; 0 for unused codes.

    None if a code would need two numbers.
    """
    certain = np.isfinite(scale)
    codes, scale, times = codes[certain], scale[certain], times[certain]
    if len(codes) < BLOCKS_PER_CODE * len(np.unique(codes)):
        return None
    exact, spacing = scale.astype(np.float64), np.spacing(np.abs(scale)).astype(np.float64)
    ends = np.stack([(exact - float(plus) + sign * spacing) / times for sign in (-1, 1)])
    low, high = np.full(CODES, -np.inf), np.full(CODES, np.inf)
    np.maximum.at(low, codes, ends.min(0))
    np.minimum.at(high, codes, ends.max(0))
    if (low > high).any():
        return None
    low, high = (np.where(np.isfinite(end), end, 0) for end in (low, high))
    best, most = np.zeros(CODES, np.float32), np.full(CODES, -1)

    def keep_better(steps: Float32) -> None:
        nonlocal best, most
        count = np.bincount(codes, steps[codes] * times + plus == scale, CODES)
        best, most = np.where(count > most, steps, best), np.maximum(count, most)

    for share in np.linspace(0, 1, SHARES):
        keep_better((low + (high - low) * share).astype(np.float32))
    for direction in (np.inf, -np.inf):
        steps = best
        for _ in range(MOST_STEPS):
            steps = np.nextafter(steps, np.float32(direction))
            keep_better(steps)
    return tuple(float(step) for step in best)
