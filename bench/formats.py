"""`python -m bench.formats FILE.json` measures bits and signal to noise of every format on the weights in the repository.

Each format is measured in its first storage, with each value of the parameters that change its bits.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from torch import Tensor

from qdsl.core import places
from qdsl.jobs.demo import quickly_quantizes, read
from qdsl.runtime import FormatError


def rows(matrices: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """A row for each variant that has a quantizer which takes seconds."""
    for path in places.shipped():
        module = importlib.import_module(f"qdsl.generated.{path.stem}")
        for key, variant in module.FORMAT.variants.items():
            if quickly_quantizes(variant):
                params = dict(zip(module.FORMAT.by, key, strict=True))
                yield {"format": path.stem, "params": params, **measured(module, next(iter(variant.storages)), params, matrices)}


def measured(module: Any, storage: str, params: dict[str, Any], matrices: dict[str, Tensor]) -> dict[str, Any]:
    """Bits per weight, and signal to noise in decibels: None where no matrix fits or nothing is lost."""
    bits, weights, signal, noise = 0, 0, 0.0, 0.0
    for weight in matrices.values():
        try:
            packed = module.quantize(weight, storage, **params)
        except FormatError:                                      # blocks that do not divide the shape
            continue
        original = weight.double()
        bits, weights = bits + 8 * packed.nbytes, weights + weight.numel()
        signal += float(original.square().sum())
        noise += float((module.dequantize(packed).double() - original).square().sum())
    return {"storage": storage, "weights": weights, "bits_per_weight": round(bits / weights, 4) if weights else None,
            "snr_db": round(10 * math.log10(signal / noise), 2) if noise else None}


def main(out: str) -> None:
    matrices, _ = read(None, print)
    lines = [json.dumps(row) for row in rows(matrices)]
    head = {"command": f"python -m bench.formats {out}", "date": date.today().isoformat(), "weights": "all-MiniLM-L6-v2, layer 0"}
    Path(out).write_text(f"{json.dumps(head)[:-1]}, \"formats\": [\n" + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
