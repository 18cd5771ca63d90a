"""Checkpoint folders made of the tensors that other packages wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qdsl.checkpoint.files.folder import INDEX
from qdsl.checkpoint.files.safetensors import write
from tests.support.paths import ROOT

GOLDENS = [*(ROOT / "tests" / "data" / "ckpt").glob("*.npz"), *(ROOT / "tests" / "data" / "ckpt_flat").glob("*.npz")]
_SPECIAL = {"bf16": torch.bfloat16, "f8_e4m3fn": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2,
            "f8_e8m0fnu": torch.float8_e8m0fnu}


def golden(name: str) -> dict[str, Tensor]:
    """The tensors of a golden checkpoint file, as they lie on disk."""
    with np.load(next(path for path in GOLDENS if path.stem == name)) as file:
        dtypes = json.loads(str(file["meta"]))["dtypes"]
        stored = {key: torch.from_numpy(file[key].copy()) for key in file.files if key.startswith("disk.")}
    return {key.removeprefix("disk."): tensor.view(_SPECIAL[dtypes[key]]) if dtypes.get(key) in _SPECIAL else tensor
            for key, tensor in stored.items()}


def folder(path: Path, modules: Mapping[str, Mapping[str, Tensor]], config: Mapping[str, Any] | None = None,
           shards: int = 1, files: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint folder: modules with their tensors, dealt out to shards, a config.json, other files as JSON."""
    tensors = {f"{module}.{leaf}": tensor for module, leaves in modules.items() for leaf, tensor in leaves.items()}
    names = [f"model-{place:05}-of-{shards:05}.safetensors" for place in range(1, shards + 1)]
    placed = {name: names[place % shards] for place, name in enumerate(tensors)}
    for shard in names:
        write(path / shard, {name: tensors[name] for name in placed if placed[name] == shard}, {"format": "pt"})
    if shards > 1:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    for name, data in {**({} if config is None else {"config.json": config}), **(files or {})}.items():
        (path / name).write_text(json.dumps(data))
    return path
