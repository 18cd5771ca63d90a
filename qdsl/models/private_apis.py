"""The undocumented APIs of transformers, diffusers and accelerate that qdsl.models uses; no other module names them.

tests/unit/test_private_names.py checks what each name is relied on for.  Names of engines and of PEFT stand in their one module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

HOOK = "_hf_hook"                                                # accelerate's, which loads a module's tensors when it runs
HOOKS = (HOOK, "_diffusers_hook")
TIES = ("all_tied_weights_keys", "_tied_weights_keys")           # of a model of transformers: tied parameter -> parameter


def hook_of(module: nn.Module) -> Any:
    """The hook of accelerate on a module; None without one."""
    return getattr(module, HOOK, None)


def has_adapters(model: Any) -> bool:
    """Whether transformers or diffusers have loaded adapters into a model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def forget_adapters(model: Any) -> None:
    """Make the library treat a model as one without adapters."""
    if has_adapters(model):
        model._hf_peft_config_loaded = False


def float32_modules(model: Any) -> tuple[str, ...]:
    """Names of modules that a model or its class keeps in float32."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return tuple(module for name in names for module in getattr(model, name, None) or ())


@contextlib.contextmanager
def experts_one_by_one(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Lets modules of experts multiply one expert's tokens after the other's, each by a product of its own."""
    name = "_experts_implementation"
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    before = {key: getattr(config, name, None) for key, config in configs.items()}
    for config in configs.values():
        setattr(config, name, "eager")
    try:
        yield
    finally:
        for key, config in configs.items():
            setattr(config, name, before[key])


def mark_initialized(tensor: Tensor | nn.Module) -> None:
    """Make transformers leave the values of a parameter or module unchanged."""
    tensor._is_hf_initialized = True                             # type: ignore[union-attr]


def may_be_missing(model: Any) -> Sequence[str]:
    """Regular expressions for parameters that a checkpoint of a model of transformers need not have."""
    return tuple(model._keys_to_ignore_on_load_missing or ())


def may_be_unexpected(model: Any) -> Sequence[str]:
    """Regular expressions for tensors of a checkpoint that a model or its class leaves out."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def uncast_patterns(model: Any) -> Sequence[str]:
    """Patterns of modules that a model of diffusers excludes from layerwise casting."""
    return tuple(getattr(model, "_skip_layerwise_casting_patterns", None) or ())


def set_config(model: Any, config: Mapping[str, Any]) -> None:
    """Replace the config of a model of diffusers; `register_to_config` only adds to it."""
    model._internal_dict = type(model.config)(config)


def single_file_class(cls: Any) -> str | None:
    """The class name under which diffusers has a converter of single files: that of the class or of a base class."""
    from diffusers.loaders import single_file_model

    name: str | None = single_file_model._get_single_file_loadable_mapping_class(cls)
    return name
