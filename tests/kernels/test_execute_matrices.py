"""Matrices of the PTX machine, in registers and shared memory, and atomics, against layouts written out another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch

from qdsl.analyze.execute import Options
from tests.support.ptx import run

OPERAND = 1 << 15                                                # bytes of shared memory for each operand of a product
# 128 threads copy `size` bytes from the second tensor to shared memory, 16 at a time.
FILL = """mul.lo.u32 %r1, %r60, 16;
COPY: cvt.u64.u32 %d10, %r1; add.s64 %d10, %d10, %d1; ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d10];
st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}}; add.u32 %r1, %r1, {step}; setp.lt.u32 %p1, %r1, {size}; @%p1 bra COPY;
{after}"""


@pytest.mark.parametrize(("kind", "k", "dtype"), [
    ("f16", 16, torch.float16), ("bf16", 16, torch.bfloat16), ("f16", 8, torch.float16), ("s8", 32, torch.int8),
    ("e4m3", 32, torch.float8_e4m3fn)])
def test_products_of_matrices(kind: str, k: int, dtype: torch.dtype) -> None:
    """Every element where the ISA's tables put it: by its number among a lane's, not by register."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in ((16, k), (k, 8)))
    per, size = 4 // a.element_size(), a.element_size()
    integer = kind == "s8"
    c = torch.randint(-9, 9, (16, 8), generator=generator).to(torch.int32 if integer else torch.float32)

    def fragment(matrix: torch.Tensor, count: int, place: Callable[[int, int], tuple[int, int]]) -> torch.Tensor:
        rows = [[matrix[place(lane, i)].reshape(1).view(torch.uint8) for i in range(count)] for lane in range(32)]
        return torch.stack([torch.cat(row) for row in rows]).view(torch.int32)

    half = 4 * per
    words = fragment(a, 16 * k // 32, lambda lane, i: (lane // 4 + 8 * (i // per % 2),
                                                       lane % 4 * per + i % per + half * (i // (2 * per))))
    other = fragment(b, 8 * k // 32, lambda lane, i: (lane % 4 * per + i % per + half * (i // per), lane // 4))
    sums = fragment(c, 4, lambda lane, i: (lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2))
    out = torch.zeros(32, 4, dtype=torch.int32)
    body = []
    for place, (tensor, first) in enumerate(((words, 1), (other, 10), (sums, 20))):
        width = tensor.shape[1]
        body += [f"mul.wide.u32 %d30, %r60, {4 * width}; add.s64 %d30, %d30, %d{place};",
                 *(f"ld.global.b32 %r{first + i}, [%d30 + {4 * i}];" for i in range(width))]
    names = [", ".join(f"%r{first + i}" for i in range(count)) for first, count in ((30, 4), (1, words.shape[1]), (10,
        other.shape[1]), (20, 4))]
    ends = ("s32", "s32") if integer else ("f32", "f32")
    body += [f"mma.sync.aligned.m16n8k{k}.row.col.{ends[0]}.{kind}.{kind}.{ends[1]} "
             f"{{{names[0]}}}, {{{names[1]}}}, {{{names[2]}}}, {{{names[3]}}};",
             "mul.wide.u32 %d30, %r60, 16; add.s64 %d30, %d30, %d3;", f"st.global.v4.b32 [%d30], {{{names[0]}}};"]
    assert run("\n".join(body), words, other, sums, out, outputs=(out,)).findings == ()
    assert size in (1, 2)
    wanted = (a.double() @ b.double() + c.double()).to(c.dtype)
    assert torch.equal(out, fragment(wanted, 4, lambda lane, i: (lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2)))


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_8_by_8_are_loaded_and_stored(transposed: bool) -> None:
    """Lane 4 r + c holds elements 2 c and 2 c + 1 of row r, or of column r.

    Lane i gives the address of row i % 8 of matrix i // 8.
    """
    data = torch.arange(4 * 64, dtype=torch.int16)
    trans = ".trans" * transposed
    out, stored = torch.zeros(32, 4, dtype=torch.int32), torch.zeros(4 * 64, dtype=torch.int16)
    body = FILL.format(step=512, size=512, after="bar.sync 0;") + f"""
mul.lo.u32 %r6, %r60, 16; ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
mul.wide.u32 %d11, %r60, 16; add.s64 %d11, %d11, %d0; st.global.v4.b32 [%d11], {{%r10, %r11, %r12, %r13}};
add.u32 %r7, %r6, 512; stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r7], {{%r10, %r11, %r12, %r13}}; bar.warp.sync -1;
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r7]; mul.wide.u32 %d12, %r60, 16; add.s64 %d12, %d12, %d2;
st.global.v4.b32 [%d12], {{%r20, %r21, %r22, %r23}};"""
    assert run(body, out, data, stored, shared=1024, outputs=(out, stored)).findings == ()
    matrices = data.view(4, 8, 8)
    wanted = matrices.mT if transposed else matrices
    for lane, number in product(range(32), range(4)):
        pair = wanted[number, lane // 4, 2 * (lane % 4):2 * (lane % 4) + 2]
        assert out[lane, number].view(1).view(torch.int16).tolist() == pair.tolist()
    assert torch.equal(stored, data)                             # what was loaded is stored where it was


# -- operands of warp groups -------------------------------------------------------------------------------------------------


def place(row: int, k: int, size: int, swizzle: int, by_rows: bool) -> int:
    """The byte of an element in a tile of [rows, K]: lines of `swizzle` bytes, whose pieces of 16 bytes change places.

    swizzle: 128, 64 or 32; or 16 for none.  by_rows: K lies along a line; else the rows do.  Tiles of 8 lines follow one another:
    first along the lines' other dimension, 8 lines each, then along the lines' own.
    """
    along, across = (k, row) if by_rows else (row, k)
    line, inside, other = across % 8, along * size % swizzle, along * size // swizzle
    piece = inside // 16 ^ (line * swizzle // 128) % (swizzle // 16)
    return across // 8 * (8 * swizzle) + other * 4096 + line * swizzle + piece * 16 + inside % 16


def image(matrix: torch.Tensor, swizzle: int, by_rows: bool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    size = matrix.element_size()
    data = np.zeros(OPERAND, np.uint8)
    raw = matrix.contiguous().view(torch.uint8).numpy().reshape(*matrix.shape, size)
    for row, k in np.ndindex(*matrix.shape):
        start = place(row, k, size, swizzle, by_rows)
        data[start:start + size] = raw[row, k]
    return data


def descriptor(start: int, swizzle: int, by_rows: bool) -> int:
    """Bytes of the start, the leading and the stride dimension, each divided by 16; and the swizzle."""
    tile, next_line = 8 * swizzle, 4096
    leading, stride = (next_line, tile)
    if not by_rows and swizzle == 16:                            # without a swizzle the two change their meaning
        leading, stride = tile, next_line
    mode = {16: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


def layouts() -> Iterator[tuple[torch.dtype, int, bool, bool]]:
    for swizzle in (16, 32, 64, 128):
        yield torch.float8_e4m3fn, swizzle, True, True
        yield from ((torch.float16, swizzle, a_by_rows, b_by_rows) for a_by_rows in (True, False) for b_by_rows in (True, False))


@pytest.mark.parametrize(("dtype", "swizzle", "a_by_rows", "b_by_rows"), list(layouts()), ids=str)
def test_operands_of_warp_groups(dtype: torch.dtype, swizzle: int, a_by_rows: bool, b_by_rows: bool) -> None:
    """D [64, 16] = A [64, K] @ B [K, 16] of matrices in shared memory by their descriptors, K or the rows along a line."""
    k = 32 // dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (rows, k), generator=generator).to(dtype) for rows in (64, 16))
    data = torch.from_numpy(np.concatenate([image(a, swizzle, a_by_rows), image(b, swizzle, b_by_rows)]))
    out = torch.zeros(128, 8)
    kind = {torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}[dtype]
    order = f", {int(not a_by_rows)}, {int(not b_by_rows)}" if kind == "f16" else ""
    registers = ", ".join(f"%r{20 + i}" for i in range(8))
    body = FILL.format(step=2048, size=len(data), after="fence.proxy.async.shared::cta; bar.sync 0;") + "".join(
        f"mov.b32 %r{20 + i}, 0;" for i in range(8)) + f"""
mov.b64 %d20, {descriptor(0, swizzle, a_by_rows)}; mov.b64 %d21, {descriptor(OPERAND, swizzle, b_by_rows)};
wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n16k{k}.f32.{kind}.{kind} {{{registers}}}, %d20, %d21, 0, 1, 1{order};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %d11, %r60, 32; add.s64 %d11, %d11, %d0; st.global.v4.b32 [%d11], {{%r20, %r21, %r22, %r23}};
st.global.v4.b32 [%d11+16], {{%r24, %r25, %r26, %r27}};"""
    assert run(body, out, data, threads=128, shared=len(data), outputs=(out,)).findings == ()
    wanted = a.double() @ b.double().t()
    for thread, number in product(range(128), range(8)):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (number // 2 % 2)
        column = thread % 4 * 2 + number % 2 + 8 * (number // 4)
        assert out[thread, number] == wanted[row, column], (thread, number)


# -- sums --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "k", "one", "start"), [("f16", 16, 0x3C003C00, 26), ("bf16", 16, 0x3F803F80, 26),
                                                         ("e4m3", 32, 0x38383838, 14)])
def test_sums_that_lose_what_lies_below_the_largest(kind: str, k: int, one: int, start: int) -> None:
    """2^26, 2^14 for FP8, and K ones: a unit that keeps 26 or 14 bits of the largest adds none of them."""
    body = "".join(f"mov.b32 %r{i}, {one};" for i in range(10, 16)) + "".join(
        f"mov.b32 %r{i}, {127 + start << 23};" for i in range(20, 24)) + f"""
mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}},
  {{%r20, %r21, %r22, %r23}};
mul.wide.u32 %d11, %r60, 16; add.s64 %d11, %d11, %d0; st.global.v4.b32 [%d11], {{%r20, %r21, %r22, %r23}};"""
    for sums, total in (("exact", 2.0 ** start + k), ("truncated", 2.0 ** start)):
        out = torch.zeros(32, 4)
        run(body, out, outputs=(out,), options=Options(sums=sums))
        assert (out == total).all(), sums


# -- atomics -----------------------------------------------------------------------------------------------------------------


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


WHOLE: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, value: old + value, "min.s32": lambda old, value: min(signed(old), signed(value)),
    "max.s32": lambda old, value: max(signed(old), signed(value)), "min.u32": min, "max.u32": max,
    "and.b32": lambda old, value: old & value, "or.b32": lambda old, value: old | value,
    "xor.b32": lambda old, value: old ^ value,
    "exch.b32": lambda old, value: value, "inc.u32": lambda old, value: 0 if old >= value else old + 1,
    "dec.u32": lambda old, value: value if not 0 < old <= value else old - 1}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", WHOLE)
def test_atomics_return_what_was_there(name: str, space: str) -> None:
    """32 threads at 4 places, one after the other."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-(1 << 31), 1 << 31, (32,), generator=generator).to(torch.int32)
    places, out = torch.randint(-(1 << 31), 1 << 31, (4,), generator=generator).to(torch.int32), torch.zeros(32,
        dtype=torch.int32)
    memory = [int(value) % (1 << 32) for value in places]
    at = "[%d11]" if space == "global" else "[%r2]"
    body = f"""mul.wide.u32 %d10, %r60, 4; add.s64 %d12, %d10, %d1; ld.global.b32 %r1, [%d12];
and.b32 %r2, %r60, 3; shl.b32 %r2, %r2, 2;
cvt.u64.u32 %d11, %r2; add.s64 %d11, %d11, %d2; ld.global.b32 %r5, [%d11];
{"st.shared.b32 [%r2], %r5; bar.sync 0;" if space == "shared" else ""}
atom.{space}.{name} %r3, {at}, %r1; add.s64 %d12, %d10, %d0; st.global.b32 [%d12], %r3;"""
    assert run(body, out, values, places, shared=16).findings == ()
    for thread in range(32):
        old, value = memory[thread % 4], int(values[thread]) % (1 << 32)
        assert int(out[thread]) % (1 << 32) == old
        memory[thread % 4] = WHOLE[name](old, value) % (1 << 32)
    if space == "global":
        assert [int(value) % (1 << 32) for value in places] == memory


def test_atomics_of_floats_and_compare_and_swap() -> None:
    for kind, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16), ("f64", torch.float64)):
        total, ones = torch.zeros(1, dtype=dtype), torch.full((32,), 0.5, dtype=dtype)
        letter = {16: "h", 32: "r", 64: "d"}[8 * dtype.itemsize]
        register = f"%{letter}20" if letter == "d" else f"%{letter}9"
        noftz = ".noftz" * (dtype.itemsize == 2)
        run(f"mul.wide.u32 %d10, %r60, {dtype.itemsize}; add.s64 %d10, %d10, %d1; "
            f"ld.global.b{8 * dtype.itemsize} {register}, [%d10]; "
            f"red.global.add{noftz}.{kind} [%d0], {register};", total, ones)
        assert total.item() == 16
    sums, pairs = torch.zeros(2), torch.zeros(32, 2)             # sm_90 has vectors, each number of which is added alone
    assert run("mov.b32 %r1, 0f3F000000; mov.b32 %r2, 2.5; atom.global.add.v2.f32 {%r3, %r4}, [%d0], {%r1, %r2}; "
               "mul.wide.u32 %d10, %r60, 8; add.s64 %d10, %d10, %d1; st.global.v2.b32 [%d10], {%r3, %r4};",
               sums, pairs, outputs=(pairs,)).findings == ()
    assert sums.tolist() == [16, 80] and torch.equal(pairs, torch.arange(32)[:, None] * torch.tensor([0.5, 2.5]))
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run("add.u32 %r1, %r60, 1; atom.global.cas.b32 %r3, [%d1], %r60, %r1; mul.wide.u32 %d10, %r60, 4; add.s64 %d10, %d10, %d0; "
        "st.global.b32 [%d10], %r3;", out, flag)
    assert flag.item() == 32 and out.tolist() == list(range(32))
