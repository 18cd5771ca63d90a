"""Weights of two formats with the same codes: one goes into the other where no number changes."""

from __future__ import annotations

import pytest
import torch

from qdsl.generated import fp8_channel, fp8_tensor, mxfp4, nvfp4_modelopt, ocp_mxfp4, ocp_mxfp8, q4_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight import tiles
from qdsl.runtime.weight.layout import FLOATS
from tests.support.covering import ALL, quarter_of
from tests.support.formats import SHIPPED, Case, cases, random_fields, same_bits, shapes


@pytest.fixture(params=[1 << 19, 256])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", request.param)


@pytest.mark.usefixtures("tile")
def test_gpt_oss_to_gguf_and_back() -> None:
    """Experts [E, N, K / 32, 16] become rows of GGUF blocks; only a zero's sign differs, and the bytes come back."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 250, (3, 8, 4), dtype=torch.uint8, generator=generator)
    packed = ocp_mxfp4.wrap({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales})
    assert (packed.storage, packed.shape) == ("gpt_oss", (24, 128))
    ggml = mxfp4.convert(packed, "gguf")
    assert ggml.tensors["blocks"].shape == (24, 4 * 17)
    assert torch.equal(mxfp4.dequantize(ggml, torch.float32), ocp_mxfp4.dequantize(packed, torch.float32))
    back = ocp_mxfp4.convert(ggml, "gpt_oss")
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())


@pytest.mark.usefixtures("tile")
def test_a_scale_of_255_is_refused() -> None:
    """NaN to OCP, 2^127 to GGML."""
    packed = mxfp4.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    packed.tensors["blocks"][5, 17] = 255
    message = r"ocp_mxfp4 cannot hold this weight of mxfp4: at row 5, column 32 .* would become nan"
    with pytest.raises(FormatError, match=message):
        ocp_mxfp4.convert(packed, "compressed_tensors")


def test_other_fields_are_refused() -> None:
    with pytest.raises(FormatError, match="q4_0 has fields d, q; mxfp4 has e, q"):
        mxfp4.convert(q4_0.quantize(torch.randn(4, 64)), "gguf")
    with pytest.raises(FormatError, match=r"fp8_tensor has fields q, s; nvfp4_modelopt has s, g, q"):
        nvfp4_modelopt.convert(fp8_tensor.quantize(torch.randn(4, 64)), "modelopt")
    with pytest.raises(FormatError, match=r"'s' is bf16 \[N\] in fp8_channel and bf16 \[\] in fp8_tensor"):
        fp8_tensor.convert(fp8_channel.quantize(torch.randn(4, 64)), "safetensors")
    with pytest.raises(FormatError, match=r"'q' is e4m3 \[N, K\] in ocp_mxfp8 and e2m1 \[N, K\] in ocp_mxfp4"):
        ocp_mxfp4.convert(ocp_mxfp8.quantize(torch.randn(4, 64)), "modelopt")


SHAPE = 64, 1024


def fields(case: Case) -> set[str]:
    """The names of all but an index."""
    return {name for name, field in case.module.FORMAT.variant(case.choice).fields.items() if field.groups is None}


WEIGHTS = [case for case in cases(types=True) if case.path in SHIPPED and any(shapes(case, SHAPE[:1], SHAPE[1:]))]
FORMATS = {case.path.stem: case for case in reversed(WEIGHTS)}
KIN = [(name, other) for name, case in FORMATS.items() for other, to in FORMATS.items()
       if name != other and fields(case) == fields(to)]
EXACT = {("int_group", "int4pack"), ("int_group", "awq_gemv_fast"), ("mxfp4", "ocp_mxfp4"), ("ocp_mxfp4", "mxfp4"),
         ("nvfp4_ct", "nvfp4_modelopt"), ("nvfp4_modelopt", "nvfp4_ct"), ("tq1_0", "tq2_0"), ("tq2_0", "tq1_0"),
         ("bf16", "f16"), ("f16", "bf16"), ("f32", "bf16"), ("bf16", "df11"), ("df11", "hlane"), ("hlane", "fix4"),
         ("fix4", "fix3")}


def weights(case: Case) -> list[PackedWeight]:
    """One whose floats are any, and one in which they are powers of two, as more formats hold."""
    some = random_fields(case, SHAPE)
    even = {name: torch.exp2(field.float().abs().log2().round()).to(field.dtype) if field.dtype in FLOATS.values() else field
            for name, field in some.items()}
    return [case.module.pack(fields, storage=case.storage, **case.choice) for fields in (some, even)]


@pytest.mark.parametrize(("name", "other"), quarter_of(KIN))
def test_no_number_changes(name: str, other: str) -> None:
    """Whatever is converted to another format is the same weight there; what is not is refused.

    From any storage into any in `make test-all`, else from any storage into every sixth, others for the next one.  Of formats
    that are not known to hold each other's weights, every fourth storage is tried, others for the next pair.
    """
    format, done = FORMATS[other].module.FORMAT, False
    storages = list(format.storages)
    sources = [case for case in WEIGHTS if case.path.stem == name]
    if not ALL and (name, other) not in EXACT:
        sources = sources[KIN.index((name, other)) % min(4, len(sources))::4]
    for number, case in enumerate(sources):
        for packed in weights(case):
            before = case.module.dequantize(packed, torch.float32)
            for storage in storages if ALL else storages[number % min(6, len(storages))::6]:
                try:
                    moved = format.convert(packed, storage)
                except FormatError:
                    continue
                done = True
                after = format.dequantize(moved, torch.float32)
                assert bool(((before == after) | (before.isnan() & after.isnan())).all()), (case, storage)
    assert done or (name, other) not in EXACT
