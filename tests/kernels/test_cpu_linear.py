"""Products on a CPU: the rewritten decode of every format, the compiled loop of a few, and what happens without a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from qdsl.generated import bf16, fp8_block, int_group, q4_0, q8_0
from qdsl.runtime import PackedWeight
from qdsl.runtime.cpu import linear as cpu
from tests.support.covering import ALL, covering
from tests.support.formats import Case, cases, random_fields, same_bits, shapes, smallest

CASES = cases()
# What the rewriting works on: of most formats no line is new to it.
COVERING = covering(CASES, lambda case: [(variant := case.module.FORMAT.variant(case.choice)).decode,
                                         variant.storages[case.storage].unpack])
SHARED = len(CASES) if ALL else 8
# Groups of 9 are cut short at 256 columns, 20 groups lie beside planes of 16, 3 bits lie in two planes, columns lie in ranges,
# codes straddle words or fill them unevenly, scales lie in records with others, a grid is no table of 16 numbers, and neither are
# stored tables, nested scales or roundings: plain tiles serve these.  int4pack's padded tiles have no program.
# Words of 10 codes under groups of 128 would take 1,024 lanes.
PLAIN = {"same_names.wide-group9", "planes.rows", "same_names.planar-group9", "q3_k.planar", "tq1_0.gguf", "ranges.runs",
         "aqlm_2x8.aqlm-realf16", "learned_rows.rows", "learned_levels.levels",
         "half_steps.bytes-scale_typebf16",
         *(f"squeezellm.squeezellm-bits{bits}-level_typef32" for bits in (4, 3)),
         *(f"coreml_vectors.coreml-bits{bits}-rows4-level_typef16" for bits in (4, 8)),
         *(f"coreml_lut.coreml-bits{bits}-rows32-level_typef16" for bits in (4, 2, 6, 8)),
         "ranges.words", "nf4_nested.bitsandbytes-block64", "bnb_fp4_nested.bitsandbytes-block64",
         *(f"int_group.{storage}-group128-scale_typef16" for storage in (
             "planar-bits3", "pack_quantized-bits3", "gptq_p-bits3", "gptq_p-bits5", "gptq_p-bits7",
             "pack_quantized-bits5", "pack_quantized-bits7",
             "pack_quantized_0_17-bits3", "pack_quantized_0_17-bits5", "pack_quantized_0_17-bits6",
             "marlin-bits4", "awq_gemv-bits4")),
         *(f"{name}-bits3-group64-scale_typef16" for name in ("hqq.hqq_3bit", "hqq_axis0.hqq_3bit", "hqq.planar")),
         *(f"int4pack.{storage}-group128-scale_typebf16" for storage in ("tile_packed", "cpu_avx512")),
         *(f"{name}.gguf" for name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"))}
WEIGHTS: dict[str, Callable[[], PackedWeight]] = {
    "q8_0": lambda: q8_0.quantize(sample(48, 256)),
    "q4_0": lambda: q4_0.quantize(sample(48, 256)),
    "fp8_block, a short block of rows": lambda: fp8_block.quantize(sample(160, 256), bn=128, bk=128),
    "gptq": lambda: int_group.quantize(sample(64, 256), "gptq_v2", bits=4, group=128),
    "awq": lambda: int_group.quantize(sample(256, 128), "awq", bits=4, group=64),
}


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 16).to(dtype)


def check(product: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Against float64, with exact weights: a float32 sum of K + 1 terms in any order, rounded to x's dtype once."""
    extra = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double()
    wanted = x.double() @ weight.double().t() + extra
    spread = x.double().abs() @ weight.double().abs().t() + extra.abs()
    info = torch.finfo(x.dtype)
    sums = 1.01 * (weight.shape[1] + 1) * 2.0 ** -24 * spread
    assert product.dtype == x.dtype and product.shape == wanted.shape
    allowed = sums + info.eps / 2 * (wanted.abs() + sums) + info.smallest_normal * info.eps
    assert ((product.double() - wanted).abs() <= allowed).all()


def in_order(case: Case, shape: tuple[int, int], seed: int = 0) -> PackedWeight:
    """A random weight without an order of its columns: the form of a loop."""
    fields = case.module.FORMAT.variant(case.choice).fields
    stored = {name: value for name, value in random_fields(case, shape, seed).items() if fields[name].type != "index"}
    packed: PackedWeight = case.module.pack(stored, storage=case.storage, **case.choice)
    return packed.decode_streams()


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products are compiled in these tests, each with programs of its own."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)    # pytest would keep all that torch tells
    cpu._programs.clear()
    cpu.compile_products()
    yield
    cpu.compile_products(False)
    cpu._programs.clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run as they were traced, without a compiler."""
    def built(program: fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> list[Tensor]:
            result = program(*tensors)
            return result if isinstance(result, list) else [result]

        return run

    monkeypatch.setattr(cpu, "_built", built)


# -- every format, as traced -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", COVERING if ALL else COVERING[1::2], ids=str)
def test_the_rewritten_decode_makes_the_same_bits(case: Case) -> None:
    packed = in_order(case, next(iter(shapes(case, (128,), (256,))), smallest(case, tiles=2)))
    decode = cpu._program(packed, torch.bfloat16)
    assert (decode is None) == (str(case) in PLAIN)
    if decode is not None:
        assert same_bits(decode(*packed.tensors.values()), case.module.dequantize(packed, torch.bfloat16))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", COVERING if ALL else COVERING[::2], ids=str)
def test_few_rows_meet_exact_weights(case: Case) -> None:
    """A ragged shape where the format has one, else a whole one; the way is the loop wherever its program could be made.

    Several rows of x share a pass over the weight, which is the same for all formats: the first few stand for them.
    """
    shape = [smallest(case), *shapes(case, (7, 160), (33, 256))][-1]
    packed = in_order(case, shape)
    weight = case.module.dequantize(packed, torch.float32)
    for rows in (1, 3) if case in COVERING[:SHARED] else (1,):
        x = sample(rows, shape[1], seed=rows)
        check(case.module.linear(x, packed), x, weight)


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_compiled_loop(name: str) -> None:
    packed = WEIGHTS[name]()
    weight = packed.format.dequantize(packed, torch.float32)
    bias = sample(packed.shape[0], seed=9)
    for rows, dtype in ((1, torch.bfloat16), (3, torch.float32), (6, torch.float16)):
        x = sample(rows, packed.shape[1], seed=rows, dtype=dtype)
        product = packed.format.linear(x, packed, bias)
        check(product, x, weight, bias)
        assert same_bits(product, packed.format.linear(x, packed, bias))
    assert cpu._programs and None not in cpu._programs.values()


@pytest.mark.parametrize("name", ["q4_0", "fp8_block, a short block of rows"])
def test_the_compiled_decode_makes_the_same_bits(name: str) -> None:
    packed = WEIGHTS[name]()
    whole = packed.cut("N", 0, packed.shape[0] // 128 * 128 or packed.shape[0])
    decode = cpu._program(whole, torch.bfloat16)
    assert decode is not None
    assert same_bits(decode(*whole.tensors.values()), packed.format.dequantize(whole, torch.bfloat16))


def test_rows_of_x_do_not_depend_on_their_neighbours() -> None:
    packed, x = WEIGHTS["q8_0"](), sample(8, 256)
    assert same_bits(q8_0.linear(x[:2], packed)[1:], q8_0.linear(x[1:2], packed))
    assert same_bits(q8_0.linear(x, packed)[4:7], q8_0.linear(x[4:7], packed))


def test_nan_codes_stay_nan() -> None:
    packed = fp8_block.quantize(sample(128, 128), bn=128, bk=128)
    packed.tensors["weight"].view(torch.uint8)[5, 7] = 127
    product = fp8_block.linear(torch.ones(1, 128), packed)
    assert product.isnan().nonzero().tolist() == [[0, 5]]


# -- memory, threads, and what is not compiled -------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of a floating tensor that an operation made in memory of its own."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.numel = 0
        self.stored = {tensor.untyped_storage().data_ptr() for tensor in packed.tensors.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for part in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            if isinstance(part, Tensor) and part.is_floating_point() and part.untyped_storage().data_ptr() not in self.stored:
                self.numel = max(self.numel, part.numel())
        return outputs


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_weight_is_never_there_at_once(rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE", 1 << 13)
    cpu.compile_products(compiled)
    packed, x = q8_0.quantize(sample(512, 128)), sample(rows, 128)
    wanted = q8_0.linear(x, packed)                              # compiled here, outside what is watched
    with Largest(packed) as largest:
        product = q8_0.linear(x, packed)
    assert same_bits(product, wanted)
    assert largest.numel <= max(1 << 13, rows * 512)
    assert bool(cpu._programs) == compiled


@pytest.mark.usefixtures("traced")
def test_threads_make_a_program_once(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[object] = []
    make = cpu._try_compile
    monkeypatch.setattr(cpu, "_try_compile", lambda *args: programs.append(args) or make(*args))
    packed, x = WEIGHTS["q4_0"](), sample(1, 256)
    with ThreadPoolExecutor(4) as pool:
        products = list(pool.map(lambda _: q4_0.linear(x, packed), range(8)))
    assert len(programs) == 1 and all(same_bits(product, products[0]) for product in products)


def test_without_a_compiler_tiles_do_it_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise OSError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", missing)
    packed, x = WEIGHTS["q8_0"](), sample(1, 256)
    with pytest.warns(RuntimeWarning, match="not compiled: No working C"):
        product = q8_0.linear(x, packed)
    again = q8_0.linear(x, packed)                               # not tried again: a warning would be an error here
    cpu.compile_products(False)
    assert same_bits(product, q8_0.linear(x, packed)) and same_bits(again, product)


def test_nothing_is_compiled_unasked() -> None:
    cpu.compile_products(False)
    q8_0.linear(sample(1, 256), WEIGHTS["q8_0"]())
    assert not cpu._programs


def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MOST", 0)
    packed, x = WEIGHTS["q8_0"](), sample(1, 256)
    check(q8_0.linear(x, packed), x, q8_0.dequantize(packed, torch.float32))
    assert not cpu._programs


def test_act_order_goes_by_tiles() -> None:
    order = torch.arange(256, dtype=torch.int32) % 4
    fields = {**int_group.unpack(WEIGHTS["gptq"]()), "g": order}
    fields |= {name: fields[name].repeat(1, 2) for name in ("z", "s")}
    packed = int_group.pack(fields, "gptq_v2", bits=4, group=64)
    x = sample(1, 256)
    check(int_group.linear(x, packed), x, int_group.dequantize(packed, torch.float32))
    assert set(cpu._programs.values()) == {None}


def test_columns_by_groups_take_the_loop() -> None:
    """x is put in their order, and the loop is that of a weight in order."""
    columns = torch.randperm(128, generator=torch.Generator().manual_seed(0)).int()
    fields = {**int_group.unpack(WEIGHTS["awq"]()), "g": columns // 64}
    packed = int_group.pack(fields, "planar", bits=4, group=64)
    x = sample(1, 128)
    check(int_group.linear(x, packed), x, int_group.dequantize(packed, torch.float32))
    assert packed.order is not None and None not in set(cpu._programs.values())


def test_bytes_at_odd_addresses_go_by_tiles() -> None:
    packed = WEIGHTS["q8_0"]()
    blocks = packed.tensors["blocks"]
    moved = torch.empty(blocks.numel() + 1, dtype=torch.uint8)[1:].view(blocks.shape).copy_(blocks)
    x = sample(1, 256)
    assert not (q8_0.linear(x, packed) - q8_0.linear(x, q8_0.wrap({"blocks": moved}))).abs().max() > 1e-5
    assert {program is None for program in cpu._programs.values()} == {False, True}


def test_plain_weights_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = sample(64, 128, dtype=torch.bfloat16), sample(3, 128, dtype=torch.bfloat16)
    packed = bf16.quantize(weight)
    monkeypatch.setattr(cpu, "decode_rows", None)                # would be called
    assert same_bits(bf16.linear(x, packed), torch.nn.functional.linear(x, weight))
