"""Formats at work: what they refuse and how they say it, what they find out by themselves, and what they leave alone."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.core.places import UnknownSpec
from qdsl.core.shapes import axis
from qdsl.generated import (
    bf16,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int8_channel,
    int_group,
    q4_0,
    q8_0,
)
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight import tiles
from qdsl.runtime.weight.defaults import is_default
from tests.support.covering import quarter_of
from tests.support.formats import (
    ROOT,
    Case,
    cases,
    random_fields,
    random_packed,
    same_bits,
    shapes,
    smallest,
)

CASES = cases()


def gptq(n: int = 64, k: int = 128, group: int = 32, bits: int = 4) -> dict[str, Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    return int_group.quantize(weight, "gptq_v2", bits=bits, group=group).tensors


def refused(match: str):  # type: ignore[no-untyped-def]
    return pytest.raises(FormatError, match=match)


# -- wrap -----------------------------------------------------------------------------------------------------------------


def test_wrap_finds_storage_parameters_and_shape() -> None:
    packed = int_group.wrap(gptq(group=32, bits=3), storage="gptq_v2")
    assert (packed.shape, packed.params, packed.storage) == ((64, 128), {"bits": 3, "group": 32, "scale_type": "f16"},
                                                              "gptq_v2")
    awq = int_group.convert(int_group.wrap(gptq(), storage="gptq_v2"), "awq")
    assert int_group.wrap(awq.tensors).storage == "awq"
    scales = torch.ones(2, 3, dtype=torch.bfloat16)
    block = fp8_block.wrap({"weight": torch.zeros(130, 257).to(torch.float8_e4m3fn), "weight_scale": scales})
    assert (block.shape, block.params) == ((130, 257), {"bn": 128, "bk": 128, "scale_type": "bf16"})


def test_wrap_copies_nothing() -> None:
    blocks = q4_0.quantize(torch.randn(4, 64)).tensors["blocks"]
    assert q4_0.wrap({"blocks": blocks}).tensors["blocks"].data_ptr() == blocks.data_ptr()


def test_bytes_may_stand_for_8_bit_floats() -> None:
    weight = torch.zeros(4, 4, dtype=torch.uint8)
    assert fp8_tensor.wrap({"weight": weight, "weight_scale": torch.ones(())}).tensors["weight"].dtype == torch.float8_e4m3fn


def test_a_tensor_of_one_element_may_have_any_rank() -> None:
    weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    for scale in (torch.ones(()), torch.ones(1), torch.ones(1, 1)):
        assert fp8_tensor.wrap({"weight": weight, "weight_scale": scale}).tensors["weight_scale"].shape == (1,)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize(("form", "extents"), [(fp8_block, (2, 3)), (fp8_block, (130, 9)), (fp8_channel, (130, 1)),
                                               (fp8_channel, (130,)), (fp8_tensor, (1, 1))])
def test_dialects_of_fp8(form: ModuleType, extents: tuple[int, ...], kind: torch.dtype, name: str) -> None:
    """Names and types of scales, bytes of E8M0 too, and blocks; scales of activations and caches are left out, with a note."""
    scale = torch.full(extents, 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    scale = scale.view(kind) if kind.itemsize == 1 else scale.to(kind)
    others = {"activation_scale": torch.ones(()), "k_scale": torch.ones(()), "v_scale": torch.ones(1)}
    packed = form.wrap({"weight": torch.ones(130, 257).to(torch.float8_e4m3fn), name: scale, **others})
    assert packed.params["scale_type"] == {torch.uint8: "e8m0", torch.float8_e8m0fnu: "e8m0", torch.float32: "f32",
                                           torch.float16: "f16", torch.bfloat16: "bf16"}[kind]
    assert torch.equal(form.dequantize(packed, torch.float32), torch.full((130, 257), 2.0))
    assert {f"tensor '{other}' is not part of {form.SPEC.name}.safetensors" for other in others} <= set(packed.notes)
    if form is fp8_block:
        assert (packed.params["bn"], packed.params["bk"]) == ((128, 128) if extents == (2, 3) else (1, 32))


def test_tensors_that_fit_two_storages_are_not_guessed() -> None:
    with refused("fit the storages gptq_v2 and gptq_v1; say which with storage="):
        int_group.wrap(gptq())


def test_other_tensors_are_noted() -> None:
    packed = fp8_tensor.wrap({"weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(()),
                              "input_scale": torch.ones(())})
    assert packed.notes == ("tensor 'input_scale' is not part of fp8_tensor.safetensors",)


@pytest.mark.parametrize(("change", "message"), [
    ({"qweight": None}, r"int_group\.gptq_v2 .*needs tensor 'qweight'; given are qzeros, scales, g_idx"),
    ({"scales": torch.float64}, r"tensor 'scales' has dtype float64; the format needs float16 or bfloat16 or float32"),
    ({"qweight": torch.int64}, r"tensor 'qweight' has dtype int64; the format needs int32"),
    ({"scales": (4, 63)}, r"'qweight' \[16, 64\] says N = 64, but 'scales' \[4, 63\] is \[ceil\(K/group\), N\], so N = 63"),
    ({"scales": (5, 64)}, r"tensor 'scales' has shape \[5, 64\]; the format needs \[ceil\(K/group\), N\] = "),
    ({"qzeros": (4, 7)}, r"'qzeros' \[4, 7\] is \[ceil\(K/group\), N/8\], so N = 56"),
    ({"g_idx": (127,)}, r"'g_idx' \[127\] is \[K\], so K = 127"),
])
def test_wrap_says_what_is_wrong(change: dict[str, object], message: str) -> None:
    tensors = gptq()
    for name, to in change.items():
        if to is None:
            del tensors[name]
        elif isinstance(to, torch.dtype):
            tensors[name] = tensors[name].to(to)
        else:
            tensors[name] = torch.zeros(to, dtype=tensors[name].dtype)  # type: ignore[call-overload]
    with refused(message):
        int_group.wrap(tensors, storage="gptq_v2", bits=4)


@pytest.mark.parametrize("shape", [(64,), (64, 128, 1), (64.5, 128), (math.inf, 3), [None, 128], "ab", 64])
def test_a_shape_is_two_numbers(shape: object) -> None:
    with refused(r"int_group: shape is \(N, K\), not "):
        int_group.wrap(gptq(), shape=shape, storage="gptq_v2")


def test_what_is_no_plain_tensor_is_refused() -> None:
    tensors = gptq()
    with refused("'scales' is a sparse_coo tensor"):
        int_group.wrap({**tensors, "scales": tensors["scales"].to_sparse()}, storage="gptq_v2")
    fields = int_group.unpack(int_group.wrap(tensors, storage="gptq_v2"))
    with refused("field 's' is a ndarray, not a torch tensor"):
        int_group.pack({**fields, "s": fields["s"].numpy()}, "gptq_v2")
    with refused(r"field 'q' \[N, K\] is missing"):
        int_group.pack({**fields, "q": None}, "gptq_v2")


@pytest.mark.parametrize(("column", "group"), [(7, 4), (0, -1), (127, 1 << 30)])
def test_a_group_that_does_not_exist_is_refused(column: int, group: int) -> None:
    tensors = gptq()
    tensors["g_idx"][column] = group
    with refused(rf"'g_idx' puts column {column} into group {group}; there are groups 0 to 3"):
        int_group.wrap(tensors, storage="gptq_v2")


@pytest.mark.parametrize("group", [0, -1])
def test_an_index_that_nobody_filled(group: int) -> None:
    """It is as if it were missing, and that is noted; one group is told by it, and groups that another value names are wrong."""
    tensors = gptq()
    filled = {**tensors, "g_idx": torch.full_like(tensors["g_idx"], group)}
    packed = int_group.wrap(filled, storage="gptq_v2")
    assert "g_idx" not in packed.tensors and "tensor 'g_idx' has one value for all columns" in " ".join(packed.notes)
    del tensors["g_idx"]
    assert same_bits(int_group.dequantize(packed), int_group.dequantize(int_group.wrap(tensors, storage="gptq_v2")))
    one = dict(int_group.quantize(torch.randn(64, 128), "gptq_v2", bits=4, group=-1).tensors)
    one["g_idx"] = torch.zeros(128, dtype=torch.int32)
    assert "g_idx" in int_group.wrap(one, storage="gptq_v2", group=-1).tensors
    with refused("'g_idx' puts column 0 into group 9"):
        int_group.wrap({**filled, "g_idx": torch.full_like(filled["g_idx"], 9)}, storage="gptq_v2")


def test_columns_out_of_order_are_decoded_by_tiles() -> None:
    """Tiles of rows have 2^18 weights: here a whole one, and a part."""
    shape = (640, 512)
    generator = torch.Generator().manual_seed(0)
    packed = int_group.quantize(torch.randn(shape, generator=generator), "gptq_v2", bits=4, group=128)
    index = (torch.arange(512, dtype=torch.int32) // 128)[torch.randperm(512, generator=generator)]
    mixed = int_group.wrap({**packed.tensors, "g_idx": index}, storage="gptq_v2", bits=4, group=128)
    planar = int_group.FORMAT.planar(mixed)
    assert planar.order is not None and mixed.order is None
    assert same_bits(int_group.dequantize(planar, torch.float32), int_group.dequantize(mixed, torch.float32))


@pytest.mark.parametrize("group", [0, -1])
def test_an_index_that_nobody_filled_comes_into_a_layer(group: int) -> None:
    """By loading, or put there as libraries do: the layer has the numbers of `wrap`."""
    tensors = gptq()
    empty = torch.full_like(tensors["g_idx"], group)
    loaded = int_group.Linear.empty((64, 128), "gptq_v2", optional=["g_idx"], bits=4, group=32)
    loaded.load_state_dict({**tensors, "g_idx": empty}, assign=True)
    placed = int_group.Linear(int_group.wrap(tensors, storage="gptq_v2"))
    placed.g_idx = torch.nn.Parameter(empty, requires_grad=False)
    wanted = int_group.dequantize(int_group.wrap(tensors, storage="gptq_v2"))
    for layer in (loaded, placed):
        assert same_bits(layer.dequantize(), wanted) and same_bits(copy.deepcopy(layer.to("cpu")).dequantize(), wanted)
        assert same_bits(int_group.dequantize(int_group.convert(layer.packed, "gptq_v1")), wanted)
    assert same_bits(loaded.state_dict()["g_idx"], tensors["g_idx"])
    assert bool((empty == group).all())


def test_an_index_is_filled_in_place() -> None:
    """Of a layer that was cast and used before, as loaders that hold its parameters do."""
    fields = int_group.unpack(int_group.wrap(gptq(), storage="gptq_v2"))
    shuffled = fields["g"][torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    packed = int_group.pack({**fields, "g": shuffled}, "gptq_v2", bits=4, group=32)
    layer = int_group.Linear.empty((64, 128), "gptq_v2", device="cpu", optional=["g_idx"], bits=4, group=32)
    parameters = dict(layer.named_parameters())
    for tensor in parameters.values():
        tensor.data.zero_()
    layer.to("cpu")(torch.ones(1, 128))
    for name, tensor in parameters.items():
        tensor.data.copy_(packed.tensors[name])
    assert same_bits(layer.dequantize(), int_group.dequantize(packed))
    layer.g_idx = torch.nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
    copy.deepcopy(layer.to("cpu"))
    with refused(r"'g_idx' has become int32 \[0\]"):
        layer.dequantize()


def test_an_index_that_would_be_taken_for_missing_is_not_packed() -> None:
    fields = int_group.unpack(int_group.quantize(torch.randn(8, 64), "gptq_v2", bits=4, group=32))
    with refused("'g_idx' would have one value for all columns, which readers take for missing"):
        int_group.pack({**fields, "g": torch.zeros(64, dtype=torch.int32)}, "gptq_v2", bits=4, group=32)


def test_rows_of_blocks_have_a_whole_number_of_bytes() -> None:
    with refused(r"q4_0\.gguf: .*'blocks'"):
        q4_0.wrap({"blocks": torch.zeros(4, 35, dtype=torch.uint8)})
    with refused(r"tensor 'blocks' has shape \[4, 36\]; the format needs \[N, 18\*K/32\] = \[4, 18\] for N = 4, K = 32"):
        q4_0.wrap({"blocks": torch.zeros(4, 36, dtype=torch.uint8)}, shape=(4, 32))


def test_unknown_words_are_refused() -> None:
    with refused("int_group has no parameter 'bit'; it has bits, group"):
        int_group.wrap(gptq(), bit=4)
    with refused("int_group: bits is one of 4, 2, 3, 5, 6, 7, 8, not 9"):
        int_group.wrap(gptq(), bits=9)
    with refused("int_group has no storage 'gptq'; it has gptq_v2, gptq_v1, awq"):
        int_group.wrap(gptq(), storage="gptq")
    with refused("int_group has no storage 'awq' for bits=8"):
        int_group.quantize(torch.zeros(64, 128), "awq", bits=8)


# -- pack, unpack, convert ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", quarter_of([case for case in CASES if len(
    case.module.FORMAT.variant(case.choice).storages) > 1]), ids=str)
def test_converting_keeps_every_number(case: Case) -> None:
    """Between all storages of a format, and back to the same bytes; without the fields that the other has one value of."""
    storages = case.module.FORMAT.variant(case.choice).storages
    n, k = (max(sizes) for sizes in zip(*(smallest(Case(case.path, name, case.params)) for name in storages), strict=True))
    fields = random_fields(case, (n * 8, k * 3))
    for name, layout in storages.items():
        stored = {key: field for key, field in fields.items() if key not in layout.where}
        packed = case.module.pack(stored, storage=case.storage, **case.choice)
        weight = case.module.dequantize(packed, torch.float32)
        other = case.module.convert(packed, name)
        assert (other.storage, other.shape, other.params) == (name, packed.shape, packed.params)
        assert same_bits(case.module.dequantize(other, torch.float32), weight)
        back = case.module.convert(other, case.storage)
        omits = {*layout.omits, *packed.layout.omits} - {*layout.where} if name != case.storage else ()
        usual = {key for key in omits if key not in fields or
                 is_default(packed.variant, key, fields[key], packed.sizes)}
        assert back.tensors.keys() == {key for key in packed.tensors if packed.layout.tensors[key].optional not in usual}
        assert all(same_bits(tensor, packed.tensors[key]) for key, tensor in back.tensors.items())


def test_what_a_storage_cannot_hold_is_refused() -> None:
    tensors = gptq()
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    act_order = int_group.wrap(tensors, storage="gptq_v2")
    with refused("int_group.awq cannot hold 'g': it has its default there"):
        int_group.convert(act_order, "awq")
    fields = int_group.unpack(int_group.wrap(gptq(), storage="gptq_v2"))
    with refused("field 'q' has values from 0 to 16; u4 holds 0 to 15"):
        int_group.pack({**fields, "q": fields["q"].index_fill(0, torch.tensor([3]), 16)}, group=32)
    with refused(r"field 's' is float64 \[64, 4\]; the format needs float16 \[64, 4\]"):
        int_group.pack({**fields, "s": fields["s"].double()}, group=32)
    with refused(r"field 'z' is uint8 \[64, 3\]; the format needs uint8 \[64, 4\]"):
        int_group.pack({**fields, "z": fields["z"][:, :3]}, group=32)
    with refused("int_group: field 's' is missing; given are"):
        int_group.pack({key: field for key, field in fields.items() if key != "s"}, group=32)
    with refused("int_group has no field 'scale'"):
        int_group.pack({**fields, "scale": fields["s"]}, group=32)
    with refused("K = 100 must be a multiple of 8"):
        int_group.quantize(torch.zeros(64, 100))
    with refused("this is a weight of q4_0, not of q8_0"):
        q8_0.dequantize(q4_0.quantize(torch.zeros(1, 32)))


# -- dequantize -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantize_writes_where_it_is_told(case: Case) -> None:
    packed = random_packed(case, smallest(case, tiles=2))
    wanted = case.module.dequantize(packed, torch.float32)
    out = torch.full((packed.shape[1], packed.shape[0]), torch.nan).t()
    assert case.module.dequantize(packed, out=out) is out
    assert same_bits(out, wanted)
    wide = torch.full((packed.shape[0] + 2, packed.shape[1] + 3), torch.nan)
    case.module.dequantize(packed, out=wide[1:-1, 1:-2])
    assert same_bits(wide[1:-1, 1:-2], wanted)
    assert wide[0].isnan().all() and wide[:, 0].isnan().all() and wide[:, -2:].isnan().all() and wide[-1].isnan().all()
    with refused("does not fit the weight"):
        case.module.dequantize(packed, out=torch.empty(1, 1, 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_need_not_be_contiguous(case: Case) -> None:
    """Checkpoints are sliced and transposed before they come here."""
    packed = random_packed(case, smallest(case, tiles=2))
    strided = {name: torch.stack([t, t], -1)[..., 0] for name, t in packed.tensors.items()}
    again = case.module.wrap(strided, shape=packed.shape, storage=case.storage, **case.choice)
    assert same_bits(case.module.dequantize(again, torch.float32), case.module.dequantize(packed, torch.float32))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_cut_where_words_and_blocks_end(case: Case) -> None:
    """Every cut that is allowed gives those rows of the weight; every other is refused."""
    n, k = smallest(case, tiles=4)
    packed = random_packed(case, (n, k))
    weight = case.module.dequantize(packed, torch.float32)
    for dim, whole in (("N", n), ("K", k)):
        for start in sorted({0, 1, 2, 8, 16, 32, 64, 128, whole // 4, whole // 2} & set(range(whole))):
            try:
                part = packed.cut(dim, start, whole)
            except FormatError:
                flat = any(axis.dim == "N*K" for stored in packed.layout.tensors.values() for axis in stored.axes)
                assert start or flat                             # rows one after the other: columns are never cut
                continue
            wanted = weight[start:] if dim == "N" else weight[:, start:]
            assert same_bits(case.module.dequantize(part, torch.float32), wanted)


def test_many_rows_are_decoded_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, however few weights are decoded at a time."""
    for case in CASES:
        packed = random_packed(case, smallest(case, tiles=3))
        whole = case.module.dequantize(packed, torch.float32)
        monkeypatch.setattr(tiles.row_tiles, "__defaults__", (1,))
        monkeypatch.setattr(tiles, "TILE", 1)
        assert same_bits(case.module.dequantize(packed, torch.float32), whole), case
        monkeypatch.undo()


# -- packed weights -------------------------------------------------------------------------------------------------------


def test_a_packed_weight_moves_as_one() -> None:
    packed = q4_0.quantize(torch.randn(4, 64))
    assert packed.to("meta").device.type == "meta"
    assert packed.to("cpu", non_blocking=True).nbytes == 4 * 2 * 18
    with refused("a packed weight keeps its stored dtypes"):
        fp8_tensor.quantize(torch.randn(4, 4)).to(torch.float16)
    assert "PackedWeight(q4_0.gguf [4, 64]" in repr(packed)


def test_meta_tensors_are_wrapped_by_shape() -> None:
    tensors = {name: tensor.to("meta") for name, tensor in gptq().items()}
    packed = int_group.wrap(tensors, storage="gptq_v2")
    assert isinstance(packed, PackedWeight) and packed.shape == (64, 128)


@pytest.mark.parametrize("text", ["N", "K", "1", "18*K/32", "ceil(K/group)", "128*N/64", "N*K/2", "3*K/32", "ceil(N*K/64)",
                                  "16*ceil(K/256)", "ceil(3*K/32)"])
def test_axes_solve_for_what_they_measure(text: str) -> None:
    measure = axis(text)
    sizes = {"group": 32}
    for n, k in ((64, 128), (128, 64), (192, 320)):
        extent = measure.extent(n, k, sizes)
        assert extent is not None
        assert measure.solve(extent) in ({"N": n, "K": k, "N*K": n * k, "1": 1}[measure.dim], None)
    assert (measure.solve(6) is None) == ("ceil" in text or text == "18*K/32" or text == "128*N/64")


def test_the_last_step_of_an_axis_may_be_short() -> None:
    wanted = {0: (0, 0), 1: (1, 3), 10: (1, 3), 11: (2, 3), 32: (3, 3), 33: (4, 6), 90: (9, 9)}
    for k, (short, whole) in wanted.items():
        assert (axis("ceil(3*K/32)").extent(1, k, {}), axis("3*ceil(K/32)").extent(1, k, {})) == (short, whole)


@pytest.mark.parametrize("text", ["", "M", "K/", "N+1", "ceil(K", "K)", "K//2", "2*", "-1*N", "N*N"])
def test_what_is_no_axis_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an axis"):
        axis(text)


# -- a user's own ---------------------------------------------------------------------------------------------------------


def test_load_builds_into_a_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    spec = tmp_path / "mine.yaml"
    spec.write_text((ROOT / "specs" / "q4_0.yaml").read_text().replace("format: q4_0", "format: mine"))
    module = qdsl.load(spec)
    assert qdsl.load(str(spec)) is module
    weight = torch.randn(4, 64)
    assert same_bits(module.quantize(weight).tensors["blocks"], q4_0.quantize(weight).tensors["blocks"])
    spec.write_text(spec.read_text().replace("(q - 8)", "(q - 9)").replace("divisor=-8", "divisor=-9"))
    other = qdsl.load(spec)
    assert other is not module and other.SPEC.formula == "d * (q - 9)"


def test_a_package_is_loaded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path))
    module = qdsl.load(ROOT / "specs" / "int_group.yaml")
    packed = int_group.wrap(gptq(bits=3), storage="gptq_v2")
    mine = module.wrap(packed.tensors, storage="gptq_v2")
    assert same_bits(module.dequantize(mine, torch.float32), int_group.dequantize(packed, torch.float32))


def test_shapes_of_a_storage_are_those_that_pack_takes() -> None:
    """What `shapes` calls impossible is refused with the multiple that is needed."""
    case = next(case for case in CASES if str(case) == "q4_0.gguf")
    assert list(shapes(case, (1, 2), (31, 32, 33, 64))) == [(1, 32), (1, 64), (2, 32), (2, 64)]
    fields = random_fields(case, (2, 64))
    with refused("K = 60 must be a multiple of 32"):
        q4_0.pack({**fields, "q": fields["q"][:, :60]})


# -- as it is used --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [bf16, fp8_block, int8_channel, int_group, q4_0], ids=lambda module: module.SPEC.name)
def test_a_trained_weight_is_quantized_without_its_graph(module: object) -> None:
    weight = torch.nn.Linear(128, 64).weight
    packed = module.quantize(weight)  # type: ignore[attr-defined]
    assert not any(tensor.requires_grad for tensor in packed.tensors.values())
    assert not module.dequantize(packed).requires_grad  # type: ignore[attr-defined]
    kept = module.dequantize(packed)  # type: ignore[attr-defined]
    with torch.no_grad():
        weight.zero_()
    assert same_bits(module.dequantize(packed), kept)  # type: ignore[attr-defined]


def test_a_guessed_block_size_is_noted() -> None:
    tensors = int_group.quantize(torch.randn(64, 96), "gptq_v2", group=64).tensors
    del tensors["g_idx"]
    packed = int_group.wrap(tensors, storage="gptq_v2")
    assert packed.params["group"] == 64
    whole = int_group.quantize(torch.randn(64, 200), "gptq_v2", group=-1).tensors
    assert int_group.wrap(whole, storage="gptq_v2").params["group"] == -1        # what a larger one means, too
    narrow = int_group.quantize(torch.randn(64, 32), "gptq_v2", group=64).tensors
    note = "group = 128 by default; the tensors fit 64 and 32 and 256 and 512 and 1024 and -1 too"
    assert note in int_group.wrap(narrow, storage="gptq_v2").notes


def test_values_are_kept_as_the_format_says_them() -> None:
    packed = int_group.wrap(gptq(), shape=[64.0, 128], storage="gptq_v2", group=32.0)  # type: ignore[arg-type]
    assert packed.shape == (64, 128) and isinstance(packed.params["group"], int)


@pytest.mark.parametrize(("dim", "start", "stop"), [("N", -4, -1), ("N", 0, 99), ("N", 8, 4), ("n", 0, 4), ("K", 0, 999)])
def test_a_cut_outside_is_refused(dim: str, start: int, stop: int) -> None:
    packed = q4_0.quantize(torch.randn(16, 64))
    with refused("are no part of the weight"):
        packed.cut(dim, start, stop)


def test_weights_are_floats() -> None:
    with refused("weights are floats; int32 is none"):
        q4_0.dequantize(q4_0.quantize(torch.zeros(1, 32)), torch.int32)
    with refused(r"bias \[3\] float32 does not fit a weight \[1, 32\]"):
        q4_0.Linear(q4_0.quantize(torch.zeros(1, 32)), torch.zeros(3))


def test_codes_of_small_floats_have_a_range(tmp_path: Path) -> None:
    (tmp_path / "fp4.yaml").write_text("format: fp4\nweight: [N, K]\nfields: {q: 'e2m1[n, k]'}\ndecode: q\nstorage:\n  p:\n"
                                       "    codes:\n      tensor: u8[n<N, j<K/2]\n      record: q[n, 2*j] q[n, 2*j + 1]\n")
    fp4 = qdsl.load(tmp_path / "fp4.yaml")
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    assert same_bits(fp4.unpack(fp4.pack({"q": codes}))["q"], codes)
    with refused("field 'q' has values from 1 to 16; e2m1 holds 0 to 15"):
        fp4.pack({"q": codes + 1})


def test_load_takes_names_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(qdsl.load, ["q6_k"] * 8))
    assert all(module is modules[0] and hasattr(module, "wrap") for module in modules)
    with pytest.raises(UnknownSpec, match="did you mean q6_k"):
        qdsl.load("q6k")


@pytest.mark.parametrize(("storage", "name"), [("modelopt", "pre_quant_scale"), ("trt_llm", "prequant_scaling_factor")])
def test_a_factor_of_x_is_not_passed_over(storage: str, name: str) -> None:
    """AWQ of ModelOpt and TensorRT-LLM divides weights by what it multiplies x by: without that, every product would be wrong."""
    packed = int_group.quantize(torch.randn(32, 128), storage, bits=4, symmetric=True)
    tensors = {**packed.tensors, name: torch.ones(128)}
    with pytest.raises(FormatError, match=f"'{name}' multiplies the columns of x"):
        int_group.wrap(tensors, shape=(32, 128), bits=4)
