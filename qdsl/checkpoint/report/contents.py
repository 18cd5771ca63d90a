"""What lies in a checkpoint: its tensors, types, sizes and metadata, as data and as lines of text.  No tensor is read.

Strings of a file are shown with what a terminal would obey escaped; metadata are never run, chat templates among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.groups import SHARED_MEMORY
from qdsl.checkpoint.detect.shaped import Shapes, shaped_layers
from qdsl.checkpoint.files.components import names
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.gguf import GgufFile, GgufTensor
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import Entry
from qdsl.checkpoint.report.survey import survey, tables, weights

ARRAY_SHOWN = 8                                                  # elements of a metadata array
TEXT_SHOWN = 100                                                 # characters of a string, in a line of text
STRING_SHOWN = 1 << 16                                           # characters of a string, in data


def contents(path: Path, limit: int = SHARED_MEMORY, shapes: Shapes | None = None) -> dict[str, Any]:
    """A GGUF file, or the first of a set; a .safetensors file, a folder of them, or one of several such models.

    limit: bytes of shared memory that a GPU gives a kernel.  shapes: of a model, for layers whose tensors do not say theirs.
    Raises CheckpointError for anything that is wrong in the file, OSError when it cannot be read.
    """
    if path.is_dir() or path.suffix == ".safetensors":
        models = names(path)
        if models != [""]:
            inside = [_of_safetensors(path / name, limit, shapes) for name in models]
            return {"file": str(path), "format": "safetensors", "models": inside}
        return _of_safetensors(path, limit, shapes)
    with GgufFile(path) as gguf:
        tensors = [_gguf_tensor(each) for each in gguf.tensors.values()]
        metadata = {key: _gguf_value(value) for key, value in gguf.metadata.stored().items()}
        return {"file": str(path), "format": "gguf", "version": gguf.version, "alignment": gguf.alignment,
                "files": len(gguf.paths), **_totals(tensors), "notes": list(gguf.notes), "metadata": metadata,
                "tensors": tensors}


def _of_safetensors(path: Path, limit: int, shapes: Shapes | None) -> dict[str, Any]:
    """Layers, and the tensors one by one; what a folder's index names may be missing."""
    with Folder(path, partial=True) as folder:
        tensors = [_entry(name, folder.entry(name)) for name in folder.names()]
        pairs = {key: text for file in folder.files() for key, text in file.header.metadata.items()}
        found, totals = shaped_layers(folder, shapes), _totals(tensors)
        (count, nbytes), whole = weights(folder, found), totals["total"]["nbytes"]
        totals["total"] = {**_total(len(tensors), count, nbytes), "nbytes": whole}
        notes = [f"{name} holds other weights, which are no part of the model" for name in folder.unread]
        notes += [f"bits per weight are without {whole - nbytes} bytes of layers of no known format"] if whole > nbytes else []
        return {"file": str(path), "format": "safetensors", "files": len(folder.shards), **totals,
                "notes": notes,
                "metadata": {key: {"type": "string", "value": text} for key, text in pairs.items()},
                **survey(folder, found, limit), "tensors": tensors}


def _gguf_tensor(tensor: GgufTensor) -> dict[str, Any]:
    found = {"name": tensor.name, "type": tensor.type.name, "shape": list(tensor.logical_shape), "nbytes": tensor.nbytes,
             "bits_per_weight": tensor.type.bits if tensor.type.known else None, "start": tensor.start, "shard": tensor.shard}
    if tensor.orig_shape is not None:
        found["stored_shape"] = list(tensor.shape)
    return found if tensor.problem is None else {**found, "problem": tensor.problem}


def _entry(name: str, entry: Entry) -> dict[str, Any]:
    weights = math.prod(entry.shape)
    return {"name": name, "type": entry.dtype, "shape": list(entry.shape), "nbytes": entry.nbytes,
            "bits_per_weight": 8 * entry.nbytes / weights if weights else None, "start": entry.start}


def _gguf_value(value: Value) -> dict[str, Any]:
    """A value that JSON can hold, long ones cut: of an array its first elements."""
    if value.type.endswith("[]"):
        first = value.decoded(ARRAY_SHOWN)
        assert isinstance(first, list)
        return {"type": value.type, "count": value.count, "first": [_plain(each) for each in first]}
    return {"type": value.type, "value": _plain(value.decoded())}


def _plain(item: object) -> object:
    if isinstance(item, str):
        return item[:STRING_SHOWN]
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item


def _totals(tensors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the tensors that can be read, in all and by type, the largest first."""
    sums: dict[str, list[int]] = {}
    for each in tensors:
        if "problem" not in each:
            total = sums.setdefault(each["type"], [0, 0, 0])
            for place, more in enumerate((1, math.prod(each["shape"]), each["nbytes"])):
                total[place] += more
    rows = [_total(*total, type=type) for type, total in sums.items()]
    rows.sort(key=lambda row: (-row["nbytes"], row["type"]))
    whole = _total(*(sum(column) for column in zip(*sums.values(), strict=True))) if sums else _total(0, 0, 0)
    return {"total": whole, "types": rows, "problems": sum("problem" in each for each in tensors)}


def _total(tensors: int, weights: int, nbytes: int, **head: str) -> dict[str, Any]:
    return {**head, "tensors": tensors, "weights": weights, "nbytes": nbytes,
            "bits_per_weight": 8 * nbytes / weights if weights else None}


# As text

def lines(found: Mapping[str, Any]) -> list[str]:
    """What `contents` found, for people."""
    if "models" in found:
        return [line for each in found["models"] for line in [*lines(each), ""]][:-1]
    total = found["total"]
    kind = f"GGUF {found['version']}" if found["format"] == "gguf" else "safetensors"
    files = f" in {found['files']} files" if found["files"] > 1 else ""
    head = f"{escaped(found['file'])}: {kind}{files}, {total['tensors']} tensors, {total['weights']} weights, " \
           f"{_size(total['nbytes'])}, {_bits(total['bits_per_weight'])} bits per weight"
    tensors = [] if "layers" in found else [
        [escaped(each["name"]), each["type"], _shape(each), _bits(each["bits_per_weight"]), _size(each["nbytes"]),
         each.get("problem", "")] for each in found["tensors"]]
    surveyed = [line for heads, rows, right in (tables(found) if "layers" in found else [])
                for line in _block(heads, [[escaped(cell) for cell in row] for row in rows], right)]
    settings = [[escaped(each["source"]), escaped(each["method"]), _settings(each["settings"])]
                for each in found.get("quantization", [])]
    types = [[each["type"], str(each["tensors"]), str(each["weights"]), _bits(each["bits_per_weight"]), _size(each["nbytes"])]
             for each in found["types"]]
    said = {each["name"] for each in found["tensors"]} | {f"{each['name']}.weight" for each in found.get("layers", [])}
    metadata = [[escaped(key), value["type"], _value(value)] for key, value in found["metadata"].items() if key not in said]
    return [head, *(f"note: {escaped(note)}" for note in found["notes"]),
            *([f"{found['problems']} tensors cannot be read"] if found["problems"] else []),
            *_block(["metadata", "type", "value"], metadata, ""),
            *_block(["quantization", "", "settings"], settings, ""), *surveyed,
            *_block(["tensor", "type", "shape", "bits", "size", ""], tensors, "   >>"),
            *_block(["type", "tensors", "numbers" if "layers" in found else "weights", "bits", "size"], types, " >>>>")]


def escaped(text: str, limit: int | None = None) -> str:
    """A string of a file in one line of a terminal, which obeys none of it; cut at `limit` characters."""
    part = text if limit is None or len(text) <= limit else text[:limit - 3] + "..."
    return part if part.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in part)


def _value(value: Mapping[str, Any]) -> str:
    if "first" not in value:
        return escaped(str(value["value"]), TEXT_SHOWN)
    rest = ["..."] if value["count"] > len(value["first"]) else []
    texts = [repr(each) if isinstance(each, str) else str(each) for each in value["first"]]
    return f"{value['count']}: " + escaped(", ".join([*texts, *rest]), TEXT_SHOWN)


def _settings(settings: Mapping[str, Any]) -> str:
    """Those that are words or numbers."""
    return escaped(", ".join(f"{key} = {value}" for key, value in settings.items() if key != "quant_method" and (
        isinstance(value, int | str) or (isinstance(value, list) and all(type(each) is int for each in value)))), TEXT_SHOWN)


def _shape(tensor: Mapping[str, Any]) -> str:
    return " x ".join(map(str, tensor["shape"])) + (" (reshaped)" if "stored_shape" in tensor else "")


def _bits(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.4g}"


def _size(nbytes: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024 ** power:
            return f"{nbytes / 1024 ** power:.2f} {unit}"
    return f"{nbytes} B"


def _block(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str) -> list[str]:
    """A table after an empty line; columns that `right` marks with > are aligned there."""
    table = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    marks = right.ljust(len(widths))
    shown = ["  ".join(cell.rjust(width) if mark == ">" else cell.ljust(width)
                       for cell, width, mark in zip(row, widths, marks, strict=True)).rstrip() for row in table]
    return ["", *shown] if rows else []
