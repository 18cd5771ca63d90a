"""Builds specs into files of generated modules; writes only files that differ, and nothing outside the output folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qdsl.compiler.emit.module.module import module_files
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import load
from qdsl.core.producer import producer_of, read_yaml
from qdsl.host.files import make_folder, write_text

PRODUCERS = "producers"                                          # the folder of producers' JSON
MARK = "Do not edit: change the spec"


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """A file of a build: `change` is 'written', 'same' or 'removed'."""

    path: Path
    change: str


class BuildError(OSError):
    """A build must not touch this file."""


def files_of(spec: Path | str, name: str | None = None) -> dict[str, str]:
    """The generated files of a spec, by path below the output folder.  Raises SpecError."""
    return module_files(compile_spec(load(spec, name)))


def producer_files(folder: Path) -> dict[str, str]:
    """The JSON of all producers in a folder, by path below the output folder.  Raises ProducerError."""
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.yaml")):
        data = read_yaml(path)
        producer_of(data, str(path))
        files[f"{PRODUCERS}/{path.stem}.json"] = json_text(data) + "\n"
    return files


def build(spec: Path | str, out: Path, write: bool = True) -> list[BuiltFile]:
    """Write a spec's module below `out`, and remove stale files of earlier builds.

    write=False only reports what would change.  Raises SpecError, BuildError, OSError.
    """
    return list(write_files(files_of(spec), out, write))


def write_files(files: Mapping[str, str], out: Path, write: bool = True) -> Iterator[BuiltFile]:
    """As build, for files that are already printed.  Raises BuildError, OSError."""
    root = out.resolve()
    stem = next(iter(files)).split("/")[0].removesuffix(".py")
    for name, text in files.items():
        path = root / name
        _refuse_outside(path, root)
        same = path.is_file() and path.read_bytes() == text.encode()
        if write and not same:
            make_folder(path.parent)
            write_text(path, text)
        yield BuiltFile(path, "same" if same else "written")
    for path in _stale_files(root, stem, files):
        if write:
            path.unlink()
        yield BuiltFile(path, "removed")


def _refuse_outside(path: Path, root: Path) -> None:
    """Links could lead a write out of the folder; names cannot, because the spec's grammar allows no dots or slashes."""
    for part in (path, *path.parents):
        if part == root:
            return
        if part.is_symlink():
            raise BuildError(f"{part} is a link; generated files are not written through links")
    raise BuildError(f"{path} is outside {root}")


def _stale_files(root: Path, stem: str, files: Mapping[str, str]) -> Iterator[Path]:
    """Files of the same format that this build did not write, for example of a removed parameter value."""
    candidates = [root / f"{stem}.py", *sorted((root / stem).glob("*.py"))]
    if stem == PRODUCERS:
        candidates = sorted((root / stem).glob("*.json"))
    for path in candidates:
        is_ours = stem == PRODUCERS or (path.is_file() and MARK in path.read_text(errors="replace"))
        if path.is_file() and str(path.relative_to(root)) not in files and is_ours:
            yield path


def json_text(value: object, level: int = 0) -> str:
    """JSON text, with mappings and lists broken into lines if they do not fit one."""
    line = json.dumps(value)
    numbers = isinstance(value, list) and all(isinstance(number, int | float) for number in value)
    if len(line) + 2 * level <= 100 or numbers or not isinstance(value, Mapping | list):
        return line
    inner = "  " * (level + 1)
    if isinstance(value, Mapping):
        items = [f"{inner}{json.dumps(key)}: {json_text(item, level + 1)}" for key, item in value.items()]
    else:
        items = [inner + json_text(item, level + 1) for item in value]
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    return f"{opening}\n" + ",\n".join(items) + f"\n{'  ' * level}{closing}"
