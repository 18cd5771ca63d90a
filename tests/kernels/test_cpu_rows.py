"""Products on a CPU with weights whose rows are interleaved: loops of every format, and copies that follow their weight."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qdsl.analyze import processors
from qdsl.generated import fp8_channel, int_group, nvfp4, q4_0, q4_k, q6_k
from qdsl.host import library
from qdsl.runtime.cpu import kept, rows
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.torch import model
from qdsl.runtime.weight.packed import FormatError
from tests.support.covering import covering, quarter_of
from tests.support.cpu_products import check, in_order, plain, sample
from tests.support.formats import Case, cases, shapes, smallest

NUMBER = re.compile(r"-?\b[0-9][0-9.]*(e[+-]?\d+)?f?\b")
PARTS = 2


def lines(case: Case) -> list[str]:
    """What loops of a case differ in: its C without numbers, the bits of a code, and how numbers of groups are stored."""
    variant = case.module.FORMAT.variant(case.choice)
    own = variant.row_loops
    if own is None or case.storage != next(iter(variant.storages)):
        return []
    types = [str(case.choice.get(variant.fields[name].type, variant.fields[name].type)) for name in own.fields]
    text = own.source.partition("INLINE")[2]
    return [f"{own.bits} bits", f"columns {own.columns}", f"levels {own.levels}", f"row codes {own.row_codes is not None}",
            *(f"a {kind}" for kind in types), *NUMBER.sub("0", text).splitlines()]


CASES = [case for case in cases() if lines(case)]
COVERING = quarter_of(covering(CASES, lines))


def bound(x: Tensor) -> dict[str, Any]:
    """Arguments of `check`: products with scales are rounded, and many rows of bfloat16 round weights, too."""
    return {"terms": 2, "rounds_weight": x.dtype == torch.bfloat16 and len(x) > rows.FEW}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[None]:
    """Products are compiled in these tests, of small weights too, with few optimizations."""
    monkeypatch.setenv("QDSL_CACHE", str(cache_folder))
    monkeypatch.setenv(kept.INTERLEAVE.variable, "always")
    monkeypatch.setattr(library, "OPTIONS", (*library.OPTIONS, "-O1"))
    monkeypatch.setattr(rows, "_libraries", {})
    monkeypatch.setattr(kept, "_entries", {})
    cpu.compile_products()
    yield
    cpu.compile_products(False)


# -- every format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(PARTS))
def test_products_with_interleaved_rows_are_those_of_the_weight(part: int) -> None:
    """Whole shapes and ragged ones; one row of x, several at once, and tiles, with rest rows; float32 and bfloat16."""
    count = 0
    for number, case in list(enumerate(COVERING))[part::PARTS]:
        whole = next(iter(shapes(case, (128,), (256,))), smallest(case, tiles=2))
        ragged = [smallest(case), *shapes(case, (7, 160), (33, 256))][-1]
        for turn, shape in enumerate(dict.fromkeys([whole, ragged])):
            packed = in_order(case, shape)
            copy = rows.interleaved_copy(packed)
            if copy is None:                                     # blocks of fewer than 16 columns
                continue
            weight, dtype = plain(packed), (torch.float32, torch.bfloat16)[(number // PARTS + turn) % 2]
            for m in (1, 3, 6, 19):
                x, bias = sample(m, shape[1], seed=m, dtype=dtype), sample(shape[0], dtype=dtype) if m % 2 else None
                check(copy.product(x, bias), x, weight, bias, (str(case), shape, m), **bound(x))
                count += 1
    assert count > 4 * len(COVERING) // PARTS


@pytest.mark.parametrize("least", [2.0 ** -130, 2.0 ** -127, 2.0 ** -101, 1.0])
def test_small_numbers_of_x_count(least: float) -> None:
    """Instructions that multiply pairs of bfloat16 take subnormal numbers for 0: x with such numbers takes others."""
    for name in ("q4_0", "q4_1", "q5_0", "q6_k", "nvfp4", "fp8_channel"):
        case = next(case for case in CASES if case.path.stem == name)
        packed = in_order(case, (48, 256))
        copy, weight = rows.interleaved_copy(packed), plain(packed)
        assert copy is not None
        for m in (1, 4, 6):
            x = sample(m, 256, dtype=torch.bfloat16) * least
            x[-1, ::3], x[-1, 1::3] = least, 0
            check(copy.product(x, None), x, weight, what=(name, m), terms=2)


def in_8_bits(x: Tensor) -> Tensor:
    """x rounded to 8 bits in blocks of 32 columns."""
    blocks = x.float().unflatten(1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    return (torch.round(blocks * torch.where(most > 0, 127 / most, 0)) * (most / 127)).flatten(1)


# Codes of 1, 2, 4, 5, 6 and 8 bits, of both signs, in a table, in groups of 16 columns, and with offsets.
@pytest.mark.parametrize("capability", ["", "AVX2", "DEFAULT"])
def test_products_of_x_in_8_bits_are_those_of_x_so_rounded(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2" and own not in ("AVX2", "AVX512"):
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(rows, "_capability", lambda: capability or own)
    names = ("q1_0", "q4_0", "q4_k", "q5_k", "q6_k", "q2_k", "q8_0", "iq4_nl", "nvfp4") if not capability else ("q5_k", "q6_k")
    for name in names:
        case = next(case for case in CASES if str(case) == f"{name}.gguf")
        packed = in_order(case, (33, 512))
        copy, weight, x = rows.interleaved_copy(packed), plain(packed), sample(5, 512)
        x[0, :64] = 0
        assert copy is not None and rows.takes_bytes(packed)
        for m in (1, 5):
            check(copy.product(x[:m], None, rounds_x=True), in_8_bits(x[:m]), weight, what=(name, m), terms=4)
        x[1, 100] = torch.nan
        assert copy.product(x, None, rounds_x=True).isnan().any(1).tolist() == [False, True, False, False, False]
        monkeypatch.setenv("QDSL_CPU_INT8", "1")
        assert torch.equal(case.module.linear(x[:1], packed), copy.product(x[:1], None, rounds_x=True))
        monkeypatch.delenv("QDSL_CPU_INT8")


@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_other_vectors_make_the_same_products(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2" and own not in ("AVX2", "AVX512"):
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(rows, "_capability", lambda: capability)
    for packed in (q4_k.quantize(sample(33, 256)), q6_k.quantize(sample(48, 512)), fp8_channel.quantize(sample(31, 96)),
                   int_group.quantize(sample(64, 96), bits=3, group=32)):
        copy, weight = rows.interleaved_copy(packed), plain(packed)
        assert copy is not None
        for m in (1, 2, 5, 13):
            x = sample(m, packed.shape[1], seed=m, dtype=torch.bfloat16 if m == 2 else torch.float32)
            check(copy.product(x, None), x, weight, what=(packed, m), **bound(x))


# What AMX does, for processors without it: eight registers of 16 rows of 64 bytes.
TILES = """
#define __AMX_TILE__ 1
static __thread struct { int rows, bytes; _Alignas(64) char data[16][64]; } tiles[8];
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_release
INLINE void set_shapes(const uint8_t *s) {
    for (int i = 0; i < 8; i++) tiles[i].bytes = s[16 + 2 * i] | s[17 + 2 * i] << 8, tiles[i].rows = s[48 + i];
}
INLINE void load_tile(int i, const void *from, int64_t stride) {
    memset(tiles[i].data, 0, sizeof tiles[i].data);
    for (int row = 0; row < tiles[i].rows; row++) memcpy(tiles[i].data[row], (const char *)from + row * stride, tiles[i].bytes);
}
INLINE void store_tile(int i, void *to, int64_t stride) {
    for (int row = 0; row < tiles[i].rows; row++) memcpy((char *)to + row * stride, tiles[i].data[row], tiles[i].bytes);
}
INLINE void multiply_registers(int sums, int x, int w) {
    for (int m = 0; m < tiles[x].rows; m++) for (int p = 0; p < tiles[w].rows; p++) for (int i = 0; i < 32; i++) {
        uint16_t a, b;
        float sum;
        memcpy(&a, tiles[x].data[m] + 4 * p + i % 2 * 2, 2), memcpy(&b, tiles[w].data[p] + 2 * i, 2);
        memcpy(&sum, tiles[sums].data[m] + i / 2 * 4, 4);
        sum += bits_to_float((uint32_t)a << 16) * bits_to_float((uint32_t)b << 16);
        memcpy(tiles[sums].data[m] + i / 2 * 4, &sum, 4);
    }
}
#define _tile_loadconfig(shapes) set_shapes((const uint8_t *)(shapes))
#define _tile_loadd load_tile
#define _tile_stream_loadd load_tile
#define _tile_stored store_tile
#define _tile_dpbf16ps multiply_registers
#define _tile_release() memset(tiles, 0, sizeof tiles)
"""


@pytest.mark.parametrize("way", ["", "AVX2", "DEFAULT", "no tiles", "tiles"])
def test_many_rows_and_long_ones_are_multiplied_in_parts(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows of x, columns and rows of w than a loop takes at once, and a few left of each, on two threads."""
    own = torch.backends.cpu.get_cpu_capability()
    if (way == "AVX2" and own not in ("AVX2", "AVX512")) or ("tiles" in way and not rows.has_bfloat16()):
        pytest.skip("this machine has no such instructions")
    if way in ("AVX2", "DEFAULT"):
        monkeypatch.setattr(rows, "_capability", lambda: way)
    elif way:
        monkeypatch.setattr(rows, "has_tiles", lambda: False)
    if way == "tiles":
        loops = tmp_path / "row_loops.h"
        loops.write_text(TILES + rows.LOOPS.read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(rows, "LOOPS", loops)
    packed = int_group.quantize(sample(168, 1120), bits=4, group=32)
    copy, weight = rows.interleaved_copy(packed), plain(packed)
    assert copy is not None
    for m, dtype in ((529, torch.bfloat16), (40, torch.bfloat16), (529, torch.float32), (17, torch.float32)):
        x, bias = sample(m, 1120, seed=m, dtype=dtype), sample(168)
        check(copy.product(x, bias), x, weight, bias, (m, dtype), **bound(x))


def test_columns_that_x_lacks_are_zeros_whatever_memory_held() -> None:
    """Many rows of x are copied with whole blocks of 32 columns; codes of missing columns stand for other numbers than 0."""
    copy, k = rows.interleaved_copy(fp8_channel.quantize(sample(16, 100))), 100
    assert copy is not None and copy.columns == 128
    for dtype in (torch.float32, torch.bfloat16):
        name, x, arranged = f"arrange_{str(dtype)[6:]}", sample(k, dtype=dtype), torch.full((160,), torch.nan, dtype=dtype)
        if hasattr(copy.functions, name):
            getattr(copy.functions, name)(*map(ctypes.c_void_p, (x.data_ptr(), arranged.data_ptr())), ctypes.c_int64(k))
            assert arranged[:k].equal(x) and not arranged[k:copy.columns].any()


def test_a_compiler_that_knows_no_bfloat16_makes_loops_without(monkeypatch: pytest.MonkeyPatch) -> None:
    load = library.load

    def old(source: str, options: tuple[str, ...] = ()) -> Any:
        if "-mavx512bf16" in options:
            raise library.NoCompiler("unrecognized command-line option")
        return load(source, options)

    monkeypatch.setattr(rows, "has_bfloat16", lambda: True)
    monkeypatch.setattr(library, "load", old)
    packed = q4_0.quantize(sample(48, 256))
    copy, weight = rows.interleaved_copy(packed), plain(packed)
    assert copy is not None and not hasattr(copy.functions, "gemm_bfloat16")
    for m in (3, 19):
        x = sample(m, 256, dtype=torch.bfloat16)
        check(copy.product(x, None), x, weight, what=m, terms=2)


def test_codes_and_scales_of_eight_bits_have_their_exact_values() -> None:
    """Of every code: x picks a column."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    packed = fp8_channel.pack({"q": codes.view(torch.float8_e4m3fn), "s": torch.ones(16)})
    copy, weight = rows.interleaved_copy(packed), plain(packed)
    assert copy is not None
    picked = torch.cat([copy.product(row, None) for row in torch.eye(256).split(4)]).t()
    finite = weight.isfinite().all(0)
    assert picked.isnan().all() and (~finite).sum() == 2         # a NaN in a row is in every sum
    weight[:, ~finite], codes[:, ~finite] = 0, 0
    packed = fp8_channel.pack({"q": codes.view(torch.float8_e4m3fn), "s": torch.ones(16)})
    copy = rows.interleaved_copy(packed)
    assert copy is not None and torch.equal(torch.cat([copy.product(row, None) for row in torch.eye(256).split(4)]).t(), weight)
    fields = nvfp4.unpack(nvfp4.quantize(sample(64, 64)))
    scales = nvfp4.pack({**fields, "e": torch.arange(256, dtype=torch.uint8).view(64, 4).view(fields["e"].dtype)})
    copy, weight = rows.interleaved_copy(scales), plain(scales)
    assert copy is not None and torch.equal(torch.cat([copy.product(row, None) for row in torch.eye(64).split(4)]).t(), weight)


def test_explain_lists_copies_among_the_ways_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer of a model has them, with times."""
    monkeypatch.setenv(kept.INTERLEAVE.variable, "auto")
    monkeypatch.setenv("QDSL_CPU_INT8", "1")
    choice = processors.explain_choice(processors.random_weight(q4_0.FORMAT, (64, 256), None, {}), 1, "bf16")
    assert [(own["kernel"], own["config"]) for own in choice["candidates"]] == [
        ("rows", {"INT8": 1}), ("rows", {}), ("plain", {"ROWS": 1}), ("decode", {}), ("tiles", {})]
    assert all(own["us"] > 0 for own in choice["candidates"])


# -- where they are used -----------------------------------------------------------------------------------------------


def test_linear_takes_them_and_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = q4_k.quantize(sample(200, 256))
    copy = rows.interleaved_copy(packed)
    assert copy is not None
    monkeypatch.setattr(rows, "SHARE", 1)
    for x in (sample(1, 256), sample(20, 256, dtype=torch.bfloat16), sample(9, 256)):
        products = []
        for threads in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            products.append(q4_k.linear(x, packed))
        assert torch.equal(*products) and torch.equal(products[0], copy.product(x, None))


def test_a_changed_weight_is_copied_again() -> None:
    """Tensors that are changed in place, replaced or loaded; a copy ends with its weight."""
    first, second, x = q4_0.quantize(sample(64, 256)), q4_0.quantize(sample(64, 256, seed=1)), sample(1, 256)
    wanted = q4_0.linear(x, second)
    q4_0.linear(x, first)
    first.tensors["blocks"].copy_(second.tensors["blocks"])
    assert torch.equal(q4_0.linear(x, first), wanted)
    module = q4_0.Linear(q4_0.quantize(sample(64, 256)))
    module.load_state_dict({"blocks": q4_0.quantize(sample(64, 256)).tensors["blocks"]})
    assert not torch.equal(module(x), wanted)
    module.load_state_dict({"blocks": second.tensors["blocks"]})
    assert torch.equal(module(x), wanted)
    module.blocks.data = q4_0.quantize(sample(64, 256)).tensors["blocks"]
    assert not torch.equal(module(x), wanted)
    del first, second, module
    gc.collect()
    assert not kept._entries


def test_tensors_of_inference_mode_are_read_as_they_are_stored() -> None:
    """They may change without a trace."""
    second, x = q4_0.quantize(sample(64, 256, seed=1)), sample(1, 256)
    with torch.inference_mode():
        packed = q4_0.quantize(sample(64, 256))
        q4_0.linear(x, packed)
        packed.tensors["blocks"].copy_(second.tensors["blocks"])
        torch.testing.assert_close(q4_0.linear(x, packed), q4_0.linear(x, second))


def test_a_setting_keeps_weights_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = q4_0.quantize(sample(64, 256))
    layers = torch.nn.Sequential(torch.nn.Linear(256, 64))
    model.quantize_model(layers, q4_0.FORMAT)
    for choice, has_copies in (("never", (False, False)), ("auto", (False, True)), ("always", (True, True))):
        monkeypatch.setenv(kept.INTERLEAVE.variable, choice)
        assert tuple(rows.interleaved_copy(weight) is not None for weight in (packed, layers[0].packed)) == has_copies
    assert q4_0.linear(sample(1, 256), packed).shape == (1, 64)
    monkeypatch.setenv(kept.INTERLEAVE.variable, "maybe")
    with pytest.raises(FormatError, match="QDSL_CPU_INTERLEAVE is auto, always or never, not 'maybe'"):
        rows.interleaved_copy(packed)
