"""Layers whose tensors do not say what N and K are, such as optimum-quanto's, by the shapes that their model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder

Shapes = Callable[[Folder], Mapping[str, tuple[int, ...]]]       # of modules by name; nothing where the model is not known


def shaped_layers(folder: Folder, shapes: Shapes | None) -> Layers:
    """The layers of a folder.  shapes: asked only where a layer's tensors do not say its shape."""
    recognised = layers(folder)
    if shapes is None or not any(layer.lacks_shape for layer in recognised.layers):
        return recognised
    return layers(folder, shapes=shapes(folder))
