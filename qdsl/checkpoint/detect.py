"""Which parameters a checkpoint's config gives a format, by the rules that the format's spec lists under `detect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings of a config.json: its quantization_config, and the weights of compressed-tensors' only group."""
    found = config.get("quantization_config", config.get("compression_config"))
    if not isinstance(found, Mapping):
        return {}
    groups = found.get("config_groups")
    only = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    weights = only.get("weights") if isinstance(only, Mapping) else None
    return {**found, **weights} if isinstance(weights, Mapping) else dict(found)


def params_of(rules: Mapping[str, Any], params: Mapping[str, Sequence[int | str]], config: Mapping[str, Any],
              ) -> dict[str, int | str] | None:
    """What a config says of a format's parameters; None where the config is of another format.

    rules: SPEC.detect.  params: SPEC.params.  config: a config.json.  A rule is a word that the config must have, a list of
    words of which it must have one, 'null' for a setting that is absent, or names of parameters, which take its values.
    """
    given = settings(config)
    found: dict[str, int | str] = {}
    for key, rule in rules.get("config", {}).items():
        value = given.get(key)
        names = rule if isinstance(rule, list) else [rule]
        if all(name in params for name in names):
            values = value if isinstance(value, list) else [value]
            if len(values) != len(names) or any(v not in params[name] for name, v in zip(names, values, strict=True)):
                return None
            found |= dict(zip(names, values, strict=True))
        elif value not in [None if name == "null" else name for name in names]:
            return None
    return found if "config" in rules else None
