"""What a model of transformers records of tied weights, kept to what its modules share."""

from __future__ import annotations

from typing import Any

from torch import nn

from qdsl.models.grouped import HiddenWeight
from qdsl.models.private_apis import TIES
from qdsl.runtime.torch.module import PackedModule

Ties = dict[str, dict[str, str]]                                 # module -> tied parameter -> the parameter that it shares


def tie(model: nn.Module) -> None:
    """Tie the weights that a model records, which builders that put parameters on meta one by one have untied."""
    if callable(own := getattr(model, "tie_weights", None)):
        own()


def recorded_ties(model: nn.Module) -> Ties:
    """The ties that the modules of a model record, by the names of these modules."""
    return {name: dict(own) for name, module in model.named_modules(remove_duplicate=False)
            if (own := getattr(module, TIES[0], None))}


def keep_ties(model: nn.Module, ties: Ties) -> None:
    """Reduce recorded ties to parameters that are shared; configs of modules that share none state that none is tied.

    transformers ties again what is recorded, by which a weight of its own would be lost.  Packed layers that share their tensors
    stay tied without a record, because they have no parameter that could be assigned.
    """
    for name, recorded in ties.items():
        module: Any = model.get_submodule(name)
        shared = {target: source for target, source in recorded.items() if _is_shared(module, target, source)}
        plain = {target: source for target, source in shared.items() if not _packed_key(module, target)}
        if plain != recorded:
            for attribute in TIES:
                setattr(module, attribute, dict(plain))
        if not shared:
            _state_untied(module.config)


def renew_ties(model: Any) -> None:
    """Record the ties of a model again whose packed layers have become dense."""
    modules = [module for module in model.modules() if hasattr(module, TIES[0])]
    for module in modules:
        vars(module).pop(TIES[1], None)
    for module in modules:
        setattr(module, TIES[0], module.get_expanded_tied_weights_keys(all_submodels=True))
    keep_ties(model, recorded_ties(model))


def _is_shared(module: nn.Module, target: str, source: str) -> bool:
    """Whether two weights of a module are one; those that accelerate offloads are if that is still recorded."""
    keys = _packed_key(module, target), _packed_key(module, source)
    if any(keys):
        return keys[0] == keys[1]
    first, second = (_owner(module, name)[1] for name in (target, source))
    is_offloaded = first is not None and second is not None and (first.is_meta or second.is_meta)
    return first is second or (is_offloaded and target in getattr(module, TIES[0]))


def _packed_key(module: nn.Module, name: str) -> tuple[object, ...]:
    """What is equal for weights that share packed tensors; () for a plain one."""
    owner, weight = _owner(module, name)
    if isinstance(weight, HiddenWeight):
        return weight.key
    is_packed = isinstance(owner, PackedModule) and name.endswith(".weight")
    return tuple(map(id, owner._stored_tensors().values())) if is_packed else ()


def _owner(module: nn.Module, name: str) -> tuple[Any, Any]:
    """The module of a parameter, and the parameter or what stands in its place."""
    owner = module.get_submodule(name.rpartition(".")[0])
    return owner, getattr(owner, name.rpartition(".")[2], None)


def _state_untied(config: Any) -> None:
    for own in (config, config.get_text_config(decoder=True)):
        if getattr(own, "tie_word_embeddings", False):
            own.tie_word_embeddings = False
