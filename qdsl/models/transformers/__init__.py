"""transformers loads, runs and saves packed weights of every producer once this is imported.

    import qdsl.models.transformers                              # registers; transformers itself looks for no plug-ins
    model = AutoModelForCausalLM.from_pretrained(folder)         # a folder with qdsl's own settings
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QdslConfig())         # of any producer
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QdslConfig("q4_0"))   # bf16, quantized on the way
    model = qdsl.models.transformers.from_pretrained("model.gguf")                                 # a GGUF file
"""

from __future__ import annotations

from qdsl.models.transformers.config import QdslConfig
from qdsl.models.transformers.gguf import tokenizer
from qdsl.models.transformers.quantizer import QdslHfQuantizer, from_pretrained
from qdsl.models.transformers.register import register

__all__ = ["QdslConfig", "QdslHfQuantizer", "from_pretrained", "tokenizer"]

register()
