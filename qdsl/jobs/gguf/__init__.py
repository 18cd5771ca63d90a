"""Whole files into other types: which type each tensor gets, the work in chunks over processes, and what it cost in quality."""


class QuantizeError(ValueError):
    """A model, an option or a weight with which a file cannot be quantized; the message names its place."""
