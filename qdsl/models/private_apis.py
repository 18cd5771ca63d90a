"""What qdsl.models uses of transformers, diffusers and accelerate beyond their documented interfaces; no other module names it.

tests/unit/test_private_names.py checks what each name is relied on for.  Names of engines and of PEFT stand in their one module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

HOOK = "_hf_hook"                                                # accelerate's, which loads a module's tensors when it runs
HOOKS = (HOOK, "_diffusers_hook")
TIES = ("all_tied_weights_keys", "_tied_weights_keys")           # of a model of transformers: tied parameter -> parameter


def hook_of(module: nn.Module) -> Any:
    """The hook of accelerate on a module; None without one."""
    return getattr(module, HOOK, None)


def has_adapters(model: Any) -> bool:
    """Whether transformers or diffusers have loaded adapters into a model of theirs."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def forget_adapters(model: Any) -> None:
    """Have the library take a model for one without adapters."""
    if has_adapters(model):
        model._hf_peft_config_loaded = False


def float32_modules(model: Any) -> tuple[str, ...]:
    """Names of modules that a model, or its class, keeps in float32."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return tuple(module for name in names for module in getattr(model, name, None) or ())


def mark_initialized(tensor: Tensor) -> None:
    """Have transformers leave a parameter's numbers as they are."""
    tensor._is_hf_initialized = True                             # type: ignore[attr-defined]


def may_be_missing(model: Any) -> Sequence[str]:
    """Regular expressions for parameters that a checkpoint of a model of transformers need not have."""
    return tuple(model._keys_to_ignore_on_load_missing or ())


def uncast_patterns(model: Any) -> Sequence[str]:
    """Patterns of modules that a model of diffusers leaves out of casting layer by layer."""
    return tuple(getattr(model, "_skip_layerwise_casting_patterns", None) or ())


def set_config(model: Any, config: Mapping[str, Any]) -> None:
    """Replace the config of a model of diffusers, which `register_to_config` only adds to."""
    model._internal_dict = type(model.config)(config)


def single_file_class(cls: Any) -> str | None:
    """The name under which diffusers has a converter of single files for a class: its own, or that of a class it extends."""
    from diffusers.loaders import single_file_model

    name: str | None = single_file_model._get_single_file_loadable_mapping_class(cls)
    return name
