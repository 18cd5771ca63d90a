"""A checkpoint folder: its safetensors files as one set of tensors, and its config."""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from errno import ENOENT
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.gguf import is_gguf
from qdsl.checkpoint.files.safetensors import CheckpointError, Entry, TensorFile, open_regular, shown
from qdsl.checkpoint.files.strict_json import strict_object

if TYPE_CHECKING:
    import torch

    from qdsl.checkpoint.files.buffer_pool import BufferPool

INDEX = "model.safetensors.index.json"
INDICES = "*.safetensors.index.json"                             # diffusers' are called after its weights
ORIGINAL = "qdsl-original.json"                                  # what `qdsl compress` keeps of the files that it replaces
INDEX_LIMIT = 100_000_000
CONFIG_LIMIT = 16 << 20
WHOLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")   # the names by which libraries look for a model
OTHERS = ("consolidated", "adapter_model")                       # how other files begin: its authors' own, and adapters
PICKLES = (".bin", ".pt", ".pth")
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


class Folder:
    """A checkpoint folder, or a single .safetensors file with the config.json next to it.

    The headers of all files are read at once, the tensors when asked for.  partial: files that the index names may be missing;
    `missing` then says which tensor lies in which of them.  files: names of the files to read; by default those of the index, or
    all where there is none.  copies, buffers: as of `TensorFile`.  notes: what is wrong in the index, and changes nothing.
    Raises CheckpointError for anything that is wrong in the files, OSError when they cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], *, partial: bool = False, files: Collection[str] = (),
                 copies: bool = False, buffers: BufferPool | None = None) -> None:
        self.path = Path(path)
        self.partial = partial
        self.missing: dict[str, str] = {}
        self.notes: list[str] = []
        self.is_completed = False                                # whether `complete` was called
        self._objects: dict[str, dict[str, Any]] = {}            # of JSON files that were read
        self.root = self.path if self.path.is_dir() else self.path.parent
        self.index_name = self._index_name()
        self.index: dict[str, Any] = {}                          # what its file holds
        placed = self._index()
        if files and set(files) != set(placed.values()):         # an index of others, or none
            self.index, self.missing, placed = {}, {}, {}
        whole = self.index_name.removesuffix(".index.json")
        if placed and not files and whole not in placed.values() and (self.root / whole).exists():
            raise CheckpointError(f"{self.root / self.index_name}: names other files than {whole}, which is there, too: "
                                  "transformers reads that one, others read those of the index; remove the index or the file")
        self.shards = [self.root / name for name in sorted(set(files or placed.values()))] or self._shards_without_index()
        self._files: dict[str, TensorFile] = {}
        with ExitStack() as stack:
            by_shard = {shard.name: stack.enter_context(TensorFile(shard, copies, buffers)) for shard in self.shards}
            self._take(placed, by_shard.values())
            self._check(placed, by_shard)
            self._stack = stack.pop_all()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; tensors that were read stay valid."""
        self._stack.close()

    def names(self) -> list[str]:
        """Names of all tensors, file by file, in the order of their bytes."""
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def entry(self, name: str) -> Entry:
        """Where a tensor lies in its file.  Raises CheckpointError for a name that the checkpoint does not have."""
        return self.file(name).entry(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor by name.  Raises CheckpointError for an unknown name and where TensorFile.tensor does."""
        return self.file(name).tensor(name)

    def range(self, name: str) -> Range:
        """The file of a tensor, its first byte there, and how many.  Raises CheckpointError for an unknown name."""
        entry = self.entry(name)
        return self.file(name).path, entry.start, entry.nbytes

    def numbers(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor.  Raises CheckpointError as `tensor` does."""
        return self.file(name).numbers(name, start, stop)

    def file(self, name: str) -> TensorFile:
        """The file that holds a tensor.  Raises CheckpointError for a name that the checkpoint does not have."""
        if name not in self._files:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}")
        return self._files[name]

    def files(self) -> list[TensorFile]:
        return [file for file in dict.fromkeys(self._files.values()) if not self.is_completed or file.path in self.shards]

    def complete(self, config: Mapping[str, Any], base: Folder | None = None, names: Iterable[str] = ()) -> None:
        """Replace the config, and add tensors of another folder, which is closed with this one."""
        self.is_completed = True
        self._objects["config.json"] = dict(config)
        self.__dict__.pop("config", None)
        if base is not None:
            self._stack.push(base)
            self._files |= {name: base.file(name) for name in names}

    def layers(self) -> dict[str, dict[str, str]]:
        """Tensor names by layer: layers()['model.layers.0.mlp.up_proj']['weight_scale_inv'] is the full name."""
        layers: dict[str, dict[str, str]] = {}
        for name in self._files:
            layer, _, leaf = name.rpartition(".")
            layers.setdefault(layer, {})[leaf] = name
        return layers

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, {} if there is none.  Raises CheckpointError when it is not a strict JSON object."""
        return self.json("config.json")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, {} if it is not there.  Raises CheckpointError when it is not a strict JSON object."""
        if name not in self._objects:
            path = self.root / name                              # Nemotron-H and Mamba 2 have an Infinity in config.json
            self._objects[name] = read_object(path, CONFIG_LIMIT, constants=True) if path.exists() else {}
        return self._objects[name]

    def _index_name(self) -> str:
        names = [path.name for path in self.root.glob(INDICES) if not path.name.startswith(".")]
        return INDEX if INDEX in names else min(names, key=lambda name: (len(name), name), default=INDEX)

    def _index(self) -> dict[str, str]:
        """The index as tensor name -> file name; empty where there is none."""
        path = self.root / self.index_name
        if not self.path.is_dir() or not path.exists():
            return {}
        self.index = read_object(path, INDEX_LIMIT)
        placed = self.index.get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
        for name, shard in placed.items():
            if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
                raise CheckpointError(f"{path}: weight_map: {shown(name)}: {shown(str(shard))} is not the name of a "
                                      "safetensors file in this folder")
        exists = {shard: (self.root / shard).exists() for shard in set(placed.values())}
        self.missing = {name: shard for name, shard in placed.items() if not exists[shard]}
        if self.missing and not (self.partial and any(exists.values())):
            name, shard = next(iter(self.missing.items()))
            raise CheckpointError(f"{path}: weight_map: {shown(name)}: {shard} is missing")
        return {name: shard for name, shard in placed.items() if exists[shard]}

    def _check(self, placed: Mapping[str, str], by_shard: Mapping[str, TensorFile]) -> None:
        """Raise CheckpointError for a tensor of the index that no file has; note those that lie in another one of its files.

        Loaders read all files of the index, and so find them.
        """
        for name, shard in placed.items():
            if name not in self._files:
                raise CheckpointError(f"{self.root / self.index_name}: weight_map: {shard} does not have tensor {shown(name)}")
            if name not in by_shard[shard].header.tensors:
                self.notes.append(f"{self.index_name} says that {shown(name)} lies in {shard}; it is read from "
                                  f"{self._files[name].path.name}")

    def _shards_without_index(self) -> list[Path]:
        """The safetensors files of a folder without an index."""
        if not self.path.exists():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self.path))
        if not self.path.is_dir():
            if self.path.suffix != ".safetensors":
                hint = "; `qdsl dequantize` makes one of a GGUF file" if is_gguf(self.path) else ""
                raise CheckpointError(f"{self.path}: neither a folder nor a .safetensors file{hint}")
            return [self.path]
        files = self._weight_files()
        if any(path.name in WHOLE for path in files):
            files = [path for path in files if not path.name.startswith(OTHERS)]
        if not files:
            pickles = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLES)
            hint = f"; {pickles[0]} is a pickle, whose code would run when it is read: only safetensors are" if pickles else ""
            others = sorted(path.name for path in self.path.iterdir() if path.is_file() and is_gguf(path))
            hint = f"; it has GGUF files, of which one is to be named: {', '.join(others[:4])}" if others else hint
            raise CheckpointError(f"{self.path}: no .safetensors file in this folder{hint}")
        return files

    def _weight_files(self) -> list[Path]:
        return sorted(path for path in self.path.glob("*.safetensors") if not path.name.startswith("."))

    @property
    def unread(self) -> list[str]:
        """Names of weight files in the folder that are no part of the model, such as an adapter or its authors' own file."""
        return [path.name for path in self._weight_files() if path not in self.shards] if self.path.is_dir() else []

    def _take(self, placed: Mapping[str, str], by_shard: Iterable[TensorFile]) -> None:
        """Take the tensors of all files, in order; one that several files have is that of the last, as for all loaders.

        Raises CheckpointError where files have other numbers under one name, and the index does not name the last of them.
        """
        for file in by_shard:
            for name in file.names():
                before = self._files.get(name)
                if before is not None and not file.has_same(name, before):
                    if placed.get(name) != file.path.name:
                        raise CheckpointError(f"{file.path}: tensor {shown(name)} occurs in {before.path.name} too, with other "
                                              "numbers")
                    self.notes.append(f"{before.path.name} has other numbers of {shown(name)} than {file.path.name}, which "
                                      f"{self.index_name} names: those are not used")
                self._files[name] = file


def read_object(path: Path, limit: int, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in a file.  Raises CheckpointError for more than `limit` bytes, and for anything else."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: over the limit of {limit} bytes")
    return strict_object(data.removeprefix(BOM_UTF8), str(path), depth=64, constants=constants)   # editors of Windows add it
