"""Layers whose tensors have other shapes or dtypes than their format: each is refused with its reason, wherever it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import qdsl
from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.core.stored import Description
from qdsl.runtime import FormatError
from tests.support.packed_layers import module_of

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
SHAPES = ((256, 128), (128, 256), (256, 256))                    # with one block of FP8 along an axis, or two


def storages() -> Iterator[tuple[Description, str, tuple[int, int], dict[str, int | str], Tensors]]:
    """The dtypes and shapes of every storage of every format, with the first parameters that it has."""
    for format in descriptions():
        for key, layouts in format.variants.items():
            params = dict(zip(format.by, key, strict=True))
            for storage in layouts:
                for shape in SHAPES:
                    try:
                        packed = module_of(format.name).FORMAT.empty(shape, storage, **params)
                    except FormatError:                          # N or K is fixed, or no multiple of a block
                        continue
                    yield format, storage, shape, params, {
                        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.tensors.items()}


def meta(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}


def test_no_tensor_of_two_axes_fits_transposed() -> None:
    """Also where one of its axes has length 1, so that the other shape has as many elements in the same order."""
    tried = 0
    for format, storage, shape, params, tensors in storages():
        for name, (dtype, own) in tensors.items():
            if len(own) != 2 or own[0] == own[1] or 1 not in own:
                continue
            tried += 1
            wrong = meta({**tensors, name: (dtype, own[::-1])})
            with pytest.raises(FormatError):
                module_of(format.name).wrap(wrong, shape, storage, **params)
    assert tried > 100


def test_a_scale_per_row_may_lie_in_a_row() -> None:
    """[1, N] for [N, 1]; unless N is K, where it could be one per column."""
    tried = 0
    for format, storage, shape, params, tensors in storages():
        layout = format.layout(storage, params)
        rows = {name: (dtype, own[::-1]) for name, (dtype, own) in tensors.items() if layout[name].is_column}
        if not rows or "starts" in tensors:                      # qdsl's own bit streams
            continue
        settings = {"quant_method": "qdsl", "format": format.name, "storage": storage, **params}
        layer = open_layer({**tensors, **rows}, settings).layer("layer")
        tried += 1
        if shape[0] == shape[1]:
            assert not layer.format and "[1, 256]" in layer.why
        else:
            assert (layer.format, layer.storage, layer.shape) == (format.name, storage, shape) and not layer.contradictions
    assert tried > 10


def open_layer(tensors: Tensors, settings: dict[str, object]) -> Checkpoint:
    names = list(tensors)
    return qdsl.open_headers([f"layer.{name}" for name in names], [str(tensors[name][0]) for name in names],
                             [tensors[name][1] for name in names], {}, {"quantization_config": settings})


def reasons(checkpoint: Checkpoint, layer: Layer) -> set[str]:
    """The messages of all ways to read a layer."""
    readers: list[Callable[[], object]] = [
        lambda: checkpoint.weight(layer.name), lambda: checkpoint.weight(f"{layer.name}.weight", expert=0),
        lambda: checkpoint.weight(layer.name, dtype=torch.float32), lambda: list(checkpoint.weights()),
        lambda: checkpoint.source.weights(layer), lambda: checkpoint.source.stacked(layer)]
    messages = set()
    for reader in readers:
        with pytest.raises(CheckpointError) as error:
            reader()
        messages.add(str(error.value))
    return messages


def test_a_layer_of_no_format_is_refused_with_its_reason() -> None:
    """By each way to read a weight; a tensor with a row more, another dtype, or missing gives such a layer."""
    tried = set()
    for format, storage, _, params, tensors in storages():
        if (format.name, storage) in tried:
            continue
        first, (dtype, own) = next(iter(tensors.items()))
        settings = {"quant_method": "qdsl", "format": format.name, "storage": storage, **params}
        for wrong in ({**tensors, first: (dtype, (own[0] + 1, *own[1:]))}, {**tensors, first: (torch.complex64, own)},
                      {name: tensor for name, tensor in tensors.items() if name != first}):
            checkpoint = open_layer(wrong, settings)
            for layer in checkpoint.layers.values():
                if layer.why:
                    tried.add((format.name, storage))
                    [message] = reasons(checkpoint, layer)
                    assert message.endswith(f"layer 'layer': {layer.why}")
    assert len(tried) > 100


BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
SETTINGS: dict[str, dict[str, object]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "none": {},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized",
                           "config_groups": {"group_0": {"targets": ["Linear"], "weights": BLOCKS}}}}


@pytest.mark.parametrize("producer", SETTINGS)
@pytest.mark.parametrize("shape", [(256, 128), (128, 256), (256, 512)], ids=str)
def test_scales_of_blocks_in_another_shape_are_refused(producer: str, shape: tuple[int, int]) -> None:
    n, k = shape[0] // 128, shape[1] // 128
    weight = {"weight": (torch.float8_e4m3fn, shape)}
    right = open_layer({**weight, "weight_scale_inv": (torch.float32, (n, k))}, SETTINGS[producer])
    assert right.layer("layer").format == "fp8_block" and not right.layer("layer").problems
    for wrong in {(k, n), (1, n * k), (n * k, 1)} - {(n, k)}:
        checkpoint = open_layer({**weight, "weight_scale_inv": (torch.float32, wrong)}, SETTINGS[producer])
        with pytest.raises(CheckpointError, match=r"weight_scale_inv.* has shape"):
            checkpoint.weight("layer")


OSS = {"_blocks": torch.zeros(2, 64, 2, 16, dtype=torch.uint8), "_scales": torch.full((2, 64, 2), 120, dtype=torch.uint8)}


@pytest.mark.parametrize("is_said", [True, False], ids=["settings", "no settings"])
@pytest.mark.parametrize(("kept", "missing"), [("_blocks", "_scales"), ("_scales", "_blocks")])
@pytest.mark.parametrize("others", [True, False], ids=["of one layer", "of all"])
def test_a_missing_tensor_of_experts_is_named_as_files_have_it(is_said: bool, kept: str, missing: str, others: bool,
                                                               tmp_path: Path) -> None:
    """gpt-oss: `_scales` beside `_blocks`, not the storage's own name, and not a storage that has neither."""
    experts = "model.layers.0.mlp.experts"
    whole = {f"{experts}.down_proj{name}": tensor for name, tensor in OSS.items() if others or name == kept}
    write(tmp_path / "model.safetensors", {f"{experts}.gate_up_proj{kept}": OSS[kept], **whole})
    settings = {"quantization_config": {"quant_method": "mxfp4"}} if is_said else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **settings}))
    with Folder(tmp_path) as folder:
        layer = next((own for own in detected_layers(folder).layers if own.name.endswith("gate_up_proj")), None)
    assert (layer is None and kept == "_scales" and not others) or (layer and \
        layer.why == f"ocp_mxfp4.gpt_oss needs tensor '{missing}'; given are {kept}")
