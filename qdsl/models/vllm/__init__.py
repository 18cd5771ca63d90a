"""Packed weights in vLLM: the plug-in that registers the quantization and the load format `qdsl`."""

from __future__ import annotations

from qdsl.models.registration import install


def register() -> None:
    """Register the plug-in with vLLM, which calls this in all of its processes."""
    install("qdsl.models.vllm.config", "vLLM")
