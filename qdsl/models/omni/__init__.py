"""Packed weights in vllm-omni: the plug-in that registers the quantization `qdsl` for diffusion transformers."""

from __future__ import annotations

from qdsl.models.registration import install


def register() -> None:
    """Register the plug-in with vllm-omni, which calls this in all of its processes."""
    install("qdsl.models.omni.config", "vllm-omni")
