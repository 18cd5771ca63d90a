"""Small modules of a few layers, and checkpoint folders that fill them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.checkpoint.files import crc
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import fp8_block
from qdsl.runtime import PackedWeight


def own_config(packed: PackedWeight) -> dict[str, Any]:
    return {"model_type": "toy", "quantization_config": {"quant_method": "qdsl", "format": packed.format.name,
                                                         "storage": packed.storage, **packed.params}}


def folder(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True)
    write(path / "model.safetensors", tensors, {"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def files(path: Path) -> dict[str, bytes]:
    """The files of a folder, without the checksums that qdsl adds."""
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.endswith(crc.FILE)}


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Mlp(nn.Module):
    """Two layers and a norm."""

    def __init__(self, k: int = 128, n: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(k)
        self.up = nn.Linear(k, n)
        self.down = nn.Linear(n, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


def mlp() -> Mlp:
    with torch.device("meta"):
        return Mlp().bfloat16()


def mlp_tensors(up: dict[str, Tensor], down: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    tensors = {"norm.weight": torch.ones(128).bfloat16(), "norm.bias": torch.zeros(128).bfloat16(),
               "up.bias": torch.linspace(-1, 1, 256).bfloat16()}
    tensors |= {f"up.{name}": tensor for name, tensor in up.items()} | {f"down.{name}": tensor for name, tensor in down.items()}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def fp8_mlp(path: Path, prefix: str = "", **more: Tensor) -> Path:
    up, down = (fp8_block.quantize(weight(*shape)) for shape in ((256, 128), (128, 256)))
    return folder(path, mlp_tensors(up.tensors, down.tensors, prefix) | more, {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}})
