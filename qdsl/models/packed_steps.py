"""Packed layers and their places in a model, and which way round their matrices lie in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from qdsl.checkpoint.detect.descriptions import description_of
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.files.safetensors import shown
from qdsl.runtime.torch.products import product_of


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A packed layer, and its place in the model.

    kind: 'linear', 'embedding', 'experts', or 'dense' for a place that takes plain numbers, and why.  name: of the module, or of
    the parameter.  shape: of the parameter it replaces.  experts: how many lie in the layer, one after the other; None for a
    weight that is none of a stack.  transposed: the model has experts as [E, K, N], or the weight as [K, N].  parts: the layers
    whose rows follow one another, expert after expert, where the checkpoint has them one by one; the first of them is `layer`.
    """

    layer: Layer
    name: str
    kind: str
    shape: tuple[int, ...]
    why: str = ""
    experts: int | None = None
    transposed: bool = False
    parts: tuple[Layer, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the checkpoint that the step places."""
        return self.parts or (self.layer,)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the layers, joined: [N, K], or [E, N, K]."""
        n, k = sum(layer.shape[0] for layer in self.layers), self.layer.shape[1]
        return (n, k) if self.experts is None else (self.experts, n // (1 if self.layer.experts else self.experts), k)


def orient_experts(steps: Sequence[PackedStep]) -> list[PackedStep]:
    """Steps with the orientation of square stacks: that of others in the module, else that of files."""
    parents = {step.name.rpartition(".")[0] for step in steps
               if step.experts is not None and step.shape == swapped(step.stored) != step.stored}
    return [step if step.experts is None else replace(step, transposed=step.shape == swapped(step.stored) and (
        step.shape != step.stored or step.layer.transposed or step.name.rpartition(".")[0] in parents)) for step in steps]


def orient_squares(steps: Sequence[PackedStep], modules: Mapping[str, nn.Module]) -> tuple[list[PackedStep], list[str]]:
    """Steps with square weights of modules with a weight [K, N] stored as the others of their class, and problems.

    Tools that put an nn.Linear in a module's place store [N, K].  Those that only code tensors leave [K, N].
    """
    owners = [modules.get(step.name.removesuffix(".weight")) for step in steps]
    by_class: dict[type, set[bool]] = {}                         # whether weights that are not square are [N, K]
    for step, owner in zip(steps, owners, strict=True):
        if owner is not None and step.stored != step.stored[::-1] and product_of(owner) == "transposed" \
                and not holds_numbers(step.layer):
            by_class.setdefault(type(owner), set()).add(step.transposed)
    oriented, problems = [], []
    for step, owner in zip(steps, owners, strict=True):
        ways = by_class.get(type(owner), set())
        if False in ways and step.transposed and step.shape == step.stored:
            if True in ways:
                problems.append(f"{shown(step.name)} is square, and others of its class are stored both ways")
            weight = f"{step.name.removesuffix('.weight')}.weight"
            step = replace(step, name=weight, kind="dense", why=takes_numbers(owner), transposed=False)
        oriented.append(step)
    return oriented, problems


def holds_numbers(layer: Layer) -> bool:
    """Whether a layer codes a tensor of plain numbers without loss, and so with the axes that it has in files."""
    fields = description_of(layer.format).fields
    return bool(fields) and all(len(own) == 1 for own in fields.values())


def takes_numbers(module: nn.Module | None) -> str:
    """Why a place holds no packed weight."""
    return f"{'a parameter' if module is None else f'a {type(module).__name__}'} takes plain numbers"


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [E, K, N] of [E, N, K]; that of a matrix unchanged."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape
