"""A model's modules, parameters and buffers by name."""

from __future__ import annotations

from torch import Tensor, nn

from qdsl.runtime.libraries.private_apis import non_persistent_buffers


class Names:
    """A model's modules, parameters and buffers by all their names, and which names share a parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.transient = {f"{name}.{own}".lstrip(".") for name, module in self.modules.items()
                          for own in non_persistent_buffers(module)}
        shared: dict[int, list[str]] = {}
        for name, parameter in self.parameters.items():
            shared.setdefault(id(parameter), []).append(name)
        self._shared = {name: names for names in shared.values() for name in names}
        self.untied: set[str] = set()

    def tensor(self, name: str) -> Tensor | None:
        """A parameter or buffer; None where the model has none of that name."""
        return self.parameters.get(name, self.buffers.get(name))

    def tied(self, name: str) -> list[str]:
        """All names of a parameter, this one first, without those with a weight of their own in the checkpoint.

        Where several have one, the others share that of the first.
        """
        names = self._shared.get(name, [])
        first = next((other for other in names if other in self.untied), name)
        return [name, *(other for other in names if other != name and other not in self.untied and name == first)]

    def is_untied(self, name: str) -> bool:
        """Whether another name of a parameter has a weight of its own."""
        return any(other != name and other in self.untied for other in self._shared.get(name, ()))
