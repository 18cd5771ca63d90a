"""bitsandbytes beside us, live: the small tensors that it puts beside a weight, and what it reads of ours.

Needs that package, which few others want beside them: `make live` installs it into an environment of its own; without it nothing
here is run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import int_group
from qdsl.jobs.convert import run
from qdsl.jobs.convert.target import parse_conversion
from qdsl.jobs.engine import RewriteError
from tests.models.test_transformers import loaded, logits, quantized
from tests.support import checkpoints, folders

bitsandbytes = pytest.importorskip("bitsandbytes")
functional = pytest.importorskip("bitsandbytes.functional")
pytestmark = pytest.mark.filterwarnings("default")

FORMATS = {"nf4": ("nf4", False), "nf4_nested": ("nf4", True), "bnb_fp4": ("fp4", False), "bnb_fp4_nested": ("fp4", True)}


@pytest.mark.parametrize("name", FORMATS)
def test_what_it_writes_is_read_and_what_is_written_it_reads(tmp_path: Path, name: str) -> None:
    """A weight of its own, the same weight as we write it, and that read by it."""
    kind, nested = FORMATS[name]
    plain = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, state = functional.quantize_4bit(plain, blocksize=64, quant_type=kind, compress_statistics=nested)
    theirs = {"weight": codes} | {f"weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    (tmp_path / "theirs").mkdir()
    with Folder(checkpoints.folder(tmp_path / "theirs", {"up": theirs})) as folder:
        [layer] = layers(folder).layers
        [weight] = weights(folder, layer)
        assert layer.format == name and not layer.others and not layer.problems
        run.convert(folder, layers(folder), parse_conversion(name, True, {"block": 128}), tmp_path / "ours")
    with Folder(tmp_path / "ours") as folder:
        ours = {full.removeprefix("up."): folder.tensor(full) for full in folder.names()}
        [layer] = layers(folder).layers
        [written] = weights(folder, layer)
    assert ours.keys() == theirs.keys()
    read = functional.QuantState.from_dict({key: tensor for key, tensor in ours.items() if key != "weight"}, device="cpu")
    assert read.blocksize == 128 and tuple(read.shape) == (64, 128) and read.dtype == torch.bfloat16
    decoded = written.format.dequantize(written, torch.bfloat16)
    assert functional.dequantize_4bit(ours["weight"], read).equal(decoded)
    again, state = functional.quantize_4bit(weight.format.dequantize(weight, torch.float32), blocksize=128, quant_type=kind,
                                            compress_statistics=nested)
    assert again.equal(ours["weight"])


class Experts(torch.nn.Module):
    """As transformers 5 has them, which quantizes none of them: this package does, where it is told their names."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.randn(3, n, k, generator=generator).bfloat16())
                                             for n, k in ((256, 128), (128, 128)))


@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_one_tensor(tmp_path: Path, name: str) -> None:
    """What it writes of them is read, and what is written it reads; scales in 8 bits have one mean for all, as ours have not."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    kind, nested = FORMATS[name]
    theirs, again = (torch.nn.ModuleDict({"experts": Experts()}) for _ in range(2))
    for weight in ("gate_up_proj", "down_proj"):
        parametrize.replace_parameter_4bit(theirs["experts"], weight, nested, kind, 64)
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "theirs" / "model.safetensors", {key: tensor.detach() for key, tensor in theirs.state_dict().items()}, {})
    with Folder(tmp_path / "theirs") as folder:
        detected = layers(folder)
        for layer in detected.layers:
            decoded = torch.stack([expert.format.dequantize(expert) for expert in weights(folder, layer)])
            assert (layer.format, layer.experts, layer.others) == (name, 3, {})
            assert decoded.equal(getattr(theirs["experts"], layer.name.removeprefix("experts.")))
        if nested:
            with pytest.raises(RewriteError, match="'weight_nested_offset' is one number for all experts there"):
                run.convert(folder, detected, parse_conversion(name, True, {"block": 128}), tmp_path / "ours")
            return
        run.convert(folder, detected, parse_conversion(name, True, {"block": 128}), tmp_path / "ours")
    with Folder(tmp_path / "ours") as folder:
        for layer in layers(folder).layers:
            weight = layer.name.removeprefix("experts.")
            again["experts"]._parameters[weight] = torch.nn.Parameter(folder.tensor(layer.name), requires_grad=False)
            state = {key.removeprefix(f"{layer.name}."): folder.tensor(key) for key in folder.names()
                     if key.startswith(f"{layer.name}.")}
            parametrize.replace_parameter_4bit_prequantized(again["experts"], weight, state, torch.device("cpu"))
            ours = torch.stack([expert.format.dequantize(expert) for expert in weights(folder, layer)])
            assert layer.params["block"] == 128 and getattr(again["experts"], weight).equal(ours)


def test_int8_is_read_and_loads_in_transformers(tmp_path: Path) -> None:
    """What it writes, and what is written for it, with the config of `convert`."""
    theirs = bitsandbytes.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    theirs = theirs.to("cpu")
    theirs(torch.zeros(1, 64, dtype=torch.float16))              # now it is quantized
    (tmp_path / "theirs").mkdir()
    with Folder(checkpoints.folder(tmp_path / "theirs", {"up": dict(theirs.state_dict())})) as folder:
        [layer] = layers(folder).layers
        assert layer.format == "bnb_int8" and layer.settings == ("up.weight_format",) and not layer.others
        [weight] = weights(folder, layer)
        assert weight.tensors["weight"].equal(theirs.weight.data)
    (tmp_path / "gptq").mkdir()
    quantized(tmp_path / "gptq", int_group, {"storage": "gptq_v2", "bits": 4, "group": 32}, folders.GPTQ)
    with Folder(tmp_path / "gptq") as folder:
        run.convert(folder, layers(folder), parse_conversion("bnb_int8", True), tmp_path / "out")
    model = loaded(tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        detected = layers(folder).layers
        assert len(detected) == 14 and all(layer.format == "bnb_int8" and not layer.problems for layer in detected)
        for layer in detected:
            [weight] = weights(folder, layer)
            module = model.get_submodule(layer.name)
            assert isinstance(module, bitsandbytes.nn.Linear8bitLt) and module.weight.data.equal(weight.tensors["weight"])
            assert functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).allclose(
                weight.format.dequantize(weight, torch.float32), rtol=1e-6, atol=0)      # 1 / 127, rounded, in place of 127
    assert bool(logits(model).isfinite().all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_loads_in_transformers(tmp_path: Path, name: str) -> None:
    """With the config that `convert` writes: every projection is theirs, and holds the weight that we read.

    In blocks that rows hold whole: others their kernels for a CPU decode wrongly.  Products of theirs are rounded.
    """
    (tmp_path / "gptq").mkdir()
    quantized(tmp_path / "gptq", int_group, {"storage": "gptq_v2", "bits": 4, "group": 32}, folders.GPTQ)
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    (tmp_path / "gptq" / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))   # in which it decodes then
    with Folder(tmp_path / "gptq") as folder:
        run.convert(folder, layers(folder), parse_conversion(name, True, {"block": 32}), tmp_path / "out")
    model = loaded(tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        detected = layers(folder).layers
        assert len(detected) == 14
        for layer in detected:
            assert layer.format == name and not layer.problems
            [weight] = weights(folder, layer)
            theirs, decoded = model.get_submodule(layer.name).weight, weight.format.dequantize(weight, torch.float32)
            assert functional.dequantize_4bit(theirs.data, theirs.quant_state).equal(decoded)
    assert bool(logits(model).isfinite().all())
