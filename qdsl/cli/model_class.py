"""What the class of a model says of a folder, for commands that work without transformers and diffusers, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any


def model_shapes(folder: Any) -> Any:
    """The shapes of the parameters of a folder's model, from the class in its library."""
    from qdsl.jobs.engine import RewriteError

    try:
        from qdsl.models.shapes import model_shapes
    except ImportError as error:
        raise RewriteError(f"no class of the model is installed, {error}") from None
    return model_shapes(folder)


def layer_shapes(folder: Any) -> dict[str, Any]:
    """The shapes of weights by module name; {} where the model's class is unknown."""
    from qdsl.jobs.engine import RewriteError

    try:
        return {name.removesuffix(".weight"): shape for name, shape in model_shapes(folder).items()}
    except RewriteError:
        return {}


def compared(folder: Any, detected: Any) -> tuple[Any, list[str]]:
    """The layers of a folder, with findings on parameters that it lacks, and the names of those that its class has as [K, N].

    Where transformers is not installed, only types of models are known.
    """
    from qdsl.checkpoint.detect.shaped import transposed_by_type

    try:
        from qdsl.models.shapes import class_findings
    except ImportError:
        return detected, transposed_by_type(folder, detected)
    missing, transposed = class_findings(folder, detected)
    return replace(detected, findings=[*detected.findings, *missing]), transposed


def missing_in(path: Path) -> list[Any]:
    """The findings on parameters that the models of a folder lack."""
    from qdsl.checkpoint.detect.layers import detected_layers
    from qdsl.checkpoint.detect.ledger import Kind
    from qdsl.checkpoint.files import components

    with components.open_models(path) as models:
        every = [own for folder in models.values() for own in compared(folder, detected_layers(folder))[0].findings]
    return [own for own in every if own.kind is Kind.MISSING]
