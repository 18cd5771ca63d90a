"""Registers qdsl's quantizer and config with transformers, once per process."""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import PreTrainedModel, modeling_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto

import qdsl.models.transformers.moe as moe
from qdsl.checkpoint.detect.rules import OWN
from qdsl.models.plugin import wrap_save
from qdsl.models.private_apis import has_adapters
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
        modeling_utils.get_hf_quantizer = _accept_any_producer(get)
        PreTrainedModel.save_pretrained = wrap_save(PreTrainedModel.save_pretrained, QdslHfQuantizer,
                                                    has_adapters,
                                                    {"state_dict": None, "variant": None})


def _accept_any_producer(get: Any) -> Any:
    """The library's function that chooses a quantizer, extended to a QdslConfig for any producer."""
    @wraps(get)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        return get(config, handed_over(config, quantization_config), *args, **kwargs)

    return get_hf_quantizer
