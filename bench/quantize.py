"""Times quantizing on one thread: against gguf-py from float32, if it has a quantizer, and as a rate."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates, ratios
from bench.folders import plain as write_plain
from bench.timing import Side, calls
from bench.weights import BF16_BYTES, F32_BYTES, SHAPE, floats, format_of
from qdsl.jobs.convert import run, target

GGUF = {"q4_0": 1.1, "q8_0": 1.7, "mxfp4": 5.0}                  # goals: times gguf-py
SEARCHED = {"q2_k": None, "q3_k": None, "q4_k": 35.0, "q5_k": 40.0, "q6_k": 60.0,              # goals: MB/s of float32
            "iq4_nl": 40.0, "iq4_xs": 40.0}
GRIDS = {"iq1_s": 400.0, "iq1_m": 400.0, "iq2_xxs": 4000.0, "iq2_xs": 2000.0, "iq2_s": 1000.0, "iq3_xxs": 2000.0,
         "iq3_s": 1000.0}                                        # goals: kB/s of float32
GRID_ROWS = 64
FOLDER_MEGABYTES = 2000
OTHERS: dict[str, dict[str, Any]] = {"fp8_block": {}, "int_group": {"bits": 4, "group": 128, "storage": "gptq_v2"}}


def figures(rounds: int) -> Iterator[Figure]:
    """What quantizing costs, and that gguf-py makes the same bytes."""
    for name, goal in GGUF.items():
        theirs, mine = calls([Side(gguf_py, {"name": name}), Side(ours, {"name": name, "dtype": "float32"})], rounds)
        rate = Figure("", "MB/s", rates(F32_BYTES / 1e6, mine))
        yield Figure(f"quantize {name} to gguf-py", "x", ratios(theirs, mine), goal,
                     note=f"same bytes; {rate.text(rate.median)} of f32 weight")
    for name, rate_goal in SEARCHED.items():
        [mine] = calls([Side(ours, {"name": name, "dtype": "float32"})], rounds)
        yield Figure(f"quantize {name}", "MB/s", rates(F32_BYTES / 1e6, mine), rate_goal, note="of f32 weight, the bytes of ggml")
    for name, rate_goal in GRIDS.items():
        [mine] = calls([Side(ours, {"name": name, "dtype": "float32", "rows": GRID_ROWS})], rounds)
        size = F32_BYTES * GRID_ROWS / SHAPE[0]
        yield Figure(f"quantize {name}", "kB/s", rates(size / 1e3, mine), rate_goal, note="of f32 weight, errors below ggml's")
    for name, options in OTHERS.items():
        [mine] = calls([Side(ours, {"name": name, "dtype": "bfloat16", "options": options})], rounds)
        what = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        yield Figure(f"quantize {what}", "MB/s", rates(BF16_BYTES / 1e6, mine), note="of bf16 weight")
    with tempfile.TemporaryDirectory() as path:
        write_plain(Path(path) / "in", FOLDER_MEGABYTES, 256, SHAPE[0], False)
        size = sum(file.stat().st_size for file in (Path(path) / "in").glob("*.safetensors"))
        seconds = [_folder_seconds(Path(path)) for _ in range(1 + rounds)][1:]
        yield Figure("quantize a bf16 folder to fp8_block", "GB/s", rates(size / 1e9, seconds), 1.0,
                     note="CPU time of one process, files written and errors measured")


def _folder_seconds(path: Path) -> float:
    """CPU time of quantizing a folder, without the imports."""
    begun = time.process_time()
    run.quantize(path / "in", target.parse_conversion("fp8_block", True, ignore=()), path / "out")
    took = time.process_time() - begun
    shutil.rmtree(path / "out")
    return took


def ours(name: str, dtype: str, options: dict[str, Any] | None = None, rows: int = SHAPE[0]) -> Callable[[], dict[str, Tensor]]:
    """This project's quantize: checks, codes and the storage's tensors."""
    form, weight = format_of(name), floats(getattr(torch, dtype))[:rows]
    return lambda: form.quantize(weight, **(options or {})).tensors


def gguf_py(name: str) -> Callable[[], Any]:
    """gguf-py's quantize of the same weight."""
    from gguf import GGMLQuantizationType, quants

    weight = floats().numpy()
    kind = GGMLQuantizationType[str(format_of(name).spec.detect["gguf"])]
    return lambda: quants.quantize(weight, kind)
