"""The undocumented parts of transformers that the plug-in uses, and a check that this release has them."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, core_model_loading, modeling_utils
from transformers.integrations import moe
from transformers.quantizers import HfQuantizer, auto

from qdsl.models.plugin import missing_library_part

TESTED = "5.22, 5.23 and 5.24"                                   # releases with which all of this was run


# Attributes, with parameters that a function among them must have.
USED: dict[Any, str] = {
    auto: "AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING",
    modeling_utils: "get_hf_quantizer config quantization_config",
    HfQuantizer: "preprocess_model model, update_device_map device_map, update_dtype dtype, "
                 "update_weight_conversions weight_conversions model",
    PreTrainedModel: "mark_tied_weights_as_initialized loading_info, set_experts_implementation experts_implementation, "
                     "save_pretrained save_directory is_main_process state_dict push_to_hub, "
                     "_load_pretrained_model model state_dict, "
                     "_keep_in_fp32_modules, _keep_in_fp32_modules_strict, _tied_weights_keys",
    PreTrainedConfig: "to_json_string",
    core_model_loading: "rename_source_key source_key weight_renamings weight_converters base_model_prefix meta_state_dict, "
                        "revert_weight_conversion model state_dict, dot_natural_key, WeightRenaming",
    core_model_loading.WeightConverter: "add_tensor target_key source_key source_pattern future, convert layer_name model config",
    moe.ExpertsInterface: "register key value",
}


def check() -> None:
    """Raises ImportError for a release of transformers that lacks one of these parts or changed its parameters."""
    if why := missing_library_part(USED):
        raise ImportError(sentence(why))


def sentence(why: str) -> str:
    """The message for a user of an untested release of transformers."""
    return (f"qdsl.models.transformers: transformers {transformers.__version__} {why}; install a tested release, {TESTED}: "
            "pip install 'transformers>=5.22,<5.25'")
