"""Weights cut along K: kernels read them where they lie, between columns of other weights, and give the bits of a copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bench.gpu import regimes
from qdsl.generated import any_precision, fp8_block, int8_channel, int_group, q4_0
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, launch, plan, strides, tiles
from qdsl.runtime.gpu.families import ANY_GPU
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch import experts
from tests.kernels.test_large import run_last, sparse
from tests.support.covering import ALL, covering, kernels
from tests.support.formats import Case, assert_same, cases, random_fields, random_packed, shapes
from tests.support.interpreter import INTERPRETED, guarded

DEVICE = "cpu" if INTERPRETED else "cuda"
BF16 = torch.bfloat16
ROWS = (3, 8, 16, 32, 64, 128)


def whole_of(case: Case, turn: int) -> tuple[PackedWeight, int] | None:
    """A weight, and the columns at whose multiples it is cut; None where only rows can be cut.  turn: which of three lengths."""
    layout = case.module.FORMAT.variant(case.choice).storages[case.storage]
    if layout.streams or layout.fixed:
        return None
    n, k = next(shapes(case, ROWS, (1536, 3072, 6144)), (0, 0))
    if not n or (step := case.module.FORMAT.empty((n, k), case.storage, "meta", **case.choice).step("K")) >= k:
        return None
    step = math.lcm(step, 128) if layout.kernels.matrix_unit and turn else step
    lengths = [3 * step] if turn else [2 * step + tail for tail in (90, 64, 32) if step % 128 == 0 or tail < step]
    length = next((k for k in lengths if any(shapes(case, (n,), (k,)))), 3 * step)
    return in_order(case, (n, length), turn), step


def in_order(case: Case, shape: tuple[int, int], seed: int) -> PackedWeight:
    """A random weight whose columns, where an index says their groups, are in order: others cannot be cut."""
    format = case.module.FORMAT
    fields = random_fields(case, shape, seed)
    for name, field in format.variant(case.choice).fields.items():
        if field.groups is not None and name in fields:
            fields[name] = (torch.arange(shape[1]) // field.groups.by(format.sizes(case.choice, shape))).int()
    packed: PackedWeight = case.module.pack(fields, storage=case.storage, **case.choice)
    return packed.to(DEVICE)


def part_of(case: Case, turn: int) -> PackedWeight | None:
    """Columns in the middle of a weight, its last two steps, or by turn 0 last ones that may end in a part of a word."""
    if (cut := whole_of(case, turn)) is None:
        return None
    whole, step = cut
    return whole.cut("K", step if turn else 2 * step, 2 * step if turn == 1 else whole.shape[1])


def copied(packed: PackedWeight) -> PackedWeight:
    return packed.apply(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))


def memory(packed: PackedWeight) -> set[int]:
    """Where the tensors begin that kernels read."""
    read = [tensor for name, tensor in packed.tensors.items() if name in packed.layout.coded and name not in packed.in_order]
    return {tensor.data_ptr() for tensor in read if tensor.numel()}


def axes_of(case: Case) -> tuple[object, ...]:
    """Where a storage's rows lie in its tensors, and how many of them a unit of its kernels has."""
    layout = case.module.FORMAT.variant(case.choice).storages[case.storage]
    return layout.kernels.sums, *((*(axis.dim for axis in stored.axes), stored.axes[0].text) for stored in layout.tensors.values()
                                  if stored.axes)


CASES = cases()
LAYOUTS = CASES if ALL else [*{axes_of(case): case for case in CASES}.values()]
COPIED = ("any_precision.any_precision", "planes.planes", "flute.flute", "int_group.modelopt", "learned_levels.levels")


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_units_between_gaps(case: Case) -> None:
    """`dequantize`, of every way in which rows lie in tensors: all bits, no other column is read, and nothing is copied."""
    turns = range(3) if ALL else [LAYOUTS.index(case) % 3]
    for part in filter(None, (part_of(case, turn) for turn in turns)):
        out = torch.full(part.shape, torch.nan, device=DEVICE)
        if why := strides.why_unreadable(part):
            assert str(case).startswith(COPIED) or (part.shape[1] % 128 == 0 and "one longer weight" in why), why
        [call] = launch.dequantize_calls(part, out)
        own = strides.gapless_weight(part)
        assert (own is part) == (not why) and memory(own) <= {tensor.data_ptr() for tensor in call.tensors}
        with guarded(own, out):
            call.run()
        assert_same(out.cpu(), case.module.dequantize(copied(part).to("cpu"), torch.float32), part)


@pytest.mark.parametrize("name", ["q4_0.gguf", "int_group.pack_quantized-bits4-group128-scale_typef16", "fp8_block.planar"])
def test_products_unit_by_unit(name: str) -> None:
    """`matvec` and `gemm`, of bytes with records, of words with groups and an optional zero point, and of blocks of rows."""
    case = next(case for case in CASES if str(case).startswith(name))
    part = part_of(case, 1)
    assert part is not None and strides.has_gaps(part)
    x = torch.randn(3, part.shape[1]).to(DEVICE).half()
    config = {"BN": 16, "BK": 16, "BM": 16, "SPLIT": 1, "EVEN": tiles.is_even(part, 16, 16)}
    for candidate in (plan.any_product(part, 3), ANY_GPU.candidate(part, 3, config)):
        assert_equal_products(x, part, lambda x, packed, out, candidate=candidate: [
            *launch.linear_calls(x, packed, None, out, candidate=candidate)])


def assert_equal_products(x: Tensor, part: PackedWeight, calls_of: Callable[[Tensor, PackedWeight, Tensor], list[Call]],
                          n: int | None = None) -> None:
    """The bits of the copy, by launches that read the weight itself and nothing between its rows."""
    products = []
    for packed in (part, copied(part)):
        out = torch.full((x.shape[0], n or packed.shape[0]), torch.nan, dtype=x.dtype, device=DEVICE)
        calls = calls_of(x, packed, out)
        read = {tensor.data_ptr() for call in calls for tensor in call.tensors}
        assert memory(packed) <= read | {0}, "a copy is read"
        others = [tensor for call in calls for tensor in call.tensors if tensor.data_ptr() not in memory(packed)]
        with guarded(packed, x, out, *others, *(tensor for call in calls for tensor in (*call.scratch, *call.workspace))):
            for call in calls:
                call.run()
        products.append(out)
    assert not products[0].isnan().any() and torch.equal(*products)


MATRIX = [case for case in CASES if kernels(case, "gemv", "skinny", "tile_gemm") and part_of(case, 1)]
PLANES = covering(MATRIX, lambda case: kernels(case, "gemv", "skinny", "tile_gemm"))


@pytest.mark.parametrize("case", PLANES, ids=str)
def test_matrix_units(case: Case) -> None:
    """gemv, gemv_records, skinny and tile_gemm by turns: strides of all planes follow from one pitch."""
    number = PLANES.index(case)
    part = part_of(case, 1 + number % 2)
    assert part is not None and not strides.why_unreadable(part)
    for rows in (1, 4, 12) if ALL else ((1, 4, 12)[number % 3],):
        x = torch.randn(rows, part.shape[1]).to(DEVICE).half()
        with configure.assumed(9, 132):
            candidate = regimes.candidate(x, part)
            families = part.layout.kernels.matrix_unit.families
            assert candidate is not None and (candidate.kind != "matvec" or "skinny" not in families)
            assert_equal_products(x, part, lambda x, packed, out, candidate=candidate: [
                *launch.linear_calls(x, packed, None, out, candidate=candidate)])


@pytest.mark.parametrize(("module", "rows"), [(fp8_block, 3), (fp8_block, 130), (int8_channel, 3)])
def test_eight_bits(module: ModuleType, rows: int) -> None:
    part = module.quantize(torch.randn(150, 1024)).to(DEVICE).cut("K", 512, 1024)
    x = torch.randn(rows, 512).to(DEVICE).to(BF16)
    assert strides.has_gaps(part) and launch.has_quantized(x, part)
    assert_equal_products(x, part, lambda x, packed, out: [*launch.quantized_calls(x, packed, None, out)])


def test_experts() -> None:
    """A rank's columns of all experts, [E, N, K] cut along K."""
    part = q4_0.planar(q4_0.quantize(torch.randn(3 * 16, 384))).to(DEVICE).cut("K", 128, 384)
    x = torch.randn(5, 256).to(DEVICE).half()
    tiles = experts.tile_map(torch.tensor([0, 3, 3, 5], device=DEVICE), 5)
    assert_equal_products(x, part, lambda x, packed, out: [*launch.grouped_calls(x, packed, tiles, None, out)], 16)


# -- when strides are no pitch -----------------------------------------------------------------------------------------


def test_the_pitch_is_the_longest_rows() -> None:
    """The one K from which all strides follow: of a whole that ends in a part of a word too; not where planes differ."""
    packed = int_group.planar(int_group.quantize(torch.randn(32, 1024), bits=3, group=128))
    for start, stop in ((0, 512), (512, 1024)):
        part = packed.cut("K", start, stop)
        assert strides.pitch(part) == 1024 and not strides.why_unreadable(part)
    assert strides.pitch(packed) is None and strides.pitch(packed.cut("N", 2, 5)) is None
    mixed = part.derive({**part.tensors, "scale": part.tensors["scale"].contiguous()} if "scale" in part.tensors else
                        {name: tensor.contiguous() if tensor.dtype == torch.float16 else tensor
                         for name, tensor in part.tensors.items()})
    assert strides.why_unreadable(mixed) == "the rows of its tensors are not those of one longer weight"
    own = strides.gapless_weight(mixed)
    assert not strides.has_gaps(own) and strides.gapless_weight(mixed) is own


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU meet kernels, as those on a GPU do; a copy is a failure."""
    if not INTERPRETED:
        pytest.skip("on a GPU tensors are there")
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    monkeypatch.setattr(PackedWeight, "apply", lambda *arguments: pytest.fail("a weight was copied"))


@pytest.mark.parametrize("form", [q4_0.planar, lambda packed: packed], ids=["planar", "gguf"])
def test_products_follow_the_weight(form: Callable[[PackedWeight], PackedWeight], on_gpu: None) -> None:
    """linear, Linear, torch.compile and experts: nothing is copied, so that what is changed in place is seen at once."""
    whole, x = form(q4_0.quantize(torch.randn(32, 512))), torch.randn(2, 256, dtype=BF16)
    part = whole.cut("K", 256, 512)
    own = part.derive({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in part.tensors.items()})
    wanted, grouped = q4_0.linear(x, own), experts.linear(x, own, torch.tensor([0, 1, 2]))
    layer = q4_0.Linear(part)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    offsets = torch.tensor([0, 1, 2])
    for product in (lambda: q4_0.linear(x, part), lambda: layer(x), lambda: compiled(x), lambda: compiled(x)):
        assert torch.equal(product(), wanted)
    assert torch.equal(experts.linear(x, part, offsets), grouped)
    assert part.dense is None and wanted.any()
    for tensor in whole.tensors.values():
        tensor.zero_()
    assert not any(product.any() for product in (q4_0.linear(x, part), layer(x), compiled(x), experts.linear(x, part, offsets)))


def test_planes_of_bits_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps within a plane of bits and between planes; the plan says why, and a changed weight is copied anew."""
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    case = next(case for case in CASES if case.path.stem == "any_precision")
    whole, x = random_packed(case, (16, 2048)), torch.randn(2, 1024, dtype=BF16)
    part = whole.cut("K", 1024, 2048)
    first = any_precision.linear(x, part)
    assert part.plan is not None and part.plan.note is not None
    assert part.plan.note.startswith("copied once, for the gaps in 'qweight' are not between rows of units")
    own = part.dense
    assert torch.equal(any_precision.linear(x, part), first) and part.dense is own
    for tensor in whole.tensors.values():
        tensor.zero_()
    assert not any_precision.linear(x, part).any() and part.dense is not own


# -- positions past 2^31 -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="one program of a launch, in the interpreter")
@pytest.mark.parametrize("storage", ["gguf", "planar"])
def test_last_program(storage: str) -> None:
    """A few columns of rows whose gaps add up to more than 2^31 bytes."""
    shape, columns = (1 << 17, 1 << 18), 256
    whole = q4_0.FORMAT.empty(shape, storage).apply(lambda tensor: sparse(tuple(tensor.shape), tensor.dtype))
    part, last = whole.cut("K", shape[1] - columns, shape[1]), random_packed(
        next(case for case in CASES if str(case) == f"q4_0.{storage}"), (64, columns))
    for name, tensor in part.cut("N", shape[0] - 64, shape[0]).tensors.items():
        tensor.copy_(last.tensors[name])
    weight, x = q4_0.dequantize(last, torch.float32), torch.eye(1, columns).half()
    out = sparse((shape[0], columns), torch.float32)
    [call] = launch.dequantize_calls(part, out)
    assert call.constants["LARGE"] and not strides.why_unreadable(part)
    run_last(call, part, None, out, weight)
    out = sparse((1, shape[0]), torch.float16)
    [call] = launch.linear_calls(x, part, None, out, candidate=regimes.candidate(x, part))
    run_last(call, part, x, out, (x.float() @ weight.t()).half())
