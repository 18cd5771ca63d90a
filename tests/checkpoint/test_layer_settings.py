"""Settings of single layers, as each producer's own loader reads them: by name, by regular expression, by class."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from tests.support import producer_folders

DOWN, OUT, EMBEDDING = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj", "model.embed_tokens"
Packed = dict[str, tuple[str, str, dict[str, Any]]]              # layer -> format, storage and parameters
AFFINE = {bits: ("mlx", "mlx", {"bits": bits, "group": 64, "scale_type": "f16"}) for bits in (4, 8)}
GPTQ = {(bits, group): ("int_group", "gptq_v1", {"bits": bits, "group": group, "symmetric": True})
        for bits, group in ((4, 64), (8, 64), (4, 32))}
CT = {bits: ("int_group", "pack_quantized", {"bits": bits, "group": 64, "symmetric": True}) for bits in (4, 8)}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "packing_format": "auto_round:auto_gptq"}


def mlx(mode: str, group: int, bits: int, **layers: Any) -> dict[str, Any]:
    return {"quantization": {"group_size": group, "bits": bits, "mode": mode, **layers}}


def auto_round(**patterns: Any) -> dict[str, Any]:
    return {"quantization_config": {**ROUND, "extra_config": patterns}}


def compressed(*groups: tuple[str, int]) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 64, "dynamic": False}
    own = {f"group_{number}": {"targets": [target], "weights": {**weights, "num_bits": bits}, "format": "pack-quantized"}
           for number, (target, bits) in enumerate(groups)}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": own}}


def refused(path: Path, config: dict[str, Any], packed: Packed) -> list[str]:
    """The layers that nobody may read: their settings contradict their tensors, or say too little of them."""
    tensors = {}
    for layer, (format, storage, params) in packed.items():
        weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        tensors |= producer_folders.named(layer, import_module(f"qdsl.generated.{format}").quantize(weight, storage, **params))
    path.mkdir()
    write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({"model_type": "toy", **config}))
    with Folder(path) as folder:
        layers = detected_layers(folder)
    assert all((layer.format, layer.storage) == packed[layer.name][:2] for layer in layers.layers if not layer.why)
    return [layer.name for layer in layers.layers if layer.contradictions or layer.why]


@pytest.mark.parametrize(("whole", "format"), [(("mxfp4", 32, 4), "ocp_mxfp4"), (("nvfp4", 16, 4), "nvfp4_modelopt"),
                                               (("mxfp8", 32, 8), "ocp_mxfp8")])
@pytest.mark.parametrize("mode", [{}, {"mode": "affine"}])
def test_a_layer_of_mlx_takes_no_setting_of_the_whole(tmp_path: Path, whole: Any, format: str, mode: dict[str, str]) -> None:
    """mlx calls to_quantized(**settings), whose mode is affine unless they name one."""
    packed: Packed = {DOWN: (format, "mlx", {}), OUT: AFFINE[8]}
    right = mlx(*whole, **{OUT: {"group_size": 64, "bits": 8, **mode}})
    assert refused(tmp_path / "right", right, packed) == []
    assert refused(tmp_path / "default", mlx(*whole, **{OUT: {"bits": 8, **mode}}), packed) == []          # groups of 64
    wrong = mlx(*whole, **{OUT: {"group_size": 64, "bits": 4, **mode}})
    assert refused(tmp_path / "wrong", wrong, packed) == [OUT]
    assert refused(tmp_path / "none", mlx(*whole), packed) == [OUT]


@pytest.mark.parametrize(("patterns", "wrong"), [
    ({r".*mlp\.down_proj.*": {"bits": 8}, r"o_proj$": {"group_size": 32}}, []),
    ({r"down_(proj|x)": {"bits": 8}, OUT: {"group_size": 32}}, []),
    ({r".*": {"bits": 8}, OUT: {"group_size": 32}}, []),         # a name goes first
    ({r"down_proj$": {"bits": 8}, r".*proj": {"group_size": 32}}, []),        # then the first pattern that is found
    ({"down_proj": {"bits": 8}, OUT: {"group_size": 32}}, []),                # a name that no layer has is a pattern
    ({r"down_proj$": {"bits": 8}}, [OUT]), ({r"down_proj$": {"bits": 4}, OUT: {"group_size": 32}}, [DOWN])])
def test_regular_expressions_of_auto_round(tmp_path: Path, patterns: dict[str, Any], wrong: list[str]) -> None:
    packed = {DOWN: GPTQ[8, 64], OUT: GPTQ[4, 32], "model.layers.0.mlp.up_proj": GPTQ[4, 64]}
    patterns = {r"up_proj$": {}, **patterns}
    assert refused(tmp_path / "in", auto_round(**patterns), packed) == wrong


@pytest.mark.parametrize(("groups", "wrong"), [
    ([("Linear", 4), ("Embedding", 8)], []), ([("Embedding", 8), ("Linear", 4)], []),
    ([("Linear", 4), ("re:.*embed_tokens$", 8)], []), ([("Linear", 4), ("Embedding", 4)], [EMBEDDING])])
def test_classes_of_compressed_tensors(tmp_path: Path, groups: list[tuple[str, int]], wrong: list[str]) -> None:
    assert refused(tmp_path / "in", compressed(*groups), {DOWN: CT[4], EMBEDDING: CT[8]}) == wrong
