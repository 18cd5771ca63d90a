"""Plans the files of a compressed checkpoint from its pieces: the tensors of each, configs and indices.

hlane, fix4 and fix3 keep the division into files.  DF11 has dfloat11's files: a single one, or one for each group and one for all
other tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from qdsl.checkpoint.detect.groups import group_rules
from qdsl.checkpoint.detect.guard import CLASS, with_guard
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.components import within
from qdsl.checkpoint.files.crc import ranges_checksum
from qdsl.checkpoint.files.folder import ORIGINAL
from qdsl.checkpoint.files.safetensors import Header, plan_header, shown
from qdsl.host.files import digest
from qdsl.jobs.compress import original, pieces
from qdsl.jobs.compress.codecs import STREAM_NAMES
from qdsl.jobs.compress.model import STEMS, Model
from qdsl.jobs.compress.pieces import Complete
from qdsl.jobs.compress.tensors import StoredTensor, stored_tensor
from qdsl.jobs.compress.units import Compression
from qdsl.jobs.engine import RewriteError
from qdsl.jobs.engine.shards import Copy, Shard, by_offset, index

SINGLE = "model.safetensors"
DF11_VERSION = "0.5.0"                                           # of the package whose files these are
VERSION = 1                                                      # of settings and tensors in compressed files


@dataclass(slots=True)
class _File:
    """A planned file: its tensors, and where their bytes come from.

    old: the header of the plain file: its bytes, and parsed.  changed: whether the new file has other tensors.  metadata: of a
    file that replaces no plain one.
    """

    old: tuple[bytes, Header] | None = None
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    changed: bool = False
    metadata: Mapping[str, str] | None = None


def shards(models: Mapping[str, Model], aim: Compression, complete: Complete, sources: Mapping[Any, list[Any]]) -> list[Shard]:
    """The shards of all models.  Raises RewriteError where two tensors would have the same name."""
    return [shard for name, model in models.items() for shard in _shards_of_model(name, model, aim, complete, sources)]


def _shards_of_model(name: str, model: Model, aim: Compression, complete: Complete, sources: Mapping[Any, list[Any]],
                     ) -> list[Shard]:
    encoded = {unit.name: (unit, piece, contents) for unit, piece, contents in pieces.encoded_units(complete)
               if unit.model == name}
    gone = {own for unit, _, _ in encoded.values() for own in unit.parts}
    files: dict[str, _File] = {}
    keep = aim.format != "df11" or not encoded
    homes = encoded if aim.by_group else {}
    others_file = SINGLE
    if homes:                                                    # also where nothing is left for it
        others_file, metadata = _saved_by_library(model.config)
        files[others_file] = _File(metadata=metadata)

    def add(own: str, data: StoredTensor, old: str, home: str) -> None:
        place = model.places[old] if keep else home
        file = files.setdefault(place, _File(model.files[place] if keep else None))
        if any(own in other.tensors for other in files.values()):
            raise RewriteError(f"{model.path}: two tensors would be called {shown(own)}")
        file.tensors[own] = data

    plain = _plain(name, model, complete)
    for own in model.names():
        if own not in gone:
            add(own, plain[own], own, _home(own, homes, others_file))
        elif keep:
            place = model.places[own]
            files.setdefault(place, _File(model.files[place])).changed = True
    for unit, piece, contents in encoded.values():
        largest = max(unit.parts, key=lambda own: unit.parts[own].nbytes)
        for own in map(unit.full, STREAM_NAMES[aim.format]):
            add(own, stored_tensor(piece.path, contents.header.tensors[own]), largest, _home(own, homes, others_file))
    identities = {**sources, **{piece.path: [piece.key] for piece, _ in complete}}
    return [_shard(within(name, own), file, identities) for own, file in files.items() if file.tensors or not keep]


def _plain(name: str, model: Model, complete: Complete) -> dict[str, StoredTensor]:
    """Where the bytes of tensors lie that are not encoded: in their files, or in pieces where they were decoded."""
    decoded = {own: stored_tensor(piece.path, contents.header.tensors[own])
               for piece, contents in complete for unit in piece.units if unit.model == name and unit.name in contents.raw
               for own in unit.parts if own in contents.header.tensors}
    return {own: data for own, data in model.data.items() if isinstance(data, StoredTensor)} | decoded


def _saved_by_library(config: Mapping[str, Any]) -> tuple[str, dict[str, str] | None]:
    """Name and metadata of the file for tensors outside of groups, which diffusers or transformers saves for their models."""
    return f"{STEMS[CLASS in config]}.safetensors", {"format": "pt"} if config else None


def _home(name: str, groups: Mapping[str, object], others_file: str) -> str:
    """dfloat11's file for a tensor: that of the innermost group whose module contains it, or the one for other tensors."""
    parts = name.split(".")
    inside = next((module for count in range(len(parts) - 1, 0, -1) if (module := ".".join(parts[:count])) in groups), None)
    return others_file if inside is None else f"{inside.replace('.', '_')}.safetensors"


def _shard(name: str, file: _File, sources: Mapping[Any, list[Any]]) -> Shard:
    if file.old is not None and not file.changed:
        start, header = file.old
    else:
        metadata = (file.old[1].metadata or None) if file.old else file.metadata
        start, header = plan_header(name, {tensor: (data.dtype, data.shape) for tensor, data in file.tensors.items()}, metadata)
    steps = [Copy(tensor, data.path, data.start, data.nbytes, header.tensors[tensor].start)
             for tensor, data in file.tensors.items()]
    origins = [[step.path.name, sources[step.path], step.start, step.nbytes] for step in steps]
    return Shard(name, start, header.size, tuple(header.tensors), by_offset(steps), digest(start.hex(), origins))


def texts(models: Mapping[str, Model], aim: Compression, complete: Complete, used: Mapping[str, Mapping[str, list[str]]],
          shards: Sequence[Shard]) -> dict[str, str | None]:
    """The text files that change, by name: configs, indices, and qdsl-original.json.  None for a file that is removed."""
    result: dict[str, str | None] = {}
    for name, model in models.items():
        encoded = [(unit, contents) for unit, _, contents in pieces.encoded_units(complete) if unit.model == name]
        if not encoded:
            result |= {within(name, own): text for own, text in model.plain_texts().items()}
            continue
        crc = {own: contents.crc[own] for unit, contents in encoded for own in unit.parts}
        config = _config(model, aim, used.get(name, {}), model.tied(partial(_checksum, crc, _plain(name, model, complete))))
        if config is not None:
            result[within(name, "config.json")] = config
        mine = [shard for shard in shards if shard.name.rpartition("/")[0] == name]
        indexed = aim.format != "df11" and (bool(model.index) or len(mine) > 1)
        result[within(name, model.index_name)] = index(mine, model.index) if indexed else None
        groups = {unit.name: list(unit.parts) for unit, _ in encoded} if aim.format == "df11" else {}
        result[within(name, ORIGINAL)] = original.text(aim.format, model.files, model.texts, groups, crc)
    return result


def _checksum(crc: Mapping[str, int], plain: Mapping[str, StoredTensor], name: str) -> int:
    """The CRC-32 of a tensor: of an encoded matrix, or of bytes in a file."""
    return crc[name] if name in crc else ranges_checksum([plain[name].range])


def _package_config(config: Mapping[str, Any], settings: str, by_group: bool) -> str:
    """config.json as the dfloat11 package writes it: its own settings alone.

    With a file for each group transformers saves the rest of its models, and the whole config.
    """
    if by_group and CLASS not in config:
        return json.dumps(config, indent=2, sort_keys=True) + "\n"
    return json.dumps({settings: config[settings]}, indent=2)


def _config(model: Model, aim: Compression, patterns: Mapping[str, list[str]], config: dict[str, Any]) -> str | None:
    """The model's config.json, guarded; None for a single file that needs none.

    Settings of other quantized layers stay; compressed tensors are recognised without settings.
    """
    rule = group_rules().get(aim.format)
    if rule is not None:
        config[rule["settings"]] = {"version": DF11_VERSION, rule["threads"]: [aim.threads], "bytes_per_thread": 8,
                                    rule["names"]: patterns}
        if aim.plain_config:
            return _package_config(config, rule["settings"], aim.by_group)
    elif not model.path.is_dir():
        return None
    if not model.path.is_dir() or not model.has_settings:
        config["quantization_config"] = {"quant_method": OWN, "format": aim.format, "storage": aim.format, "version": VERSION}
    return json.dumps(with_guard(config), indent=2, ensure_ascii=False) + "\n"
