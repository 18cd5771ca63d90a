"""Packed layers under DDP and FSDP2, which cannot broadcast, reduce or shard packed tensors."""

from __future__ import annotations

from torch import nn

from qdsl.runtime.libraries.private_apis import ddp_ignored, ignore_in_ddp_
from qdsl.runtime.torch.module import PackedModule

GROUP = "_packed_names"                                          # names of the tensors of a group of coded weights


def packed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The stored tensors of a model's packed layers and groups, by their names in the model; tied tensors under every name."""
    packed: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = module.stored_parameters() if isinstance(module, PackedModule) else {
            name: module.get_parameter(name) for name in getattr(module, GROUP, ())}
        packed |= {f"{prefix}.{name}" if prefix else name: parameter for name, parameter in own.items()}
    return packed


def ignore_packed_(model: nn.Module) -> set[nn.Parameter]:
    """Exclude a model's packed tensors from DDP, and return them for `fully_shard(ignored_params=...)`.

    For DDP call this before `DistributedDataParallel(model)`.  Every rank then holds all packed tensors: load the same checkpoint
    on each rank, on its own device.  Names that DDP already ignores stay ignored.
    """
    packed = packed_parameters(model)
    ignore_in_ddp_(model, sorted({*ddp_ignored(model), *packed}))
    return set(packed.values())
