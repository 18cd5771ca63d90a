"""Codes of one block of weights, and of what the block shares, as an encode scheme chooses them: one weight at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qdsl.compiler.spec import grammar as g
from tests.support import searches
from tests.support import slow_schemes as schemes
from tests.support.slow_numbers import Unread, value
from tests.support.slow_schemes import bounds, stored_scale

if TYPE_CHECKING:
    from tests.support.slow_reading import Reading

ROLES = ("code", "scale", "min", "zero", "super_scale", "super_min")
Result = tuple[list[list[int]], dict[str, list[int]]]            # codes of every part; by role, those that parts or all share


@dataclass(frozen=True)
class Block:
    """Weights of the parts of a block, and what the scheme is told; importance: of every weight, None without."""

    reading: Reading
    scheme: str
    arguments: Mapping[str, Any]
    kinds: Mapping[str, str]
    x: list[list[np.float32]]
    importance: list[list[np.float32]] | None
    row: list[np.float32]                                        # the whole row of the block's first weight

    @property
    def offset(self) -> int:
        return self.reading.offset(str(self.arguments["code"]))

    @property
    def ends(self) -> tuple[int, int]:
        """The least and the largest code, less the offset."""
        low, high = bounds(self.kinds["code"])
        return low - self.offset, high - self.offset

    def scale_of(self, number: np.float32) -> dict[str, list[int]]:
        return {"scale": [stored_scale(number, self.kinds["scale"])[0]]}


def codes(reading: Reading, weight: npt.NDArray[np.float32], parts: list[list[tuple[int, int]]], arguments: Mapping[str, Any],
          ) -> Result:
    """Codes of a block's parts, and the codes of what its parts, or all of it, share.  Raises Unread for an unknown scheme."""
    assert reading.spec.encode is not None
    importance = arguments.get("importance")
    block = Block(
        reading, reading.spec.encode.name, arguments,
        {role: reading.kind(str(arguments[role])) for role in ROLES if role in arguments},
        [[np.float32(weight[place]) for place in part] for part in parts],
        None if importance is None else [[np.float32(importance[k]) for _, k in part] for part in parts],
        [np.float32(v) for v in weight[parts[0][0][0]]])
    encoded = _of_parts(block) or (_searched(block) if importance is not None else _with_zero(block) or _with_scale(block))
    if encoded is None:
        raise Unread(f"no second reading of encode scheme '{block.scheme}': add it to {__name__}")
    return encoded


def _of_parts(block: Block) -> Result | None:
    """Schemes of blocks of blocks, whose parts have numbers of their own."""
    reading, x, kinds, arguments = block.reading, block.x, block.kinds, block.arguments
    match block.scheme:
        case "kquant_minmax":
            return schemes.super_minmax(x, block.importance, kinds, arguments)
        case "kquant_signmax":
            offset = reading.offset(str(arguments["scale"]))
            low, high = bounds(kinds["scale"])
            return schemes.super_signmax(x, block.importance, kinds, arguments, block.ends, (low - offset, high - offset))
        case "block_levels" | "kquant_levels":
            levels = [np.float32(v) for v in reading.levels()]
            return schemes.leveled(x, block.importance, kinds, levels, reading.offset(str(arguments["scale"])))
        case "progressive" if block.importance is None:
            return schemes.progressive(x, kinds, reading.arguments)
        case "nested_absmax" if block.importance is None:
            chosen, scales, above = schemes.nested(x, kinds, block.reading.divides, arguments)
            return chosen, {"scale": scales, "super_scale": [above]}
    return None


def _searched(block: Block) -> Result:
    """Schemes that try scales where importances say how much weights count."""
    (x,), (by,), (low, high) = block.x, block.importance or [], block.ends
    counts = searches.counts(x, by, searches.total([v * v for v in block.row]) / np.float32(len(block.row)))
    if block.scheme == "signmax":
        scale, chosen = searches.trials(x, counts, low, high)
        return [[c + block.offset for c in chosen]], block.scale_of(scale)
    scale, least, chosen = searches.ranged(x, counts, high, *searches.IMPORTANT)
    return [chosen], {**block.scale_of(scale), "min": [stored_scale(least, block.kinds["min"])[0]]}


def _with_zero(block: Block) -> Result | None:
    """Schemes of a scale, and of a zero point or a minimum."""
    x, kinds, arguments = block.x[0], block.kinds, block.arguments
    match block.scheme:
        case "affine" | "edge_affine":
            chosen, least, scale = schemes.affine(x, kinds, block.ends[1]) if block.scheme == "affine" else \
                schemes.edge_affine(x, kinds)
            return [chosen], {"min": [least], "scale": [scale]}
        case "float_zero":
            chosen, zero, scale = schemes.float_zero(x, kinds)
        case "float_middle":
            decode = block.reading.spec.decode
            is_negated = isinstance(decode, g.Binary) and decode.op == "-"
            chosen, zero, scale = schemes.float_middle(x, kinds, block.offset, is_negated)
        case "minmax":
            chosen, zero, scale = schemes.minmax(x, kinds["code"], kinds["zero"], kinds["scale"], arguments)
        case "scaled_zero":
            rule = {"by": "exact", "span": "tight"}
            chosen, point, scale = schemes.minmax(x, kinds["code"], kinds["code"], kinds["scale"], rule)
            zero = stored_scale(-np.float32(value(kinds["scale"], scale)) * np.float32(point), kinds["zero"])[0]
        case _:
            return None
    return [chosen], {"zero": [zero], "scale": [scale]}


def _with_scale(block: Block) -> Result | None:
    """Schemes of one scale alone."""
    reading, x, kinds = block.reading, block.x[0], block.kinds
    match block.scheme:
        case "meansign":
            return [[int(v >= 0) for v in x]], block.scale_of(searches.total([abs(v) for v in x]) / np.float32(len(x)))
        case "absmax_level":
            chosen, scale = schemes.level(x, kinds["scale"], [float(v) for v in reading.levels()], reading.factor())
        case "unit_level":
            return [schemes.unit(x, reading.levels())[0]], block.scale_of(max(map(abs, x)))
        case "unit_absmax":
            return [schemes.unit_codes(x, reading.divisor())], block.scale_of(max(map(abs, x)))
        case "ternary":
            mean = max(np.float32(sum(float(abs(v)) for v in x) / len(x)), np.float32(1e-5))
            inverse = np.float32(1) / mean
            chosen = [min(max(round(float(v * inverse)), -1), 1) + 1 for v in x]
            return [chosen], block.scale_of(inverse if block.reading.divides else mean)
        case "absmax" | "signmax":
            chosen, scale, _ = schemes.absmax(x, kinds["code"], kinds["scale"], block.scheme, block.offset, block.arguments)
        case _:
            return None
    return [chosen], {"scale": [scale]}
