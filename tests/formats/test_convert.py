"""Changes of storage: words that move land where unpacking and packing put them, and nothing is made byte by byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qdsl.compiler.passes.derive_planar import PLANAR
from qdsl.core.slices import PlacedPiece, place_piece
from qdsl.generated import int_group, q4_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight import convert, tiles, transpose
from qdsl.runtime.weight.defaults import is_default
from tests.support.covering import quarter_of
from tests.support.formats import Case, cases, random_packed, same_bits, shuffled_fields, smallest

# -- moves of words, against every bit by itself --------------------------------------------------------------------------


def addresses(placed: PlacedPiece, width: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every bit of every element, and where it lies."""
    def steps(digits: tuple[tuple[int, int], ...]) -> list[int]:
        return [sum(at) for at in product(*([i * step for i in range(extent)] for extent, step in reversed(digits)))]

    for element in product(*(list(enumerate(steps(digits))) for digits in placed.coordinates)):
        for bit in range(width):
            yield (*(i for i, _ in element), bit), placed.start + sum(at for _, at in element) + bit


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).flatten()[:, None].bitwise_right_shift(torch.arange(8)).bitwise_and(1).flatten()


@st.composite
def places(draw: st.DrawFn) -> tuple[PlacedPiece, PlacedPiece, int]:
    """Two orders of the same digits of two coordinates; some bits of a word may hold nothing."""
    width = draw(st.sampled_from([1, 2, 4, 8, 16]))
    twos = draw(st.integers(0, 8))
    digits = [*[(draw(st.integers(0, 1)), 2) for _ in range(twos)], (0, draw(st.sampled_from([1, 3, 5]))),
              (1, draw(st.sampled_from([1, 3, 4])))]
    placements = []
    for _ in range(2):
        order = [*draw(st.permutations(range(twos))), twos, twos + 1]     # whole words first: odd digits never lie in words
        step, steps = width, {}
        for i in order:
            if step < 32 and (i >= twos or draw(st.integers(0, 5)) == 0):
                step = 32 if i >= twos else min(32, 2 * step)
            steps[i] = step
            step *= digits[i][1]
        coordinates = [tuple((digits[i][1], steps[i]) for i in range(len(digits)) if digits[i][0] == axis) for axis in (0, 1)]
        placements.append(PlacedPiece(0, -(-step // 32) * 32, tuple(coordinates)))
    return placements[0], placements[1], width


@settings(max_examples=60, deadline=None)
@given(places())
def test_moves_put_every_bit_in_its_place(drawn: tuple[PlacedPiece, PlacedPiece, int]) -> None:
    source, result, width = drawn
    plan = transpose.plan_move(source, result, width)
    assert plan is not None
    before = torch.randint(-1 << 31, 1 << 31, (source.size // 32,), dtype=torch.int64).to(torch.int32)
    after = torch.zeros(result.size // 32, dtype=torch.int32)
    transpose.move_bits(plan, before, after)
    stored, moved, wanted = bits_of(before), bits_of(after), torch.zeros(result.size, dtype=torch.uint8)
    for (_, origin), (_, target) in zip(addresses(source, width), addresses(result, width), strict=True):
        wanted[target] = stored[origin]
    assert torch.equal(moved, wanted)


# -- storages of formats --------------------------------------------------------------------------------------------------


def pairs() -> Iterator[tuple[Case, str]]:
    """Every storage with every other one of its format."""
    for case in cases():
        for name in case.module.FORMAT.variant(case.choice).storages:
            if name != case.storage:
                yield case, name


def shape_of(case: Case, storage: str, tiles: int = 1) -> tuple[int, int]:
    """Whole records of both storages."""
    both = [smallest(Case(case.path, name, case.params)) for name in (case.storage, storage)]
    n, k = (math.lcm(*sizes) for sizes in zip(*both, strict=True))
    format = case.module.FORMAT
    sizes = format.sizes(format.complete(case.choice), (n, k))
    layouts = [format.variant(case.choice).storages[name] for name in (case.storage, storage)]
    axes = [axis for stored in layouts[1].tensors.values() for axis in stored.axes]
    groups = max(least for layout in layouts for least in (1, *layout.least.values()))
    return n * tiles, math.lcm(k, *(axis.by(sizes) for axis in axes if axis.dim == "K")) * groups * tiles


def other(packed: PackedWeight, storage: str) -> PackedWeight:
    return PackedWeight(packed.format, storage, {}, packed.shape, packed.params)


def in_order(packed: PackedWeight) -> PackedWeight:
    """Without the index that says which columns belong together."""
    index = {name for name, stored in packed.layout.tensors.items() if stored.dtype == "index"}
    return packed.format.checked(packed.derive({name: t for name, t in packed.tensors.items() if name not in index}))


@pytest.mark.parametrize(("case", "storage"), quarter_of(list(pairs())), ids=str)
def test_every_bit_that_moves_goes_where_its_field_says(case: Case, storage: str) -> None:
    """Tensor by tensor with the number of each bit written in it, digit by digit: moves are linear, so this proves all."""
    packed = in_order(random_packed(case, shape_of(case, storage)))
    into = other(packed, storage)
    index = {name for name, field in packed.variant.fields.items() if field.groups is not None}
    if set(into.layout.where) - set(packed.layout.where) - index or not convert.move_by_words(packed, into):
        return                                                   # by way of fields, which is what this compares with
    padded = {tensor.name.value for layout in case.spec.storages if layout.name.value == case.storage
              for tensor in layout.tensors if "pad:" in tensor.record_text.value}
    for name, tensor in packed.tensors.items():
        if name == packed.layout.shape:
            continue
        count = 8 * tensor.nbytes
        for digit in range((count - 1).bit_length()):
            bits = (torch.arange(count) >> digit & 1).view(-1, 8)
            marked = (bits << torch.arange(8)).sum(1).to(torch.uint8).view(tensor.dtype).view(tensor.shape)
            one = packed.derive({**packed.tensors, name: marked})
            if name in padded:                                   # which a tensor that is shared keeps
                one = packed.format.pack(packed.format.unpack(one), storage=packed.storage, **packed.params)
            moved, wanted = convert.convert(one, storage), convert.by_fields(one, into)
            fields = packed.format.unpack(one) if into.layout.omits else {}
            usual = {key for key in into.layout.omits if key not in fields or
                     is_default(packed.variant, key, fields[key], packed.sizes)}
            assert moved.keys() == {key for key in wanted if into.layout.tensors[key].optional not in usual}
            assert all(same_bits(moved[key], wanted[key]) for key in moved), (name, digit)


def gptq(n: int, k: int, bits: int = 4, group: int = 128, seed: int = 0, act_order: bool = False) -> PackedWeight:
    """Random codes, zero points and scales; with act-order the columns of every group lie all over K."""
    draw = torch.Generator().manual_seed(seed)
    size = group if group > 0 else k
    groups = -(-k // size)
    fields = {"q": torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=draw),
              "z": torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8, generator=draw),
              "s": torch.rand(n, groups, generator=draw).half()}
    if act_order:
        fields["g"] = (torch.arange(k, dtype=torch.int32) // size)[torch.randperm(k, generator=draw)]
    return int_group.pack(fields, "gptq_v2", bits=bits, group=group)


class Allocations(TorchDispatchMode):
    """The size of the largest tensor that operations make, beside the results, which come from numpy."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        old = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, Tensor)}
        if isinstance(output, Tensor) and output.untyped_storage()._cdata not in old:
            self.most = max(self.most, output.untyped_storage().nbytes())
        return output


def test_bytes_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share larger tiles; the last one is short."""
    monkeypatch.setattr(convert, "by_fields", None)
    monkeypatch.setattr(transpose, "TILE", 1 << 8)
    monkeypatch.setattr(transpose, "SHARED", 1 << 9)
    packed, stored = gptq(512, 1024, 4), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        stored.append(int_group.convert(packed, "awq").tensors)
    assert all(same_bits(stored[1][name], tensor) for name, tensor in stored[0].items())


@pytest.mark.own_state                                           # memory is counted
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_never_unpacked_and_work_needs_a_tile(bits: int, act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "by_fields", None)
    monkeypatch.setattr(transpose, "TILE", 1 << 10)
    monkeypatch.setattr(transpose, "GATHERED", 1 << 15)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    packed = start = gptq(512, 1024, bits, act_order=act_order)
    for storage in [*(["awq", PLANAR, "awq"] if bits == 4 and not act_order else []), PLANAR, "gptq_v1", PLANAR, "gptq_v2"]:
        with Allocations() as allocations:
            packed = int_group.convert(packed, storage)
        assert allocations.most <= 1 << 14 < min(packed.nbytes, start.tensors["qweight"].nbytes)
    assert all(same_bits(packed.tensors[key], tensor) for key, tensor in start.tensors.items())


@pytest.mark.parametrize(("n", "k", "group"), [(8, 8, 128), (24, 72, 32), (40, 160, -1), (64, 104, 32), (136, 1056, 64)])
@pytest.mark.parametrize("act_order", [False, True])
def test_odd_shapes_and_short_groups_are_converted_alike(n: int, k: int, group: int, act_order: bool) -> None:
    """Whole words or not, by words or by fields."""
    packed = gptq(n, k, 4, group, act_order=act_order)
    whole = k % max(group, 1) == 0 and (bool(packed.in_order) or not act_order)
    for storage in ("gptq_v1", PLANAR, *(["awq"] if whole else [])):
        moved = int_group.convert(packed, storage)
        wanted = convert.by_fields(packed, other(packed, storage))
        assert all(same_bits(moved.tensors[key], tensor) for key, tensor in wanted.items())
        back = int_group.convert(moved, "gptq_v2").tensors
        assert all(same_bits(back[key], tensor) for key, tensor in packed.tensors.items() if key in back or key != "g_idx")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("bits", [4, 8])
def test_act_order_of_a_few_rows_is_converted_though_they_fill_no_words(n: int, bits: int) -> None:
    """Codes of a column in several rows lie in a word where columns are gathered; fewer rows than that go by their fields."""
    fields = int_group.unpack(gptq(16, 128, bits, 32, act_order=True))
    middle = torch.full_like(fields["z"][:n], 1 << bits - 1)
    some = {"q": fields["q"][:n], "s": fields["s"][:n], "g": fields["g"], "z": middle}
    packed = int_group.pack(some, "pack_quantized", bits=bits, group=32)
    for storage in (PLANAR, *(["xpu_int4pack"] if bits == 4 else [])):
        moved = int_group.convert(packed, storage)
        wanted = convert.by_fields(packed, other(packed, storage))
        assert all(same_bits(moved.tensors[key], tensor) for key, tensor in wanted.items())
        assert torch.equal(int_group.dequantize(moved, torch.float32), int_group.dequantize(packed, torch.float32))


def test_what_both_storages_hold_alike_is_shared() -> None:
    packed = gptq(64, 256)
    awq = int_group.convert(packed, "awq")
    assert awq.tensors["scales"] is packed.tensors["scales"]
    old = int_group.convert(packed, "gptq_v1")
    assert old.tensors["qweight"] is packed.tensors["qweight"]
    assert torch.equal(old.tensors["qzeros"], packed.tensors["qzeros"] - 0x11111111)
    part = packed.cut("N", 8, 24)                                # views whose rows lie apart are copied
    assert same_bits(int_group.convert(part, "awq").tensors["scales"], part.tensors["scales"])
    assert same_bits(int_group.convert(int_group.convert(part, "awq"), "gptq_v2").tensors["qweight"], part.tensors["qweight"])


def test_tensors_that_begin_anywhere_are_moved() -> None:
    """Bytes of a file need not begin at a word."""
    packed = q4_0.quantize(torch.randn(4, 256))
    raw = torch.zeros(packed.nbytes + 1, dtype=torch.uint8)
    raw[1:] = packed.tensors["blocks"].flatten()
    shifted = q4_0.wrap({"blocks": raw[1:].view(4, -1)})
    for name, tensor in q4_0.planar(packed).tensors.items():
        assert same_bits(q4_0.convert(shifted, PLANAR).tensors[name], tensor)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 40), k=st.integers(1, 12), seed=st.integers(0, 3), whole=st.booleans())
def test_columns_all_over_k_are_gathered(n: int, k: int, seed: int, whole: bool) -> None:
    """Rows that fill words or do not, columns that fill the other storage's records or do not, and short last groups."""
    case = next(case for case in cases() if case.path.stem == "same_names" and case.storage == "wide")
    n, k = (8 * n, 128 * k) if whole else (n, 8 * k)
    packed = case.module.pack(shuffled_fields(case, (n, k), seed), "wide", **case.choice)
    moved = case.module.convert(packed, PLANAR)
    wanted = convert.by_fields(packed, other(packed, PLANAR))
    assert moved.tensors.keys() == wanted.keys() and all(same_bits(moved.tensors[key], wanted[key]) for key in wanted)
    back = case.module.convert(moved, "wide").tensors
    assert all(same_bits(back[key], packed.tensors[key]) for key in back)


def test_layouts_of_torchs_own_int4_products_are_moves_too() -> None:
    """XPU's words, and on a CPU what torch packs for the instructions that it finds."""
    packed = gptq(128, 256)
    n, k = packed.shape
    words = packed.tensors["qweight"]
    source = place_piece(packed.layout.tensors["qweight"].slices[0], 0, (32 * words.shape[1], 32), 32 * words.numel(), (n, k))
    assert source is not None
    rows = {"AVX512": 32, "AVX2": 16}.get(torch.backends.cpu.get_cpu_capability())
    codes = int_group.unpack(packed)["q"].int()
    wanted = {((n, 4 * k),): words.t().contiguous()}
    if rows is not None:                                         # pairs of rows lie `rows` apart
        wanted[(rows, 8), (2, 4), (n // (2 * rows), 8 * rows * k)] = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    for digits, answer in wanted.items():
        columns = ((k, 4 if len(digits) == 1 else 8 * digits[0][0]),)
        plan = transpose.plan_move(source, PlacedPiece(0, 4 * n * k, (digits, columns)), 4)
        assert plan is not None and len(plan.rounds) <= 3
        moved = torch.empty_like(answer)
        transpose.move_bits(plan, words, moved)
        assert torch.equal(moved, answer)


# -- what cannot be converted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("packed", "why"), [
    (gptq(8, 64, 8), "int_group has no storage 'awq' for bits=8"),
    (gptq(16, 256, act_order=True), "int_group.awq cannot hold 'g': it has its default there"),
], ids=["bits", "g_idx"])
def test_awq_refuses_what_it_cannot_hold_and_offers_another_weight(packed: PackedWeight, why: str) -> None:
    with pytest.raises(FormatError, match=f"{why}.*; requantize quantizes the decoded weight, and reports the error"):
        int_group.convert(packed, "awq")


@pytest.mark.parametrize(("storage", "why"), [("awq", "int_group.awq: K = 72 must be a multiple of 64"),
                                              ("awk", "has no storage 'awk'")])
def test_requantize_is_not_offered_where_it_would_fail_alike(storage: str, why: str) -> None:
    with pytest.raises(FormatError, match=why) as error:
        int_group.convert(gptq(8, 72, group=64), storage)
    assert "requantize" not in str(error.value)


def test_requantizing_says_how_far_a_weight_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 1 << 10)
    packed = gptq(16, 256, act_order=True)
    weight = int_group.dequantize(packed, torch.float32)
    for requantized, report in (int_group.requantize(packed, storage="awq", group=32), int_group.requantize(packed, q4_0.FORMAT)):
        error = (requantized.format.dequantize(requantized, torch.float32) - weight).double()
        assert report.largest == float(error.abs().max()) > 0 and not report.exact
        assert report.rms == pytest.approx(float(error.square().mean().sqrt()))
        assert report.decibels == pytest.approx(10 * math.log10(float(weight.double().square().mean() / error.square().mean())))
        assert f"signal to noise {report.decibels:.2f} dB" in str(report)
    same, report = q4_0.requantize(requantized)
    assert report.exact and report.decibels == math.inf and str(report) == "the same weight"
    assert all(same_bits(same.tensors[key], tensor) for key, tensor in requantized.tensors.items())


def test_act_order_to_xpu_is_what_gptqmodel_does() -> None:
    """Its words hold codes of columns that are taken by their groups, and x is taken by the same index, ret_idx."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    fields = int_group.unpack(int_group.quantize(weight, "gptq_v2", bits=4, group=64))
    fields["g"] = torch.randperm(256, generator=torch.Generator().manual_seed(1)).int() // 64
    packed = int_group.pack(fields, "gptq_v2", bits=4, group=64)
    converted = int_group.convert(packed, "xpu_int4pack")
    by_groups = [k for group in range(4) for k in range(256) if int(fields["g"][k]) == group]
    assert converted.tensors["ret_idx"].tolist() == by_groups
    codes = fields["q"][:, by_groups].int()
    assert torch.equal(converted.tensors["qweight"], sum(codes[:, i::8] << 4 * i for i in range(8)))
    assert torch.equal(int_group.dequantize(converted, torch.float32), int_group.dequantize(packed, torch.float32))
    back = int_group.convert(converted, "gptq_v2")
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(int_group.linear(x, converted), int_group.linear(x, packed), rtol=0, atol=1e-5)


@pytest.mark.parametrize("group", [16, 32, 48, 64, 128, -1])
def test_a_short_last_group_to_xpu_is_what_gptqmodel_does(group: int) -> None:
    """Any multiple of 8 columns; with act-order the last group has as many columns as are left."""
    draw = torch.Generator().manual_seed(0)
    for k in range(8, 2 * group + 9, 8) if group > 0 else (8, 72, 200):
        size = group if group > 0 else k
        groups = -(-k // size)
        index = torch.randperm(k, generator=draw).int() // size
        fields = {"q": torch.randint(16, (8, k), dtype=torch.uint8, generator=draw), "g": index,
                  "z": torch.randint(16, (8, groups), dtype=torch.uint8, generator=draw),
                  "s": torch.rand(8, groups, generator=draw).half()}
        packed = int_group.pack(fields, "gptq_v2", bits=4, group=group, scale_type="f16")
        converted = int_group.convert(packed, "xpu_int4pack")
        codes = fields["q"][:, sorted(range(k), key=index.tolist().__getitem__)].int()
        assert torch.equal(converted.tensors["qweight"], sum(codes[:, i::8] << 4 * i for i in range(8)))
        assert torch.equal(converted.tensors["qzeros"], fields["z"].t().to(torch.int8))
        assert same_bits(int_group.dequantize(converted, torch.float32), int_group.dequantize(packed, torch.float32))
        again = int_group.wrap(converted.tensors, (8, k), "xpu_int4pack", bits=4, group=group)
        back = {"g": torch.arange(k) // size} | int_group.unpack(int_group.convert(again, "gptq_v2"))
        assert all(torch.equal(back[name].to(field.dtype), field) for name, field in fields.items())


def test_act_order_weights_of_several_tiles_are_decoded() -> None:
    """More weights than a tile of rows holds: as its rows are by themselves."""
    packed = gptq(640, 1024, act_order=True)
    parts = [int_group.dequantize(packed.cut("N", start, start + 160), torch.float32) for start in range(0, 640, 160)]
    out = torch.full((640, 1024), torch.nan)
    assert int_group.dequantize(packed, out=out).equal(torch.cat(parts)) and len({*map(torch.Tensor.sum, parts)}) == 4
