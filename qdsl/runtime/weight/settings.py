"""Environment variables that choose among a few words."""

from __future__ import annotations

import os
from typing import NamedTuple

from qdsl.runtime.weight.errors import FormatError


class EnvironmentSetting(NamedTuple):
    """An environment variable and the words that it may have, the default first."""

    variable: str
    choices: tuple[str, ...]

    def value(self, chosen: str = "") -> str:
        """`chosen`, else what the environment says, else the default.  Raises FormatError for any other word."""
        value = chosen or os.environ.get(self.variable, self.choices[0])
        if value not in self.choices:
            raise FormatError(f"{self.variable} is {', '.join(self.choices[:-1])} or {self.choices[-1]}, not {value!r}")
        return value
