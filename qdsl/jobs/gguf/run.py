"""Quantizes a model to a GGUF file: chunks of rows are encoded by parallel processes and written in order.

Chunks and their order do not depend on how many processes there are, so neither do the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.detect.gguf_weights import module_of
from qdsl.checkpoint.files.ggml_types import BY_NAME, TORCH
from qdsl.checkpoint.files.gguf_write import NewTensor, write
from qdsl.checkpoint.files.resume import Resume
from qdsl.checkpoint.files.safetensors import Buffer, bytes_of, shown
from qdsl.encode.calibrated import solve, store
from qdsl.encode.calibrated.hessian import inverting
from qdsl.host import progress
from qdsl.host.files import check_output, digest, identity
from qdsl.host.processes import affordable, needed, results
from qdsl.jobs.gguf import QuantizeError
from qdsl.jobs.gguf.imatrix import Imatrix
from qdsl.jobs.gguf.mixes import IMATRIX_POWERS, Options
from qdsl.jobs.gguf.plan_file import Plan, Step, without_imatrix
from qdsl.jobs.gguf.quality import Sums, quantization_error
from qdsl.jobs.gguf.source import Source, Weights
from qdsl.runtime import FormatError

CHUNK = 1 << 20                                                  # weights: 4 MiB of floats
Tell = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Task:
    """Rows [start, stop) of a tensor, all of one matrix of it, and their new type.

    importance: of its columns, float32 [K].  power: the exponent of importances when scales are chosen.  moments: the folder and
    layer with the moments of its inputs, and the method of quantizing by them.
    """

    name: str
    type: str
    start: int
    stop: int
    importance: Tensor | None = field(default=None, compare=False)
    power: float = 1.0
    moments: tuple[Path, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Moments of inputs.  folder: has them.  layers: their names there, by the names of tensors: one for each matrix, '' for an
    expert that got no token.  what: a digest of what they depend on.  method: of encode/calibrated/solve.py.
    """

    folder: Path
    layers: Mapping[str, Sequence[str]]
    what: str
    method: str


def quantize_file(source: Source, plan: Plan, options: Options, out: Path, imatrix: Imatrix | None = None, *, jobs: int = 1,
                  power: float | None = None, force: bool = True, tell: Tell = lambda done, name: None,
                  calibration: Calibration | None = None) -> dict[str, Sums]:
    """Write the GGUF file of a plan; returns the error of each quantized tensor, measured on the stored weights.

    force: whether an existing file is replaced.
    power: the exponent of importances when scales are chosen, 0 to 1; None for that of the type (IMATRIX_POWERS, else 1), and for
    1 where codes are compensated.
    tell: progress in bytes, after each tensor.  Memory: some chunks for each process.
    calibration: tensors whose inputs it knows are quantized by them.
    Re-run to resume with the first tensor that is not complete.
    Raises QuantizeError, CheckpointError and OSError; `out` is then as it was.
    """
    check_output(out, source.path, *source.paths, *([imatrix.path] if imatrix else []))
    _check(plan, options, imatrix, calibration.layers.keys() if calibration else ())
    inputs = {Path(path): identity(Path(path)) for path in (*source.paths, *([imatrix.path] if imatrix else []))}
    usual = {} if calibration and calibration.method == solve.GPTQ else IMATRIX_POWERS
    powers = {step.type: usual.get(step.type, 1.0) if power is None else power for step in plan.steps if imatrix or calibration}
    resume = Resume(digest("quantize", list(inputs.values()), [step.type for step in plan.steps], powers,
                           *([calibration.what] if calibration else [])), inputs,
                    {step.tensor.name: source.ranges(step.tensor.name) for step in plan.steps}, force=force)
    tasks = [list(_tasks(step, imatrix, powers, calibration)) for step in plan.steps]
    encoded: Generator[tuple[Buffer, Sums], None, None] | None = None

    def chunks(number: int) -> Iterator[Buffer]:
        """The bytes of a tensor; the first call starts the work for all tensors from `number` on."""
        nonlocal encoded
        if encoded is None:
            progress.skip_before((step.kind, step.nbytes) for step in plan.steps[:number])
            encoded = _results([task for some in tasks[number:] for task in some], source, jobs, resume.read)
        step, cost = plan.steps[number], None
        if step.copied:
            yield from _copied(source, step)
        for _ in tasks[number]:
            data, sums = next(encoded)
            cost = (cost or Sums()) + sums
            yield data
        resume.notes[step.tensor.name] = cost and astuple(cost)
        tell(sum(done.nbytes for done in plan.steps[:number + 1]), step.tensor.name)

    try:
        write(out, plan.metadata, [NewTensor(step.tensor.name, BY_NAME[step.type], step.tensor.shape, chunks(number))
                                   for number, step in enumerate(plan.steps)], resume, state_checksums=True)
    finally:
        if encoded:
            encoded.close()
    return {name: Sums(*cost) for name, cost in resume.notes.items() if cost}


def quantizer_of(type: str) -> Any:
    """The generated module that quantizes to a type; None for one without."""
    module = None if type in TORCH else module_of(type)
    return module if module is not None and module.FORMAT.variant(module.FORMAT.complete({})).encode is not None else None


def _check(plan: Plan, options: Options, imatrix: Imatrix | None, measured: Container[str]) -> None:
    """Raise QuantizeError for what cannot be written, before any weight is read.  measured: tensors with a calibration."""
    if missing := [step for step in without_imatrix(plan.steps, options, imatrix) if step.tensor.name not in measured]:
        hint = f"{imatrix.path} has nothing of it" if imatrix else "give one with --imatrix"
        raise QuantizeError(f"tensor {shown(missing[0].tensor.name)} would be garbage as {missing[0].type} without an importance "
                            f"matrix: {hint}")
    for type in sorted({step.type for step in plan.steps if not step.copied} - TORCH.keys()):
        module = quantizer_of(type)
        if module is None:
            raise QuantizeError(f"there is no quantizer for {type} yet")
        variant = module.FORMAT.variant(module.FORMAT.complete({}))
        others = list(variant.storages[module.SPEC.storages[0]].tensors)[1:]
        if others:
            raise QuantizeError(f"{type} needs another tensor for each weight, {others[0]}, which is not written")


def _tasks(step: Step, imatrix: Imatrix | None, powers: Mapping[str, float], calibration: Calibration | None) -> Iterator[Task]:
    if step.copied or not step.weights:
        return
    tensor = step.tensor
    importance = imatrix.values(tensor) if imatrix and step.type not in TORCH else None
    layers = calibration.layers.get(tensor.name) if calibration and step.type not in TORCH else None
    rows = tensor.rows // tensor.experts
    if layers and importance is None:                            # as an importance matrix says it of experts without a token
        importance = torch.ones(tensor.experts, tensor.columns, dtype=torch.float32, device="cpu")
    for expert in range(tensor.experts):
        moments = (calibration.folder, layers[expert], calibration.method) if calibration and layers and layers[expert] else None
        size = rows if moments else max(1, CHUNK // tensor.columns)   # the moments are inverted once for all rows
        first = expert * rows
        for start in range(first, first + rows, size):
            yield Task(tensor.name, step.type, start, min(start + size, first + rows),
                       None if importance is None else importance[expert], powers.get(step.type, 1.0),
                       moments)


def _results(tasks: list[Task], source: Source, jobs: int, before: Callable[[str], object],
             ) -> Generator[tuple[Buffer, Sums], None, None]:
    """Bytes and errors of the tasks in order, computed a few tasks ahead.  before: called with a tensor's name before a task."""
    jobs = min(jobs, len(tasks))
    begun = ((before(task.name), task)[1] for task in tasks)
    if jobs <= 1:
        with _one_thread():
            yield from (_counted_encode(source, task) for task in begun)
    else:
        yield from results(_encode_in_worker, begun, jobs, _start, (source,))


_sources: list[Source] = []                                      # of a worker process


def _start(source: Source) -> None:
    torch.set_num_threads(1)
    _sources.append(source)


def _encode_in_worker(task: Task) -> tuple[bytes, Sums]:
    data, sums = _counted_encode(_sources[0], task)
    return bytes(data), sums


def _counted_encode(source: Weights, task: Task) -> tuple[Buffer, Sums]:
    rows = (task.stop - task.start) * BY_NAME[task.type].row_bytes(source.tensors[task.name].columns)
    with progress.step(task.type, rows), progress.step_share(rows, (task.stop - task.start) * source.tensors[task.name].columns):
        return encode(source, task)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, so that sums are the same as in worker processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def encode(source: Weights, task: Task) -> tuple[Buffer, Sums]:
    """Some rows in their new type, as bytes, and their error.  Raises QuantizeError with the place of a wrong weight."""
    weight = source.rows(task.name, task.start, task.stop).float()
    _check_finite(weight, source, task.name, task.start)
    if task.type in TORCH:
        stored = weight.to(getattr(torch, TORCH[task.type]))
        _check_finite(stored, source, task.name, task.start, f" in {task.type}")
        return bytes_of(stored), quantization_error(weight, stored.float())
    module = module_of(task.type)
    assert module is not None                                    # looked up before the first task
    try:
        if task.moments is not None:
            folder, layer, method = task.moments
            packed = solve.quantize(module.FORMAT, weight, store.Moments(folder)[layer], method, task.power)
        else:
            importance = None if task.importance is None else _counted(task.importance, task.power)
            packed = module.quantize(weight, **({} if importance is None else {"importance": importance}))
    except FormatError as error:
        raise QuantizeError(f"{source.path}: tensor {shown(task.name)}, rows {task.start} to {task.stop}: {error}") from None
    [blocks] = packed.tensors.values()
    return bytes_of(blocks), quantization_error(weight, module.dequantize(packed, torch.float32), task.importance)


def _counted(importance: Tensor, power: float) -> Tensor:
    """Importances [K] raised to a power, in float64 before rounding to float32, so that machines agree."""
    return importance if power == 1 else (importance.double() ** power).float()


def _copied(source: Source, step: Step) -> Iterator[Buffer]:
    """The bytes of a tensor that keeps its type.  Raises QuantizeError for floats that are not finite."""
    tensor = step.tensor
    size = max(1, CHUNK // max(1, tensor.columns))
    for start in range(0, tensor.rows if step.weights else 0, size):
        stop = min(start + size, tensor.rows)
        with progress.step(progress.COPY, (stop - start) * BY_NAME[tensor.type].row_bytes(tensor.columns)):
            rows = source.stored(tensor.name, start, stop)
            if tensor.type in ("F32", "F16", "BF16", "F64"):
                _check_finite(rows, source, tensor.name, start)
        yield bytes_of(rows)


def _check_finite(weight: Tensor, source: Weights, name: str, start: int, where: str = "") -> None:
    """Raises QuantizeError for the first weight that is NaN or infinite.  start: the row of the tensor of weight[0]."""
    if math.isfinite(float(weight.sum(dtype=torch.float64))):
        return
    bad = torch.nonzero(~torch.isfinite(weight))
    if bad.numel():
        row, column = (int(i) for i in bad[0])
        tensor = source.tensors[name]
        rows = tensor.rows // tensor.experts
        expert = f"expert {(start + row) // rows}, " if tensor.experts > 1 else ""
        raise QuantizeError(f"{source.path}: tensor {shown(name)}: the weight at {expert}row {(start + row) % rows}, column "
                            f"{column} is {float(weight[row, column])}{where}")


def default_jobs(plan: Plan, calibration: Calibration | None = None) -> int:
    """The number of processes: what processors and memory allow, but fewer for a few seconds of work."""
    work = sum(step.weights for step in plan.steps if not step.copied)
    whole = [8 * step.weights // step.tensor.experts + inverting(step.tensor.columns) for step in plan.steps
             if calibration and step.tensor.name in calibration.layers]
    return max(1, min(affordable(needed(max([16 * CHUNK, *whole]))), work >> 26))
