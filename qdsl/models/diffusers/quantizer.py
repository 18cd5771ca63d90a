"""The quantizer plug-in for diffusers: fills the whole model before the library would load it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import nn

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.ignored import SKIPPED
from qdsl.jobs.engine.shards import headers_index
from qdsl.models.dense import make_dense
from qdsl.models.load import fill_model
from qdsl.models.load_report import LoadReport, bytes_by_device
from qdsl.models.offloaded import onloaded
from qdsl.models.origin import origin_in
from qdsl.models.parameters import num_parameters
from qdsl.models.plan import LoadError
from qdsl.models.plugin import check_format, move_to_map, open_files, single_device, without_disk
from qdsl.models.private_apis import float32_modules, has_adapters, hook_of, may_be_unexpected, set_config, uncast_patterns
from qdsl.models.save import save
from qdsl.models.transformers.config import QdslConfig

STEM = "diffusion_pytorch_model"                                 # of files of weights
VARIANT = re.compile(rf"(?<=^{STEM})\.(?!safetensors$)[^.]*?(?=-\d+-of-\d+\.|\.)")    # in their names


class QdslDiffusersQuantizer(DiffusersQuantizer):
    """Fills a model with a folder's weights while `from_pretrained` loads it.

    report: which layers are packed, as of `qdsl.load_weights_`.  The library would cast all floats to `torch_dtype`, scales too,
    so it loads nothing itself.  Weights on a CPU stay mapped from their files.
    """

    quantization_config: QdslConfig
    use_keep_in_fp32_modules = True
    supports_parallel_loading = False
    is_serializable = True
    is_trainable = True                                          # adapters; packed weights cannot be trained
    is_compileable = True

    def __init__(self, quantization_config: QdslConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report: LoadReport | None = None
        self._files: list[Path] = []
        self._keys: list[str] = []                               # what the library believes that the files have

    # -- what the library calls, in order ------------------------------------------------------------------------------

    def update_device_map(self, device_map: Any) -> Any:
        """The device map with the CPU in place of the disk."""
        return without_disk(device_map)

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Sequence[str]) -> list[str]:
        """The model's tensor names, so that the library reports none as missing or mismatched."""
        self._files = [Path(file) for file in checkpoint_files]
        self._keys = list(loaded_keys)
        return self._keys

    def _process_model_before_weight_loading(self, model: Any, device_map: Any = None, keep_in_fp32_modules: Sequence[str] = (),
                                             **kwargs: Any) -> Any:
        with open_files(self._files, self.quantization_config.verify) as checkpoint:
            check_format(checkpoint, self.quantization_config.format)
            report = self.fill(model, checkpoint, single_device(device_map), keep_in_fp32_modules)
        self._keys[:] = [*model.state_dict(), *report.unused]
        self._model = model
        return model

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Move the weights to the devices of a map that the library inferred from the filled model."""
        if self.report is not None and isinstance(device_map, dict):
            device_map.update(without_disk(device_map))
            move_to_map(self._model, self._model.state_dict(), device_map)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """An empty state_dict, so that the library loads nothing."""
        return {}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        is_dispatched = any(hook_of(module) is not None for module in model.modules())
        is_empty = any(parameter.is_meta for parameter in model.parameters()) and not is_dispatched
        if self.report is None or is_empty:
            raise RuntimeError("qdsl.models.diffusers: this release of diffusers loads weights in another way; "
                               "install a tested one: pip install 'diffusers>=0.42,<0.43'")
        del self._model
        self.report.device_bytes = bytes_by_device(model)
        return model

    # -- filling -------------------------------------------------------------------------------------------------------

    def fill(self, model: Any, checkpoint: Checkpoint, device: Any = None, kept: Sequence[str] = ()) -> LoadReport:
        """Fill a model whose parameters are on meta, and quantize it where the config names a format.

        kept: names of modules that the class wants in float32: they become dense, as models ask their parameters for a dtype.
        Raises LoadError where the model and the checkpoint do not fit.
        """
        config = self.quantization_config
        for name, parameter in list(model.named_parameters()):
            if set(kept) & set(name.split(".")):
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._parameters[leaf] = nn.Parameter(parameter.float(), parameter.requires_grad)
        precise = [f".*(?:{pattern}).*" for pattern in uncast_patterns(model)]
        unexpected = [f".*(?:{pattern}).*" for pattern in may_be_unexpected(model)]
        skip = [*config.skip, *map(re.escape, kept), *unexpected, *((*SKIPPED, *precise) if config.format else ())]
        self.report = fill_model(model, checkpoint, device=device, skip=skip, format=config.format, verify=config.verify,
                                 match_dense=config.match_dense, allow_unknown=config.allow_unknown, **config.options)
        if config.format is not None and not self.report.packed:
            raise LoadError(f"{checkpoint.path}: no layer became {config.format}\n{self.report}")
        _drop_variant(model)
        model.enable_layerwise_casting = _refuse_casting
        model.num_parameters = partial(num_parameters, model)
        return self.report

    # -- what the model can do -----------------------------------------------------------------------------------------

    def save(self, model: Any, folder: Path) -> None:
        """Write the files that a model was loaded from, or a folder with qdsl's own settings.  Raises ValueError for adapters.
        """
        if has_adapters(model):
            raise ValueError("save_pretrained: the model has adapters; unload them first (unload_lora_weights), or save them "
                             "by themselves (save_lora_adapter)")
        origin = origin_in(model)
        config = None if origin is not None and origin.config is not None else json.loads(model.to_json_string())
        with onloaded(model):
            save(model, folder, config, STEM)

    def _dequantize(self, model: Any) -> Any:
        make_dense(model)
        for name in ("enable_layerwise_casting", "num_parameters"):
            vars(model).pop(name, None)
        set_config(model, {key: value for key, value in model.config.items() if key != "quantization_config"})
        return model


def parameter_dtype(model: Any, library_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model computes, to which its pipeline casts inputs.

    library_dtype: what diffusers finds, the dtype of the first floating parameter.  That may be one of stored codes or scales,
    in whose place stands the dtype of the layer's `weight`.
    """
    kept = float32_modules(model)
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if any(own in name for own in kept) or not (parameter.is_floating_point() or hasattr(owner, "compute_dtype")):
            continue
        dtype: torch.dtype = getattr(owner, "compute_dtype", parameter.dtype)
        return dtype
    return library_dtype


def _drop_variant(model: Any) -> None:
    """Rename a model's files without their variant, so that `from_pretrained` finds them after saving."""
    origin = origin_in(model)
    if origin is None or not any(map(VARIANT.search, origin.files)):
        return
    origin.files = {VARIANT.sub("", name): file for name, file in origin.files.items()}
    if len(origin.files) > 1:
        origin.index = f"{STEM}.safetensors.index.json", headers_index(origin.files)


def _refuse_casting(*args: Any, **kwargs: Any) -> None:
    raise ValueError("enable_layerwise_casting: it would round biases and plain layers of a packed model, also in what is saved; "
                     "leave it out, or pack more layers with quantization_config=QdslConfig('fp8_channel')")
