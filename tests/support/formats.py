"""Every format, storage and variant that tests run over: a new file in specs/ or tests/specs/ is covered with no new test."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import lcm, prod
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from qdsl.analyze.check import spec_bits as oracle
from qdsl.analyze.check.compare import describe_difference
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.passes.derive_planar import PLANAR
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.schema import load
from qdsl.core.numbers import number
from qdsl.runtime import PackedWeight
from qdsl.runtime.weight.match import torch_dtype
from tests.support.paths import ROOT
from tests.support.slow_reading import Reading

SHIPPED = sorted((ROOT / "specs").glob("*.yaml"))
EXTRA = sorted((ROOT / "tests" / "specs").glob("*.yaml"))
MOST_ENTRIES = 1 << 14                                           # of a stored table, which tests go through one by one
NO_QUANTIZER = ROOT / "tests" / "specs" / "int4_rows.yaml"       # its page names no encode scheme


@dataclass(frozen=True)
class Case:
    """A storage of a format at one choice of its parameters."""

    path: Path
    storage: str
    params: tuple[tuple[str, int | str], ...]

    def __str__(self) -> str:
        shown = "-".join(f"{key}{value}" for key, value in self.params)
        return f"{self.path.stem}.{self.storage}{'-' if shown else ''}{shown}"

    @property
    def spec(self) -> Spec:
        """The spec; of a derived storage, the one in which the compiler has written it."""
        return spec(self.path) if self.storage != PLANAR else derived(self.path, self.params)

    @property
    def has_row_codes(self) -> bool:
        """Whether the storage has codes in place of rows, and so not the format's own fields."""
        return {field.name.value for field in self.spec.fields} != {field.name.value for field in spec(self.path).fields}

    @property
    def module(self) -> ModuleType:
        return module(self.path)

    @property
    def choice(self) -> dict[str, int | str]:
        return dict(self.params)


@cache
def spec(path: Path) -> Spec:
    return load(path)


def _entries(spec: Spec) -> int:
    """The most entries of a stored table of one block, with the default parameters."""
    env = oracle.size_environment(replace(spec, dims=()), 0, 0, {p.name.value: p.values[0] for p in spec.params}, {})
    return max((prod(oracle.evaluate(e, env) for e in oracle.table_extents(spec, field)) for field in spec.fields), default=0)


SPECS = [path for path in (*SHIPPED, *EXTRA) if _entries(spec(path)) <= MOST_ENTRIES]


@cache
def derived(path: Path, params: tuple[tuple[str, int | str], ...]) -> Spec:
    return next(program.spec for program in compile_spec(spec(path)) if program.storage == PLANAR
                and program.params.items() <= dict(params).items())


@cache
def module(path: Path) -> ModuleType:
    """The generated module of a spec: the checked-in one, or one built into a cache."""
    if path.parent == ROOT / "specs":
        return importlib.import_module(f"qdsl.generated.{path.stem}")
    import qdsl

    os.environ.setdefault("QDSL_CACHE", str(Path(tempfile.gettempdir()) / f"qdsl-tests-{os.getuid()}"))
    return qdsl.load(path)


@cache
def cases(types: bool = False) -> list[Case]:
    """All storages of all formats; with `types`, the first and the planar one once more for every type that a scale may have."""
    combinations: list[Case] = []
    for path in SPECS:
        format = module(path).FORMAT
        for key, variant in format.variants.items():
            for storage in variant.storages:
                base = format.complete(dict(zip(format.by, key, strict=True)))
                choices = [base]
                if types and key == next(iter(format.variants)) and storage in (next(iter(variant.storages)), PLANAR):
                    for name, values in format.params.items():
                        if isinstance(values[0], str) and name not in format.by:
                            choices += [{**base, name: value} for value in values[1:]]
                combinations += [Case(path, storage, tuple(choice.items())) for choice in choices]
    return combinations


def shapes(case: Case, rows: tuple[int, ...], columns: tuple[int, ...], params: Mapping[str, int | str] | None = None,
           ) -> Iterator[tuple[int, int]]:
    """The shapes of a grid that the storage can hold."""
    format = case.module.FORMAT
    chosen = {**case.choice, **(params or {})}
    layout = format.variant(chosen).storages[case.storage].decoded
    for n in rows:
        for k in columns:
            sizes = format.sizes(chosen, (n, k))
            if all(a.extent(n, k, sizes) is not None for stored in layout.tensors.values() for a in stored.axes) and \
                    not layout.why_unsupported_shape((n, k), sizes):
                yield n, k


def fixed_shape(case: Case, shape: tuple[int, int]) -> tuple[int, int]:
    """A shape with N and K as the format has them where it fixes them."""
    fixed = spec(case.path).fixed                                # as in derived storages, whose spec takes time to compile
    return fixed.get("N", shape[0]), fixed.get("K", shape[1])


def is_held(case: Case, params: Mapping[str, int | str]) -> bool:
    """Whether the storage has weights of these sizes: some are for several groups, or for whole ones in a step of columns."""
    n, k = fixed_shape(case, (128, 4096))
    return any(shapes(case, (n,), (k,), params))


def smallest(case: Case, tiles: int = 1, params: Mapping[str, int | str] | None = None) -> tuple[int, int]:
    """A small shape with about `tiles` records along each axis."""
    n, k = _least(case, tuple((params or {}).items()))
    return fixed_shape(case, (n * tiles, k * tiles))


@cache
def _least(case: Case, params: tuple[tuple[str, int | str], ...]) -> tuple[int, int]:
    grid = tuple(range(1, 65)) + tuple(64 * i for i in range(2, 41))
    every = lcm(*grid)                                           # rows that all steps divide, if any do for these columns
    return next((n, k) for k in grid if any(shapes(case, (every,), (k,), dict(params)))
                for n, k in shapes(case, grid, (k,), dict(params)))


def field_shape(case: Case, name: str, shape: tuple[int, int], params: Mapping[str, int | str] | None = None) -> tuple[int, ...]:
    format = case.module.FORMAT
    chosen = {**case.choice, **(params or {})}
    sizes = format.sizes(chosen, shape)
    return tuple(axis.rounded(*shape, sizes) for axis in format.variant(chosen).fields[name].axes)


def random_fields(case: Case, shape: tuple[int, int], seed: int = 0, params: Mapping[str, int | str] | None = None,
                  ) -> dict[str, Tensor]:
    """Fields of random bits, with floats that are finite and of moderate size; digits where a storage has them in base 3."""
    digits = oracle.digit_fields(spec(case.path))
    format = case.module.FORMAT
    chosen = {**case.choice, **(params or {})}
    generator = torch.Generator().manual_seed(seed)
    variant = format.variant(chosen)
    fields: dict[str, Tensor] = {}
    for name, field in variant.fields.items():
        if name in variant.storages[case.storage].where:
            continue
        size = field_shape(case, name, shape, params)
        kind = str(chosen.get(field.type, field.type))
        dtype = torch_dtype(kind)
        if kind == "index":
            assert field.groups is not None
            groups = field.groups.extent(*shape, format.sizes(chosen, shape)) or 1
            fields[name] = torch.randint(0, max(1, groups), size, generator=generator, dtype=torch.int32)
        elif kind in ("f16", "bf16", "f32"):
            fields[name] = torch.randn(size, generator=generator).to(dtype)
        elif dtype.is_floating_point:
            end = 124 if kind == "e5m2" else 126                 # those above are no finite numbers
            fields[name] = torch.randint(100, end, size, generator=generator, dtype=torch.uint8).view(dtype)
        else:
            form = number(kind)
            low, count = (0 if form.is_float else int(form.low)), 3 if name in digits else 1 << form.bits
            if form.exponent == 8:                               # powers of two that a product can do with
                low, count = form.bias - 20, 24
            fields[name] = torch.randint(low, low + count, size, generator=generator).to(dtype)
    return fields


def shuffled_fields(case: Case, shape: tuple[int, int], seed: int = 0, params: Mapping[str, int | str] | None = None,
                    ) -> dict[str, Tensor]:
    """Random fields with columns in any order (act-order), and groups as large as those in order are."""
    format = case.module.FORMAT
    chosen = {**case.choice, **(params or {})}
    fields = random_fields(case, shape, seed, params)
    columns = torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed)).int()
    for name, field in format.variant(chosen).fields.items():
        if field.groups is not None:
            fields[name] = columns // field.groups.by(format.sizes(chosen, shape))
    return fields


def random_packed(case: Case, shape: tuple[int, int], seed: int = 0, params: Mapping[str, int | str] | None = None,
                  ) -> PackedWeight:
    chosen = {**case.choice, **(params or {})}
    return case.module.pack(random_fields(case, shape, seed, params), storage=case.storage, **chosen)


def plain_packed(case: Case, fields: Mapping[str, Tensor]) -> PackedWeight:
    """Fields as a weight of which streams hold nothing: there are codes that do not hold all values."""
    layout = case.module.FORMAT.variant(case.choice).storages[case.storage]
    if not layout.streams:
        return case.module.pack(fields, storage=case.storage, **case.choice)
    codes = max(fields.values(), key=Tensor.numel)
    return PackedWeight(case.module.FORMAT, case.storage, layout.pack(**fields), tuple(codes.shape), case.choice, is_decoded=True)


def canonical(packed: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a weight as packing its fields writes them: bytes of base-3 digits are those that pack makes, and
    so are copies of bits.
    """
    parsed = spec(next(path for path in SPECS if path.stem == packed.format.name))
    if packed.storage == PLANAR or not (oracle.digit_fields(parsed) or "again(" in parsed.source.text):
        return packed.tensors
    read = Reading(parsed, packed.storage, packed.shape, packed.params, packed.sizes)
    integers = {name: tensor for name, tensor in packed.tensors.items() if not tensor.is_floating_point()}
    codes = read.canonical({name: tensor.numpy().astype(np.int64) for name, tensor in integers.items()})
    written = {name: torch.from_numpy(code.astype(integers[name].numpy().dtype)) for name, code in codes.items()}
    return {**packed.tensors, **written}


def assert_same(got: Tensor, want: Tensor, packed: PackedWeight, what: object = "") -> None:
    """Raises AssertionError where weights [N, K] differ in a bit: how many, the first, its fields, and the line of the spec."""
    if not same_bits(got, want):
        path = next(path for path in (*SHIPPED, *EXTRA) if path.stem == packed.format.name)
        problem = describe_difference(got.cpu(), want.cpu(), packed.to("cpu"), spec(path)) or "NaNs differ in their bits"
        raise AssertionError(f"{packed.format.name}.{packed.storage} {packed.params} {what}: {problem}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and raw(a).equal(raw(b))


def is_product(y: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether y is x times the weight, within what float32 sums may lose."""
    bound = (x.abs().double() @ weight.abs().double().t()) * weight.shape[1] * 2.0 ** -24
    return bool(((y.double() - x.double() @ weight.double().t()).abs() <= bound).all())


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in order, whatever its strides are."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8)

