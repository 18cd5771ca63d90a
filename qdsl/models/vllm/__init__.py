"""Packed weights in vLLM: the plug-in that registers the quantization and the load format `qdsl`.

vLLM calls `register` in all of its processes, for every model that it serves.  So this module imports nothing heavy and raises
nothing.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register the quantization and the load format `qdsl`; with a warning, a vLLM that lacks what it takes is left alone."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config
        from vllm.model_executor.model_loader import register_model_loader

        from qdsl.models.vllm.config import QdslConfig
        from qdsl.models.vllm.weights import GgufLoader

        register_quantization_config("qdsl")(QdslConfig)
        register_model_loader("qdsl")(GgufLoader)
    except Exception as error:
        logging.getLogger("qdsl").warning("qdsl is not available in this vLLM: %s: %s", type(error).__name__, error)
