"""Plans a quantized GGUF file from headers alone: types, sizes and metadata.  torch is not imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files.ggml_types import BY_NAME, TORCH
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import shown
from qdsl.checkpoint.report.contents import escaped
from qdsl.host.progress import COPY
from qdsl.jobs.gguf import QuantizeError
from qdsl.jobs.gguf.imatrix import Imatrix
from qdsl.jobs.gguf.mixes import ALIASES, EMBEDDINGS, MIXES, OUTPUT, Options, Tensor, place_of, requires_imatrix
from qdsl.jobs.gguf.quality import Sums
from qdsl.jobs.gguf.source import Source

QUANTIZATION_VERSION = 2                                         # ggml's, of the blocks' layouts
GUESSED = 1024                                                   # a bit of general.file_type
TEXT_LIMIT = 127                                                 # bytes of a text about the imatrix, as llama-quantize cuts them


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor, its new type, and the type of its mix."""

    tensor: Tensor
    type: str
    wanted: str

    @property
    def copied(self) -> bool:
        """Whether the tensor keeps its type."""
        return self.type == self.tensor.type

    @property
    def kind(self) -> str:
        """The kind of its work: weights of one type take about as long."""
        return COPY if self.copied else self.type

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in its new type."""
        return self.tensor.rows * BY_NAME[self.type].row_bytes(self.tensor.columns)

    @property
    def weights(self) -> int:
        return self.tensor.rows * self.tensor.columns


@dataclass(frozen=True, slots=True)
class Plan:
    """All tensors in the order of the new file, and its metadata."""

    steps: tuple[Step, ...]
    metadata: dict[str, Value] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the header and padding."""
        return sum(step.nbytes for step in self.steps)

    @property
    def amounts(self) -> dict[str, int]:
        """Bytes of all tensors, by the kind of their work."""
        sums = Counter[str]()
        for step in self.steps:
            sums[step.kind] += step.nbytes
        return dict(sums)

    @property
    def weights(self) -> int:
        return sum(step.weights for step in self.steps)

    def bits(self, steps: Sequence[Step]) -> float | None:
        """Bits per weight of some of the tensors."""
        weights = sum(step.weights for step in steps)
        return 8 * sum(step.nbytes for step in steps) / weights if weights else None

    def by_type(self) -> dict[str, list[Step]]:
        """Tensors by their new type, the type with the most bytes first."""
        sizes = Counter[str]()
        for step in self.steps:
            sizes[step.type] += step.nbytes
        return {type: [step for step in self.steps if step.type == type] for type, _ in sizes.most_common()}


def plan(source: Source, options: Options, imatrix: Imatrix | None = None, requantize: bool = False) -> Plan:
    """The type of every tensor of a new GGUF file, and its metadata.

    Raises QuantizeError for weights that no type can store and, unless `requantize`, for quantized weights; CheckpointError for
    importances of wrong lengths.
    """
    steps = tuple(Step(source.tensors[name], choice.type, choice.wanted) for name, choice in source.choices(options).items())
    for step in steps:
        type = step.tensor.type
        if not step.copied and type not in TORCH and type in BY_NAME and not requantize:
            raise QuantizeError(f"{source.path}: tensor {shown(step.tensor.name)} is quantized already, as {type}; quantize the "
                                "original, or give --allow-requantize for a worse model")
        if not step.copied and type in ("I8", "I16", "I32", "I64"):
            raise QuantizeError(f"{source.path}: tensor {shown(step.tensor.name)}: integers of {type} are no weights")
    return Plan(steps, _metadata(source, steps, options, imatrix), tuple(notes(steps, options, imatrix)))


def notes(steps: tuple[Step, ...], options: Options, imatrix: Imatrix | None) -> list[str]:
    """What a user should know of the types: blocks that do not fit rows, and importances that are missing."""
    texts: list[str] = []
    replaced: dict[tuple[int, str, str], list[str]] = {}
    for step in steps:
        if step.type != step.wanted:
            replaced.setdefault((step.tensor.columns, step.wanted, step.type), []).append(step.tensor.name)
    for (columns, wanted, type), names in replaced.items():
        tensors, gets = (f"{len(names)} tensors, the first", "they get") if len(names) > 1 else ("tensor", "it gets")
        texts.append(f"{tensors} {shown(names[0])}: rows of {columns} are no multiple of {BY_NAME[wanted].elements}, the block "
                     f"of {wanted}; {gets} {type}")
    texts += [f"--tensor-type {shown(pattern.pattern)}: found in no tensor's name" for pattern, _ in options.overrides
              if not any(pattern.search(step.tensor.name) for step in steps)]
    missing = without_imatrix(steps, options, imatrix)
    if missing:
        texts.append(f"{len(missing)} tensors need an importance matrix, the first {shown(missing[0].tensor.name)} as "
                     f"{missing[0].type}")
    if imatrix is not None:
        unknown = [step.tensor.name for step in steps if step.type not in TORCH and not step.copied
                   and imatrix.entry(step.tensor) is None and step.tensor.name not in (OUTPUT, *EMBEDDINGS)]
        if unknown:
            texts.append(f"{imatrix.path} has nothing of {len(unknown)} tensors, the first {shown(unknown[0])}")
    return texts


def without_imatrix(steps: tuple[Step, ...], options: Options, imatrix: Imatrix | None) -> list[Step]:
    """Tensors that need an importance matrix for their new type, and have none."""
    measured = imatrix.entries if imatrix else {}
    return [step for step in steps if not step.copied and step.tensor.name not in measured
            and requires_imatrix(step.tensor.name, step.type, options.mix.name)]


def _metadata(source: Source, steps: Iterable[Step], options: Options, imatrix: Imatrix | None) -> dict[str, Value]:
    """The metadata of the source and those that llama-quantize adds, in its order."""
    added: dict[str, tuple[str, Any]] = {"general.quantization_version": ("u32", QUANTIZATION_VERSION)}
    number = source.metadata.get("general.file_type")
    added["general.file_type"] = ("u32", options.mix.file_type if options.mix.file_type is not None else
                                  number.decoded() if number is not None and options.mix.default is None else
                                  _guessed_file_type(steps))
    if imatrix is not None:
        added["quantize.imatrix.file"] = ("string", _cut(str(imatrix.path)))
        if imatrix.datasets:
            added["quantize.imatrix.dataset"] = ("string", _cut(imatrix.datasets[0]))
        added["quantize.imatrix.entries_count"] = ("u32", len(imatrix.entries))
        if imatrix.chunks:
            added["quantize.imatrix.chunks_count"] = ("u32", imatrix.chunks)
    kept = {key: value for key, value in source.metadata.items() if key not in added}
    return kept | {key: Value.of(type, content) for key, (type, content) in added.items()}


def _guessed_file_type(steps: Iterable[Step]) -> int:
    """The file type that llama.cpp infers where metadata state none: that of the most frequent type."""
    counts, type = Counter[str](), "F32"
    for step in sorted(steps, key=lambda step: place_of(step.tensor)):
        counts[step.type] += 1
        if counts[step.type] > counts[type] or counts.total() == 1:
            type = step.type
    mix = MIXES.get(ALIASES.get(type, type))
    return GUESSED | (mix.file_type or 0 if mix else 0)


def _cut(text: str) -> str:
    return text.encode()[:TEXT_LIMIT].decode(errors="ignore")


def data(planned: Plan, path: Path, costs: Mapping[str, Sums] | None = None) -> dict[str, Any]:
    """The plan as a dictionary for JSON.  costs: the error of each tensor, once it is known."""
    sums = costs or {}
    tensors = [{"name": step.tensor.name, "shape": list(step.tensor.shape), "from": step.tensor.type, "type": step.type,
                "nbytes": step.nbytes, **(sums[step.tensor.name].data() if step.tensor.name in sums else {})}
               for step in planned.steps]
    return {"file": str(path), "nbytes": planned.nbytes, "weights": planned.weights,
            "bits_per_weight": planned.bits(planned.steps), "notes": list(planned.notes),
            "types": [_sum(planned, type, sums) for type in planned.by_type()], "tensors": tensors}


def _sum(planned: Plan, type: str, costs: Mapping[str, Sums]) -> dict[str, Any]:
    steps = planned.by_type()[type]
    changed = [costs[step.tensor.name] for step in steps if step.tensor.name in costs]
    return {"type": type, "tensors": len(steps), "weights": sum(step.weights for step in steps),
            "nbytes": sum(step.nbytes for step in steps), "bits_per_weight": planned.bits(steps),
            **(sum(changed, Sums()).data() if changed else {})}


def tables(report: Mapping[str, Any]) -> list[list[list[str]]]:
    """The report of `data` as text: a table of tensors and one of types, heads first."""
    ends = {"snr_db": "SNR dB", "weighted_snr_db": "weighted"}
    keys = [key for key in ends if any(key in entry for entry in report["types"])]

    def last(row: Mapping[str, Any]) -> list[str]:
        ratios = ["" if key not in row else "exact" if row[key] is None else f"{row[key]:.1f}" for key in keys]
        return [f"{row['nbytes'] / (1 << 20):.2f}", *ratios]

    heads = ["MiB", *(ends[key] for key in keys)]
    tensors = [[escaped(entry["name"]), " x ".join(map(str, entry["shape"])), entry["from"], entry["type"], *last(entry)]
               for entry in report["tensors"]]
    types = [[entry["type"], str(entry["tensors"]), str(entry["weights"]), f"{entry['bits_per_weight'] or 0:.3f}", *last(entry)]
             for entry in report["types"]]
    return [[["tensor", "shape", "from", "to", *heads], *tensors], [["type", "tensors", "weights", "bits", *heads], *types]]
