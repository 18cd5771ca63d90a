"""Crash-safe rewriting of checkpoints: files appear only when they are complete, and interrupted jobs resume.  No torch.

qdsl/jobs/convert and qdsl/jobs/compress decide what is written; this folder runs their shards and steps in many processes.
"""

from qdsl.host.files import OutputError


class RewriteError(ValueError):
    """A checkpoint, layer or storage that cannot be rewritten as requested; the message names its place."""


class OccupiedFolder(RewriteError, OutputError):
    """An output folder that contains something else."""
