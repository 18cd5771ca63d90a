"""Rows, pieces and joins of packed weights: what they decode to is what is done to the decoded weight, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from qdsl.generated import fp8_block, fp8_tensor, hlane, int8_block, int8_channel, int_group, nf4, q4_0, q4_k
from qdsl.runtime import FormatError, PackedWeight, algebra
from tests.support.formats import Case, cases, random_fields, same_bits, shapes, shuffled_fields, smallest

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
        for value in dict.fromkeys((format.params[name][-1], format.params[name][1])):
            wanted += [({name: value}, shape) for shape in ragged(case, {name: value})[-1:]]
    packed = []
    for number, (params, shape) in enumerate(wanted):
        fields = random_fields(case, shape, number, params)
        kinds = format.variant(case.choice).fields
        fields = {name: field for name, field in fields.items() if kinds[name].type != "index" or number == 1}
        packed.append(format.pack(fields, storage=case.storage, **{**case.choice, **params}))
    return [(each, decoded(each)) for each in packed]


def ragged(case: Case, params: dict[str, int | str]) -> list[tuple[int, int]]:
    """A small shape and a larger one, most of them of no whole blocks."""
    found = list(shapes(case, (1, 3, 12, 24, 64, 128), (5, 36, 136, 200, 320, 576, 1088, 1280), params))
    few = [shape for shape in found if shape[0] * shape[1] < 40_000] or found
    return [few[len(few) // 3], few[-1]] if few else []


def decoded(packed: PackedWeight) -> Tensor:
    return packed.format.dequantize(packed, torch.float32)


def part(weight: Tensor, dim: str, start: int, stop: int) -> Tensor:
    return weight[start:stop] if dim == "N" else weight[:, start:stop]


def check(result: PackedWeight, wanted: Tensor) -> None:
    """A result is a weight that its format takes, and decodes to what is wanted."""
    result.format.checked(result)
    assert same_bits(decoded(result), wanted), result


def refused(error: FormatError) -> dict[int, tuple[int, int]]:
    """Borders that an error refuses, and those below and above that it names."""
    near = re.findall(r"the nearest borders to (\d+) are (\d+) and (\d+)", str(error))
    return {int(border): (int(below), int(above)) for border, below, above in near}


def or_nearest(cut: Callable[[str, int, int], PackedWeight], dim: str, start: int, stop: int) -> list[tuple[int, int, PackedWeight]]:
    """A piece; or, where it is refused, the pieces at the borders that the error names, which must not be refused."""
    try:
        return [(start, stop, cut(dim, start, stop))]
    except FormatError as error:
        near = refused(error)
        assert near and near.keys() <= {start, stop}, error
    pieces = [tuple(near.get(border, (border, border))[side] for border in (start, stop)) for side in (0, 1)]
    return [(first, last, cut(dim, first, last)) for first, last in pieces if first < last]


# -- every storage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_is_the_least_at_which_a_weight_is_cut(case: Case) -> None:
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


def is_refused(packed: PackedWeight, dim: str, start: int, stop: int) -> bool:
    try:
        packed.cut(dim, start, stop)
    except FormatError as error:
        for border, near in refused(error).items():
            assert near[0] < border < near[1]
            for each in near:
                packed.cut(dim, 0, each if each else packed.step(dim))
        return True
    return False


@pytest.mark.parametrize("case", CASES, ids=str)
def test_join_undoes_cut(case: Case) -> None:
    """The tensors have the bytes that they had before."""
    for packed, _ in weights(case):
        for dim, whole in zip(DIMS, packed.shape, strict=True):
            step = packed.step(dim) * max(1, whole // packed.step(dim) // 3)
            pieces = [packed.cut(dim, start, min(start + step, whole)) for start in range(0, whole, step)]
            joined = PackedWeight.join(pieces, dim)
            assert (joined.shape, joined.params, joined.in_order) == (packed.shape, packed.params, packed.in_order)
            assert joined.tensors.keys() == packed.tensors.keys()
            assert all(same_bits(joined.tensors[name], tensor) for name, tensor in packed.tensors.items())


@pytest.mark.parametrize("case", CASES, ids=str)
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_at_and_inside_blocks(case: Case) -> None:
    """Where one is refused, the borders that the error names work; pieces in one storage join to the weight."""
    for packed, weight in weights(case):
        for dim, whole in zip(DIMS, packed.shape, strict=True):
            for start, stop in {(0, whole // 2), (whole // 4, whole // 2), (whole // 8, whole // 8 * 3), (1, whole - 1)}:
                for first, last, piece in or_nearest(packed.shard, dim, start, stop) if start < stop else ():
                    check(piece, part(weight, dim, first, last))
            ends = [*range(0, whole, algebra.shard_step(packed, dim) * max(1, whole // algebra.shard_step(packed, dim) // 2))]
            pieces = [packed.shard(dim, start, stop) for start, stop in zip(ends, [*ends[1:], whole], strict=True)]
            if len({(piece.storage, piece.params_text) for piece in pieces}) == 1:
                check(PackedWeight.join(pieces, dim), weight)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_meta_shapes_are_those_of_numbers(case: Case) -> None:
    """All but those of entropy codes, which depend on the numbers."""
    for packed, _ in weights(case)[::2]:
        meta, (n, k) = packed.to("meta"), packed.shape
        index = torch.arange(n).roll(1)                       # no whole blocks
        same_on_meta(lambda each: each.rows(index.to(each.device)), packed, meta)
        for dim, whole in zip(DIMS, packed.shape, strict=True):
            for start, stop in ((0, whole // 2), (whole // 4, whole // 2), (0, packed.step(dim))):
                same_on_meta(lambda each, at=(dim, start, stop): each.cut(*at), packed, meta)
                same_on_meta(lambda each, at=(dim, start, stop): each.shard(*at), packed, meta)
            same_on_meta(lambda each, dim=dim: PackedWeight.join([each, each], dim), packed, meta)


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
