"""Loads folders into transformers of which it would not read all files, or whose config does not describe their model: DF11."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.groups import group_rules
from qdsl.checkpoint.detect.guard import describes_model
from qdsl.checkpoint.detect.sources import FolderSource
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.folder import CONFIG_LIMIT, Folder, read_object
from qdsl.checkpoint.files.references import local_path
from qdsl.models.base import Base, check_described, complete_folder, stored_config
from qdsl.models.conversions import Conversions
from qdsl.models.names import Names
from qdsl.models.save import QUANTIZATION
from qdsl.models.transformers.config import QdslConfig, Weights

REMEDY = "pass base=, a folder or repository of the model that it was made of"


def _completed(path: Path, config: Mapping[str, Any], base: Base | None, is_verified: bool, model: Any, names: Conversions,
               ) -> Checkpoint:
    """A folder, completed for a model.  config: without quantization settings.  Raises CheckpointError for damaged files."""
    if is_verified:
        checksums.check(path, is_optional=True)
    source = FolderSource(Folder(path))
    model.tie_weights()
    complete_folder(source, Names(model), config, base, lambda full: names.target(full)[0])
    return Checkpoint(path, {"": source})


def needs_own_reading(config: Mapping[str, Any]) -> bool:
    """Whether a folder with this config has files that transformers does not look for: one for each group of weights."""
    return any(rule["settings"] in config for rule in group_rules().values())


def load_folder(path: Path, *args: Any, base: str | Path | None = None, fetch: Base | None = None, model_class: Any = None,
                quantization_config: QdslConfig | None = None, config: Any = None, **kwargs: Any) -> Any:
    """A model of transformers with the weights of all files of a folder; `from_pretrained` explains the arguments.

    fetch: returns the base's folder with its tensors; by default `base` itself, downloaded.
    """
    stored = stored_config(path)
    is_described = describes_model(stored)
    if config is None:
        if base is None:
            check_described(path, stored, REMEDY)
        config = AutoConfig.from_pretrained(base) if base is not None and not is_described else _config_of(path, stored)
        if not is_described:
            vars(config).pop("quantization_config", None)        # of the base's weights
            for key in QUANTIZATION:
                if key in stored:
                    setattr(config, key, stored[key])
    described = stored if is_described else config.to_dict()
    if fetch is None and base is not None:
        fetch = partial(local_path, base)
    options = quantization_config or QdslConfig()
    weights = Weights(partial(_completed, path, described, fetch, options.verify), Conversions)
    if kwargs.get("dtype") in (None, "auto"):
        kwargs["dtype"] = config.dtype or torch.bfloat16
    model = (model_class or named_class(config)).from_pretrained(None, *args, config=config, state_dict=weights.state,
                                                                 quantization_config=options.with_weights(weights), **kwargs)
    weights.state.clear()
    model.name_or_path = str(path)
    for folder in filter(None, (path, base)) if model.can_generate() else ():
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(folder)
            break
    return model


def _config_of(path: Path, stored: Mapping[str, Any]) -> Any:
    """The config that a folder's config.json describes, or else the one that `qdsl compress` has kept in the folder."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if file.exists() and describes_model(read_object(file, CONFIG_LIMIT, constants=True)):
        return AutoConfig.from_pretrained(file.parent)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file.name).write_text(json.dumps(stored))
        return AutoConfig.from_pretrained(folder)


def named_class(config: Any) -> Any:
    automatic = transformers.AutoModelForCausalLM
    return automatic if hasattr(config, "auto_map") else getattr(transformers, (config.architectures or [""])[0], automatic)
