"""Errors that tensors, fields and parameters raise where they make no weight of a format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qdsl.codecs.lookup import StreamError


class FormatError(ValueError):
    """Tensors, fields or parameters that do not make a weight of the format; the message says what it needs."""


class UnrepresentableValue(FormatError):
    """A number of a weight that its format cannot hold; {row} in the text is the row, or block of rows, where it is."""

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text.format(row=row))
        self.text, self.row = text, row

    def after(self, rows: int) -> UnrepresentableValue:
        """The same of a weight with so many more rows, or blocks of them, ahead."""
        return UnrepresentableValue(self.text, self.row + rows)


@contextmanager
def stream_errors(format: str) -> Iterator[None]:
    """Raises a FormatError in place of a StreamError."""
    try:
        yield
    except StreamError as error:
        raise FormatError(f"{format}: {error}") from None
