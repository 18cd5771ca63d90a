"""The formats that ship with qdsl, one module each, and those of the folder of specs that QDSL_SPECS names.

In a checkout the first lie in generated/ beside the package, where readers look for them; a wheel has them here.
"""

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from qdsl import _further_modules
from qdsl.core.program import modules

_checkout = Path(__file__).resolve().parents[2] / "generated"
__path__ += [str(folder) for folder in (_checkout, *_further_modules()) if folder.is_dir()]


def __dir__() -> list[str]:
    """The names of all formats, whether imported or not."""
    return list(modules(__path__))


def __getattr__(name: str) -> Any:
    """The module of a format, imported on first use."""
    names = __dir__()
    if name in names:
        return import_module(f"qdsl.generated.{name}")
    near = [] if name.startswith("_") else get_close_matches(name.lower(), names, n=1)
    raise AttributeError(f"qdsl has no format {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
