"""Builds modules for specs of users into a cache, and imports them from there.

The cache is $QDSL_CACHE, or qdsl below the user's cache folder.  A module's folder is named after the hash of its text, so that
different specs, and different compiler versions, never share one.  What is executed is the text that this process has generated.
Its file is for those who read it.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from qdsl.compiler.emit.module.build import files_of
from qdsl.core.places import UnknownSpec, generated
from qdsl.host.private import check_only, private_folder, read_private, write_private

# Threads must not see a partly imported module, nor parse in parallel, which crashes CPython 3.11.
_lock = threading.Lock()


class GeneratedText(MetaPathFinder, ExecutionLoader):
    """Imports modules from text in memory.  files: the path and the text of each, by the module's full name."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, str]] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module whose text is here."""
        return spec_from_loader(name, self) if name in self.files else None

    def get_filename(self, name: str) -> str:
        """The path of the module's file."""
        return self.files[name][0]

    def get_source(self, name: str) -> str:
        """The module's text."""
        return self.files[name][1]

    def is_package(self, name: str) -> bool:
        """Whether the module has submodules."""
        return self.get_filename(name).endswith("__init__.py")

    def exec_module(self, module: ModuleType) -> None:
        """Run the text; Triton, which compiles kernels from it, and tracebacks read it from memory, too."""
        path, text = self.files[module.__name__]
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        super().exec_module(module)


def load(spec: Path) -> ModuleType:
    """Build a spec if necessary, and import its module: that of qdsl.generated if it is the same text.

    Raises SpecError, OSError.
    """
    with _lock:
        files = files_of(spec)
        stem = next(iter(files)).split("/")[0].removesuffix(".py")
        if _ships(files):
            return import_module(f"qdsl.generated.{stem}")
        folder = _write_to_cache(files)
        module = f"qdsl_loaded_{folder.name}_{stem}"
        _offer_import(module, folder, stem, files)
        loaded = import_module(module)
        loaded.FORMAT.path = str(spec.resolve())
        return loaded


def _ships(files: Mapping[str, str]) -> bool:
    """Whether these are the files of a format that ships."""
    return all((path := generated() / name).is_file() and path.read_bytes() == text.encode() for name, text in files.items())


def build_together(specs: Sequence[Path]) -> Path:
    """The cache folder with the modules and descriptions of these specs, built if necessary.

    Raises SpecError, OSError, and UnknownSpec if a format's name differs from its file's.
    """
    files: dict[str, str] = {}
    for spec in specs:
        own = files_of(spec)
        name = list(own)[-1].split("/")[0].removesuffix(".py")
        if name != spec.stem:
            raise UnknownSpec(f"{spec}: a spec's file must have the name of its format; rename it to {name}.yaml")
        files |= own
    folder = _write_to_cache(files)
    for spec in specs:
        _offer_import(f"qdsl.generated.{spec.stem}", folder, spec.stem, files)
    return folder


def _write_to_cache(files: Mapping[str, str]) -> Path:
    """Write these files to the cache folder that is named after their hash; returns the folder.

    Raises UnsafeCache if others can write there, or if it has other files.
    """
    digest = hashlib.sha256("".join(f"{name}\n{text}" for name, text in sorted(files.items())).encode()).hexdigest()[:16]
    folders: dict[str, list[str]] = {digest: []}
    for name in files:
        parent, _, own = f"{digest}/{name}".rpartition("/")
        folders.setdefault(parent, []).append(own)
    for name, inside in folders.items():
        check_only(private_folder(name), [*inside, *(other.rpartition("/")[2] for other in folders if other != digest)])
    folder = private_folder(digest)
    for name, text in files.items():
        if read_private(folder / name) != text.encode():
            write_private(folder / name, text.encode())
    return folder


def _offer_import(module: str, folder: Path, stem: str, files: Mapping[str, str]) -> None:
    """Have imports of a module, and of its submodules, run these texts."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, GeneratedText)), None)
    if finder is None:
        finder = GeneratedText()
        sys.meta_path.insert(0, finder)
    for name, text in files.items():
        own = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if name.endswith(".py") and own.split(".")[0] == stem:
            finder.files[module + own.removeprefix(stem)] = str(folder / name), text
