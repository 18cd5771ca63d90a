"""The folders of specs and generated modules: next to the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from qdsl.core.text import join_names, name_key, similar_names

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent
FOLDER_VARIABLE = "QDSL_SPECS"                                   # the environment variable with a folder of further specs
CHECKPOINT_FILES = (".gguf", ".safetensors")                     # endings of files that are no specs


def check_regular(path: Path) -> Path:
    """The path of a file that can be read at once.  Raises OSError for a pipe or a device, whose reader could wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: not a regular file")
    return path


def specs() -> Path:
    """The folder of the specs that ship with qdsl."""
    inside = PACKAGE / "specs"
    return inside if inside.is_dir() else CHECKOUT / "specs"


def generated() -> Path:
    """The folder of the modules that ship with qdsl."""
    outside = CHECKOUT / "generated"
    return outside if outside.is_dir() and not (PACKAGE / "specs").is_dir() else PACKAGE / "generated"


def text() -> Path:
    """A short English text that ships with qdsl, to measure language models with: the beginning of Alice in Wonderland."""
    inside = PACKAGE / "alice.txt"
    return inside if inside.is_file() else CHECKOUT / "tests" / "data" / "text" / "alice.txt"


def table_of(module: str) -> dict[str, Any]:
    """The table that lies beside a module's file, as TOML."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def install_command(extras: str) -> str:
    """What to type to install qdsl with optional dependencies: the distribution is on no package index."""
    return f"`pip install '.[{extras}]'` in a clone of qdsl"


def shipped() -> list[Path]:
    """The specs that ship with qdsl, in the order of their names."""
    return sorted(specs().glob("*.yaml"))


class UnknownSpec(ValueError):
    """A name that is neither a file nor a format, or an unsuitable folder of specs."""


def user_specs() -> list[Path]:
    """The specs of the folder in QDSL_SPECS, by name; none if it is not set.

    Raises UnknownSpec if it is not a folder with specs, and for a name of a shipped format.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    paths = sorted(Path(folder).glob("*.yaml")) if folder else []
    if folder and not paths:
        raise UnknownSpec(f"{folder} is no folder with .yaml files")
    names = {path.stem for path in shipped()}
    if taken := [path for path in paths if path.stem in names]:
        raise UnknownSpec(f"{taken[0]} has the name of a format that ships with qdsl; rename the file and its format")
    return paths


def find_spec(name: str) -> Path:
    """A spec by its path, or by the name, in any letters, of a shipped one or one in the folder of QDSL_SPECS.

    Raises UnknownSpec with suggestions for other names.
    """
    own, key = user_specs(), name_key(name)
    for path in (Path(name), specs() / f"{key}.yaml", *(path for path in own if path.stem in (name, key))):
        if path.is_file() and path.suffix not in CHECKPOINT_FILES:
            return path
    near = similar_names(key.removesuffix(".yaml"), [path.stem for path in (*shipped(), *own)])
    expected = "expected a file, or a name that `qdsl list` prints"
    if Path(name).is_dir() or name.endswith(CHECKPOINT_FILES):
        raise UnknownSpec(f"'{name}' is no spec: `qdsl.open` and `qdsl inspect` read checkpoints; {expected}")
    kind = "file" if name.endswith((".yaml", ".yml")) else "spec"
    raise UnknownSpec(f"no {kind} '{name}': {expected}" + (f"; did you mean {join_names(near, 'or')}?" if near else ""))
