"""A compressed checkpoint back to the one that it was made of: the same tensors, and, by qdsl-original.json, the same files.

Without that file hlane's and fix4's matrices go where their tensors are; of DF11's nothing says their shapes, but another
checkpoint with the same tensors can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from qdsl.checkpoint import components
from qdsl.checkpoint.components import within
from qdsl.checkpoint.detect import OWN
from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.groups import CONFIG
from qdsl.checkpoint.guard import has_own_settings, unguarded
from qdsl.checkpoint.layers import layers
from qdsl.checkpoint.safetensors import Header, laid_out, shown
from qdsl.compress import codecs, original
from qdsl.compress.original import ORIGINAL, Original
from qdsl.compress.patterns import WEIGHT
from qdsl.compress.pieces import checksum, octets
from qdsl.compress.units import Bytes, bytes_of, needed
from qdsl.entropy.lookup import StreamError
from qdsl.files import check_output
from qdsl.processes import affordable
from qdsl.rewrite import RewriteError, stage
from qdsl.rewrite.complete import complete
from qdsl.rewrite.shards import Shard, Step, copy, identity, in_order, index, key, share
from qdsl.rewrite.work import Telling, quiet, write


@dataclass(frozen=True, slots=True)
class Held:
    """Matrices that are held together: the tensors that hold them, and their names in order."""

    format: str
    name: str
    tensors: Mapping[str, Bytes]
    parts: tuple[str, ...]
    threads: int | None


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix that is made again: where it goes, None for another file; crc: CRC-32 of its bytes, None if unknown."""

    name: str
    shape: tuple[int, ...]
    to: int | None
    crc: int | None


@dataclass(frozen=True, slots=True)
class Decode:
    """Matrices that are made again out of what holds them, those of one file."""

    where: str
    held: Held
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(2 * math.prod(part.shape) for part in self.parts if part.to is not None)

    @property
    def whole(self) -> int:
        """Bytes of all matrices that are held together."""
        return sum(2 * math.prod(part.shape) for part in self.parts)

    @property
    def begin(self) -> int:
        return min(part.to for part in self.parts if part.to is not None)

    def write(self, out: BinaryIO) -> None:
        """Raises RewriteError for tensors that are damaged."""
        tensors = {leaf: data.read() for leaf, data in self.held.tensors.items()}
        try:
            found = codecs.decode(self.held.format, tensors, [part.shape for part in self.parts], self.held.threads)
        except StreamError as error:
            raise RewriteError(f"{self.where}: {shown(self.held.name)}: {error}") from None
        for part, matrix in zip(self.parts, found, strict=True):
            if part.to is None:
                continue
            if part.crc is not None and checksum(matrix) != part.crc:
                raise RewriteError(f"{self.where}: {shown(part.name)} is not what was compressed: its tensors are damaged")
            out.seek(part.to)
            out.write(octets(matrix))


def decompress(path: Path, out: Path, *, like: Path | None = None, jobs: int | None = 1, part: tuple[int, int] | None = None,
               tell: Telling = quiet) -> dict[str, Any]:
    """Write the checkpoint that a compressed one was made of.

    like: a checkpoint with the same tensors, whose files say their shapes and places where nothing else does.
    part, tell, jobs and memory are those of `compress`; parts are of files.
    Raises RewriteError, CheckpointError and OSError.
    """
    check_output(out, path)
    with components.opened(path) as models:
        planned = _planned(path, models, like)
        if stage.was_ended(out):
            return _report(out, planned, planned.shards, [])
        asked = {"command": "decompress", "work": "a decompression", "from": str(path.resolve()),
                 "like": like and str(like.resolve())}
        place = stage.begin(out, asked)
        mine = planned.shards if part is None else share(planned.shards, *part)
        todo = [shard for shard in mine if not stage.is_whole(shard, out)]
        jobs = jobs or affordable(needed(max(step.whole for shard in planned.shards for step in shard.steps
                                             if isinstance(step, Decode))))
        with tell(sum(shard.nbytes for shard in todo)) as told:
            write(todo, place, jobs, told)
        notes = [] if part else complete(path, planned.read, planned.shards, planned.said, out)
        return _report(out, planned, mine, notes)


def merge(out: Path) -> dict[str, Any]:
    """Complete a checkpoint whose parts are all there.  Raises RewriteError where they are not."""
    asked = stage.asked(out)
    path, like = Path(asked["from"]), asked["like"] and Path(asked["like"])
    with components.opened(path) as models:
        planned = _planned(path, models, like)
        return _report(out, planned, planned.shards, complete(path, planned.read, planned.shards, planned.said, out))


@dataclass(slots=True)
class _Plan:
    """exact: whether the files are those that were compressed, byte for byte, as far as their tensors are."""

    shards: list[Shard] = field(default_factory=list)
    said: dict[str, str | None] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)
    units: int = 0
    exact: bool = True


def _planned(path: Path, models: Mapping[str, Folder], like: Path | None) -> _Plan:
    plan = _Plan()
    if like is not None and not like.exists():
        raise FileNotFoundError(f"{like} does not exist")
    for model, folder in models.items():
        kept = original.read(folder)
        wanted = dict(kept.headers) if kept is not None else _of(like, model)
        held, why = _held(folder, kept, {name for _, header in wanted.values() for name in header.tensors})
        plan.units += len(held)
        plan.exact &= kept is not None or not held
        files = wanted if kept is not None or (held and wanted) else _files(folder, held)
        known = _Known(folder, held, why, {name: entry.shape for _, header in files.values()
                                           for name, entry in header.tensors.items()}, kept.crc if kept else {})
        mine = [_shard(known, model, name, start, header) for name, (start, header) in files.items()]
        plan.shards += mine
        plan.read |= {*folder.shards, folder.root / folder.index_name}
        plan.said |= {within(model, name): text for name, text in _said(folder, kept, held, mine).items()}
    if not plan.units:
        raise RewriteError(f"{path}: nothing here is compressed")
    return plan


def _of(like: Path | None, model: str) -> dict[str, tuple[bytes, Header]]:
    """The files of a checkpoint's model, if it has that: the bytes before their tensors, and where those lie."""
    if like is None or not (like / model).exists():
        return {}
    with Folder(like / model) as other:
        return {file.path.name: (file.start_bytes(), file.header) for file in other.files()}


def _held(folder: Folder, kept: Original | None, names: Container[str]) -> tuple[dict[str, Held], dict[str, str]]:
    """By the names of matrices what holds them, or why nothing does.  names: of tensors that are wanted, where that is known.

    Raises RewriteError for tensors that are no format's, where nothing says whether they were there before.
    """
    known = layers(folder)
    found: dict[str, Held] = {}
    why: dict[str, str] = {}
    for layer in known.layers:
        name = layer.name if layer.name in names else f"{layer.name}{WEIGHT}".lstrip(".")
        if layer.format in codecs.FORMS:
            tensors = {leaf: bytes_of(folder, full) for leaf, full in layer.tensors.items()}
            found[name] = Held(layer.format, layer.name, tensors, (name,), None)
        elif not layer.format and kept is None:
            raise RewriteError(f"{folder.path}: layer {shown(layer.name)}: {layer.why}")
        else:
            why[name] = layer.why
    for group in known.groups:
        parts = tuple(kept.groups.get(group.name, ())) if kept else ()
        wrong = [*group.problems, *([group.unnamed] if group.unnamed and not parts else [])]
        if wrong:
            raise RewriteError(f"{folder.path}: group {shown(group.name)}: {wrong[0]}")
        parts = parts or tuple(group.parts)
        held = Held(group.format, group.name, {leaf: bytes_of(folder, name) for leaf, name in group.tensors.items()}, parts,
                    group.threads)
        found |= dict.fromkeys(parts, held)
    return found, why


def _files(folder: Folder, held: Mapping[str, Held]) -> dict[str, tuple[bytes, Header]]:
    """The files to be written, where nothing says what they were."""
    if not held:
        return {file.path.name: (file.start_bytes(), file.header) for file in folder.files()}
    if any(each.format == "df11" for each in held.values()):
        raise RewriteError(f"{folder.path}: no file here says what shapes its matrices have; --like FOLDER can, a checkpoint "
                           "with tensors of the same names and shapes, such as the model before it was tuned")
    files: dict[Path, dict[str, tuple[str, tuple[int, ...]]]] = {file.path: {} for file in folder.files()}
    gone = {(data.path, data.start, data.dtype, data.shape) for each in held.values() for data in each.tensors.values()}
    for name in folder.names():
        each = bytes_of(folder, name)
        if (each.path, each.start, each.dtype, each.shape) not in gone:
            files[each.path][name] = (each.dtype, each.shape)
    for name, matrix in held.items():
        n, k = matrix.tensors["weight_shape"].read().tolist()
        files[matrix.tensors["sign_mantissa"].path][name] = ("BF16", (n, k))
    metadata = {file.path: file.header.metadata or None for file in folder.files()}
    return {path.name: laid_out(path, tensors, metadata[path]) for path, tensors in files.items() if tensors}


@dataclass(frozen=True, slots=True)
class _Known:
    """A compressed model: what holds which matrix, or why nothing does; shapes of all tensors, and CRC-32 of matrices."""

    folder: Folder
    held: Mapping[str, Held]
    why: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    crc: Mapping[str, int]


def _shard(known: _Known, model: str, name: str, start: bytes, header: Header) -> Shard:
    """Raises RewriteError for a tensor that is neither there nor held."""
    folder = known.folder
    steps: list[Step] = []
    together: dict[str, list[str]] = {}
    for tensor, entry in header.tensors.items():
        if tensor in folder:
            there = folder.entry(tensor)
            if (there.dtype, there.shape) != (entry.dtype, entry.shape):
                raise RewriteError(f"{folder.path}: tensor {shown(tensor)} is {there.dtype} {list(there.shape)}, and was "
                                   f"{entry.dtype} {list(entry.shape)}")
            steps.append(copy(folder, tensor, entry))
        elif tensor in known.held and entry.dtype == "BF16" and len(entry.shape) > 1:
            together.setdefault(known.held[tensor].name, []).append(tensor)
        else:
            why = f": {known.why[tensor]}" if known.why.get(tensor) else ", and nothing that holds a matrix of that name"
            raise RewriteError(f"{folder.path}: there is no tensor {shown(tensor)}{why}")
    steps += [_decode(known, known.held[names[0]], header) for names in together.values()]
    said = [start.hex(), [identity(path) for path in folder.shards]]
    return Shard(within(model, name), start, header.size, tuple(header.tensors), in_order(steps), key(*said))


def _decode(known: _Known, held: Held, header: Header) -> Decode:
    """Raises RewriteError for a group of which a matrix is nowhere."""
    if lost := [name for name in held.parts if name not in known.shapes]:
        raise RewriteError(f"{known.folder.path}: nothing says the shape of {shown(lost[0])}")
    here = header.tensors
    parts = tuple(Part(name, known.shapes[name], here[name].start if name in here else None, known.crc.get(name))
                  for name in held.parts)
    return Decode(str(known.folder.path), held, parts)


def _said(folder: Folder, kept: Original | None, held: Mapping[str, Held], shards: Sequence[Shard]) -> dict[str, str | None]:
    """The files that say something else again; as far as they were kept, what they were."""
    if not folder.path.is_dir():
        return {}
    old: dict[str, str | None] = {ORIGINAL: None}
    if kept is not None:
        return old | {"config.json": None} | dict(kept.files)
    text = (folder.root / folder.index_name).read_bytes().decode() if folder.index else None
    if held:
        config = {key: value for key, value in folder.config.items()
                  if key != CONFIG and not (key == "quantization_config" and _is_own(value))}
        config = config if has_own_settings(config) else unguarded(config)
        old["config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        text = index(shards, folder.index) if folder.index or len(shards) > 1 else None
    return {**old, folder.index_name: text}


def _is_own(settings: object) -> bool:
    """Whether settings are those that `compress` writes."""
    return isinstance(settings, dict) and settings.get("quant_method") == OWN and settings.get("format") in codecs.LEAVES


def _report(out: Path, planned: _Plan, shards: Sequence[Shard], notes: Sequence[str]) -> dict[str, Any]:
    more = [] if planned.exact else [f"no {ORIGINAL} says what the files were: their tensors are the same, the files may not be"]
    return {"out": str(out), "units": planned.units, "shards": [shard.name for shard in shards], "exact": planned.exact,
            "nbytes": sum(shard.size for shard in shards), "notes": [*more, *notes]}
