"""Layers divided among ranks: what ranks hold is the whole weight, bit for bit, and what cannot be divided is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.report.shards import RankPiece, ShardError, merged_pieces, piece, row_piece, vocabulary_rows
from qdsl.core.borders import StoredSpan, shard_step
from qdsl.core.transforms import Transform
from qdsl.generated import fp8_channel, fp8_tensor, int_group, q4_k, q8_0
from qdsl.models.shards import Collector, RankPart, join_parts, linear, needed
from qdsl.runtime import PackedWeight
from qdsl.runtime.weight import algebra
from tests.support.formats import ROOT, Case, cases, fixed_shape, random_fields, same_bits, shapes

DESCRIPTIONS = {description.name: description for description in descriptions()}


def is_of_files(case: Case) -> bool:
    description = DESCRIPTIONS.get(case.module.FORMAT.name)
    return case.path.parent == ROOT / "specs" and description is not None and \
        case.storage in description.variants[description.key(case.choice)]


SHIPPED = [case for case in cases() if is_of_files(case)]


@cache
def weight(case: Case) -> PackedWeight:
    """A weight of blocks enough for 8 ranks, without an index of columns."""
    shape = next(shapes(case, (64, 128, 512), (fixed_shape(case, (64, 2048))[1],)))
    fields = random_fields(case, shape)
    kinds = case.module.FORMAT.variant(case.choice).fields
    return case.module.FORMAT.pack({name: field for name, field in fields.items() if kinds[name].type != "index"},
                                   storage=case.storage, **case.choice)


def layer_of(packed: PackedWeight, name: str = "layer", act_order: bool = False) -> Layer:
    return Layer(name, packed.format.name, packed.storage, packed.params, packed.shape,
                 tensors={key: f"{name}.{key}" for key in packed.tensors}, act_order=act_order)


def decoded(packed: PackedWeight) -> Tensor:
    return packed.format.dequantize(packed, torch.float32)


def parts_of(packed: PackedWeight, pieces: Sequence[RankPiece]) -> list[RankPart]:
    """What a rank makes of the checkpoint's tensors, which come last first."""
    collector = Collector(layer_of(packed), pieces)
    for name, tensor in reversed(packed.tensors.items()):
        assert not collector.is_complete
        collector.take(name, tensor)
    assert collector.is_complete
    return collector.parts()


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_what_ranks_hold_is_the_whole_weight(case: Case) -> None:
    """Along both dims on 1, 2, 4 and 8 ranks; a refusal names a number of ranks that is not refused."""
    packed = weight(case)
    layer, whole = layer_of(packed), decoded(packed)
    n, k = packed.shape
    for ranks in (1, 2, 4, 8):
        for dim in "NK":
            try:
                pieces = [merged_pieces("x", [layer], [(n // ranks, n)], ranks, rank)[0] if dim == "N" else
                          row_piece("x", layer, ranks, rank) for rank in range(ranks)]
            except ShardError as error:
                assert f"{case.module.FORMAT.name}.{case.storage} [{n}, {k}]" in str(error) and "blocks of" in str(error)
                assert ranks > 1
                continue
            for rank in {0, ranks - 1}:
                own, = parts_of(packed, [pieces[rank]])
                assert same_bits(own.dequantize(torch.float32), whole.chunk(ranks, "NK".index(dim))[rank].contiguous()), own
                assert own.weight.shape["NK".index(dim)] <= 4 * packed.shape["NK".index(dim)] // ranks


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_steps_are_known_without_torch(case: Case) -> None:
    packed = weight(case)
    description = DESCRIPTIONS[packed.format.name]
    for dim in "NK":
        assert shard_step(description, packed.storage, packed.params, packed.shape, dim) == algebra.shard_step(packed, dim)


def random(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_columns_inside_blocks_are_multiplied_with_padded_x() -> None:
    """768 columns are three blocks, of which each of two ranks needs one and a half and holds two."""
    packed, x = q4_k.quantize(random(32, 768)), random(5, 768, 1)
    parts = [parts_of(packed, [row_piece("x", layer_of(packed), 2, rank)])[0] for rank in (0, 1)]
    assert [part.weight.shape for part in parts] == [(32, 512), (32, 512)]
    assert row_piece("x", layer_of(packed), 2, 0).how == "cut; 128 columns more than its own"
    total = sum(linear(own, [part]) for own, part in zip(x.chunk(2, 1), parts, strict=True))
    torch.testing.assert_close(total, x @ decoded(packed).T, rtol=0, atol=1e-4)


def test_columns_that_a_stack_of_experts_needs() -> None:
    """Of two experts [2, 32, 512] that hold 128 columns more, as an engine that quantizes again wants them."""
    stack = torch.arange(2 * 32 * 512).view(2, 32, 512)
    assert torch.equal(needed(stack, StoredSpan("K", 128, 512, 0, 512)), stack[:, :, 128:])
    assert torch.equal(needed(stack[0], StoredSpan("N", 8, 24, 0, 32)), stack[0, 8:24])


def test_rows_inside_blocks_are_left_out_of_the_product() -> None:
    packed, x = int_group.quantize(random(24, 64), "awq", group=64), random(5, 64, 1)
    own, = parts_of(packed, [piece("x", layer_of(packed), "N", 4, 12)])
    assert same_bits(own.dequantize(torch.float32), decoded(packed)[4:12])
    assert linear(x, [own]).shape == (5, 8)
    torch.testing.assert_close(linear(x, [own]), x @ decoded(packed)[4:12].T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_key_and_value_heads_are_repeated_on_more_ranks_than_heads(ranks: int) -> None:
    """Of a layer that is q, k and v in the file, and of three layers."""
    heads, kv, width = 8, 2, 8
    sizes = [heads * width, kv * width, kv * width]
    packed, x = q8_0.quantize(random(sum(sizes), 64)), random(3, 64, 1)
    whole = decoded(packed).split(sizes)
    several = [packed.cut("N", start, start + size) for start, size in zip((0, 64, 80), sizes, strict=True)]
    for rank in range(ranks):
        copies = max(1, ranks // kv)
        own = [heads // ranks * width, kv * copies // ranks * width, kv * copies // ranks * width]
        wanted = torch.cat([part[at * size:][:size] for part, size, at in zip(
            whole, own, (rank, rank // copies, rank // copies), strict=True)])
        pieces = merged_pieces("qkv", [layer_of(packed)], list(zip(own, sizes, strict=True)), ranks, rank)
        one, = join_parts(parts_of(packed, pieces))
        assert same_bits(decoded(one.weight), wanted)
        layers = [layer_of(weight, name) for weight, name in zip(several, "qkv", strict=True)]
        pieces = merged_pieces("qkv", layers, list(zip(own, sizes, strict=True)), ranks, rank)
        parts = [part for weight, own_piece in zip(several, pieces, strict=True) for part in parts_of(weight, [own_piece])]
        torch.testing.assert_close(linear(x, join_parts(parts)), x @ wanted.T, rtol=0, atol=1e-4)


def test_parts_of_one_scale_each_and_of_other_formats_stay_apart() -> None:
    """The first two of one format are one weight; a product is that of the rows of all."""
    weights = [fp8_channel.quantize(random(16, 64)), fp8_channel.quantize(random(8, 64, 1)),
               fp8_tensor.quantize(random(8, 64, 2)), fp8_tensor.quantize(random(8, 64, 3))]
    parts = join_parts([part for weight in weights
                        for part in parts_of(weight, [piece("x", layer_of(weight), "N", 0, weight.shape[0])])])
    assert [part.weight.shape[0] for part in parts] == [24, 8, 8]
    x = random(3, 64, 4)
    torch.testing.assert_close(linear(x, parts), x @ torch.cat(list(map(decoded, weights))).T, rtol=0, atol=1e-4)


def act_order(n: int, k: int, group: int) -> PackedWeight:
    """A GPTQ weight whose columns are in groups all over K."""
    packed = int_group.quantize(random(n, k), "gptq_v2", group=group)
    index = (torch.arange(k) // group).to(torch.int32)[torch.randperm(k, generator=torch.Generator().manual_seed(0))]
    return int_group.pack({**int_group.unpack(packed), "g": index}, "gptq_v2", **packed.params)


@pytest.mark.parametrize(("ranks", "columns", "group"), [(2, 512, 64), (4, 256, 32), (8, 256, 32)])
def test_columns_in_act_order_keep_their_groups(ranks: int, columns: int, group: int) -> None:
    """A rank has the scales of all groups, in groups of fewer columns; on 8 ranks it holds twice its columns for that."""
    packed = act_order(32, 1024, 128)
    for rank in range(ranks):
        own, = parts_of(packed, [row_piece("x", layer_of(packed, act_order=True), ranks, rank)])
        assert same_bits(own.dequantize(torch.float32), decoded(packed).chunk(ranks, 1)[rank].contiguous())
        assert (own.weight.shape[1], own.weight.params["group"]) == (columns, group)
    rows, = parts_of(packed, [piece("x", layer_of(packed, act_order=True), "N", 8, 16)])
    assert same_bits(decoded(rows.weight), decoded(packed)[8:16])


def test_rows_of_a_vocabulary() -> None:
    assert [vocabulary_rows(1000, 4, rank) for rank in range(4)] == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert [vocabulary_rows(70, 4, rank) for rank in range(4)] == [(0, 32), (32, 64), (64, 70), (70, 70)]


def test_refusals_name_layer_format_step_and_remedy() -> None:
    packed = q4_k.quantize(random(16, 512))
    with pytest.raises(ShardError, match=r"'down': 'layer', q4_k.gguf \[16, 512\], cannot be divided among 16 ranks along K: "
                       r"columns 0 to 32 lie in blocks of 256; it can be divided among 8"):
        row_piece("down", layer_of(packed), 16, 0)
    with pytest.raises(ShardError, match="'o': 512 columns cannot be divided among 3 ranks"):
        row_piece("o", layer_of(packed), 3, 0)
    with pytest.raises(ShardError, match="'qkv': 'layer' has 16 rows, and the model's layer 8"):
        merged_pieces("qkv", [layer_of(packed)], [(4, 8)], 2, 0)
    with pytest.raises(ShardError, match="'qkv': the checkpoint lacks parts; it has 'layer'"):
        merged_pieces("qkv", [layer_of(packed)], [(8, 16), (8, 16)], 2, 0)
    with pytest.raises(ShardError, match="'kv': 16 rows of 'layer' cannot be divided among 2 ranks"):
        merged_pieces("kv", [layer_of(packed)], [(5, 16)], 2, 0)
    with pytest.raises(ShardError, match="'x': 'a' is not recognised: no format"):
        piece("x", Layer("a", why="no format"), "N", 0, 1)
    with pytest.raises(ShardError, match=r"'x': the layer transforms x \(multiply by a.pre_quant_scale\), which no engine does"):
        piece("x", Layer("a", transforms=(Transform("multiply", tensor="a.pre_quant_scale"),)), "N", 0, 1)
    collector = Collector(layer_of(packed), [])
    with pytest.raises(ShardError, match="'layer': the loader did not bring blocks"):
        collector.parts()
    collector.take("blocks", torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ShardError, match="'layer': q4_k"):
        collector.parts()
