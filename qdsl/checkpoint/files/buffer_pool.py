"""Memory that tensors of a job are read into, one after the other."""

from __future__ import annotations

import weakref
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LEAST = 1 << 25                                                  # bytes; glibc keeps smaller blocks itself when they are freed


class BufferPool:
    """Blocks of memory, which a tensor leaves to the next one when nothing holds it any more.

    The system clears every page of a new block, which takes longer than to read a file into it that is in memory.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[Bytes, weakref.ref[Bytes]]] = []
        self._lock = Lock()

    def take(self, nbytes: int) -> Bytes:
        """Bytes that nothing else holds, with any values.  Their block is free as soon as this array is.

        Where no free block is large enough, all free ones are given up for a new one.
        """
        import numpy as np

        if nbytes < LEAST:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            free = [block for block, user in self._blocks if user() is None]
            fitting = [block for block in free if block.nbytes >= nbytes + 64]
            block = min(fitting, key=lambda block: block.nbytes) if fitting else None
            self._blocks = [(other, user) for other, user in self._blocks
                            if other is not block and (fitting or user() is not None)]
            del free, fitting
            block = np.empty(nbytes + 64, np.uint8) if block is None else block
            start = -block.ctypes.data % 64
            taken = block[start:start + nbytes]
            self._blocks.append((block, weakref.ref(taken)))
            return taken
