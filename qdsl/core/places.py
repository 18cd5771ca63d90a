"""Where specs and generated modules lie: in a checkout beside the package, in a wheel inside it."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent


def specs() -> Path:
    """The folder of the specs that ship with qdsl."""
    inside = PACKAGE / "specs"
    return inside if inside.is_dir() else CHECKOUT / "specs"


def generated() -> Path:
    """The folder of the modules that ship with qdsl."""
    outside = CHECKOUT / "generated"
    return outside if outside.is_dir() and not (PACKAGE / "specs").is_dir() else PACKAGE / "generated"


def shipped() -> list[Path]:
    """The specs that ship with qdsl, in the order of their names."""
    return sorted(specs().glob("*.yaml"))


class UnknownSpec(ValueError):
    """A name that is neither a file nor a format that ships with qdsl."""


def find(name: str) -> Path:
    """A spec by its path, or by the name of one that ships with qdsl.  Raises UnknownSpec."""
    for path in (Path(name), specs() / f"{name}.yaml"):
        if path.is_file():
            return path
    names = [path.stem for path in shipped()]
    near = get_close_matches(name.lower().removesuffix(".yaml"), names, n=1)
    raise UnknownSpec(f"no spec '{name}': expected a file, or one of {', '.join(names)}"
                      + (f"; did you mean '{near[0]}'?" if near else ""))
