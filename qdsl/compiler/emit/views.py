"""Chains of torch views: an expression together with the names of its axes, so that names move with the data.

An axis is named by a variable of the tensor (a string) or by a `Digit` of a coordinate; BYTES names the bytes of a record, a
region or a container.  Every method returns a new chain, with the text and the names changed alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdsl.compiler.emit.digits import Digit, SliceCut

BYTES = "bytes"
Label = str | Digit


@dataclass(frozen=True, slots=True)
class Chain:
    """Torch text for a tensor, and the name of each axis."""

    text: str
    labels: tuple[Label, ...]

    def call(self, method: str) -> Chain:
        """The chain with a method call appended that keeps the axes."""
        return replace(self, text=f"{self.text}.{method}")

    def in_rising_order(self) -> Chain:
        """Reverses digits whose bytes are in falling order; applying it twice changes nothing."""
        axes = [str(axis) for axis, label in enumerate(self.labels) if isinstance(label, Digit) and label.is_reversed]
        return self.call(f"flip({', '.join(axes)})") if axes else self

    def permute(self, order: Sequence[Label]) -> Chain:
        """The axes permuted; unchanged if they are in this order."""
        if tuple(order) == self.labels:
            return self
        if len(order) == 2:
            return Chain(f"{self.text}.t()", tuple(order))
        return Chain(f"{self.text}.permute({', '.join(str(self.labels.index(label)) for label in order)})", tuple(order))

    def unflatten(self, axis: int, labels: Sequence[Label], sizes: Sequence[int | str]) -> Chain:
        """One axis split into several, or removed if it has one element; torch infers a size of 0."""
        labels = tuple(labels)
        moved = (*self.labels[:axis], *labels, *self.labels[axis + 1:])
        place = axis if axis < len(self.labels) - 1 else -1
        if len(labels) == 1:
            return replace(self, labels=moved)
        if not labels:
            return Chain(f"{self.text}.squeeze({place})", moved)
        return Chain(f"{self.text}.unflatten({place}, ({', '.join(str(size or -1) for size in sizes)}))", moved)

    def flatten(self, first: int, count: int, label: Label) -> Chain:
        """`count` axes from `first` on joined to one."""
        labels = (*self.labels[:first], label, *self.labels[first + count:])
        if count == 1:
            return replace(self, labels=labels)
        if count == 0:
            return Chain(f"{self.text}.unsqueeze({first if first < len(self.labels) else -1})", labels)
        if first == 0 and count == len(self.labels):
            return Chain(f"{self.text}.flatten()", labels)
        last = "" if first + count == len(self.labels) else f", {first + count - 1}"
        return Chain(f"{self.text}.flatten({first}{last})", labels)

    def select(self, index: dict[Label, int]) -> Chain:
        """One value of some axes: `q[:, :, 0]`."""
        return self.pick({label: str(value) for label, value in index.items()})

    def pick(self, index: dict[Label, str]) -> Chain:
        """The same with texts as values."""
        if not index:
            return self
        shown = [index.get(label, ":") for label in self.labels]
        kept = tuple(label for label in self.labels if label not in index)
        lead = next(i for i, text in enumerate(shown) if text != ":")
        while shown[-1] == ":":
            shown.pop()
        if lead > 1 and len(shown) == len(self.labels):
            shown = ["...", *shown[lead:]]
        return Chain(f"{self.text}[{', '.join(shown)}]", kept)


def view_bytes(records: Chain, cut: SliceCut, skip: int, size: int) -> tuple[Chain, tuple[Digit, ...]] | None:
    """The bytes of a slice's lanes, `skip` bytes after its first, in records of `size` bytes; always a view.

    The axes are those of the records, then byte digits with gaps between their values, then BYTES, which holds the returned
    digits and, innermost, the bytes of a container.  None if the bytes are too scattered for a view.
    """
    first = cut.first + skip
    outer: list[Digit] = list(cut.bytes_)
    inner: list[Digit] = []
    dense = cut.container
    while outer and outer[-1].stride == 8 * dense:
        dense *= outer[-1].extent
        inner.insert(0, outer.pop())
    if not outer:
        text = records.text if dense == size else f"{records.text}[..., {first}:{first + dense}]"
        return Chain(text, records.labels), tuple(inner)
    step = outer[-1].stride // 8
    if len(outer) > 1:
        return None
    if dense == 1:
        stop = first + (outer[0].extent - 1) * step + 1
        return Chain(f"{records.text}[..., {first}:{stop}:{step}]", records.labels), (outer[0],)
    start = min(first, size - outer[0].extent * step)
    offset = first - start
    if start < 0 or offset + dense > step:
        return None
    text = f"{records.text}[..., {start}:{start + outer[0].extent * step}].unflatten(-1, ({outer[0].extent}, {step}))"
    if dense < step:
        text += f"[..., {offset or ''}:{offset + dense}]"
    return Chain(text, (*records.labels[:-1], outer[0], BYTES)), tuple(inner)
