"""Errors of tensors, fields and parameters that do not form a weight of a format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qdsl.core.codecs import StreamError
from qdsl.core.options import FormatError as FormatError


class UnrepresentableValue(FormatError):
    """A format cannot hold a number of a weight; {row} in the text is replaced by its row, or block of rows."""

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text.format(row=row))
        self.text, self.row = text, row

    def after(self, rows: int) -> UnrepresentableValue:
        """The same error with `rows` more rows, or blocks of them, before it."""
        return UnrepresentableValue(self.text, self.row + rows)


@contextmanager
def stream_errors(format: str) -> Iterator[None]:
    """Turns a StreamError into a FormatError."""
    try:
        yield
    except StreamError as error:
        raise FormatError(f"{format}: {error}") from None
