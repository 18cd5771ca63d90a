"""What is registered with transformers, once for a process."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, modeling_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto

import qdsl.models.transformers.moe as moe
from qdsl.checkpoint.detect import OWN
from qdsl.models.transformers.config import QdslConfig
from qdsl.models.transformers.contract import check
from qdsl.models.transformers.quantizer import QdslHfQuantizer, handed_over


def register() -> None:
    """Register config, quantizer and experts, and wrap the two functions for which the library has no registry.

    Raises ImportError for a release of transformers that is not as the plug-in uses it.
    """
    check()
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[OWN] = QdslConfig
    auto.AUTO_QUANTIZER_MAPPING[OWN] = QdslHfQuantizer
    ALL_EXPERTS_FUNCTIONS.register(moe.NAME, moe.experts_forward)
    get = modeling_utils.get_hf_quantizer
    if not hasattr(get, "__wrapped__"):
        modeling_utils.get_hf_quantizer = _choosing(get)
        PreTrainedModel.save_pretrained = _saving(PreTrainedModel.save_pretrained)


def _choosing(get: Any) -> Any:
    """The library's choice of a quantizer; a QdslConfig takes a folder of any producer."""
    @wraps(get)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        return get(config, handed_over(config, quantization_config), *args, **kwargs)

    return get_hf_quantizer


def _saving(save_pretrained: Any) -> Any:
    """`save_pretrained` that writes a model with packed weights as the files it was loaded from, and others as before."""
    @wraps(save_pretrained)
    def saved(self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, push_to_hub: bool = False,
              **kwargs: Any) -> Any:
        quantizer = getattr(self, "hf_quantizer", None)
        if not isinstance(quantizer, QdslHfQuantizer) or getattr(self, "_hf_peft_config_loaded", False):
            return save_pretrained(self, save_directory, is_main_process, state_dict, push_to_hub, **kwargs)
        if state_dict is not None or kwargs.get("variant") is not None:
            raise ValueError("save_pretrained: packed weights are saved as their files were, without state_dict= or variant=")
        if is_main_process:
            quantizer.save(self, Path(save_directory))
        if push_to_hub:
            self.push_to_hub(kwargs.get("repo_id", Path(save_directory).name), token=kwargs.get("token"))

    return saved
