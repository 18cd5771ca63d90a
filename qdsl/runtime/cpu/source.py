"""C source of loops over a weight as it is stored: products with few rows of x, and decoded rows (stored_loops.h).

N, K and the units of a row are arguments: one library serves all shapes.  Lanes of vectors are neighbouring columns, or rows
where these are neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qdsl.runtime.cpu.positions import Unprintable
from qdsl.runtime.cpu.printed import DecodeReads, PrintedLoops, print_decode

VECTORS, FUNCTIONS, LOOPS = (Path(__file__).with_name(name) for name in ("vectors.h", "decoded.h", "stored_loops.h"))
DECODE = 0                                                       # rows of x of a library that decodes into out
LONGEST = 1 << 15                                                # columns of a step: a buffer on the stack has them
WIDTHS = (16, 8, 4)                                              # lanes of vectors


@dataclass(frozen=True)
class Source:
    """C source, and what it asks of a weight: K is a multiple of `divisor`, and the first row of tiles of `step`.

    arranged: numbers that a column of x has after the source's function `arrange`; 0 where there is none.
    has_vectors: whether weights are decoded many at a time; one by one is no faster than torch.
    """

    text: str
    divisor: int
    step: int
    arranged: int
    has_vectors: bool


def source_of(reads: DecodeReads, rows: int, width: int) -> Source:
    """The C source for `rows` rows of x at a time, DECODE for none, with vectors of at most `width` lanes.

    Raises Unprintable for a decode function that has no form in C.
    """
    alone, vectors = print_decode(reads, False), _vector_loops(reads, rows)
    if rows and not 0 < len(alone.order) <= LONGEST:
        raise Unprintable("columns that do not follow the units, or too many at a time")
    if vectors is not None and vectors.units % alone.units:
        vectors = None
    lanes = width
    if vectors is not None and not reads.along_rows:
        lanes = next(lanes for lanes in WIDTHS if lanes <= width and vectors.loops[-1].extent % lanes == 0)
    is_ordered = rows > 0 and vectors is not None and not reads.along_rows and not _has_neighbours(vectors)
    settings = {"LANES": lanes, "M": rows, "TILE": reads.tile, "STEP_ONE": alone.units, "COLUMNS_ONE": len(alone.order),
                "HAS_VECTORS": int(vectors is not None), "ALONG_ROWS": int(reads.along_rows), "ORDERED": int(is_ordered)}
    turn = () if vectors is None or rows or reads.along_rows else _interleaved_uses(vectors)
    settings["TURNS"] = len(turn)
    tables = [f"static const int turn[] = {{{_commas(turn)}}};"] * bool(turn)
    if vectors is not None:
        settings |= {"STEP": vectors.units, "COLUMNS": len(vectors.order), "USES": len(vectors.uses),
                     "LENGTH": vectors.loops[-1].extent if vectors.loops else 1}
        tables += [f"static const int16_t order[] = {{{_commas(vectors.order)}}};"] * is_ordered
    head = [f"#define {name} {value}" for name, value in settings.items()]
    files = [path.read_text(encoding="utf-8") for path in (VECTORS, FUNCTIONS, LOOPS)]
    loops = files[2].replace("\nSCALARS\n", f"\n{alone.text}\n")
    loops = loops.replace("\nVECTORS\n", f"\n{vectors.text}\n" if vectors is not None else "\n")
    return Source("\n".join([*head, *files[:2], *tables, loops]), alone.multiples, lanes if reads.along_rows else 1,
                  int(is_ordered), vectors is not None or not alone.is_slow)


def _vector_loops(reads: DecodeReads, rows: int) -> PrintedLoops | None:
    """The lines in vectors; None where there are none, or where scalars are stored faster."""
    try:
        vectors = print_decode(reads, True)
    except Unprintable:
        return None
    stores = rows or reads.along_rows or _has_neighbours(vectors) or _interleaved_uses(vectors)
    return vectors if stores and 0 < len(vectors.order) <= LONGEST else None


def _has_neighbours(vectors: PrintedLoops) -> bool:
    """Whether the lanes of every weight are neighbouring columns."""
    return all(use.column.step(vectors.loops[-1].name) == 1 for use in vectors.uses)


def _interleaved_uses(vectors: PrintedLoops) -> tuple[int, ...]:
    """The uses that neighbouring columns come from in turn; () where they come otherwise, or from one use."""
    uses, lane = vectors.uses, vectors.loops[-1].name
    places = [use.column.constant for use in uses]
    alike = {use.column.terms for use in uses}
    is_box = sorted(places) == list(range(min(places), min(places) + len(uses)))
    if len(uses) < 2 or len(alike) > 1 or not is_box or uses[0].column.step(lane) != len(uses) or any(use.row for use in uses):
        return ()
    return tuple(sorted(range(len(uses)), key=places.__getitem__))


def _commas(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
