"""Every kernel of every format against the torch reference, in the interpreter (or on a GPU) over odd shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from bench.gpu import regimes
from qdsl.analyze.check.spec_bits import AGAIN, digit_fields, field_bits, size_environment, stored
from qdsl.compiler.passes.derive_planar import PLANAR
from qdsl.runtime import Kernels, PackedWeight
from qdsl.runtime.gpu import launch, tiles
from qdsl.runtime.weight.arrays import power
from tests.support.covering import ALL, WALK, covering, kernels, quarter_of
from tests.support.formats import (
    Case,
    assert_same,
    cases,
    field_shape,
    is_held,
    plain_packed,
    random_fields,
    random_packed,
    raw,
    shapes,
    smallest,
    spec,
)
from tests.support.interpreter import INTERPRETED, guarded, times

DEVICE = "cpu" if INTERPRETED else "cuda"
CASES = cases()
COVERING = covering(CASES, lambda case: kernels(case, "dequantize", "matvec"), WALK)
ROWS = (0, 1, 2, 3, 5, 7, 8, 17, 32, 40, 64, 96, 128)
COLUMNS = (0, 1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 77, 90, 96, 128, 160, 256, 288, 320, 512, 640)
MOST = 24 << 10 if ALL else 12 << 10                             # weights: the interpreter is slow
MOST_AT_ONCE = 1 << 18 if ALL else 1 << 16                       # weights of one launch


def grid(case: Case) -> list[tuple[int, int]]:
    """Shapes that the storage can hold: empty ones, the smallest, and the most awkward of a size that runs; of most three."""
    most = max(MOST, math.prod(smallest(case)))
    candidates = [shape for shape in shapes(case, ROWS, COLUMNS) if shape[0] * shape[1] <= most]
    empty = [shape for shape in candidates if 0 in shape][:2]
    filled = sorted((shape for shape in candidates if 0 not in shape), key=lambda s: (s[0] * s[1], s)) or [smallest(case)]
    if case not in COVERING:
        awkward = ([shape for shape in filled if shape[1] % 128] or filled)[-1]
        return list(dict.fromkeys([awkward, filled[len(filled) // 2], filled[-1]]))
    return list(dict.fromkeys([*empty, *(filled[i * (len(filled) - 1) // 8] for i in range(9))]))


def dequantized(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The kernel's weights; no address outside the tensors is touched, and every weight is stored once."""
    out = torch.full(packed.shape, torch.nan, dtype=dtype, device=DEVICE)
    with guarded(packed, out) as trace:
        launch.dequantize(packed, out)
    assert not INTERPRETED or (times(trace.stores, out) == 1).all()
    return out


def test_tiles_of_more_axes_than_the_kernel_orders_are_stored_one_by_one() -> None:
    few, many = (Kernels(None, "N", "K", "k", digits=(2,) * count, lanes=(2, 2), order=tuple(range(4 + count)))
                 for count in (4, 5))
    assert tiles.columns_in_order(few, 4, 64) == {"DIGITS": (4, 4, 2, 2, 2, 2, 2, 2), "ORDER": tuple(range(8))}
    assert tiles.columns_in_order(many, 4, 64) == tiles.columns_in_order(few, 4, 8) == {"DIGITS": None, "ORDER": None}


@pytest.mark.parametrize("case", quarter_of(CASES, COVERING), ids=str)
def test_dequantize_is_exact(case: Case) -> None:
    for number, shape in enumerate(grid(case)):
        packed = random_packed(case, shape, seed=number).decode_streams().to(DEVICE)
        assert_same(dequantized(packed), case.module.dequantize(packed.to("cpu"), torch.float32).to(DEVICE), packed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", quarter_of(CASES), ids=str)
def test_dequantize_rounds_once(case: Case, dtype: torch.dtype) -> None:
    """To nearest even from the exact float32 weight; results too large for the dtype are infinite in both."""
    packed = random_packed(case, smallest(case), seed=1).decode_streams().to(DEVICE)
    exact = case.module.dequantize(packed.to("cpu"), torch.float32)
    assert_same(dequantized(packed, dtype).cpu(), exact.to(dtype), packed, "kernel")
    assert_same(case.module.dequantize(packed.to("cpu"), dtype), exact.to(dtype), packed, "reference")


@pytest.mark.parametrize("case", quarter_of([case for case in CASES if case.module.FORMAT.size_axes]), ids=str)
def test_every_block_size(case: Case) -> None:
    format = case.module.FORMAT
    for size in format.size_axes:
        for value in format.params[size]:
            params = {**case.choice, size: value}
            if not is_held(case, params):
                continue
            shape = next(shapes(case, (32, 64, 72, 128), (96, 320, 512, 1024, 4096, 128), params))
            packed = random_packed(case, shape, params=params).decode_streams().to(DEVICE)
            assert_same(dequantized(packed).cpu(), case.module.dequantize(packed.to("cpu"), torch.float32), packed)


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.full((x.shape[0], packed.shape[0]), torch.nan, dtype=x.dtype, device=DEVICE)
    calls = list(launch.linear_calls(x, packed, bias, out, candidate=regimes.candidate(x, packed)))
    with guarded(packed, x, bias, out, *(tensor for call in calls for tensor in call.workspace)) as trace:
        for call in calls:
            call.run()
    assert not INTERPRETED or (times(trace.stores, out) == 1).all()
    return out


@pytest.mark.parametrize("case", quarter_of(CASES, COVERING), ids=str)
def test_linear(case: Case) -> None:
    """Within what float32 sums of K terms may lose, against float64; and one rounding to the dtype of x."""
    for number, shape in enumerate(grid(case), CASES.index(case)):
        packed = random_packed(case, shape, seed=number).decode_streams().to(DEVICE)
        weight = case.module.dequantize(packed.to("cpu"), torch.float32).double()
        generator = torch.Generator().manual_seed(number)
        dtype, rows = ((torch.float32, 3), (torch.float16, 1), (torch.bfloat16, 2))[number % 3]
        x = (torch.randn(rows, shape[1], generator=generator) / 256).to(dtype)   # so that float16 holds the sums
        bias = torch.randn(shape[0], generator=generator).to(dtype) if number % 2 else None
        product = linear(x.to(DEVICE), packed, None if bias is None else bias.to(DEVICE)).cpu()
        wanted = x.double() @ weight.t() + (0 if bias is None else bias.double())
        spread = x.double().abs() @ weight.abs().t() + (0 if bias is None else bias.double().abs())
        kernels = packed.layout.kernels                          # those for matrix units round numbers of tables to x's dtype
        rounds = kernels.matrix_unit and (kernels.rounds_tables(dtype, packed.tensors) or packed.layout.factor)
        rounded = torch.finfo(dtype).eps / 2 if rounds else 0
        bound = spread * ((shape[1] + 2) * 2.0 ** -24 + rounded) + wanted.abs() * torch.finfo(dtype).eps / 2
        bound += torch.finfo(dtype).tiny
        assert ((product.double() - wanted).abs() <= bound).all(), shape


@pytest.mark.parametrize("case", quarter_of(CASES, COVERING), ids=str)
def test_linear_reads_each_weight_where_it_belongs(case: Case) -> None:
    """With one-hot rows of x, linear is dequantize: the same bits, since nothing is summed but zeros."""
    packed = random_packed(case, smallest(case), seed=2).decode_streams().to(DEVICE)
    columns = sorted({0, 1, packed.shape[1] // 2, packed.shape[1] - 1} & set(range(packed.shape[1])))
    x = torch.zeros(len(columns), packed.shape[1])
    x[range(len(columns)), columns] = 1
    product = linear(x.to(DEVICE), packed, None).cpu()
    assert torch.equal(product, case.module.dequantize(packed.to("cpu"), torch.float32)[:, columns].t())


@pytest.mark.parametrize("case", quarter_of(cases(types=True), COVERING), ids=str)
def test_every_value_of_every_field(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All codes, and all 65536 halves as scales: subnormal, infinite and NaN too.  Kernel and reference agree.

    Of scales that many weights share, halves of every exponent, the first and the last of each among them.
    """
    if INTERPRETED:                                              # large tiles: the interpreter pays by the program
        monkeypatch.setattr(tiles, "UNITS", 1 << 17)
        monkeypatch.setattr(tiles, "WEIGHTS", 1 << 17)
        monkeypatch.setattr(tiles, "unit_tile", lambda last, rows, units, size: (min(power(rows), 4096), min(power(units), 16)))
    for name, field in random_fields(case, smallest(case)).items():
        values = every_value(case, name, field.dtype)
        for packed in holding(case, name, values):
            decoded, wanted = dequantized(packed.to(DEVICE)).cpu(), case.module.dequantize(packed, torch.float32)
            assert torch.equal(decoded.isnan(), wanted.isnan())
            assert torch.equal(raw(decoded.nan_to_num(0)), raw(wanted.nan_to_num(0)))


def every_value(case: Case, name: str, dtype: torch.dtype) -> torch.Tensor:
    """All values of a field's type; of one that has more than 65536, none."""
    bits = field_bits(spec(case.path), name, case.choice)
    if name in digit_fields(case.spec):
        return torch.arange(3, dtype=dtype)
    if bits > 16:
        return torch.empty(0, dtype=dtype)
    if dtype.is_floating_point or bits == 8 * dtype.itemsize:
        return torch.arange(1 << bits, dtype=torch.int32).to(torch.uint8 if bits <= 8 else torch.int16).view(dtype)
    kind = case.module.FORMAT.variant(case.choice).fields[name].type
    low = -(1 << bits - 1) if str(case.choice.get(kind, kind)).startswith("i") else 0
    return torch.arange(low, low + (1 << bits), dtype=dtype)


def holding(case: Case, name: str, values: torch.Tensor) -> Iterator[PackedWeight]:
    """Weights in which a field has all these values; where it has one value, a weight for some of them."""
    n, k = smallest(case)
    count = torch.Size(field_shape(case, name, (n, k))).numel()
    by_rows = torch.Size(field_shape(case, name, (2 * n, k))).numel() > count
    step = values.numel() * n * (128 if case.storage == PLANAR else k) // count // MOST_AT_ONCE | 1
    if step > 1 and by_rows and not ALL:
        values = torch.cat([values[::step], values[::128], values[127::128]])
    fields = random_fields(case, (n * max(1, -(-values.numel() // count)) if by_rows else n, k))
    for part in values[::401 if ALL else 1601].split(1) if count == 1 and not by_rows else [values]:
        if part.numel():
            fields[name] = part.repeat(-(-fields[name].numel() // part.numel()))[:fields[name].numel()].view(fields[name].shape)
            yield plain_packed(case, fields)


def has_codes(case: Case) -> bool:
    """Whether a field has a value for every weight; vectors of a table have one for several."""
    fields = case.module.FORMAT.variant(case.choice).fields.values()
    return any([axis.text for axis in field.axes] == ["N", "K"] for field in fields) or case.has_row_codes


# Words that hold rows and columns, columns of several runs or rows far apart, lie along different axes or across rows, straddle
# bytes by six or hold parts of codes for unlike numbers of columns: their kernels work weight by weight.
BY_WEIGHT = ("flat_nibbles.flat", "marlin_tiles.marlin", "int_group.marlin-bits4-group128-scale_typef16", "planes.planes",
             "planes.rows", "q6_k.planar", "nunchaku_int4.nunchaku-scale_typebf16", "qserve.qserve",
             "flute.flute-group64-level_typef16",
             "int_group.trt_llm-bits4-group128-scale_typef16", "iq4_nl.iq4_nl_r4",
             *(f"q4_0.q4_0_{rows}" for rows in ("r8", "4_4", "4_8", "8_8")),
             *(f"int_group.planar-bits{bits}-group128-scale_typef16" for bits in (3, 5, 6, 7)),
             "awq_gemv_fast.gemv_fast-group128",
             *(f"{name}.transformers-scale_typebf16" for name in ("bitnet", "bitnet_offline")),
             *(f"{name}.bitsandbytes-block64" for name in ("nf4", "nf4_nested", "bnb_fp4", "bnb_fp4_nested")),
             *(f"{name}.hqq-bits{bits}-group64-scale_typef16" for name in ("hqq", "hqq_axis0") for bits in (4, 2, 1)),
             *(f"{name}-bits3-group64-scale_typef16" for name in ("hqq_axis0.hqq_3bit", "hqq.planar")),
             *(f"mlx.planar-bits{bits}-group64-scale_typebf16" for bits in (3, 5, 6)),
             *(f"int4pack.{tiles}-group128-scale_typebf16" for tiles in ("tinygemm", "tile_packed")),
             *(f"int4pack.cpu_{isa}-group128-scale_type{kind}" for isa in ("avx512", "avx2", "scalar")
               for kind in ("bf16", "f32")),
             "ik_iq3_k.planar", "ik_iq5_k.planar", "squeezellm.planar-bits3-level_typef32",
             "iq1_m.planar", "iq2_s.planar", "iq2_xs.planar", "iq2_xxs.planar", "q3_k.planar", "q5_0.gguf", "q5_0.planar",
             "q5_1.gguf", "q5_1.planar", "q5_k.planar", "tq1_0.gguf", "ranges.runs", "ranges.words",
             *(f"ocp_mxfp6.{storage}-code{code}" for storage in ("compressed_tensors", "planar") for code in ("e2m3", "e3m2")),
             *(f"coreml_lut.coreml-bits{bits}-rows32-level_typef16" for bits in (4, 2, 6)),
             "coreml_lut.planar-bits6-rows32-level_typef16", "posit8.planar-bits7", "posit8.rows-bits7",
             *(f"quanto.quanto-bits{bits}-group128-scale_typef32" for bits in (4, 2)),
             *(f"fp6_llm.{storage}-scale_typef16" for storage in ("fp6_llm", "planar")),
             "copied_bits.tiles", "copied_bits.planar", "spqr.spqr",
             "flipped_words.words", "df11.df11", "fix4.fix4", "fix3.fix3", "hlane.hlane", "fp8_channel.fp8_lane-scale_typebf16")


TILE_ROWS = {"cpu_avx512": 64, "cpu_avx2": 32, "cpu_scalar": 32}      # of a whole tile: padding shares bytes with few rows


@pytest.mark.skipif(not INTERPRETED, reason="counts loads in the interpreter")
@pytest.mark.parametrize("case", quarter_of([case for case in CASES if has_codes(case)]), ids=str)
def test_a_word_of_codes_is_loaded_once(case: Case) -> None:
    """Elements of a tensor that hold nothing but values of single weights: loaded once, never once per weight."""
    least = smallest(case)                                       # one weight says nothing of what others load
    n, k = (4, 512) if case.storage == PLANAR else smallest(case, 8 if least == (1, 1) else 1)
    packed = random_packed(case, (TILE_ROWS.get(case.storage, n), k)).decode_streams()
    x, product, out = torch.ones(1, packed.shape[1]), torch.empty(1, packed.shape[0]), torch.empty(packed.shape)
    with guarded(packed, out) as dequantize:
        launch.dequantize(packed, out)
    with guarded(packed, x, product) as linear:
        launch.linear(x, packed, None, product)
    for trace in (dequantize, linear):
        loads = {int(count) for name, elements in words_of_codes(case, packed).items()
                 for count in times(trace.loads, packed.tensors[name])[elements]}
        assert (loads == {1}) == (str(case) not in BY_WEIGHT), loads


def words_of_codes(case: Case, packed: PackedWeight) -> dict[str, list[int]]:
    """Flat indices of the elements, by tensor, that hold only fields with a value for every weight."""
    params = packed.params
    storage = next(s for s in case.spec.storages if s.name.value == case.storage)
    env = size_environment(case.spec, *packed.shape, params, packed.sizes)
    full = {name for name in random_fields(case, packed.shape) if field_shape(case, name, packed.shape) == packed.shape}
    full |= {field.name.value for field in case.spec.fields} - {field.name.value for field in spec(case.path).fields}
    holds: dict[tuple[str, int], set[str]] = {}
    placed = [(name, element, field) for name, element, _, (field, _, _), kind in stored(case.spec, storage, env, params)
              if kind != AGAIN]
    for name, element, field in placed:
        at = 0
        for extent, i in zip(packed.tensors[name].shape, element, strict=True):
            at = at * extent + i
        holds.setdefault((name, at), set()).add(field)
    codes: dict[str, list[int]] = {}
    for (name, at), fields in holds.items():
        if fields <= full:
            codes.setdefault(name, []).append(at)
    return codes
