"""Sections of rows, regions and planes of tensors: files of the packages whose layouts they are, cuts and joins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qdsl.core.shapes import axis
from qdsl.generated import (
    any_precision,
    fbgemm_4bit,
    fbgemm_8bit,
    flute,
    fp6_llm,
    fp8_ds_mla,
    ik_iq2_k,
    ik_iq3_k,
    ik_iq4_k,
    ik_iq4_ks,
    ik_iq4_kss,
    ik_iq5_k,
    kivi,
    nunchaku_int4,
    squeezellm,
)
from qdsl.kv_cache import CacheFormat, allocate, store
from qdsl.runtime import FormatError, PackedWeight
from tests.kernels.test_kernels import DEVICE, dequantized
from tests.support.formats import ROOT, same_bits

GOLDEN = {"ik_iq2_k": ik_iq2_k, "ik_iq3_k": ik_iq3_k, "ik_iq4_k": ik_iq4_k, "ik_iq4_ks": ik_iq4_ks, "ik_iq4_kss": ik_iq4_kss,
          "ik_iq5_k": ik_iq5_k, "fp6_llm": fp6_llm, "any_precision": any_precision, "fp8_ds_mla": fp8_ds_mla,
          "flute": flute, "squeezellm": squeezellm, "kivi": kivi, "nunchaku_int4": nunchaku_int4}


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_the_package(name: str) -> None:
    """Bytes decode to the package's own values, and are packed again as they were."""
    module = GOLDEN[name]
    with np.load(ROOT / "tests" / "data" / "sections" / f"{name}.npz") as file:
        tensors = {key: torch.from_numpy(file[key].copy()) for key in file.files}
    expected = tensors.pop("expected")
    packed: PackedWeight = module.wrap(tensors)
    assert packed.shape == tuple(expected.shape)
    assert same_bits(module.dequantize(packed, torch.float32), expected)
    if not packed.branch_names:                                  # the kernel decodes what a branch is added to
        assert same_bits(dequantized(packed.to(DEVICE)).cpu(), expected)
    again = module.pack(module.unpack(packed), packed.storage, **packed.params).tensors
    assert all(same_bits(again[key].flatten(), tensor.flatten()) for key, tensor in packed.tensors.items())


def test_kivi_chooses_the_numbers_of_its_package() -> None:
    """In float16, as KIVI computes: of values byte for byte.  Words of its keys hold codes of a channel, here of a token."""
    with np.load(ROOT / "tests" / "data" / "sections" / "kivi.npz") as file:
        stored = {key: torch.from_numpy(file[key]) for key in file.files}
    values = kivi.quantize(stored["x"], bits=2, gn=1, gk=32)
    assert all(same_bits(tensor, stored[name]) for name, tensor in values.tensors.items())
    keys = kivi.quantize(stored["x"], bits=2, gn=32, gk=1)
    wanted = {"q": stored["key_codes"], "s": stored["key_scale"], "m": stored["key_minimum"]}
    assert all(same_bits(field, wanted[name]) for name, field in kivi.unpack(keys).items())
    assert same_bits(kivi.dequantize(keys, torch.float32), stored["key_expected"])


def test_a_cache_stores_the_bytes_of_flash_mla() -> None:
    """Whose scales are powers of two; rotary numbers are stored as they are."""
    with np.load(ROOT / "tests" / "data" / "sections" / "fp8_ds_mla.npz") as file:
        rows, x = torch.from_numpy(file["kv_c_and_k_pe"]), torch.from_numpy(file["x"]).view(torch.bfloat16)
    rule = CacheFormat("fp8_ds_mla", power="up", least=1e-4)
    cache = allocate(rule, blocks=1, block_size=16, heads=1, head_dim=576, value_dim=512)
    store(cache, x[:, None], None, torch.arange(16))
    assert same_bits(cache.keys.packed.tensors["kv_c_and_k_pe"], rows)


ROWS = [(fbgemm_8bit, "byte", 98), (fbgemm_8bit, "byte", 7), (fbgemm_4bit, "4bit", 98)]


@pytest.mark.parametrize(("module", "word", "k"), ROWS)
def test_rows_of_fbgemm(module: object, word: str, k: int) -> None:
    """torch's rows are read and written byte for byte; it multiplies and adds with one rounding, or with two."""
    weight = torch.randn(5, k, generator=torch.Generator().manual_seed(k))
    stored = getattr(torch.ops.quantized, f"embedding_bag_{word}_prepack")(weight)
    packed: PackedWeight = module.wrap({"rows": stored})         # type: ignore[attr-defined]
    assert packed.shape == (5, k)
    fields: dict[str, Tensor] = module.unpack(packed)            # type: ignore[attr-defined]
    assert same_bits(module.pack(fields).tensors["rows"], stored)        # type: ignore[attr-defined]
    decoded = module.dequantize(packed, torch.float32)           # type: ignore[attr-defined]
    theirs = getattr(torch.ops.quantized, f"embedding_bag_{word}_unpack")(stored)
    scale, least = fields["s"].double()[:, None], fields["b"].double()[:, None]
    fused = (scale * fields["q"].double() + least).float()
    assert bool(((theirs == fused) | (theirs == decoded)).all())


def test_rows_are_cut_and_columns_packed_again() -> None:
    packed = fbgemm_8bit.quantize(torch.randn(6, 40, generator=torch.Generator().manual_seed(1)))
    weight = fbgemm_8bit.dequantize(packed, torch.float32)
    rows = packed.cut("N", 2, 5)
    assert rows.tensors["rows"].data_ptr() == packed.tensors["rows"][2].data_ptr()
    assert same_bits(fbgemm_8bit.dequantize(rows, torch.float32), weight[2:5])
    with pytest.raises(FormatError, match="its rows have sections"):
        packed.cut("K", 8, 16)
    columns = packed.shard("K", 8, 16)
    assert columns.storage == "fbgemm" and list(columns.tensors["rows"].shape) == [6, 16]
    assert same_bits(fbgemm_8bit.dequantize(columns, torch.float32), weight[:, 8:16])
    joined = PackedWeight.join([packed.shard("K", 0, 8), packed.shard("K", 8, 40)], "K")
    assert same_bits(joined.tensors["rows"], packed.tensors["rows"])
    both = PackedWeight.join([rows, packed])
    assert same_bits(fbgemm_8bit.dequantize(both, torch.float32), torch.cat([weight[2:5], weight]))


def test_regions_mix_all_rows() -> None:
    packed = fp6_llm.quantize(torch.randn(128, 64, generator=torch.Generator().manual_seed(2)))
    weight = fp6_llm.dequantize(packed, torch.float32)
    assert list(packed.tensors["packed_floatx_data"].shape) == [128 * 48]
    with pytest.raises(FormatError, match="mix all rows"):
        packed.cut("N", 0, 64)
    assert same_bits(fp6_llm.dequantize(packed.shard("N", 64, 128), torch.float32), weight[64:])
    with pytest.raises(FormatError, match="multiple of 64"):
        fp6_llm.quantize(torch.randn(65, 64))


def test_planes_are_cut_like_other_tensors() -> None:
    with np.load(ROOT / "tests" / "data" / "sections" / "any_precision.npz") as file:
        tensors, weight = ({key: torch.from_numpy(file[key]) for key in ("qweight", "lut4")}, torch.from_numpy(file["expected"]))
    packed: PackedWeight = any_precision.wrap(tensors)
    for dim, part in (("N", weight[1:3]), ("K", weight[:, 1024:])):
        cut = packed.cut(dim, *((1, 3) if dim == "N" else (1024, 2048)))
        assert same_bits(any_precision.dequantize(cut, torch.float32), part)
    halves = [packed.cut("K", 0, 1024), packed.cut("K", 1024, 2048)]
    assert same_bits(PackedWeight.join(halves, "K").tensors["qweight"], packed.tensors["qweight"])


def test_axes_of_sections() -> None:
    one = axis("4 + 136*K/256")
    assert (one.extent(1, 512, {}), one.extent(1, 500, {}), one.solve(276), one.solve(277)) == (276, None, 512, None)
    assert axis("N/4 x 12*K + N").extent(8, 3, {}) == 2 * 36 + 8
    assert axis("N/4 x 12*K + N").solve(80) is None              # of N and of K
    assert axis("ceil(K/2) + 4").solve(9) is None                # K is 9 or 10
    assert axis("K + 8").solve(7) is None
