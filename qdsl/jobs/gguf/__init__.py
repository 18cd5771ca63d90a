"""Writes quantized GGUF files: chooses a type for each tensor, quantizes in parallel, and measures the loss of quality."""


class QuantizeError(ValueError):
    """A model, option or weight that cannot be quantized; the message names its place."""
