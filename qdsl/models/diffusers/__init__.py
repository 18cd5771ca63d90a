"""diffusers loads, runs and saves packed weights of every producer once this is imported; so does transformers.

    from qdsl.models.diffusers import QdslConfig, from_pretrained, load_single_file  # registers

    model = ZImageTransformer2DModel.from_pretrained(folder)                      # a folder with qdsl's own settings
    model = load_single_file(Flux2Transformer2DModel, "flux-2-klein-4b-Q4_K.gguf", config="FLUX.2-klein-4B")
    pipeline = from_pretrained("Z-Image-Turbo", transformer="z_image_turbo-Q4_K.gguf", text_encoder="Qwen3-4B-Q4_K.gguf")
"""

from __future__ import annotations

from qdsl.models.diffusers.pipeline import from_pretrained
from qdsl.models.diffusers.quantizer import QdslDiffusersQuantizer
from qdsl.models.diffusers.register import register
from qdsl.models.diffusers.single_file import load_single_file
from qdsl.models.transformers import QdslConfig

__all__ = ["QdslConfig", "QdslDiffusersQuantizer", "from_pretrained", "load_single_file"]

register()
