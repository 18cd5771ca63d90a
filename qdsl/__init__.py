"""qdsl: one YAML file describes a quantized weight format; the compiler writes its reference, kernels and linear."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from qdsl.runtime.model import Report

__version__ = "0.1.0"


def load(spec: Path | str) -> ModuleType:
    """The generated module of a spec, a file or the name of one that ships, built into a cache folder and imported.

    The same spec gives the same module object; what was pickled of it opens in a process that has loaded the spec.
    Raises qdsl.spec.source.SpecError with everything that is wrong, qdsl.places.UnknownSpec, or OSError.
    """
    from qdsl.loading import load as load_spec
    from qdsl.places import find

    return load_spec(find(str(spec)))


def quantize_(model: nn.Module, format: ModuleType | Path | str, filter: Callable[[nn.Module, str], bool] | None = None,
              **options: Any) -> Report:
    """Replace the nn.Linear layers of a model by layers of a format, in place, one at a time.

    format: a generated module, or what `load` takes.  filter: whether a layer, given with its name, is to be replaced; all are
    without it.  options: those of the format's `quantize`.  Returns what was replaced, and what was left and why.  Raises
    qdsl.runtime.FormatError for options that the format does not have, before anything changes.
    """
    from qdsl.runtime.model import quantize_model

    module = format if isinstance(format, ModuleType) else _module(str(format))
    return quantize_model(model, module.FORMAT, filter, **options)


def planar_(model: nn.Module, filter: Callable[[nn.Module, str], bool] | None = None) -> Report:
    """Store the weights of a model's qdsl layers as GPU kernels read them fastest, in place, one at a time; exact and reversible.

    filter: whether a layer, given with its name, is looked at; all are without it.  Returns what was stored anew, and what was
    left and why.
    """
    from qdsl.runtime.model import planar_model

    return planar_model(model, filter)


def packed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The stored tensors of a model's qdsl layers, by their names in the model; a tied one under every name."""
    from qdsl.runtime.distributed import packed_parameters as find_packed

    return find_packed(model)


def ignore_packed_(model: nn.Module) -> set[nn.Parameter]:
    """Have DDP leave a model's packed tensors alone, and return them, as `fully_shard(ignored_params=...)` takes them.

    Call it before the model is wrapped.  Every rank then holds all packed tensors itself: load the same checkpoint on each.
    """
    from qdsl.runtime.distributed import ignore_packed_ as ignore

    return ignore(model)


def _module(spec: str) -> ModuleType:
    """The module of a spec; of one that ships with qdsl the module that ships too."""
    from importlib import import_module

    from qdsl.places import shipped

    if not Path(spec).is_file() and spec in [path.stem for path in shipped()]:
        return import_module(f"qdsl.generated.{spec}")
    return load(spec)
