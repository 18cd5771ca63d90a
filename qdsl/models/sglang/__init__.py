"""Packed weights in SGLang: the plug-in that registers the quantization `qdsl`.  SGLang's sources were read, it was not run."""

from __future__ import annotations

from qdsl.models.registration import install


def register() -> None:
    """Register the plug-in with SGLang, which calls this in all of its processes."""
    install("qdsl.models.sglang.config", "SGLang")
