"""Programs beside us that have layouts of their own for weights: what they compute is what we decode, bit for bit.

They run where their packages are installed, as `make live` does.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.shaped import shaped_layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli.model_class import layer_shapes
from qdsl.generated import fp8_channel, int8_channel, int_group, quanto
from qdsl.runtime import PackedWeight
from tests.support.formats import same_bits

needs_onnx = pytest.mark.skipif(None in map(find_spec, ("onnx", "onnxruntime")), reason="needs onnxruntime: make live")
needs_quanto = pytest.mark.skipif(find_spec("optimum") is None, reason="needs optimum-quanto: make live")


def matmul_nbits(packed: PackedWeight) -> Tensor:
    """float16 [N, K]: what onnxruntime's MatMulNBits makes of an identity and a weight."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    n, k = packed.shape
    tensors = {name: tensor.reshape(n, -1).numpy() for name, tensor in packed.tensors.items()}
    tensors["B"] = tensors["B"].reshape(n, k // int(packed.params["group"]), -1)
    kinds = {"uint8": TensorProto.UINT8, "float16": TensorProto.FLOAT16}
    stored = [helper.make_tensor(name, kinds[str(array.dtype)], array.shape, array.tobytes(), raw=True)
              for name, array in tensors.items()]
    node = helper.make_node("MatMulNBits", ["x", *tensors], ["y"], domain="com.microsoft", N=n, K=k, bits=packed.params["bits"],
                            block_size=packed.params["group"])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["M", size]) for name, size in (("x", k), ("y", n)))
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "weight", [x], [y], stored), opset_imports=versions, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": np.eye(k, dtype=np.float16)})[0]).T


@needs_onnx
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_onnxruntime_reads_what_gptq_has(bits: int, group: int, symmetric: bool) -> None:
    """With zero points, and without them where they are in the middle."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(bits))
    gptq = int_group.quantize(weight, "gptq_v2", bits=bits, group=group, symmetric=symmetric)
    packed = int_group.convert(gptq, "onnx_matmul_nbits")
    middle = symmetric and bool((int_group.unpack(packed)["z"] == 2 ** (bits - 1)).all())
    if middle:
        packed = packed.derive({name: tensor for name, tensor in packed.tensors.items() if name != "zero_points"})
    assert middle == symmetric
    assert torch.equal(matmul_nbits(packed), int_group.dequantize(packed, torch.float16))


@needs_quanto
@pytest.mark.parametrize("kind", ["qint4", "qint2", "qint8", "qfloat8"])
@pytest.mark.parametrize("columns", [256, 192, 96])
def test_quanto_decodes_as_we_do(kind: str, columns: int) -> None:
    """Groups of 128 and 96 columns and of whole rows, of its codes in two, four and eight bits."""
    from optimum import quanto as package

    model = torch.nn.Sequential(torch.nn.Linear(columns, 24, bias=False))
    package.quantize(model, weights=getattr(package, kind))
    package.freeze(model)
    tensors = {name.removeprefix("0."): tensor for name, tensor in model.state_dict().items() if ".weight." in name}
    format = {"qint8": int8_channel, "qfloat8": fp8_channel}.get(kind, quanto)
    packed = format.wrap(tensors, shape=(24, columns))
    assert packed.storage == "quanto"
    assert same_bits(format.dequantize(packed, torch.float32), model[0].weight.dequantize().detach())


@needs_quanto
def test_a_folder_of_quanto_has_the_shapes_of_its_model(tmp_path: Path) -> None:
    """Its tensors do not say N and K; the class that config.json names does."""
    from optimum import quanto as package
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(config)
    package.quantize(model, weights=package.qint4, exclude="lm_head")
    package.freeze(model)
    write(tmp_path / "model.safetensors", {name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    with Folder(tmp_path) as folder:
        layers = shaped_layers(folder, layer_shapes).layers
        assert len(layers) == 7
        for layer in layers:
            [packed] = weights(folder, layer)
            own = model.get_submodule(layer.name).weight
            assert packed.shape == own.shape
            assert same_bits(quanto.dequantize(packed, torch.float32), own.dequantize().detach())
