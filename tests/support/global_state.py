"""Global state of torch that belongs to the caller, set around calls of qdsl alone: the one table of what tests vary.

tests/conftest.py draws a state for each test of formats, kernels and models; tests/formats/test_global_state.py compares all.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

PRODUCTS = frozenset({"linear", "grouped_linear", "forward"})


@dataclass(frozen=True)
class State:
    """A global setting.

    without: calls whose result it may change: autocast decides the dtype of products, and threads the order of their sums.
    within: the packages whose calls are entered: a model that is built in inference mode cannot be trained.
    """

    summary: str
    enter: Callable[[], AbstractContextManager[object]]
    without: frozenset[str] = frozenset()
    within: str = "qdsl"


@contextmanager
def setting(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Change a setting of torch, and change it back."""
    change(value)
    try:
        yield
    finally:
        change(before)


STATES = {
    "bfloat16": State("default dtype bfloat16, as where vLLM builds a model",
                      lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32)),
    "float16": State("default dtype float16", lambda: setting(torch.set_default_dtype, torch.float16, torch.float32)),
    "float64": State("default dtype float64", lambda: setting(torch.set_default_dtype, torch.float64, torch.float32)),
    "meta": State("default device meta", lambda: torch.device("meta")),
    "deterministic": State("`torch.use_deterministic_algorithms`, which also fills new memory with NaN",
                           lambda: setting(torch.use_deterministic_algorithms, True, False)),
    "inference": State("`torch.inference_mode`", torch.inference_mode, within="qdsl.runtime.format"),
    "no_grad": State("`torch.no_grad`", torch.no_grad, frozenset({"forward"})),
    "autocast": State("`torch.autocast`, which chooses the dtype of products", lambda: torch.autocast("cpu", torch.bfloat16),
                      PRODUCTS),
    "threads": State("two threads instead of one", lambda: setting(torch.set_num_threads, 2, torch.get_num_threads()), PRODUCTS),
}
FORK = "fork"                                                    # the whole test runs in a forked child
# Classes, and modules, whose public functions are entered under the state.
ENTRIES = ("qdsl.runtime.format:Format", "qdsl.runtime.weight.packed:PackedWeight", "qdsl.runtime.torch.layers:QuantizedLinear",
           "qdsl.runtime.torch.layers:QuantizedEmbedding", "qdsl.runtime.gpu.launch", "qdsl.models.load", "qdsl.models.save")

_current = ""                                                    # the name in STATES; '' while qdsl runs, and in other tests


def run(name: str, test: Callable[[], object]) -> None:
    """Run a test with a state of the table around each of its calls into qdsl, or in a forked child of this process."""
    global _current
    if name == FORK:
        return in_child(test)
    _current = name
    try:
        test()
    finally:
        _current = ""


def install() -> None:
    """Make the public functions of ENTRIES enter the state.  Before modules import them by name."""
    for path in ENTRIES:
        module, _, name = path.partition(":")
        owner = importlib.import_module(module)
        _wrap(getattr(owner, name) if name else owner)


def _wrap(owner: type | ModuleType) -> None:
    for name, function in list(vars(owner).items()):
        if inspect.isfunction(function) and not name.startswith("_") and not inspect.isgeneratorfunction(function) and \
                (isinstance(owner, type) or function.__module__ == owner.__name__):
            setattr(owner, name, _entering(function))


def _entering(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def entered(*arguments: Any, **named: Any) -> Any:
        global _current
        name = _current
        if not name or torch.compiler.is_compiling() or _is_changed(name, function, [*arguments, *named.values()]):
            return function(*arguments, **named)
        _current = ""
        try:
            with STATES[name].enter():
                result = function(*arguments, **named)
        finally:
            _current = name
        return _trainable(result)

    return entered


def _is_changed(name: str, function: Callable[..., Any], arguments: list[Any]) -> bool:
    """Whether the state may change the result of a call, as without gradients."""
    state, has_gradients = STATES[name], any(isinstance(value, Tensor) and value.requires_grad for value in arguments)
    if function.__name__ in state.without or not function.__module__.startswith(state.within):
        return True
    return name in ("inference", "no_grad") and has_gradients


def _trainable(result: Any) -> Any:
    """Tensors that were made in inference mode as ones that tests may change."""
    if isinstance(result, Tensor):
        return result.clone() if result.is_inference() else result
    if type(result).__name__ == "PackedWeight":
        result.tensors.update({name: _trainable(tensor) for name, tensor in result.tensors.items()})
    return {key: _trainable(value) for key, value in result.items()} if type(result) is dict else result


def in_child(function: Callable[[], object]) -> None:
    """Run a function in a forked child of this process.  Raises its error here, with the child's traceback."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        answer = b""
        try:
            function()
        except BaseException as error:
            answer = f"{type(error).__name__} in a forked child\n{''.join(traceback.format_exception(error))}".encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    if answer:
        (pytest.skip if answer.startswith(b"Skipped") else pytest.fail)(answer.decode())
