"""The files of a compressed checkpoint, when its pieces are there: which tensors each has, and what else is said of it.

hlane and fix4 leave the files as they were cut.  DF11's are those of dfloat11: one, or one for each group with all of its module,
and one for the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdsl.checkpoint.components import within
from qdsl.checkpoint.detect import OWN
from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.groups import CONFIG
from qdsl.checkpoint.guard import guarded
from qdsl.checkpoint.quantization import quantizations
from qdsl.checkpoint.safetensors import TensorFile, laid_out, shown
from qdsl.compress import pieces
from qdsl.compress.codecs import LEAVES
from qdsl.compress.original import ORIGINAL, original
from qdsl.compress.pieces import Made, Piece
from qdsl.compress.units import Aim, Bytes, bytes_of, placed
from qdsl.rewrite import RewriteError
from qdsl.rewrite.shards import Copy, Shard, in_order, index, key

SINGLE = "model.safetensors"
DF11_VERSION = "0.5.0"                                           # of the package whose files these are
VERSION = 1                                                      # of hlane's, fix4's and df11's settings and tensors in files


@dataclass(slots=True)
class _File:
    """A file as it is planned: its tensors, and out of which bytes they come.

    old: the file that it was.  changed: whether it has other tensors than that.
    """

    old: TensorFile | None = None
    tensors: dict[str, Bytes] = field(default_factory=dict)
    changed: bool = False


def shards(models: Mapping[str, Folder], aim: Aim, made: Sequence[tuple[Piece, Made]], sources: Mapping[Any, list[Any]],
           ) -> list[Shard]:
    """All files.  Raises RewriteError where two tensors would have one name."""
    return [shard for model, folder in models.items() for shard in _of_model(model, folder, aim, made, sources)]


def _of_model(model: str, folder: Folder, aim: Aim, made: Sequence[tuple[Piece, Made]], sources: Mapping[Any, list[Any]],
              ) -> list[Shard]:
    held = {unit.name: (unit, piece, each) for unit, piece, each in pieces.held(made) if unit.model == model}
    gone = {name for unit, _, _ in held.values() for name in unit.parts}
    files: dict[str, _File] = {}
    keep = aim.format != "df11" or not held
    homes = held if aim.by_group else {}
    if homes:
        files[SINGLE] = _File()                                  # also where nothing is left for it

    def add(name: str, data: Bytes, old: str, home: str) -> None:
        place = folder.file(old).path.name if keep else home
        file = files.setdefault(place, _File(folder.file(old) if keep else None))
        if any(name in each.tensors for each in files.values()):
            raise RewriteError(f"{folder.path}: two tensors would be called {shown(name)}")
        file.tensors[name] = data

    for name in folder.names():
        if name not in gone:
            add(name, bytes_of(folder, name), name, _home(name, homes))
        elif keep:
            files.setdefault(folder.file(name).path.name, _File(folder.file(name))).changed = True
    for unit, piece, each in held.values():
        largest = max(unit.parts, key=lambda name: unit.parts[name].nbytes)
        for name in map(unit.full, LEAVES[aim.format]):
            add(name, placed(piece.path, each.header.tensors[name]), largest, _home(name, homes))
    known = {**sources, **{piece.path: [piece.key] for piece, _ in made}}
    return [_shard(within(model, name), file, known) for name, file in files.items() if file.tensors or not keep]


def _home(name: str, groups: Mapping[str, object]) -> str:
    """dfloat11's file for a tensor: that of the innermost group in whose module it lies, or the one for the rest."""
    parts = name.split(".")
    inside = next((module for count in range(len(parts) - 1, 0, -1) if (module := ".".join(parts[:count])) in groups), None)
    return SINGLE if inside is None else f"{inside.replace('.', '_')}.safetensors"


def _shard(name: str, file: _File, sources: Mapping[Any, list[Any]]) -> Shard:
    if file.old is not None and not file.changed:
        start, header = file.old.start_bytes(), file.old.header
    else:
        metadata = (file.old.header.metadata or None) if file.old else None
        start, header = laid_out(name, {each: (data.dtype, data.shape) for each, data in file.tensors.items()}, metadata)
    steps = [Copy(each, data.path, data.start, data.nbytes, header.tensors[each].start) for each, data in file.tensors.items()]
    said = [[step.path.name, sources[step.path], step.start, step.nbytes] for step in steps]
    return Shard(name, start, header.size, tuple(header.tensors), in_order(steps), key(start.hex(), said))


def said(models: Mapping[str, Folder], aim: Aim, made: Sequence[tuple[Piece, Made]], used: Mapping[str, Mapping[str, list[str]]],
         shards: Sequence[Shard]) -> dict[str, str | None]:
    """The files that say something else now: configs, indices, and what is needed to make the old files again."""
    found: dict[str, str | None] = {}
    for model, folder in models.items():
        held = [(unit, each) for unit, _, each in pieces.held(made) if unit.model == model]
        index_text = _text(folder, folder.index_name)
        if not held:
            found |= {within(model, folder.index_name): index_text} if index_text is not None else {}
            continue
        config = _config(folder, aim, used.get(model, {}))
        if config is not None:
            found[within(model, "config.json")] = config
        mine = [shard for shard in shards if shard.name.rpartition("/")[0] == model]
        indexed = aim.format != "df11" and (bool(folder.index) or len(mine) > 1)
        found[within(model, folder.index_name)] = index(mine, folder.index) if indexed else None
        found[within(model, ORIGINAL)] = original(folder, aim, held)
    return found


def _config(folder: Folder, aim: Aim, patterns: Mapping[str, list[str]]) -> str | None:
    """The model's config.json, guarded; None for a file by itself that needs none.

    Settings of other layers stay, for these need them; hlane's and fix4's tensors and DF11's groups are recognised without any.
    """
    config = dict(folder.config) if folder.path.is_dir() else {}
    if aim.format == "df11":
        config[CONFIG] = {"version": DF11_VERSION, "threads_per_block": [aim.threads], "bytes_per_thread": 8,
                          "pattern_dict": patterns}
        if aim.plain_config:
            return json.dumps(config, indent=2)
    elif not folder.path.is_dir():
        return None
    if not folder.path.is_dir() or not quantizations(folder):
        config["quantization_config"] = {"quant_method": OWN, "format": aim.format, "storage": aim.format, "version": VERSION}
    return json.dumps(guarded(config), indent=2, ensure_ascii=False) + "\n"


def _text(folder: Folder, name: str) -> str | None:
    path = folder.root / name
    return path.read_bytes().decode() if folder.path.is_dir() and path.is_file() else None
