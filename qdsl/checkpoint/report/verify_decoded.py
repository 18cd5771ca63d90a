"""Compares the decoded weights of two checkpoints: layers in any format and storage, and weights of DF11 groups, with one another
or with plain floats of the same module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layer_weights import decoded, weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.checkpoint.report import worker
from qdsl.checkpoint.report.verify import Difference, LargestDifference, Tell, bitwise, index_of
from qdsl.host import progress
from qdsl.host.processes import results

if TYPE_CHECKING:
    from torch import Tensor

    from qdsl.runtime.weight.packed import PackedWeight

FLOATS = ("F64", "F32", "F16", "BF16")
TILE, PACKED = 1 << 19, 1 << 22                                  # weights of both at a time: decoded, or compared as stored


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """A weight of a group; its shape is that of the other checkpoint, as the group states only its size."""

    group: Group
    name: str
    shape: tuple[int, ...]


Unit = Layer | GroupWeight | str                                 # a layer, a weight of a group, or the name of a plain tensor
_groups: dict[Folder, tuple[str, dict[str, Tensor]]] = {}        # of each checkpoint the group that was decoded last


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor, layer or group weight that both checkpoints have."""

    name: str
    a: Unit
    b: Unit


def decoded_differences(a: Path, b: Path, tolerance: float = 0.0, *, jobs: int = 1, tell: Tell = lambda done, name: None,
                        ) -> list[Difference]:
    """All differences between two checkpoints after exact decoding of quantized layers to float32.

    Numbers may differ by `tolerance` times the largest magnitude of their tensor in A; NaN equals NaN.  Plain tensors of the
    same dtype are compared bit for bit, except floats where there is a tolerance.
    Raises CheckpointError for layers that are not recognised, and OSError for files that cannot be read.
    """
    with Folder(a) as left, Folder(b) as right:
        mine, other = _named_alike(_units(left), _units(right))
        differing: dict[str, Difference] = {}
        pairs = []
        for name, unit in mine.items():
            counterpart = other.get(name)
            if counterpart is None:
                differing[name] = Difference(name, "missing", _text(left, unit), None)
                continue
            unit, counterpart = _shaped(unit, _shape(right, counterpart)), _shaped(counterpart, _shape(left, unit))
            a_shape, b_shape = _shape(left, unit), _shape(right, counterpart)
            if not _are_alike(a_shape, b_shape, isinstance(unit, str) is isinstance(counterpart, str)):
                differing[name] = Difference(name, "shape", str(list(a_shape)), str(list(b_shape)))
            else:
                pairs.append(Pair(name, unit, counterpart))
        plain = [pair for pair in pairs if _is_plain(left, right, pair, tolerance)]
        work = [pair for pair in pairs if pair not in plain]
        size = sum(left.entry(pair.name).nbytes for pair in plain)
        differences = bitwise(left, right, [pair.name for pair in plain], jobs, tell)
        differing |= {difference.tensor: difference for difference in differences}
        with ExitStack() as done:
            done.callback(worker.finish)
            done.callback(_groups.clear)
            answers = done.enter_context(closing(results(compare, work, min(jobs, len(work)), worker.start, (a, b))))
            for pair, answer in zip(work, answers, strict=True):
                size += _nbytes(left, pair.a)
                tell(size, pair.name)
                if not answer.distance <= tolerance * answer.largest:
                    differing[pair.name] = Difference(pair.name, "decoded", answer.a, answer.b, answer)
        extra = [Difference(name, "missing", None, _text(right, unit)) for name, unit in other.items() if name not in mine]
        return [*(differing[name] for name in mine if name in differing), *extra]


def _units(folder: Folder) -> dict[str, Unit]:
    """What is compared of a checkpoint, by the name of the plain weight."""
    model = layers(folder)
    inside = {full for group in model.groups for full in group.tensors.values()}
    units: dict[str, Unit] = {name: name for name in model.plain if name not in inside}
    units |= {name: GroupWeight(group, name, (count,)) for group in model.groups for name, count in group.parts.items()}
    for layer in model.layers:
        if not layer.format:
            raise CheckpointError(f"{folder.path}: layer {shown(layer.name)}: {layer.why}")
        units[f"{layer.name}.weight" if layer.name else "weight"] = layer
        units |= {full: full for full in layer.others.values()}
    return units


def _named_alike(a: dict[str, Unit], b: dict[str, Unit]) -> tuple[dict[str, Unit], dict[str, Unit]]:
    """Both checkpoints with experts' layers renamed to the other's parameter names, which lack '.weight'."""
    def renamed(units: dict[str, Unit], others: dict[str, Unit]) -> dict[str, Unit]:
        short = {name: name.removesuffix(".weight") for name, unit in units.items() if isinstance(unit, Layer)}
        return {short[name] if name not in others and short.get(name) in others else name: unit for name, unit in units.items()}

    return renamed(a, b), renamed(b, a)


def _are_alike(a: tuple[int, ...], b: tuple[int, ...], exactly: bool) -> bool:
    """Whether shapes are equal; unless `exactly`, stacked experts also equal one matrix of all their rows."""
    return a == b or (not exactly and a[-1:] == b[-1:] and len(a) + len(b) == 5 and math.prod(a) == math.prod(b))


def _shaped(unit: Unit, shape: tuple[int, ...]) -> Unit:
    """A group weight in the shape of the other checkpoint; where that is unknown too, as a matrix of any row size."""
    if not isinstance(unit, GroupWeight) or not shape or math.prod(unit.shape) != math.prod(shape):
        return unit
    columns = math.gcd(*shape, 1 << 12)
    return replace(unit, shape=shape if len(shape) > 1 else (shape[0] // columns, columns))


def _nbytes(folder: Folder, unit: Unit) -> int:
    if isinstance(unit, GroupWeight):
        whole = sum(folder.entry(full).nbytes for full in unit.group.tensors.values())
        return whole * math.prod(unit.shape) // max(1, unit.group.numbers)
    return sum(folder.entry(full).nbytes for full in ([unit] if isinstance(unit, str) else unit.tensors.values()))


def _shape(folder: Folder, unit: Unit) -> tuple[int, ...]:
    if isinstance(unit, str):
        return folder.entry(unit).shape
    return unit.shape if isinstance(unit, GroupWeight) or unit.experts is None else (unit.experts, *unit.shape)


def _text(folder: Folder, unit: Unit) -> str:
    what = folder.entry(unit).dtype if isinstance(unit, str) else \
        unit.group.format if isinstance(unit, GroupWeight) else f"{unit.format}.{unit.storage}"
    return f"{what} {list(_shape(folder, unit))}"


def _is_plain(a: Folder, b: Folder, pair: Pair, tolerance: float) -> bool:
    """Whether a pair is compared bit for bit.  Raises CheckpointError for dtypes that are not decoded."""
    if isinstance(pair.a, str) and isinstance(pair.b, str):
        dtypes = {a.entry(pair.a).dtype, b.entry(pair.b).dtype}
        return (len(dtypes) == 1 and not tolerance) or not dtypes <= set(FLOATS)
    for folder, unit in ((a, pair.a), (b, pair.b)):
        if isinstance(unit, str) and folder.entry(unit).dtype not in FLOATS:
            raise CheckpointError(f"{folder.path}: tensor {shown(unit)}: {folder.entry(unit).dtype} is not decoded")
    return False


# The work of a process

def compare(pair: Pair) -> LargestDifference:
    """The two numbers of a pair that differ most; infinitely far where one of them is NaN."""
    a, b = (_numbers(folder, unit) for folder, unit in zip(worker.folders, (pair.a, pair.b), strict=True))
    shape = _shape(worker.folders[0], pair.a)
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    matrix = math.gcd(a.rows, b.rows)                            # no tile goes through a matrix of experts
    least = min(math.lcm(a.step, b.step), matrix)

    def tiles(size: int) -> list[tuple[int, int]]:
        step = max(1, size // max(1, columns) // max(1, least)) * least
        return [(start, min(start + step, first + matrix)) for first in range(0, rows if columns else 0, max(1, matrix))
                for start in range(first, first + matrix, step)]

    worst, nbytes = LargestDifference(0.0, 0.0), _nbytes(worker.folders[0], pair.a)
    with progress.step(progress.COMPARE, nbytes), progress.step_share(nbytes, rows):
        if all(_is_same(a, b, *tile) for tile in tiles(PACKED)):  # which takes a fifth of the time of decoding them, or less
            return worst
        for start, stop in tiles(TILE):
            worst = _worse(worst, a.of(start, stop), b.of(start, stop), start * columns, shape)
            progress.advance_units(stop - start)
    return worst


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Decoded floats by rows: one matrix has `rows` rows, and can be cut at multiples of `step`.

    packed: the same rows of a layer, as they are stored.
    """

    rows: int
    step: int
    of: Callable[[int, int], Tensor]
    packed: Callable[[int, int], PackedWeight] | None = None


def _numbers(folder: Folder, unit: Unit) -> _Numbers:
    if isinstance(unit, str):
        tensor = folder.tensor(unit)
        flat = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.dim() else 1)
        return _Numbers(len(flat), 1, lambda start, stop: flat[start:stop])
    if isinstance(unit, GroupWeight):
        if folder not in _groups or _groups[folder][0] != unit.group.name:
            _groups[folder] = unit.group.name, decoded(folder, unit.group)
        matrix = _groups[folder][1][unit.name].view(math.prod(unit.shape[:-1]), unit.shape[-1])
        return _Numbers(len(matrix), 1, lambda start, stop: matrix[start:stop])
    import torch

    matrices, rows = weights(folder, unit), unit.shape[0]
    decode = matrices[0].format.dequantize

    def packed(start: int, stop: int) -> PackedWeight:
        return matrices[start // rows].cut("N", start % rows, start % rows + stop - start)

    return _Numbers(rows, matrices[0].step("N"), lambda start, stop: decode(packed(start, stop), torch.float32), packed)


def _is_same(a: _Numbers, b: _Numbers, start: int, stop: int) -> bool:
    """Whether rows of two layers are equal in the same storage, or in all fields."""
    if a.packed is None or b.packed is None:
        return False
    x, y = a.packed(start, stop), b.packed(start, stop)
    return x.variant is y.variant and x.sizes == y.sizes and (_same_tensors(x, y) or _same_fields(x, y))


def _same_tensors(x: PackedWeight, y: PackedWeight) -> bool:
    """Whether the tensors of x, moved to the storage of y, are those of y; False if they cannot be moved word by word."""
    from qdsl.runtime.weight.convert import moved_tensors

    tensors = {} if x.params != y.params else x.tensors if x.storage == y.storage else moved_tensors(x, y)
    return bool(tensors) and tensors.keys() == y.tensors.keys() and all(
        same_bits(tensor, y.tensors[name]) for name, tensor in tensors.items())


def _same_fields(x: PackedWeight, y: PackedWeight) -> bool:
    from qdsl.runtime.weight.defaults import is_default

    x_fields, y_fields = x.format.unpack(x), y.format.unpack(y)
    return all(same_bits(x_fields[name], y_fields[name]) if name in x_fields and name in y_fields
               else is_default(x.variant, name, value, x.sizes) for name, value in (x_fields | y_fields).items())


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same dtype and bits, in whatever shapes."""
    import torch

    return x.dtype == y.dtype and torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (x, y)))


def _worse(worst: LargestDifference, x: Tensor, y: Tensor, start: int, shape: tuple[int, ...]) -> LargestDifference:
    """The larger of the worst difference so far and that of the given elements, which begin at `start` of the flat tensor."""
    import torch

    if torch.equal(x.float(), y.float()) and torch.float64 not in (x.dtype, y.dtype):
        largest = float(x.abs().max())
        if math.isfinite(largest):
            return replace(worst, largest=max(worst.largest, largest))
    x, y = x.double().flatten(), y.double().flatten()
    apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)
    place = int(apart.argmax())
    distance = float(apart[place])
    largest = max(worst.largest, float(torch.where(x.isfinite(), x.abs(), 0.0).max()))
    if distance <= worst.distance:
        return replace(worst, largest=largest)
    return LargestDifference(distance, largest, index_of(start + place, shape), f"{float(x[place]):.9g}",
                             f"{float(y[place]):.9g}")
