"""Layers whose tensors do not determine N and K, such as optimum-quanto's, or whose places in the model are [K, N]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.detect.producers import producers
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


def transposed_by_type(folder: Folder, recognised: Layers) -> list[str]:
    """The layers [N, K] whose places in the model are [K, N], by the types of models in the config, without the models' classes.

    Tools that only code tensors leave weights [K, N], which the lengths of biases tell.
    """
    types = [*_types(folder.config)]
    modules = {name for own in producers().every for type in types for name in own.transposed_modules.get(type, ())}
    named = [layer for layer in recognised.layers
             if layer.format and layer.experts is None and layer.name.rpartition(".")[2] in modules]
    lengths = [(layer.shape, folder.entry(layer.others["bias"]).shape) for layer in named if "bias" in layer.others]
    return [] if any(shape[:1] != length for shape, length in lengths) else [layer.name for layer in named]


def _types(config: Mapping[str, Any]) -> Iterator[str]:
    """The types of a model and of those in it."""
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _types(value)
