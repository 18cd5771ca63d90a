"""Builds modules for specs of users into a cache, and imports them from there.

The cache is $QDSL_CACHE, or qdsl below the user's cache folder.  A module's folder is named after the hash of its text, so that
different specs, and different compiler versions, never share one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from qdsl.compiler.emit.module.build import files_of
from qdsl.core.places import UnknownSpec
from qdsl.host.files import cache_folder, make_cache_folder, write_text

# Threads must not see a partly imported module, nor parse in parallel, which crashes CPython 3.11.
_lock = threading.Lock()


def load(spec: Path) -> ModuleType:
    """Build a spec if necessary, and import its module.  Raises SpecError, OSError."""
    with _lock:
        files = files_of(spec)
        stem = next(iter(files)).split("/")[0].removesuffix(".py")
        folder = _written(files)
        module = f"qdsl_loaded_{folder.name}_{stem}"
        return sys.modules[module] if module in sys.modules else _imported(module, folder, stem, files)


def build_together(specs: Sequence[Path]) -> Path:
    """The cache folder with the modules and descriptions of these specs, built if necessary.

    Raises SpecError, OSError, and UnknownSpec if a format's name differs from its file's.
    """
    files: dict[str, str] = {}
    for spec in specs:
        own = files_of(spec)
        if f"{spec.stem}.json" not in own:
            name = Path(list(own)[-1]).stem
            raise UnknownSpec(f"{spec}: a spec's file must have the name of its format; rename it to {name}.yaml")
        files |= own
    folder = _written(files)
    for path in (folder, *(folder / spec.stem for spec in specs)):
        shutil.rmtree(path / "__pycache__", ignore_errors=True)  # run the text that was compared, not other bytecode
    return folder


def _written(files: Mapping[str, str]) -> Path:
    """Write these files to the cache folder that is named after their hash; returns the folder."""
    digest = hashlib.sha256("".join(f"{name}\n{text}" for name, text in sorted(files.items())).encode()).hexdigest()[:16]
    folder = cache_folder() / digest
    for name, text in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            make_cache_folder(path.parent)
            write_text(path, text)
    return folder


def _imported(module: str, folder: Path, stem: str, files: Mapping[str, str]) -> ModuleType:
    package = f"{stem}.py" not in files
    path = folder / stem / "__init__.py" if package else folder / f"{stem}.py"
    inside = [str(path.parent)] if package else None
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)   # run the text that was compared, not other bytecode
    spec = importlib.util.spec_from_file_location(module, path, submodule_search_locations=inside)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded
