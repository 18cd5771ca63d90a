"""Whole checkpoints into another storage: what becomes of every tensor, the work in files that are whole or not there, the rest
of the folder.
"""


class ConvertError(ValueError):
    """A checkpoint, a layer or a storage with which a folder cannot be converted; the message names its place."""
