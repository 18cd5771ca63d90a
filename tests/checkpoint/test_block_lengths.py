"""Every block length that a producer's own code accepts is detected, loaded and decoded exactly; others are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import detected_layers, layers
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.files.folder import Folder
from qdsl.cli import app
from qdsl.core.producer import ABOUT_RULE, Producer, Rule
from qdsl.core.shapes import ANY
from qdsl.core.stored import Description
from tests.support.checkpoints import folder
from tests.support.formats import Case, random_fields, shapes
from tests.support.layer_configs import UP, gptq
from tests.support.paths import ROOT

UNLISTED = (24, 40, 48, 96, 100, 7)                              # of "any": multiples of 8, of 4 and of nothing
FORMATS = {format.name: format for format in descriptions()}
WORD = {"strategy": "group"}                                     # a setting whose word is also a parameter's name
# The formulas of formats whose blocks lie along the axes.
DECODED: dict[str, Callable[..., Tensor]] = {
    "int_group": lambda q, s, z=8: (q - z) * s, "fp8_block": lambda q, s: q * s,
    "awq_gemv_fast": lambda q, z, s: q * s + z, "mlx": lambda q, s, b: q * s + b}


@dataclass(frozen=True)
class Accepted:
    """A producer's rule for a storage, and a setting of it that states lengths of blocks: the parameters, and the lengths."""

    producer: Producer
    format: Description
    rule: Rule
    setting: str
    sizes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.producer.name}-{self.format.name}-{self.storage}-{self.setting}"

    @property
    def storage(self) -> str:
        return str(self.rule.get("storage") or next(iter(next(iter(self.format.variants.values())))))

    @property
    def lengths(self) -> list[int]:
        listed = self.producer.accepts[self.setting]
        written = [length for length in listed if isinstance(length, int)] + [*(UNLISTED if ANY in listed else ())]
        return [length for length in written if length in self.format.params[self.sizes[0]]]

    @property
    def params(self) -> dict[str, int | str]:
        """Parameters with which the storage exists."""
        key = next(key for key, storages in self.format.variants.items() if self.storage in storages)
        return {**{name: values[0] for name, values in self.format.params.items()}, **dict(zip(self.format.by, key, strict=True)),
                **self.rule.get("where", {})}

    def settings(self, params: Mapping[str, int | str]) -> dict[str, Any]:
        """What the rule demands, in the producer's form."""
        flat: dict[str, Any] = {}
        for key, wanted in self.rule.items():
            words = wanted if isinstance(wanted, list) else [wanted]
            if key in ABOUT_RULE or isinstance(wanted, Mapping) or words[0] == "null":
                continue
            if all(word in params for word in words) and key not in WORD:
                flat[key] = [params[word] for word in words] if isinstance(wanted, list) else params[wanted]
            else:
                flat[key] = words[0]
        if self.producer.groups is None:
            return flat
        own = {key: flat.pop(key) for key in self.producer.groups.weights if key in flat}
        return {**flat, self.producer.groups.key: {"group_0": {"targets": ["Linear"], "weights": own}}}


def accepted() -> Iterator[Accepted]:
    for producer in producers().every:
        for name, rules in producer.formats.items():
            for rule in rules:
                for setting in producer.accepts:
                    words = rule.get(setting)
                    sizes = tuple(word for word in (words if isinstance(words, list) else [words]) if word in FORMATS[name].sizes)
                    if sizes:
                        yield Accepted(producer, FORMATS[name], rule, setting, sizes)


def expanded(field: Tensor, sizes: Sequence[int], shape: tuple[int, int], groups: Tensor | None) -> Tensor:
    """A field of blocks as one number per weight.  groups: the group of every column, by default in order."""
    if list(field.shape) == list(shape):
        return field.float()
    rows, columns = (torch.arange(extent) for extent in shape)
    wide = field[rows // sizes[0]] if len(sizes) == 2 else field
    return wide.float()[:, columns // sizes[-1] if groups is None else groups.long()]


def written(path: Path, one: Accepted, length: int, seed: int) -> Tensor | None:
    """The weight, by the format's formula, of a folder of one layer with blocks of this length; None if it can have none."""
    case = Case(ROOT / "specs" / f"{one.format.name}.yaml", one.storage, tuple(one.params.items()))
    params = {**one.params, **dict.fromkeys(one.sizes, length)}
    columns = (320, 2 * lcm(max(1, length), 64), 1024 * length // 8 if length > 0 else 1024)
    shape = next(shapes(case, (64,), columns, params), None)
    if shape is None:
        return None
    fields = random_fields(case, shape, seed, params)
    packed = case.module.FORMAT.pack(fields, storage=case.storage, **params)
    settings = {"quant_method": one.producer.name, **one.settings(params)}
    config = {"quantization_config": settings} if one.producer.name != "mlx" else {"quantization": one.settings(params)}
    folder(path, {UP: packed.tensors}, config)
    sizes = [length if length > 0 else shape[1]] * len(one.sizes)
    fields = case.module.FORMAT.unpack(packed)
    groups = fields.pop("g", None)
    return DECODED[one.format.name](**{name: expanded(field, sizes, shape, groups) for name, field in fields.items()})


@pytest.mark.parametrize("one", [*accepted()], ids=str)
def test_every_accepted_length_is_detected_and_decoded_exactly(one: Accepted, tmp_path: Path) -> None:
    checked = 0
    for seed, length in enumerate(one.lengths):
        path = tmp_path / str(length)
        path.mkdir()
        weight = written(path, one, length, seed)
        if weight is None:
            continue
        checked += 1
        with Folder(path) as source:
            detected = layers(source)
            [layer] = detected.layers
            assert (layer.why, layer.problems, detected.problems) == ("", (), []), length
            assert (layer.format, layer.storage) == (one.format.name, one.storage)
            numbers = one.format.sizes_for(layer.params, layer.shape)
            assert [numbers[name] for name in one.sizes] == [length if length > 0 else layer.shape[1]] * len(one.sizes)
            [packed] = weights(source, layer)
            assert torch.equal(packed.format.dequantize(packed, torch.float32), weight), length
            x = torch.randn(2, layer.shape[1], dtype=torch.float64)
            assert torch.allclose(packed.format.linear(x, packed), x @ weight.double().T, rtol=1e-9, atol=1e-9)
    assert checked >= min(3, len(one.lengths))


@pytest.mark.parametrize("length", [0, -2, 12.5, "many"])
def test_a_length_that_no_producer_writes_is_named(tmp_path: Path, length: Any) -> None:
    case = Case(ROOT / "specs" / "int_group.yaml", "gptq_v2", (("bits", 4), ("group", 64), ("scale_type", "f16")))
    fields = random_fields(case, (64, 320), 0, dict(case.params))
    packed = case.module.FORMAT.pack(fields, storage=case.storage, **dict(case.params))
    folder(tmp_path, {UP: packed.tensors}, gptq(bits=4, group_size=length, checkpoint_format="gptq_v2"))
    with Folder(tmp_path) as source:
        [problem, *_] = detected_layers(source).problems
    assert problem.startswith(f"config.json: quantization_config: group_size is {length!r}; gptq writes -1, 16, ")


def test_a_folder_of_which_nothing_is_recognised_is_an_error(tmp_path: Path) -> None:
    tensors = {"qweight": torch.zeros(40, 64, dtype=torch.int32), "qzeros": torch.zeros(5, 8, dtype=torch.int32),
               "scales": torch.ones(3, 64, dtype=torch.float16)}
    folder(tmp_path, {UP: tensors}, gptq(bits=4, group_size=100, checkpoint_format="gptq_v2"))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1 and "none of its 1 quantized layers is recognised: " in result.stderr
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"])
    assert result.exit_code == 1 and "group = 100" in json.loads(result.stdout)["layers"][0]["why"]
