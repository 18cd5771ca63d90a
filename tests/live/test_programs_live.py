"""gptqmodel, autoawq and llama-quantize against files that qdsl writes; tests/data/compatibility.yaml lists the cases.

Needs these programs: `make live` installs them into an environment of its own; one that is not there is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli import app
from qdsl.generated import awq_gemv_fast, int_group
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import parse_conversion
from qdsl.runtime import PackedWeight
from tests.support import llama_mixes
from tests.support.compatibility import cases
from tests.support.formats import same_bits

pytestmark = pytest.mark.filterwarnings("default")
HERE = "tests/live/test_programs_live.py"
N, K, GROUP = 64, 256, 64
AUTOAWQ = find_spec("awq")


def written_layer(path: Path, to: str, **params: Any) -> tuple[dict[str, Tensor], PackedWeight]:
    """The tensors of a layer [N, K] in the folder that `quantize` writes, and the weight that qdsl reads of it."""
    (path / "plain").mkdir()
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    write(path / "plain" / "model.safetensors", {"model.up_proj.weight": weight}, {"format": "pt"})
    (path / "plain" / "config.json").write_text("{}")
    run.quantize(path / "plain", parse_conversion(to, True, params, ()), path / "out")
    with Folder(path / "out") as folder:
        [layer] = layers(folder).layers
        [packed] = weights(folder, layer)
        return {name.removeprefix("model.up_proj."): folder.tensor(name) for name in folder.names()}, packed


@pytest.mark.parametrize("case", cases(f"{HERE}::test_gptqmodel_reads_what_we_write"))
def test_gptqmodel_reads_what_we_write(case: str, tmp_path: Path) -> None:
    """Its layers take the tensors as they are, `g_idx` included, and decode them to the bits of ours."""
    pytest.importorskip("gptqmodel")
    storage, bits, codes = case.split()
    tensors, packed = written_layer(tmp_path, f"int_group.{storage}", bits=int(bits), group=GROUP, symmetric=codes == "symmetric")
    options = {"bits": int(bits), "group_size": GROUP, "sym": codes == "symmetric", "desc_act": False, "in_features": K,
               "out_features": N, "register_buffers": True}
    if storage == "awq":
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        decoded = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), int(bits), GROUP)
    else:
        decoded = _gptq_layer(storage, tensors, options).dequantize_weight()
    assert same_bits(decoded.t().contiguous(), int_group.dequantize(packed, torch.float32))


def _gptq_layer(storage: str, tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """A layer of gptqmodel with these tensors, which decodes in float32."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    layer = TorchLinear(**options, format=FORMAT.GPTQ_P if storage == "gptq_p" else FORMAT.GPTQ_V2)
    layer.load_state_dict(tensors)
    if storage == "gptq_v1":
        convert_gptq_v1_to_v2_format_module(layer, options["bits"], torch.int32)
    layer.post_init()
    layer.scales = layer.scales.float()
    return layer


@pytest.mark.parametrize("storage", cases(f"{HERE}::test_transformers_with_gptqmodel_reads_what_we_write"))
def test_transformers_with_gptqmodel_reads_what_we_write(storage: str, tmp_path: Path) -> None:
    """Its layers multiply an identity in float16 to the weights of ours; at first gptqmodel compiles a kernel for minutes."""
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum.gptq")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).half().save_pretrained(tmp_path / "plain")
    params: dict[str, Any] = {"bits": 4, "group": 64, "symmetric": True}
    run.quantize(tmp_path / "plain", parse_conversion(f"int_group.{storage}", True, params, ()), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float16)
    with Folder(tmp_path / "out") as folder:
        detected = layers(folder).layers
        assert len(detected) == 7
        for layer in detected:
            [packed] = weights(folder, layer)
            product = model.get_submodule(layer.name)(torch.eye(packed.shape[1], dtype=torch.float16))
            assert same_bits(product.detach().T.contiguous(), int_group.dequantize(packed, torch.float16))


def autoawq(name: str) -> ModuleType:
    """A module of autoawq without its packages' own imports, which want a release of transformers before 5."""
    assert AUTOAWQ is not None and AUTOAWQ.submodule_search_locations
    root = Path(AUTOAWQ.submodule_search_locations[0])
    for package in ("awq", "awq.modules", "awq.modules.linear"):
        stub = ModuleType(package)
        stub.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        sys.modules.setdefault(package, stub)
    return import_module(name)


@pytest.mark.skipif(AUTOAWQ is None, reason="needs the package autoawq: see make live")
@pytest.mark.parametrize("case", cases(f"{HERE}::test_autoawq_writes_the_same_bytes"))
def test_autoawq_writes_the_same_bytes(case: str) -> None:
    """Of a layer whose scales and zero points are those that qdsl chose; what GEMM decodes are the bits of ours."""
    storage, group = case.split()
    name, kind = {"awq": ("gemm", "GEMM"), "awq_gemv": ("gemv", "GEMV"), "gemv_fast": ("gemv_fast", "GEMVFast")}[storage]
    weight = torch.randn(N, 1024, generator=torch.Generator().manual_seed(0))
    plain = int_group.quantize(weight, "awq", bits=4, group=int(group))
    fields = int_group.unpack(plain)
    scales, zeros = fields["s"], fields["z"].float()
    linear = nn.Linear(1024, N, bias=False)
    linear.weight.data = int_group.dequantize(plain, torch.float32)
    if storage == "awq":
        scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
    module = getattr(autoawq(f"awq.modules.linear.{name}"), f"WQLinear_{kind}")
    theirs = module.from_linear(linear, 4, int(group), scales=scales, zeros=zeros)
    if storage == "gemv_fast":
        packed = awq_gemv_fast.pack({"q": fields["q"], "s": fields["s"], "z": -(fields["s"] * fields["z"].float()).half()},
                                    group=int(group))
    else:
        packed = int_group.convert(plain, storage)
    for leaf, tensor in packed.tensors.items():
        assert same_bits(getattr(theirs, leaf).view(tensor.shape), tensor), leaf
    if storage == "awq":
        unpacking = autoawq("awq.utils.packing_utils").dequantize_gemm
        decoded = unpacking(theirs.qweight, theirs.qzeros, theirs.scales.float(), 4, int(group))
        assert same_bits(decoded.t().contiguous(), int_group.dequantize(packed, torch.float32))


@pytest.mark.skipif(llama_mixes.program() is None, reason="needs llama-quantize: make live builds it; or set QDSL_LLAMA_CPP")
@pytest.mark.parametrize("mix", cases(f"{HERE}::test_llama_quantize_writes_the_same_file"))
def test_llama_quantize_writes_the_same_file(mix: str, tmp_path: Path) -> None:
    """Metadata, types and blocks, of a model of 16 layers."""
    names = json.loads(llama_mixes.RECORD.read_text())["architectures"]["llama"]["tensors"].split()
    source = llama_mixes.prepared(tmp_path, "llama", names, 0, scale=0.02)
    command = [str(llama_mixes.program()), str(source), str(tmp_path / "theirs.gguf"), mix, "1"]
    theirs = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert theirs.returncode == 0, theirs.stderr[-2000:]
    ours = CliRunner().invoke(app, ["quantize", str(source), "--type", mix, "--out", str(tmp_path / "ours.gguf")])
    assert ours.exit_code == 0, ours.output
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
