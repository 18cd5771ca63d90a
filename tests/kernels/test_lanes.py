"""The kernels for matrix units, of every format that has them: in the interpreter, or on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from bench.gpu import regimes
from qdsl.runtime import GroupField, MatrixUnitKernels, PackedWeight
from qdsl.runtime.gpu import configure, launch, scratch
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.families import BY_NAME, lanes
from qdsl.runtime.torch.linear import as_stored
from tests.support.covering import ALL, by_turns, covering, kernels, quarter_of
from tests.support.formats import Case, cases, random_packed, shapes, shuffled_fields
from tests.support.interpreter import INTERPRETED, guarded, times

DEVICE = "cpu" if INTERPRETED else "cuda"


def matrix_unit_of(case: Case) -> MatrixUnitKernels:
    kernels: MatrixUnitKernels = case.module.FORMAT.variant(case.choice).storages[case.storage].kernels.matrix_unit
    return kernels


CASES = [case for case in cases() if matrix_unit_of(case)]
FEW = [case for case in CASES if "skinny" in matrix_unit_of(case).families]
RECORDS = [case for case in CASES if matrix_unit_of(case).records]
COVERING = covering(CASES, lambda case: kernels(case, "gemv", "skinny", "tile_gemm"))
TALL = covering([case for case in CASES if matrix_unit_of(case).families.get("tile_gemm", {}).get("tall")],
                lambda case: kernels(case, "tile_gemm"))
# Rows and columns: a last tile of rows that is short; a last span of 256 columns that is half; warps without columns.
SHAPES = ((20, 256), (33, 384), (16, 1152))
DTYPES = (torch.float16, torch.bfloat16)


def shapes_of(case: Case, params: Mapping[str, int | str] | None = None) -> list[tuple[int, int]]:
    """SHAPES, or whole records, and whole blocks where rows must have them."""
    step = next(128 << i for i in range(6) if any(shapes(case, (16,), (384 << i,), params)))
    return [(n if step <= 256 else 16, -(-k // step) * step) for n, k in SHAPES]


def choices(case: Case) -> Iterator[Mapping[str, int | str]]:
    """The sizes that a format's blocks can have, as far as the kernels serve them."""
    format = case.module.FORMAT
    lanes = matrix_unit_of(case)
    values = {size: format.params[size] for size in format.size_axes}
    for i in range(max(map(len, values.values()), default=1)):
        params = {size: candidates[min(i, len(candidates) - 1)] for size, candidates in values.items()}
        if min(sizes_of(case, params), default=lanes.least) >= lanes.least:
            yield params


def sizes_of(case: Case, params: Mapping[str, int | str]) -> Sequence[int]:
    """The lengths of blocks of columns that share a number."""
    return matrix_unit_of(case).sizes(case.module.FORMAT.sizes({**case.choice, **params}, SHAPES[0]))


def tried(case: Case) -> list[Mapping[str, int | str]]:
    """The choices that dear tests run over: all, or the first of a format whose lines others have."""
    launches = list(choices(case))
    return launches if case in COVERING else launches[:1]


def packed_of(case: Case, shape: tuple[int, int], params: Mapping[str, int | str], seed: int = 0) -> PackedWeight:
    return random_packed(case, shape, seed, params).to(DEVICE)


def x_of(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 64).to(dtype).to(DEVICE)


def product(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None,
            candidate: Candidate | None = None) -> torch.Tensor:
    """The kernel's product; it touches nothing else, and stores every element once."""
    out = torch.full((x.shape[0], packed.shape[0]), torch.nan, dtype=x.dtype, device=DEVICE)
    x, packed = as_stored(x, packed)
    calls = list(launch.linear_calls(x, packed, bias, out, candidate=candidate or regimes.candidate(x, packed)))
    with guarded(packed, x, bias, out, *(tensor for call in calls for tensor in (*call.scratch, *call.workspace))) as trace:
        for call in calls:
            call.run()
    assert not INTERPRETED or (times(trace.stores, out) == 1).all()
    return out.cpu()


def kernels_of(x: torch.Tensor, packed: PackedWeight) -> set[str]:
    out = torch.empty(x.shape[0], packed.shape[0], dtype=x.dtype, device=DEVICE)
    calls = launch.linear_calls(x, packed, None, out, candidate=regimes.candidate(x, packed))
    return {call.family for call in calls if call.weights}


def rounding(case: Case, packed: PackedWeight, dtype: torch.dtype) -> float:
    """By how much a weight may be off: numbers of a table that x's type does not hold are rounded to it, and x times a factor."""
    kernels = case.module.FORMAT.variant(case.choice).storages[case.storage].kernels.matrix_unit
    if kernels is not None and isinstance(levels := kernels.codes.stored_levels, GroupField):
        return 0.0 if packed.tensors[levels.tensor].dtype == dtype else torch.finfo(dtype).eps / 2
    if case.module.FORMAT.variant(case.choice).storages[case.storage].factor:
        return torch.finfo(dtype).eps / 2
    numbers = torch.tensor([number for table in case.spec.tables for number in table.values], dtype=torch.float64)
    return 0.0 if torch.equal(numbers.to(dtype).double(), numbers) else torch.finfo(dtype).eps / 2


def expected(case: Case, packed: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and by how much a kernel may miss it: float32 sums of K terms, and the result rounded once."""
    weight = case.module.dequantize(packed.to("cpu"), torch.float32).double()
    wide, added = x.cpu().double(), torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.cpu().double()
    exact, spread, info = wide @ weight.t() + added, wide.abs() @ weight.abs().t() + added.abs(), torch.finfo(x.dtype)
    error = weight.shape[1] * 2.0 ** -24 + rounding(case, packed, x.dtype)
    return exact, exact.abs() * info.eps / 2 + spread * error + info.tiny


def check(case: Case, shape: tuple[int, int], params: Mapping[str, int | str], rows: int, dtype: torch.dtype, bias: bool = False,
          packed: PackedWeight | None = None, candidate: Candidate | None = None) -> None:
    packed = packed or packed_of(case, shape, params)
    x = x_of(rows, shape[1], dtype, rows)
    added = x_of(1, shape[0], dtype, 7)[0] if bias else None
    exact, bound = expected(case, packed, x, added)
    assert ((product(x, packed, added, candidate).double() - exact).abs() <= bound).all(), (params, rows, dtype, shape)


@pytest.fixture
def hopper() -> Iterator[None]:
    """Launches as on a device of capability 9."""
    with configure.assumed(9, 132):
        yield


@pytest.mark.parametrize("case", quarter_of(CASES, COVERING), ids=str)
def test_one_row(case: Case) -> None:
    for i, params in enumerate(tried(case)):
        step = shapes_of(case, params)[0][1]
        shapes = [*shapes_of(case, params), (16, max(1024, step))]   # the last: warps share K evenly
        check(case, shapes[(i + 1) % 3], params, 1, DTYPES[(i + 1) % 2], bias=i % 2 == 0)
        if case in COVERING:
            check(case, shapes[3], params, 1, DTYPES[i % 2])
            check(case, shapes[i % 3], params, 1, DTYPES[i % 2], bias=i % 2 == 1)


@pytest.mark.parametrize("case", [case for case in FEW if case in COVERING and matrix_unit_of(case).codes.bits <= 0
                                  and "gemv" in matrix_unit_of(case).families], ids=str)
def test_two_tiles_of_one_row(case: Case) -> None:
    """Of codes that are looked up or made; a warp has 32 rows of w, of which the last tile has one."""
    shape = shapes_of(case)[1]
    config = {"R": 2, "WN": 1, "WK": 2, "EVEN": False}
    check(case, shape, next(choices(case)), 1, torch.bfloat16, candidate=Candidate("gemv", config, (2,)))


LIFTED = [case for case in FEW if matrix_unit_of(case).families.get("gemv", {}).get("raw")]


def with_zeros(case: Case, zeros: tuple[slice, slice]) -> PackedWeight:
    """A weight [20, 512] of normal numbers and zeros."""
    weight = x_of(20, 512, torch.float32, 3).cpu()
    weight[zeros] = 0
    return case.module.FORMAT.convert(case.module.FORMAT.quantize(weight, **case.choice), case.storage)


def scaled_product(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """By the kernel that scales x instead of codes."""
    return product(x.to(DEVICE), packed.to(DEVICE), None, Candidate("gemv", {"R": 2, "WN": 1, "WK": 1, "EVEN": True}, (1,)))


@pytest.mark.parametrize("case", LIFTED, ids=str)
def test_one_row_of_any_magnitude(case: Case) -> None:
    """Runs of x are scaled, so that sums neither overflow nor lose small numbers, whatever other runs of x are."""
    packed = with_zeros(case, (slice(None), slice(128)))
    x = x_of(1, 512, torch.float32, 1).cpu() * 2.0 ** torch.randint(-30, 1, (512,), generator=torch.Generator().manual_seed(0))
    for exponent in (-80, -1, 0, 5, 16, 60, 120):
        scaled = (x * 2.0 ** exponent).to(torch.bfloat16)
        scaled[:, :128] = 2.0 ** 127
        exact, bound = expected(case, packed, scaled, None)
        assert ((scaled_product(scaled, packed).double() - exact).abs() <= bound).all(), exponent


@pytest.mark.parametrize("case", LIFTED, ids=str)
def test_one_row_with_numbers_that_are_not_finite(case: Case) -> None:
    packed = with_zeros(case, (slice(10), slice(70, 71)))
    dense = case.module.dequantize(packed, torch.float32)
    for values in ({70: torch.inf}, {70: -torch.inf}, {3: torch.nan}, {70: torch.inf, 200: torch.inf}):
        x = x_of(1, 512, torch.bfloat16, 1).cpu()
        for column, value in values.items():
            x[0, column] = value
        out, exact = scaled_product(x, packed), (x.float() * dense).sum(1)[None]
        assert torch.equal(out.isnan(), exact.isnan()) and torch.equal(out.isinf(), exact.isinf()), values
        assert torch.equal(out[out.isinf()].sign(), exact[exact.isinf()].sign().bfloat16()), values


@pytest.mark.parametrize("case", quarter_of(FEW, COVERING), ids=str)
def test_few_rows(case: Case) -> None:
    """Up to 8, and more in blocks of 8."""
    for i, params in enumerate(tried(case)):
        shapes = shapes_of(case, params)
        check(case, shapes[(i + 1) % 3], params, (8, 2, 9)[i % 3], DTYPES[(i + 1) % 2], bias=i % 2 == 0)
        if case in COVERING:
            check(case, shapes[i % 3], params, (3, 8, 11)[i % 3], DTYPES[i % 2], bias=i % 2 == 1)


@pytest.mark.parametrize("case", quarter_of([case for case in FEW if case in COVERING]), ids=str)
def test_two_blocks_of_rows(case: Case) -> None:
    """With 16 rows of x in a program a row has the bits that it has with 8."""
    number = COVERING.index(case)
    shape = shapes_of(case)[number % 3]
    packed, rows, r = packed_of(case, shape, next(choices(case))), (16, 9, 21)[number % 3], 1 + number % 2
    x, bias = x_of(rows, shape[1], DTYPES[number % 2]), x_of(1, shape[0], DTYPES[number % 2], 7)[0]
    config = {"R": r, "WN": 1, "WK": 2, "EVEN": shape[1] % 512 == 0}
    one, two = (Candidate("skinny", {**config, **more}, (-(-shape[0] // (16 * r)), -(-rows // count)))
                for count, more in ((8, {}), (16, {"BM": 16})))
    assert torch.equal(product(x, packed, bias, two), product(x, packed, bias, one))


@pytest.mark.parametrize("case", quarter_of([case for case in CASES if "tile_gemm" in matrix_unit_of(case).families], COVERING),
                         ids=str)
def test_many_rows(case: Case, hopper: None) -> None:
    for i, params in enumerate(tried(case)):
        shapes = shapes_of(case, params)
        check(case, shapes[i % 3], params, (12, 16, 33)[i % 3], DTYPES[i % 2], bias=i % 2 == 1)
        if case in COVERING:
            shape, rows, dtype = shapes[(i + 1) % 3], (3, 9, 7)[i % 3], DTYPES[(i + 1) % 2]
            packed = packed_of(case, shape, params)              # of few rows, which leave most of a tile's empty
            tiled = regimes.candidate(x_of(rows, shape[1], dtype), packed, True)
            check(case, shape, params, rows, dtype, packed=packed, candidate=tiled)
    packed = packed_of(case, (shapes_of(case)[0][0], 1024), next(choices(case)))       # with 256, one warp's kernel may spill
    assert kernels_of(x_of(9, 1024, torch.float16), packed) == {"tile_gemm"}
    assert kernels_of(x_of(8, 1024, torch.float16), packed) == {"skinny"}
    assert regimes.candidate(x_of(2, 1024, torch.float16), packed, True).kind == "tile_gemm"
    assert kernels_of(x_of(9, 1024, torch.bfloat16), packed) == {"tile_gemm"}


@pytest.mark.parametrize("case", [case for case in CASES if case.module.FORMAT.variant(case.choice).storages[case.storage].order],
                         ids=str)
def test_columns_by_groups(case: Case, hopper: None) -> None:
    """An order of columns: every kernel runs as it is, with x in that order."""
    for i, params in enumerate(choices(case)):
        shape = SHAPES[i % 3]
        packed = case.module.pack(shuffled_fields(case, shape, i, params), storage=case.storage, **{**case.choice, **params})
        if packed.order is None:
            continue                                             # one group
        packed = packed.to(DEVICE)
        for rows, dtype in ((1, DTYPES[i % 2]), (5, DTYPES[1 - i % 2]), (12, torch.float16)):
            check(case, shape, params, rows, dtype, bias=i % 2 == 1, packed=packed)


@pytest.mark.parametrize("tile", lanes.TALL, ids=lambda tile: f"{tile.R}x{tile.W}{'-whole' * tile.whole}")
@pytest.mark.parametrize("case", TALL, ids=str)
def test_tiles_of_128_rows(case: Case, tile: lanes.TallTile, hopper: None) -> None:
    """Each of those that the rule picks from, where it may; the others are for shapes that leave tiles short."""
    shape, rows = ((16 * tile.R * tile.W, 384), 128) if tile.whole else ((20, 1152), 100)
    params = next((params for params in choices(case) if lanes.is_tall(packed_of(case, shape, params))), None)
    if params is None:                                           # groups of fewer than 128 columns
        return
    configs = BY_NAME["tile_gemm"].configs(packed_of(case, shape, params), rows, torch.device(DEVICE))
    config = next(c for c in configs if (c["R"], c["W"], c["WHOLE"] > 0) == (tile.R, tile.W, tile.whole))
    candidate = Candidate("tile_gemm", config)
    for dtype in DTYPES:
        check(case, shape, params, rows, dtype, bias=tile.whole, candidate=candidate)


SCALED = [case for case in CASES if "tile_gemm" in matrix_unit_of(case).families and matrix_unit_of(case).sums.scale]


@pytest.mark.parametrize("case", quarter_of(SCALED), ids=str)
def test_scaled_weights(case: Case, hopper: None) -> None:
    """`tile_gemm` that rounds scaled weights to x's type and sums all of K at once: as exact as the rounded weight."""
    served = [params for params in tried(case) if all(map(matrix_unit_of(case).serves, sizes_of(case, params)))]
    assert served
    for i, params in enumerate(served):
        shape, dtype = shapes_of(case, params)[(i + 1) % 3], DTYPES[i % 2]
        packed, x, bias = packed_of(case, shape, params), x_of(33, shape[1], dtype), x_of(1, shape[0], dtype, 7)[0]
        config = {"R": 1 + i % 2, "W": 4, "BM": 32, "STAGES": 3, "UNROLL": 1, "WHOLE": 0, "SPLIT": 1, "SCALED": 1}
        weight = case.module.dequantize(packed.to("cpu"), dtype).double()
        exact, spread = x.cpu().double() @ weight.t() + bias.cpu().double(), x.cpu().double().abs() @ weight.abs().t()
        got, eps = product(x, packed, bias, Candidate("tile_gemm", config)).double(), torch.finfo(dtype).eps
        # A weight may be rounded otherwise where decode's formula has roundings of its own: by one bit of few weights.
        bound = exact.abs() * eps / 2 + spread * (shape[1] * 2.0 ** -24 + rounding(case, packed, dtype) + eps / 8) + eps ** 2
        assert ((got - exact).abs() <= bound).all(), (params, dtype, shape, float(((got - exact).abs() / bound).max()))


SPLIT = ("int_group.planar-bits4", "int8_channel.planar", "q4_k.planar")


@pytest.mark.parametrize("case", [case for case in CASES if str(case).startswith(SPLIT)], ids=str)
def test_programs_that_share_k(case: Case, hopper: None) -> None:
    """Parts of one size and of two, short and whole tiles; the counters are left at 0."""
    for split, shape, rows, dtype in ((2, (20, 512), 20, torch.float16), (4, (64, 1280), 16, torch.bfloat16)):
        packed = packed_of(case, shape, next(choices(case)))
        config = {**BY_NAME["tile_gemm"].configs(packed, rows, packed.device)[0], "SPLIT": split}
        check(case, shape, {}, rows, dtype, bias=split == 2, packed=packed, candidate=Candidate("tile_gemm", config))
        assert not scratch.counters.take(1, packed.device).any()


@pytest.mark.parametrize(("case", "dtype"), quarter_of(by_turns(COVERING, DTYPES)), ids=str)
def test_one_hot_rows_read_the_weight(case: Case, dtype: torch.dtype) -> None:
    """Columns of a span of 512, one at a time, so that nothing is summed but zeros: each is where it belongs.

    A quarter of them: each place in a chunk of 128 is met in one chunk or another.  Of records some columns in every run,
    with each place in a byte, in a word and in 16 bytes, because a launch takes one.
    """
    packed = packed_of(case, (16, 512), next(choices(case)), seed=3)
    x = torch.eye(512, dtype=dtype, device=DEVICE)
    weight = case.module.dequantize(packed.to("cpu"), torch.float32).t()
    if "skinny" in matrix_unit_of(case).families:
        places = torch.arange(128)
        columns = torch.arange(512) if ALL else places + 128 * ((places + places // 4 + places // 32) % 4)
        x, weight = x[columns], weight[columns]
        products = product(x, packed).float()
    else:
        x, weight = x[5::11], weight[5::11]
        products = torch.cat([product(row[None], packed) for row in x]).float()
    eps = torch.finfo(dtype).eps
    # Zero points and bfloat16's 128 are taken off in float32: what they leave is at most that much of the largest term.
    slack = weight.abs().amax() * 2.0 ** -15
    assert ((products - weight).abs() <= weight.abs() * (eps / 2 + rounding(case, packed, dtype) * 1.01) + slack * eps).all()


@pytest.mark.parametrize("case", quarter_of([case for case in FEW if case in COVERING][1:]), ids=str)
def test_bits_do_not_depend_on_the_run_or_on_other_rows(case: Case) -> None:
    """The same call gives the same bits; a row among up to 8 others, or in another place, gives its own."""
    packed = packed_of(case, shapes_of(case)[1], next(choices(case)), seed=5)
    x = x_of(8, shapes_of(case)[1][1], torch.float16, 5)
    whole = product(x, packed)
    assert torch.equal(whole, product(x, packed))
    assert torch.equal(whole[2:5], product(x[2:5].contiguous(), packed))
    assert torch.equal(whole.flip(0), product(x.flip(0).contiguous(), packed))


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_other_products_take_the_plain_kernel(case: Case) -> None:
    """float32, and columns that are no whole chunks: there are kernels for all of them."""
    packed = packed_of(case, (16, 256), next(choices(case)))
    assert kernels_of(x_of(1, 256, torch.float32), packed) == {"matvec"}
    odd = packed_of(case, (16, 320), next(choices(case)))
    assert kernels_of(x_of(1, 320, torch.float16), odd) == {"matvec"}


CUT = ("q4_0.planar", "int8_channel.safetensors-scale_typebf16")


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in CUT],
                         ids=str)
def test_parts_of_a_weight(case: Case) -> None:
    """Rows cut out of a weight: a scale may begin anywhere; codes and x must be aligned, or the plain kernel takes them."""
    packed = packed_of(case, (48, 384), next(choices(case)), seed=4)
    x = x_of(2, 384, torch.float16, 4)
    part = packed.cut("N", 5, 40)
    assert kernels_of(x, part) == {"skinny"}
    assert torch.equal(product(x, part), product(x, packed)[:, 5:40])
    shifted = torch.empty(2 * 384 + 1, dtype=torch.float16, device=DEVICE)[1:].view(2, 384).copy_(x)
    assert kernels_of(shifted, packed) == {"matvec"}


@pytest.mark.parametrize("case", RECORDS, ids=str)
def test_records_where_they_lie(case: Case) -> None:
    """The kernel for one row reads the bytes themselves, of any rows, where 16 divides their address; else the plain one does."""
    packed = packed_of(case, (48, 768), {}, seed=4)
    x = x_of(2, 768, torch.float16, 4)
    one = x[:1].contiguous()
    whole = product(one, packed)
    assert kernels_of(one, packed) == {"gemv_records"} and kernels_of(x, packed) == {"matvec"}
    assert torch.equal(whole, product(one, packed))
    part = packed.cut("N", 5, 40)
    assert kernels_of(one, part) == {"gemv_records"} and torch.equal(product(one, part), whole[:, 5:40])
    (name, tensor), = packed.tensors.items()
    for offset, kernel in ((16, "gemv_records"), (4, "matvec"), (1, "matvec")):
        memory = torch.empty(tensor.numel() + 32, dtype=torch.uint8, device=DEVICE)
        start = -memory.data_ptr() % 16 + offset
        moved = packed.derive({name: memory[start:start + tensor.numel()].view_as(tensor).copy_(tensor)})
        assert kernels_of(one, moved) == {kernel}
        assert (product(one, moved) - whole).abs().max() <= whole.abs().max() * 2.0 ** -9
    for call in launch.linear_calls(one, packed, None, torch.empty(1, 48, dtype=x.dtype, device=DEVICE)):
        assert next(call.tensors).data_ptr() == tensor.data_ptr()
    calls = launch.linear_calls(one, packed, None, torch.empty(1, 48, dtype=x.dtype, device=DEVICE), invariant=True)
    assert [call.family for call in calls] == ["matvec"]


# Fields that are called as the kernels call their own values, and codes that are small floats.
NAMES = """
format: lanes_{code}
title: fields that are called as kernels call their own
source: nobody
weight: [N, K]
fields:
  ones: f16[n, k // 32]
  ones_g: f16[n, k // 32]
  at: u4[n, k // 32]
  words: {code}[n, k]
decode: {decode}
storage:
  rows:
    words: {{tensor: "u8[n<N, t<K/2 word]", record: "i<2: words[n, 2*t + i]"}}
    at: {{tensor: "u8[n<N, g<ceil(K/32)]", record: "at[n, g] pad:4"}}
    ones: {{tensor: "f16[n<N, g<ceil(K/32)]", record: "ones[n, g]"}}
    ones_g: {{tensor: "f16[n<N, g<ceil(K/32)]", record: "ones_g[n, g]"}}
"""


@pytest.mark.parametrize(("code", "decode"), [("u4", "(words - at) * ones + ones_g"), ("e2m1", "words * ones + ones_g * at")])
def test_names_and_small_floats(code: str, decode: str, tmp_path: Path, hopper: None) -> None:
    path = tmp_path / f"lanes_{code}.yaml"
    path.write_text(NAMES.format(code=code, decode=decode))
    case = Case(path, "planar", ())
    for i, dtype in enumerate(DTYPES):
        for rows in (1, 3, 12):
            check(case, shapes_of(case)[i], {}, rows, dtype)


SCALE_FIRST = """
format: scale_first
title: codes of 8 bits behind the tensor of their scales
source: nobody
weight: [N, K]
fields:
  s: f16[n]
  q: i8[n, k]
decode: s * q
storage:
  rows:
    s: {tensor: "f16[n<N]", record: "s[n]"}
    q: {tensor: "i8[n<N, k<K]", record: "q[n, k]"}
"""


def test_codes_behind_another_tensor(tmp_path: Path) -> None:
    """Words come from the codes' own tensor, wherever it stands in the storage."""
    path = tmp_path / "scale_first.yaml"
    path.write_text(SCALE_FIRST)
    case = Case(path, "rows", ())
    assert matrix_unit_of(case).codes.words.__name__ == "_words_rows"
    check(case, shapes_of(case)[0], {}, 3, DTYPES[0])


# A record of codes that are small floats, its fields and tensor called as the kernel calls its own values.
RECORD = """
format: records_{code}
title: a record of 16 numbers of 8 bits and codes, called as functions call their own
source: nobody
weight: [N, K]
fields:
  both: u8[n, k // 32]
  low: u8[n, k // 32]
  lane: {code}[n, k]
decode: lane * both - low
storage:
  rows:
    head:
      run: k
      record: |
        b<4: low[b] low[b + 4]
        b<8: both[b]
        c<4 l<32: lane[64*c + l] lane[64*c + 32 + l]
"""


@pytest.mark.parametrize("code", ["i4", "u4", "e2m1"])
def test_records_of_names_and_small_floats(code: str, tmp_path: Path) -> None:
    path = tmp_path / f"records_{code}.yaml"
    path.write_text(RECORD.format(code=code))
    case = Case(path, "rows", ())
    assert matrix_unit_of(case).records.tensor == "head"
    for i, dtype in enumerate(DTYPES):
        check(case, shapes_of(case)[i], {}, 1, dtype)
