"""A quantized weight: a storage's tensors, checked when they come together, that move as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qdsl.entropy.lookup import StreamError
from qdsl.runtime import streams
from qdsl.runtime.finite import are_codes_finite
from qdsl.runtime.pickling import picklable, unpickled
from qdsl.shapes import Axis, granule

if TYPE_CHECKING:
    from qdsl.runtime.format import Format
    from qdsl.runtime.layout import Storage, Variant


class FormatError(ValueError):
    """Tensors, fields or parameters that do not make a weight of the format; the message says what it needs."""


class Misfit(FormatError):
    """A number of a weight that its format cannot hold; {row} in the text is the row, or block of rows, where it is."""

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text.format(row=row))
        self.text, self.row = text, row

    def after(self, rows: int) -> Misfit:
        """The same of a weight with so many more rows, or blocks of them, ahead."""
        return Misfit(self.text, self.row + rows)


@contextmanager
def damage(format: str) -> Iterator[None]:
    """What is wrong with a format's streams as a FormatError."""
    try:
        yield
    except StreamError as error:
        raise FormatError(f"{format}: {error}") from None


class PackedWeight:
    """The weight [N, K] of a format in one of its storages.

    tensors: the storage's tensors by name, in storage order (absent optional ones are missing).  shape: (N, K).
    params: every parameter of the format.  known_finite: whether no code is NaN or infinite; None until `finite` is asked.
    facts: what runtime/streams.py found when it looked at streams; '' where it has not.
    names: what the checkpoint calls tensors that it names otherwise.
    Made by the format's own functions, which check shapes, dtypes and indices.
    """

    def __init__(self, format: Format, storage: str, tensors: Mapping[str, Tensor], shape: tuple[int, int],
                 params: Mapping[str, int | str], *, in_order: frozenset[str] = frozenset(), known_finite: bool | None = None,
                 notes: Sequence[str] = (), names: Mapping[str, str] | None = None, opened: bool = False,
                 facts: str = "") -> None:
        self.format = format
        self.storage = storage
        self.tensors = dict(tensors)
        self.shape = shape
        self.params = dict(params)
        self.params_text = " ".join([f"{name}={value}" for name, value in params.items()])  # here: torch.compile may not
        self.in_order = in_order
        self.known_finite = known_finite
        self.notes = tuple(notes)
        self.names = dict(names or {})
        self.variant: Variant = format.variant(params)
        self.opened = opened
        self.facts = facts
        self.layout: Storage = self.variant.storages[storage].opened if opened else self.variant.storages[storage]
        self.sizes = format.sizes(params, shape)                 # -1, the whole axis, written out
        self.extents = {**self.sizes, "N": shape[0], "K": shape[1]}
        self._steps: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """What it was made of; the rest follows from the format."""
        return _rebuilt, (self.format, self.storage, picklable(self.tensors), self.shape, self.params, self.in_order,
                          self.known_finite, self.notes, self.names, self.opened, self.facts)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {str(t.dtype)[6:]} {list(t.shape)}" for name, t in self.tensors.items())
        return f"PackedWeight({self.format.name}.{self.storage} {list(self.shape)}, {self.params}: {shown})"

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def finite(self) -> bool:
        """Whether no code is NaN or infinite.  The first time it reads every code, where the format has such codes."""
        if self.known_finite is None:
            finite = are_codes_finite(self)
            if self.device.type == "meta":
                return finite                                    # of codes that are yet to come nothing is known
            self.known_finite = finite
        return self.known_finite

    @property
    def has_separate_rows(self) -> bool:
        """Whether every row is stored by itself, so that `rows` can gather any of them."""
        axes = [each for name in self.tensors for each in self.layout.tensors[name].axes]
        return not (self.layout.whole or self.layout.streams or self.step("N") > 1 or any(each.dim == "N*K" for each in axes))

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def order(self) -> Tensor | None:
        """int32 [K], column order[j] of the weight is stored at place j; None where columns are stored as they come."""
        name = self.layout.order
        return self.tensors.get(name) if name and name not in self.in_order else None

    def as_stored(self) -> PackedWeight:
        """The weight whose columns come as they are stored: that of the tensors without their order."""
        return self.derive({name: tensor for name, tensor in self.tensors.items() if name != self.layout.order})

    def apply(self, function: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same weight with a function applied to every tensor; dtypes and shapes must stay."""
        return self.derive({name: function(tensor) for name, tensor in self.tensors.items()})

    def derive(self, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None,
               in_order: frozenset[str] | None = None) -> PackedWeight:
        """The same parameters with other tensors, unchecked; one that says the shape says the new one."""
        name = self.layout.shape
        if shape not in (None, self.shape) and name in tensors:
            tensors = {**tensors, name: said(shape, tensors[name].device)}
        return PackedWeight(self.format, self.storage, tensors, shape or self.shape, self.params,
                            in_order=self.in_order if in_order is None else in_order, known_finite=self.known_finite,
                            notes=self.notes, names=self.names, opened=self.opened, facts=self.facts)

    def open(self) -> PackedWeight:
        """The weight with what streams hold in plain tensors, which can be cut; itself where there are none.

        On meta, where nothing can be decoded, the tensors have what is known of them: dtypes and shapes.
        Raises FormatError for a stream that is damaged.
        """
        if not self.layout.streams:
            return self
        if self.device.type == "cpu":
            with damage(self.format.name):
                return self.with_plain(streams.decode(self.layout, self.tensors, self.shape))
        found, calls = streams.opened(self, kept=True)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            for call in calls if self.device.type != "meta" else ():
                call.run()
        return found

    def with_plain(self, plain: Mapping[str, Tensor]) -> PackedWeight:
        """The weight with these tensors in place of the streams that hold them."""
        found = PackedWeight(self.format, self.storage, {}, self.shape, self.params, opened=True)
        held = {**self.tensors, **plain}                         # without what operations leave out, such as the shape
        found.tensors = {name: held[name] for name in found.layout.tensors if name in held}
        return found

    def to(self, *args: Any, **kwargs: Any) -> PackedWeight:
        """All tensors on another device; a dtype is refused, because stored dtypes belong to the format."""
        return self.apply(lambda tensor: _moved(tensor, tensor.to(*args, **kwargs)))

    def cut(self, dim: str, start: int, stop: int) -> PackedWeight:
        """Rows (dim 'N') or columns ('K') [start, stop) as a weight of their own, without copying.

        Raises FormatError where a cut would go through a block or a word.
        """
        rows = dim == "N"
        whole = self.shape[0 if rows else 1]
        step = self._steps.get(dim) or self._steps.setdefault(dim, self.step(dim))
        if not 0 <= start <= stop <= whole or dim not in ("N", "K"):
            raise FormatError(f"rows ('N') or columns ('K') from {start} to {stop} of {dim} = {whole} are no part of the weight")
        for border in (start, stop):
            if border % step and border != whole:
                raise FormatError(f"{self.format.name}.{self.storage} can be cut along {dim} at multiples of {step}, "
                                  f"not at {border}")
        shape = (stop - start, self.shape[1]) if rows else (self.shape[0], stop - start)
        tensors = {}
        for name, tensor in self.tensors.items():
            for place, each in enumerate(self.layout.tensors[name].axes):
                if each.dim in (dim, "N*K"):
                    tensor = tensor.narrow(place, *self._span(each, dim, start, stop))
            if not rows and (name == self.layout.order or self.layout.tensors[name].dtype == "index"):
                if name not in self.in_order:
                    raise FormatError(f"'{name}' puts columns into groups all over K (act-order); only rows can be cut")
                tensor = tensor - tensor[:1]                     # groups, or columns, count from 0 again
            tensors[name] = tensor
        return self.derive(tensors, shape)

    def rows(self, index: Tensor) -> PackedWeight | None:
        """Rows of these numbers as a weight of their own; None where rows are not stored each by itself."""
        if not self.has_separate_rows:
            return None
        tensors = {}
        for name, tensor in self.tensors.items():
            places = [place for place, each in enumerate(self.layout.tensors[name].axes) if each.dim == "N"]
            tensors[name] = tensor.index_select(places[0], index) if places else tensor
        return self.derive(tensors, (index.shape[0], self.shape[1]))

    def step(self, dim: str) -> int:
        """Rows or columns between two places where the weight can be cut; all of them, where streams hold it."""
        if self.layout.whole or self.layout.streams:
            return max(1, self.shape[dim == "K"])
        axes = [each for name in self.tensors for each in self.layout.tensors[name].axes]
        fields = [each for field in self.variant.fields.values() for each in field.axes]
        return granule([*axes, *fields], dim, self.sizes, self.shape[1])

    def _span(self, each: Axis, dim: str, start: int, stop: int) -> tuple[int, int]:
        """First element and number of elements of an axis that rows or columns [start, stop) occupy."""
        if each.dim == "N*K":
            if dim == "K":
                raise FormatError(f"{self.format.name}.{self.storage} stores rows one after the other; only rows can be cut")
            start, stop = start * self.shape[1], stop * self.shape[1]
        first = each.elements(start, self.sizes)
        return first, each.elements(stop, self.sizes) - first


def said(shape: tuple[int, int], device: torch.device) -> Tensor:
    """What a tensor holds that says the shape."""
    return torch.tensor(shape, dtype=torch.int64, device=device)


def _rebuilt(format: Format, storage: str, tensors: Mapping[str, Tensor], shape: tuple[int, int],
             params: Mapping[str, int | str], in_order: frozenset[str], known_finite: bool | None, notes: Sequence[str],
             names: Mapping[str, str], opened: bool, facts: str) -> PackedWeight:
    return PackedWeight(format, storage, unpickled(tensors), shape, params, in_order=in_order, known_finite=known_finite,
                        notes=notes, names=names, opened=opened, facts=facts)


def _moved(before: Tensor, after: Tensor) -> Tensor:
    if before.dtype != after.dtype:
        raise FormatError(f"a packed weight keeps its stored dtypes: {before.dtype} cannot become {after.dtype}")
    return after
