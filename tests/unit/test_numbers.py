"""Scalar types: every code by three decoders and the packages that define it, and every half-precision value rounded."""

from __future__ import annotations

import math
import struct
from functools import cache

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdsl.core.numbers import FLOATS, KNOWN_TYPES, find_number, number, round_to_f32, similar_type
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.weight import numbers as runtime
from tests.support.paths import ROOT
from tests.support.quick import QUICK, examples

PROPERTY = settings(max_examples=examples(200), deadline=None, derandomize=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GOLDEN = {path.stem: np.load(path, allow_pickle=False) for path in (ROOT / "tests" / "data" / "numbers").glob("*.npz")}
ML_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz",
             "e8m0": "float8_e8m0fnu", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn", "e2m1": "float4_e2m1fn"}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz,
         "e5m2fnuz": torch.float8_e5m2fnuz, "e8m0": torch.float8_e8m0fnu}
SMALL = [*ML_DTYPES, "ue4m3"]
BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
HALVES = torch.arange(65536, dtype=torch.int32).to(torch.uint16)


def same(decoded: Tensor, wanted: Tensor) -> bool:
    """Whether float32 tensors have the same bits; all NaN are one."""
    assert decoded.dtype == wanted.dtype == torch.float32 and decoded.shape == wanted.shape
    nan = wanted.isnan()
    return decoded.isnan().equal(nan) and decoded[~nan].view(torch.int32).equal(wanted[~nan].view(torch.int32))


@cache
def table(name: str) -> Tensor:
    """The float32 of each byte by ml_dtypes, for types of fewer bits by their low bits."""
    if name == "ue4m3":                                          # defined by E4M3, but for its sign and its two NaN
        return torch.cat([table("e4m3")[:127], torch.zeros(1), table("e4m3")[:127], torch.full((1,), 480.0)])
    values = torch.from_numpy(GOLDEN["fp_tables"][ML_DTYPES[name]])
    return values.repeat(256 // len(values))


def codes(name: str) -> range:
    """The codes that values are rounded to; those of ue4m3 from 0x7F say what others say, and no writer uses them."""
    return range(127 if name == "ue4m3" else 1 << FLOATS[name].bits)


# -- decoding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_python_decodes_every_code(name: str) -> None:
    kind = FLOATS[name]
    values = torch.tensor([kind.decode(code) for code in range(1 << kind.bits)], dtype=torch.float64)
    assert same(values.float(), table(name)[:1 << kind.bits])
    assert values[~values.isnan()].equal(values[~values.isnan()].float().double()), "a value is not a float32"


@pytest.mark.parametrize("name", SMALL)
def test_torch_decodes_every_byte(name: str) -> None:
    """Bits above those of the type are ignored, and the codes are left as they are."""
    stored = BYTES.clone()
    assert same(getattr(runtime, name)(stored), table(name))
    assert stored.equal(BYTES)


@pytest.mark.parametrize("name", TORCH)
def test_torch_decodes_its_own_types(name: str) -> None:
    stored = BYTES.clone().view(TORCH[name])
    assert same(getattr(runtime, name)(stored), table(name))
    assert stored.view(torch.uint8).equal(BYTES)


@pytest.mark.parametrize("name", SMALL)
def test_a_code_alone_decodes_as_it_does_among_others(name: str) -> None:
    """The special codes are looked for only where they can be."""
    decode = getattr(runtime, name)
    assert same(torch.cat([decode(BYTES[i:i + 1]) for i in range(256)]), table(name))
    assert decode(BYTES[:0]).shape == (0,)
    assert same(decode(BYTES.view(16, 16).t()), table(name).view(16, 16).t())


@triton.jit
def _decode_bytes(stored, out, decode: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, decode(tl.load(stored + at)))


@pytest.mark.parametrize("name", SMALL)
def test_kernels_decode_every_byte(name: str) -> None:
    out = torch.empty(256, device=DEVICE)
    _decode_bytes[(1,)](BYTES.to(DEVICE), out, getattr(device, name))
    assert same(out.cpu(), table(name))


@pytest.mark.parametrize("name", TORCH)
def test_torch_itself_has_the_same_values(name: str) -> None:
    assert same(BYTES.clone().view(TORCH[name]).float(), table(name))
    assert same(torch.from_numpy(GOLDEN["fp_tables"][f"torch.{ML_DTYPES[name]}"]), table(name))


@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_decode_as_torch_decodes_them(name: str, dtype: torch.dtype) -> None:
    values = torch.tensor([FLOATS[name].decode(code) for code in range(65536)], dtype=torch.float32)
    assert same(values, HALVES.view(dtype).float())


@PROPERTY
@given(st.integers(0, (1 << 32) - 1))
def test_f32_decodes_as_struct_does(code: int) -> None:
    wanted = struct.unpack("<f", code.to_bytes(4, "little"))[0]
    decoded = FLOATS["f32"].decode(code)
    assert math.isnan(decoded) if math.isnan(wanted) else struct.pack("<d", decoded) == struct.pack("<d", wanted)


# -- rounding ------------------------------------------------------------------------------------------------------------


@cache
def halves(name: str) -> np.ndarray:
    """Every finite value of a half-precision type, as float64."""
    values = HALVES.view({"f16": torch.float16, "bf16": torch.bfloat16}[name]).double().numpy()
    return values[np.isfinite(values)]


def rounded(name: str, x: np.ndarray) -> np.ndarray:
    """The nearest codes, found among all values of the type; float64 holds every value and every midpoint exactly."""
    kind = FLOATS[name]
    values = table(name)[codes(name)].double().numpy()
    values = values[:1 << kind.bits - kind.signed]
    values = values[np.isfinite(values)]                         # past the largest value there is no code: cut
    middles = (values[1:] + values[:-1]) / 2
    size = np.abs(x) if kind.signed else np.maximum(x, 0)
    code = np.searchsorted(middles, size)
    tie = size == np.append(middles, np.inf)[code]
    code += tie & (code % 2 == 1) if kind.mantissa else tie       # to even codes; powers of two upward
    if not kind.signed:
        return code
    minus = np.signbit(x) & ((code > 0) | (kind.specials != "fnuz"))
    return code | minus << kind.bits - 1


@pytest.mark.parametrize("halves_of", ["f16", "bf16"])
@pytest.mark.parametrize("name", SMALL)
def test_python_rounds_every_half_to_the_nearest_code(name: str, halves_of: str) -> None:
    x = halves(halves_of)[::7 if QUICK else 1]                   # of all signs, exponents and ends of mantissas
    codes = np.array([FLOATS[name].encode(value) for value in x.tolist()])
    wrong = (codes != rounded(name, x)).nonzero()[0]
    assert not len(wrong), [(x[i], codes[i], rounded(name, x[i:i + 1])[0]) for i in wrong[:4]]


@pytest.mark.parametrize("halves_of", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_torch_rounds_every_half_to_the_nearest_code(name: str, halves_of: str) -> None:
    x = halves(halves_of)
    values = torch.from_numpy(x).float()
    codes = runtime.to_minifloat(values, name)
    assert codes.dtype == TORCH.get(name, torch.uint8)
    assert codes.view(torch.uint8).numpy().tolist() == rounded(name, x).tolist()
    assert values.double().equal(torch.from_numpy(x)), "the values were changed"


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_ties_go_to_zero_where_that_is_asked(name: str) -> None:
    """Half-way between neighbours, and next to it on either side."""
    values = torch.tensor([FLOATS[name].decode(code) for code in range(1 << FLOATS[name].bits - 1)])
    values = values[values.isfinite()]
    middle = (values[1:] + values[:-1]) / 2
    codes = torch.arange(len(middle), dtype=torch.uint8)
    sign = 1 << FLOATS[name].bits - 1
    above, below = torch.nextafter(middle, values[1:]), torch.nextafter(middle, values[:-1])
    for x, wanted in ((middle, codes), (above, codes + 1), (below, codes)):
        assert runtime.to_minifloat(x, name, "zero").view(torch.uint8).equal(wanted)
        assert runtime.to_minifloat(-x, name, "zero").view(torch.uint8).equal(wanted | sign)


@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m1"])
def test_torch_cuts_infinities_to_the_largest(name: str) -> None:
    largest = (1 << FLOATS[name].bits - 1) - 1
    codes = runtime.to_minifloat(torch.tensor([math.inf, -math.inf]), name)
    assert codes.tolist() == [largest, largest | 1 << FLOATS[name].bits - 1]


@pytest.mark.parametrize("name", TORCH)
def test_torch_itself_rounds_every_half_to_the_same_code(name: str) -> None:
    """In range of the type; torch 2.13 rounds subnormal float32 up to the next power of two, however near the lower one is."""
    x = np.concatenate([halves("f16"), halves("bf16")])
    x = x[np.abs(x) <= FLOATS[name].largest]
    if name == "e8m0":
        x = x[x >= 2.0 ** -126]
    codes = torch.from_numpy(x).float().to(TORCH[name]).view(torch.uint8)
    assert codes.numpy().tolist() == rounded(name, x).tolist()


@pytest.mark.parametrize("name", [name for name, other in ML_DTYPES.items() if f"x.{other}" in GOLDEN["fp_round"]])
def test_ml_dtypes_rounds_to_the_same_codes(name: str) -> None:
    x, wanted = (GOLDEN["fp_round"][f"{what}.{ML_DTYPES[name]}"] for what in ("x", "code"))
    assert [FLOATS[name].encode(value) for value in x.tolist()] == wanted.tolist()
    assert rounded(name, x.astype(np.float64)).tolist() == wanted.tolist()
    if name in ("e3m2", "e2m3", "e2m1"):
        assert runtime.to_minifloat(torch.from_numpy(x), name).tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("package", ["torch_to", "ml"])
def test_known_casts(name: str, package: str) -> None:
    x, wanted = GOLDEN["fp8_casts"]["x"], GOLDEN["fp8_casts"][f"{package}.{ML_DTYPES[name]}"]
    within = np.abs(x) <= FLOATS[name].largest
    assert 12 < within.sum() < len(x)
    assert [FLOATS[name].encode(value) for value in x[within].tolist()] == wanted[within].tolist()


def test_e4m3_is_cut_to_its_largest_as_torch_cuts_it() -> None:
    x, wanted = GOLDEN["fp8_casts"]["x"], GOLDEN["fp8_casts"]["torch_to.float8_e4m3fn"]
    finite = np.isfinite(x)
    assert [FLOATS["e4m3"].encode(value) for value in x[finite].tolist()] == wanted[finite].tolist()


@pytest.mark.parametrize("package", ["torch", "ml"])
def test_known_casts_to_powers_of_two(package: str) -> None:
    x, wanted = GOLDEN["fp8_casts"]["e8.x"], GOLDEN["fp8_casts"][f"e8.{package}"]
    within = (x > 0) & (x < 1.5 * 2.0 ** 127)
    assert within.sum() == 13
    assert [FLOATS["e8m0"].encode(value) for value in x[within].tolist()] == wanted[within].tolist()


@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_round_as_torch_rounds_them(name: str, dtype: torch.dtype) -> None:
    """Every value of the other half-precision type, cut to the largest."""
    x = torch.from_numpy(halves({"f16": "bf16", "bf16": "f16"}[name])).float()
    largest = torch.finfo(dtype).max
    wanted = x.clamp(-largest, largest).to(dtype).view(torch.uint16)
    assert [FLOATS[name].encode(value) for value in x.tolist()] == wanted.tolist()


@PROPERTY
@given(st.floats(-3.4e38, 3.4e38, width=64))
def test_f32_rounds_as_struct_does(value: float) -> None:
    code = struct.pack("<f", value)
    assert FLOATS["f32"].encode(value).to_bytes(4, "little") == code
    assert struct.pack("<d", round_to_f32(value)) == struct.pack("<d", struct.unpack("<f", code)[0])


@pytest.mark.parametrize("name", [*SMALL, "f16", "bf16"])
def test_every_finite_code_survives(name: str) -> None:
    kind = FLOATS[name]
    finite = [code for code in codes(name) if math.isfinite(kind.decode(code))]
    assert [kind.encode(kind.decode(code)) for code in finite] == finite


@pytest.mark.parametrize("name", [*SMALL, "f16", "bf16"])
def test_values_past_the_largest_are_cut_to_it(name: str) -> None:
    kind = FLOATS[name]
    assert kind.largest == max(value for code in codes(name) if math.isfinite(value := kind.decode(code)))
    assert kind.decode(kind.encode(1e300)) == kind.largest
    assert kind.decode(kind.encode(-1e300)) == (-kind.largest if kind.signed else kind.decode(0))


def test_the_largest_f32_is_that_of_ieee() -> None:
    assert FLOATS["f32"].largest == float(np.finfo(np.float32).max)


@pytest.mark.parametrize("name", [*FLOATS, "u4", "i4"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_code(name: str, value: float) -> None:
    kind = number(name)
    with pytest.raises(ValueError, match=f"has no code in {name}"):
        kind.encode(value)


@pytest.mark.parametrize("name", [*FLOATS, "u4", "i4"])
def test_a_code_of_too_many_bits_is_refused(name: str) -> None:
    kind = number(name)
    for code in (-1, 1 << kind.bits):
        with pytest.raises(ValueError, match="does not fit"):
            kind.decode(code)


# -- integers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 13))
@pytest.mark.parametrize("sign", "ui")
def test_integers_are_counted_in_twos_complement(bits: int, sign: str) -> None:
    kind = find_number(f"{sign}{bits}")
    if sign == "i" and bits == 1:
        assert kind is None
        return
    assert kind is not None
    values = list(range(1 << bits)) if sign == "u" else [*range(1 << bits - 1), *range(-(1 << bits - 1), 0)]
    assert [kind.decode(code) for code in range(1 << bits)] == values
    assert [kind.encode(value) for value in values] == list(range(1 << bits))
    assert (kind.low, kind.high, kind.largest, kind.is_float) == (min(values), max(values), max(values), False)


@PROPERTY
@given(st.sampled_from(("u1", "u3", "u8", "i2", "i4", "i8")), st.integers(-1200, 1200))
def test_integers_round_to_nearest_even_and_are_cut(name: str, eighths: int) -> None:
    kind = number(name)
    value = eighths / 8
    nearest = min(range(kind.low, kind.high + 1), key=lambda i: (abs(i - value), i % 2))
    assert kind.decode(kind.encode(value)) == nearest


def test_names_of_types() -> None:
    names = {*FLOATS, "u32", *(f"u{bits}" for bits in range(1, 17)), *(f"i{bits}" for bits in range(2, 33))}
    odd = {"", "u", "i", "u0", "i0", "u04", "u4 ", " u4", "u4\n", "U4", "u4i4", "u-4", "f8", "e4m3fn", "int8", "u٤"}
    tried = {f"{sign}{bits}" for sign in "uif" for bits in range(120)} | names | odd
    accepted = {name for name in tried if find_number(name) is not None}
    assert accepted == names
    assert all(number(name).name == name for name in names)


def test_widths_of_floats() -> None:
    assert {name: kind.bits for name, kind in FLOATS.items()} == {
        "f32": 32, "f16": 16, "bf16": 16, "e3m2": 6, "e2m3": 6, "e2m1": 4,
        **dict.fromkeys(("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0", "e8m0h", "ue4m3"), 8)}
    assert all(kind.is_float for kind in FLOATS.values())


def test_types_of_other_languages_are_told() -> None:
    """torch's names, C's and numpy's integers, other letters; the message lists every float."""
    assert all(similar_type(kind.torch) == name for name, kind in FLOATS.items() if kind.torch)
    for bits in (2, 3, 4, 8, 16):
        assert {similar_type(text) for text in (f"uint{bits}", f"uint{bits}_t", f"U{bits}", f"ui{bits}")} == {f"u{bits}"}
        assert {similar_type(text) for text in (f"int{bits}", f"int{bits}_t", f"I{bits}", f"s{bits}")} == {f"i{bits}"}
    assert all(similar_type(name.upper()) == name and f" {name}" in KNOWN_TYPES and find_number(name) for name in FLOATS)
    assert [similar_type(word) for word in ("fp16", "half", "e4m3fn", "fp8_e4m3fn")] == ["f16", "f16", "e4m3", "e4m3"]
    assert similar_type("int64") == similar_type("complex") == similar_type("u17") == ""
