"""A model as plain tensors, which its files store as such or which are decoded from compressed ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.groups import Group, group_rules
from qdsl.checkpoint.detect.guard import CLASS, describes_model, has_own_settings, without_guard
from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.quantization import quantizations
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.folder import ORIGINAL, Folder
from qdsl.checkpoint.files.references import local_headers
from qdsl.checkpoint.files.safetensors import Entry, plan_header, shown
from qdsl.host.files import read_bytes
from qdsl.jobs.compress import codecs, original
from qdsl.jobs.compress.codecs import Shape
from qdsl.jobs.compress.original import Original
from qdsl.jobs.compress.tensors import Data, EncodedMatrices, EncodedMatrix, bytes_of
from qdsl.jobs.engine import RewriteError
from qdsl.jobs.engine.heads import config_with_ties
from qdsl.jobs.engine.shards import Files, headers_index, shard_names

WEIGHT = ".weight"
STEMS = {True: "diffusion_pytorch_model", False: "model"}        # of files that diffusers reads, and transformers
Shapes = Callable[[Folder], Mapping[str, Shape]]                 # returns the shapes of a model's parameters, as from its class


@dataclass(frozen=True)
class Model:
    """The plain tensors of a model by file, and where their bytes are read or decoded from.

    folder: the stored files.  texts: of config.json and the index.  is_decoded: whether the folder is compressed.
    is_exact: whether `files` are the original ones, so that they can be restored byte for byte.
    """

    folder: Folder
    files: Files
    data: Mapping[str, Data]
    index_name: str
    texts: Mapping[str, str]
    is_decoded: bool = False
    is_exact: bool = True

    @property
    def path(self) -> Path:
        return self.folder.path

    @cached_property
    def places(self) -> dict[str, str]:
        """The file of each tensor, in the order of the files."""
        return {name: file for file, (_, header) in self.files.items() for name in header.tensors}

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json, {} without one."""
        return dict(json.loads(self.texts.get("config.json", "{}").encode()))    # bytes may begin with a byte order mark

    @property
    def index(self) -> dict[str, Any]:
        """The index of the files, {} without one."""
        return dict(json.loads(self.texts.get(self.index_name, "{}").encode()))

    @property
    def has_settings(self) -> bool:
        """Whether files state how layers are quantized that are not decoded."""
        return any(not (self.is_decoded and _is_own(claim.settings)) for claim in quantizations(self.folder))

    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self.places)

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def entry(self, name: str) -> Entry:
        """The dtype, shape and place of a tensor in its plain file."""
        return self.files[self.places[name]][1].tensors[name]

    def tied(self, checksum_of: Callable[[str], int]) -> dict[str, Any]:
        """The config, which ties head and embedding only if their tensors are alike.  checksum_of: a tensor's CRC-32."""
        modules: dict[str, list[str]] = {}
        for name in self.names():
            modules.setdefault(name.rpartition(".")[0], []).append(name)

        def tensors(module: str) -> list[tuple[object, ...]]:
            return [(name.removeprefix(module), self.entry(name).dtype, self.entry(name).shape, checksum_of(name))
                    for name in sorted(modules[module]) if not name.endswith(".bias")]

        return config_with_ties(self.config, modules, lambda head, embedding: tensors(head) == tensors(embedding))

    def plain_texts(self) -> dict[str, str | None]:
        """The text files of the plain model by name; None for files that it does not have."""
        return {**(dict.fromkeys((ORIGINAL, "config.json")) if self.is_decoded else {}), **self.texts}


def plain_model(folder: Folder) -> Model:
    """The model of a folder, without decoding."""
    names = ["config.json", folder.index_name] if folder.path.is_dir() else []
    texts = {name: read_bytes(folder.root / name).decode() for name in names if (folder.root / name).is_file()}
    return Model(folder, _files_of(folder), {name: bytes_of(folder, name) for name in folder.names()}, folder.index_name, texts)


def decoded_models(folders: Mapping[str, Folder], like: str | Path | None = None,
                   shapes: Shapes | None = None) -> dict[str, Model]:
    """The decoded models of compressed folders; plain ones as they are.

    like: a reference to a checkpoint with the same tensors, whose headers state shapes and files where the folder's do not.
    shapes: called where neither states them; raises RewriteError where it cannot.  Raises RewriteError, CheckpointError, OSError.
    """
    with ExitStack() as stack:
        base = None if like is None else stack.enter_context(local_headers(like))
        if base is not None and not base.exists():
            raise FileNotFoundError(f"{like} does not exist")
        models = {}
        for name, folder in folders.items():
            has_base = base is not None and (base / name).exists()
            models[name] = _decoded(folder, stack.enter_context(Folder(base / name)) if base and has_base else None, shapes)
        return models


def absolute_reference(like: str | Path | None) -> str | None:
    """A reference that names the same checkpoint from any working directory."""
    return None if like is None else str(Path(like).resolve() if Path(like).exists() else like)


def _files_of(folder: Folder) -> Files:
    return {file.path.name: (file.start_bytes(), file.header) for file in folder.files()}


def _decoded(folder: Folder, like: Folder | None, shapes: Shapes | None) -> Model:
    kept, detected = original.read(folder), layers(folder)
    if kept is None and not detected.groups and not any(layer.format in codecs.FORMS for layer in detected.layers):
        return plain_model(folder)
    files: Files = kept.headers if kept is not None else {} if like is None else _files_of(like)
    parts = _parts(folder, detected, kept, files, shapes)
    streams = {full for layer in detected.layers if layer.format in codecs.FORMS for full in layer.tensors.values()}
    streams |= {full for group in detected.groups for full in group.tensors.values()}
    others = [name for name in folder.names() if name not in streams]
    index_name = folder.index_name if like is None else like.index_name
    if not files:
        stem = STEMS[CLASS in folder.config] if detected.groups and folder.path.is_dir() else ""
        files = _plain_headers(folder, others, parts, stem)
        index_name = f"{stem}.safetensors.index.json" if stem else index_name
    why = {name: layer.why for layer in detected.layers for name in (layer.name, f"{layer.name}{WEIGHT}")}
    data = _byte_sources(folder, files, others, parts, why)
    if kept is not None:
        index_name = next((name for name in kept.files if name.endswith(".index.json")), index_name)
    elif missing := [name for name in (*others, *parts) if name not in data]:
        raise RewriteError(f"{like.path if like else folder.path} has no tensor {shown(missing[0])}, which {folder.path} has")
    described = folder.config if like is None or describes_model(folder.config) else like.config
    texts = kept.files if kept is not None else _texts(folder, files, index_name, described)
    return Model(folder, files, data, index_name, texts, is_decoded=True, is_exact=kept is not None)


def _parts(folder: Folder, detected: Layers, kept: Original | None, files: Files,
           shapes: Shapes | None) -> dict[str, EncodedMatrix]:
    """The encoded matrices by name.  Raises RewriteError for damaged streams and unknown shapes."""
    entries = {name: entry for _, header in files.values() for name, entry in header.tensors.items()}
    crc = kept.crc if kept is not None else {}
    parts: dict[str, EncodedMatrix] = {}
    for layer in detected.layers:
        if layer.format in codecs.FORMS:
            name = layer.name if layer.name in entries else f"{layer.name}{WEIGHT}".lstrip(".")
            tensors = {leaf: bytes_of(folder, full) for leaf, full in layer.tensors.items()}
            shape = entries[name].shape if name in entries else tuple(tensors["weight_shape"].read().tolist())
            coded = EncodedMatrices(str(folder.path), layer.format, layer.name, tensors, (name,), (shape,), (crc.get(name),),
                                    None)
            parts[name] = EncodedMatrix(coded, 0)
        elif not layer.format and kept is None:
            raise RewriteError(f"{folder.path}: layer {shown(layer.name)}: {layer.why}")
    tensor_shapes: Mapping[str, Shape] = {name: entry.shape for name, entry in entries.items()}
    if detected.groups and not files:
        tensor_shapes = _model_shapes(folder, shapes)
    for group in detected.groups:
        names = _names(folder, group, kept)
        for name, count in zip(names, group.parts.values(), strict=False):
            if name not in tensor_shapes:
                raise RewriteError(f"{folder.path}: nothing says the shape of {shown(name)}; --like REF can")
            if math.prod(tensor_shapes[name]) != count:
                raise RewriteError(f"{folder.path}: {shown(name)} has {count} numbers, and not the shape "
                                   f"{list(tensor_shapes[name])}")
        tensors = {leaf: bytes_of(folder, full) for leaf, full in group.tensors.items()}
        coded = EncodedMatrices(str(folder.path), group.format, group.name, tensors, names,
                                tuple(tensor_shapes[name] for name in names), tuple(map(crc.get, names)), group.threads)
        parts |= {name: EncodedMatrix(coded, number) for number, name in enumerate(names)}
    return parts


def _names(folder: Folder, group: Group, kept: Original | None) -> tuple[str, ...]:
    """The names of a group's matrices.  Raises RewriteError where nothing states them, and for wrong tensors."""
    names = tuple(kept.groups.get(group.name, ())) if kept is not None else ()
    wrong = group.problems if names else group.errors
    if wrong:
        raise RewriteError(f"{folder.path}: group {shown(group.name)}: {wrong[0]}")
    return names or tuple(group.parts)


def _model_shapes(folder: Folder, shapes: Shapes | None) -> Mapping[str, Shape]:
    """The shapes of a model's parameters from the callback.  Raises RewriteError with a remedy where it has none."""
    why = ""
    if shapes is not None:
        try:
            return shapes(folder)
        except RewriteError as error:
            why = f": {error}"
    raise RewriteError(f"{folder.path}: no file here says what shapes its matrices have{why}; --like REF can, a folder or "
                       "repository with tensors of the same names and shapes, such as the model before it was compressed")


def _plain_headers(folder: Folder, others: list[str], parts: Mapping[str, EncodedMatrix], stem: str) -> Files:
    """Headers of plain files, where the original ones are unknown: the present files.  stem: of new file names, '' for none."""
    tensors: dict[Path, dict[str, tuple[str, Shape]]] = {file.path: {} for file in folder.files()}
    for name in others:
        entry = folder.entry(name)
        tensors[folder.file(name).path][name] = (entry.dtype, entry.shape)
    for name, part in parts.items():
        tensors[part.coded.tensors["sign_mantissa"].path][name] = (part.dtype, part.shape)
    used = [path for path, own in tensors.items() if own]
    names = shard_names(stem, len(used)) if stem else [path.name for path in used]
    default = {"format": "pt"} if stem else None
    metadata = {file.path: file.header.metadata or default for file in folder.files()}
    return {name: plan_header(path, tensors[path], metadata[path]) for name, path in zip(names, used, strict=True)}


def _byte_sources(folder: Folder, files: Files, others: list[str], parts: Mapping[str, EncodedMatrix],
                  why: Mapping[str, str]) -> dict[str, Data]:
    """Where the bytes of each tensor come from.  Raises RewriteError for one that is neither stored nor encoded."""
    data: dict[str, Data] = {}
    present = set(others)
    for name, entry in ((name, entry) for _, header in files.values() for name, entry in header.tensors.items()):
        if name in present:
            now = folder.entry(name)
            if (now.dtype, now.shape) != (entry.dtype, entry.shape):
                raise RewriteError(f"{folder.path}: tensor {shown(name)} is {now.dtype} {list(now.shape)}, and was "
                                   f"{entry.dtype} {list(entry.shape)}")
            data[name] = bytes_of(folder, name)
        elif name in parts and entry.dtype == "BF16" and len(entry.shape) > 1:
            data[name] = parts[name]
        else:
            reason = f": {why[name]}" if why.get(name) else ", and nothing that holds a matrix of that name"
            raise RewriteError(f"{folder.path}: there is no tensor {shown(name)}{reason}")
    return data


def _texts(folder: Folder, files: Files, index_name: str, described: Mapping[str, Any]) -> dict[str, str]:
    """config.json without the settings of a compression, and the index.  described: the config that describes the model."""
    if not folder.path.is_dir():
        return {}
    of_groups = {rule["settings"] for rule in group_rules().values()}
    config = {key: value for key, value in described.items()
              if key not in of_groups and not (key == "quantization_config" and _is_own(value))}
    config = config if has_own_settings(config) else without_guard(config)
    texts = {"config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    if folder.index or len(files) > 1:
        texts[index_name] = headers_index(files, folder.index)
    return texts


def _is_own(settings: object) -> bool:
    """Whether settings were written by `compress`."""
    return isinstance(settings, Mapping) and settings.get("quant_method") == OWN and settings.get("format") in codecs.STREAM_NAMES

