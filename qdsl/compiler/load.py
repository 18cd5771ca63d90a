"""Modules of specs that do not ship with qdsl: built into a cache, imported from there.

The cache is $QDSL_CACHE, or qdsl below the user's cache folder.  A module lies in a folder named after its own text, so specs
that differ never meet, and a compiler that writes something else writes somewhere else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from qdsl.compiler.emit.module.build import files_of
from qdsl.host.files import cache_folder, make_cache_folder, write_text

# No thread gets a module that is still being imported, and none parses while another does, which CPython 3.11 cannot bear.
_lock = threading.Lock()


def load(spec: Path) -> ModuleType:
    """Build, if need be, and import.  Raises SpecError, OSError."""
    with _lock:
        files = files_of(spec)
        digest = hashlib.sha256("".join(f"{name}\n{text}" for name, text in sorted(files.items())).encode()).hexdigest()[:16]
        stem = next(iter(files)).split("/")[0].removesuffix(".py")
        module = f"qdsl_loaded_{digest}_{stem}"
        if module in sys.modules:
            return sys.modules[module]
        folder = cache_folder() / digest
        for name, text in files.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != text.encode():
                make_cache_folder(path.parent)
                write_text(path, text)
        return _imported(module, folder, stem, files)


def _imported(module: str, folder: Path, stem: str, files: Mapping[str, str]) -> ModuleType:
    package = f"{stem}.py" not in files
    path = folder / stem / "__init__.py" if package else folder / f"{stem}.py"
    inside = [str(path.parent)] if package else None
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)   # the text that was compared is run, and no other's bytecode
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
