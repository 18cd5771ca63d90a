"""What is registered with transformers, once for a process."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto

import qdsl.models.transformers.moe as moe
from qdsl.checkpoint.detect import OWN
from qdsl.models.offloaded import onloaded
from qdsl.models.save import save
from qdsl.models.transformers.config import QdslConfig
from qdsl.models.transformers.contract import check
from qdsl.models.transformers.quantizer import QdslHfQuantizer


def register() -> None:
    """Register config, quantizer and experts, and wrap the two methods for which the library has no registry.

    Raises ImportError for a release of transformers that is not as the plug-in uses it.
    """
    check()
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[OWN] = QdslConfig
    auto.AUTO_QUANTIZER_MAPPING[OWN] = QdslHfQuantizer
    ALL_EXPERTS_FUNCTIONS.register(moe.NAME, moe.experts_forward)
    merge = auto.AutoHfQuantizer.merge_quantization_configs
    if not hasattr(merge, "__wrapped__"):
        auto.AutoHfQuantizer.merge_quantization_configs = staticmethod(_merging(merge))
        PreTrainedModel.save_pretrained = _saving(PreTrainedModel.save_pretrained)


def _merging(merge: Any) -> Any:
    """The library's rule for a folder's settings and a caller's; a QdslConfig takes a folder of any producer."""
    @wraps(merge)
    def merge_quantization_configs(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if isinstance(quantization_config_from_args, dict) and quantization_config_from_args.get("quant_method") == OWN:
            quantization_config_from_args = QdslConfig(**quantization_config_from_args)
        if isinstance(quantization_config_from_args, QdslConfig):
            settings = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
            return quantization_config_from_args.with_settings(settings)
        return merge(quantization_config, quantization_config_from_args)

    return merge_quantization_configs


def _saving(save_pretrained: Any) -> Any:
    """`save_pretrained` that writes a model with packed weights as the files it was loaded from, and others as before."""
    @wraps(save_pretrained)
    def saved(self: Any, save_directory: Any, is_main_process: bool = True, *args: Any, push_to_hub: bool = False,
              **kwargs: Any) -> Any:
        quantizer = getattr(self, "hf_quantizer", None)
        if not isinstance(quantizer, QdslHfQuantizer) or getattr(self, "_hf_peft_config_loaded", False):
            return save_pretrained(self, save_directory, is_main_process, *args, push_to_hub=push_to_hub, **kwargs)
        if is_main_process:
            with onloaded(self):
                save(self, Path(save_directory), quantizer.config_to_save(self))
            if self.can_generate():
                self.generation_config.save_pretrained(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.get("repo_id", Path(save_directory).name), token=kwargs.get("token"))

    return saved
