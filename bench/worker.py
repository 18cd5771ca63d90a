"""Runs a timed side in its own process: `python -m bench.worker MODULE:FUNCTION ARGUMENTS`, started by bench/timing.py.

Prints a digest of the first result, then the seconds of one more call for every line that it reads.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def main() -> None:
    torch.set_num_threads(1)
    module, function = sys.argv[1].split(":")
    call = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
    print(digest(call()), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        result = call()
        print(time.perf_counter() - start, flush=True)
        del result                                               # freed here, outside the next call's time


def digest(result: Any) -> str:
    """The SHA-256 of arrays' bytes; dtypes and shapes do not count, because torch and gguf-py name them differently."""
    total = hashlib.sha256()
    for array_like in result.values() if isinstance(result, Mapping) else [result]:
        array = array_like.contiguous().view(torch.uint8).numpy() if isinstance(array_like, torch.Tensor) else array_like
        total.update(np.ascontiguousarray(array).view(np.uint8).data)
    return total.hexdigest()


if __name__ == "__main__":
    main()
