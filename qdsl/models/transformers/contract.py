"""What of transformers the plug-in uses beyond its documented interfaces, and whether this release still has it."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, core_model_loading, modeling_utils
from transformers.integrations import moe
from transformers.quantizers import HfQuantizer, auto

TESTED = "5.22 and 5.23"                                         # releases with which all of this was run


# Attributes by their owners, with parameters that a function among them must have.
USED: tuple[tuple[Any, str, str], ...] = (
    (auto, "AUTO_QUANTIZER_MAPPING", ""),
    (auto, "AUTO_QUANTIZATION_CONFIG_MAPPING", ""),
    (modeling_utils, "get_hf_quantizer", "config quantization_config"),
    (HfQuantizer, "preprocess_model", "model"),
    (HfQuantizer, "update_device_map", "device_map"),
    (HfQuantizer, "update_weight_conversions", "weight_conversions model"),
    (HfQuantizer, "update_dtype", "dtype"),
    (PreTrainedModel, "mark_tied_weights_as_initialized", "loading_info"),
    (PreTrainedModel, "set_experts_implementation", "experts_implementation"),
    (PreTrainedModel, "save_pretrained", "save_directory is_main_process push_to_hub"),
    (PreTrainedModel, "_keep_in_fp32_modules", ""),
    (PreTrainedModel, "_tied_weights_keys", ""),
    (PreTrainedConfig, "to_json_string", ""),
    (core_model_loading, "rename_source_key", "source_key weight_renamings weight_converters base_model_prefix meta_state_dict"),
    (core_model_loading, "revert_weight_conversion", "model state_dict"),
    (core_model_loading, "dot_natural_key", ""),
    (core_model_loading, "WeightRenaming", ""),
    (core_model_loading.WeightConverter, "add_tensor", "target_key source_key source_pattern future"),
    (core_model_loading.WeightConverter, "convert", "layer_name model config"),
    (moe.ALL_EXPERTS_FUNCTIONS, "register", "key value"),
)


def check() -> None:
    """Raises ImportError for a release of transformers that lacks something or takes other parameters."""
    for owner, name, parameters in USED:
        place = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        if not hasattr(owner, name):
            raise ImportError(sentence(f"has no {place}"))
        known = inspect.signature(getattr(owner, name)).parameters if parameters else {}
        if missing := [own for own in parameters.split() if own not in known]:
            raise ImportError(sentence(f"has {place} without {', '.join(missing)}"))


def sentence(why: str) -> str:
    """What to tell a user whose release of transformers is another than those tested."""
    return (f"qdsl.models.transformers: transformers {transformers.__version__} {why}; install a release that was tested, {TESTED}: "
            "pip install 'transformers>=5.22,<5.24'; or fill models by qdsl.load_weights_")
