"""Runs a model on samples, block by block, and collects the second moments of the inputs of its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qdsl.encode.calibrated.hessian import Hessian
from qdsl.encode.calibrated.solve import quantize
from qdsl.host import progress
from qdsl.models.plan import LoadError
from qdsl.models.private_apis import experts_one_by_one
from qdsl.models.stacks import is_transposed
from qdsl.runtime.torch.products import product_of
from qdsl.runtime.weight.packed import FormatError

if TYPE_CHECKING:
    from qdsl.runtime.format import Format

Target = Callable[[str], "tuple[Format, Mapping[str, Any]] | None"]
WITHHELD, MOST_WITHHELD = 16, 8                                  # one sample of so many is held out of moments, and at most
TINY = 1e-12                                                     # of squares, where a block's output is zeros
HIDDEN = "hidden_states"                                         # the input of a block that is given by name
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Count = Callable[[str, Tensor, Tensor], None]                    # a weight's name, rows that are multiplied with it, products
PRODUCTS = {nn.functional.linear, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}


class _Reached(Exception):
    """Stops a model at a block."""


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
              ) -> dict[str, Hessian]:
    """The moments of the inputs of a language model's linear layers, by the layers' names.

    Experts in a stacked parameter count the tokens that they get, under its name with the expert's number, 'up_proj.3'.
    samples: tokens [1, length], of one length.  target(name): the format of a layer, and options of `quantize`; a block's layers
    are quantized so, before the next block gets its outputs.  At the end all weights are as they were.  With `target` some
    samples are held out: where a block's outputs for them are worse than by rounding, layers at fault get moments of independent
    inputs, by which they are rounded.  The last block is not quantized here, so it is not checked.
    keep: is given each block's moments, which are then not returned.  measured: moments of layers by name; a block that has them
    all runs once.  Progress: that of `calibration_bytes`.
    Memory: the activations of all samples, before and after a block without `target`; a copy of one block with it; and one
    block's moments with `keep`.  Raises LoadError for a model that is not a list of blocks, or whose blocks take arguments that
    depend on the sample.
    """
    path, blocks = block_list(model)
    samples, withheld = _withheld_last(samples, target)
    arguments = _arguments(model, blocks, samples[0])
    if len(samples) > 1 and not _is_same_tree(arguments, _arguments(model, blocks, samples[-1])):
        raise LoadError(f"{type(model).__name__}: its blocks take arguments that differ between samples")
    states = [_first_input(model, blocks[0], sample) for sample in samples]
    moments: dict[str, Hessian] = {}
    if target is not None and progress.counters:
        _solve_trials(block_name(path, 0), blocks[0], states[0], arguments[0], target)
    for number, block in enumerate(blocks):
        name, is_last = block_name(path, number), number == len(blocks) - 1
        hessians, outputs = _moments(block, name, states, withheld, arguments[number], measured)
        is_new = outputs is not None
        if target is not None and not is_last:
            rounded = _RoundedBlock(block, weights_of(block, name), hessians, target, arguments[number])
            if outputs is not None and withheld:
                hessians |= rounded.keep_rounding(states[-withheld:], outputs[-withheld:])
            outputs = rounded.run(states)
        if keep is not None and is_new:
            keep(name, hessians)
        if keep is None:
            moments |= hessians
        if not is_last:
            states = outputs or _run(block, states, arguments[number])
    return moments


def _withheld_last(samples: Sequence[Tensor], target: Target | None) -> tuple[Sequence[Tensor], int]:
    """The samples, those that are held out last, and the number of these: none without `target`, or of few samples."""
    withheld = samples[WITHHELD // 2::WITHHELD][:MOST_WITHHELD] if target is not None and len(samples) >= WITHHELD else []
    others = [sample for sample in samples if not any(sample is one for one in withheld)]
    return [*others, *withheld], len(withheld)


def block_name(path: str, number: int) -> str:
    return f"{path}.{number}"


def _moments(block: nn.Module, name: str, states: Sequence[Tensor], withheld: int, arguments: Arguments,
             measured: Mapping[str, Hessian] | None) -> tuple[dict[str, Hessian], list[Tensor] | None]:
    """The moments of a block, and its outputs; None where the moments are measured.

    withheld: how many of the last states do not count.
    """
    if _is_measured(measured, block, name):
        return {weight: measured[weight] for weight in weights_of(block, name) if weight in measured}, None
    with collect_moments(name, block) as hessians:
        outputs = _run(block, states[:len(states) - withheld], arguments)
    return hessians, outputs + _run(block, states[len(states) - withheld:], arguments)


def _is_measured(measured: Mapping[str, Hessian] | None, block: nn.Module, name: str) -> TypeGuard[Mapping[str, Hessian]]:
    """Whether all layers of a block have moments."""
    return measured is not None and measured.keys() >= linear_layers(block, name).keys()


def calibration_bytes(model: nn.Module, samples: Sequence[Tensor], target: Target | None = None,
                      measured: Mapping[str, Hessian] | None = None) -> dict[str, int]:
    """The bytes that `calibrate` counts: of tokens that run through blocks (SAMPLES), and of weights that are solved (SOLVE)."""
    path, blocks = block_list(model)
    runs = checks = solved = 0
    for number, block in enumerate(blocks):
        name = block_name(path, number)
        is_measured, is_last = _is_measured(measured, block, name), number == len(blocks) - 1
        runs += (not is_measured) + (not is_last and (is_measured or target is not None))
        checks += target is not None and not is_last and not is_measured
        if target is not None and not is_last:
            solved += sum(solved_bytes(weight) for layer, weight in weights_of(block, name).items() if target(layer))
    samples, withheld = _withheld_last(samples, target)
    runs = runs * sum(map(token_bytes, samples)) + 2 * checks * sum(map(token_bytes, samples[len(samples) - withheld:]))
    if target is None:
        return {progress.SAMPLES: runs}
    trials = _trial_weights(block_name(path, 0), blocks[0], target).values()
    return {progress.SAMPLES: runs + token_bytes(samples[0]), progress.SOLVE: solved + sum(map(solved_bytes, trials))}


def token_bytes(tokens: Tensor) -> int:
    """The bytes of tokens, which are int64."""
    return 8 * tokens.numel()


def solved_bytes(weight: Tensor) -> int:
    """The bytes of a weight in float32, as it is solved."""
    return 4 * weight.numel()


def _trial_weights(name: str, block: nn.Module, target: Target) -> dict[str, Tensor]:
    """The smallest and the largest weight of a block's linear layers that are quantized."""
    weights = weights_of(block, name)
    layers = sorted((layer for layer in linear_layers(block, name) if target(layer)), key=lambda layer: weights[layer].numel())
    return {layer: weights[layer] for layer in layers[:1] + layers[-1:]}


def _solve_trials(name: str, block: nn.Module, state: Tensor, arguments: Arguments, target: Target) -> None:
    """Solve two weights for one sample, so that the time that solving takes is known while the samples run."""
    trials = _trial_weights(name, block, target)
    with collect_moments(name, block) as hessians:
        _run(block, [state], arguments)
    for layer, weight in _round_weights(trials, hessians, target).items():
        trials[layer].copy_(weight)


class _RoundedBlock:
    """A block whose layers have the numbers of their quantized weights, until it has run."""

    def __init__(self, block: nn.Module, weights: Mapping[str, Tensor], hessians: Mapping[str, Hessian], target: Target,
                 arguments: Arguments) -> None:
        self.block, self.weights, self.target, self.arguments = block, weights, target, arguments
        self.originals = _round_weights(weights, hessians, target)

    def run(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the block; its weights are then as they were."""
        outputs = _run(self.block, states, self.arguments)
        self._take(self.originals)
        return outputs

    def _take(self, numbers: Mapping[str, Tensor]) -> None:
        for layer, weight in numbers.items():
            self.weights[layer].copy_(weight)

    def _error(self, states: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """The squared errors of outputs, each token's beside its own size: the first ones are often huge."""
        errors = [(own.double() - plain.double()).square().sum(-1) / plain.double().square().sum(-1).clamp(min=TINY)
                  for own, plain in zip(_run(self.block, states, self.arguments), expected, strict=True)]
        return float(torch.cat(errors).sum())

    def keep_rounding(self, states: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Hessian]:
        """Round layers if the block is worse than by rounding all of them: those that lessen its error, one by one.

        expected: the outputs of the plain block.  Returns the moments of independent inputs for these layers.
        """
        least, solved = self._error(states, expected), {layer: self.weights[layer].clone() for layer in self.originals}
        for layer, weight in self.originals.items():
            format, options = self.target(layer) or (None, {})
            assert format is not None                            # else it were no original
            numbers = format.quantize(weight.float(), **options)
            self.weights[layer].copy_(format.dequantize(numbers, weight.dtype))
        is_worse = self._error(states, expected) < least
        self._take(solved)
        rounded: dict[str, Hessian] = {}
        for layer, weight in self.originals.items() if is_worse else ():
            columns = weight.shape[1]
            independent = {layer: Hessian(torch.eye(columns, dtype=torch.float32, device=weight.device), columns)}
            self.weights[layer].copy_(weight)
            _round_weights({layer: self.weights[layer]}, independent, self.target)
            if (error := self._error(states, expected)) < least:
                least, rounded = error, rounded | independent
            else:
                self._take({layer: solved[layer]})
        return rounded


def _run(block: nn.Module, states: Sequence[Tensor], arguments: Arguments) -> list[Tensor]:
    """The outputs of a block for the hidden states [1, length, ...] of all samples."""
    positional, named = arguments
    outputs = []
    for state in states:
        with progress.step(progress.SAMPLES, token_bytes(state[..., 0])):
            result = block(state, *positional, **named)
        outputs.append(result[0] if isinstance(result, tuple) else result)
    return outputs


@contextmanager
def counted_run(model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Counts the bytes of tokens that run through a model, a part of them after each of its blocks."""
    nbytes = token_bytes(tokens)
    with ExitStack() as stack:
        stack.enter_context(progress.step(progress.SAMPLES, nbytes))
        with suppress(LoadError):
            blocks = block_list(model)[1]
            stack.enter_context(progress.step_share(nbytes, len(blocks) + 1))
            for block in blocks:
                stack.enter_context(block.register_forward_hook(lambda *_: progress.advance_units(1)))
        yield


def linear_layers(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The linear layers of a module, by their names after a prefix."""
    return {_joined(prefix, name): layer for name, layer in module.named_modules() if product_of(layer)}


def _expert_stacks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """The parameters [E, N, K] or [E, K, N] of a module's experts, with their names and owners; convolutions have such, too."""
    for name, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            if parameter.dim() == 3:
                yield _joined(prefix, name, leaf), owner, parameter


def weights_of(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights [N, K] of a module's linear layers and experts, as views, by their names after a prefix."""
    weights = {name: layer.weight.data.t() if product_of(layer) == "transposed" else layer.weight.data
               for name, layer in linear_layers(module, prefix).items() if isinstance(layer.weight, Tensor)}
    for name, owner, parameter in _expert_stacks(module, prefix):
        weights |= {f"{name}.{expert}": weight.t() if is_transposed(owner, parameter) else weight
                    for expert, weight in enumerate(parameter.data)}
    return weights


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _round_weights(weights: Mapping[str, Tensor], hessians: Mapping[str, Hessian], target: Target) -> dict[str, Tensor]:
    """Give weights the values that they have when they are quantized; returns the numbers of those that changed."""
    originals = {}
    for name, weight in weights.items():
        if (chosen := target(name)) is None:
            continue
        (format, options), nbytes = chosen, solved_bytes(weight)
        with progress.step(progress.SOLVE, nbytes), progress.step_share(nbytes, weight.numel()), \
                suppress(FormatError):                           # it stays plain in the quantized model, too
            if name not in hessians:
                continue
            packed = quantize(format, weight, hessians[name], **options)
            originals[name] = weight.clone()
            weight.copy_(format.dequantize(packed, weight.dtype))
    return originals


@torch.no_grad()
def square_sums(model: nn.Module, samples: Sequence[Tensor]) -> dict[str, tuple[Tensor, int]]:
    """The sums of squared inputs of each linear layer or expert, float32 [K], and the number of rows, by `calibrate`'s names."""
    sums: dict[str, tuple[Tensor, int]] = {}

    def count(name: str, x: Tensor, _: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        total, number = sums.get(name, (rows.new_zeros(rows.shape[1]), 0))
        sums[name] = total + rows.square().sum(0), number + len(rows)

    with counting_products("", model, count):
        for sample in samples:
            with counted_run(model, sample):
                model(sample, use_cache=False)
    return sums


class _Experts(TorchFunctionMode):
    """Calls count(name, x, product) for all rows x that are multiplied with an expert, a slice of a stacked parameter."""

    def __init__(self, prefix: str, module: nn.Module, count: Count) -> None:
        super().__init__()
        self.count = count
        self.names = {weight.data_ptr(): (name, expert) for name, _, stack in _expert_stacks(module, prefix)
                      for expert, weight in enumerate(stack)}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = function(*args, **(kwargs or {}))
        if function in PRODUCTS and len(args) > 1 and (place := self.names.get(args[1].data_ptr())):
            name, expert = place
            every = enumerate(zip(args[0], product, strict=True)) if args[1].dim() == 3 else [(expert, (args[0], product))]
            for number, (x, own) in every:
                self.count(f"{name}.{number}", x, own)
        return product


@contextmanager
def counting_products(prefix: str, module: nn.Module, count: Count) -> Iterator[None]:
    """Calls count(name, x, product) for all x that a linear layer or an expert of a module gets while the context lasts."""
    with ExitStack() as stack:
        stack.enter_context(experts_one_by_one(owner for _, owner, _ in _expert_stacks(module, prefix)))
        for name, layer in linear_layers(module, prefix).items():
            stack.enter_context(layer.register_forward_hook(
                lambda _, inputs, product, name=name: count(name, inputs[0], product)))
        stack.enter_context(_Experts(prefix, module, count))
        yield


@contextmanager
def collect_moments(prefix: str, module: nn.Module) -> Iterator[dict[str, Hessian]]:
    """Collects the moments of the inputs of a module's layers while it runs; complete when the context ends.

    Layers whose inputs are the same tensor in the first run share their moments.
    """
    hessians: dict[str, Hessian] = {}
    counted: dict[str, Tensor] = {}                              # the inputs that moments have, of this run

    def count(name: str, x: Tensor, _: Tensor) -> None:
        shared = next((other for other, own in counted.items() if own is x and other != name), None)
        if name not in hessians:
            hessians[name] = hessians[shared] if shared else Hessian.empty(x.shape[-1], x.device)
        if shared is None or hessians[shared] is not hessians[name]:
            hessians[name].add(x)
        counted[name] = x

    with counting_products(prefix, module, count), module.register_forward_hook(lambda *_: counted.clear()):
        yield hessians


def _arguments(model: nn.Module, blocks: nn.ModuleList, sample: Tensor) -> list[Arguments]:
    """The arguments of every block but the first, which is its input."""
    taken: list[Arguments] = []

    def take(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        taken.append((inputs[1:], {key: value for key, value in named.items() if inputs or key != HIDDEN}))
        if len(taken) == len(blocks):
            raise _Reached                                       # the head of a model takes as long as several blocks

    with ExitStack() as stack, suppress(_Reached):
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


def _is_same_tree(first: Any, second: Any) -> bool:
    """Whether two trees of arguments hold the same numbers."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(_is_same_tree, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_is_same_tree(first[key], second[key]) for key in first)
    return bool(first is second or first == second)
