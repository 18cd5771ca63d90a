"""The kernels of a program: skeletons (templates of whole lines) filled with bodies."""

from __future__ import annotations

from math import prod

from qdsl.compiler.emit.templates import render
from qdsl.compiler.emit.triton.body import Body, guarded, nest
from qdsl.compiler.emit.triton.kernel import Decoder, Tile, arguments, offset_text, shown, tile, unrolled
from qdsl.compiler.emit.triton.lanes import lanes
from qdsl.compiler.emit.triton.pairs import paired
from qdsl.compiler.ir.index import Index, name, substitute
from qdsl.compiler.ir.program import Program


def kernels(program: Program) -> list[str]:
    """The lines of a storage's kernels."""
    coordinates = tile(program)
    pairs = paired(program)
    made = [_dequantize(program, coordinates), _linear(program, coordinates), *filter(None, (lanes(program),)),
            *([pairs.lines] if pairs is not None else [])]
    return [line for i, part in enumerate(made) for line in (*(["", ""] if i else []), *part)]


def _shared(program: Program, at: Tile) -> dict[str, str]:
    k_last = at.last == "k"
    count = prod(lane.extent for lane in at.lanes)
    units = "weights" if count == 1 else f"units of {count} weights"
    return {
        "storage": program.storage, "arguments": ", ".join(arguments(program)),
        "sizes": "".join(f", {size}" for size in program.sizes), "units": units, "rows": at.rows, "unit": at.unit,
        "shape": "(BN, BK)" if k_last else "(BK, BN)", "across": "[:, None]" if k_last else "[None, :]",
        "along": "[None, :]" if k_last else "[:, None]",
    }


def _masks(at: Tile, lanes: list[str], body: Body) -> None:
    """`live` for units, and `inside` for single weights where the last unit may hang over; unrolled rows have their own.

    Records may hang over by many units, which have nothing in other tensors: then a unit lives if its first column does.
    """
    rows = f"{at.rows} < {shown(at.row_count)}"
    first = substitute(at.k, {lane.name: Index(0) for lane in at.lanes}, at.facts)
    bound = f"{shown(first)} < K" if at.ragged and at.digits else at.unit_bound
    body.levels[1].append(("", f"live = ({rows}) & ({bound})"))
    if at.ragged and lanes:
        unrolled_rows = any(lane.axis == "n" and lane.name not in lanes for lane in at.lanes)
        row = "" if unrolled_rows else f" & ({shown(at.n)} < N)"
        body.levels[-1].append(("", f"inside = live{row} & ({shown(at.k)} < K)"))


def _start(program: Program, at: Tile, loops: int, lanes: list[str]) -> Body:
    taken = {"x", "bias", "out", "N", "K", "n", "k", at.rows, at.unit, *arguments(program), *program.sizes}
    body = Body(levels=[[] for _ in range(loops + 2)], arguments=frozenset(taken))
    body.levels[1] += [("", f"{digit} = {text}") for digit, text in at.digits]
    _masks(at, lanes, body)
    return body


def _large(body: Body) -> str:
    """The parameter of kernels that divide positions n * K + k: whether these pass 2^31, for 64-bit division is slow."""
    return ", LARGE: tl.constexpr" if body.is_flat else ""


def _dequantize(program: Program, at: Tile) -> list[str]:
    body = _start(program, at, len(at.lanes), [lane.name for lane in at.lanes])
    decoder = Decoder(program, at, body, {}, copies=True)
    text = decoder.weight()
    place = "k" if at.unit == "k" else shown(at.k)
    if any(lane.axis == "n" for lane in at.lanes):
        place = f"({shown(at.n)}).to(tl.int64) * K + {place}"
    else:
        body.levels[0].append(("", f"out += {offset_text(at.n * name('K'))}"))
    tail = [f"w = {text}", f"tl.store(out + {place}, w, {decoder.mask(len(at.lanes) + 1)})"]
    return render("dequantize", **_shared(program, at), large=_large(body), before=guarded(body.levels[0]),
                  body=nest(body, list(at.lanes), tail))


def _linear(program: Program, at: Tile) -> list[str]:
    loops = [lane for lane in at.lanes if lane.axis == "k"]
    body = _start(program, at, len(loops), [lane.name for lane in loops])
    cases = list(unrolled(at.lanes))
    sums = [f"acc{i}" if len(cases) > 1 else "acc" for i in range(len(cases))]
    tail: list[str] = []
    rows: list[dict[str, str]] = []
    for acc, fixed in zip(sums, cases, strict=True):
        decoder = Decoder(program, at, body, fixed)
        text = decoder.weight(around=2)
        k = decoder.coordinate("k")
        place = "k" if at.unit == "k" else shown(k)
        level = decoder.level(k)
        xk = body.add(level, "x_k", f"tl.load(x + {place}, {decoder.mask(level, rows=False)}, 0).to(tl.float32)")
        if any(value.op == "/" for value in program.values):     # what is not loaded is 0, and 0 / 0 would spoil the sum
            text = f"tl.where({decoder.mask(len(loops) + 1)}, {text}, 0)"
        tail.append(f"{acc} += {text} * {xk}")
        rows.append({"name": acc, "row": shown(decoder.coordinate("n"))})
    return render("linear", **_shared(program, at), large=_large(body), before=guarded(body.levels[0]),
                  body=nest(body, loops, tail), sums=rows, count=shown(at.unit_count), axis="1" if at.last == "k" else "0")
