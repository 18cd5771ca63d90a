"""qdsl: one YAML file describes a quantized weight format; the compiler writes its reference, kernels and linear."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

__version__ = "0.1.0"


def load(spec: Path | str) -> ModuleType:
    """The generated module of a spec of one's own, built into a cache folder and imported.

    The same spec gives the same module object.  Raises qdsl.spec.source.SpecError with everything that is wrong, or OSError.
    """
    from qdsl.loading import load as load_spec

    return load_spec(Path(spec))
