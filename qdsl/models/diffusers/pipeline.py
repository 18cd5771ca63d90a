"""Loads pipelines of diffusers whose models come from packed folders and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin, PipelineQuantizationConfig
from huggingface_hub import hf_hub_download
from transformers import PreTrainedModel

from qdsl.checkpoint.checkpoint import open_checkpoint
from qdsl.checkpoint.detect.guard import describes_model
from qdsl.checkpoint.files.folder import CONFIG_LIMIT, read_object
from qdsl.checkpoint.files.gguf import is_gguf
from qdsl.checkpoint.files.references import Repository, available, local_path, parse_reference
from qdsl.checkpoint.files.safetensors import shown
from qdsl.models.base import Base, stored_config
from qdsl.models.diffusers.single_file import load_single_file
from qdsl.models.plan import LoadError
from qdsl.models.transformers import from_pretrained as from_pretrained_language_model
from qdsl.models.transformers.config import QdslConfig
from qdsl.models.transformers.folder import needs_own_reading

QUANTIZED = ("transformer", "unet", "text_encoder")              # beginnings of names of models that a format is for
# Arguments of the library's `from_pretrained`; others name components.
LIBRARY = ("cache_dir", "custom_pipeline", "custom_revision", "device_map", "disable_mmap", "force_download",
           "load_connected_pipeline", "local_files_only", "low_cpu_mem_usage", "max_memory", "offload_folder",
           "offload_state_dict", "provider", "provider_options", "proxies", "quantization_config", "revision", "sess_options",
           "token", "trust_remote_code", "use_flashpack", "use_onnx", "use_safetensors", "variant")


def from_pretrained(ref: str | Path, *, format: str | None = None, skip: Sequence[str] = (),
                    params: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None,
                    device: torch.device | str | None = None, allow_unknown: bool = False, **kwargs: Any) -> Any:
    """Loads a pipeline whose models are packed, plain, or passed as files: GGUF, safetensors, or folders of one model.

    ref: a pipeline's folder or repository.  kwargs: references of models by their names, as `transformer="z_image-Q4_K.gguf"`,
    models themselves, and what `DiffusionPipeline.from_pretrained` takes.  Packed folders need no settings: DF11 as it is
    published, too.  format: in which plain transformers, UNets and text encoders are quantized; skip: patterns of their modules
    that stay dense; params: options of the format's quantizer.  dtype, or torch_dtype: of plain numbers and of products.
    allow_unknown: as of QdslConfig.
    Raises LoadError where files do not fill a model, and for a name that is no component of the pipeline.
    """
    dtype = kwargs.pop("torch_dtype", dtype)
    passed = [name for name, value in kwargs.items() if name not in LIBRARY and value is not None]
    folder = pipeline_folder(ref, passed)
    read_object(folder / "model_index.json", CONFIG_LIMIT)       # raises CheckpointError for what is no object
    index = DiffusionPipeline.load_config(folder)
    _check_names(ref, index, kwargs)
    sources = _model_sources(ref, folder, index, kwargs)
    packed = {name for name, (_, path) in sources.items() if _is_packed(path)}
    online = {} if format is None else {name: QdslConfig(format, skip=skip, allow_unknown=allow_unknown, **(params or {}))
                                        for name in sources.keys() - packed if name.startswith(QUANTIZED)}
    if format is not None and not online:
        raise LoadError(f"{ref}: no plain model to quantize in {format}; `qdsl decompress` undoes hlane, fix4 and DF11")
    library_options = kwargs.keys() & {*LIBRARY}
    for name, (cls, path) in sources.items():
        # The library would fill missing weights of a plain text encoder with random numbers.
        is_plain_encoder = issubclass(cls, PreTrainedModel) and name not in online and dtype is not None and not library_options
        if name in kwargs or is_plain_encoder or name in packed:
            options = QdslConfig(skip=skip, allow_unknown=allow_unknown) if name in packed else online.pop(name, None)
            fetch = partial(_tensors_of, ref, name, [own for own in passed if own != name])
            kwargs[name] = load_component(cls, path, folder / name, dtype, device, options, fetch)
    config = PipelineQuantizationConfig(quant_mapping=online) if online else None
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype, quantization_config=config, **kwargs)
    if not library_options:                                      # some of which offload parameters, and leave them on meta
        for name in pipeline.components.keys() - kwargs.keys():
            _check_filled(f"{ref}/{name}", getattr(pipeline, name))
    return pipeline if device is None else pipeline.to(device)


def pipeline_folder(ref: str | Path, passed: Sequence[str] = ()) -> Path:
    """The local folder of a pipeline; a repository is downloaded.  Raises LoadError for another path.

    passed: components that the caller has, of which only configs are downloaded.
    """
    target = parse_reference(ref)
    if isinstance(target, Repository):
        target = parse_reference(available(ref))
    if isinstance(target, Repository) and target.file is None and target.quant is None:
        folder = Path(DiffusionPipeline.download(target.name, revision=target.revision, **dict.fromkeys(passed, True)))
        index = DiffusionPipeline.load_config(folder)
        for name in passed:
            if _model_class(index.get(name)) is not None:
                hf_hub_download(target.name, f"{name}/config.json", revision=target.revision)
        return folder
    if not isinstance(target, Path) or not (target / "model_index.json").is_file():
        raise LoadError(f"{ref}: no pipeline of diffusers: it has no model_index.json")
    return target


def _tensors_of(ref: str | Path, name: str, passed: Sequence[str]) -> Path:
    """The local folder of a component with its tensors, downloaded if remote.  passed: as of `pipeline_folder`."""
    return pipeline_folder(ref, passed) / name


def _model_sources(ref: str | Path, folder: Path, index: Mapping[str, Any],
                   components: Mapping[str, Any]) -> dict[str, tuple[Any, Path]]:
    """Class and file or folder of a pipeline's models by component; models that are passed as objects have none.

    Raises LoadError for a file or folder that is not there.
    """
    sources = {}
    for name, entry in index.items():
        cls, ref_or_model = _model_class(entry), components.get(name, folder / name)
        if cls is None or not isinstance(ref_or_model, str | Path):
            continue
        path = local_path(ref_or_model)
        if not path.exists():
            raise LoadError(f"{name}: no file or folder {path}" if name in components else
                            f"{ref}: no folder {name}, which model_index.json names; pass {name}=, its file or folder")
        sources[name] = cls, path
    return sources


def _check_names(ref: str | Path, index: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Raises LoadError for a name that is neither a component of a pipeline nor an argument of the library."""
    components = [name for name, entry in index.items() if isinstance(entry, list | tuple)]
    for name in names:
        if name not in (*index, *LIBRARY):
            raise LoadError(f"{ref}: {index.get('_class_name')} has no component {shown(name)}; it has {', '.join(components)}")


def _check_filled(path: str, model: Any) -> None:
    """Raises LoadError for parameters that no tensor filled: the library only warns, and leaves them on meta."""
    named = model.named_parameters() if isinstance(model, ModelMixin) else ()
    if missing := [name for name, parameter in named if parameter.is_meta]:
        raise LoadError(_missing(path, missing))


def _missing(path: str | Path, names: Sequence[str]) -> str:
    return f"{path}: no tensor for {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")


def load_component(cls: Any, ref: Path, base: Path, dtype: torch.dtype | None = None,
                   device: torch.device | str | None = None, config: QdslConfig | None = None, fetch: Base | None = None) -> Any:
    """Loads a model of a pipeline from a file or folder.

    base: the pipeline's folder of the model, with the config of a file, and what else `ref` lacks.  config: patterns for packed
    weights, or settings to quantize plain ones.  fetch: returns the base's folder with its tensors; by default `base`.
    """
    is_packed = _is_packed(ref)
    completing: dict[str, Any] = {} if ref == base else {"base": base, "fetch": fetch}
    if issubclass(cls, ModelMixin):
        return load_single_file(cls, ref, None if ref.is_dir() else base, dtype=dtype, device=device, quantization_config=config,
                                **completing)
    options: dict[str, Any] = {"dtype": dtype or torch.float32} | ({} if device is None else {"device_map": device})
    if config is None and not is_packed:
        model, loading = cls.from_pretrained(ref, output_loading_info=True, **options)
        if missing := sorted(loading["missing_keys"]):
            raise LoadError(_missing(ref, missing))
        return model
    stored = stored_config(ref)
    if not is_gguf(ref) and describes_model(stored) and not needs_own_reading(stored):
        completing = {}                                          # transformers reads the folder
    return from_pretrained_language_model(ref, model_class=cls, quantization_config=config, **completing, **options)


def _model_class(entry: Any) -> Any:
    """The class of a model in an entry of model_index.json; None for other components."""
    if not isinstance(entry, list | tuple) or len(entry) != 2 or entry[0] not in ("diffusers", "transformers"):
        return None
    cls = getattr(import_module(entry[0]), entry[1], None)
    return cls if isinstance(cls, type) and issubclass(cls, ModelMixin | PreTrainedModel) else None


def _is_packed(path: Path) -> bool:
    """Whether a file or a folder of one model has packed weights; False for files other than safetensors."""
    if not path.is_dir() and path.suffix != ".safetensors":
        return True
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return False
    with open_checkpoint(path) as checkpoint:
        return bool(checkpoint.source.layers or checkpoint.source.groups)
