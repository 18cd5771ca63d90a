"""qdsl: one YAML file describes a quantized weight format; the compiler writes its reference, kernels and linear."""

__version__ = "0.1.0"
