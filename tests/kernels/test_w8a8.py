"""Products of 8 bits with 8 bits: x quantized by torch and by the kernel, and products against float64 of that very x."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from qdsl.generated import bf16, fp8_block, fp8_channel, fp8_tensor, int8_block, int8_channel, int8_tensor, q4_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.gpu.devices import GPUS
from qdsl.runtime.gpu.families import w8a8
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch import ops
from qdsl.runtime.weight import eight
from qdsl.runtime.weight.matrix_unit import EightBit
from tests.support import compiling
from tests.support.formats import Case, cases, random_packed
from tests.support.interpreter import INTERPRETED, guarded, times

DEVICE = "cpu" if INTERPRETED else "cuda"
CASES = [case for case in cases() if (lanes := case.module.FORMAT.variant(case.choice).storages[case.storage].kernels.matrix_unit)
         and lanes.eight]
E4M3 = [case for case in CASES if case.path.stem.startswith("fp8")]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A short last tile of rows; a short last block of rows of a scale; whole tiles, and a row of x more than a tile has.
SHAPES = ((20, 256, 5), (200, 384, 17), (64, 128, 33))


def packed_of(case: Case, shape: tuple[int, int], params: Mapping[str, int | str] | None = None, seed: int = 0) -> PackedWeight:
    return random_packed(case, shape, seed, params).to(DEVICE)


def x_of(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of different magnitude, one of them zeros."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 2, rows)[:, None]
    x[rows // 2] = 0
    return x.to(dtype).to(DEVICE)


def narrow_of(packed: PackedWeight) -> tuple[str, bool]:
    lanes = packed.layout.kernels.matrix_unit
    return lanes.eight.type, lanes.eight.groups


def exact(x: torch.Tensor, packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the quantized x in float64, and of magnitudes."""
    kind, groups = narrow_of(packed)
    codes, scales = eight.quantize_x(x.cpu(), kind, groups)
    wide = codes.double() * scales.double().repeat_interleave(128 if groups else x.shape[1], 1)[:, :x.shape[1]]
    fields = {name: field.cpu() for name, field in packed.format.unpack(packed).items()}
    weight = packed.format.dequantize(packed.to("cpu"), torch.float32).double()
    q, s = fields["q"].double(), fields["s"].double().abs()
    by = (s if s.dim() == 2 else s.reshape(-1, 1)).repeat_interleave(packed.sizes.get("bn", 1), 0)
    by = by.repeat_interleave(packed.sizes.get("bk", packed.shape[1]), 1)[:packed.shape[0], :packed.shape[1]]
    return wide @ weight.t(), wide.abs() @ ((q.abs() + (128 if "z" in fields else 0)) * by).t()


def check(product: torch.Tensor, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None, bits: int = 24) -> None:
    """Within what rounding the result once and sums of K terms in numbers of so many bits may lose."""
    wanted, spread = exact(x, packed)
    if bias is not None:
        wanted, spread = wanted + bias.cpu().double(), spread + bias.cpu().double().abs()
    info = torch.finfo(x.dtype)
    wanted = wanted.clamp(info.min, info.max)
    bound = wanted.abs() * info.eps / 2 + spread * (x.shape[1] // 32 + 4) * 2.0 ** -bits + info.tiny
    assert ((product.cpu().double().clamp(info.min, info.max) - wanted).abs() <= bound).all()


def product(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None, launched: list[Call] | None = None,
            ) -> torch.Tensor:
    """By the kernels; they touch nothing else, and store every element once.  launched: gets their launches."""
    out = torch.full((x.shape[0], packed.shape[0]), torch.nan, dtype=x.dtype, device=DEVICE)
    calls = list(launch.quantized_calls(x, packed, bias, out))
    assert [call.family for call in calls] in (["quantize", "w8a8"], ["w8a8"])
    with guarded(packed, x, bias, out, *(tensor for call in calls for tensor in call.tensors)) as trace:
        for call in calls:
            call.run()
    if launched is not None:
        launched.extend(calls)
    assert not INTERPRETED or (times(trace.stores, out) == 1).all()
    for operand in calls[0].arguments[1:4] if len(calls) == 2 else ():
        assert not INTERPRETED or operand is None or (times(trace.stores, operand) == 1).all()
    return out


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches as where matrix units take no E4M3."""
    monkeypatch.setattr(configure, "has_fp8", lambda device: False)


def test_the_formats_that_have_it() -> None:
    names = {case.path.stem for case in CASES if case.storage == "safetensors"}
    assert names == {"fp8_block", "fp8_channel", "fp8_tensor", "int8_block", "int8_channel", "int8_tensor"}


# -- x -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("kind", ["e4m3", "i8"])
def test_codes_are_the_nearest(kind: str, groups: bool) -> None:
    """Of the type's own numbers, none is nearer to x by the scale; the largest of a group is the largest of the type."""
    x = x_of(6, 256, torch.float32).cpu()
    codes, scales = eight.quantize_x(x, kind, groups)
    assert codes.shape == (6, 256) and scales.shape == (6, 2 if groups else 1) and scales.dtype == torch.float32
    wide = x.unflatten(1, (scales.shape[1], -1)).double() / scales.double()[..., None]
    numbers = torch.arange(-127, 128).double() if kind == "i8" else \
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(0)
    best = (wide.flatten(1)[..., None] - numbers).abs().amin(2)
    error = (wide.flatten(1) - codes.double()).abs()
    assert (error <= best + wide.flatten(1).abs() * 2.0 ** -22).all()
    top = codes.double().abs().unflatten(1, (scales.shape[1], -1)).amax(2)
    assert (top[x.unflatten(1, (scales.shape[1], -1)).abs().amax(2) > 0] == eight.LARGEST[kind]).all()


def hard(dtype: torch.dtype) -> torch.Tensor:
    """Rows with ties, subnormal numbers of e4m3, tiny and huge numbers, both zeros, infinity and NaN."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448)
    between = codes.sort().values
    between = (between[1:] + between[:-1]) / 2
    x = torch.randn(11, 256, generator=generator)
    x[0], x[1], x[1, 0] = codes, torch.cat((between, codes[:1])), 448
    x[2] = torch.arange(-127.5, 128.5)[:256].clamp(-127, 127)
    x[3], x[4] = 0, -0.0
    x[5] *= 1e-38
    x[6] *= 1e-45 if dtype == torch.float32 else 1e-40
    x[7] = x[7].sign() * torch.finfo(dtype).max
    x[8, 3], x[9, 200], x[10, 0] = torch.inf, torch.nan, -torch.inf
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_makes_the_bits_of_torch(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = packed_of(case, (128, 256)), hard(dtype)
    kind, groups = narrow_of(packed)
    monkeypatch.setattr(w8a8, "split_of_k", lambda *_: (1, False))
    call = next(launch.quantized_calls(x, packed, None, torch.empty(11, 128, device=DEVICE)))
    call.run()
    codes, scales = eight.quantize_x(x.cpu(), kind, groups)
    assert torch.equal(call.arguments[1].cpu(), codes.view(torch.uint8 if kind == "e4m3" else torch.int8))
    assert torch.equal(call.arguments[2].cpu().t().nan_to_num(-1), scales.nan_to_num(-1))
    assert scales[8:].isnan().any(1).all() and not scales[:8].isnan().any()
    if call.arguments[3] is not None:
        assert torch.equal(call.arguments[3].cpu()[0], codes.sum(1, dtype=torch.int64).float())


def test_e4m3_as_float16(ampere: None) -> None:
    packed, x = packed_of(E4M3[0], (128, 256)), hard(torch.float32)
    call = next(launch.quantized_calls(x, packed, None, torch.empty(11, 128, device=DEVICE)))
    call.run()
    assert call.arguments[1].dtype == torch.float16
    assert torch.equal(call.arguments[1].cpu(), eight.quantize_x(x.cpu(), *narrow_of(packed))[0].half())


# -- products ----------------------------------------------------------------------------------------------------------


def bits_of(packed: PackedWeight) -> int:
    """What sums keep: float32's bits, but on a GPU of E4M3 about 13."""
    return 24 if INTERPRETED or narrow_of(packed)[0] == "i8" else 13


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel(case: Case) -> None:
    for i, (n, k, m) in enumerate(SHAPES):
        packed, x = packed_of(case, (n, k)), x_of(m, k, DTYPES[i])
        bias = None if i == 1 else x_of(3, n, DTYPES[i])[0]
        check(product(x, packed, bias), x, packed, bias, bits_of(packed))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_x_as_rows_of_the_matrix_unit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for many rows, in a tile that the interpreter takes; a short last tile of rows of w and of x.

    A trip of two chunks gives the bits of two trips.
    """
    packed, x = packed_of(case, (200, 256)), x_of(33, 256, torch.bfloat16)
    bias = x_of(3, 200, torch.bfloat16)[0]
    products = []
    for unroll in (1, 2):
        config = {"BN": 64, "BM": 32, "STAGES": 3, "TOKENS": 1, "UNROLL": unroll}
        monkeypatch.setattr(w8a8, "configuration", lambda *_, config=config: (config, 4))
        products.append(product(x, packed, bias))
    check(products[0], x, packed, bias, bits_of(packed))
    assert torch.equal(*products)


@pytest.mark.parametrize(("tokens", "unroll"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_that_share_k(case: Case, tokens: int, unroll: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them take 2, 2 and 1 trips: the same sums, and of int8 the same bits; counters are 0 again."""
    config = {"BN": 64, "BM": 16, "STAGES": 3, "TOKENS": tokens, "UNROLL": unroll}
    monkeypatch.setattr(w8a8, "configuration", lambda *_: (config, 4))
    monkeypatch.setattr(w8a8, "split_of_k", lambda *_: (1, False))
    k = 640 * unroll
    packed, x = packed_of(case, (72, k)), x_of(18, k, torch.bfloat16)
    bias = x_of(3, 72, torch.bfloat16)[0]
    alone = product(x, packed, bias)
    monkeypatch.setattr(w8a8, "split_of_k", lambda *_: (3, False))
    shared = product(x, packed, bias, launched := [])
    assert launched[-1].grid == (2, 2, 3) and not launched[-1].scratch[1].any()
    check(shared, x, packed, bias, bits_of(packed))
    kind, groups = narrow_of(packed)
    assert kind != "i8" or groups or torch.equal(shared, alone)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("case", [case for case in CASES if case.path.stem in ("fp8_block", "int8_block")], ids=str)
def test_programs_that_quantize_x(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch in place of two, and the same bits; for infinity and NaN, ties, subnormal numbers and zeros too."""
    packed, x, bias = packed_of(case, (72, 256)), hard(dtype), x_of(3, 72, dtype)[0]
    products = []
    for split, itself in ((1, False), (1, True), (2, True)):
        monkeypatch.setattr(w8a8, "split_of_k", lambda *_, way=(split, itself): way)
        products.append(product(x, packed, bias, launched := []))
        assert [call.family for call in launched] == ["quantize", "w8a8"][itself:]
    alone, own, shared = products
    assert torch.equal(alone.nan_to_num(-1), own.nan_to_num(-1)) and torch.equal(alone.isnan(), own.isnan())
    assert own[8:].isnan().all() and not own[:7].isnan().any()
    assert torch.equal(own.isnan(), shared.isnan())


def test_how_many_programs_share_k() -> None:
    """None where tiles fill the GPU; more of them for fewer tiles; at least 512 columns each."""
    ways = [w8a8.split_of_k(n // 64, 64, 16, 4096, n * 4096, False, GPUS["h200"]) for n in (512, 1024, 2048, 4096, 8192, 28672)]
    assert not any(itself for _, itself in ways)
    parts = [split for split, _ in ways]
    assert parts[3] == 2 and parts[-1] == 1 and parts[0] > 4 and sorted(parts, reverse=True) == parts
    assert w8a8.split_of_k(8, 64, 16, 1024, 512 * 1024, False, GPUS["h200"])[0] == 2


def test_when_programs_quantize_x() -> None:
    """Where that takes less than a launch before: not in long loops of many tiles."""
    h200 = GPUS["h200"]
    assert w8a8.split_of_k(64, 64, 16, 4096, 4096 * 4096, True, h200) == (4, True)
    assert not w8a8.split_of_k(448, 64, 16, 8192, 28672 * 8192, True, h200)[1]


def test_a_weight_without_zero_points() -> None:
    case = next(case for case in CASES if case.path.stem == "int8_channel")
    packed = packed_of(case, (20, 256))
    packed = packed.derive({name: tensor for name, tensor in packed.tensors.items() if "zero" not in name})
    x = x_of(4, 256, torch.float16)
    check(product(x, packed), x, packed)


@pytest.mark.parametrize("bn", [64, 32])
def test_blocks_of_fewer_rows_than_a_tile(bn: int) -> None:
    case = next(case for case in CASES if case.path.stem == "fp8_block")
    packed, x = packed_of(case, (100, 256), {"bn": bn}), x_of(5, 256, torch.bfloat16)
    check(product(x, packed), x, packed, None, bits_of(packed))


@pytest.mark.parametrize("case", E4M3, ids=str)
def test_without_matrix_units_for_e4m3(case: Case, ampere: None) -> None:
    """The same x, its products in float16 exactly."""
    n, k, m = SHAPES[0]
    packed, x = packed_of(case, (n, k)), x_of(m, k, torch.bfloat16)
    check(product(x, packed), x, packed)


def test_int8_sums_are_exact() -> None:
    """The largest codes all along the longest K that there is a kernel for: float32 would lose their last bits."""
    k = w8a8.SHORT
    codes = torch.full((1, k), -128, dtype=torch.int8)
    codes[0, ::2] = 127
    packed = int8_tensor.pack({"q": codes, "s": torch.ones(1, dtype=torch.float32)[0]}, scale_type="f32").to(DEVICE)
    x = torch.full((1, k), 127.0, device=DEVICE)
    x[0, 1::2] = -127
    assert launch.has_quantized(x, packed) and not launch.has_quantized(torch.empty(1, k + 128), packed)
    out = product(x, packed)
    assert out.item() == float(torch.tensor(127 * 255 * (k // 2)).float())


@pytest.mark.parametrize("m", [1, 16, 40, 70, 200])
@pytest.mark.parametrize("n", [128, 1 << 15])
@pytest.mark.parametrize("capability", [8, 9, 10])
def test_tiles(m: int, n: int, capability: int) -> None:
    """What is launched covers out, and holds no more in shared memory than the device has."""
    kernel = EightBit("e4m3", "q", groups=True)
    for wide in (False, True):
        with configure.assumed(capability, 132):
            config, warps = w8a8.configuration(m, n, 512, kernel, wide, torch.device("cpu"))
            assert w8a8.configuration(m, n, 384, kernel, wide, torch.device("cpu"))[0]["UNROLL"] == 1
        assert config["BN"] % 64 == 0 and config["BM"] % 16 == 0 and config["BN"] * config["BM"] <= 2048 * warps
        assert config["UNROLL"] == 1 or (capability > 8 and m > 32 and not wide)
        bytes_ = config["STAGES"] * config["UNROLL"] * 128 * (config["BN"] + config["BM"] * (2 if wide else 1))
        assert bytes_ + 2560 <= (99 if capability < 9 else 227) * 1024, (config, bytes_)


def test_trips_of_two_chunks() -> None:
    """For many rows of x on Hopper, unless int8 is summed in place; on Blackwell for E4M3 with scales along K."""
    kernels = [EightBit(type, "q", groups=groups) for type in ("e4m3", "i8") for groups in (True, False)]
    for capability, chunks in ((8, [1, 1, 1, 1]), (9, [2, 2, 2, 1]), (10, [2, 1, 1, 1])):
        with configure.assumed(capability, 132):
            configs = [w8a8.configuration(4096, 4096, 4096, kernel, False, torch.device("cpu"))[0] for kernel in kernels]
        assert [config["UNROLL"] for config in configs] == chunks


# Instructions per weight in the loop, and the matrix unit's instruction.
COUNTS = {
    "fp8_block 16 sm_90": (4.6, "QGMMA.64x16x32.F32.E4M3.E4M3"), "fp8_block 128 sm_90": (1.8, "QGMMA.64x64x32.F32.E4M3.E4M3"),
    "fp8_block 4096 sm_90": (2.3, "QGMMA.64x128x32.F32.E4M3.E4M3"), "fp8_block 512 sm_90": (2.3, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    "fp8_block 512 sm_100": (2.0, "UTCQMMA"),
    "fp8_channel 512 sm_90": (1.95, "QGMMA.64x128x32.F32.E4M3.E4M3"), "int8_channel 16 sm_90": (1.2, "IGMMA.64x16x32.S8.S8"),
    "int8_channel 512 sm_90": (1.3, "IGMMA.64x128x32.S8.S8"), "int8_channel 512 sm_80": (2.3, "IMMA.16832.S8.S8.SAT"),
    "fp8_block 512 sm_80": (14.5, "HMMA.16816.F32"), "one sm_90": (2.21, "HMMA.16816.F32"),
    "experts sm_90": (2.23, "HMMA.16816.F32"),
    "decoded experts 16 sm_90": (1.7, "HMMA.16816.F32.BF16"),
    "decoded experts 128 sm_90": (2.6, "HGMMA.64x128x16.F32.BF16"),
}


def test_compiled() -> None:
    """For GPUs that are not there: 8 bits meet 8 bits, nothing is spilled, and experts cost what one weight does."""
    done = compiling.run("tests.kernels.narrow_kernels")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {f"{row['title']} {row['arch']}": row for row in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == COUNTS.keys()
    for title, row in rows.items():
        most, instruction = COUNTS[title]
        assert row["tensor"] == [instruction] and row["hot"] <= most, (title, row)
        room = 99 if row["arch"] == "sm_80" else 227
        assert row["spills"] == row["stack"] == 0 and row["shared"] <= room * 1024, (title, row)
    slots, matrices = (rows["fp8_block 4096 sm_90"][name] for name in ("issue", "matrices"))
    assert slots <= 40e-6 and 64e-6 < matrices < 67e-6


# -- the functions -----------------------------------------------------------------------------------------------------

MODULES = [fp8_block, fp8_channel, fp8_tensor, int8_block, int8_channel, int8_tensor]


def weight_of(module: ModuleType, n: int = 96, k: int = 256) -> PackedWeight:
    return module.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(2))).to(DEVICE)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.SPEC.name)
def test_linear(module: ModuleType, dtype: torch.dtype) -> None:
    """It is the product of the quantized x, and not of x; leading axes stay."""
    packed, x = weight_of(module), x_of(6, 256, dtype)
    bias = torch.randn(96, device=DEVICE).to(dtype)
    product = module.linear(x.unflatten(0, (2, 3)), packed, bias, quantize_x=True)
    assert product.shape == (2, 3, 96) and product.dtype == dtype
    check(product.flatten(0, 1), x, packed, bias, bits_of(packed))
    assert not torch.equal(product.flatten(0, 1), module.linear(x, packed, bias))


def test_columns_that_are_no_whole_chunks() -> None:
    packed, x = weight_of(fp8_block, 40, 320), x_of(3, 320, torch.float32)
    _, scales = eight.quantize_x(x.cpu(), "e4m3", True)
    assert scales.shape == (3, 3)
    assert torch.equal(scales[:, 2], (x[:, 256:].cpu().abs().amax(1) / 448).clamp(min=2.0 ** -126))
    check(fp8_block.linear(x, packed, quantize_x=True), x, packed)


def test_numbers_that_are_not_finite_stay_in_their_rows() -> None:
    packed, x = weight_of(fp8_channel), x_of(3, 256, torch.float32)
    x[1, 7] = torch.nan
    product = fp8_channel.linear(x, packed, quantize_x=True)
    assert product[1].isnan().all() and product[[0, 2]].isfinite().all()


@pytest.mark.parametrize("module", [fp8_block, int8_channel], ids=lambda module: module.SPEC.name)
def test_gradients_are_those_without(module: ModuleType) -> None:
    packed = weight_of(module)
    x = x_of(3, 256, torch.float32).requires_grad_()
    bias = torch.zeros(96, device=DEVICE, requires_grad=True)
    quantized = torch.autograd.grad(module.linear(x, packed, bias, quantize_x=True).sum(), (x, bias))
    plain = torch.autograd.grad(module.linear(x, packed, bias).sum(), (x, bias))
    assert all(torch.equal(a, b) for a, b in zip(quantized, plain, strict=True))


def test_layer() -> None:
    packed, x = weight_of(int8_channel), x_of(4, 256, torch.bfloat16)
    layer, plain = int8_channel.Linear(packed, quantize_x=True), int8_channel.Linear(packed)
    wanted = int8_channel.linear(x, packed, quantize_x=True)
    assert torch.equal(layer(x), wanted) and not torch.equal(plain(x), wanted)
    assert "quantize_x=True" in repr(layer) and "quantize_x" not in repr(plain)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    plain.quantize_x = True
    assert torch.equal(plain(x), wanted)


def test_compilers_see_it() -> None:
    packed, x = weight_of(fp8_block), x_of(4, 256, torch.float32)
    layer = fp8_block.Linear(packed, quantize_x=True)
    wanted = layer(x)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), wanted)
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), wanted)
    node = next(node for node in program.graph.nodes if node.target == torch.ops.qdsl.linear.default)
    assert node.args[-1] == "quantize_x"
    x.requires_grad_()
    to_x, = torch.autograd.grad(torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum(), x)
    assert torch.equal(to_x, torch.autograd.grad(layer(x).sum(), x)[0])


@pytest.mark.parametrize("quantize_x", [True, False])
def test_the_operation_is_what_torch_asks_of_one(quantize_x: bool) -> None:
    packed = weight_of(int8_channel)
    tensors, key = ops.operation_arguments(packed)
    x = x_of(3, 256, torch.float32).requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    mode = "quantize_x" if quantize_x else ""
    torch.library.opcheck(ops._linear, (x, tensors, None, key, mode), test_utils=checks)


def test_other_weights_are_refused() -> None:
    x = torch.zeros(1, 256, device=DEVICE)
    for module in (q4_0, bf16):
        with pytest.raises(FormatError, match=f"quantize_x: {module.SPEC.name}.* does not hold its codes as rows of 8 bits"):
            module.linear(x, weight_of(module), quantize_x=True)
    with pytest.raises(FormatError, match="groups of 128 columns, and bk = 64 is no multiple"):
        fp8_block.linear(x, fp8_block.quantize(torch.ones(64, 256), bk=64).to(DEVICE), quantize_x=True)
    with pytest.raises(FormatError, match=r"quantize_x: fp8_block\.planar does not hold"):
        fp8_block.Linear(fp8_block.quantize(torch.ones(64, 256), "planar"), quantize_x=True)
