"""Paged caches: kernels against the reference, in Triton's interpreter and from their PTX, and the reference against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qdsl.generated import kivi, q8_0
from qdsl.kv_cache import (
    CacheFormat,
    KVCache,
    allocate,
    attention,
    attention_reference,
    cache_launches,
    load,
    store,
    store_reference,
)
from qdsl.runtime import FormatError
from tests.kernels.kv_caches import (
    BLOCK_SIZE,
    FORMATS,
    GROUP,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    SHARED,
    TABLES,
    Dims,
    allocated,
    dims_of,
    empty,
    expected,
    queries,
    slots_of,
    tokens,
)
from tests.kernels.test_execute_kernels import lines
from tests.support.covering import quarter_of
from tests.support.interpreter import INTERPRETED, guarded

SIZES = {"blocks": 4, "block_size": BLOCK_SIZE, "heads": HEADS, "head_dim": HEAD_DIM}
LENGTHS_OF = torch.tensor(LENGTHS, dtype=torch.int32)


def filled(name: str) -> KVCache:
    cache = empty(name)
    for step in tokens(dims_of(name)):
        store_reference(cache, *step)
    return cache


def assert_attends(cache: KVCache, q: torch.Tensor, splits: int) -> None:
    """The kernel in Triton's interpreter is within its bound of the reference."""
    wanted, allowed = expected(q, cache)
    out = torch.full_like(wanted, torch.nan, dtype=q.dtype)
    assert cache_launches.why_not_attend(cache, q) == ""
    for call in cache_launches.attention_calls(q, cache, TABLES, LENGTHS_OF, out, splits=splits):
        with guarded(*call.tensors):
            call.run()
    assert bool(((out.float() - wanted).abs() <= allowed).all())


def differences(one: KVCache, other: KVCache) -> list[str]:
    """The tensors in which two caches differ."""
    pairs = [(f"{half} {name}", tensor, getattr(other, half).packed.tensors[name]) for half in ("keys", "values")
             for name, tensor in getattr(one, half).packed.tensors.items()]
    return [name for name, left, right in pairs if left.tolist() != right.tolist() and not torch.equal(left, right)]


@pytest.mark.skipif(not INTERPRETED, reason="the reference and the kernel on a GPU: bench.gpu")
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_stores_what_the_reference_does(name: str) -> None:
    reference, cache = empty(name), empty(name)
    assert cache_launches.why_not_store(cache) == ""
    for k, v, slots, sequences in tokens(dims_of(name)):
        store_reference(reference, k, v, slots, sequences)
        for call in cache_launches.store_calls(cache, k, v, slots, sequences):
            with guarded(*call.tensors):
                call.run()
    assert differences(reference, cache) == []
    assert reference.tail is None or torch.equal(reference.tail, cache.tail)


@pytest.mark.skipif(not INTERPRETED, reason="the reference and the kernel on a GPU: bench.gpu")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("name", "dtype", "splits"), [
    (name, (torch.bfloat16, torch.float16)[number % 2], 1 + number % 3) for number, name in enumerate(FORMATS)])
def test_the_kernel_attends_as_the_reference_does(name: str, dtype: torch.dtype, splits: int) -> None:
    assert_attends(filled(name), queries(dtype, dims_of(name)), splits)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs one line after the other")
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_tiles_within_a_page_and_a_sequence_of_no_tokens() -> None:
    cache, q = filled("int8_channel"), queries(torch.float16)
    out = torch.full_like(q, torch.nan)
    calls = list(cache_launches.attention_calls(q, cache, TABLES, torch.tensor([70, 0], dtype=torch.int32), out, splits=2))
    replace(calls[0], constants={**calls[0].constants, "BT": 16}).run()
    calls[1].run()
    wanted, allowed = expected(q, cache)
    assert bool(((out.float() - wanted).abs() <= allowed)[0].all()) and not out[1].any()


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs one line after the other")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("name", "dims"), [("q8_0", Dims(2, 128, 64)), ("int8", Dims(2, 64, 64)), ("q8_0", Dims(1, 64, 16, 20))])
def test_values_that_are_the_first_channels_of_keys(name: str, dims: Dims) -> None:
    """Of any format: they are read from the memory of keys, and no second copy of them is stored."""
    cache, apart = allocated(SHARED[name], dims), allocated(SHARED[name], Dims(dims.heads, dims.head_dim))
    assert 2 * cache.nbytes == apart.nbytes
    for k, v, slots, sequences in tokens(dims):
        assert v is None
        store_reference(cache, k, v, slots, sequences)
        store_reference(apart, k, k, slots, sequences)
    q = queries(torch.bfloat16, dims)
    assert torch.equal(attention_reference(q, cache, TABLES, LENGTHS_OF),
                       attention_reference(q, apart, TABLES, LENGTHS_OF)[..., :dims.value_dim])
    assert_attends(cache, q, 2)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs one line after the other")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", ["fp8_channel", "int8_channel"])
def test_values_whose_scales_float16_holds_badly(name: str) -> None:
    """Of values below 2^-11: p times a scale of 2^-20 would have 4 bits in float16."""
    cache = empty(name)
    for k, v, slots, sequences in tokens():
        assert v is not None
        store_reference(cache, k, v * 2.0 ** -16, slots, sequences)
    assert_attends(cache, queries(torch.float16), 1)


def test_rows_of_latent_attention_by_vllms_rule() -> None:
    """A scale is the largest magnitude of 128 numbers over 448, and the least normal float32 at least; rotary numbers stay."""
    cache = allocate("fp8_ds_mla", blocks=2, block_size=64, heads=1, head_dim=576, value_dim=512)
    x = torch.randn(5, 1, 576, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, 5)[:, None, None]
    x[0, 0, :128], x[1, 0, 128:256] = 0, 1e-40
    x, slots = x.bfloat16(), torch.tensor([3, -1, 64, 127, 0])
    store(cache, x, None, slots)
    stored = cache.keys.packed.tensors["kv_c_and_k_pe"]
    assert list(stored.shape) == [128, 656] and cache.nbytes == 128 * 656
    for row, slot in zip(x[:, 0], slots.tolist(), strict=True):
        latent = row[:512].float().view(4, 128)
        scale = torch.clamp(latent.abs().amax(1) / 448, min=torch.finfo(torch.float32).tiny)
        codes = (latent / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        wanted = torch.cat([codes.flatten().view(torch.uint8), scale.view(torch.uint8), row[512:].view(torch.uint8)])
        assert slot < 0 or torch.equal(stored[slot], wanted)
    k, v = load(cache, torch.tensor([127]), torch.bfloat16)
    assert torch.equal(v, k[..., :512]) and torch.equal(k[..., 512:], x[3:4, :, 512:])


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
    assert cache_launches.why_not_store(cache) == "q6_k: its scheme has no kernel"
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
    ((CacheFormat("fp8_ds_mla"),), r"it is for weights with K = 512, not \[32, 64\], and 64 channels behind them"),
])
def test_caches_that_cannot_be(choices: tuple[CacheFormat, ...], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        allocate(*choices, **SIZES)


def test_values_that_cannot_be_channels_of_keys() -> None:
    with pytest.raises(FormatError, match="the first 64 of 128 channels of keys have the format of keys"):
        allocate("q8_0", "q4_0", value_dim=64, **SIZES)
    with pytest.raises(FormatError, match="at most the 128 channels of keys, and at least one, not 129"):
        allocate("q8_0", value_dim=129, **SIZES)
    with pytest.raises(FormatError, match="values that share numbers among 32 tokens"):
        allocate(CacheFormat(kivi, gn=32, gk=1), value_dim=64, sequences=1, **SIZES)
    with pytest.raises(FormatError, match=r"head_dim is 64 and fp8_ds_mla\.rows has 64 channels behind its columns"):
        allocate("fp8_ds_mla", value_dim=64, **{**SIZES, "head_dim": 64})
    cache, k, slots = allocated((CacheFormat("q8_0"), None), Dims(2, 128, 64)), torch.zeros(3, HEADS, HEAD_DIM), torch.arange(3)
    with pytest.raises(FormatError, match="values are the first 64 channels of keys: v is None"):
        store(cache, k, k, slots)
    with pytest.raises(FormatError, match="v is None, and values are not channels of keys"):
        store(empty("q8_0"), k, None, slots)


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
        return cache_launches.why_not_attend(cache, torch.empty(1, cache.heads * GROUP, cache.head_dim, dtype=dtype))

    assert why(allocate("q8_0", **SIZES)) == ""
    assert why(allocate("q8_0", **SIZES), torch.float32) == "q is float32"
    assert why(allocate("q8_0", **{**SIZES, "head_dim": 96})) == "head_dim is 96"
    assert why(allocate("q8_0", **{**SIZES, "block_size": 24})) == "block_size is 24"
    assert why(allocate("q8_0", value_dim=96, **SIZES)) == "value_dim is 96"
    latent = {**SIZES, "head_dim": 576}
    assert why(allocate("fp8_ds_mla", value_dim=512, **latent)) == ""
    assert why(allocate("fp8_ds_mla", value_dim=576, **latent)) == "value_dim is 576"
    assert why(allocate(CacheFormat("mlx", bits=4), **{**SIZES, "head_dim": 64})) == "a row of mlx.mlx has 8 units of codes"


def test_kernels_are_right_as_compiled() -> None:
    """Store has the reference's bytes, attention is within its bound, and the checkers find nothing; for sm_80 and sm_90."""
    executed = lines("tests.kernels.execute_kv_caches")
    assert {line["arch"] for line in executed} == {"sm_80", "sm_90"} and {line["name"] for line in executed} == {*FORMATS}
    assert [line for line in executed if line["different"] or not line["error"] <= 1 or line["findings"]] == []


def test_instructions_per_cached_byte() -> None:
    """The kernel as it is launched has at most 1.3 times the instructions of one by hand, in its best tile."""
    counted = lines("tests.kernels.gate_kv_caches")
    assert [(line["format"], line["q"]) for line in counted] == quarter_of([
        ("int8", "float16"), ("int8", "bfloat16"), ("fp8", "bfloat16"), ("latent", "bfloat16")])
    assert [line for line in counted if line["derived"] > 1.3 * line["by_hand"] or line["derived"] > line["limit"]] == []

