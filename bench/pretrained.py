"""Times `from_pretrained` of an FP8 folder of 0.4 billion weights against transformers' own path, and measures peak memory."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from bench.figure import Figure
from bench.loading import FP8, SLACK, peak_memory, read_files, write_folder
from bench.timing import WrongResult

SIZES = {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "head_dim": 128,
         "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False}


def figures(rounds: int) -> Iterator[Figure]:
    """What the plug-in for transformers costs.  Raises WrongResult where layers are not packed."""
    if find_spec("transformers") is None:
        return
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**SIZES)
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        largest = write_folder(Path(folder), Qwen3ForCausalLM(config).bfloat16(), FP8)
        settings = {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "quantization_config": FP8}
        (Path(folder) / "config.json").write_text(json.dumps({**config.to_dict(), **settings}))
        theirs = [in_process(folder, False) for _ in range(min(rounds, 5))]
        ours = [in_process(folder, True) for _ in range(min(rounds, 5))]
    seconds = median(time for time, _ in theirs)
    memory = median(peak for _, peak in theirs) / 1e6
    yield Figure("from_pretrained of 0.4 B weights in FP8, CPU time to transformers' own", "x",
                 [time / seconds for time, _ in ours], 0.5, more=False, note=f"transformers: {seconds:.2f} s")
    yield Figure("from_pretrained of 0.4 B weights in FP8, anonymous memory besides the weights", "MB",
                 [peak / 1e6 for _, peak in ours], (largest + SLACK) / 1e6, more=False, note=f"transformers: {memory:.0f} MB")


def in_process(folder: str, packed: bool) -> tuple[float, int]:
    """CPU seconds, and the most anonymous memory above that before loading, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=measure, args=(folder, packed, queue))
    child.start()
    result: tuple[float, int] = queue.get()
    child.join()
    return result


def measure(folder: str, packed: bool, queue: multiprocessing.Queue[tuple[float, int]]) -> None:
    from transformers import AutoModelForCausalLM

    from qdsl.models.transformers import QdslConfig

    format = import_module("qdsl.generated.fp8_block")           # imports are no part of loading
    for name in ("integrations.finegrained_fp8", "models.qwen3.modeling_qwen3"):
        import_module(f"transformers.{name}")
    torch.set_num_threads(1)
    read_files(folder)                                           # the files are in the system's cache now
    options = {"quantization_config": QdslConfig()} if packed else {}
    began = time.process_time()
    with peak_memory() as peak:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    seconds = time.process_time() - began
    is_packed = isinstance(model.model.layers[0].mlp.up_proj, format.Linear)
    if is_packed != packed:
        raise WrongResult(f"layers are {'packed' if is_packed else 'not packed'}")
    queue.put((seconds, max(peak)))
