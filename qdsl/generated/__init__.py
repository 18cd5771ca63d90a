"""The formats that ship with qdsl, one module each, and those of the folder of specs that QDSL_SPECS names.

In a checkout the first lie in generated/ beside the package, where readers look for them; a wheel has them here.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from qdsl import _further_modules
from qdsl.core.program import program_files

_checkout = Path(__file__).resolve().parents[2] / "generated"
__path__ += [str(folder) for folder in (_checkout, *_further_modules()) if folder.is_dir()]


class _AfterAllFinders:
    """Names similar formats where no finder has found a module of this package."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for a module of this package."""
        parent, _, own = name.rpartition(".")
        if parent == __name__:
            raise ModuleNotFoundError(_unknown(own), name=own)   # `from ... import` hides errors that have the whole name


def __dir__() -> list[str]:
    """The names of all formats, whether imported or not."""
    return list(program_files(__path__))


def __getattr__(name: str) -> Any:
    """The module of a format, imported on first use."""
    if name.startswith("_") or name not in __dir__():
        raise AttributeError(_unknown(name))
    return import_module(f"{__name__}.{name}")


def _unknown(name: str) -> str:
    """The message for a name that is no format, with the names that resemble it."""
    from qdsl.core.text import join_names, name_key, similar_names

    near = [] if name.startswith("_") else similar_names(name_key(name), __dir__())
    return f"qdsl has no format {name!r}" + (
        f"; did you mean {join_names(near, 'or')}?" if near else ": dir(qdsl.generated) has all, and qdsl.load takes words like 'gptq'")


sys.meta_path.append(_AfterAllFinders)
