"""Runs a model on samples, block by block, and collects the second moments of the inputs of its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qdsl.encode.calibrated.hessian import Hessian
from qdsl.encode.calibrated.solve import quantize
from qdsl.models.plan import LoadError
from qdsl.models.private_apis import experts_one_by_one
from qdsl.models.stacks import is_transposed
from qdsl.runtime.torch.products import product_of
from qdsl.runtime.weight.packed import FormatError

if TYPE_CHECKING:
    from qdsl.runtime.format import Format

Target = Callable[[str], "tuple[Format, Mapping[str, Any]] | None"]
Tell = Callable[[int, str], None]                                # samples that ran through a block, and the block's name
HIDDEN = "hidden_states"                                         # the input of a block that is given by name
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Count = Callable[[str, Tensor], None]                            # a weight's name, and rows that are multiplied with it
PRODUCTS = {nn.functional.linear, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}


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

    Experts in a stacked parameter count the tokens that they get, under its name with the expert's number, 'up_proj.3'.
    samples: tokens [1, length], of one length.  target(name): the format of a layer, and options of `quantize`; a block's layers
    are quantized so, before the next block gets its outputs.  At the end all weights are as they were.
    keep: is given each block's moments, which are then not returned.  measured: moments of layers by name; a block that has them
    all runs once.  tell: progress in samples that ran through a block.
    Memory: the activations of all samples, before and after a block without `target`; a copy of one block with it; and one
    block's moments with `keep`.  Raises LoadError for a model that is not a list of blocks, or whose blocks take arguments that
    depend on the sample.
    """
    path, blocks = block_list(model)
    arguments = _arguments(model, blocks, samples[0])
    if len(samples) > 1 and not _same(arguments, _arguments(model, blocks, samples[-1])):
        raise LoadError(f"{type(model).__name__}: its blocks take arguments that differ between samples")
    states = [_first_input(model, blocks[0], sample) for sample in samples]
    moments: dict[str, Hessian] = {}
    for number, block in enumerate(blocks):
        name = f"{path}.{number}"
        layers = linear_layers(block, name).keys()
        outputs: list[Tensor] | None = None
        if measured is not None and measured.keys() >= layers:
            hessians = {weight: measured[weight] for weight in weights_of(block, name) if weight in measured}
        else:
            with collecting(name, block) as hessians:
                outputs = _run(block, states, arguments[number], tell, name, number * len(states))
            if keep is not None:
                keep(name, hessians)
        if keep is None:
            moments |= hessians
        if target is not None:
            weights = weights_of(block, name)
            originals = _round(weights, hessians, target)
            outputs = _run(block, states, arguments[number])
            for layer, weight in originals.items():
                weights[layer].copy_(weight)
        states = outputs or _run(block, states, arguments[number])
    return moments


def _run(block: nn.Module, states: Sequence[Tensor], arguments: Arguments, tell: Tell = lambda count, name: None,
         name: str = "", before: int = 0) -> list[Tensor]:
    """The outputs of a block for the hidden states of all samples.  name, before: for `tell`, and samples of earlier blocks."""
    positional, named = arguments
    outputs = []
    for count, state in enumerate(states, before + 1):
        result = block(state, *positional, **named)
        outputs.append(result[0] if isinstance(result, tuple) else result)
        tell(count, name)
    return outputs


def linear_layers(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The linear layers of a module, by their names after a prefix."""
    return {_joined(prefix, name): layer for name, layer in module.named_modules() if product_of(layer)}


def _stacks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """The parameters [E, N, K] or [E, K, N] of a module's experts, with their names and owners; convolutions have such, too."""
    for name, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            if parameter.dim() == 3:
                yield _joined(prefix, name, leaf), owner, parameter


def weights_of(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights [N, K] of a module's linear layers and experts, as views, by their names after a prefix."""
    weights = {name: layer.weight.data.t() if product_of(layer) == "transposed" else layer.weight.data
               for name, layer in linear_layers(module, prefix).items() if isinstance(layer.weight, Tensor)}
    for name, owner, parameter in _stacks(module, prefix):
        weights |= {f"{name}.{expert}": weight.t() if is_transposed(owner, parameter) else weight
                    for expert, weight in enumerate(parameter.data)}
    return weights


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _round(weights: Mapping[str, Tensor], hessians: Mapping[str, Hessian], target: Target) -> dict[str, Tensor]:
    """Give weights the values that they have when they are quantized; returns the numbers of those that changed."""
    originals = {}
    for name, weight in weights.items():
        if name not in hessians or (chosen := target(name)) is None:
            continue
        format, options = chosen
        with suppress(FormatError):                              # it stays plain in the quantized model, too
            packed = quantize(format, weight, hessians[name], **options)
            originals[name] = weight.clone()
            weight.copy_(format.dequantize(packed, weight.dtype))
    return originals


@torch.no_grad()
def square_sums(model: nn.Module, samples: Sequence[Tensor], tell: Tell = lambda count, name: None,
                ) -> dict[str, tuple[Tensor, int]]:
    """The sums of squared inputs of each linear layer or expert, float32 [K], and the number of rows, by `calibrate`'s names."""
    sums: dict[str, tuple[Tensor, int]] = {}

    def count(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        total, number = sums.get(name, (rows.new_zeros(rows.shape[1]), 0))
        sums[name] = total + rows.square().sum(0), number + len(rows)

    with _inputs("", model, count):
        for number, sample in enumerate(samples, 1):
            model(sample, use_cache=False)
            tell(number, "")
    return sums


class _Experts(TorchFunctionMode):
    """Calls count(name, x) for every product of rows x with the weight of an expert, a slice of a stacked parameter."""

    def __init__(self, prefix: str, module: nn.Module, count: Count) -> None:
        super().__init__()
        self.count = count
        self.names = {weight.data_ptr(): (name, expert) for name, _, stack in _stacks(module, prefix)
                      for expert, weight in enumerate(stack)}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS and len(args) > 1 and (place := self.names.get(args[1].data_ptr())):
            name, expert = place
            for number, x in enumerate(args[0]) if args[1].dim() == 3 else ((expert, args[0]),):
                self.count(f"{name}.{number}", x)
        return function(*args, **(kwargs or {}))


@contextmanager
def _inputs(prefix: str, module: nn.Module, count: Count) -> Iterator[None]:
    """Calls count(name, x) for every x that a linear layer or an expert of a module gets while the context lasts."""
    with ExitStack() as stack:
        stack.enter_context(experts_one_by_one(owner for _, owner, _ in _stacks(module, prefix)))
        for name, layer in linear_layers(module, prefix).items():
            stack.enter_context(layer.register_forward_pre_hook(lambda _, inputs, name=name: count(name, inputs[0])))
        stack.enter_context(_Experts(prefix, module, count))
        yield


@contextmanager
def collecting(prefix: str, module: nn.Module) -> Iterator[dict[str, Hessian]]:
    """Collects the moments of the inputs of a module's layers while it runs; complete when the context ends.

    Layers whose inputs are the same tensor in the first run share their moments.
    """
    hessians: dict[str, Hessian] = {}
    counted: dict[str, Tensor] = {}                              # the inputs that moments have, of this run

    def count(name: str, x: Tensor) -> None:
        shared = next((other for other, own in counted.items() if own is x and other != name), None)
        if name not in hessians:
            hessians[name] = hessians[shared] if shared else Hessian.empty(x.shape[-1], x.device)
        if shared is None or hessians[shared] is not hessians[name]:
            hessians[name].add(x)
        counted[name] = x

    with _inputs(prefix, module, count), module.register_forward_hook(lambda *_: counted.clear()):
        yield hessians


def _arguments(model: nn.Module, blocks: nn.ModuleList, sample: Tensor) -> list[Arguments]:
    """The arguments of every block but the first, which is its input."""
    taken: list[Arguments] = []

    def take(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        taken.append((inputs[1:], {key: value for key, value in named.items() if inputs or key != HIDDEN}))

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.register_forward_pre_hook(take, with_kwargs=True))
        model(sample, use_cache=False)
    return taken


def _first_input(model: nn.Module, block: nn.Module, sample: Tensor) -> Tensor:
    """The hidden states that a sample enters the first block with."""
    taken: list[Tensor] = []

    def stop(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        taken.append(inputs[0] if inputs else named[HIDDEN])
        raise _Reached

    with block.register_forward_pre_hook(stop, with_kwargs=True), suppress(_Reached):
        model(sample, use_cache=False)
    return taken[0]


def _same(first: Any, second: Any) -> bool:
    """Whether two trees of arguments hold the same numbers."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return bool(first is second or first == second)
