"""Loads models of diffusers from a single file: GGUF, or safetensors with the tensor names of the authors or of ComfyUI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import single_file_model

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.guard import describes_model
from qdsl.checkpoint.detect.sources import FolderSource, GgufSource, Source
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.gguf import is_gguf
from qdsl.checkpoint.files.references import available, local_path
from qdsl.models.base import Base, check_described, complete_folder, stored_config
from qdsl.models.diffusers.quantizer import QdslDiffusersQuantizer
from qdsl.models.names import Names
from qdsl.models.private_apis import float32_modules, single_file_class
from qdsl.models.single_file_names import mapped_source, model_on_meta, shapes
from qdsl.models.transformers.config import QdslConfig

REMEDY = ("pass base=, a folder or repository of the model that it was made of; to load a pipeline, pass the folder to "
          "`from_pretrained` of the base's pipeline, as in transformer=FOLDER")


def load_single_file(cls: Any, ref: str | Path, config: str | Path | Mapping[str, Any] | None = None, *,
                     subfolder: str | None = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
                     quantization_config: QdslConfig | None = None, base: str | Path | None = None, fetch: Base | None = None,
                     **hub: Any) -> Any:
    """Loads a GGUF or safetensors file as a model of diffusers, with its weights packed as in the file.

    cls: a class of diffusers.  ref: the file, a reference to one as `qdsl.open` takes it, or a folder with the names of
    diffusers, whatever its files are called.
    config: a model's config, or the folder or repository that has it; of a pipeline the one of this model is taken.  By default
    the library infers the repository from names and shapes; a folder has its own.
    base: the folder or repository of the model that a folder's weights were made of.  Its config is taken where the folder has
    none that describes the model, and its plain tensors for parameters that have none; fetch: returns the folder that has them.
    dtype, or torch_dtype: of plain numbers and of products, by default float32.
    quantization_config: a format for plain weights.  hub: arguments of `load_config`, such as `local_files_only`.

    Names follow the library's own converter, which runs on numbers of rows.  Raises LoadError where the file does not fill the
    model, where the converter computes with numbers, and CheckpointError for damaged files.
    """
    path, options, dtype = local_path(ref), quantization_config or QdslConfig(), hub.pop("torch_dtype", dtype)
    if options.verify:
        checksums.check(path, is_optional=True)
    if fetch is None and base is not None:
        fetch = partial(_tensors_of, cls, base, subfolder)
    with _open_file(path) as file:
        has_own_names = isinstance(file, FolderSource) and (path.is_dir() or bool(file.groups))
        if config is None and has_own_names:
            config, subfolder = _config_of(path, base, subfolder)
        settings = config if isinstance(config, Mapping) else _config(cls, file, config, subfolder, hub)
        model = model_on_meta(cls, settings, dtype)
        quantizer = QdslDiffusersQuantizer(options, pre_quantized=True)
        if isinstance(file, FolderSource) and has_own_names:
            complete_folder(file, Names(model), settings, fetch)
        source = file if has_own_names else mapped_source(cls, model, file, settings)
        quantizer.fill(model, Checkpoint(path, {"": source}), device, float32_modules(cls))
    model.is_quantized, model.quantization_method, model.hf_quantizer = True, options.quant_method, quantizer
    return model.eval()


def _config_of(path: Path, base: str | Path | None, subfolder: str | None) -> tuple[str | Path | Mapping[str, Any], str | None]:
    """The config of a model in a folder, or the base and its subfolder that have it.

    Raises LoadError where neither describes the model.
    """
    stored = stored_config(path)
    if base is None and subfolder is None:
        check_described(path, stored, REMEDY)
    if subfolder is not None and base is None:
        return path, subfolder
    return (base, subfolder) if base is not None and not describes_model(stored) else (stored, None)


def _tensors_of(cls: Any, base: str | Path, subfolder: str | None) -> Path:
    """The local folder with a base's tensors, downloaded if remote."""
    path = local_path(base)
    return path / (subfolder or _default_subfolder(cls, path) or "")


def _default_subfolder(cls: Any, folder: str | Path) -> str | None:
    """The folder of a model of a class in a pipeline's; None for a folder of one model."""
    mapping = single_file_model.SINGLE_FILE_LOADABLE_CLASSES.get(single_file_class(cls), {})
    return mapping.get("default_subfolder") if Path(folder, "model_index.json").is_file() else None


@contextmanager
def _open_file(path: Path) -> Iterator[Source]:
    file: Source = GgufSource(path) if is_gguf(path) else FolderSource(Folder(path))
    try:
        if isinstance(file, GgufSource):
            for name in file.file.tensors:                       # raises where a tensor cannot be read: the file is cut off
                file.file.entry(name)
        yield file
    finally:
        file.close()


def _config(cls: Any, file: Source, config: str | Path | None, subfolder: str | None, hub: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model, without quantization settings."""
    mapping = single_file_model.SINGLE_FILE_LOADABLE_CLASSES.get(single_file_class(cls), {})
    if config is None:
        tensors = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes(file).items()}
        inferred = single_file_model.fetch_diffusers_config(tensors)
        config = inferred["pretrained_model_name_or_path"]
        subfolder = subfolder or mapping.get("default_subfolder") or inferred.get("subfolder")
    elif subfolder is None:
        subfolder = _default_subfolder(cls, config)
    settings: dict[str, Any] = dict(cls.load_config(str(available(config, **hub)), subfolder=subfolder, **hub))
    return settings
