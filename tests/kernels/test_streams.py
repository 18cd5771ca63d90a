"""Kernels of entropy codes: bit for bit what qdsl/codecs decodes, and within bounds where streams are damaged."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import qdsl
from qdsl.codecs.huffman_lanes import launch as huffman_lanes
from qdsl.jobs.compress import df11
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.product import product as gpu_product
from qdsl.runtime.torch import linear
from qdsl.runtime.torch.ops import operation_arguments, weight_key
from qdsl.runtime.weight import stream_kernels
from tests.support.covering import ALL, quarter_of
from tests.support.interpreter import INTERPRETED, guarded
from tests.support.paths import ROOT

DEVICE = "cpu" if INTERPRETED else "cuda"
DATA = ROOT / "tests" / "data" / "df11"
GROUPS = {case["name"]: case for case in json.loads((DATA / "manifest.json").read_text()) if case["status"] == "ok"}
LONG = ("fibonacci_4level", "random_50sym_T8", "fibonacci_3level")
PATTERNS = (np.arange(65536) * 40503 % 65536).astype(np.uint16)
FORMS = ("df11", "hlane", "fix4", "fix3")
TIMES = 100 if ALL else 6                                        # that a tensor is damaged


def normal(n: int, k: int, seed: int = 0) -> NDArray[np.uint16]:
    values = np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def numbers(patterns: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)


def packed(form: str, patterns: NDArray[np.uint16]) -> PackedWeight:
    weight: PackedWeight = importlib.import_module(f"qdsl.generated.{form}").pack({"v": numbers(patterns)})
    return ready(weight.to(DEVICE))


def ready(weight: PackedWeight) -> PackedWeight:
    """With a table where a launch would copy it to, so that only what the weight holds is touched."""
    if "table" in weight.tensors:
        weight.tensors["table"] = huffman_lanes.align_table(weight.tensors["table"])
    return weight


def exponents(weight: PackedWeight) -> torch.Tensor:
    """The exponents that kernels find."""
    streamed, calls = stream_kernels.decoded_with_calls(weight)
    with guarded(*weight.tensors.values(), *streamed.tensors.values()):
        for call in calls:
            call.run()
    return streamed.tensors["exponents"].cpu()


def dequantized(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = torch.zeros(weight.shape, dtype=dtype, device=DEVICE)
    if stream_kernels.has_dequantize(weight, out):
        with guarded(*weight.tensors.values(), out):
            launch.dequantize(weight, out)
    else:                                                        # by way of memory of its own
        launch.dequantize(weight, out)
    return out.cpu()


def same_bits(tensor: torch.Tensor, patterns: NDArray[np.uint16]) -> bool:
    return np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), patterns)


# Decoding

@pytest.mark.parametrize("name", [name for name in GROUPS if ALL or name not in LONG])
def test_groups_of_the_package(name: str) -> None:
    """Every end of a stream, tables of up to four rows, all numbers of threads."""
    with np.load(DATA / f"{name}.npz") as file:
        tensors = {key: torch.from_numpy(file[key]) for key in file.files if key in df11.NAMES}
    weight = importlib.import_module("qdsl.generated.df11").wrap(tensors, shape=(1, len(tensors["sign_mantissa"])))
    assert torch.equal(exponents(weight.to(DEVICE)), weight.decode_streams().tensors["exponents"])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_weight(form: str, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 150))
    seed = data.draw(st.integers(0, 2**32 - 1))
    least = 15360 if form == "df11" else 65536                   # exponents from 240 on, which df11 cannot hold
    draw = {"any": lambda: np.random.default_rng(seed).integers(0, least, (n, k)).astype(np.uint16),
            "constant": lambda: np.full((n, k), seed % least, np.uint16), "normal": lambda: normal(n, k, seed)}
    patterns = draw[data.draw(st.sampled_from(sorted(draw)))]()
    weight = packed(form, patterns)
    assert torch.equal(exponents(weight), weight.to("cpu").decode_streams().tensors["exponents"])
    assert same_bits(dequantized(weight), patterns)


@pytest.mark.parametrize("form", ["hlane", "fix4", "fix3"])
@pytest.mark.parametrize("shape", [(512, 128), (32, 2048), (16, 4096), (8, 8192)])
def test_every_pattern(form: str, shape: tuple[int, int]) -> None:
    """One lane for a row, four, eight, and two chunks; NaNs keep their bits."""
    patterns = PATTERNS.reshape(shape)
    weight = packed(form, patterns)
    assert stream_kernels.has_dequantize(weight, torch.empty(shape, dtype=torch.bfloat16, device=DEVICE))
    assert same_bits(dequantized(weight), patterns)
    finite = numbers(np.where(patterns >> 7 & 255 == 255, 0, patterns).astype(np.uint16))
    assert torch.equal(dequantized(packed(form, finite.view(torch.int16).numpy().view(np.uint16)), torch.float32), finite.float())


@pytest.mark.skipif(not ALL, reason="takes half a minute")
def test_chunks_without_a_run() -> None:
    """Of a row so long that the last of its chunks have nothing to hold."""
    patterns = np.resize(PATTERNS, (1, 270464))
    weight = packed("hlane", patterns)
    assert torch.equal(exponents(weight), weight.to("cpu").decode_streams().tensors["exponents"])
    assert same_bits(dequantized(weight), patterns)


@pytest.mark.parametrize("form", ["hlane", "fix4", "fix3"])
def test_ragged_weights_and_uneven_chunks(form: str) -> None:
    for shape in ((21, 384), (3, 8320), (19, 2176)):
        patterns = normal(*shape)
        assert same_bits(dequantized(packed(form, patterns)), patterns)


# Products

def product(weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype, device=DEVICE)
    assert stream_kernels.has_skinny(x, weight)
    with guarded(*weight.tensors.values(), x, bias, out):
        launch.linear(x, weight, bias, out)
    return out


def wrong_by(product: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None,
             eps: float = 2.0**-8) -> float:
    """The error over what one rounding of the result and sums of float32 allow."""
    wide = x.cpu().double(), w.double()
    wanted = wide[0] @ wide[1].T + (0 if bias is None else bias.cpu().double())
    allowed = wanted.abs() * eps + wide[0].abs() @ wide[1].abs().T * w.shape[1] * 2.0**-24 + 1e-30
    return float(((product.cpu().double() - wanted).abs() / allowed).max())


def tokens(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize(("form", "shape", "m"), [
    ("fix4", (33, 384), 3), ("fix4", (40, 2176), 16), ("fix4", (16, 128), 1), ("fix4", (5, 1024), 11),
    ("hlane", (33, 2176), 3), ("hlane", (13, 2048), 16), ("hlane", (13, 4096), 9), ("hlane", (9, 4224), 1),
    ("hlane", (5, 8320), 2)])
def test_few_rows(form: str, shape: tuple[int, int], m: int) -> None:
    patterns = normal(*shape)
    patterns[1, 3:30] = 0                                        # patches of a row, and the first of the next
    patterns[2, 0] = 0x4180
    x, bias = tokens(m, shape[1]), tokens(1, shape[0])[0]
    weight = packed(form, patterns)
    assert wrong_by(product(weight, x, bias), x, numbers(patterns), bias) <= 1
    alone = product(weight, x[:1].contiguous(), bias)
    assert torch.equal(alone[0], product(weight, x, bias)[0])    # a row does not depend on those beside it


@pytest.mark.parametrize("form", ["hlane", "fix4", "fix3"])
def test_columns_of_the_weight_come_out_as_they_are(form: str) -> None:
    """x with a single 1: also where a patch stands, and nothing but it counts."""
    patterns = normal(16, 2048)
    patterns[:, 5], patterns[3, 100] = 0x0001, 0x7F7F
    x = torch.zeros(4, 2048, dtype=torch.bfloat16, device=DEVICE)
    columns = [0, 5, 100, 2047]
    x[range(4), columns] = 1
    columns_out = product(packed(form, patterns), x).cpu()
    assert same_bits(columns_out.t().contiguous(), np.ascontiguousarray(patterns[:, columns]))


def test_infinite_x_at_patches() -> None:
    """It meets the weight itself there: infinite of its sign, and NaN where that is 0 or no number."""
    patterns = normal(16, 256)
    patterns[:6, 100] = 0x4180, 0xC180, 0x0001, 0x0000, 0x7F80, 0x7FC0
    x = torch.zeros(5, 256, dtype=torch.bfloat16, device=DEVICE)
    x[range(4), [100, 100, 7, 100]] = torch.tensor([1, -1, 1, torch.nan], dtype=x.dtype, device=DEVICE) * torch.inf
    x[4, 6:8] = torch.tensor([1, -1], dtype=x.dtype, device=DEVICE) * torch.inf
    result = product(packed("fix4", patterns), x).cpu()
    wanted = x.cpu().float() @ numbers(patterns).float().T
    assert torch.equal(result.isnan(), wanted.isnan()) and torch.equal(result.isinf(), wanted.isinf())
    assert torch.equal(result[result.isinf()].sign(), wanted[wanted.isinf()].sign()) and result.isinf().sum() > 40
    low = np.full((16, 256), 0x0010, np.uint16)
    low[3, 5] = 0x3F80
    assert not stream_kernels.has_skinny(x, packed("fix4", low))           # what its code says could be 0


def test_rows_of_patches_are_decoded_first() -> None:
    """Where most columns of a row are patches their codes decide no product."""
    patterns = normal(32, 256)
    patterns[7] = 0
    weight = packed("fix4", patterns)
    x = tokens(2, 256)
    assert "patches=256" in weight.stream_info and not stream_kernels.has_skinny(x, weight)
    assert not gpu_product(x, weight, None, "", False)[:, 7].any()


@pytest.mark.parametrize("form", FORMS)
def test_other_rows_meet_the_decoded_weight(form: str) -> None:
    """Many rows, another type of x, columns that are no whole lines, and rows that must not vary."""
    patterns = normal(24, 2176)
    weight = packed(form, patterns)
    for m, dtype, mode in ((40, torch.bfloat16, ""), (2, torch.float32, ""), (1, torch.bfloat16, linear.INVARIANT)):
        x = tokens(m, 2176).to(dtype)
        result = gpu_product(x, weight, None, mode, mode == linear.INVARIANT)
        assert result.dtype == dtype and wrong_by(result, x, numbers(patterns)) <= 1
    odd = normal(5, 100)
    x = tokens(3, 100)
    assert wrong_by(gpu_product(x, packed(form, odd), None, "", False), x, numbers(odd)) <= 1


SPEC = """
format: upper_{code}
title: float16 with its upper byte in a stream
source: tests/kernels/test_streams.py
weight: [N, K]
fields:
  v: f16[n, k]
decode: v
encode: nearest(code=v)
storage:
  plain:
    upper:
      tensor: u8[n<N, k<K]
      record: v[n, k].hi:8
      stream: {code}
    lower:
      tensor: u8[n<N, t<ceil(K/8) word]
      record: "h<2 j<2 i<2: v[n, 8*t + 4*h + 2*i + j].lo:8"
"""


@pytest.mark.parametrize("code", ["window", "row_window", "huffman_lanes"])
def test_another_spec_with_the_code(code: str, tmp_path: Path) -> None:
    """Symbols may stand elsewhere, and be other bits of another type."""
    (tmp_path / f"upper_{code}.yaml").write_text(SPEC.format(code=code))
    w = (torch.randn(16, 2048, generator=torch.Generator().manual_seed(0)).abs() * 0.02).half()
    w = w if code != "row_window" else 1 + w                        # upper bytes of so many kinds as have codes
    w[3, 5], w[9, 2047] = 6e-8, torch.inf
    weight = ready(qdsl.load(tmp_path / f"upper_{code}.yaml").pack({"v": w}).to(DEVICE))
    assert stream_kernels.has_dequantize(weight, w) and torch.equal(dequantized(weight, torch.float16), w)
    assert torch.equal(dequantized(weight, torch.float32), w.float())
    w[9, 2047] = 0
    weight = ready(weight.format.pack({"v": w}).to(DEVICE))
    x = tokens(3, 2048).half()
    assert wrong_by(product(weight, x), x, w, eps=2.0**-11) <= 1


# Damage

def damaged(weight: PackedWeight, name: str, random: np.random.Generator) -> PackedWeight | None:
    """The weight with bytes of a tensor changed; None where that is refused when it is wrapped."""
    tensors = {key: tensor.clone() for key, tensor in weight.to("cpu").tensors.items()}
    flat = tensors[name].view(-1).view(torch.uint8)
    for place in random.integers(0, len(flat), random.integers(1, 9)):
        flat[place] = int(random.integers(0, 256))
    try:
        changed = weight.format.wrap(tensors, shape=weight.shape)
    except FormatError:
        return None
    return ready(changed.to(DEVICE))


def places(form: str) -> Iterator[str]:
    yield from importlib.import_module(f"qdsl.generated.{form}").FORMAT.variants[()].storages[form].tensors


@pytest.mark.parametrize(("form", "name"), quarter_of([(form, name) for form in FORMS for name in places(form)]))
def test_damage_leads_no_kernel_out_of_its_tensors(form: str, name: str) -> None:
    """Refused, or decoded within bounds to numbers that may be wrong."""
    patterns = normal(8, 2048) if form != "df11" else normal(8, 512)
    patterns[3, 7:9] = 0x7000, 0x0001
    weight = packed(form, patterns)
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(TIMES):
        changed = damaged(weight, name, random)
        refused += changed is None
        if changed is not None:
            exponents(changed)
            if form != "df11":
                dequantized(changed)
                if stream_kernels.has_skinny(x := tokens(1, 2048), changed):
                    product(changed, x)
    assert refused < TIMES or name not in ("words", "data", "codes", "encoded_exponent", "gaps", "sign_mantissa")


def test_words_that_are_all_alike() -> None:
    """A lane whose codes are all the longest asks for more turns than there are."""
    weight = packed("hlane", PATTERNS.reshape(32, 2048)[:8])
    for word in (-1, 0):
        repeated = PackedWeight.derive(weight, {**weight.tensors, "words": torch.full_like(weight.tensors["words"][:2048], word)})
        exponents(repeated)
        dequantized(repeated)
        product(repeated, tokens(1, 2048))


def test_what_kernels_rely_on_is_looked_at_once() -> None:
    """When a weight is wrapped, moved or loaded into a module; operations are told it."""
    module = importlib.import_module("qdsl.generated.df11")
    weight = packed("df11", normal(8, 512)).to("cpu")
    described = weight.stream_info
    assert described == "exponents.threads=512 exponents.levels=2 exponents.steps=32"
    assert weight.apply(torch.clone).stream_info == described and weight_key(weight)[1].stream_info == described
    layer = module.Linear.empty((8, 512))
    layer.load_state_dict(weight.tensors, assign=True)
    assert layer.packed.stream_info == described
    broken = {**weight.tensors, "output_positions": weight.tensors["output_positions"].clone()}
    broken["output_positions"][0] = 1
    with pytest.raises(RuntimeError, match="the stream of 'exponents' is damaged: positions do not rise from 0"):
        layer.load_state_dict(broken)
    with pytest.raises(FormatError, match="positions do not rise from 0"):
        module.wrap(broken, shape=(8, 512))


@pytest.mark.parametrize("form", FORMS)
def test_operations_open_streams(form: str) -> None:
    """They are told what a program is made of: not the shape, which is among their arguments."""
    weight = packed(form, normal(24, 256))
    x = tokens(3, 256)
    tensors, key = operation_arguments(weight)
    assert torch.equal(torch.ops.qdsl.linear(x, tensors, None, key), weight.format.linear(x, weight))
    assert torch.equal(torch.ops.qdsl.dequantize(tensors, key, torch.bfloat16), weight.format.dequantize(weight))


def test_an_exponent_that_is_a_row_too_is_refused() -> None:
    weight = packed("df11", np.array([[120 << 7] * 8 + [119 << 7] * 8], np.uint16)).to("cpu")
    luts = weight.tensors["luts"]
    tensors = {**weight.tensors, "luts": torch.where(luts == 119, 250, luts)}
    tensors["luts"][-1, 250], tensors["luts"][-1, 119] = luts[-1, 119], 0
    with pytest.raises(FormatError, match="exponent 250 is the name of a row"):
        weight.format.wrap(tensors, shape=(1, 16))


@pytest.mark.skipif(DEVICE != "cpu", reason="products on GPUs are not those of torch")
@pytest.mark.parametrize("form", ["hlane", "fix4", "fix3", "df11"])
def test_products_on_a_cpu_are_those_of_torch(form: str) -> None:
    """Bit for bit, with a bias and an x of any axes and strides: torch adds the bias to rounded products of uneven strides.

    Sums in another order round to other bits once in some hundred products, and on processors without AVX-512 alone.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator).bfloat16()
    module = importlib.import_module(f"qdsl.generated.{form}")
    copies = [module.quantize(weight) for _ in range(5)]         # products are prepared by the first with each
    for draw in range(40):
        bias, x = (torch.randn(sizes, generator=generator).bfloat16() for sizes in ((64,), (2, 128, 5)))
        stored = copies[draw // 8]
        for rows in (x.transpose(1, 2), x.transpose(1, 2).contiguous(), x[0].t(), x[0].t()[:, ::2].repeat(1, 2), x[0, :, 1],
                     x.permute(2, 0, 1), x[:, :, None].transpose(1, 3)):
            for own in (None, bias):
                assert module.linear(rows, stored, own).equal(torch.nn.functional.linear(rows, weight, own)), rows.stride()
