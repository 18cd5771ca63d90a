"""Keeps the moments of a model's layers in a folder: a safetensors file per block, written when the block has run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch

from qdsl.checkpoint.files.safetensors import CheckpointError, TensorFile, write
from qdsl.encode.calibrated.hessian import Hessian

SUFFIX = ".moments.safetensors"
NAMES = "names.json"                                             # the model's names by those of the checkpoint


class Moments(Mapping[str, Hessian]):
    """The moments of layers in a folder, by the layers' names in the model, and in the checkpoint where `save_names` told them.

    Each is read when it is asked for, and the last two are kept.

    Raises CheckpointError for files that hold something else, OSError where they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = dict(_places(folder))
        names = folder / NAMES
        if names.is_file():
            self.places |= {own: self.places[name] for own, name in json.loads(names.read_text()).items() if name in self.places}

    def __getitem__(self, name: str) -> Hessian:
        path, tensor, rows = self.places[name]
        return _read(path, tensor, rows, path.stat().st_mtime_ns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@lru_cache(maxsize=2)                                           # keys, queries and values have the same, others lie between
def _read(path: Path, tensor: str, rows: int, modified: int) -> Hessian:
    """Moments of a file, with the time at which it was modified."""
    with TensorFile(path, copies=True) as file:
        return Hessian(file.tensor(tensor), rows)


def save(folder: Path, block: str, hessians: Mapping[str, Hessian]) -> None:
    """Write the moments of a block's layers; moments that several layers share are stored once."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    layers = {}
    for name, hessian in hessians.items():
        tensor, _ = tensors.setdefault(id(hessian), (str(len(tensors)), hessian.matrix))
        layers[name] = {"tensor": tensor, "rows": hessian.rows}
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / f"{block}{SUFFIX}", {name: matrix.contiguous() for name, matrix in tensors.values()},
          {"layers": json.dumps(layers)})


def save_names(folder: Path, names: Mapping[str, str]) -> None:
    """Write the model's names of weights by those of its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAMES).write_text(json.dumps(names))


def _places(folder: Path) -> Iterator[tuple[str, tuple[Path, str, int]]]:
    """Layers, and the file, tensor and number of rows of their moments."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with TensorFile(path) as file:
            try:
                layers = json.loads((file.header.metadata or {})["layers"])
                places = {str(name): (path, str(place["tensor"]), int(place["rows"])) for name, place in layers.items()}
            except (KeyError, TypeError, ValueError):
                raise CheckpointError(f"{path}: its header does not say which layers the moments belong to") from None
            for name, place in places.items():
                if place[1] not in file.header.tensors:
                    raise CheckpointError(f"{path}: no tensor {place[1]!r}, which layer {name!r} refers to")
                yield name, place
