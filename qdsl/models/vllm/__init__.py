"""Packed weights in vLLM: the plug-in that registers the quantization `qdsl`.

vLLM calls `register` in all of its processes, for every model that it serves.  So this module imports nothing heavy and raises
nothing.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register the quantization `qdsl` with vLLM; a vLLM that lacks what the plug-in uses is left as it is, with a warning."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from qdsl.models.vllm.config import QdslConfig

        register_quantization_config("qdsl")(QdslConfig)
    except Exception as error:
        logging.getLogger("qdsl").warning("qdsl is not available in this vLLM: %s: %s", type(error).__name__, error)
