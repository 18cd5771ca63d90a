"""Measures loading a model from a folder: CPU time relative to reading its files, peak memory, and time for 8B parameters."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import nn

import qdsl
from bench.figure import Figure
from bench.timing import WrongResult
from qdsl.checkpoint.files.safetensors import plan_header

GIB = 1 << 30
BLOCK = 128                                                      # rows and columns of a scale
SHARDS = 4
SLACK = 50_000_000                                               # bytes that loading may take besides its largest tensor


class Layer(nn.Module):
    """The matrices and norms of a Qwen3 layer."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, head: int) -> None:
        super().__init__()
        shapes = {"q_proj": (heads * head, width), "k_proj": (groups * head, width), "v_proj": (groups * head, width),
                  "o_proj": (width, heads * head), "gate_proj": (inner, width), "up_proj": (inner, width),
                  "down_proj": (width, inner)}
        for name, (n, k) in shapes.items():
            self.add_module(name, nn.Linear(k, n, bias=False))
        for name, size in {"input_layernorm": width, "post_attention_layernorm": width, "q_norm": head, "k_norm": head}.items():
            self.add_module(name, nn.RMSNorm(size))


class Model(nn.Module):
    """A Qwen3 of these sizes, of which nothing runs."""

    def __init__(self, layers: int, width: int, inner: int, heads: int, groups: int, vocabulary: int, head: int = 128) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width, inner, heads, groups, head) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)


EIGHT_BILLION = {"layers": 36, "width": 4096, "inner": 12288, "heads": 32, "groups": 8, "vocabulary": 151936}
TWO_GIGABYTES = {"layers": 36, "width": 2048, "inner": 6144, "heads": 16, "groups": 8, "vocabulary": 32768}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "config_groups": {
    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}},
    "ignore": ["lm_head"]}


def figures(rounds: int) -> Iterator[Figure]:
    """What `load_weights_` costs.  Raises WrongResult where a model is not filled."""
    for name, settings in (("FP8", FP8), ("INT8", INT8)):
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), skeleton(EIGHT_BILLION), settings, sparse=True)
            model = skeleton(EIGHT_BILLION)
            dense = sum(parameter.nbytes for parameter in model.parameters())
            report = qdsl.load_weights_(model, folder)
            yield Figure(f"bytes of Qwen3-8B's shapes in {name}", "GiB", [report.bytes_after / GIB], 8.8, more=False,
                         note=f"bf16: {dense / GIB:.2f} GiB")
    with tempfile.TemporaryDirectory() as folder:
        largest = write_folder(Path(folder), skeleton(TWO_GIGABYTES), FP8)
        for copy in (False, True):
            runs = [in_process(folder, copy) for _ in range(min(rounds, 5))]
            label = "owned" if copy else "mapped"
            weights = weights_bytes(folder) if copy else 0
            yield Figure(f"load 2 GB of FP8, {label}, CPU time to reading its files", "x",
                         [load / read for load, read, _ in runs], None if copy else 1.5, more=False)
            yield Figure(f"load 2 GB of FP8, {label}, anonymous memory besides the weights", "MB",
                         [(peak - weights) / 1e6 for _, _, peak in runs], (largest + SLACK) / 1e6, more=False)


def skeleton(sizes: Mapping[str, int]) -> Model:
    with torch.device("meta"):
        return Model(**sizes).bfloat16()


def write_folder(folder: Path, model: nn.Module, settings: Mapping[str, object], sparse: bool = False) -> int:
    """Write a quantized checkpoint of a model, of random codes or, sparse, of a hole; returns the largest tensor's bytes."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(SHARDS)]
    for number, (name, parameter) in enumerate(model.named_parameters()):
        n, k = (*parameter.shape, 1)[:2]
        tensors = {name: ("BF16", tuple(parameter.shape))}
        if parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
            if settings is FP8:
                tensors = {name: ("F8_E4M3", (n, k)), f"{name}_scale_inv": ("F32", (-(-n // BLOCK), -(-k // BLOCK)))}
            else:
                tensors = {name: ("I8", (n, k)), f"{name}_scale": ("BF16", (n, 1))}
        shards[number * SHARDS // len(list(model.parameters()))] |= tensors
    placed: dict[str, str] = {}
    largest = 0
    for number, tensors in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        start, header = plan_header(path, tensors, {"format": "pt"})
        placed |= dict.fromkeys(tensors, path.name)
        with open(path, "wb") as file:
            file.write(start)
            for entry in header.tensors.values() if not sparse else ():
                codes = np.random.default_rng(number).integers(0, 100, entry.nbytes, np.uint8)   # no NaN in any dtype
                file.write(codes.data)
                largest = max(largest, entry.nbytes)
            file.truncate(header.size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return largest


def weights_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def in_process(folder: str, copy: bool) -> tuple[float, float, int]:
    """CPU seconds to load and to read, and the most anonymous memory above that before loading, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=measure, args=(folder, copy, queue))
    child.start()
    result: tuple[float, float, int] = queue.get()
    child.join()
    return result


def measure(folder: str, copy: bool, queue: multiprocessing.Queue[tuple[float, float, int]]) -> None:
    torch.set_num_threads(1)
    read_files(folder)                                           # the files are in the system's cache now
    read = read_files(folder)
    import_module("qdsl.generated.fp8_block")                    # neither is part of loading
    import_module("qdsl.models.load")
    model = skeleton(TWO_GIGABYTES)
    began = time.thread_time()
    with peak_memory() as peak:
        report = qdsl.load_weights_(model, folder, copy=copy)
    load = time.thread_time() - began
    if any(parameter.is_meta for parameter in model.parameters()) or len(report.packed) != 7 * TWO_GIGABYTES["layers"]:
        raise WrongResult("the model is not filled")
    queue.put((load, read, max(peak)))


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Bytes of anonymous memory above those at the start, every two milliseconds."""
    before, peaks, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peaks.append(anonymous() - before)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()


def read_files(folder: str) -> float:
    """CPU seconds to read the files of a folder into memory that is kept until all are there."""
    buffers = []
    began = time.thread_time()
    for path in sorted(Path(folder).glob("*.safetensors")):
        buffers.append(np.empty(path.stat().st_size, np.uint8))
        with open(path, "rb", buffering=0) as file:
            view, place = buffers[-1].data, 0
            while place < len(view):
                place += file.readinto(view[place:]) or 0
    return time.thread_time() - began


def anonymous() -> int:
    """Bytes of this process that no file could give back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


