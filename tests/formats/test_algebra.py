"""Rows, pieces and joins of packed weights: what they decode to is what is done to the decoded weight, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor

from qdsl.checkpoint.report.shards import GROUP_ROWS
from qdsl.core.codecs import CODECS, implementation
from qdsl.generated import df11, fix3, fix4, fp8_block, fp8_tensor, hlane, int8_block, int8_channel, int_group, nf4, q4_0, q4_k
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight import algebra
from tests.support.covering import ALL, quarter_of
from tests.support.formats import Case, assert_same, cases, random_fields, same_bits, shapes, smallest

CASES = cases()
DIMS = ("N", "K")


@cache
def weights(case: Case) -> list[tuple[PackedWeight, Tensor]]:
    """Weights of some steps of the storage and ragged ones, some with other block sizes; each with what it decodes to.

    Where columns may belong to any group, those of the second do.
    """
    format = case.module.FORMAT
    wanted = [({}, smallest(case, tiles=4)), *(({}, shape) for shape in ragged(case, {}))]
    for name in format.size_axes:
        value = format.params[name][-1]
        wanted += [({name: value}, shape) for shape in ragged(case, {name: value})[-1:]]
    packed = []
    for number, (params, shape) in enumerate(wanted):
        fields = random_fields(case, shape, number, params)
        kinds = format.variant(case.choice).fields
        fields = {name: field for name, field in fields.items() if kinds[name].type != "index" or number == 1}
        packed.append(format.pack(fields, storage=case.storage, **{**case.choice, **params}))
    return [(weight, decoded(weight)) for weight in packed]


def ragged(case: Case, params: dict[str, int | str]) -> list[tuple[int, int]]:
    """A small shape and a larger one, most of them of no whole blocks."""
    candidates = list(shapes(case, (1, 3, 12, 24, 64, 128), (5, 36, 136, 200, 320, 576, 1088, 1280), params))
    few = [shape for shape in candidates if shape[0] * shape[1] < 40_000] or candidates
    return [few[len(few) // 3], few[-1]] if few else []


def decoded(packed: PackedWeight) -> Tensor:
    return packed.format.dequantize(packed, torch.float32)


def part(weight: Tensor, dim: str, start: int, stop: int) -> Tensor:
    return weight[start:stop] if dim == "N" else weight[:, start:stop]


def check(result: PackedWeight, wanted: Tensor) -> None:
    """A result is a weight that its format takes, and decodes to what is wanted."""
    result.format.checked(result)
    assert_same(decoded(result), wanted, result)


def refused(error: FormatError) -> dict[int, tuple[int, int]]:
    """Borders that an error refuses, and those below and above that it names."""
    near = re.findall(r"the nearest borders to (\d+) are (\d+) and (\d+)", str(error))
    return {int(border): (int(below), int(above)) for border, below, above in near}


def or_nearest(cut: Callable[[str, int, int], PackedWeight], dim: str, start: int, stop: int,
               ) -> list[tuple[int, int, PackedWeight]]:
    """A piece; or, where it is refused, the pieces at the borders that the error names, which must not be refused."""
    try:
        return [(start, stop, cut(dim, start, stop))]
    except FormatError as error:
        near = refused(error)
        assert near and near.keys() <= {start, stop}, error
    pieces = [tuple(near.get(border, (border, border))[side] for border in (start, stop)) for side in (0, 1)]
    return [(first, last, cut(dim, first, last)) for first, last in pieces if first < last]


# -- every storage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", quarter_of(CASES), ids=str)
def test_step_is_the_least_at_which_a_weight_is_cut(case: Case) -> None:
    """And join puts the pieces together again, to tensors of the same bytes."""
    for packed, weight in weights(case):
        for dim, whole in zip(DIMS, packed.shape, strict=True):
            step = packed.step(dim)
            assert 1 <= step <= whole
            for start in range(0, whole, step)[:3]:
                for stop in {min(start + step, whole), whole}:
                    check(packed.cut(dim, start, stop), part(weight, dim, start, stop))
            for less in {step - 1, *(step // d for d in (2, 3, 5, 7, 8) if step % d == 0)} - {0, step}:
                assert any(is_refused(packed, dim, 0, stop) or is_refused(packed, dim, stop, whole)
                           for stop in range(less, whole, less)), (dim, less)
            length = step * max(1, whole // step // 3)
            pieces = [packed.cut(dim, start, min(start + length, whole)) for start in range(0, whole, length)]
            joined = PackedWeight.join(pieces, dim)
            assert (joined.shape, joined.params, joined.in_order) == (packed.shape, packed.params, packed.in_order)
            assert joined.tensors.keys() == packed.tensors.keys()
            assert all(same_bits(joined.tensors[name], tensor) for name, tensor in packed.tensors.items())


def is_refused(packed: PackedWeight, dim: str, start: int, stop: int) -> bool:
    try:
        packed.cut(dim, start, stop)
    except FormatError as error:
        for border, near in refused(error).items():
            assert near[0] < border < near[1]
            for end in near:
                packed.cut(dim, 0, end if end else packed.step(dim))
        return True
    return False


@pytest.mark.parametrize("case", quarter_of(CASES), ids=str)
def test_rows_in_any_order(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    for packed, weight in weights(case):
        n = packed.shape[0]
        for index in (torch.randint(0, n, (n,), generator=generator), torch.tensor([n - 1, 0, n // 2], dtype=torch.int32)):
            try:
                check(packed.rows(index), weight[index])
            except FormatError as error:
                assert "take rows of the decoded weight" in str(error)
                if blocks := re.search(r"take whole blocks of (\d+) rows", str(error)):
                    rows = torch.arange(n // int(blocks[1]) * int(blocks[1])).view(-1, int(blocks[1])).flip(0).flatten()
                    check(packed.rows(rows), weight[rows])


@pytest.mark.parametrize("case", quarter_of(CASES[1:]), ids=str)
def test_shards_at_and_inside_blocks(case: Case) -> None:
    """Where one is refused, the borders that the error names work; pieces in one storage join to the weight."""
    for turn, (packed, weight) in enumerate(weights(case)):
        for dim, whole in zip(DIMS, packed.shape, strict=True):
            borders = sorted({(whole // 4, whole // 2), (whole // 8, whole // 8 * 3), (1, whole - 1)})
            for start, stop in borders if ALL else [borders[turn % len(borders)]]:
                for first, last, piece in or_nearest(packed.shard, dim, start, stop) if start < stop else ():
                    check(piece, part(weight, dim, first, last))
            ends = [*range(0, whole, algebra.shard_step(packed, dim) * max(1, whole // algebra.shard_step(packed, dim) // 2))]
            pieces = [packed.shard(dim, start, stop) for start, stop in zip(ends, [*ends[1:], whole], strict=True)]
            if len({(piece.storage, piece.params_text) for piece in pieces}) == 1:
                check(PackedWeight.join(pieces, dim), weight)


@pytest.mark.parametrize("case", quarter_of(CASES), ids=str)
def test_on_meta_shapes_are_those_of_numbers(case: Case) -> None:
    """All but those of entropy codes, which depend on the numbers."""
    for packed, _ in weights(case)[::2]:
        meta = packed.to("meta")
        index = torch.arange(packed.shape[0]).roll(1)            # no whole blocks
        same_on_meta(lambda weight, index=index: weight.rows(index.to(weight.device)), packed, meta)
        for dim, whole in zip(DIMS, packed.shape, strict=True):
            for start, stop in ((0, whole // 2), (whole // 4, whole // 2), (0, packed.step(dim))):
                same_on_meta(lambda weight, at=(dim, start, stop): weight.cut(*at), packed, meta)
                same_on_meta(lambda weight, at=(dim, start, stop): weight.shard(*at), packed, meta)
            same_on_meta(lambda weight, dim=dim: PackedWeight.join([weight, weight], dim), packed, meta)


def same_on_meta(make: Callable[[PackedWeight], PackedWeight], packed: PackedWeight, meta: PackedWeight) -> None:
    try:
        wanted = make(packed)
    except FormatError:
        with pytest.raises(FormatError):
            make(meta)
        return
    result = make(meta)
    assert (result.shape, result.storage, result.params) == (wanted.shape, wanted.storage, wanted.params)
    assert result.tensors.keys() == wanted.tensors.keys()
    coded = {name for stream in wanted.layout.streams.values() for name in stream.names.values()}
    for name in result.tensors.keys() - coded:
        assert result.tensors[name].is_meta and result.tensors[name].dtype == wanted.tensors[name].dtype
        assert result.tensors[name].shape == wanted.tensors[name].shape, name


# -- columns in act-order -------------------------------------------------------------------------------------------------

INDEXED = [case for case in CASES if "index" in {field.type for field in case.module.FORMAT.variant(case.choice).fields.values()}]


def act_order(case: Case, shape: tuple[int, int], columns: Tensor, group: int) -> PackedWeight:
    """A weight whose column k belongs to group columns[k] // group."""
    format = case.module.FORMAT
    fields = random_fields(case, shape, params={"group": group})
    name = next(name for name, field in format.variant(case.choice).fields.items() if field.groups is not None)
    return format.pack({**fields, name: (columns // group).int()}, storage=case.storage, **{**case.choice, "group": group})


@pytest.mark.parametrize("case", [case for case in INDEXED if "group" in case.choice and case.choice.get("bits", 4) == 4],
                         ids=str)
def test_columns_in_act_order(case: Case) -> None:
    """Shards keep the groups of their columns, in smaller groups if there are too many; or are refused by name."""
    group, (n, k) = max(value for value in case.module.FORMAT.params["group"] if value in (9, 128)), (64, 512)
    generator = torch.Generator().manual_seed(1)
    halves = torch.cat([torch.randperm(k // 2, generator=generator), k // 2 + torch.randperm(k // 2, generator=generator)])
    for columns in (torch.randperm(k, generator=generator), halves):
        try:
            packed = act_order(case, (n, k), columns, group)
        except FormatError as error:
            assert re.search("columns in order|belong to groups", str(error))
            return
        weight = decoded(packed)
        check(packed.rows(torch.arange(n).flip(0)), weight.flip(0))
        check(packed.shard("N", 4, 12), weight[4:12])
        check(PackedWeight.join([packed.cut("N", 0, n), packed]), torch.cat([weight, weight]))
        check(PackedWeight.join([packed, packed], "K"), torch.cat([weight, weight], 1)) if not k % group else None
        assert packed.step("K") == k
        with pytest.raises(FormatError, match="act-order"):
            packed.cut("K", 0, k // 2)
        for start, stop, piece in or_nearest(packed.shard, "K", k // 2, k):
            check(piece, weight[:, start:stop])
            if columns is halves and not k // 2 % group:
                assert piece.params["group"] == group and (start, stop) == (k // 2, k)


def test_act_order_takes_smaller_groups() -> None:
    case = next(case for case in INDEXED if str(case).startswith("int_group.gptq_v2-bits4"))
    packed = act_order(case, (32, 512), torch.randperm(512, generator=torch.Generator().manual_seed(2)), 128)
    half = packed.shard("K", 256, 512)
    assert (half.params["group"], half.tensors["scales"].shape) == (64, (4, 32))
    check(half, decoded(packed)[:, 256:])
    with pytest.raises(FormatError, match=r"columns 0 to 64 belong to 4 groups \(act-order\), and so many columns have 2"):
        packed.shard("K", 0, 64)
    other = act_order(case, (32, 512), torch.arange(512), 128)
    with pytest.raises(FormatError, match="all rows share 'g', which differs between parts"):
        PackedWeight.join([packed, other])


# -- by example -----------------------------------------------------------------------------------------------------------


def test_blocks_become_smaller() -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    packed = fp8_block.quantize(weight)
    half = packed.shard("N", 64, 192)
    assert (half.params["bn"], half.params["bk"], half.tensors["weight_scale_inv"].shape) == (64, 128, (2, 4))
    assert packed.shard("K", 128, 384).params == packed.params
    assert packed.shard("K", 32, 128).params["bk"] == packed.shard("K", 0, 160).params["bk"] == 32
    assert packed.shard("K", 5, 40).params == packed.params                    # inside a block
    assert packed.rows(torch.tensor([200, 3])).params["bn"] == 1
    groups = int_group.quantize(weight, "gptq_v2", group=128)
    assert groups.shard("K", 64, 320).params["group"] == 64
    assert groups.cut("K", 128, 384).tensors["qweight"].untyped_storage().data_ptr() == \
        groups.tensors["qweight"].untyped_storage().data_ptr()


def test_a_piece_of_one_block_per_row_keeps_it() -> None:
    packed = int_group.quantize(torch.randn(32, 320, generator=torch.Generator().manual_seed(0)), "pack_quantized", group=-1)
    half = packed.shard("K", 160, 320)
    assert (half.params["group"], half.tensors["weight_scale"].shape) == (-1, (32, 1))
    check(half, decoded(packed)[:, 160:])
    assert PackedWeight.join([packed.shard("K", 0, 160), half], "K").params["group"] == -1
    parts = [int_group.quantize(torch.randn(32, 128) * scale, "pack_quantized", group=-1) for scale in (1, 3)]
    joined = PackedWeight.join(parts, "K")
    assert (joined.params["group"], joined.tensors["weight_shape"].tolist()) == (128, [32, 256])
    check(joined, torch.cat([decoded(part) for part in parts], 1))
    with pytest.raises(FormatError, match="a part would end at 100, inside a block of 'z'"):
        PackedWeight.join([int_group.quantize(torch.randn(32, 100) * scale, "pack_quantized", group=-1) for scale in (1, 3)], "K")


def test_a_storage_of_whole_words_becomes_planar() -> None:
    packed = int_group.quantize(torch.randn(32, 256, generator=torch.Generator().manual_seed(0)), "gptq_v2")
    piece = packed.shard("N", 4, 9)
    assert (piece.storage, piece.shape) == ("planar", (5, 256))
    check(piece, decoded(packed)[4:9])
    assert packed.rows(torch.tensor([1])).storage == "planar"


def test_blocks_that_no_parameter_makes_smaller() -> None:
    packed = q4_k.quantize(torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(FormatError) as error:
        packed.shard("K", 0, 384)
    assert str(error.value) == ("q4_k.gguf [4, 1024] cannot be cut along K from 0 to 384: q4_k.gguf: K = 384 must be a multiple "
                                "of 256; the nearest borders to 384 are 256 and 512")
    with pytest.raises(FormatError, match=r"its blocks and words have 32 columns; the nearest borders to 48 are 32 and 64"):
        q4_0.quantize(torch.randn(4, 128)).cut("K", 0, 48)
    with pytest.raises(FormatError, match="one value of 's' is for 128 rows; take whole blocks of 32 rows"):
        int8_block.quantize(torch.randn(256, 128)).rows(torch.tensor([1, 200]))


@pytest.mark.parametrize("module", [fp8_tensor, fp8_block])
def test_codes_that_are_no_numbers_stay(module: object) -> None:
    """NaN has the bits that it had."""
    packed = module.quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))  # type: ignore[attr-defined]
    packed.tensors["weight"].view(torch.uint8)[[0, 70, 255], [3, 200, 0]] = torch.tensor([127, 255, 127], dtype=torch.uint8)
    packed, weight = packed.format.wrap(packed.tensors), decoded(packed)
    assert weight.isnan().sum() == 3 and not packed.finite
    index = torch.tensor([255, 70, 70, 1])
    check(packed.rows(index), weight[index])
    check(packed.shard("K", 192, 256), weight[:, 192:])
    pieces = [packed.shard("N", 0, 64), packed.shard("N", 64, 256)]
    check(PackedWeight.join(pieces), weight)
    assert not PackedWeight.join(pieces).finite


def test_many_parts_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a layer as one weight: one tensor of each name is allocated, whatever their number."""
    parts = [int_group.quantize(torch.randn(16, 128), "awq", group=32) for _ in range(24)]
    calls = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, dim=0: calls.append(len(tensors)) or cat(tensors, dim))
    monkeypatch.setattr(int_group.FORMAT, "pack", None)
    joined = PackedWeight.join(parts)
    monkeypatch.undo()
    assert calls == [24] * len(joined.tensors)
    check(joined, torch.cat([decoded(part) for part in parts]))


# -- rows of entropy codes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [hlane, fix4, fix3], ids=["hlane", "fix4", "fix3"])
@pytest.mark.parametrize(("half", "k"), [(32, 75), (16, 2056), (16, 8200)])      # 1, 4 and 8 lanes, these in two chunks
def test_rows_at_groups_keep_their_codes(module: ModuleType, half: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what encoding the rows gives, here by the same code, and neither encoded nor decoded for it."""
    weight = torch.randn(half, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3, 5:9] = torch.tensor([0, 1e-30, -1e30, torch.inf])  # patches
    wanted, packed, ragged = [module.pack({"v": torch.cat([weight, more])}) for more in (weight[:0], weight, weight[:3])]
    groups = [implementation(stream.coding, "launch").group_rows(packed.shape) for stream in packed.layout.streams.values()]
    assert all(GROUP_ROWS % rows == half % rows == 0 for rows in groups)
    for coding in map(implementation, CODECS):
        for name in ("encode", "decode", "decode_rows"):
            monkeypatch.delattr(coding, name, raising=False)
    bands = [packed.shard("N", 0, half), packed.shard("N", half, 2 * half)]
    last, none = ragged.shard("N", half, half + 3), packed.shard("N", half, half)
    monkeypatch.undo()
    for band in bands:
        assert band.stream_info == wanted.stream_info and same_tensors(band, wanted)
        check(band, weight.float())
    check(last, weight[:3].float())
    check(none, weight[:0].float())
    assert same_tensors(PackedWeight.join(bands), packed)


def same_tensors(one: PackedWeight, other: PackedWeight) -> bool:
    return one.shape == other.shape and one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("module", [hlane, fix4, fix3, df11], ids=["hlane", "fix4", "fix3", "df11"])
def test_other_rows_of_entropy_codes_are_encoded_anew(module: ModuleType) -> None:
    """Inside a group, and where a code does not say where rows begin."""
    weight = torch.randn(70, 75, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = module.quantize(weight)
    for start, stop in ((0, 32), (3, 64), (32, 69)):
        check(packed.shard("N", start, stop), weight[start:stop].float())


def test_join_of_one_part_is_that_part() -> None:
    packed = hlane.quantize(torch.randn(4, 64))
    assert PackedWeight.join([packed]) is packed


def test_join_fills_in_what_only_some_parts_store() -> None:
    """A zero point is missing where it is 0, and an index where columns are in order."""
    generator = torch.Generator().manual_seed(0)
    fields = int8_channel.unpack(int8_channel.quantize(torch.randn(8, 64, generator=generator)))
    parts = [int8_channel.pack(stored) for stored in (fields, {**fields, "z": torch.arange(8, dtype=torch.int8)})]
    assert [len(part.tensors) for part in parts] == [2, 3]
    check(PackedWeight.join(parts), torch.cat([decoded(part) for part in parts]))
    packed = int_group.quantize(torch.randn(32, 256, generator=generator), "gptq_v2")
    bare = int_group.wrap({name: tensor for name, tensor in packed.tensors.items() if name != "g_idx"}, storage="gptq_v2")
    full = int_group.wrap({**bare.tensors, "g_idx": torch.arange(256, dtype=torch.int32) // 128}, storage="gptq_v2")
    for dim in DIMS:
        joined = PackedWeight.join([bare, full], dim)
        assert joined.in_order == {"g_idx"}
        check(joined, torch.cat([decoded(packed)] * 2, DIMS.index(dim)))


def test_parts_that_cannot_be_joined() -> None:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    first = int_group.quantize(weight, "gptq_v2")

    def refuses(match: str, *parts: PackedWeight, dim: str = "N") -> None:
        with pytest.raises(FormatError, match=match):
            PackedWeight.join(parts, dim)

    refuses("join takes one weight or more")
    refuses("not 2 along 'M'", first, first, dim="M")
    refuses("format of part 1 is q4_0, of part 0 int_group", first, q4_0.quantize(weight))
    refuses("storage of part 1 is awq, of part 0 gptq_v2", first, int_group.quantize(weight, "awq"))
    refuses("parameter group of part 1 is 64, of part 0 128", first, int_group.quantize(weight, "gptq_v2", group=64))
    refuses("columns of part 1 is 128, of part 0 256", first, int_group.quantize(weight[:, :128], "gptq_v2"))
    refuses("device of part 1 is meta, of part 0 cpu", first, first.to("meta"))
    refuses("all rows share 's', which differs between parts", fp8_tensor.quantize(weight), fp8_tensor.quantize(weight * 3))
    refuses("inside a block of 's': parts are multiples of 32 rows", *[int8_block.quantize(weight[:40])] * 2)
    refuses("inside a block of 's': parts are multiples of 32 columns", *[nf4.quantize(weight[:, :40])] * 2, dim="K")
    equal = fp8_tensor.quantize(weight)
    check(PackedWeight.join([equal, equal]), torch.cat([decoded(equal)] * 2))


def test_what_a_result_is_called() -> None:
    """Names of the checkpoint and notes go with a weight."""
    packed = fp8_block.quantize(torch.randn(256, 256))
    tensors = {"weight": packed.tensors["weight"], "weight_scale": packed.tensors["weight_scale_inv"], "k_scale": torch.ones(1)}
    packed = fp8_block.wrap(tensors)
    results = [packed.cut("N", 0, 128), packed.shard("N", 0, 64), packed.rows(torch.tensor([3])), PackedWeight.join([packed] * 2)]
    for result in results:
        assert result.names == {"weight_scale_inv": "weight_scale"} and result.notes == packed.notes != ()


@pytest.mark.parametrize("index", [torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([True])], ids=str)
def test_rows_are_numbers(index: Tensor) -> None:
    with pytest.raises(FormatError, match=r"rows are int64 or int32 \[M\], not"):
        q4_0.quantize(torch.randn(4, 32)).rows(index)


@pytest.mark.parametrize("packed", [q4_0.quantize(torch.randn(4, 32)), hlane.quantize(torch.randn(4, 32))], ids=["q4_0", "hlane"])
def test_rows_that_do_not_exist(packed: PackedWeight) -> None:
    with pytest.raises(IndexError):
        packed.rows(torch.tensor([4]))
    assert packed.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 32)


@pytest.mark.parametrize("name", ["cut", "shard"])
@pytest.mark.parametrize(("dim", "start", "stop"), [("N", -4, -1), ("N", 0, 99), ("N", 8, 4), ("n", 0, 4), ("K", 0, 999)])
def test_pieces_outside_of_the_weight(name: str, dim: str, start: int, stop: int) -> None:
    with pytest.raises(FormatError, match="are no part of the weight"):
        getattr(q4_0.quantize(torch.zeros(16, 64)), name)(dim, start, stop)
