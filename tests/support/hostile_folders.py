"""Folders with up to 2 MB of JSON whose patterns, names and settings are chosen to take long."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZE = 2_000_000
Config = dict[str, Any]


def folder(path: Path, attack: str) -> Path:
    """A folder with a hostile config, and as many empty layers as fit into the other JSON that 2 MB have room for."""
    config, names = json.dumps(CONFIGS[attack]()), long_names() if attack in LONG_NAMES else plain_names()
    path.mkdir()
    header: dict[str, Any] = {}
    length = len(config)
    for name in names:
        length += len(name) + 60
        if length > SIZE:
            break
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": [0, 8], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (path / "config.json").write_text(config)
    return path


def plain_names() -> Iterator[str]:
    return (f"model.layers.{number}.q" for number in range(SIZE))


def long_names() -> Iterator[str]:
    return (f"{number:06}".ljust(900, "a") for number in range(SIZE))


def repeated(make: Callable[[int], str], size: int) -> list[str]:
    """Texts of a number, as many as fit into JSON of that size."""
    count = size // (len(make(100_000)) + 5)
    return [make(number) for number in range(count)]


def quantized(**settings: Any) -> Config:
    return {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors", "bits": 4, **settings}}


HALF = SIZE // 2
WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
GROUP = {"w": {"weights": WEIGHTS, "targets": ["Linear"]}}
LONG_NAMES = ("polynomial on long names", "long glob")           # attacks on those; all others have names as of real layers

# Hostile configs by what they attack.
CONFIGS: dict[str, Callable[[], Config]] = {
    "polynomial": lambda: quantized(config_groups=GROUP, ignore=["re:[^x]*[^x]*[^x]*[^x]*b"]),
    "polynomial on long names": lambda: quantized(config_groups=GROUP, ignore=["re:0*[^x]*[^x]*[^x]*b"]),
    "nested": lambda: quantized(config_groups=GROUP, ignore=["re:(?:(?:a|a)*)*b"]),
    "many expressions": lambda: quantized(config_groups=GROUP, ignore=repeated(lambda n: f"re:.*{n}x", HALF)),
    "many slow expressions": lambda: quantized(config_groups=GROUP, ignore=repeated(lambda n: f"re:.*.*.*.*{n}x", HALF)),
    "many names": lambda: quantized(config_groups=GROUP, ignore=repeated(lambda n: f"n{n}", HALF)),
    "many substrings": lambda: quantized(quant_method="awq", modules_to_not_convert=repeated(lambda n: f"n{n}", HALF)),
    "many globs": lambda: quantized(quant_method="modelopt", ignore=repeated(lambda n: f"*a*{n}*b*", HALF)),
    "long glob": lambda: quantized(quant_method="modelopt", ignore=["*a" * 400 + "b"]),
    "many groups": lambda: quantized(config_groups={f"g{n}": {"weights": {}, "targets": [f"re:.*{n}x"]} for n in range(20_000)}),
    "groups for all": lambda: quantized(config_groups={f"g{n}": {"weights": {"a": 1}, "targets": ["Linear"]}
                                                    for n in range(20_000)}),
    "many dynamic rules": lambda: quantized(quant_method="gptq", dynamic={f"-:.*{n}x": {} for n in range(60_000)}),
    "many settings": lambda: quantized(**{f"s{n}": 1 for n in range(40_000)},
                                       quantized_layers={f"l{n}": {} for n in range(50_000)}),
    "suffixes": lambda: quantized(quant_method="gptq", modules_to_not_convert=[],
                               modules_in_block_to_quantize=[repeated(lambda n: f"n{n}", HALF)]),
    "patterns of df11": lambda: {"dfloat11_config": {"pattern_dict": {f"(.*)(.*)(.*){n}x": ["q"] for n in range(40_000)}}},
    "long expressions": lambda: quantized(config_groups=GROUP, ignore=repeated(lambda n: f"re:{'(?:a|b)?' * 100}{n}", HALF)),
    "deep": lambda: quantized(config_groups=GROUP, ignore="[" * 10_000),
}
