"""Configs of producers with one group of settings, and the only layer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.files.folder import Folder

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def ct(**weights: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}}


def gptq(**settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "gptq", **settings}}


def fp8(**settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", **settings}}


def read(path: Path) -> Layers:
    with Folder(path) as folder:
        return detected_layers(folder)


def one(detected: Layers) -> Layer:
    (layer,) = detected.layers
    return layer
