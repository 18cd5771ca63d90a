"""Models of diffusers from one file: GGUF, and safetensors with the names of the model's authors or of ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.loaders import single_file_model

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.guard import unguarded
from qdsl.checkpoint.references import local_path
from qdsl.checkpoint.safetensors import CheckpointError
from qdsl.checkpoint.sources import FolderSource, GgufSource, Source
from qdsl.models.diffusers.quantizer import QdslDiffusersQuantizer
from qdsl.models.gguf_maps import TensorRule
from qdsl.models.mapped_source import MappedSource, logical_shape, tensor_names
from qdsl.models.plan import LoadError
from qdsl.models.save import QUANTIZATION
from qdsl.models.traced import kept_trace
from qdsl.models.transformers.config import QdslConfig

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")    # of names in files of one model
MARKER = "scaled_fp8"                                            # a tensor by which ComfyUI knows FP8 files with scales


def load_single_file(cls: Any, ref: str | Path, config: str | Path | Mapping[str, Any] | None = None, *,
                     subfolder: str | None = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
                     quantization_config: QdslConfig | None = None, **hub: Any) -> Any:
    """Load a GGUF or safetensors file as a model of diffusers, with its weights packed as they are in the file.

    cls: a class of diffusers.  ref: the file, a reference to one as `qdsl.open` takes it, or a folder with the names of
    diffusers, whatever its files are called.
    config: a model's config, or the folder or repository that has it; of a pipeline the one of this model is taken.  By default
    the library infers the repository from names and shapes; a folder has its own.
    dtype, or torch_dtype: of plain numbers and of products, by default float32.
    quantization_config: a format for plain weights.  hub: arguments of `load_config`, such as `local_files_only`.

    Names follow the library's own converter, which runs on numbers of rows.  Raises LoadError where the file does not fill the
    model, where the converter computes with numbers, and CheckpointError for damaged files.
    """
    path, options, dtype = local_path(ref), quantization_config or QdslConfig(), hub.pop("torch_dtype", dtype)
    with _opened(path) as file:
        if config is None and path.is_dir():
            config = path
        settings = config if isinstance(config, Mapping) else _config(cls, file, config, subfolder, hub)
        model = built(cls, settings, dtype)
        quantizer = QdslDiffusersQuantizer(options, pre_quantized=True)
        source = file if path.is_dir() else mapped(cls, model, file, settings)
        quantizer.fill(model, Checkpoint(path, {"": source}), device, cls._keep_in_fp32_modules or ())
    model.is_quantized, model.quantization_method, model.hf_quantizer = True, options.quant_method, quantizer
    return model.eval()


@contextmanager
def _opened(path: Path) -> Iterator[Source]:
    file: Source = GgufSource(path) if path.suffix == ".gguf" else FolderSource(Folder(path))
    try:
        if isinstance(file, GgufSource):
            for name in file.file.tensors:                       # raises where a tensor cannot be read: the file is cut off
                file.file.entry(name)
        yield file
    finally:
        file.close()


def _config(cls: Any, file: Source, config: str | Path | None, subfolder: str | None, hub: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model, without settings of a quantization."""
    mapping = single_file_model.SINGLE_FILE_LOADABLE_CLASSES.get(_loadable_class(cls), {})
    if config is None:
        tensors = {name: torch.empty(shape, device="meta") for name, shape in _shapes(file).items()}
        inferred = single_file_model.fetch_diffusers_config(tensors)
        config = inferred["pretrained_model_name_or_path"]
        subfolder = subfolder or mapping.get("default_subfolder") or inferred.get("subfolder")
    elif subfolder is None and Path(config, "model_index.json").is_file():
        subfolder = mapping.get("default_subfolder")
    settings: dict[str, Any] = dict(cls.load_config(str(config), subfolder=subfolder, **hub))
    return settings


def built(cls: Any, config: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
    """A model of a config, with its parameters on meta."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.float32)
    try:
        with init_empty_weights():
            return cls.from_config({key: value for key, value in unguarded(config).items() if key not in QUANTIZATION})
    finally:
        torch.set_default_dtype(default)


def mapped(cls: Any, model: Any, file: Source, config: Mapping[str, Any]) -> MappedSource:
    """A file under the names of a model: as they are, or as the library's converter for the class has them."""
    names, shapes = set(model.state_dict()), _shapes(file)
    errors: list[LoadError] = []
    candidates: list[dict[str, TensorRule]] = []
    for prefix in PREFIXES:
        own = {name.removeprefix(prefix): name for name in shapes}
        if prefix and not any(name.startswith(prefix) for name in shapes):
            continue
        try:
            rules = _rules(cls, names, {short: shapes[name] for short, name in own.items()}, config)
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
    unused = [name for name in file.plain if name not in used and not name.endswith(MARKER)]
    return MappedSource(file, rules, model, origin=origin, unused=unused, has_experts=False)


def _rules(cls: Any, names: set[str], shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, TensorRule]:
    """The rules of a model's tensors.  Raises LoadError where the library's converter cannot be followed."""
    loadable = _loadable_class(cls)
    if names <= shapes.keys() or loadable is None:
        return {name: TensorRule((name,)) for name in shapes}
    convert = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[loadable]["checkpoint_mapping_fn"]
    settings = json.dumps(dict(config), sort_keys=True, default=str)
    return kept_trace(lambda rows: convert(checkpoint=rows, config=dict(config)), shapes, diffusers.__version__, loadable,
                      settings)


def _loadable_class(cls: Any) -> str | None:
    """The class for which the library has a converter: this one, or one that it extends."""
    name: str | None = single_file_model._get_single_file_loadable_mapping_class(cls)
    return name


def _shapes(file: Source) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors; without those of layers that nobody recognises and that state none, and markers."""
    shapes = {}
    for name, layer in tensor_names(file).items():
        if name.endswith(MARKER):
            continue
        try:
            shapes[name] = logical_shape(file, name, layer)
        except CheckpointError:
            continue
    return shapes
