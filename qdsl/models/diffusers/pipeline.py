"""Pipelines of diffusers whose models come from packed folders and files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin, PipelineQuantizationConfig
from transformers import PreTrainedModel

from qdsl.checkpoint.checkpoint import open_checkpoint
from qdsl.models.diffusers.single_file import load_single_file
from qdsl.models.transformers import from_pretrained as from_pretrained_language_model
from qdsl.models.transformers.config import QdslConfig

QUANTIZED = ("transformer", "unet", "text_encoder")              # beginnings of names of models that a format is for


def from_pretrained(ref: str | Path, *, format: str | None = None, ignore: Sequence[str] = (), dtype: torch.dtype | None = None,
                    device: torch.device | str | None = None, **kwargs: Any) -> Any:
    """Load a pipeline whose models are packed, plain, or given as files: GGUF, safetensors, or folders of one model.

    ref: a pipeline's folder or repository.  kwargs: references of models by their names, as `transformer="z_image-Q4_K.gguf"`,
    models themselves, and what `DiffusionPipeline.from_pretrained` takes.  Packed folders need no settings: DF11 as it is
    published, too.  format: in which plain transformers, UNets and text encoders are quantized; ignore: patterns of their modules
    that stay dense.  dtype: of plain numbers and of products.  Raises LoadError where files do not fill a model.
    """
    folder = Path(ref) if Path(ref).is_dir() else Path(DiffusionPipeline.download(str(ref)))
    index = DiffusionPipeline.load_config(folder)
    mapping: dict[str, QdslConfig] = {}
    for name, entry in index.items():
        cls = _model_class(entry)
        if cls is None:
            continue
        own = kwargs.get(name, folder / name)
        if isinstance(own, str | Path) and (name in kwargs or _is_packed(folder / name)):
            kwargs[name] = load_component(cls, Path(own), folder / name, dtype, device)
        elif name not in kwargs and format is not None and name.startswith(QUANTIZED):
            mapping[name] = QdslConfig(format, ignore=ignore)
    config = PipelineQuantizationConfig(quant_mapping=mapping) if mapping else None
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, quantization_config=config, **kwargs)
    return pipeline if device is None else pipeline.to(device)


def load_component(cls: Any, ref: Path, base: Path, dtype: torch.dtype | None = None,
                   device: torch.device | str | None = None) -> Any:
    """Load a model of a pipeline from a file or folder.  base: the folder that has its config."""
    if issubclass(cls, ModelMixin):
        return load_single_file(cls, ref, None if ref.is_dir() else base, dtype=dtype, device=device)
    options: dict[str, Any] = {} if device is None else {"device_map": device}
    return from_pretrained_language_model(ref, base=base if ref.suffix == ".gguf" else None, model_class=cls,
                                          dtype=dtype or torch.float32, **options)


def _model_class(entry: Any) -> Any:
    """The class of a model that an entry of model_index.json names; None for other components."""
    if not isinstance(entry, list | tuple) or len(entry) != 2 or entry[0] not in ("diffusers", "transformers"):
        return None
    cls = getattr(import_module(entry[0]), entry[1], None)
    return cls if isinstance(cls, type) and issubclass(cls, ModelMixin | PreTrainedModel) else None


def _is_packed(folder: Path) -> bool:
    """Whether a folder of one model has packed weights."""
    if not any(folder.glob("*.safetensors")):
        return False
    with open_checkpoint(folder) as checkpoint:
        return bool(checkpoint.source.layers or checkpoint.source.groups)
