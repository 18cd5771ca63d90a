"""Columns in an order of their own: a permuted format against plain arithmetic, VPTQ and SpQR against bytes of packages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.generated import spqr, vptq, vptq_residual
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.torch import linear as torch_linear
from qdsl.runtime.weight import algebra
from tests.kernels.test_kernels import DEVICE, dequantized, linear
from tests.support.blessing import field_codes
from tests.support.formats import EXTRA, ROOT, SPECS, is_product, module, same_bits, spec
from tests.support.slow_reading import Reading

PATH = next(path for path in EXTRA if path.stem == "permuted")
N, K = 8, 256


def tensors(k: int = K) -> dict[str, Tensor]:
    """Codes by places, a factor by columns, and which column is at each place."""
    draw = torch.Generator().manual_seed(k)
    words = torch.randint(-(1 << 31), 1 << 31, (N, k // 8), generator=draw).to(torch.int32)
    scales, factors = ((torch.rand(size, generator=draw) + 0.5).half() for size in (N, k))
    return {"codes": words, "scales": scales, "factors": factors, "perm": torch.randperm(k, generator=draw).to(torch.int16)}


def plain(stored: dict[str, Tensor], by_place: bool = False) -> Tensor:
    """The weight one column after the other.  by_place: as if the factor had its columns by places, too."""
    weight = torch.empty(N, stored["factors"].numel())
    for place, column in enumerate(stored["perm"].tolist()):
        column &= 0xFFFF
        code = stored["codes"][:, place // 8] >> 4 * (place % 8) & 15
        factor = stored["factors"][place if by_place else column].float()
        weight[:, column] = (code.float() - 8) * stored["scales"].float() * factor
    return weight


@pytest.fixture(scope="module")
def permuted() -> ModuleType:
    return module(PATH)


def test_weights_fields_and_bytes(permuted: ModuleType) -> None:
    stored = tensors()
    packed: PackedWeight = permuted.wrap(stored)
    weight = plain(stored)
    assert same_bits(permuted.dequantize(packed, torch.float32), weight)
    fields = permuted.unpack(packed)
    assert torch.equal(fields["p"][stored["perm"].long()], torch.arange(K, dtype=torch.int32))
    assert same_bits(fields["a"], stored["factors"])
    codes = fields["q"].float() - 8
    assert same_bits(codes * stored["scales"].float()[:, None] * stored["factors"].float(), weight)
    assert all(same_bits(tensor, stored[name]) for name, tensor in permuted.pack(fields).tensors.items())
    without = permuted.wrap({name: tensor for name, tensor in stored.items() if name != "perm"})
    assert same_bits(permuted.dequantize(without, torch.float32), plain({**stored, "perm": torch.arange(K)}))


def test_a_tensor_whose_columns_stay_is_said_in_the_spec(tmp_path: Path) -> None:
    """The same spec without that line moves the factor too."""
    (tmp_path / "permuted.yaml").write_text(PATH.read_text().replace("      ordered: false\n", ""))
    other = qdsl.load(tmp_path / "permuted.yaml")
    stored = tensors()
    moved = other.dequantize(other.wrap(stored), torch.float32)
    assert same_bits(moved, plain(stored, by_place=True)) and not torch.equal(moved, plain(stored))


@pytest.fixture(params=["moved", "planar"])
def packed(request: pytest.FixtureRequest, permuted: ModuleType) -> PackedWeight:
    weight: PackedWeight = permuted.wrap(tensors())
    converted: PackedWeight = permuted.convert(weight, request.param)
    return converted


def test_products_and_gradients(packed: PackedWeight) -> None:
    weight = plain(tensors())
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = packed.format.linear(x, packed)
    y.sum().backward()
    assert is_product(y, x, weight)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, K))


def test_kernels_take_x_in_the_order_of_the_columns(packed: PackedWeight) -> None:
    weight, order = plain(tensors()), packed.order
    assert order is not None and order.dtype == torch.int32
    assert same_bits(dequantized(packed.as_stored().to(DEVICE)).cpu(), weight[:, order.long()])
    x = torch.randn(2, K, generator=torch.Generator().manual_seed(1))
    moved, stored = torch_linear.as_stored(x, packed)
    torch.testing.assert_close(linear(moved.to(DEVICE), stored.to(DEVICE), None).cpu(), x @ weight.t())


def test_both_storages_hold_the_same(permuted: ModuleType, packed: PackedWeight) -> None:
    assert same_bits(permuted.dequantize(packed, torch.float32), plain(tensors()))
    back = permuted.convert(packed, "moved").tensors
    assert back.keys() == tensors().keys() and all(same_bits(back[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize(("dim", "middle", "end"), [("N", 3, N), ("K", 120, K)])
def test_pieces(permuted: ModuleType, packed: PackedWeight, dim: str, middle: int, end: int) -> None:
    """Rows are cut as they lie; columns are packed again, each piece in an order of its own."""
    if dim == "K":
        with pytest.raises(FormatError, match="puts columns all over K; only rows can be cut"):
            packed.cut(dim, 0, middle)
    parts = [packed.shard(dim, 0, middle), packed.shard(dim, middle, end)]
    whole = permuted.dequantize(packed, torch.float32)
    assert same_bits(torch.cat([permuted.dequantize(part, torch.float32) for part in parts], int(dim == "K")), whole)
    assert same_bits(permuted.dequantize(algebra.join(parts, dim), torch.float32), whole)


def test_columns_beyond_32767_and_orders_that_are_none(permuted: ModuleType) -> None:
    stored = tensors(40_000)
    assert int(stored["perm"].min()) < 0
    packed = permuted.wrap(stored)
    assert same_bits(permuted.dequantize(packed, torch.float32)[:, stored["perm"].int() & 0xFFFF],
                     permuted.dequantize(packed.as_stored(), torch.float32))
    twice = {**tensors(), "perm": tensors()["perm"].index_fill(0, torch.tensor([5]), int(tensors()["perm"][4]))}
    with pytest.raises(FormatError, match=r"'perm' names column \d+ at place 4 and again at place 5"):
        permuted.wrap(twice)
    with pytest.raises(FormatError, match="'perm' names column 65535 at place 0"):
        permuted.wrap({**tensors(), "perm": torch.full((K,), -1).to(torch.int16)})


# -- blocks of columns that are stored side by side --------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, dict[str, Tensor], Tensor]:
    """The format with a scale for 32 columns that are stored side by side, its tensors, and its weight."""
    text = PATH.read_text()
    for old, new in (("params: {scale_type: [f16, bf16]}\n", ""), ("s: scale_type[n]", "s: scale_type[n, p // 32]"),
                     ("scale_type[n<N]", "scale_type[n<N, g<K/32]"), ("s[n]", "s[n, g]"), ("scale_type", "f16")):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path_factory.mktemp("specs") / "permuted.yaml"
    path.write_text(text)
    draw = torch.Generator().manual_seed(3)
    stored = {**tensors(), "scales": (torch.rand(N, K // 32, generator=draw) + 0.5).half()}
    weight = plain({**stored, "scales": torch.ones(N).half()})
    for place, column in enumerate(stored["perm"].tolist()):
        weight[:, column] = plain({**stored, "scales": stored["scales"][:, place // 32]})[:, column]
    return qdsl.load(path), stored, weight


@pytest.mark.parametrize("storage", ["moved", "planar"])
def test_a_block_is_of_places(blocks: tuple[ModuleType, dict[str, Tensor], Tensor], storage: str) -> None:
    form, stored, weight = blocks
    moved: PackedWeight = form.wrap(stored)
    packed: PackedWeight = form.convert(moved, storage)
    assert same_bits(form.dequantize(packed, torch.float32), weight)
    assert all(same_bits(form.convert(packed, "moved").tensors[name], tensor) for name, tensor in stored.items())
    fields = form.unpack(packed)
    scale = fields["s"].float()[:, fields["p"].long() // 32]
    assert same_bits((fields["q"].float() - 8) * scale * fields["a"].float(), weight)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
    assert is_product(form.linear(x, packed), x, weight)
    assert same_bits(form.dequantize(packed.shard("N", 3, N), torch.float32), weight[3:])
    assert same_bits(form.dequantize(packed.rows([5, 1]), torch.float32), weight[[5, 1]])
    assert same_bits(form.dequantize(algebra.join([packed, packed], "K"), torch.float32), torch.cat([weight, weight], 1))
    with pytest.raises(FormatError, match="one value of 's' is for columns that are stored side by side"):
        packed.shard("K", 0, 128)
    in_order = form.wrap({name: tensor for name, tensor in stored.items() if name != "perm"})
    piece = form.dequantize(form.convert(in_order, storage).shard("K", 128, K), torch.float32)
    assert same_bits(piece, form.dequantize(in_order, torch.float32)[:, 128:])


# -- VPTQ -------------------------------------------------------------------------------------------------------------


def vectors(bits: int, more: int, rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random tensors as VPTQ names and shapes them, of 2 * rows rows and 40 columns; indices have both ends of their range."""
    draw = torch.Generator().manual_seed(bits + more)
    indices = torch.randint(-(1 << 31), 1 << 31, (1, 2, -(-40 * (bits + more) // 32)), generator=draw).to(torch.int32)
    indices[0, :, :4] = torch.tensor([-1, -1, 0, 0], dtype=torch.int32)
    indices[..., -1] &= (1 << 40 * (bits + more) % 32) - 1 or -1
    tables = {name: torch.randn(1, rows << width, generator=draw).to(dtype)
              for name, width in (("centroids", bits), ("res_centroids", more)) if width}
    return {"indices": indices, **tables, "weight_scale": torch.rand(40, generator=draw).to(dtype),
            "weight_bias": torch.randn(40, generator=draw).to(dtype), "perm": torch.randperm(40, generator=draw).to(torch.int16)}


def vptq_weight(stored: dict[str, Tensor], bits: int, more: int, rows: int) -> Tensor:
    """The weight in the type of its tables, each operation rounded to it, one column after the other."""
    weight = torch.empty(2 * rows, 40, dtype=stored["centroids"].dtype)
    for block in range(2):
        stream = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(stored["indices"][0, block]))
        for place, column in enumerate(stored["perm"].tolist()):
            joint = stream >> place * (bits + more) & (1 << bits + more) - 1
            vector = stored["centroids"].view(-1, rows)[joint & (1 << bits) - 1]
            vector = vector + stored["res_centroids"].view(-1, rows)[joint >> bits] if more else vector
            weight[block * rows:(block + 1) * rows, column] = (
                vector * stored["weight_scale"][column] + stored["weight_bias"][column])
    return weight.float()


@pytest.mark.parametrize(("form", "bits", "more", "rows", "dtype"), [
    (vptq, 16, 0, 8, torch.float16), (vptq, 14, 0, 8, torch.bfloat16), (vptq_residual, 16, 8, 8, torch.bfloat16),
    (vptq_residual, 16, 16, 16, torch.float16), (vptq_residual, 8, 16, 8, torch.float16)])
def test_indices_of_other_widths(form: ModuleType, bits: int, more: int, rows: int, dtype: torch.dtype) -> None:
    stored = vectors(bits, more, rows, dtype)
    packed: PackedWeight = form.wrap(stored)
    assert packed.shape == (2 * rows, 40) and packed.params["bits"] == bits
    wanted = vptq_weight(stored, bits, more, rows)
    assert same_bits(form.dequantize(packed, torch.float32), wanted)
    assert packed.order is not None
    assert same_bits(dequantized(packed.as_stored().to(DEVICE)).cpu(), wanted[:, packed.order.long()])
    assert packed.layout.kernels.sums == 8                       # rows of a unit, whose index is loaded once
    x, as_stored = torch_linear.as_stored(torch.randn(2, 40, generator=torch.Generator().manual_seed(1)), packed)
    assert is_product(linear(x.to(DEVICE), as_stored.to(DEVICE), None).cpu(), x, wanted[:, packed.order.long()])
    again = form.pack(form.unpack(packed), **packed.params).tensors
    assert all(same_bits(again[name].flatten(), tensor.flatten()) for name, tensor in stored.items())


@pytest.mark.parametrize("form", [vptq, vptq_residual], ids=lambda form: str(form.FORMAT.name))
def test_files_of_vptq(form: ModuleType) -> None:
    with np.load(ROOT / "tests" / "data" / "sections" / f"{form.FORMAT.name}.npz") as file:
        stored = {key: torch.from_numpy(file[key].copy()) for key in file.files}
    expected = stored.pop("expected")
    packed: PackedWeight = form.wrap(stored)
    assert same_bits(form.dequantize(packed, torch.float32), expected)
    again = form.pack(form.unpack(packed), **packed.params).tensors
    assert all(same_bits(again[name].flatten(), tensor.flatten()) for name, tensor in stored.items())
    for start, stop in ((0, 40), (40, 80)):
        piece = packed.shard("K", start, stop)
        assert same_bits(form.dequantize(piece, torch.float32), expected[:, start:stop])
    without = form.wrap({name: tensor for name, tensor in stored.items() if name not in ("perm", "weight_scale", "weight_bias")},
                        shape=tuple(expected.shape))
    assert without.order is None and "a" not in form.unpack(without)


# -- SpQR -------------------------------------------------------------------------------------------------------------


def spqr_file() -> dict[str, Tensor]:
    """Tensors of the package's own packer, and what its dequantization makes of them, columns by places."""
    with np.load(ROOT / "tests" / "data" / "sections" / "spqr.npz") as file:
        return {key: torch.from_numpy(file[key].copy()) for key in file.files}


SPQR = ("dense_weights", "in_perm", "row_offsets", "col_vals")


def test_files_of_spqr() -> None:
    """Words of 64 bits, and two places in one of 32.  The package adds in float32 and rounds the sum to float16."""
    file = spqr_file()
    stored = {name: file[name] for name in SPQR}
    packed: PackedWeight = spqr.wrap(stored)
    assert packed.shape == (32, 64) and packed.order is not None and stored["dense_weights"].dtype == torch.int64
    whole, dense = (spqr.dequantize(weight, torch.float16)[:, packed.order.long()] for weight in (packed, packed.base))
    assert same_bits(whole, file["whole"]) and same_bits(dense, file["dense"]) and not torch.equal(whole, dense)
    again = spqr.pack(spqr.unpack(packed)).tensors
    assert all(same_bits(again[name].flatten().view(tensor.dtype), tensor) for name, tensor in stored.items())
    weight = spqr.dequantize(packed, torch.float32)
    twice = algebra.join([packed, packed], "N")
    for part, rows in ((packed.cut("N", 16, 32), weight[16:]), (twice, torch.cat([weight, weight]))):
        assert same_bits(spqr.dequantize(part, torch.float32), rows)
    with pytest.raises(FormatError, match="one value of 'ss' is for columns that are stored side by side"):
        packed.shard("K", 0, 32)
    with pytest.raises(FormatError, match=r"'row_offsets' is \[3\], for 32 rows and one more"):
        spqr.wrap({**stored, "row_offsets": file["ptcsr_row_offsets"], "col_vals": file["ptcsr_col_vals"]})


def test_outliers_lie_at_places() -> None:
    """The tensor says places of columns, the field columns, which rise in each row; products take either for the other."""
    file = spqr_file()
    packed: PackedWeight = spqr.wrap({name: file[name] for name in SPQR})
    fields, order = spqr.unpack(packed), packed.order
    assert order is not None
    stored = file["col_vals"] & 0xFFFF
    for n in range(32):
        start, stop = fields["start"][n:n + 2].tolist()
        assert fields["column"][start:stop].tolist() == sorted(order[stored[start:stop].long()].tolist())
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = spqr.dequantize(packed, torch.float32)
    y = spqr.linear(x, packed)
    y.sum().backward()
    assert is_product(y, x, weight) and x.grad is not None
    assert is_product(x.grad, torch.ones(3, 32), weight.t())
    in_order = spqr.wrap({**packed.tensors, "in_perm": torch.arange(64).to(torch.int16)})
    pieces = [in_order.shard("K", start, stop) for start, stop in ((0, 16), (16, 64))]
    joined = spqr.dequantize(algebra.join(pieces, "K"), torch.float16)
    assert same_bits(joined, file["whole"])                      # of columns in order places are columns, and can be cut


def test_the_second_reading_of_spqr() -> None:
    """Which looks up the place of every column, and kernels, which take columns by places, decode the same numbers."""
    file = spqr_file()
    packed: PackedWeight = spqr.wrap({name: file[name] for name in SPQR}).base.cut("N", 0, 16)
    read = Reading(spec(next(path for path in SPECS if path.stem == "spqr")), "spqr", packed.shape, {}, {})
    weight = spqr.dequantize(packed, torch.float32)
    assert same_bits(torch.from_numpy(read.decode(field_codes(read, spqr.unpack(packed)))), weight)
    assert packed.order is not None
    assert same_bits(dequantized(packed.as_stored().to(DEVICE)).cpu(), weight[:, packed.order.long()])
