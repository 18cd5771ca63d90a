"""What a process that works on layers of checkpoints has open."""

from __future__ import annotations

from pathlib import Path

from qdsl.checkpoint.files.folder import Folder

there: list[Folder] = []
_threads: list[int] = []                                         # of torch, before


def start(*paths: Path) -> None:
    """Open checkpoints, for work in one thread: as many processes as processors do not hinder each other."""
    import torch

    there.extend(Folder(path, copies=True) for path in paths)
    _threads.append(torch.get_num_threads())
    torch.set_num_threads(1)


def opened(path: Path) -> Folder:
    """The checkpoint that was opened from a path."""
    return next(folder for folder in there if folder.path == path)


def finish() -> None:
    """Let go of them, where the process that asked did the work."""
    import torch

    while there:
        there.pop().close()
    while _threads:
        torch.set_num_threads(_threads.pop())
