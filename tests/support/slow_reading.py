"""A second, slow reading of what a spec means: one element at a time, in plain Python and float32 scalars of numpy.

It shares the parsed spec and qdsl/analyze/check/spec_bits.py with nothing of the compiler or the runtime.  Values of fields are
codes: their bits as an unsigned integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import ceil, ldexp, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from qdsl.analyze.check import spec_bits as oracle
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Spec, Tensor
from qdsl.compiler.spec.tables import is_number
from tests.support import grids, slow_blocks, slow_levels, slow_search
from tests.support import slow_schemes as schemes
from tests.support.slow_numbers import Codes, Scalar, Unread, magnitudes, nearest, value, width
from tests.support.slow_schemes import bounds


@dataclass(frozen=True)
class Reading:
    """A spec at one storage, shape and choice of parameters; sizes are the block lengths with -1 written out."""

    spec: Spec
    storage: str
    shape: tuple[int, int]
    params: Mapping[str, int | str]
    sizes: Mapping[str, int]

    @cached_property
    def env(self) -> dict[str, int]:
        return oracle.size_environment(self.spec, *self.shape, self.params, self.sizes)

    @property
    def tensors(self) -> dict[str, Tensor]:
        storage = next(s for s in self.spec.storages if s.name.value == self.storage)
        return {tensor.stored_name.value: tensor for tensor in storage.tensors}

    def kind(self, field: str) -> str:
        """The field's type with parameters written in."""
        kind = next(f for f in self.spec.fields if f.name.value == field).typed.type
        return str(self.params.get(kind.name, kind.name)) + (str(self.params[kind.parameter.name]) if kind.parameter else "")

    @cached_property
    def defaults(self) -> dict[str, g.Expr]:
        """The values of fields that this storage does not hold, or need not."""
        storage = next(s for s in self.spec.storages if s.name.value == self.storage)
        fields = {field.name.value for field in self.spec.fields}
        defaults = {key.value: expr for key, expr in storage.where if key.value in fields}
        for tensor in storage.tensors:
            if tensor.optional is not None:
                (item,) = (item for line in tensor.record for item in line.fields if item.field is not None)
                defaults[item.field.name] = tensor.optional      # type: ignore[union-attr]
        return defaults

    def places(self, fields: Mapping[str, Codes]) -> Iterator[tuple[tuple[int, int], dict[str, int], dict[str, tuple[int, ...]]]]:
        """Every weight: (n, k), the values of the fields that are not held, and the elements of those that are."""
        indices = [f.name.value for f in self.spec.fields if f.typed.type.name == "index"]
        for n, k in np.ndindex(*self.shape):
            env = {**self.env, "n": n, "k": k}
            free = {name: oracle.evaluate(expr, env) for name, expr in self.defaults.items() if name not in fields}
            env |= free | {name: int(fields[name][k]) for name in indices if name in fields}
            yield (n, k), free, {f.name.value: tuple(oracle.evaluate(i, env) for i in f.typed.index)
                                 for f in self.spec.fields if f.name.value in fields and f.name.value not in self.stored_tables}

    @cached_property
    def stored_tables(self) -> dict[str, tuple[int, ...]]:
        """The shapes of fields that are tables, those that blocks of weights share among them."""
        return {field.name.value: oracle.field_shape(self.spec, field, self.env) for field in self.spec.fields
                if oracle.table_extents(self.spec, field)}

    @cached_property
    def tables(self) -> Tables:
        """Every table by its subscripts; computed ones are computed once more."""
        tables: Tables = {}
        for t in self.spec.tables:
            for i, at in enumerate(np.ndindex(*t.shape)):
                value = t.values[i] if t.formula is None else _step(t.formula, dict(zip(t.loops, at, strict=True)), tables)
                tables[t.name.value, at] = value if isinstance(value, int) else np.float32(value)
        return tables

    # -- decode -------------------------------------------------------------------------------------------------------

    def decode(self, fields: Mapping[str, Codes]) -> npt.NDArray[np.float32]:
        """The weights, each operation of the decode expression rounded to float32."""
        out = np.empty(self.shape, np.float32)
        kinds = {field.name.value: self.kind(field.name.value) for field in self.spec.fields}
        stored = {(name, at): value(kinds[name], int(fields[name][at])) for name, shape in self.stored_tables.items()
                  for at in np.ndindex(*shape)}
        tables = {**self.tables, **stored}
        sizes: dict[str, Any] = {**self.env, **self.params}
        with np.errstate(all="ignore"):
            for weight, free, places in self.places(fields):
                values = {name: value(kinds[name], int(fields[name][place])) for name, place in places.items()
                          if kinds[name] != "index"}
                groups = {name: int(fields[name][weight[1]]) for name in fields if kinds[name] == "index"}
                own = {**sizes, **free, **groups, **values, "n": weight[0], "k": weight[1]}
                out[weight] = _step(self.spec.decode, own, tables)
        return out

    # -- storage ------------------------------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> list[oracle.Stored]:
        storage = next(s for s in self.spec.storages if s.name.value == self.storage)
        return list(oracle.stored(self.spec, storage, self.env, self.params))

    @cached_property
    def _bits(self) -> list[tuple[str, tuple[int, ...], int, oracle.Bit]]:
        return [bit[:4] for bit in self._stored if bit[4] == oracle.PLAIN]

    @cached_property
    def _copies(self) -> list[tuple[str, tuple[int, ...], int, oracle.Bit]]:
        return [bit[:4] for bit in self._stored if bit[4] == oracle.AGAIN]

    @cached_property
    def _digits(self) -> dict[tuple[str, tuple[int, ...], int], list[tuple[str, tuple[int, ...]] | None]]:
        """Bytes of base-3 digits, (tensor, its element, first bit), with the (field, element) of each digit; None for none."""
        digits: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[str, tuple[int, ...]]]] = {}
        for name, element, bit, (field, index, _), place in self._stored:
            if place >= 0:
                digits.setdefault((name, element, bit), {})[place] = field, index
        return {key: [own.get(place) for place in range(1 + max(own))] for key, own in digits.items()}

    def pack(self, fields: Mapping[str, Codes], like: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Codes], dict[str, Codes]]:
        """Tensors of these shapes that hold the fields, element by element, and the bits of them that are not padding."""
        env = self.env
        packed = {name: np.zeros(shape, np.int64) for name, shape in like.items()}
        used = {name: np.zeros(shape, np.int64) for name, shape in like.items()}
        rules = {name: rule for name, tensor in self.tensors.items() for rule in tensor.stored
                 if all(self.params.get(key.value) in values for key, values in rule.when)}
        for name, element, bit, (field, index, low) in (*self._bits, *self._copies):
            if name not in like:
                continue
            code = int(fields[field][index])
            rule = rules.get(name)
            if rule is not None and rule.target.value == field:
                code = oracle.evaluate(rule.value, {**env, field: code})
            packed[name][element] |= (code >> low & 1) << bit
            used[name][element] |= 1 << bit
        for (name, element, bit), digits in self._digits.items():
            if name not in like:
                continue
            codes = [0 if digit is None else int(fields[digit[0]][digit[1]]) for digit in digits]
            number = sum(code * 3 ** (4 - place) for place, code in enumerate(codes))
            packed[name][element] |= ceil(Fraction(number * 256, 243)) << bit
            used[name][element] |= 255 << bit
        for name, rule in rules.items():
            if rule.target.value == "word" and name in like:
                size = oracle.element_bits(self.tensors[name], self.params)
                for element in np.ndindex(*like[name]):
                    word = oracle.evaluate(rule.value, {**env, "word": int(packed[name][element])})
                    packed[name][element] = word % (1 << size)
        return packed, used

    def canonical(self, tensors: Mapping[str, Codes]) -> dict[str, Codes]:
        """The same as `pack` writes it: of all bytes that have the same digits the least, and copies of what is stored first."""
        canonical = {name: tensor.copy() for name, tensor in tensors.items()}
        first = {what: (name, element, bit) for name, element, bit, what in self._bits} if self._copies else {}
        for name, element, bit, what in self._copies:
            source, place, low = first[what]
            canonical[name][element] ^= ((int(canonical[name][element]) >> bit ^ int(tensors[source][place]) >> low) & 1) << bit
        for (name, element, bit), digits in self._digits.items():
            if name in canonical:
                byte = int(tensors[name][element]) >> bit & 255
                number = byte * 3 ** len(digits) // 256
                canonical[name][element] += (ceil(Fraction(number * 256, 3 ** len(digits))) - byte) << bit
        return canonical

    def holds(self) -> bool:
        """Whether the storage can hold the shape: divisions divide, and every element that a weight has is stored."""
        try:
            stored = {(field, index) for _, _, _, (field, index, _) in self._bits}
            stored |= {digit for digits in self._digits.values() for digit in digits if digit is not None}
        except AssertionError:
            return False
        fields = {field for field, _ in stored}
        zeros = {name: np.zeros(self.shape[1], np.int64) for name in fields}
        used = {element for _, _, places in self.places(zeros) for element in places.items()}
        used |= {(name, at) for name, shape in self.stored_tables.items() for at in np.ndindex(*shape)}
        return used <= stored

    # -- encode -------------------------------------------------------------------------------------------------------

    @property
    def arguments(self) -> dict[str, str | float]:
        """Roles and options of the encode scheme, as the spec gives them, and the storage in place of some."""
        assert self.spec.encode is not None
        storage = next(s for s in self.spec.storages if s.name.value == self.storage)
        arguments: dict[str, str | float] = {}
        for key, option in self.spec.encode.keywords:
            inner = option.value if isinstance(option, g.Negate) else option
            assert isinstance(inner, g.Name | g.Number)
            sign = 1 if inner is option else -1
            arguments[key.name] = inner.name if isinstance(inner, g.Name) else sign * inner.value
        own = {key.value: word.value for key, word in storage.options}
        return {**arguments, **{key: float(word) if is_number(word) else word for key, word in own.items()}}

    def span(self) -> tuple[int, int]:
        """Half steps, from and to, in which weights fill the codes' range when the scale is one step."""
        assert self.spec.encode is not None
        if self.spec.encode.name == "minmax":
            steps = (1 << int(self.kind(str(self.arguments["code"]))[1:])) - 1
            return -2 * (steps // 2), 2 * (steps - steps // 2)
        kind = self.kind(str(self.arguments["code"]))
        largest = 2048 if kind[0] != "e" or self.spec.encode.name != "absmax" else magnitudes(kind)[-1][0]
        most = int(2 * abs(float(self.arguments.get("divisor", largest))))
        return -most, most

    def encode(self, weight: npt.NDArray[np.float32], options: Mapping[str, Any]) -> dict[str, Codes]:
        """The fields that the spec's encode scheme chooses for a float32 weight; `importance` is one of the options."""
        assert self.spec.encode is not None
        arguments = {**self.arguments, **options}
        code, scheme, importance = str(arguments["code"]), self.spec.encode.name, arguments.get("importance")
        roles = {role: str(name) for role, name in self.arguments.items()}
        if scheme == "nearest":
            return {code: np.array([[nearest(self.kind(code), np.float32(v)) for v in row] for row in weight], np.int64)}
        if scheme == "unit_level_nested":
            return self._nested(weight)
        if scheme == "kmeans":
            return slow_levels.of_blocks(self, weight, code, str(arguments["levels"]), importance)
        if scheme == "vector_kmeans":
            return slow_levels.of_vectors(self, weight, roles, importance)
        if scheme == "scaled_kmeans":
            return slow_levels.of_all(self, weight, roles, importance)
        if scheme == "least_squares_even":
            return self._even(weight, roles, importance)
        if scheme.startswith("least_squares"):
            return self._least_squares(weight, roles, importance)
        if scheme.startswith("grid_"):
            return self._grids(weight, roles, importance)
        fields = self._blocks(weight, arguments)
        return {**fields, **self._sums(weight, fields[code], arguments)} if "sums" in arguments else fields

    def _blocks(self, weight: npt.NDArray[np.float32], arguments: Mapping[str, Any]) -> dict[str, Codes]:
        """The fields of a scheme that takes a block of weights at a time."""
        code = str(arguments["code"])
        fields: dict[str, Codes] = {code: np.zeros(self.shape, np.int64)}
        roles = {role: str(arguments[role]) for role in ("scale", "min", "zero", "super_scale", "super_min") if role in arguments}
        shared = {place: at for place, _, at in self.places({name: np.zeros(0, np.int64) for name in roles.values()})}
        for name in roles.values():
            fields[name] = np.zeros([1 + max(i) for i in zip(*(at[name] for at in shared.values()), strict=True)], np.int64)
        blocks: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[int, int]]]] = {}
        for place, at in shared.items():
            outer, inner = at[roles.get("super_scale", roles["scale"])], at[roles["scale"]]
            blocks.setdefault(outer, {}).setdefault(inner, []).append(place)
        for parts in blocks.values():
            with np.errstate(all="ignore"):
                codes, values = slow_blocks.codes(self, weight, list(parts.values()), arguments)
            for places, part in zip(parts.values(), codes, strict=True):
                for place, own in zip(places, part, strict=True):
                    fields[code][place] = own
            for role, coded in values.items():
                name = roles[role]
                elements = dict.fromkeys(shared[places[0]][name] for places in parts.values())
                for element, word in zip(elements, coded, strict=True):
                    fields[name][element] = word
        return fields

    def _sums(self, weight: npt.NDArray[np.float32], codes: Codes, arguments: Mapping[str, Any]) -> dict[str, Codes]:
        """The field that is sums of the codes: integers, or floats that are times the scale that codes were computed with."""
        name, code, scheme = str(arguments["sums"]), str(arguments["code"]), self.spec.encode.name if self.spec.encode else ""
        kinds, offset = {role: self.kind(str(arguments[role])) for role in ("code", "scale", "sums")}, self.offset(code)
        runs: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for place, _, at in self.places({name: np.zeros(0, np.int64)}):
            runs.setdefault(at[name], []).append(place)
        sums = np.zeros([1 + max(i) for i in zip(*runs, strict=True)], np.int64)
        for element, places in runs.items():
            total = sum(int(value(kinds["code"], int(codes[place]))) - offset for place in places)
            with np.errstate(all="ignore"):
                x = [np.float32(weight[place]) for place in places]
                used = schemes.absmax(x, kinds["code"], kinds["scale"], scheme, offset, arguments)[2]
                sums[element] = total & (1 << width(kinds["sums"])) - 1 if kinds["sums"][0] == "i" else \
                    nearest(kinds["sums"], np.float32(total) * used)
        return {name: sums}

    def _nested(self, weight: npt.NDArray[np.float32]) -> dict[str, Codes]:
        """Codes by blocks, and their scales, less the mean of all, by blocks of blocks in the same way."""
        roles = {role: str(name) for role, name in self.arguments.items()}
        blocks: dict[int, list[tuple[int, int]]] = {}
        parents: dict[int, int] = {}
        for place, _, at in self.places({name: np.zeros(0, np.int64) for name in roles.values()}):
            blocks.setdefault(at[roles["scale"]][0], []).append(place)
            parents[at[roles["scale"]][0]] = at[roles["super_scale"]][0]
        codes, scales = np.zeros(self.shape, np.int64), []
        levels, entries = ([self.tables[t.name.value, (i,)] for i in range(t.shape[0])] for t in self.spec.tables)
        for places in blocks.values():
            coded, scale = schemes.unit([np.float32(weight[place]) for place in places], levels)
            for place, code in zip(places, coded, strict=True):
                codes[place] = code
            scales.append(np.uint32(scale).view(np.float32))
        mean = np.float32(sum(map(float, scales)) / len(scales))
        pairs = [schemes.unit([s - mean for s, p in zip(scales, parents.values(), strict=True) if p == parent], entries)
                 for parent in dict.fromkeys(parents.values())]
        return {roles["code"]: codes, roles["scale"]: np.array([code for coded, _ in pairs for code in coded]),
                roles["super_scale"]: np.array([scale for _, scale in pairs]),
                roles["offset"]: np.array(int(mean.view(np.uint32)))}

    def _least_squares(self, weight: npt.NDArray[np.float32], roles: Mapping[str, str], importance: Any) -> dict[str, Codes]:
        """Fields of blocks by search over what decode makes of codes, signs and choices, and of scales that are steps."""
        inner = [roles["scale"]] if "super_scale" in roles else []
        outer, code, kinds = roles["super_scale" if inner else "scale"], roles["code"], {f: self.kind(f) for f in roles.values()}
        steps = self._products(inner, bool(inner)) if inner else [1.0]
        values = self._products([roles[role] for role in ("choice", "sign", "code") if role in roles], not inner)
        size = len(values) >> (width(kinds[roles["choice"]]) if "choice" in roles else 0)
        shapes = {f.name.value: oracle.field_shape(self.spec, f, self.env) for f in self.spec.fields}
        fields = {name: np.zeros(shapes[name], np.int64) for name in roles.values()}
        elements = {place: at for place, _, at in self.places(fields)}
        blocks: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[int, int]]]] = {}
        for place, at in elements.items():
            blocks.setdefault(at[outer], {}).setdefault(at[roles["scale"]], []).append(place)
        for above, parts in blocks.items():
            x = [[(float(weight[place]), 1.0 if importance is None else float(importance[place[1]])) for place in part]
                 for part in parts.values()]
            scale, picked = slow_search.chosen(x, [values[i:i + size] for i in range(0, len(values), size)], steps, kinds[outer])
            fields[outer][above] = schemes.scale_code(scale, kinds[outer])
            for part, (step, choice, words) in zip(parts.values(), picked, strict=True):
                for place, word in zip(part, words, strict=True):
                    own = {code: schemes.bits_of(word % (1 << width(kinds[code])), kinds[code]), roles.get("choice"): choice,
                           roles.get("sign"): word >> width(kinds[code]),
                           **({roles["scale"]: schemes.bits_of(step, kinds[roles["scale"]])} if inner else {})}
                    for name in own.keys() - {None}:
                        fields[name][elements[place][name]] = own[name]
        return fields

    def _even(self, weight: npt.NDArray[np.float32], roles: Mapping[str, str], importance: Any) -> dict[str, Codes]:
        """Fields of rows whose codes of four weights overlap: bit b of a level's number is bit b of a code less bit b + 1."""
        code, scale, choice, above = (roles[role] for role in ("code", "scale", "choice", "super_scale"))
        window = {start ^ start >> 1: start for start in range(16)}
        values = [[float(self.tables["levels", (32 * half + window[number],)]) for number in range(16)] for half in range(2)]
        [shift] = [part.right for part in _walk(self.spec.decode) if isinstance(part, g.Binary) and part.op == "**"]
        [own] = [part.index for part in _walk(self.spec.decode) if isinstance(part, g.Subscript) and part.name == code]
        shapes = {f.name.value: oracle.field_shape(self.spec, f, self.env) for f in self.spec.fields}
        fields = {field: np.zeros(shapes[field], np.int64) for field in roles.values()}
        rows: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[Any, ...]]]] = {}
        for place, _, at in self.places(fields):
            group, bit = (tuple(oracle.evaluate(i, {**self.env, "n": place[0], "k": place[1]}) for i in part)
                          for part in (own, (shift,)))
            rows.setdefault(at[above], {}).setdefault(at[scale], []).append((group, bit, place))
        for row, blocks in rows.items():
            parts = [sorted(block) for block in blocks.values()]
            x = [[(float(weight[place]), 1.0 if importance is None else float(importance[place[1]])) for *_, place in part]
                 for part in parts]
            largest, picked = slow_search.chosen(x, values, self._products([scale], True), self.kind(above), is_even=True)
            fields[above][row] = schemes.scale_code(largest, self.kind(above))
            for block, part, (step, half, numbers) in zip(blocks, parts, picked, strict=True):
                fields[scale][block], fields[choice][block] = schemes.bits_of(step, self.kind(scale)), half
                for i in range(0, len(part), 4):
                    wanted, bits = sum(number << 4 * j for j, number in enumerate(numbers[i:i + 4])), 0
                    for bit in range(15, -1, -1):
                        bits |= ((wanted ^ bits >> 1) >> bit & 1) << bit
                    assert bits % 2 == 0
                    fields[code][part[i][0]] = bits >> 1
        return fields

    def _products(self, names: list[str], with_numbers: bool) -> list[float]:
        """The product of the factors of decode that read these fields alone, for all codes, those of the last the fastest."""
        words = [[value(self.kind(name), schemes.bits_of(place, self.kind(name))) for place in range(1 << width(self.kind(name)))]
                 for name in names]
        read = [(part, set(g.names(part)) - {name for name, _ in self.tables}) for part in _factors(self.spec.decode)]
        parts = [part for part, own in read if own <= set(names) and (own or with_numbers)]
        return [prod(float(_step(part, dict(zip(names, at, strict=True)), self.tables)) for part in parts)
                for at in product(*words)]

    def _grids(self, weight: npt.NDArray[np.float32], roles: Mapping[str, str], importance: Any) -> dict[str, Codes]:
        """Fields of super-blocks of rows of a grid: `code` says the row, and decode what else there is."""
        tables = {table.name.value: np.array([[self.tables[table.name.value, (i, j)] for j in range(table.shape[1])]
                                              for i in range(table.shape[0])], np.float32)
                  for table in self.spec.tables if len(table.shape) == 2}
        alone = [part for part in _factors(self.spec.decode) if set(g.names(part)) <= {roles["scale"]}]
        steps = [prod(np.float32(_step(part, {roles["scale"]: code}, {})) for part in alone)
                 for code in range(1 + bounds(self.kind(roles["scale"]))[1])]
        shifts = [np.float32(_step(part.right, {roles["shift"]: code}, {})) for part in _walk(self.spec.decode)
                  if isinstance(part, g.Binary) and set(g.names(part.right)) == {roles.get("shift")} and part.op == "+"
                  for code in range(2)]
        size = {role: self.shape[1] // self._extent(name) for role, name in roles.items()}
        block = grids.Search([tables["grid"] + by for by in shifts or [np.float32(0)]], np.array(steps, np.float32),
                             size["scale"], size.get("shift", size["code"]) // size["code"])
        signs = False if shifts else tables.get("sign")
        stored: dict[str, list[list[int]]] = {name: [[] for _ in weight] for name in roles.values()}
        with np.errstate(all="ignore"):
            for n, k in np.ndindex(self.shape[0], self.shape[1] // size["super_scale"]):
                part = slice(k * size["super_scale"], (k + 1) * size["super_scale"])
                by = None if importance is None else np.asarray(importance, np.float32)[part]
                picked = block.search(weight[n, part], by, signs)
                chosen = dict(zip(("code", "shift", "sign", "scale"), picked, strict=False))
                for role, name in roles.items():
                    stored[name][n] += [int(picked[4].view(np.uint16))] if role == "super_scale" else chosen[role]
        return {name: np.array(values, np.int64) for name, values in stored.items()}

    def _extent(self, name: str) -> int:
        """How many elements of a field lie along the columns."""
        return 1 + max(at[name][1] for _, _, at in self.places({name: np.zeros(0, np.int64)}))

    def levels(self) -> list[Scalar]:
        """The only table, in order."""
        (table,) = self.spec.tables
        return [self.tables[table.name.value, (i,)] for i in range(table.shape[0])]

    def factor(self) -> float:
        """The product of the numbers of decode."""
        return prod(float(part.value) for part in _walk(self.spec.decode) if isinstance(part, g.Number))

    @property
    def divides(self) -> bool:
        """Whether decode divides."""
        return any(isinstance(part, g.Binary) and part.op == "/" for part in _walk(self.spec.decode))

    def divisor(self) -> int:
        """What decode divides by at last."""
        assert isinstance(self.spec.decode, g.Binary) and self.spec.decode.op == "/"
        return oracle.evaluate(self.spec.decode.right, self.env)

    def offset(self, code: str) -> int:
        """What decode takes off a code before it is scaled."""
        for part in _walk(self.spec.decode):
            if isinstance(part, g.Binary) and part.op == "-" and isinstance(part.left, g.Name) and part.left.name == code:
                if isinstance(part.right, g.Name):
                    default = self.defaults.get(part.right.name)
                    return 0 if default is None else oracle.evaluate(default, self.env)
                return oracle.evaluate(part.right, self.env)
        return 0


def _walk(expr: g.Expr) -> Iterator[g.Expr]:
    yield expr
    inner = (expr.left, expr.right) if isinstance(expr, g.Binary) else (expr.value,) if isinstance(expr, g.Negate) else \
        expr.index if isinstance(expr, g.Subscript) else ()
    for part in inner:
        yield from _walk(part)


FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "parity": lambda bits: f"{bits:b}".count("1") % 2}
Tables = dict[tuple[str, tuple[int, ...]], Scalar]               # entries by the table's name and their subscripts


def _step(expr: g.Expr, env: Mapping[str, Scalar], tables: Tables) -> Scalar:
    """An expression of decode: integers among themselves are exact, everything else is rounded to float32 at each step."""
    if isinstance(expr, g.Number):
        return expr.value if isinstance(expr.value, int) else np.float32(expr.value)
    if isinstance(expr, g.Name):
        return env[expr.name]
    if isinstance(expr, g.Negate):
        return -_step(expr.value, env, tables)
    if isinstance(expr, g.Subscript):
        return tables[expr.name, tuple(int(_step(part, env, tables)) for part in expr.index)]
    if isinstance(expr, g.CallExpr) and expr.name == "round":
        inner, kind = expr.arguments
        assert isinstance(kind, g.Name)
        word = str(env.get(kind.name, kind.name))
        return np.float32(value(word, nearest(word, np.float32(_step(inner, env, tables)))))
    if isinstance(expr, g.CallExpr) and expr.name in FUNCTIONS:
        result: Scalar = FUNCTIONS[expr.name](*(_step(part, env, tables) for part in expr.arguments))
        return result
    if not isinstance(expr, g.Binary):
        raise Unread(f"no second reading of '{type(expr).__name__}' in decode: add it to tests/support/slow_reading.py")
    a, b = _step(expr.left, env, tables), _step(expr.right, env, tables)
    if expr.op == "**":
        return int(a) ** int(b) if b >= 0 else np.float32(ldexp(1, int(b)))
    if not (isinstance(a, int) and isinstance(b, int)) or expr.op == "/":
        a, b = np.float32(a), np.float32(b)
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b, "//": lambda: a // b,
            "%": lambda: a % b}[expr.op]()


def _factors(expr: g.Expr) -> Iterator[g.Expr]:
    if isinstance(expr, g.Binary) and expr.op == "*":
        yield from (*_factors(expr.left), *_factors(expr.right))
    else:
        yield expr
