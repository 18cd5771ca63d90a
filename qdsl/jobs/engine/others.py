"""The files of a checkpoint besides its weights, and what `--force` replaces: files known by their contents, and nothing else."""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from qdsl.checkpoint.files import crc
from qdsl.checkpoint.files.components import PIPELINE
from qdsl.checkpoint.files.folder import INDEX_LIMIT, WHOLE, Folder, read_object
from qdsl.checkpoint.files.safetensors import CheckpointError, read_header, shown
from qdsl.host.files import check_output
from qdsl.jobs.engine import OccupiedFolder, RewriteError

# Weights: those of an input are in other files of the output, and others would be of another model.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".tflite", ".npz")
INDICES = tuple(f"{suffix}.index.json" for suffix in WEIGHTS)
INDEX = ".safetensors.index.json"
# Files next to weights that libraries read with a model: JSON objects under exactly these names.
SETTINGS = (PIPELINE, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json",
            "special_tokens_map.json", "preprocessor_config.json", "processor_config.json")
LISTED = 4                                                       # files in a message
ADAPTER = re.compile(r"(^|[._])lora[._]")                        # in the names of PEFT, diffusers and Kohya
_PART = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


def regular_files(root: Path) -> Iterator[Path]:
    """The regular files of a folder and of its subfolders, without hidden subfolders such as .git."""
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from regular_files(path)
        elif path.is_file():
            yield path


def is_private(path: Path, root: Path) -> bool:
    """Whether a file is hidden, or a link out of its folder, other than to a blob of the hub's cache: it may be a key."""
    target = path.resolve()
    return path.name.startswith(".") or (root.resolve() not in target.parents and target.parent.name != "blobs")


def other_files(source: Path) -> dict[str, Path]:
    """The files of an input that an output has too, by name relative to the folder: all but weights and private ones."""
    files = regular_files(source) if source.is_dir() else ()
    return {str(path.relative_to(source)): path for path in files
            if not path.name.endswith((*WEIGHTS, *INDICES, crc.FILE)) and not is_private(path, source)}


def check_folder(out: Path, source: Path, *others: str | Path | None) -> None:
    """Raises OutputError where an output folder is an input or holds one: `source`, the config next to a file, and `others`."""
    config = source.with_name("config.json")
    check_output(out, source, *([config] if source.is_file() and config.exists() else []),
                 *(path for path in others if path is not None and Path(path).exists()))


def refuse_adapter(folder: Folder) -> None:
    """Raises RewriteError for a folder whose matrices are all those of a LoRA adapter, which changes a model and is none."""
    matrices = [name for name in folder.names() if len(folder.entry(name).shape) == 2]
    if matrices and all(ADAPTER.search(name) for name in matrices):
        raise RewriteError(f"{folder.path}: a LoRA adapter and no model: merge it into its model first (docs/peft.md)")


def replaceable_files(out: Path) -> list[Path]:
    """The files of the checkpoint in a folder, in the order in which they may be removed: whatever is left is still known.

    They are weights that an index or qdsl's list names, or whose names are those of a model's files; indices; settings next to
    weights; and what qdsl's list names, unless it has changed.  Subfolders are a pipeline's components, or of that list.
    Raises OccupiedFolder for other files that a reader would take for weights.
    """
    own = _json_object(out / crc.FILE) or {}
    others = [out / name for name, sum in _json_mapping(own, "others").items() if _is_unchanged(out, name, sum)]
    components = (_json_object(out / PIPELINE) or {}).keys() | {path.parent.name for path in others if path.name == crc.FILE}
    folders = [out, *(path for path in sorted(out.iterdir()) if path.name in components and _is_folder(path))]
    models = [_model_files(folder, _json_mapping(_json_object(folder / crc.FILE), "crc32")) for folder in folders]
    weights = [path for files in models for path in files if path.name.endswith(WEIGHTS)]
    mine = list(dict.fromkeys([*others, *(path for files in models for path in files), *([out / crc.FILE] if own else [])]))
    foreign = [path for folder in folders for path in sorted(folder.iterdir())
               if path.name.endswith((".safetensors", INDEX)) and not path.name.startswith(".") and path not in mine]
    _refuse(out, foreign)
    ranks = {crc.FILE: 3, **{path.name: 2 for path in mine if path.name.endswith(INDEX)}, **{path.name: 1 for path in weights}}
    return sorted(mine, key=lambda path: (ranks.get(path.name, 0), path.parent == out))


def has_checkpoint(files: Sequence[Path]) -> bool:
    """Whether `replaceable_files` files are a checkpoint: weights, an index, or qdsl's list."""
    return any(path.name.endswith((".safetensors", INDEX, crc.FILE)) for path in files)


def check_overwrites(out: Path, new: Mapping[str, Path | None], mine: Sequence[Path] = ()) -> None:
    """Raises OccupiedFolder where new files would replace anything but `mine` and files with the same bytes.

    new: the files, by name relative to `out`; None where their contents are not known yet.
    """
    _refuse(out, [path for name, file in new.items() if (path := _obstacle(out, name, file)) and path not in mine])


def _refuse(out: Path, foreign: Sequence[Path]) -> None:
    names = [str(path.relative_to(out)) for path in dict.fromkeys(foreign)]
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise OccupiedFolder(f"{out}: a checkpoint takes the place of its own files alone, and nothing says that "
                             f"{', '.join(map(shown, names[:LISTED]))}{more} belong to one; move them, or write another folder")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _model_files(folder: Path, listed: Mapping[str, Any]) -> list[Path]:
    """The weights, indices and settings in the folder of one model.  listed: the weights that qdsl wrote, by name."""
    indices = {path: _json_mapping(index, "weight_map") for path in folder.glob(f"*{INDEX}")
               if (index := _json_object(path)) and "weight_map" in index}
    named = {*listed, *(name for index in indices.values() for name in index.values() if isinstance(name, str))}
    weights = [path for path in folder.glob("*.safetensors") if path.is_file()
               and (path.name in named or ((path.name in WHOLE or _PART.fullmatch(path.name)) and _is_weights(path)))]
    pipeline = "_class_name" in (_json_object(folder / PIPELINE) or {})
    has_model = weights or listed or pipeline
    settings = [path for name in SETTINGS if _json_object(path := folder / name) is not None] if has_model else []
    return [*weights, *indices, *settings]


def _is_weights(path: Path) -> bool:
    try:
        return bool(read_header(path).tensors)
    except (CheckpointError, OSError):
        return False


def _json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or another content."""
    try:
        return read_object(path, INDEX_LIMIT, constants=True) if path.is_file() else None
    except (CheckpointError, OSError):
        return None


def _json_mapping(content: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """A JSON object in another one; {} where it is missing, or anything else."""
    value = (content or {}).get(key)
    return value if isinstance(value, dict) else {}


def _is_unchanged(out: Path, name: str, sum: object) -> bool:
    """Whether a listed file lies in the folder, reached by no link and not hidden, and has its checksum."""
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or any(part.startswith(".") for part in parts):
        return False
    links = any(out.joinpath(*parts[:count]).is_symlink() for count in range(1, len(parts) + 1))
    return not links and (out / name).is_file() and crc.file_checksum(out / name) == sum


def _obstacle(out: Path, name: str, file: Path | None) -> Path | None:
    """What lies where a new file goes and is lost by it: another file, a folder, or a link or file in place of its folder."""
    path, parts = out / name, PurePath(name).parts
    for parent in (out.joinpath(*parts[:count]) for count in range(1, len(parts))):
        if os.path.lexists(parent) and not _is_folder(parent):
            return parent
    is_same = file is not None and path.is_file() and not path.is_symlink() and filecmp.cmp(path, file, shallow=False)
    return path if os.path.lexists(path) and not is_same else None
