"""Instructions of whole warps: shuffles, votes, reductions, and matrix products of mma.sync with their loads and stores."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.analyze.execute.machine import WARP, At, Options, Step, ThreadBatch
from qdsl.analyze.execute.memory_ops import shared_load, shared_store
from qdsl.analyze.execute.numbers import SIGNED, TABLES, UNSIGNED, Bits, decode, encode, flushed
from qdsl.analyze.execute.operands import Context, Source, broadcast, opcode
from qdsl.analyze.execute.ptx import ExecutionError

Matrix = NDArray[np.float64]
GROUP, MEMBER = np.arange(WARP) // 4, np.arange(WARP) % 4       # of a lane: the row, and the columns, of a fragment


@opcode("bar")
def warp_barrier(context: Context) -> Step:
    """bar.warp.sync orders memory between the participating lanes."""
    if "warp" not in context.modifiers:
        raise context.unknown()
    mask = context.source(0, 32)

    def step(batch: ThreadBatch, at: At) -> None:
        check_members(batch, at, mask(batch, at))
        lanes = batch.lanes(at)
        batch.warp_epoch[lanes] = batch.warp_epoch.reshape(-1, WARP).max(1)[batch.warp[lanes]] + 1
    return step


def check_members(batch: ThreadBatch, at: At, mask: Bits) -> None:
    """Raises ExecutionError unless every lane in a mask executes this instruction."""
    lanes = batch.lanes(at)
    named = np.zeros((batch.count // WARP, WARP), bool)
    rows = batch.warp[lanes]
    masks: Any = np.broadcast_to(mask, lanes.shape)[:, None]
    named[rows] |= (masks >> np.arange(WARP, dtype=np.uint32) & np.uint32(1)).astype(bool)
    here = np.zeros(batch.count, bool)
    here[lanes] = True
    if (named & ~here.reshape(-1, WARP)).any():
        raise ExecutionError(f"{batch.current}: its mask names lanes that are not here")


@opcode("shfl")
def shuffle(context: Context) -> Step:
    """Values of other lanes of a warp."""
    mode = next((part for part in ("bfly", "idx", "down", "up") if part in context.modifiers), None)
    if mode is None or "sync" not in context.modifiers:
        raise context.unknown()
    value, by, clamp, mask = (context.source(place, 32) for place in (1, 2, 3, 4))
    puts = context.targets(0)

    def step(batch: ThreadBatch, at: At) -> None:
        check_members(batch, at, mask(batch, at))
        lanes = batch.lanes(at)
        lane = batch.lane[lanes]
        step_by, bounds = by(batch, at).astype(np.int64) & 31, clamp(batch, at)
        segment, top = (bounds >> np.uint32(8) & np.uint32(31)).astype(np.int64), (bounds & np.uint32(31)).astype(np.int64)
        highest = lane & segment | top & ~segment
        source = {"bfly": lane ^ step_by, "idx": lane & segment | step_by & ~segment & 31,
                  "down": lane + step_by, "up": lane - step_by}[mode]
        inside = source >= highest if mode == "up" else source <= highest
        source = np.where(inside, source, lane)
        here = np.zeros(batch.count, bool)
        here[lanes] = True
        if not here[lanes - lane + source].all():
            raise ExecutionError(f"{batch.current}: takes the value of a lane that is not here")
        everyone = value(batch, None)
        everyone = everyone if len(everyone) == batch.count else np.repeat(everyone, batch.count)
        for put, result in zip(puts, (everyone[lanes - lane + source], inside), strict=False):
            put(batch, at, result)
    return step


@opcode("vote", "activemask")
def vote(context: Context) -> Step:
    """A predicate over a warp: any, all, or a mask of lanes."""
    active = context.instruction.name == "activemask"
    negated = None if active else context.source(1, 1)
    put, kind = context.target(), context.modifiers

    def step(batch: ThreadBatch, at: At) -> None:
        lanes = batch.lanes(at)
        if not active:
            check_members(batch, at, context.source(2, 32)(batch, at))
        chosen = np.ones(len(lanes), bool) if negated is None else np.broadcast_to(negated(batch, at), lanes.shape)
        holds, here = np.zeros((batch.count // WARP, WARP), bool), np.zeros((batch.count // WARP, WARP), bool)
        holds.reshape(-1)[lanes], here.reshape(-1)[lanes] = chosen, True
        if active or "ballot" in kind:
            result: Any = (holds.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
        else:
            result = {"all": (holds | ~here).all(1), "any": holds.any(1),
                      "uni": (holds | ~here).all(1) | ~holds.any(1)}[next(part for part in ("all", "any", "uni") if part in kind)]
        put(batch, at, result[batch.warp[lanes]])
    return step


REDUCE: dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "add": np.sum, "and": np.bitwise_and.reduce,
                                         "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce}


@opcode("redux")
def reduce(context: Context) -> Step:
    """A reduction over all lanes of a warp."""
    operation = next((part for part in REDUCE if part in context.modifiers), None)
    if operation is None or context.kind[0] not in "sub":
        raise context.unknown()
    value, put, signed = context.source(1, 32), context.target(), context.kind[0] == "s"

    def step(batch: ThreadBatch, at: At) -> None:
        warps = batch.whole_warps(at)
        (bits,) = broadcast(batch, at, [value(batch, at)])
        table = bits.view(np.int32 if signed else np.uint32).reshape(warps.shape)
        result = REDUCE[operation](table, axis=1).astype(table.dtype)
        put(batch, at, np.repeat(result.view(np.uint32), WARP))
    return step


# -- matrices ----------------------------------------------------------------------------------------------------------------


WIDTHS = {"bf16": 16, "f16": 16, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "tf32": 32}


def word_elements(words: Bits, kind: str, options: Options) -> Matrix:
    """Elements of 32-bit words [..., words] as [..., words * elements per word], exact in float64."""
    parts = np.ascontiguousarray(words).view(UNSIGNED[WIDTHS[kind]])
    if kind in ("s8", "u8"):
        return parts.view(SIGNED[8] if kind == "s8" else UNSIGNED[8]).astype(np.float64)
    if kind in TABLES:
        return TABLES[kind][parts].astype(np.float64)
    values = decode(parts, kind).astype(np.float64)
    return flushed(values, kind) if options.flush and kind in ("f16", "bf16") else values


def mma_product(a: Matrix, b: Matrix, c: Matrix, kind: str, options: Options) -> Matrix:
    """a [..., M, K] @ b [..., K, N] + c, as a matrix unit may add.

    exact: as if with unlimited bits.  truncated: products and c are cut below the last place of the largest of them, which
    keeps 26 bits, 14 where a and b are FP8; in steps of 32 bytes of K.
    """
    if options.sums == "exact" or kind in ("s8", "u8"):
        return a @ b + c
    kept, step = 14 if kind in TABLES else 26, 256 // WIDTHS[kind]
    total = c
    for start in range(0, a.shape[-1], step):
        terms = a[..., :, start:start + step, None] * b[..., None, start:start + step, :]
        terms = np.concatenate([terms, total[..., :, None, :]], -2)
        _, exponent = np.frexp(np.abs(terms).max(-2, keepdims=True))
        last = np.ldexp(1.0, exponent - kept)
        total = (np.trunc(terms / last) * last).sum(-2)
    return total


def result_words(result: Matrix, integer: bool, saturate: bool) -> Bits:
    """Sums as 32-bit words; integers wrap, or are clamped."""
    if integer:
        result = np.clip(result, -(2.0 ** 31), 2.0 ** 31 - 1) if saturate else result
        return result.astype(np.int64).astype(np.int32).view(np.uint32)
    return encode(result, "f32")


def numbers_of(words: Bits, integer: bool) -> Matrix:
    """Sums in words as float64."""
    return np.ascontiguousarray(words).view(np.int32 if integer else np.float32).astype(np.float64)


@opcode("mma")
def mma_sync(context: Context) -> Step:
    """D [16, 8] = A [16, K] @ B [K, 8] + C; rows and columns of lanes as the ISA draws them."""
    shape = re.search(r"\.m16n8k(\d+)\.row\.col\.", context.instruction.opcode)
    kinds = [part for part in context.instruction.modifiers if part in WIDTHS or part in ("f32", "s32")]
    if shape is None or len(kinds) != 4 or kinds[0] not in ("f32", "s32") or kinds[0] != kinds[3]:
        raise context.unknown()
    context.only("sync", "aligned", shape[0].strip(".").split(".")[0], "row", "col", "satfinite")
    k, integer, (kind_a, kind_b) = int(shape[1]), kinds[0] == "s32", kinds[1:3]
    a, b, c = (context.sources(place, 32) for place in (1, 2, 3))
    puts = context.targets(0)

    def step(batch: ThreadBatch, at: At) -> None:
        warps = len(batch.whole_warps(at))
        left = a_tile(fragment(batch, at, a, (warps, WARP)), kind_a, k, batch.options)
        right = b_tile(fragment(batch, at, b, (warps, WARP)), kind_b, k, batch.options)
        added = fragment(batch, at, c, (warps, WARP))
        total = np.empty((warps, 16, 8))
        for place in range(4):
            total[:, GROUP + 8 * (place // 2), 2 * MEMBER + place % 2] = numbers_of(added[..., place], integer)
        result = result_words(mma_product(left, right, total, kind_a, batch.options), integer, "satfinite" in context.modifiers)
        for place, put in enumerate(puts):
            put(batch, at, np.ascontiguousarray(result[:, GROUP + 8 * (place // 2), 2 * MEMBER + place % 2]).reshape(-1))
    return step


def fragment(batch: ThreadBatch, at: At, sources: list[Source], shape: tuple[int, ...]) -> Bits:
    """Registers of lanes as [*shape, registers]."""
    values = broadcast(batch, at, [source(batch, at) for source in sources])
    return np.stack([value.reshape(shape) for value in values], -1)


def a_tile(words: Bits, kind: str, k: int, options: Options) -> Matrix:
    """A [16, K] of fragments [warps, 32, registers]: rows g and g + 8, then the next half of K."""
    per = 32 // WIDTHS[kind]
    values = word_elements(words, kind, options).reshape(*words.shape, per)
    tile = np.empty((len(words), 16, k))
    half = k // (words.shape[2] // 2)
    for place in range(words.shape[2]):
        for number in range(per):
            tile[:, GROUP + 8 * (place % 2), place // 2 * half + MEMBER * per + number] = values[:, :, place, number]
    return tile


def b_tile(words: Bits, kind: str, k: int, options: Options) -> Matrix:
    """B [K, 8] of fragments [warps, 32, registers]."""
    per = 32 // WIDTHS[kind]
    values = word_elements(words, kind, options).reshape(*words.shape, per)
    tile = np.empty((len(words), k, 8))
    half = k // words.shape[2]
    for place in range(words.shape[2]):
        for number in range(per):
            tile[:, place * half + MEMBER * per + number, GROUP] = values[:, :, place, number]
    return tile


def _matrix_count(context: Context) -> int:
    """How many 8 x 8 matrices of 16 bits.  Raises ExecutionError."""
    if not {"m8n8", "b16"} <= context.modifiers:
        raise context.unknown()
    return int(next(part[1:] for part in ("x1", "x2", "x4") if part in context.modifiers))


@opcode("ldmatrix")
def load_matrices(context: Context) -> Step:
    """Lane i of the n-th eight holds the address of row i of matrix n."""
    count, transposed = _matrix_count(context), "trans" in context.modifiers
    puts, address = context.targets(0), context.address(1)

    def step(batch: ThreadBatch, at: At) -> None:
        lanes = batch.whole_warps(at)
        place = address(batch, at).reshape(lanes.shape)
        for number, put in enumerate(puts[:count]):
            rows = slice(8 * number, 8 * number + 8)
            data = shared_load(batch, lanes[:, rows].reshape(-1), place[:, rows].reshape(-1), 16)
            matrix = np.ascontiguousarray(data).view(np.uint16).reshape(len(lanes), 8, 8)
            matrix = np.ascontiguousarray(matrix.transpose(0, 2, 1) if transposed else matrix)
            put(batch, at, matrix.view(np.uint32).reshape(-1))
    return step


@opcode("stmatrix")
def store_matrices(context: Context) -> Step:
    """Stores 8 x 8 matrices of 16 bits, whose rows lanes hold."""
    count, transposed = _matrix_count(context), "trans" in context.modifiers
    sources, address = context.sources(1, 32), context.address(0)

    def step(batch: ThreadBatch, at: At) -> None:
        lanes = batch.whole_warps(at)
        place = address(batch, at).reshape(lanes.shape)
        for number, value in enumerate(broadcast(batch, at, [source(batch, at) for source in sources[:count]])):
            matrix = np.ascontiguousarray(value).view(np.uint16).reshape(len(lanes), 8, 8)
            matrix = np.ascontiguousarray(matrix.transpose(0, 2, 1) if transposed else matrix)
            rows = slice(8 * number, 8 * number + 8)
            shared_store(batch, lanes[:, rows].reshape(-1), place[:, rows].reshape(-1), matrix.view(np.uint8).reshape(-1, 16))
    return step


