"""Converts whole checkpoints, by `python -m bench.folders kill` and `python -m bench.folders memory`.

With --format they are compressed and decompressed, with --quantize quantized.  The disk needs room for them.  kill: kills the
work at random moments and resumes it; the bytes must equal those of an uninterrupted run.  memory: the largest anonymous memory
of a process, with several processes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.timing import ROOT
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.runtime import Format

CONFIG = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False,
                                  "checkpoint_format": "gptq_v2"}}


def main() -> int:
    """0 where every conversion made the same bytes, and where memory stayed below its bound."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "in"
        if options.format:
            work = ["compress", "--format", options.format]
            unit = plain(source, options.megabytes, options.shard, options.columns, options.format == "df11")
            bound = 100_000_000 + 5 * unit // 2
        elif options.quantize:
            work = ["quantize", "--format", options.quantize]
            bound = 350_000_000 + plain(source, options.megabytes, options.shard, options.columns, False)
        else:
            work = ["convert", "--to", "awq"]
            bound = 350_000_000 + 2 * gptq_checkpoint(source, options.megabytes, options.shard, options.columns)
        if options.what == "kill":
            return killed(work, source, Path(folder), options.kills, options.jobs, options.seed)
        wrong = remembered(work, source, Path(folder) / "out", options.jobs, bound)
        if options.format:
            wrong |= remembered(["decompress"], Path(folder) / "out", Path(folder) / "back", options.jobs, bound)
            wrong |= int(digest(Path(folder) / "back") != digest(source))
        return wrong


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.folders")
    parser.add_argument("what", choices=("kill", "memory"))
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written, and removed")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--shard", type=int, default=50, help="megabytes of a shard")
    parser.add_argument("--columns", type=int, default=4096, help="of a layer, which has as many rows")
    parser.add_argument("--format", choices=("hlane", "fix4", "fix3", "df11"), help="compress to this")
    parser.add_argument("--quantize", metavar="FORMAT", help="quantize to this")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def gptq_checkpoint(path: Path, megabytes: int, shard: int, columns: int) -> int:
    """A checkpoint of random GPTQ layers, the scales of each in the file after it; returns the bytes of the largest tensor."""
    path.mkdir()
    int_group: Format = importlib.import_module("qdsl.generated.int_group").FORMAT
    empty = int_group.empty((columns, columns), "gptq_v2", "meta", ("g_idx",), bits=4, group=128)
    size = empty.nbytes
    per_shard = max(1, (shard << 20) // size)
    shards = max(2, (megabytes << 20) // (size * per_shard))
    placed = {}
    late: dict[str, torch.Tensor] = {}
    order = torch.arange(columns, dtype=torch.int32) // 128
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        tensors, late = late, {}
        for layer in range(per_shard):
            prefix = f"model.layers.{number}.{layer}"
            for key, tensor in empty.tensors.items():
                whole = torch.frombuffer(bytearray(os.urandom(tensor.nbytes)), dtype=torch.uint8).view(tensor.dtype)
                into = late if key == "scales" and number + 1 < shards else tensors
                into[f"{prefix}.{key}"] = order if key == "g_idx" else whole.view(tensor.shape)
        write(path / name, tensors, {"format": "pt"})
        placed.update(dict.fromkeys(tensors, name))
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": placed}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return max(int(tensor.nbytes) for tensor in empty.tensors.values())


def plain(path: Path, megabytes: int, shard: int, columns: int, together: bool) -> int:
    """A checkpoint of random bfloat16 matrices, four to a block; returns the bytes of the largest unit, a block or a matrix."""
    path.mkdir()
    size = 2 * columns * columns
    blocks = max(2, (megabytes << 20) // (4 * size))
    per_shard = max(1, (shard << 20) // (4 * size))
    shards = -(-blocks // per_shard)
    placed = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        inside = range(number * per_shard, min(blocks, (number + 1) * per_shard))
        tensors = {f"model.layers.{block}.{part}.weight": torch.randn(columns, columns).mul_(0.02).bfloat16()
                   for block in inside for part in ("q", "o", "up", "down")}
        write(path / name, tensors, {"format": "pt"})
        placed.update(dict.fromkeys(tensors, name))
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": placed}))
    (path / "config.json").write_text("{}")
    return 4 * size if together else size


def command(work: list[str], source: Path, out: Path, jobs: int) -> list[str]:
    return [sys.executable, "-m", "qdsl", *work, str(source), "--out", str(out), "--jobs", str(jobs)]


def digest(path: Path) -> str:
    """Of the names and the bytes of all files."""
    total = hashlib.sha256()
    for file_path in sorted(path.rglob("*")):
        if file_path.is_file():
            with open(file_path, "rb") as file:
                total.update(f"{file_path.relative_to(path)}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def killed(work: list[str], source: Path, folder: Path, kills: int, jobs: int, seed: int) -> int:
    begun = time.monotonic()
    subprocess.run(command(work, source, folder / "whole", jobs), cwd=ROOT, check=True)
    whole = time.monotonic() - begun
    wanted, out = digest(folder / "whole"), folder / "out"
    drawn = random.Random(seed)
    same = number = 0
    while number < kills:
        begun, moment = time.monotonic(), drawn.uniform(0, whole)
        child = subprocess.Popen(command(work, source, out, jobs), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            child.wait(moment)
            whole = time.monotonic() - begun                     # the machine has become faster
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            number += 1
            written = sum(path.name.endswith(".safetensors") and path.is_file() for path in out.rglob("*")) if out.exists() else 0
            if not _readable(out):
                subprocess.run(command(work, source, out, jobs), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            same += digest(out) == wanted
            print(f"killed after {moment:.1f} s with {written} files there; {same} of {number} the same", flush=True)
        shutil.rmtree(out)
    print(f"{same} of {kills} identical")
    return int(same < kills)


def _readable(out: Path) -> bool:
    """Whether what was left passes for a checkpoint; then it has to be whole, and is not taken up again."""
    try:
        Folder(out).close()
    except (OSError, ValueError):
        return False
    for hidden in out.glob(".qdsl*"):
        shutil.rmtree(hidden)
    return True


def remembered(work: list[str], source: Path, out: Path, jobs: int, bound: int) -> int:
    """Anonymous memory, looked at a hundred times a second."""
    begun = time.monotonic()
    child = subprocess.Popen(command(work, source, out, jobs), cwd=ROOT, stdout=subprocess.DEVNULL)
    peaks: dict[int, int] = {}
    while child.poll() is None:
        for pid in [child.pid, *_children(child.pid)]:
            peaks[pid] = max(peaks.get(pid, 0), _anonymous(pid))
        time.sleep(0.01)
    took = time.monotonic() - begun
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{work[0]}: {size / 1e9:.2f} GB in {took:.0f} s; peak of anonymous memory {max(peaks.values()) / 1e6:.0f} MB in "
          f"{len(peaks)} processes, bound {bound / 1e6:.0f} MB", flush=True)
    return int(child.returncode != 0 or max(peaks.values()) > bound)


def _children(pid: int) -> list[int]:
    try:
        return [int(pid_text) for pid_text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    sys.exit(main())
