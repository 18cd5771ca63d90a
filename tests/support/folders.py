"""Small checkpoint folders of quantized layers, in files as a test wants them."""

from __future__ import annotations

import filecmp
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qdsl import __main__
from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.files.crc import FILE as CHECKSUMS
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.runtime import PackedWeight

KILLED = 1 if os.environ.get("QDSL_TEST_ALL") else 3              # of so many operations of a writer, one is its last
TURN = int(os.environ.get("QDSL_TEST_TURN", "0"))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq_v2"}


def named(weights: Mapping[str, PackedWeight]) -> dict[str, torch.Tensor]:
    """Tensors as a checkpoint calls them."""
    return {f"{layer}.{packed.names.get(name, name)}": tensor for layer, packed in weights.items()
            for name, tensor in packed.tensors.items()}


def folder(path: Path, *shards: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, index: bool = True) -> Path:
    """A folder of these files, with a config, a tokenizer, and weights of another kind that belong to nothing."""
    path.mkdir(parents=True)
    placed = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if index else "model.safetensors"
        write(path / name, tensors, {"format": "pt"})
        placed.update(dict.fromkeys(tensors, name))
    if index:
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0, "total_parameters": 7}, "weight_map": placed}))
    settings = {"model_type": "toy", "architectures": ["Toy"], "quantization_config": GPTQ} if config is None else config
    (path / "config.json").write_text(json.dumps(settings))
    if config is None and (own := _settings_of_others(path)):
        (path / "config.json").write_text(json.dumps({**settings, "quantization_config": {**GPTQ, "dynamic": own}}))
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"PK")
    return path


def _settings_of_others(path: Path) -> dict[str, dict[str, Any]]:
    """The `dynamic` settings of GPTQ's layers that have other sizes; layers of other formats are left alone."""
    with Folder(path) as source:
        return {f"^{layer.name}$" if layer.storage == "gptq_v2" else f"-:^{layer.name}$":
                {"bits": layer.params["bits"], "group_size": layer.params["group"]} if layer.storage == "gptq_v2" else {}
                for layer in detected_layers(source).layers if layer.contradictions}


def files(path: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


def killed(work: Callable[[], object], out: Path, after: int) -> bool:
    """Whether a process that writes a folder was killed, before the operation on the output that comes after so many."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    try:
        torch.set_num_threads(1)                                 # the threads of the parent are not here
        _watched(out, after)
        work()
    finally:
        os._exit(0)


def signalled(arguments: Sequence[str | Path], out: Path, after: int, number: int, log: Path) -> tuple[int, str]:
    """The exit code and the messages of the program where a signal comes at the operation on the output after so many."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text()
    code = 99
    try:
        torch.set_num_threads(1)
        sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115
        os.dup2(sys.stdout.fileno(), 2)
        sys.argv = ["qdsl", *map(str, arguments)]
        if number == signal.SIGINT:                              # which jobs in a script's background ignore
            signal.signal(number, signal.default_int_handler)
        _watched(out, after, number)
        __main__.main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os._exit(code)


def killed_everywhere(work: Callable[[Path], Any], parent: Path) -> Iterator[Any]:
    """Kill the writer of a folder before every KILLED-th operation, others after each commit, and let the next one finish.

    Yields what that returns.  Asserts that no reader takes what is left for a checkpoint unless it is whole, and that the next
    makes the same bytes.
    """
    work(parent / "whole")
    whole, after = files(parent / "whole"), TURN % KILLED
    while killed(lambda: work(out), out := parent / f"out{after}", after):
        left = files(out) if out.exists() else {}
        try:
            Folder(out).close()
        except (CheckpointError, FileNotFoundError):
            pass
        else:
            assert {name: data for name, data in left.items() if not name.startswith(".qdsl")} == whole
        yield work(out)
        assert files(out) == whole
        after += KILLED
    assert files(out) == whole


def operations(work: Callable[[], object], out: Path) -> int:
    """How many operations on the output a work takes, each a point at which it can be killed."""
    reading, writing = os.pipe()
    if not os.fork():
        try:
            torch.set_num_threads(1)
            count = _watched(out, None)
            work()
            os.write(writing, str(count[0]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        return int(answer.read())


def _watched(out: Path, after: int | None, number: int | None = None) -> list[int]:
    """A count of the operations on an output from now on; the process ends at the one after so many, or gets a signal there."""
    count = [0]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(str(out)):
            count[0] += 1
            if after is not None and count[0] == after + 1:
                os._exit(9) if number is None else os.kill(os.getpid(), number)

    sys.addaudithook(watch)
    return count


def same_files(one: Path, other: Path) -> bool:
    """Whether files are the same; of lists of checksums the part of weights, because a library writes the other files."""
    names = sorted(path.name for path in one.iterdir() if path.name != CHECKSUMS)
    paths = [one / CHECKSUMS, other / CHECKSUMS] if (one / CHECKSUMS).exists() else []
    lists = [json.loads(path.read_text()) | {"others": {}} for path in paths]
    return bool(names) and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names) and lists[1:] == lists[:1]
