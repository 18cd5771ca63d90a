"""qdsl: one YAML file describes a quantized weight format; the compiler writes its reference, kernels and linear."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

__version__ = "0.1.0"


def load(spec: Path | str) -> ModuleType:
    """The generated module of a spec, a file or the name of one that ships, built into a cache folder and imported.

    The same spec gives the same module object; what was pickled of it opens in a process that has loaded the spec.
    Raises qdsl.spec.source.SpecError with everything that is wrong, qdsl.places.UnknownSpec, or OSError.
    """
    from qdsl.loading import load as load_spec
    from qdsl.places import find

    return load_spec(find(str(spec)))
