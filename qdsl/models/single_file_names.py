"""Maps the tensor names of a single file (the authors' or ComfyUI's) to those of diffusers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.loaders import single_file_model

from qdsl.checkpoint.detect.guard import without_guard
from qdsl.checkpoint.detect.header_claims import scale_markers
from qdsl.checkpoint.detect.sources import Source
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.models.gguf_maps import TensorRule
from qdsl.models.mapped_source import MappedSource, layers_by_tensor, logical_shape
from qdsl.models.plan import LoadError
from qdsl.models.private_apis import single_file_class
from qdsl.models.save import QUANTIZATION
from qdsl.models.traced import kept_trace

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")    # of names in files of one model


def model_on_meta(cls: Any, config: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
    """A model with a config, with its parameters on meta."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.float32)
    try:
        with init_empty_weights():
            return cls.from_config({key: value for key, value in without_guard(config).items() if key not in QUANTIZATION})
    finally:
        torch.set_default_dtype(default)


def mapped_source(cls: Any, model: Any, file: Source, config: Mapping[str, Any]) -> MappedSource:
    """A file under the names of a model: its own names, or those that the library's converter for the class gives."""
    names, sizes = set(model.state_dict()), shapes(file)
    errors: list[LoadError] = []
    candidates: list[dict[str, TensorRule]] = []
    for prefix in PREFIXES:
        own = {name.removeprefix(prefix): name for name in sizes}
        if prefix and not any(name.startswith(prefix) for name in sizes):
            continue
        try:
            rules = _rules(cls, names, {short: sizes[name] for short, name in own.items()}, config)
        except LoadError as error:
            errors.append(error)
            continue
        candidates.append({target: replace(rule, sources=tuple(own[source] for source in rule.sources))
                           for target, rule in rules.items() if target in names})
        if len(candidates[-1]) == len(names):
            break
    if not candidates:
        raise LoadError(f"{file.path} does not become a {cls.__name__}: {errors[0]}") from errors[0]
    rules = max(candidates, key=len)
    used = {source for rule in rules.values() for source in rule.sources}
    origin = f"the converter of diffusers {diffusers.__version__}"
    markers = tuple(scale_markers())
    unused = [name for name in file.plain if name not in used and not name.endswith(markers)]
    return MappedSource(file, rules, model, origin=origin, unused=unused, has_experts=False)


def _rules(cls: Any, names: set[str], shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, TensorRule]:
    """The rules of a model's tensors.  Raises LoadError where the library's converter cannot be traced."""
    loadable = single_file_class(cls)
    if names <= shapes.keys() or loadable is None:
        return {name: TensorRule((name,)) for name in shapes}
    convert = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[loadable]["checkpoint_mapping_fn"]
    settings = json.dumps(dict(config), sort_keys=True, default=str)
    return kept_trace(lambda rows: convert(checkpoint=rows, config=dict(config)), shapes, diffusers.__version__, loadable,
                      settings)


def shapes(file: Source) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors, without markers and layers of unknown shapes."""
    sizes, markers = {}, tuple(scale_markers())
    for name, layer in layers_by_tensor(file).items():
        if name.endswith(markers):
            continue
        try:
            sizes[name] = logical_shape(file, name, layer)
        except CheckpointError:
            continue
    return sizes
