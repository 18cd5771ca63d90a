"""Runs a model on samples, block by block, and collects the second moments of the inputs of its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qdsl.encode.calibrated.hessian import Hessian
from qdsl.encode.calibrated.solve import quantize
from qdsl.models.plan import LoadError
from qdsl.runtime.torch.products import product_of
from qdsl.runtime.weight.packed import FormatError

if TYPE_CHECKING:
    from qdsl.runtime.format import Format

Target = Callable[[str], "tuple[Format, Mapping[str, Any]] | None"]
Tell = Callable[[int, str], None]                                # samples that ran through a block, and the block's name

OUTLIER = 16.0                                                   # times the median square of a row of x, above which it is scaled


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a model that has run on all samples, before its outputs are computed anew for the next block.

    hessians: by the names of linear layers in the model; layers with the same input share one.  is_known: they were known before.
    replaced: layers, and the weights that they get back when the outputs are computed.
    """

    name: str
    module: nn.Module
    hessians: Mapping[str, Hessian]
    is_known: bool = False
    replaced: dict[nn.Module, Tensor] = field(default_factory=dict)

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The linear layers that have moments, by their names in the model."""
        for name, layer in self.module.named_modules():
            if f"{self.name}.{name}" in self.hessians:
                yield f"{self.name}.{name}", layer


class _Reached(Exception):
    """Stops a model at its first block."""


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of modules with linear layers, and its name.  Raises LoadError for a model that has none."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
             and len(module) and all(any(map(product_of, part.modules())) for part in module)]
    if not lists:
        raise LoadError(f"{type(model).__name__} has no list of blocks with linear layers, so it cannot be calibrated")
    return max(lists, key=lambda named: (len(named[1]), -named[0].count(".")))


@torch.no_grad()
def calibrate(model: nn.Module, samples: Sequence[Tensor], target: Target | None = None,
              keep: Callable[[str, Mapping[str, Hessian]], None] | None = None, measured: Mapping[str, Hessian] | None = None,
              tell: Tell = lambda count, name: None) -> dict[str, Hessian]:
    """The moments of the inputs of a language model's linear layers, by the layers' names.

    samples: tokens [1, length], of one length.  target(name): the format of a layer, and options of `quantize`; a block's layers
    are quantized so, before the next block gets its outputs.  At the end all weights are as they were.
    keep: is given each block's moments, which are then not returned.  measured: moments of layers by name; a block that has them
    all runs once.  tell: progress in samples that ran through a block.
    Memory: the activations of all samples, a copy of one block, and one block's moments with `keep`.  Raises LoadError for a
    model that is not a list of blocks, or whose blocks take arguments that depend on the sample.
    """
    moments: dict[str, Hessian] = {}
    for block in run_blocks(model, samples, measured or {}, tell):
        if keep is None:
            moments |= block.hessians
        elif not block.is_known:
            keep(block.name, block.hessians)
        if target is not None:
            block.replaced.update(_rounded(block, target))
    return moments


def _rounded(block: Block, target: Target) -> dict[nn.Module, Tensor]:
    """Give the linear layers of a block the values of their quantized weights; returns the layers with their own weights."""
    replaced = {}
    for name, layer in block.layers():
        if (chosen := target(name)) is None:
            continue
        format, options = chosen
        weight, is_transposed = layer.weight, product_of(layer) == "transposed"
        assert isinstance(weight, Tensor)
        try:
            packed = quantize(format, weight.t() if is_transposed else weight, block.hessians[name], **options)
        except FormatError:                                      # it stays plain in the quantized model, too
            continue
        replaced[layer] = weight.data
        values = format.dequantize(packed, weight.dtype)
        weight.data = values.t() if is_transposed else values
    return replaced


@torch.no_grad()
def run_blocks(model: nn.Module, samples: Sequence[Tensor], measured: Mapping[str, Hessian], tell: Tell) -> Iterator[Block]:
    """Run the blocks of a language model, one after the other, on samples of tokens.

    A caller may change the layers of a block when it is yielded: the next block gets the inputs that the changed one makes.
    Weights in the block's `replaced` return to their layers before the next block.
    """
    path, blocks = block_list(model)
    arguments = _arguments(model, blocks, samples[0])
    if len(samples) > 1 and not _same(arguments, _arguments(model, blocks, samples[-1])):
        raise LoadError(f"{type(model).__name__}: its blocks take arguments that differ between samples")
    states = [_first_input(model, blocks[0], sample) for sample in samples]
    for number, (module, (positional, named)) in enumerate(zip(blocks, arguments, strict=True)):
        name = f"{path}.{number}"
        layers = [f"{name}.{layer}" for layer, part in module.named_modules() if product_of(part)]
        if is_known := measured.keys() >= {*layers}:
            hessians: Mapping[str, Hessian] = {layer: measured[layer] for layer in layers}
        else:
            with collecting(module, name) as hessians:
                for count, state in enumerate(states):
                    module(state, *positional, **named)
                    tell(number * len(states) + count + 1, name)
        block = Block(name, module, hessians, is_known)
        yield block
        for place, state in enumerate(states):
            states[place] = _output(module(state, *positional, **named))
        for layer, weight in block.replaced.items():
            layer.weight.data = weight


@torch.no_grad()
def square_sums(model: nn.Module, samples: Sequence[Tensor], tell: Tell = lambda count, name: None,
                ) -> dict[str, tuple[Tensor, int]]:
    """The sums of squared inputs of each linear layer, float32 [K], and the number of rows, by the layers' names."""
    sums: dict[str, tuple[Tensor, int]] = {}

    def count(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            total, number = sums.get(name, (rows.new_zeros(rows.shape[1]), 0))
            sums[name] = total + rows.square().sum(0), number + len(rows)
        return hook

    handles = [layer.register_forward_pre_hook(count(name)) for name, layer in model.named_modules() if product_of(layer)]
    try:
        for number, sample in enumerate(samples, 1):
            model(sample, use_cache=False)
            tell(number, "")
    finally:
        for handle in handles:
            handle.remove()
    return sums


@contextmanager
def collecting(module: nn.Module, prefix: str = "") -> Iterator[dict[str, Hessian]]:
    """Collects the moments of the inputs of all linear layers of a module while it runs; filled when the context ends.

    Layers whose inputs are the same tensor in the first run share their moments.
    """
    hessians: dict[str, Hessian] = {}
    counted: dict[str, int] = {}                                 # the last input that a layer's moments have
    handles = []

    def hook(name: str) -> Any:
        def count(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            shared = next((other for other, identity in counted.items() if identity == id(x) and other != name), None)
            if name not in hessians:
                hessians[name] = hessians[shared] if shared else Hessian.empty(x.shape[-1], x.device)
            if shared is None or hessians[shared] is not hessians[name]:
                hessians[name].add(*without_outliers(x))
            counted[name] = id(x)
            keep.append(x)                                       # its identity is not another's while the module runs
        return count

    keep: list[Tensor] = []

    def forget(*_: Any) -> None:
        keep.clear()
        counted.clear()

    for name, layer in module.named_modules():
        if product_of(layer):
            full = f"{prefix}.{name}".strip(".")
            handles.append(layer.register_forward_pre_hook(hook(full)))
    handles.append(module.register_forward_hook(forget))
    try:
        yield hessians
    finally:
        for handle in handles:
            handle.remove()


def without_outliers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x, and weights in the moments that bound a row's energy by OUTLIER times the median.

    The first token of a text has most of the energy of some layers; its errors do not matter more than those of other tokens.
    """
    energy = x.float().square().sum(-1)
    bound = OUTLIER * energy.flatten().median()
    return x, torch.where(energy > bound, bound / energy.clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def _arguments(model: nn.Module, blocks: nn.ModuleList, sample: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of every block but the first, which is its input."""
    taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def take(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        positional = inputs[1:] if inputs else (named.pop("hidden_states"),)[1:]
        taken.append((positional, named))

    handles = [block.register_forward_pre_hook(take, with_kwargs=True) for block in blocks]
    try:
        model(sample, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return taken


def _first_input(model: nn.Module, block: nn.Module, sample: Tensor) -> Tensor:
    taken: list[Tensor] = []

    def stop(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        taken.append(inputs[0] if inputs else named["hidden_states"])
        raise _Reached

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(sample, use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
    return taken[0]


def _output(result: Any) -> Tensor:
    """The hidden states among the results of a block."""
    output = result[0] if isinstance(result, tuple) else result
    assert isinstance(output, Tensor)
    return output


def _same(first: Any, second: Any) -> bool:
    """Whether two trees of arguments hold the same numbers."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return bool(first is second or first == second)
