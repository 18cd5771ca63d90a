"""Layers whose tensors do not determine N and K, such as optimum-quanto's: their shapes come from the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.files.folder import Folder

Shapes = Callable[[Folder], Mapping[str, tuple[int, ...]]]       # shapes of modules by name; empty if the model is unknown


def shaped_layers(folder: Folder, shapes: Shapes | None) -> Layers:
    """The layers of a folder.  shapes: called only if a layer's tensors do not determine its shape.

    Raises CheckpointError as `layers` does.
    """
    return detected_shaped_layers(folder, shapes).refuse_contradictions(folder.path)


def detected_shaped_layers(folder: Folder, shapes: Shapes | None) -> Layers:
    """The same for reports, as `detected_layers`."""
    recognised = detected_layers(folder)
    if shapes is None or not any(layer.lacks_shape for layer in recognised.layers):
        return recognised
    return detected_layers(folder, shapes=shapes(folder))
