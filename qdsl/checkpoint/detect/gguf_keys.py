"""Accounts for the metadata keys of GGUF language models, by a table of keys in gguf_keys.json.

`settings` has for each key, without its architecture, the entries of configs that say the same; the first that a config has
counts.  `models` has others for some model types, null for keys that are not compared.  An entry is a name, as
`rope_parameters.rope_theta`, or names with `*`, `/` and `+` between them, or a number; `layer_types=sliding_attention` is which
layers are of that type.  `usual` has values that change nothing.  `inert` keys change no number, or shapes of tensors say the
same.  `rope` keys are compared by qdsl.models.transformers.gguf_rope.  `common` and `architectures` are what llama.cpp reads,
`unread` what its converter writes beside that.  `others` are architectures without a map, with all keys that llama.cpp reads or
its converter writes, beside `common` and `written`; `*` stands for any text.  qdsl.models.transformers.gguf_config explains the
rest.  Keys outside of the architecture's own are notes of programs, or the vocabulary's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.ledger import Finding, Kind, is_nothing
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.safetensors import shown

TABLE = Path(__file__).with_name("gguf_keys.json")
LLAMA_CPP = "llama_cpp"                                          # of configs: see qdsl.models.transformers.gguf_additions
CLOSE = 1e-5                                                     # relative difference of numbers that are rounded to float32
# What a key concerns, by how it begins.
EFFECTS = {"rope.": "rotary embeddings", "attention.": "attention", "attn_": "attention", "expert": "the weights of experts",
           "ssm.": "the state space", "": "the model's numbers"}


@cache
def table() -> Mapping[str, Any]:
    loaded: dict[str, Any] = json.loads(TABLE.read_text())
    return loaded


def key_findings(file: GgufFile) -> list[Finding]:
    """Keys of a language model that change its numbers and are not computed, or that nothing is known about.

    None for architectures that llama.cpp does not know, and only unknown keys for those without a map: their weights alone are
    read.
    """
    return metadata_findings(file.path.name, file.metadata)


def metadata_findings(place: str, metadata: Mapping[str, Any]) -> list[Finding]:
    """The same for metadata.  place: the file."""
    architecture = metadata.get("general.architecture")
    if architecture not in table()["architectures"] and not has_no_map(architecture):
        return []
    start, findings = f"{architecture}.", []
    for key in [key for key in metadata if key.startswith(start)]:
        name, value = key.removeprefix(start), plain(metadata[key])
        kind = _kind(name, str(architecture))
        if kind is not None and not is_usual(name, value) and not (kind is Kind.UNKNOWN and is_nothing(value)):
            findings.append(Finding(kind, place, key, shown(str(value))[1:-1], effect(name)))
    return findings


def config_findings(config: Mapping[str, Any]) -> list[Finding]:
    """What a folder that was made of a GGUF file adds to its model's class, and other programs than `from_pretrained` do not."""
    parameters = config.get("rope_parameters") or {}
    ordered = {"rope.dimension_sections", *(() if parameters.get("attention_factor", 1) != 1 else ("rope.dimension_count",))}
    effects = {key: f"{effect(key)}, in `from_pretrained` alone" for key in config.get(LLAMA_CPP) or {} if key not in ordered}
    return [Finding(Kind.ACTS, "config.json", f"{LLAMA_CPP}.{key}", shown(str(config[LLAMA_CPP][key])), own)
            for key, own in effects.items()]


def _kind(key: str, architecture: str) -> Kind | None:
    """What a key of an architecture does; None for one that is computed, or that changes no number."""
    rows = table()
    if has_no_map(architecture):
        patterns = (*rows["common"], *rows["written"], *rows["inert"], *rows["others"][architecture])
        return None if any(fnmatchcase(key, pattern) for pattern in patterns) else Kind.UNKNOWN
    if key in rows["inert"] or key in rows["unread"].get(architecture, ()):
        return None
    if not is_read(key, architecture):
        return None if key in known_keys() else Kind.UNKNOWN
    is_computed = key in rows["settings"] or key in rows["rope"] or any(key in own for own in rows["models"].values())
    return None if is_computed else Kind.ACTS


def has_no_map(architecture: object) -> bool:
    """Whether llama.cpp knows an architecture that qdsl has no map of: its files are no models here."""
    return architecture in table()["others"]


def is_read(key: str, architecture: str) -> bool:
    """Whether llama.cpp reads a key for models of an architecture."""
    return key in table()["common"] or key in table()["architectures"].get(architecture, ())


@cache
def known_keys() -> frozenset[str]:
    """All keys that llama.cpp reads for some architecture, or that its converter writes."""
    rows = table()
    groups = (*rows["architectures"].values(), *rows["others"].values(), *rows["unread"].values())
    return frozenset(rows["common"]).union(rows["written"], rows["settings"], rows["rope"], *groups)


def is_ignored(key: str, architecture: str) -> bool:
    """Whether llama.cpp knows a key and does not read it for an architecture with a map, for which its converter writes none."""
    own = (*table()["inert"], *table()["unread"].get(architecture, ()))
    return key in known_keys() and key not in own and not is_read(key, architecture)


def is_usual(key: str, value: object) -> bool:
    """Whether a value of a key changes nothing."""
    usual = table()["usual"].get(key, ())
    return all(any(are_close(own, other) for other in usual) for own in (value if isinstance(value, list) else [value]))


def effect(key: str) -> str:
    """What a key may change."""
    return next(text for start, text in EFFECTS.items() if key.startswith(start))


def plain(value: Any) -> Any:
    """A value of metadata, an array as a list."""
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


def are_close(value: Any, expected: Any) -> bool:
    """Whether two values are the same, but for the rounding of numbers to float32."""
    if isinstance(value, str | bool) or isinstance(expected, str | bool):
        return bool(value == expected)
    return math.isclose(value, expected, rel_tol=CLOSE)
