"""The parameters of a model, from the class that its config names: their shapes, and what a folder has otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from qdsl.checkpoint.detect.guard import CLASS, without_guard
from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.detect.ledger import Finding, Kind
from qdsl.checkpoint.detect.shaped import transposed_by_type
from qdsl.checkpoint.detect.sources import FolderSource
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import shown
from qdsl.jobs.engine import RewriteError
from qdsl.models.names import Names
from qdsl.models.packed_steps import holds_numbers
from qdsl.models.plan import renamed
from qdsl.models.save import QUANTIZATION
from qdsl.models.stacks import stacked_layer_shapes, usual_stacks
from qdsl.runtime.torch.products import product_of


def model_shapes(folder: Folder) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters, and of single experts' weights where the folder stores these, by tensor name.

    Names are those of the class, with and without the prefix of its base model.  Raises RewriteError for a config that names no
    class of diffusers or transformers, and where the library is not installed.
    """
    model = model_on_meta(folder)
    parameters = Names(model).parameters
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    stacks = usual_stacks(parameters, FolderSource(folder, is_described=True), partial(renamed, rename=None))
    shapes |= {f"{name}.weight": shape for name, shape in stacked_layer_shapes(parameters, stacks).items()}
    if prefix := getattr(model, "base_model_prefix", ""):
        start = f"{prefix}."
        shapes |= {name.removeprefix(start) if name.startswith(start) else start + name: shape for name, shape in shapes.items()}
    return shapes


def class_findings(folder: Folder, recognised: Layers) -> tuple[list[Finding], list[str]]:
    """The parameters that the folder's class of transformers has and the folder lacks, and layers that the class has as [K, N].

    Without such a class only the types of models tell the latter.  A head that shares the embedding's weight is not missing.
    recognised: the layers of the folder.
    """
    if CLASS in folder.config or folder.config.get("auto_map") or any(group.unnamed for group in recognised.groups):
        return [], []
    try:
        model = model_on_meta(folder)
    except RewriteError:
        return [], transposed_by_type(folder, recognised)
    from qdsl.models.conversions import Conversions, missing_parameters  # imports transformers

    names = Conversions.of(model)
    packed = {name for layer in recognised.layers for name in (layer.name, f"{layer.name}.weight", *layer.others.values())}
    stored = {*recognised.plain, *packed, *(part for group in recognised.groups for part in group.parts)}
    loaded = {names.target(name)[0] for name in stored} & names.tensors.keys()
    absent = missing_parameters(model, names.tensors.keys() - loaded, ()) if loaded else []
    return ([Finding(Kind.MISSING, "", name, "absent", type(model).__name__) for name in absent],
            _transposed(model, [(layer, names.rename(layer.name)) for layer in recognised.layers
                                if layer.format and layer.experts is None]))


def _transposed(model: nn.Module, places: Sequence[tuple[Layer, str | None]]) -> list[str]:
    """The layers [N, K] of modules with a weight [K, N].  Tools that only code tensors leave [K, N], also of square ones."""
    modules: dict[str | None, Any] = {**dict(model.named_modules())}
    shapes = [(layer, tuple(own.weight.shape)) for layer, name in places if (own := modules.get(name)) is not None
              and not holds_numbers(layer) and product_of(own) == "transposed"]
    is_coded = any(layer.shape == shape != shape[::-1] for layer, shape in shapes)
    return [layer.name for layer, shape in shapes if layer.shape == shape[::-1] and not (is_coded and layer.shape == shape)]


def model_on_meta(folder: Folder) -> Any:
    """The model of a folder's config, on meta.  Raises RewriteError where no library builds it."""
    config = {key: value for key, value in without_guard(folder.config).items() if key not in QUANTIZATION}
    library = "diffusers" if CLASS in config else "transformers"
    names = [config.get(CLASS)] if library == "diffusers" else config.get("architectures") or []
    if not names:
        raise RewriteError("config.json names no class of diffusers or transformers")
    try:
        cls = getattr(import_module(library), str(names[0]), None)
    except ImportError:
        raise RewriteError(f"config.json names {shown(str(names[0]))}, and {library} is not installed") from None
    if cls is None:
        raise RewriteError(f"config.json names {shown(str(names[0]))}, which {library} does not have")
    try:
        with torch.device("meta"):
            return cls.from_config(config) if library == "diffusers" else cls(cls.config_class.from_dict(config))
    except Exception as error:                                   # of many kinds, by what is wrong
        raise RewriteError(f"{names[0]} of {library} cannot be built by config.json: {error}") from error
