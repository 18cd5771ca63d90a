"""Whole checkpoints written anew: files that are whole or not there, taken up where they were broken off, by many processes.

What becomes of tensors is for others to say (qdsl/jobs/convert, qdsl/jobs/compress): here are shards, made of steps.  No torch.
"""

from qdsl.host.files import OutputError


class RewriteError(ValueError):
    """A checkpoint, a layer or a storage with which a folder cannot be written as was asked; the message names its place."""


class OccupiedFolder(RewriteError, OutputError):
    """A folder to be written that holds something else."""
