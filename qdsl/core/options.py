"""The options of a format's quantizer: values of parameters, a storage, and options of its encode scheme.

Descriptions of formats have them, so that options are checked without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qdsl.core.shapes import own_value, values_text
from qdsl.core.stored import Description
from qdsl.core.text import did_you_mean

GPTQ, IMPORTANCE = METHODS = ("gptq", "importance")              # of calibrated quantization: what the moments of inputs choose


class FormatError(ValueError):
    """Tensors, fields or parameters do not form a weight of the format; the message says what the format needs."""


def complete_params(format: Description, params: Mapping[str, int | str]) -> dict[str, int | str]:
    """All parameters: the caller's, validated, and defaults for the others.  Raises FormatError."""
    for name, value in params.items():
        if name not in format.params:
            options = format.options
            further = f", and the options {', '.join(options)} to quantize" if options else ""
            raise FormatError(f"{format.name} has no parameter '{name}'; it has {', '.join(format.params) or 'none'}{further}"
                              f"{did_you_mean(name, (*format.params, *options))}")
        if value not in format.params[name]:
            raise FormatError(f"{format.name}: {name} is one of {values_text(format.params[name])}, not {value!r}")
    return {name: own_value(values, params.get(name, values[0])) for name, values in format.params.items()}


def storage_name(format: Description, name: str | None, params: Mapping[str, int | str]) -> str:
    """A storage of the variant for these parameters, or its first.  Raises FormatError for a name of none."""
    own = format.variants[format.key(params)]
    chosen = name or next(iter(own))
    if chosen not in own:
        of_params = f" for {', '.join(f'{key}={params[key]}' for key in format.by)}" if chosen in format.storages else ""
        near = "" if of_params else did_you_mean(str(chosen), own)
        raise FormatError(f"{format.name} has no storage '{chosen}'{of_params}; it has {', '.join(own)}{near}")
    return chosen


def choose_options(format: Description, options: Mapping[str, Any]) -> tuple[dict[str, int | str], dict[str, Any], str]:
    """The parameters, options of the encode scheme, and storage that options of quantize select.  Raises FormatError."""
    choices = format.options
    params = complete_params(format, {key: value for key, value in options.items() if key not in (*choices, "storage")})
    scheme_options = {key: value for key, value in options.items() if key in choices}
    for key, value in scheme_options.items():
        if choices[key] and value not in choices[key]:
            raise FormatError(f"{format.name}: {key} is one of {', '.join(map(str, choices[key]))}, not {value}")
        if not choices[key] and not (type(value) in (int, float) and 0 < value < math.inf):
            raise FormatError(f"{format.name}: {key} is a positive number, not {value}")
    name = storage_name(format, options.get("storage"), params)
    if format.key(params) not in format.quantizers:
        raise FormatError(f"{format.name} has no quantizer yet: its spec names no encode scheme")
    return params, scheme_options, name
