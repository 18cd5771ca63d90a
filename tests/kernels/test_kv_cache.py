"""Paged caches: kernels against the reference, in Triton's interpreter and from their PTX, and the reference against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qdsl.generated import kivi, q8_0
from qdsl.kv_cache import CacheFormat, KVCache, allocate, attention, attention_reference, launch, load, store, store_reference
from qdsl.runtime import FormatError
from tests.kernels.kv_caches import (
    BLOCK_SIZE,
    FORMATS,
    GROUP,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    TABLES,
    empty,
    expected,
    queries,
    slots_of,
    tokens,
)
from tests.kernels.test_execute_kernels import lines
from tests.support.interpreter import INTERPRETED, guarded

SIZES = {"blocks": 4, "block_size": BLOCK_SIZE, "heads": HEADS, "head_dim": HEAD_DIM}
LENGTHS_OF = torch.tensor(LENGTHS, dtype=torch.int32)


def filled(name: str) -> KVCache:
    cache = empty(name)
    for step in tokens():
        store_reference(cache, *step)
    return cache


def differences(one: KVCache, other: KVCache) -> list[str]:
    """The tensors in which two caches differ."""
    pairs = [(f"{half} {name}", tensor, getattr(other, half).packed.tensors[name]) for half in ("keys", "values")
             for name, tensor in getattr(one, half).packed.tensors.items()]
    return [name for name, left, right in pairs if left.tolist() != right.tolist() and not torch.equal(left, right)]


@pytest.mark.skipif(not INTERPRETED, reason="the reference and the kernel on a GPU: bench.gpu")
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_stores_what_the_reference_does(name: str) -> None:
    reference, cache = empty(name), empty(name)
    assert launch.why_not_store(cache) == ""
    for k, v, slots, sequences in tokens():
        store_reference(reference, k, v, slots, sequences)
        for call in launch.store_calls(cache, k, v, slots, sequences):
            with guarded(*call.tensors):
                call.run()
    assert differences(reference, cache) == []
    assert reference.tail is None or torch.equal(reference.tail, cache.tail)


@pytest.mark.skipif(not INTERPRETED, reason="the reference and the kernel on a GPU: bench.gpu")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("name", "dtype", "splits"), [
    (name, (torch.bfloat16, torch.float16)[number % 2], 1 + number % 3) for number, name in enumerate(FORMATS)])
def test_the_kernel_attends_as_the_reference_does(name: str, dtype: torch.dtype, splits: int) -> None:
    cache, q = filled(name), queries(dtype)
    wanted, allowed = expected(q, cache)
    out = torch.full_like(q, torch.nan)
    assert launch.why_not_attend(cache, q) == ""
    for call in launch.attention_calls(q, cache, TABLES, LENGTHS_OF, out, splits=splits):
        with guarded(*call.tensors):
            call.run()
    assert bool(((out.float() - wanted).abs() <= allowed).all())


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs one line after the other")
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_tiles_within_a_page_and_a_sequence_of_no_tokens() -> None:
    cache, q = filled("int8_channel"), queries(torch.float16)
    out = torch.full_like(q, torch.nan)
    calls = list(launch.attention_calls(q, cache, TABLES, torch.tensor([70, 0], dtype=torch.int32), out, splits=2))
    replace(calls[0], constants={**calls[0].constants, "BT": 16}).run()
    calls[1].run()
    wanted, allowed = expected(q, cache)
    assert bool(((out.float() - wanted).abs() <= allowed)[0].all()) and not out[1].any()


@pytest.mark.parametrize("name", ["q8_0", "kivi"])
def test_the_reference_is_torchs_attention_of_what_is_decoded(name: str) -> None:
    cache, q = filled(name), queries(torch.float32)
    out = attention(q, cache, TABLES, LENGTHS_OF, scale=0.3)
    k, v = (half.transpose(0, 1)[None] for half in load(cache, slots_of(0, 0, 64), torch.float32))
    wanted = torch.nn.functional.scaled_dot_product_attention(q[:1, :, None], k, v, scale=0.3, enable_gqa=True)[0, :, 0]
    whole = attention_reference(q[:1], cache, TABLES[:1], torch.tensor([64]), 0.3)[0]
    assert torch.allclose(whole, wanted, atol=1e-5)
    assert out.shape == q.shape and not torch.allclose(out[0], wanted, atol=1e-3)


def test_kivi_has_the_numbers_of_its_formulas() -> None:
    """Keys per channel in groups of 32 tokens, values per token in groups of 32 channels; the open group stays as it is."""
    cache, k, v = empty("kivi"), *torch.randn(2, 70, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    store(cache, k, v, slots_of(0, 0, 70), torch.zeros(70, dtype=torch.int32))

    def quantized(x: torch.Tensor, axis: int) -> torch.Tensor:
        low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
        scale, low = ((high - low) / 3).half().float(), low.half().float()
        return ((x - low) / scale).round().clamp(0, 3) * scale + low

    keys, values = load(cache, slots_of(0, 0, 70), torch.float32)
    assert torch.equal(keys[:64], quantized(k[:64].unflatten(0, (2, 32)), 1).flatten(0, 1))
    assert torch.equal(values, quantized(v.unflatten(2, (4, 32)), 3).flatten(2))
    assert cache.tail is not None and torch.equal(cache.tail[0, :, :6].transpose(0, 1), k[64:].bfloat16())


def test_a_scale_of_all_rows_is_the_callers() -> None:
    cache = empty("fp8_tensor")
    k = torch.randn(4, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    store(cache, k, k, slots_of(0, 0, 4))
    scale = torch.tensor(0.01)
    assert torch.equal(load(cache, slots_of(0, 0, 4), torch.float32)[0], (k / scale).to(torch.float8_e4m3fn).float() * scale)


def test_rows_of_schemes_without_a_kernel_are_stored_by_the_reference() -> None:
    cache = allocate(CacheFormat("q6_k"), **{**SIZES, "head_dim": 256})
    k = torch.randn(3, 2, 256, generator=torch.Generator().manual_seed(3))
    store(cache, k, k, torch.tensor([7, 40, 100]))
    assert launch.why_not_store(cache) == "q6_k: its scheme has no kernel"
    from qdsl.generated import q6_k
    wanted = q6_k.dequantize(q6_k.quantize(k.flatten(0, 1)), torch.float32)
    assert torch.equal(load(cache, torch.tensor([7, 40, 100]), torch.float32)[1].flatten(0, 1), wanted)


@pytest.mark.parametrize(("choices", "message"), [
    ((CacheFormat("fp8_tensor"),), "all rows share the scale 's': give it"),
    ((CacheFormat("q8_0", numbers={"d": 1.0}),), "'d' is no number that all rows share; those are none"),
    ((CacheFormat(kivi, gn=32, gk=1), CacheFormat(q8_0)), "say how many sequences"),
    ((CacheFormat(q8_0), CacheFormat(kivi, gn=32, gk=1)), "values that share numbers among 32 tokens"),
    ((CacheFormat("hlane"),), "a row cannot be stored by itself"),
    ((CacheFormat("int_group", "pack_quantized", group=32),), "rows do not lie one by one"),
])
def test_caches_that_cannot_be(choices: tuple[CacheFormat, ...], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        allocate(*choices, **SIZES)


def test_groups_of_tokens_divide_blocks() -> None:
    with pytest.raises(FormatError, match="32 tokens share numbers, and blocks have 48"):
        allocate(CacheFormat(kivi, gn=32, gk=1), CacheFormat(q8_0), **{**SIZES, "block_size": 48}, sequences=1)


def test_tensors_that_do_not_fit() -> None:
    cache, k = empty("kivi"), torch.zeros(3, HEADS, HEAD_DIM)
    slots = torch.arange(3)
    with pytest.raises(FormatError, match="say which sequence"):
        store(cache, k, k, slots)
    with pytest.raises(FormatError, match=r"v is floats \[3, 2, 128\]"):
        store(cache, k, k[:2], slots, slots)
    with pytest.raises(FormatError, match="slots are int32"):
        store(cache, k, k, slots.float(), slots)
    with pytest.raises(FormatError, match="q is floats"):
        attention(torch.zeros(2, 3, HEAD_DIM), cache, TABLES, LENGTHS_OF)
    with pytest.raises(FormatError, match="2 queries need block_tables"):
        attention(torch.zeros(2, 4, HEAD_DIM), cache, TABLES[:1], LENGTHS_OF)


def test_what_no_kernel_attends_over() -> None:
    def why(cache: KVCache, dtype: torch.dtype = torch.bfloat16) -> str:
        return launch.why_not_attend(cache, torch.empty(1, cache.heads * GROUP, cache.head_dim, dtype=dtype))

    assert why(allocate("q8_0", **SIZES)) == ""
    assert why(allocate("q8_0", **SIZES), torch.float32) == "q is float32"
    assert why(allocate("q8_0", **{**SIZES, "head_dim": 96})) == "head_dim is 96"
    assert why(allocate("q8_0", **{**SIZES, "block_size": 24})) == "block_size is 24"
    assert why(allocate(CacheFormat("mlx", bits=4), **{**SIZES, "head_dim": 64})) == "a row of mlx.mlx has 8 units of codes"


def test_kernels_are_right_as_compiled() -> None:
    """Store has the reference's bytes, attention is within its bound, and the checkers find nothing; for sm_80 and sm_90."""
    executed = lines("tests.kernels.execute_kv_caches")
    assert {line["arch"] for line in executed} == {"sm_80", "sm_90"} and {line["name"] for line in executed} == {*FORMATS}
    assert [line for line in executed if line["different"] or not line["error"] <= 1 or line["findings"]] == []


def test_instructions_per_cached_byte() -> None:
    """The kernel as it is launched has at most 1.3 times the instructions of one by hand, in its best tile."""
    counted = lines("tests.kernels.gate_kv_caches")
    assert [(line["format"], line["q"]) for line in counted] == [("int8", "float16"), ("int8", "bfloat16"), ("fp8", "bfloat16")]
    assert [line for line in counted if line["derived"] > 1.3 * line["by_hand"] or line["derived"] > line["limit"]] == []

