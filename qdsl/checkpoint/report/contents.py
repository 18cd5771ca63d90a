"""Describes the contents of a checkpoint: tensors, types, sizes and metadata, as data and as text.

Without `check` no tensor is read.  Control characters in strings of a file are escaped.  Metadata, such as chat templates, are
never executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.gguf_keys import key_findings
from qdsl.checkpoint.detect.gguf_weights import packed_weight, type_storage
from qdsl.checkpoint.detect.groups import SHARED_MEMORY
from qdsl.checkpoint.detect.layer_weights import with_checked_scales
from qdsl.checkpoint.detect.shaped import Shapes, detected_shaped_layers
from qdsl.checkpoint.files.components import gguf, names
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.files.gguf import GgufFile, GgufTensor
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import CheckpointError, Entry, shown
from qdsl.checkpoint.report.survey import by_kind, count_weights, problem_tables, survey, tables
from qdsl.core.table import table_lines, wrapped
from qdsl.core.text import counted

ARRAY_SHOWN = 8                                                  # elements of a metadata array
TEXT_SHOWN = 100                                                 # characters of a string, in a line of text
INFER = "`qdsl infer FILE --packed {}` finds the layout of a weight from its stored tensors and its values"
PACKED = ("U8", "I8", "I16", "U16", "I32", "U32")                # types of tensors that may hold packed codes
LEAST_AXIS = 8                                                   # of such a tensor; others are positions or counts
STRING_SHOWN = 1 << 16                                           # characters of a string, in data


def contents(path: Path, limit: int = SHARED_MEMORY, shapes: Shapes | None = None, check: bool = False) -> dict[str, Any]:
    """Contents of a checkpoint as plain data: a GGUF file or the first of a split set, a .safetensors file, or a folder of one
    or more models.

    limit: bytes of shared memory that a GPU gives a kernel.  shapes: of a model, for layers whose tensors do not say theirs.
    check: also reads the scales of every layer; those that are NaN or infinite are contradictions, and in a GGUF file problems.
    Raises CheckpointError for anything that is wrong in the file, OSError when it cannot be read.
    """
    path = gguf(path) or path
    if path.is_dir() or path.suffix == ".safetensors":
        models = names(path)
        if models != [""]:
            inside = [_of_safetensors(path / name, limit, shapes, check) for name in models]
            return {"file": str(path), "format": "safetensors", "models": inside}
        return _of_safetensors(path, limit, shapes, check)
    with GgufFile(path) as file:
        tensors = [_gguf_tensor(tensor, _scale_problem(file, tensor) if check else "") for tensor in file.tensors.values()]
        metadata = {key: _gguf_value(value) for key, value in file.metadata.stored().items()}
        return {"file": str(path), "format": "gguf", "version": file.version, "alignment": file.alignment,
                "files": len(file.paths), **_totals(tensors), "notes": [*file.notes, *_kind_note(file)], "metadata": metadata,
                **by_kind(key_findings(file)), "tensors": tensors}


def _kind_note(file: GgufFile) -> list[str]:
    """A note about a GGUF file that is no model."""
    if (kind := str(file.metadata.get("general.type", "model"))) != "model":
        return [f"general.type is {shown(kind)}, which is no model by itself"]
    return [] if file.tensors or "tokenizer.ggml.model" not in file.metadata else ["a vocabulary alone, without weights"]


def _of_safetensors(path: Path, limit: int, shapes: Shapes | None, check: bool) -> dict[str, Any]:
    """Contents of a safetensors file or folder: layers and tensors.  Files that the index names may be missing."""
    with Folder(path, partial=True) as folder:
        tensors = [_entry(name, folder.entry(name)) for name in folder.names()]
        pairs = {key: text for file in folder.files() for key, text in file.header.metadata.items()}
        layers, totals = detected_shaped_layers(folder, shapes), _totals(tensors)
        layers = with_checked_scales(folder, layers) if check else layers
        (count, nbytes), whole = count_weights(folder, layers), totals["total"]["nbytes"]
        totals["total"] = {**_total(len(tensors), count, nbytes), "nbytes": whole}
        notes = [f"{name} holds other weights, which are no part of the model" for name in folder.unread]
        notes += [f"bits per weight are without {whole - nbytes} bytes of layers of no known format"] if whole > nbytes else []
        notes += layers.notes
        return {"file": str(path), "format": "safetensors", "files": len(folder.shards), **totals,
                "notes": notes,
                "metadata": {key: {"type": "string", "value": text} for key, text in pairs.items()},
                **survey(folder, layers, limit), "tensors": tensors}


def _scale_problem(gguf: GgufFile, tensor: GgufTensor) -> str:
    """Why the scales of a tensor of blocks are wrong; '' if they are not, and for other tensors."""
    if tensor.type.name in TORCH or tensor.problem is not None or type_storage(tensor.type.name) is None:
        return ""
    try:
        packed_weight(gguf, tensor.name)
    except CheckpointError as error:
        return str(error)
    return ""


def _gguf_tensor(tensor: GgufTensor, problem: str) -> dict[str, Any]:
    row = {"name": tensor.name, "type": tensor.type.name, "shape": list(tensor.logical_shape), "nbytes": tensor.nbytes,
           "bits_per_weight": tensor.type.bits if tensor.type.is_readable else None, "start": tensor.start,
           "shard": tensor.shard}
    if tensor.orig_shape is not None:
        row["stored_shape"] = list(tensor.shape)
    problem = tensor.problem or problem
    return {**row, "problem": problem} if problem else row


def _entry(name: str, entry: Entry) -> dict[str, Any]:
    weights = math.prod(entry.shape)
    return {"name": name, "type": entry.dtype, "shape": list(entry.shape), "nbytes": entry.nbytes,
            "bits_per_weight": 8 * entry.nbytes / weights if weights else None, "start": entry.start}


def _gguf_value(value: Value) -> dict[str, Any]:
    """A metadata value for JSON, long strings cut; of an array the first elements."""
    if value.type.endswith("[]"):
        first = value.decoded(ARRAY_SHOWN)
        assert isinstance(first, list)
        return {"type": value.type, "count": value.count, "first": [_plain(element) for element in first]}
    return {"type": value.type, "value": _plain(value.decoded())}


def _plain(item: object) -> object:
    if isinstance(item, str):
        return item[:STRING_SHOWN]
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item


def _totals(tensors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and sizes of the readable tensors, in total and by type, the largest type first."""
    sums: dict[str, list[int]] = {}
    for tensor in tensors:
        if "problem" not in tensor:
            total = sums.setdefault(tensor["type"], [0, 0, 0])
            for place, more in enumerate((1, math.prod(tensor["shape"]), tensor["nbytes"])):
                total[place] += more
    rows = [_total(*total, type=type) for type, total in sums.items()]
    rows.sort(key=lambda row: (-row["nbytes"], row["type"]))
    whole = _total(*(sum(column) for column in zip(*sums.values(), strict=True))) if sums else _total(0, 0, 0)
    return {"total": whole, "types": rows, "problems": sum("problem" in tensor for tensor in tensors)}


def _total(tensors: int, weights: int, nbytes: int, **head: str) -> dict[str, Any]:
    return {**head, "tensors": tensors, "weights": weights, "nbytes": nbytes,
            "bits_per_weight": 8 * nbytes / weights if weights else None}


# As text

def lines(report: Mapping[str, Any], width: int | None = None) -> list[str]:
    """The report of `contents` as lines of text, none longer than `width`; without it, no cell is folded or shortened."""
    if "models" in report:
        return [line for entry in report["models"] for line in [*lines(entry, width), ""]][:-1]
    total = report["total"]
    kind = f"GGUF {report['version']}" if report["format"] == "gguf" else "safetensors"
    files = f" in {report['files']} files" if report["files"] > 1 else ""
    head = f"{escaped(report['file'])}: {kind}{files}, {counted(total['tensors'], 'tensor')}, " \
           f"{counted(total['weights'], 'weight')}, {_size(total['nbytes'])}, {_bits(total['bits_per_weight'])} bits per weight"
    tensors = [] if "layers" in report else [
        [escaped(entry["name"]), entry["type"], _shape(entry), _bits(entry["bits_per_weight"]), _size(entry["nbytes"]),
         entry.get("problem", "")] for entry in report["tensors"]]
    surveyed = [line for heads, rows, right in (tables(report) if "layers" in report else problem_tables(report))
                for line in _block(heads, [[escaped(cell) for cell in row] for row in rows], right, width)]
    settings = [[escaped(entry["source"]), escaped(entry["method"]), _settings(entry["settings"])]
                for entry in report.get("quantization", [])]
    types = [[row["type"], str(row["tensors"]), str(row["weights"]), _bits(row["bits_per_weight"]), _size(row["nbytes"])]
             for row in report["types"]]
    covered = {entry["name"] for entry in report["tensors"]} | {f"{entry['name']}.weight" for entry in report.get("layers", [])}
    metadata = [[escaped(key), value["type"], _value(value)] for key, value in report["metadata"].items() if key not in covered]
    texts = [head, *(f"note: {escaped(note)}" for note in report["notes"]),
             *([f"{counted(report['problems'], 'tensor')} cannot be read"] if report["problems"] else [])]
    return [*(part for text in texts for part in wrapped(text, width)),
            *_block(["metadata", "type", "value"], metadata, "", width),
            *_block(["quantization", "", "settings"], settings, "", width), *surveyed,
            *(part for text in _infer_hint(report) for part in wrapped(text, width)),
            *_block(["tensor", "type", "shape", "bits", "size", ""], tensors, "   >>", width),
            *_block(["type", "tensors", "numbers" if "layers" in report else "weights", "bits", "size"], types, " >>>>", width)]


def _infer_hint(report: Mapping[str, Any]) -> list[str]:
    """The command for a layer whose layout no format describes, or for a plain tensor of integers that may be a packed weight."""
    unknown = [name for layer in report.get("layers", []) if layer["format"] is None for name in layer["others"].values()]
    packed = [entry["name"] for entry in report.get("plain", [])
              if entry["type"] in PACKED and len(entry["shape"]) > 1 and min(entry["shape"]) >= LEAST_AXIS]
    names = [*unknown, *packed, *(["NAME"] if report.get("unknown") else [])]
    return ["", INFER.format(escaped(names[0]))] if names else []


def escaped(text: str, limit: int | None = None) -> str:
    """A string of a file for one line of a terminal, without control characters; cut at `limit` characters."""
    part = text if limit is None or len(text) <= limit else text[:limit - 3] + "..."
    return part if part.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in part)


def _value(value: Mapping[str, Any]) -> str:
    if "first" not in value:
        return escaped(str(value["value"]), TEXT_SHOWN)
    ellipsis = ["..."] if value["count"] > len(value["first"]) else []
    texts = [repr(element) if isinstance(element, str) else str(element) for element in value["first"]]
    return f"{value['count']}: " + escaped(", ".join([*texts, *ellipsis]), TEXT_SHOWN)


def _settings(settings: Mapping[str, Any]) -> str:
    """The settings that are strings, integers or lists of integers, as text."""
    return escaped(", ".join(f"{key} = {value}" for key, value in settings.items() if key != "quant_method" and (
        isinstance(value, int | str) or (isinstance(value, list) and all(type(one) is int for one in value)))), TEXT_SHOWN)


def _shape(tensor: Mapping[str, Any]) -> str:
    return " x ".join(map(str, tensor["shape"])) + (" (reshaped)" if "stored_shape" in tensor else "")


def _bits(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.4g}"


def _size(nbytes: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024 ** power:
            return f"{nbytes / 1024 ** power:.2f} {unit}"
    return f"{nbytes} B"


def _block(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str, width: int | None) -> list[str]:
    """The lines of a table after an empty line; none for no rows."""
    return ["", *table_lines(heads, rows, right, width)] if rows else []
