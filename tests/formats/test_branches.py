"""Side branches: factors of a low rank, sparse entries and dense rows, added to a decoded weight."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.analyze.check.check_branches import random_branch_fields
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.generated import int4pack, nunchaku_int4, q4_0, squeezellm
from qdsl.runtime import FormatError, PackedWeight
from tests.formats.test_infer import nunchaku
from tests.support import checkpoints
from tests.support.formats import EXTRA, SPECS, module, same_bits, spec
from tests.support.slow_branches import add_branches
from tests.support.traits import sample

TILES = next(path for path in EXTRA if path.stem == "low_rank_tiles")
OUTLIERS = next(path for path in SPECS if path.stem == "squeezellm")
WORDS = next(path for path in EXTRA if path.stem == "outlier_words")
SHAPE = (64, 256)
BRANCHES = {"tiles": TILES, "outliers": OUTLIERS, "words": WORDS}


@cache
def branched(name: str, seed: int = 0, storage: str = "") -> PackedWeight:
    """A weight with all branches of its format.  seed: of these."""
    own = module(BRANCHES[name])
    base = own.quantize(sample(*SHAPE))
    plus = own.FORMAT.variant(base.params).plus
    fields = {role: value for branch in plus for role, value in random_branch_fields(branch, SHAPE, base.params, seed).items()}
    packed = own.pack({**own.unpack(base), **fields}, **base.params)
    return own.planar(packed) if storage else packed


WEIGHTS = [("tiles", ""), ("tiles", "planar"), ("outliers", ""), ("words", "")]
each_weight = pytest.mark.parametrize(("name", "storage"), WEIGHTS)


def decoded(packed: PackedWeight) -> Tensor:
    return packed.format.dequantize(packed, torch.float32)


@each_weight
def test_the_sum_is_rounded_in_the_order_of_the_spec(name: str, storage: str) -> None:
    packed = branched(name, storage=storage)
    fields = packed.format.unpack(packed)
    wanted = add_branches(spec(BRANCHES[name]), fields, decoded(packed.base))
    assert same_bits(decoded(packed), wanted) and not torch.equal(wanted, decoded(packed.base))
    assert same_bits(packed.format.dequantize(packed, torch.bfloat16), wanted.bfloat16())
    index = torch.tensor([[3, 63], [3, 0]])
    assert same_bits(packed.format.dequantize_rows(packed, index, torch.float32), wanted[index])


@each_weight
def test_other_storages_have_the_same_branches(name: str, storage: str) -> None:
    packed = branched(name, storage=storage)
    for other in packed.variant.storages:
        converted = packed.format.convert(packed, other)
        assert all(converted.tensors[key] is packed.tensors[key] or same_bits(converted.tensors[key], packed.tensors[key])
                   for key in packed.branch_names)
        assert same_bits(decoded(converted), decoded(packed))


@each_weight
@pytest.mark.parametrize(("dim", "start", "stop"), [("N", 0, 16), ("N", 16, 64), ("K", 0, 128), ("K", 128, 256)])
def test_pieces_are_pieces_of_the_sum(name: str, storage: str, dim: str, start: int, stop: int) -> None:
    packed = branched(name, storage=storage)
    whole = decoded(packed)
    part = packed.shard(dim, start, stop)
    assert part.has_branch and same_bits(decoded(part), whole[start:stop] if dim == "N" else whole[:, start:stop])
    part.format.checked(part)
    on_meta = packed.apply(lambda tensor: tensor.to("meta")).shard(dim, start, stop)
    assert on_meta.shape == part.shape and on_meta.tensors.keys() == part.tensors.keys()


@each_weight
@pytest.mark.parametrize("dim", ["N", "K"])
def test_pieces_joined_are_the_weight(name: str, storage: str, dim: str) -> None:
    packed = branched(name, storage=storage)
    at = 128 if dim == "K" else 32
    parts = [packed.shard(dim, 0, at), packed.shard(dim, at, packed.shape[dim == "K"])]
    joined = PackedWeight.join(parts, dim)
    assert all(same_bits(joined.tensors[key], tensor) for key, tensor in packed.tensors.items())


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("dim", ["N", "K"])
def test_weights_with_branches_of_their_own_are_joined(name: str, dim: str) -> None:
    """And one without, as of fused projections of which some have no outliers."""
    parts = [branched(name), branched(name, seed=1), branched(name).base]
    joined = PackedWeight.join(parts, dim)
    assert torch.equal(decoded(joined), torch.cat([decoded(part) for part in parts], "NK".index(dim)))
    joined.format.checked(joined)


def test_rows_in_any_order() -> None:
    packed, index = branched("outliers"), torch.tensor([63, 5, 5, 0])
    assert same_bits(decoded(packed.rows(index)), decoded(packed)[index])


def test_factors_in_tiles_have_whole_tiles() -> None:
    packed = branched("tiles")
    assert (packed.step("N"), packed.step("K")) == (16, 32)
    with pytest.raises(FormatError, match="'proj_up' holds no field"):
        packed.cut("N", 0, 8)


# -- what files may hold ----------------------------------------------------------------------------------------------


def changed(key: str, place: int, value: float) -> dict[str, Tensor]:
    tensors = dict(branched("outliers").tensors)
    tensors[key] = tensors[key].clone()
    tensors[key].view(-1)[place] = value
    return tensors


@pytest.mark.parametrize(("key", "place", "value", "message"), [
    ("rows", 0, 1, "'rows' does not rise from 0 to"),
    ("rows", -1, 10 ** 6, "'rows' does not rise from 0 to"),
    ("rows", 3, 0x7FFFFFFF, "'rows' does not rise from 0 to"),
    ("rows", 3, -5, "'rows' does not rise from 0 to"),
    ("cols", 0, 256, "'cols' has columns from .* to 256 of 256"),
    ("cols", 5, -1, "'cols' has columns from -1 to"),
    ("vals", 7, float("nan"), "'vals' has numbers that are not finite"),
    ("full_row_indices", 1, 64, "'full_row_indices' has rows from .* to 64 of 64"),
    ("full_row_indices", 0, -1, "'full_row_indices' has rows from -1"),
    ("full_rows", 9, float("inf"), "'full_rows' has numbers that are not finite"),
])
def test_hostile_numbers(key: str, place: int, value: float, message: str) -> None:
    tensors = changed(key, place, value)
    with pytest.raises(FormatError, match=message):
        squeezellm.wrap(tensors)
    layer = squeezellm.Linear(branched("outliers"))
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(tensors)


def test_columns_that_stand_twice_in_a_row() -> None:
    packed = branched("outliers")
    n = int((packed.tensors["rows"].diff() > 1).nonzero()[0])
    first = int(packed.tensors["rows"][n])
    with pytest.raises(FormatError, match="'cols' does not rise within rows"):
        squeezellm.wrap(changed("cols", first + 1, int(packed.tensors["cols"][first])))


@pytest.mark.parametrize(("key", "cut", "message"), [
    ("rows", 1, r"'rows' is \[64\], for 64 rows and one more"), ("vals", 1, r"'vals' is \[\d+\], beside \[\d+\] columns"),
    ("full_row_indices", 1, r"'full_rows' is \[2, 256\], for 1 rows of 256 columns")])
def test_lengths_that_do_not_fit(key: str, cut: int, message: str) -> None:
    tensors = dict(branched("outliers").tensors)
    with pytest.raises(FormatError, match=message):
        squeezellm.wrap({**tensors, key: tensors[key][:-cut]})


def test_some_tensors_of_a_branch() -> None:
    tensors = dict(branched("outliers").tensors)
    del tensors["vals"]
    with pytest.raises(FormatError, match="'rows' is of a branch that needs 'vals' too"):
        squeezellm.wrap(tensors)
    for key in ("rows", "cols"):
        del tensors[key]
    assert squeezellm.wrap(tensors).branch_names == ("full_row_indices", "full_rows")
    fields = squeezellm.unpack(branched("outliers"))
    del fields["value"]
    with pytest.raises(FormatError, match="field 'value' is missing"):
        squeezellm.pack(fields)


@pytest.mark.parametrize(("place", "word", "message"), [
    (0, 256, "'col_vals' has columns from .* to 256 of 256"), (0, -1, "'col_vals' has columns from .* to 65535 of 256"),
    (7, 0x7C000000, "'col_vals' (has numbers that are not finite|does not rise)")])
def test_hostile_words(place: int, word: int, message: str) -> None:
    packed = branched("words")
    entries = packed.tensors["col_vals"].clone()
    entries[place] = word
    with pytest.raises(FormatError, match=message):
        packed.format.wrap({**packed.tensors, "col_vals": entries})


def test_a_word_is_a_column_below_and_a_value_above() -> None:
    packed = branched("words")
    fields, word = packed.format.unpack(packed), packed.tensors["col_vals"].numpy().view("<u4")
    assert torch.equal(fields["column"], torch.from_numpy((word & 0xFFFF).astype("<i4")))
    assert fields["value"].numpy().tobytes() == (word >> 16).astype("<u2").tobytes() and fields["value"].min() < 0
    with pytest.raises(FormatError, match="'col_vals' holds 16 bits, not 65536"):
        packed.format.pack({**fields, "column": fields["column"] + (1 << 16) - fields["column"].max()})
    with pytest.raises(FormatError, match="'col_vals' holds 16 bits, not -1"):
        packed.format.pack({**fields, "column": fields["column"] - fields["column"].min() - 1})
    with pytest.raises(FormatError, match="'col_vals' holds lists of one length, not"):
        packed.format.pack({**fields, "column": fields["column"][1:]})
    with pytest.raises(FormatError, match="field 'value' is float32; the format needs float16"):
        packed.format.pack({**fields, "value": fields["value"].float()})


def test_ranks_that_do_not_fit() -> None:
    packed = branched("tiles")
    with pytest.raises(FormatError, match=r"'proj_down' is \[16, 256\], for a rank of 32 and 256 columns"):
        packed.format.wrap({**packed.tensors, "proj_down": packed.tensors["proj_down"][:, :16].contiguous()})


# -- products ---------------------------------------------------------------------------------------------------------


def allowed(x: Tensor, packed: PackedWeight) -> Tensor:
    """How far a product may be from that in float64: the parts and the sum are rounded to x's type, and sums to float32."""
    eps = torch.finfo(x.dtype).eps
    size = x.double().abs() @ decoded(packed.base).double().abs().T
    fields = packed.format.unpack(packed)
    if "up" in fields:
        size = size + x.double().abs() @ fields["down"].double().abs().T @ fields["up"].double().abs().T
    else:
        size = size + x.double().abs() @ (decoded(packed).double() - decoded(packed.base).double()).abs().T
    return (2 * eps + 8 * x.shape[-1] * 2.0 ** -24) * size


@each_weight
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_products_are_within_the_bound(name: str, storage: str, dtype: torch.dtype) -> None:
    packed = branched(name, storage=storage)
    x, bias = sample(2, 3, SHAPE[1], seed=2, dtype=dtype), sample(SHAPE[0], seed=3, dtype=dtype)
    y = packed.format.linear(x, packed, bias)
    exact = x.double() @ decoded(packed).double().T + bias.double()
    assert y.dtype == dtype and bool(((y.double() - exact).abs() <= allowed(x, packed) + 2 * torch.finfo(dtype).eps).all())


@each_weight
def test_batch_invariant_rows_do_not_depend_on_each_other(name: str, storage: str) -> None:
    packed, x = branched(name, storage=storage), sample(5, SHAPE[1], seed=2)
    y = packed.format.linear(x, packed, batch_invariant=True)
    alone = torch.cat([packed.format.linear(row, packed, batch_invariant=True) for row in x.split(1)])
    assert same_bits(y, alone)


@each_weight
def test_gradients_are_those_of_the_sum(name: str, storage: str) -> None:
    packed, x = branched(name, storage=storage), sample(3, SHAPE[1], seed=2).requires_grad_()
    gradient = sample(3, SHAPE[0], seed=4)
    packed.format.linear(x, packed).backward(gradient)
    wanted = gradient @ decoded(packed)
    assert x.grad is not None and torch.allclose(x.grad, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    batched = torch.vmap(lambda row: packed.format.linear(row, packed))(x.detach())
    wanted = packed.format.linear(x.detach(), packed)
    assert torch.allclose(batched, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@each_weight
def test_a_compiled_layer_is_the_layer(name: str, storage: str) -> None:
    packed = branched(name, storage=storage)
    layer, x = packed.format.Linear(packed), sample(3, SHAPE[1], seed=2)
    wanted = layer(x)
    assert same_bits(torch.compile(layer, backend="eager", fullgraph=True)(x), wanted)
    program = torch.export.export(layer, (x,))
    assert same_bits(program.module()(x), wanted)


def test_a_weight_without_entries_is_its_base() -> None:
    packed, x = branched("outliers").base, sample(3, SHAPE[1], seed=2)
    nothing = {"rows": torch.zeros(SHAPE[0] + 1, dtype=torch.int32), "cols": torch.empty(0, dtype=torch.int32),
               "vals": torch.empty(0)}
    whole = squeezellm.wrap({**packed.tensors, **nothing})
    assert whole.has_branch and same_bits(decoded(whole), decoded(packed))
    assert same_bits(squeezellm.linear(x, whole), squeezellm.linear(x, packed))


def test_what_knows_nothing_of_branches_refuses_them() -> None:
    packed = branched("tiles")
    x = sample(4, SHAPE[1], dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="'proj_up' is added to the weight of all experts"):
        packed.format.grouped_linear(x, packed, [0, 2, 4])
    with pytest.raises(FormatError, match="'proj_up' is added to the weight, and aten"):
        packed.format.for_device(packed)
    with pytest.raises(FormatError, match="int4pack has no place for 'proj_up'"):
        int4pack.convert(packed, int4pack.FORMAT.storages[0])
    requantized, _ = packed.format.requantize(packed, q4_0.FORMAT)
    assert requantized.format is q4_0.FORMAT and not requantized.has_branch


# -- layers -----------------------------------------------------------------------------------------------------------


@each_weight
def test_a_layer_saves_loads_and_moves_its_branches(name: str, storage: str) -> None:
    packed = branched(name, storage=storage)
    layer, x = packed.format.Linear(packed), sample(3, SHAPE[1], seed=2)
    wanted = layer(x)
    state = layer.state_dict()
    assert list(state) == list(packed.tensors) and all(same_bits(state[key], packed.tensors[key]) for key in state)
    pickled = pickle.loads(pickle.dumps(layer))                  # noqa: S301
    for twin in (copy.deepcopy(layer), pickled, copy.deepcopy(layer).to(torch.bfloat16)):
        assert same_bits(twin(x), wanted)
    empty = packed.format.Linear.empty(SHAPE, packed.storage, optional=packed.branch_names, **packed.params)
    empty.load_state_dict(state, assign=True)
    assert same_bits(empty(x), wanted)
    other = packed.format.Linear(packed.format.convert(branched(name, seed=1), packed.storage))
    other.load_state_dict(state)                                 # with another number of entries
    assert same_bits(other(x), wanted)
    again = pickle.loads(pickle.dumps(packed))                   # noqa: S301
    assert again.branch_names == packed.branch_names and same_bits(decoded(again), decoded(packed))
    assert same_bits(layer.dense(torch.float32).weight.data, decoded(packed))


def test_entries_that_are_changed_in_place_are_validated_again() -> None:
    layer = squeezellm.Linear(branched("outliers"))
    with torch.no_grad():
        layer.cols[0] = 1 << 20
    with pytest.raises(FormatError, match="'cols' has columns from"):
        layer(sample(1, SHAPE[1]))


# -- other layouts of the same branch -------------------------------------------------------------------------------------


PLAIN = """
format: low_rank_rows
weight: [N, K]
params: {scale_type: [f16, f32]}
fields: {q: "u4[n, k]", s: "scale_type[n, k // 32]"}
decode: (q - 8) * s
plus:
  low_rank:
    lora_b: {tensor: "f32[n<N, r<R]", record: "up[n, r]", aliases: [lora_B.weight]}
    lora_a: {tensor: "f32[k<K, r<R]", record: "down[r, k]"}
storage:
  pairs:
    codes:
      tensor: u8[n<N, j<K/2]
      record: q[n, 2*j] q[n, 2*j + 1]
    scales: {tensor: "scale_type[n<N, g<K/32]", record: "s[n, g]"}
"""


def test_a_branch_of_the_same_kind_in_another_format(tmp_path: Any) -> None:
    (tmp_path / "low_rank_rows.yaml").write_text(PLAIN)
    plain = qdsl.load(tmp_path / "low_rank_rows.yaml")
    packed = branched("tiles")
    converted = plain.convert(packed, "pairs")
    assert converted.tensors["lora_a"].shape == (256, 32) and same_bits(decoded(converted), decoded(packed))
    back = packed.format.convert(converted, "rows")
    assert all(same_bits(back.tensors[key], tensor) for key, tensor in packed.tensors.items())
    renamed = {{"lora_b": "lora_B.weight"}.get(key, key): tensor for key, tensor in converted.tensors.items()}
    layer = plain.Linear(plain.wrap(renamed))
    assert "lora_B_weight" in layer.state_dict() and same_bits(layer.dequantize(torch.float32), decoded(packed))
    third = plain.wrap({**converted.tensors, "lora_a": converted.tensors["lora_a"] / 3})
    with pytest.raises(FormatError, match="'proj_down' is float16 there, which does not hold its numbers"):
        packed.format.convert(third, "rows")


# -- as packages write it -----------------------------------------------------------------------------------------------


def in_tiles(matrix: Tensor, is_down: bool) -> Tensor:
    """Factors [K, R] or [N, R] by fragments of 16 x 16: 8 x 4 lanes, each with 2 x 2 pairs of the inner axis."""
    a, b = (extent // 16 for extent in matrix.shape)
    tiles = matrix.reshape(a, 2, 8, b, 2, 4, 2).permute(*((3, 0) if is_down else (0, 3)), 2, 5, 1, 4, 6)
    return tiles.reshape(matrix.shape[::-1] if is_down else matrix.shape)


def by_lanes(scales: Tensor) -> Tensor:
    """Scales [N, groups] as warps of 128 rows read them: 8 x 4 lanes, and pairs of rows."""
    return scales.reshape(-1, 8, 2, 4, 2, scales.shape[1]).permute(0, 5, 1, 3, 2, 4).reshape(scales.shape[::-1])


def test_nunchakus_layout(tmp_path: Any) -> None:
    """The weight that its kernel multiplies: codes and scales take x over the smoothing factors, the low rank x itself."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (256, 384), generator=generator)
    s, up = (torch.rand(256, extent, generator=generator).add(0.5).bfloat16() for extent in (6, 32))
    smooth, down = torch.rand(384, 1, generator=generator).add(0.5).bfloat16(), sample(32, 384, dtype=torch.bfloat16)
    tensors = {"qweight": nunchaku(codes & 15).view(torch.int8).view(256, 192), "wscales": by_lanes(s),
               "smooth_factor": by_lanes(smooth).flatten(), "proj_up": in_tiles(up, False), "proj_down": in_tiles(down, True)}
    packed = nunchaku_int4.wrap(tensors)
    wanted = codes.float() * s.float().repeat_interleave(64, 1) / smooth.float().T
    assert same_bits(decoded(packed.base), wanted)
    for r in range(32):
        wanted = wanted + up[:, r, None].float() * down[r].float()
    planar = nunchaku_int4.planar(packed)
    assert same_bits(decoded(packed), wanted) and planar.storage == "planar" and same_bits(decoded(planar), wanted)
    back = nunchaku_int4.convert(planar, "nunchaku")
    assert all(same_bits(back.tensors[key], tensor) for key, tensor in packed.tensors.items())
    raw = {{"smooth_factor": "smooth", "proj_up": "lora_up", "proj_down": "lora_down"}.get(key, key): tensor
           for key, tensor in tensors.items()}                   # deepcompressor's names
    assert same_bits(decoded(nunchaku_int4.wrap(raw)), wanted)
    x = sample(3, 384, dtype=torch.bfloat16)
    exact = x.double() / smooth.double().T @ (codes * s.double().repeat_interleave(64, 1)).T
    exact = exact + x.double() @ down.double().T @ up.double().T
    for weight in (packed, planar):
        y = nunchaku_int4.linear(x, weight)
        assert bool(((y.double() - exact).abs() <= allowed(x, packed)).all())
    part = planar.shard("N", 128, 256)
    assert same_bits(decoded(part), wanted[128:])
    written = checkpoints.folder(tmp_path, {"up": tensors, "down": {**tensors, "bias": torch.zeros(256, dtype=torch.bfloat16)}})
    with qdsl.open(written) as checkpoint:
        assert same_bits(checkpoint.weight("up", dtype=torch.float32), wanted)
    with Folder(written) as folder:
        reasons = {layer.name: layer.why for layer in layers(folder).layers}
    assert reasons["up"] == "" and "whose bias is permuted" in reasons["down"]
