"""The layers that detection finds in a checkpoint: quantized ones, plain modules, and their problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.ledger import Finding
from qdsl.checkpoint.detect.quantization import Quantization
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.stored import NO_SHAPE
from qdsl.core.transforms import Transform

NOT_KNOWN = "quantized in a way that is not known"


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized module, or one with tensors of a quantized module that fit no format.

    tensors: the storage's names -> names in the checkpoint.  numbers: one-number tensors that JSON states.  shape: (N, K).
    experts: the number of weights stacked along a first axis of every tensor, None without that axis.  settings: tensors that
    only repeat the fields above.  others: the module's other tensors, by the last parts of their names: bias, scales of
    activations.  by: the config's rule or group for the layer.  contradictions: settings that contradict its tensors in what
    its numbers depend on, so that nobody may read it.  problems: others, which change no number.  why: the reason why it is not
    recognised; format and storage are then ''.  transposed: the last two axes of three-axis tensors are swapped compared to
    the storage, as in experts' weights [E, K, N].  act_order: columns of a group lie anywhere along K; False until
    `qdsl.checkpoint.report.shards.with_act_order` has read the index.  transforms: of its input and output.
    """

    name: str
    format: str = ""
    storage: str = ""
    params: Mapping[str, int | str] = field(default_factory=dict)
    shape: tuple[int, int] = (0, 0)
    experts: int | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    problems: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    why: str = ""
    transposed: bool = False
    act_order: bool = False
    transforms: tuple[Transform, ...] = ()

    def __repr__(self) -> str:
        what = "".join([f"{self.format}.{self.storage} {[*([self.experts] if self.experts else []), *self.shape]}",
                        *(f" {key}={value}" for key, value in self.params.items())])
        return f"Layer({self.name}: {self.why or what})"

    @property
    def is_unknown(self) -> bool:
        """Whether it is quantized but fits no format."""
        return self.why.startswith(NOT_KNOWN)

    @property
    def transform_tensors(self) -> frozenset[str]:
        return frozenset(name for own in self.transforms for name in own.tensors)

    @property
    def lacks_shape(self) -> bool:
        """Whether its tensors do not determine N and K."""
        return self.why.endswith(NO_SHAPE)

    @property
    def stacked(self) -> bool:
        """Whether the name is that of a weight and not of its module, as for experts in one tensor."""
        begin = f"{self.name}." if self.name else ""
        return not all(full.startswith(begin) for full in (*self.tensors.values(), *self.others.values()))


@dataclass(frozen=True, slots=True)
class UnquantizedModule:
    """A module with an unquantized matrix.  by: the config's rule for that; problem: why it should be quantized."""

    name: str
    by: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """A checkpoint's quantized layers, and all other tensors, in the order of the files.

    left: modules with unquantized matrices.  problems, contradictions: of the checkpoint and not of one layer, as in a Layer.
    notes: on entries of its lists that name nothing.  groups: weights in one entropy code; their tensors are among the others.
    transforms: those of plain modules, by name; tensors of transforms are not among `plain`.
    findings: settings and tensors with which qdsl does not compute.
    """

    layers: list[Layer]
    plain: list[str]
    left: list[UnquantizedModule]
    quantizations: list[Quantization]
    problems: list[str]
    groups: list[Group]
    notes: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    transforms: Mapping[str, tuple[Transform, ...]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def refuse_contradictions(self, path: Path) -> Layers:
        """These layers, if no settings contradict tensors in what numbers depend on.

        Every reader of weights asks this, and nobody else decides it.  Raises CheckpointError with the first contradiction.
        """
        contradictions = [*(("", text) for text in self.contradictions),
                          *((layer.name, text) for layer in self.layers for text in layer.contradictions)]
        if contradictions:
            first = contradictions[0][1]
            alike = [name for name, text in contradictions if text == first and name]
            more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
            where = f"layer {shown(alike[0])}{more}: " if alike else ""
            raise CheckpointError(f"{path}: {where}{first}; correct what is wrong: `qdsl inspect` lists all contradictions")
        return self
