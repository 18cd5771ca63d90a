"""Access to weights that accelerate offloads until a layer runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from qdsl.models.private_apis import hook_of


@contextmanager
def onloaded(model: nn.Module) -> Iterator[None]:
    """Puts offloaded tensors into their modules for a while, from memory or files, without a copy."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        weights = _offloaded_weights(module)
        stored: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for own in stored:
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta and weights is not None:
                    value: Tensor = weights[name]
                    own[name] = nn.Parameter(value, requires_grad=False) if own is module._parameters else value
                    replaced.append((own, name, tensor))
    try:
        yield
    finally:
        for own, name, tensor in replaced:
            own[name] = tensor


def onloaded_by_hooks(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Runs accelerate's hooks of modules whose weights are used without a call of the modules."""
    hooks = [hook_of(module) for module in modules]              # torch.compile takes no `:=` in a comprehension
    hooked = [(module, hook) for module, hook in zip(modules, hooks, strict=True) if hook is not None]
    return _hooks_run(hooked) if hooked else nullcontext()


@contextmanager
def _hooks_run(hooked: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    try:
        for module, hook in hooked:
            hook.pre_forward(module)
        yield
    finally:
        for module, hook in hooked:
            hook.post_forward(module, None)


def _offloaded_weights(module: nn.Module) -> Any:
    """The tensors that a hook of accelerate loads before a module runs, by name; None without a hook."""
    hook = hook_of(module)
    hooks = [hook, *getattr(hook, "hooks", ())]
    return next((own.weights_map for own in hooks if getattr(own, "weights_map", None) is not None), None)
