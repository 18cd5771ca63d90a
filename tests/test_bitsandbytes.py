"""bitsandbytes beside us, live: the small tensors that it puts beside a weight, and what it reads of ours.

Needs that package, which few others want beside them: `make live` installs it into an environment of its own; without it nothing
here is run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.layer_weights import weights
from qdsl.checkpoint.layers import layers
from qdsl.convert import run
from qdsl.convert.plan import aimed
from qdsl.generated import int_group
from tests.support import checkpoints, folders
from tests.test_transformers import loaded, logits, quantized

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
        run.convert(folder, layers(folder), aimed(name, True, {"block": 128}), tmp_path / "ours")
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
        run.convert(folder, layers(folder), aimed(name, True, {"block": 32}), tmp_path / "out")
    model = loaded(tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        found = layers(folder).layers
        assert len(found) == 14
        for layer in found:
            assert layer.format == name and not layer.problems
            [weight] = weights(folder, layer)
            theirs, decoded = model.get_submodule(layer.name).weight, weight.format.dequantize(weight, torch.float32)
            assert functional.dequantize_4bit(theirs.data, theirs.quant_state).equal(decoded)
    assert bool(logits(model).isfinite().all())
