"""Packed weights in vllm-omni: the plug-in that registers the quantization `qdsl` for diffusion transformers.

vllm-omni calls `register` in all of its processes.  So this module imports nothing heavy and raises nothing.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register the quantization `qdsl` with vllm-omni; with a warning, a release that lacks what it takes is left alone."""
    try:
        from qdsl.models.vllm.diffusion import install

        install()
    except Exception as error:
        logging.getLogger("qdsl").warning("qdsl is not available in this vllm-omni: %s: %s", type(error).__name__, error)
