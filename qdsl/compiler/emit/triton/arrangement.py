"""How the units and weights of a `dequantize` tile make rows and columns of w, so that it can store them in order."""

from __future__ import annotations

from qdsl.compiler.ir.program import Program


def order_of_stores(program: Program) -> tuple[list[int], list[int], list[int]] | None:
    """Extents of a unit's digits within its record and of its lanes, and the order that makes rows and then columns of these.

    The order numbers the row of tiles, the record, the digits and the lanes.  None if storing single weights is as fast.
    """
    units = program.units
    if units is None or not units.lanes:
        return None
    digits, lanes = [extent or 0 for _, _, extent in units.digits[1:]], [lane.extent for lane in units.lanes]
    parts = [("n", units.tiles["n"], 1), ("k", units.digits[0][1], 1),
             *(("k", weight, extent) for (_, weight, _), extent in zip(units.digits[1:], digits, strict=True)),
             *((lane.axis, lane.weight, lane.extent) for lane in units.lanes)]
    order: list[int] = []
    for axis in "nk":
        along = sorted((i for i, part in enumerate(parts) if part[0] == axis), key=lambda i: -parts[i][1])
        size = 1
        for i in reversed(along):
            _, weight, extent = parts[i]
            if weight != size or extent & (extent - 1) or not extent:
                return None
            size *= extent
        order += along
    return digits, lanes, order
