"""Asynchronous operations: copies into shared memory (cp.async) and products of warp groups (wgmma).

Both complete at the wait for them, the latest time that hardware allows.  Until then their bytes and registers are marked, so
that a missing wait changes the result and becomes a finding.  Groups are counted per thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qdsl.analyze.execute.machine import WARP, At, Step, ThreadBatch
from qdsl.analyze.execute.memory import Indices, InFlight
from qdsl.analyze.execute.memory_ops import check_dependent, check_in_flight, global_load, shared_store
from qdsl.analyze.execute.numbers import UNSIGNED, Bits
from qdsl.analyze.execute.operands import Context, Source, Target, broadcast, opcode
from qdsl.analyze.execute.ptx import Immediate, Operand, Register, Vector
from qdsl.analyze.execute.warp_ops import (
    WIDTHS,
    Matrix,
    a_tile,
    fragment,
    mma_product,
    numbers_of,
    result_words,
    word_elements,
)

WARP_GROUP = 128                                                 # threads


# -- copies ------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _PendingCopy:
    lanes: Indices
    to: Indices
    of: Indices
    size: int
    live: Indices
    group: Indices
    instruction: Any


@opcode("cp")
def copy_async(context: Context) -> Step:
    """cp.async of 4, 8 or 16 bytes; a shorter source is padded with zeros."""
    modifiers = context.modifiers
    if "async" not in modifiers or modifiers & {"bulk", "mbarrier", "reduce"}:
        raise context.unknown()
    if "commit_group" in modifiers:
        return lambda batch, at: _commit(batch.copies, batch.lanes(at))
    if modifiers & {"wait_group", "wait_all"}:
        everything = "wait_all" in modifiers
        late = 0 if everything else _constant(context, context.operand(0))
        return lambda batch, at: _finish_copies(batch, batch.lanes(at), late, everything)
    to, of, size = context.address(0), context.address(1), _constant(context, context.operand(2))
    count = context.source(3, 32) if len(context.instruction.operands) > 3 else None

    def step(batch: ThreadBatch, at: At) -> None:
        lanes = batch.lanes(at)
        place = batch.shared_indices(lanes, to(batch, at), size, "a copy")
        flight = batch.copies
        if batch.memory.is_dependent:                            # a copy may load at once
            for allocation, chosen, offset in batch.memory.locate_accesses(of(batch, at), size, "a copy"):
                some = lanes if chosen is None else lanes[chosen]
                check_dependent(batch, allocation, some, offset, size, write=False)
        live = np.full(len(lanes), size) if count is None else np.broadcast_to(count(batch, at), lanes.shape).astype(np.int64)
        if batch.options.asynchronous:
            check_in_flight(batch, lanes, place, size, "starts a copy into")
            flight.mark(place[:, None] + np.arange(size), 1)
        flight.pending.append(_PendingCopy(lanes, to(batch, at), of(batch, at), size, live, flight.groups[lanes], batch.current))
    return step


def _commit(flight: InFlight, lanes: Indices) -> None:
    flight.groups[lanes] += 1


def _finish_copies(batch: ThreadBatch, lanes: Indices, most_pending: int, everything: bool) -> None:
    flight = batch.copies
    waiting = np.zeros(batch.count, bool)
    waiting[lanes] = True
    left = []
    for pending in flight.pending:
        due = waiting[pending.lanes] if everything else flight.due(pending.lanes, pending.group, waiting, most_pending)
        if due.any():
            _complete_copies(batch, flight, pending, np.flatnonzero(due))
        if not due.all():
            kept = np.flatnonzero(~due)
            parts = {name: getattr(pending, name)[kept] for name in ("lanes", "to", "of", "live", "group")}
            left.append(replace(pending, **parts))
    flight.pending = left


def _complete_copies(batch: ThreadBatch, flight: InFlight, pending: _PendingCopy, chosen: Indices) -> None:
    lanes, size, wait = pending.lanes[chosen], pending.size, batch.current
    batch.current = pending.instruction                          # attribute a fault to the copy
    data = np.zeros((len(lanes), size), np.uint8)
    live = pending.live[chosen]
    if (reading := np.flatnonzero(live > 0)).size:
        rows = np.ascontiguousarray(global_load(batch, lanes[reading], pending.of[chosen][reading], size)).view(np.uint8)
        data[reading] = np.where(np.arange(size) < live[reading][:, None], rows.reshape(-1, size), 0)
    place = batch.row[lanes] * batch.shared_bytes + pending.to[chosen]
    if batch.options.asynchronous:
        flight.mark(place[:, None] + np.arange(size), -1)
    shared_store(batch, lanes, pending.to[chosen], data)
    batch.current = wait


def _constant(context: Context, operand: Operand) -> int:
    if not isinstance(operand, Immediate) or not isinstance(operand.value, int):
        raise context.unknown("an operand is no constant")
    return operand.value


# -- products of warp groups -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ProductShape:
    """D [64, N] (+)= A [64, K] @ B [K, N].  transposed: of A and B, whether K is the slower dimension.  negative: -A @ B."""

    n: int
    k: int
    kind: str
    integer: bool
    saturate: bool
    transposed: tuple[bool, bool]
    negative: bool


@dataclass(slots=True)
class _PendingProducts:
    lanes: Indices                                               # [warp groups, 128]
    group: Indices                                               # of each warp group
    run: Callable[[ThreadBatch, Indices], None]
    marks: list[Indices]                                         # shared bytes of each warp group
    registers: frozenset[int]


@opcode("wgmma")
def warp_group_step(context: Context) -> Step:
    """Hopper's wgmma instructions, with their fences, groups and waits."""
    modifiers = context.modifiers
    if "fence" in modifiers:
        def fence(batch: ThreadBatch, at: At) -> None:
            batch.whole_warps(at)
            batch.ordered[batch.warp[batch.lanes(at)]] = batch.time
        return fence
    if "commit_group" in modifiers:
        return lambda batch, at: _commit(batch.products, batch.whole_warps(at).reshape(-1))
    if "wait_group" in modifiers:
        late = _constant(context, context.operand(0))
        return lambda batch, at: _finish_products(batch, batch.whole_warps(at).reshape(-1), late)
    if "mma_async" not in modifiers:
        raise context.unknown()
    return _warp_group_product(context)


def _warp_group_product(context: Context) -> Step:
    size = re.search(r"\.m64n(\d+)k(\d+)\.", context.instruction.opcode)
    kinds = [part for part in context.instruction.modifiers if part in WIDTHS or part in ("f32", "s32")]
    if size is None or len(kinds) != 3 or kinds[0] not in ("f32", "s32") or "sp" in context.modifiers:
        raise context.unknown()
    constants = [_constant(context, operand) for operand in context.instruction.operands[4:]]
    in_registers = isinstance(context.operand(1), Vector)
    transposed = [*([False] if in_registers else []), *(bool(value) for value in constants[2:]), False, False]
    shape = _ProductShape(int(size[1]), int(size[2]), kinds[1], kinds[0] == "s32", "satfinite" in context.modifiers,
                          (transposed[0], transposed[1]), len(constants) >= 2 and constants[0] * constants[1] < 0)
    accumulators, puts, keep = context.sources(0, 32), context.targets(0), context.source(3, 1)
    fragments_of_a = context.sources(1, 32) if in_registers else []
    described = [context.source(place, 64) for place in ((2,) if in_registers else (1, 2))]
    result, fragments = (frozenset(part.slot for part in getattr(operand, "parts", ()) if isinstance(part, Register))
                         for operand in context.instruction.operands[:2])

    def step(batch: ThreadBatch, at: At) -> None:
        lanes = batch.whole_warps(at).reshape(-1)
        if len(lanes) % WARP_GROUP or (lanes[::WARP_GROUP] % WARP_GROUP).any():
            raise context.unknown("warps of a warp group are missing")
        groups = lanes.reshape(-1, WARP_GROUP)
        slots = result | fragments if batch.options.fragments else result
        batch.check_ordered_registers(lanes, slots)
        flight = batch.products
        descriptors = [_descriptor(batch, at, source) for source in described]
        rows = (() if in_registers else (64,)) + (shape.n,)
        transpositions = shape.transposed[1:] if in_registers else shape.transposed
        places = [_matrix_bytes(batch, groups, words, extent, shape, is_transposed)
                  for words, extent, is_transposed in zip(descriptors, rows, transpositions, strict=True)]
        for place in places:
            batch.check_matrix_reads(groups, place.reshape(len(groups), -1), WIDTHS[shape.kind] // 8)
        words = fragment(batch, at, fragments_of_a, (len(groups), 4, WARP)) if in_registers else None
        keeps = np.broadcast_to(keep(batch, at), lanes.shape).reshape(-1, WARP_GROUP)[:, 0]

        def run(batch: ThreadBatch, chosen: Indices) -> None:
            late = batch.options.fragments and in_registers
            left = fragment(batch, groups[chosen].reshape(-1), fragments_of_a, (len(chosen) * 4, WARP)) if late else \
                None if words is None else words[chosen].reshape(len(chosen) * 4, WARP, -1)
            _multiply_operands(batch, groups[chosen], shape, left, [place[chosen] for place in places],
                               accumulators, puts, keeps[chosen])
        marks = [np.concatenate([place[number].reshape(-1) for place in places]) for number in range(len(groups))]
        if batch.options.asynchronous:
            for spread in marks:
                flight.mark(spread, 1)
            batch.in_flight |= slots
        flight.pending.append(_PendingProducts(groups, flight.groups[groups[:, 0]], run, marks, slots))
    return step


def _descriptor(batch: ThreadBatch, at: At, source: Any) -> Indices:
    """Descriptors of warp groups, from their first threads."""
    (words,) = broadcast(batch, at, [source(batch, at)])
    return words.reshape(-1, WARP_GROUP)[:, 0].astype(np.uint64)


def _matrix_bytes(batch: ThreadBatch, groups: Indices, words: Indices, rows: int, shape: _ProductShape,
                  transposed: bool) -> Indices:
    """Shared bytes of elements [warp groups, rows, K] by matrix descriptors: the ISA's canonical layouts, swizzled."""
    size = WIDTHS[shape.kind] // 8
    per_line = 16 // size                                        # elements of 16 bytes
    field = [(words >> np.uint64(shift) & np.uint64(0x3FFF)).astype(np.int64)[:, None, None] << 4 for shift in (0, 16, 32)]
    start, leading, stride = field
    mode = (words >> np.uint64(62)).astype(np.int64)[:, None, None]
    width = np.array([16, 128, 64, 32])[mode]                    # bytes of a row of a swizzled tile
    row, k = np.meshgrid(np.arange(rows), np.arange(shape.k), indexing="ij")
    if not transposed:
        swizzled = row // 8 * stride + row % 8 * width + k * size
        plain = row // 8 * stride + row % 8 * 16 + k // per_line * leading + k % per_line * size
    else:
        lines = width // 16
        line = row // per_line
        swizzled = row % per_line * size + line % lines * 16 + line // lines * leading + k % 8 * width + k // 8 * stride
        plain = row % per_line * size + line * stride + k % 8 * 16 + k // 8 * leading
    address = start + np.where(mode > 0, swizzled, plain)
    mask = np.array([0, 7, 3, 1])[mode]
    address = address ^ (address >> 7 & mask) << 4
    lanes = np.repeat(groups[:, 0], address[0].size)
    return batch.shared_indices(lanes, address.reshape(-1), size, "a matrix operand").reshape(address.shape)


def _multiply_operands(batch: ThreadBatch, groups: Indices, shape: _ProductShape, words: Bits | None, places: list[Indices],
                       accumulators: list[Source], puts: list[Target], keep: Any) -> None:
    """Multiply the current operands, and write the accumulators."""
    at = groups.reshape(-1)
    count = len(groups)
    b = _matrix(batch, places[-1], shape.kind).transpose(0, 2, 1)
    if words is not None:
        left = a_tile(words, shape.kind, shape.k, batch.options).reshape(count, 64, shape.k)
    else:
        left = _matrix(batch, places[0], shape.kind)
    left = -left if shape.negative else left
    before = np.stack([numbers_of(value.reshape(count, 4, WARP), shape.integer) for value in
                     broadcast(batch, at, [source(batch, at) for source in accumulators])], 0)
    total = np.zeros((count, 64, shape.n))
    row, column = _accumulator_places(len(puts))
    total[:, row, column] = before.transpose(1, 0, 2, 3)
    result = result_words(mma_product(left, b, np.where(keep[:, None, None], total, 0), shape.kind, batch.options), shape.integer,
                          shape.saturate)
    values: Bits = result[:, row, column].transpose(1, 0, 2, 3)
    for value, put in zip(values, puts, strict=True):
        put(batch, at, np.ascontiguousarray(value).reshape(-1))


def _accumulator_places(registers: int) -> tuple[Indices, Indices]:
    """Rows and columns of D in registers [registers, 4 warps, 32 lanes]."""
    number, warp, lane = np.meshgrid(np.arange(registers), np.arange(4), np.arange(WARP), indexing="ij")
    return 16 * warp + lane // 4 + 8 * (number % 4 // 2), 8 * (number // 4) + 2 * (lane % 4) + number % 2


def _matrix(batch: ThreadBatch, places: Indices, kind: str) -> Matrix:
    """Elements of shared memory at places."""
    size = WIDTHS[kind] // 8
    return word_elements(batch.shared.view(UNSIGNED[8 * size])[places // size], kind, batch.options).reshape(places.shape)


def _finish_products(batch: ThreadBatch, lanes: Indices, most_pending: int) -> None:
    """Complete the products that a wait ends, in order.  A wait also orders memory between the lanes of a warp."""
    flight = batch.products
    waiting = np.zeros(batch.count, bool)
    waiting[lanes] = True
    left = []
    for pending in flight.pending:
        due = flight.due(pending.lanes[:, 0], pending.group, waiting, most_pending)
        if due.any():
            chosen = np.flatnonzero(due)
            pending.run(batch, chosen)
            if batch.options.asynchronous:
                for number in chosen:
                    flight.mark(pending.marks[number], -1)
        if not due.all():
            kept = np.flatnonzero(~due)
            left.append(_PendingProducts(pending.lanes[kept], pending.group[kept], _some_of(pending.run, kept),
                                         [pending.marks[number] for number in kept], pending.registers))
    flight.pending = left
    batch.in_flight = set().union(*(pending.registers for pending in left))
    batch.warp_epoch[lanes] += 1


def _some_of(run: Callable[[ThreadBatch, Indices], None], kept: Indices) -> Callable[[ThreadBatch, Indices], None]:
    return lambda batch, chosen: run(batch, kept[chosen])


# -- hints -------------------------------------------------------------------------------------------------------------------


@opcode("createpolicy", "prefetchu", "nanosleep", "setmaxnreg", "discard", "applypriority")
def ignore_hint(context: Context) -> Step:
    """Instructions without effect on results, such as cache policies."""
    if context.instruction.name != "createpolicy":
        return lambda batch, at: None
    put = context.target()
    return lambda batch, at: put(batch, at, np.zeros(len(batch.lanes(at)), np.uint64))
