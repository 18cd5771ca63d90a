"""The checkpoints that a worker process has open."""

from __future__ import annotations

from pathlib import Path

from qdsl.checkpoint.files.buffer_pool import BufferPool
from qdsl.checkpoint.files.folder import Folder

folders: list[Folder] = []
_threads: list[int] = []                                         # of torch, before


def start(*paths: Path) -> None:
    """Open checkpoints, and limit torch to one thread: parallel work uses one process per processor."""
    import torch

    buffers = BufferPool()
    folders.extend(Folder(path, copies=True, buffers=buffers) for path in paths)
    _threads.append(torch.get_num_threads())
    torch.set_num_threads(1)


def folder_of(path: Path) -> Folder:
    return next(folder for folder in folders if folder.path == path)


def finish() -> None:
    """Close the checkpoints and restore torch's threads, where the work ran in the calling process."""
    import torch

    while folders:
        folders.pop().close()
    while _threads:
        torch.set_num_threads(_threads.pop())
