"""Registers qdsl's quantizer and config with diffusers, once per process."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import wraps
from typing import Any

import diffusers
from diffusers import ConfigMixin, ModelMixin
from diffusers.loaders import single_file_model
from diffusers.models import modeling_utils
from diffusers.quantizers import DiffusersAutoQuantizer, auto
from diffusers.quantizers.base import DiffusersQuantizer

from qdsl.checkpoint.detect.rules import OWN
from qdsl.models.diffusers.quantizer import QdslDiffusersQuantizer, parameter_dtype
from qdsl.models.plugin import missing_library_part, wrap_save
from qdsl.models.transformers.config import QdslConfig
from qdsl.runtime.torch.module import PackedModule

# Attributes that the plug-in uses, with parameters that a function among them must have.
USED: dict[Any, str] = {
    auto: "AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING",
    DiffusersAutoQuantizer: "merge_quantization_configs quantization_config quantization_config_from_args",
    DiffusersQuantizer: "maybe_update_loaded_keys loaded_keys checkpoint_files, maybe_update_state_dict state_dict, "
                        "preprocess_model model, update_device_map device_map, dequantize model",
    ModelMixin: "dtype, save_pretrained safe_serialization variant push_to_hub",
    ConfigMixin: "from_config, load_config",
    modeling_utils: "get_parameter_dtype parameter",
    single_file_model: "SINGLE_FILE_LOADABLE_CLASSES, fetch_diffusers_config checkpoint",
}


def register() -> None:
    """Register config and quantizer, and wrap the functions for which the library has no registry.

    Raises ImportError for a release of diffusers that is not as the plug-in uses it.
    """
    if why := missing_library_part(USED):
        raise ImportError(f"qdsl.models.diffusers: diffusers {diffusers.__version__} {why}; install a tested release, 0.42: "
                          "pip install 'diffusers>=0.42,<0.43'")
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[OWN] = QdslConfig
    auto.AUTO_QUANTIZER_MAPPING[OWN] = QdslDiffusersQuantizer
    if not hasattr(ModelMixin.save_pretrained, "__wrapped_by_qdsl__"):
        merge = DiffusersAutoQuantizer.merge_quantization_configs
        DiffusersAutoQuantizer.merge_quantization_configs = classmethod(_choosing(merge.__func__))
        _replace(modeling_utils.get_parameter_dtype, _computing(modeling_utils.get_parameter_dtype))
        ModelMixin.save_pretrained = wrap_save(ModelMixin.save_pretrained, QdslDiffusersQuantizer, lambda model: False,
                                               {"variant": None, "safe_serialization": True, "use_flashpack": False})
        ModelMixin.save_pretrained.__wrapped_by_qdsl__ = True
    with suppress(ImportError):                                  # without peft there are no adapters
        from qdsl.models.lora import register as register_lora

        register_lora()


def _choosing(merge: Any) -> Any:
    """The library's function that chooses the config of a quantized folder, extended to a QdslConfig for any producer.

    So does qdsl without it, where the library has no quantizer for the folder.
    """
    @wraps(merge)
    def merge_quantization_configs(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        own, settings = quantization_config_from_args, quantization_config
        if not isinstance(settings, dict):
            return merge(cls, quantization_config, quantization_config_from_args)
        is_supported = settings.get("quant_method") in auto.AUTO_QUANTIZATION_CONFIG_MAPPING or any(
            settings.get(key) for key in ("load_in_8bit", "load_in_4bit"))
        if own is None and (not is_supported or settings.get("quant_method") == OWN):
            own = QdslConfig()
        if isinstance(own, QdslConfig):
            return own.with_settings(settings)
        return merge(cls, quantization_config, quantization_config_from_args)

    return merge_quantization_configs


def _computing(get_parameter_dtype: Any) -> Any:
    """The library's function for the dtype of a model or module, without the dtypes of stored codes and scales."""
    @wraps(get_parameter_dtype)
    def computing(parameter: Any) -> Any:
        is_packed = any(isinstance(module, PackedModule) for module in parameter.modules())
        dtype = get_parameter_dtype(parameter)
        return parameter_dtype(parameter, dtype) if is_packed else dtype

    return computing


def _replace(function: Any, by: Any) -> None:
    """Replace a function in all modules of the library that import it."""
    name: str = function.__name__
    for path, module in list(sys.modules.items()):
        if path.startswith("diffusers.") and vars(module).get(name) is function:
            setattr(module, name, by)
