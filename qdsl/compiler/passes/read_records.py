"""Storage tensors and their records, with all loops, widths and offsets resolved to constants.

Does: resolves element types, variables, axes, record lines, optional values and stored operations of one storage, and finds
for every field the variable that selects its record.  Does not: check that the bits are complete
(check_coverage) or look for strides (infer_layouts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd, lcm, prod

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Atom, Domain, Index, name
from qdsl.compiler.ir.program import Axis, AxisDigit, Field, Placement, Program, StoredChange, Stream, Tensor
from qdsl.compiler.passes.record_lines import RecordReader, Weights, expand_products
from qdsl.compiler.passes.samples import axis_divisor, size_axis
from qdsl.compiler.passes.scope import Scope
from qdsl.compiler.passes.sections import bit_planes, place_sections
from qdsl.compiler.passes.type_fields import AXES, axis_of, group_size, number_of, parameters
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec import model
from qdsl.compiler.spec.source import Problems, Text, did_you_mean
from qdsl.core.codecs import CODECS
from qdsl.core.layout import BASE, Affine, RecordLine, record_pieces
from qdsl.core.numbers import Number, number
from qdsl.core.stored import PLANAR


def read_records(program: Program, problems: Problems) -> Program:
    """The program with the tensors of its storage, and the values of fields that it does not store.

    >>> shown(record="d; l<16: q[l] q[l + 16]")                    # words of 8 bits, as many as the record needs
    tensors
    blocks u8 [n < N, t < K // 32 x 18 words]  144 bits
    d      tiles [1 n, 1 t]
    q      tiles [1 n, 32 t]
    """
    storage = program.authored
    where = _fixed_values(program, storage, problems)
    tensors: list[Tensor] = []
    defaults: dict[str, Index] = {}
    items = [part for item in storage.tensors for part in bit_planes(program, item, problems)]
    for item, constants in items:
        tensor = _TensorReader(program, item, problems, constants).read()
        if tensor is None:
            continue
        tensors.append(tensor)
        if item.optional is not None:
            stored = sorted({p.field for p in tensor.placements})
            if len(stored) != 1:
                problems.add(item.name.span, f"optional tensor '{item.name}' must store one field, not {', '.join(stored)}")
            elif (value := _unstored_value(program, program.field(stored[0]), item.optional, problems)) is not None:
                defaults[stored[0]] = value
    placed = place_sections(tensors, [item for item, _ in items], problems)
    return replace(program, tensors=placed, where=where, defaults=defaults, domain=_size_domain(program, tensors))


def _size_domain(program: Program, tensors: list[Tensor]) -> Domain:
    """The domain of size parameters: a size that may be the whole axis (-1) is divided only by divisors of the axis.

    Quotients by it are those of its other values.
    """
    extents = [var.extent for tensor in tensors for var in tensor.vars]
    whole = {param.name.value for param in program.spec.params if -1 in param.values}
    divisors = {size: gcd(divisor, axis_divisor(size_axis(program, size), extents)) if size in whole else divisor
                for size, divisor in program.domain.divisors.items()}
    return Domain(program.domain.bounds, divisors, {size: program.domain.divisors[size] for size in whole & divisors.keys()})


def _unstored_value(program: Program, field: Field, expr: g.Expr, problems: Problems) -> Index | None:
    """The value of a field that is not stored: groups in order for an index field, a constant for other fields."""
    names = {"n": name("n"), "k": name("k"), **parameters(program)}
    value = Scope(names, f"the value of '{field.name}'", problems, program.domain).index(expr)
    if value is None:
        return None
    if field.table:
        problems.add(expr.span, f"stored table '{field.name}' has no one value that could stand for it where it is not stored")
        return None
    if field.groups is not None and (size := group_size(field.groups)) is not None:
        if value != ix.div(name("k"), size, program.domain):
            problems.add(expr.span, f"index field '{field.name}' has groups in order where it is not stored: k // {size}, "
                                    f"not {value}")
            return None
    elif not value.is_const:
        problems.add(expr.span, f"field '{field.name}' has one value where it is not stored, not {value}")
        return None
    elif field.number is not None and field.number.decode(field.number.encode(value.const)) != value.const:
        problems.add(expr.span, f"{value} is no value of field '{field.name}', which is {field.number.name}")
        return None
    return value


def _fixed_values(program: Program, storage: model.Storage, problems: Problems) -> dict[str, Index]:
    """The values of fields that this storage fixes under `where`."""
    values: dict[str, Index] = {}
    params = {param.name.value for param in program.spec.params}
    fields = {field.name for field in program.fields}
    for key, _ in storage.only:
        if key.value in program.sizes:
            problems.add(key.span, f"'{key}' is a size: where fixes parameters that shape the bits, and fields")
    for key, expr in storage.where:
        if key.value in fields:
            value = _unstored_value(program, program.field(key.value), expr, problems)
            if value is not None:
                values[key.value] = value
        elif key.value not in params:
            problems.add(key.span, f"'{key}' is neither a parameter nor a field{did_you_mean(key.value, params | fields)}")
        elif key.value in program.sizes:
            problems.add(key.span, f"'{key}' is a size: where fixes parameters that shape the bits, and fields")
    for key, _ in storage.least:
        if key.value not in program.dims or program.dims[key.value].is_const:
            problems.add(key.span, f"'{key}' is no extent of dims{did_you_mean(key.value, program.dims)}")
    _check_column_order(program, storage, values, problems)
    return values


def _check_column_order(program: Program, storage: model.Storage, values: Mapping[str, Index], problems: Problems) -> None:
    """Checks an order of columns: one index field, whose value the storage fixes, must give the groups of columns.

    Tensors whose columns stay in order must hold one field of [k], element by element.
    """
    for tensor in storage.tensors:
        if tensor.ordered is False and storage.order is None:
            problems.add(tensor.name.span, f"columns of '{tensor.name}' are in order, as all are in a storage without 'order'")
        elif tensor.ordered is False and not _is_by_columns(tensor):
            problems.add(tensor.name.span, f"'{tensor.name}' is no tensor [k<K] of a field [k]: only numbers of single columns "
                                           "can stay in order")
    if storage.order is not None:
        moved = [field for field in program.fields if field.groups is not None and field.name in values]
        blocks = [field for field in program.fields if not field.by_places
                  and any("k" in at.names() and at != name("k") for at in field.index)]
        if len(moved) != 1 or blocks:
            problems.add(storage.order.span, "an order of columns is for a storage that gives an index field its value, which "
                                             "alone says which columns share one")
        if "k" in g.names(program.spec.decode):
            problems.add(storage.order.span, "decode reads digits of k, and 'order' moves columns")
    elif storage.name.value != PLANAR and (placed := next((field for field in program.fields if field.by_places), None)):
        problems.add(storage.name.span, f"'{placed.name}' is shared by columns that lie side by side, and the storage has no "
                                        "'order' that says which do")


def _is_by_columns(tensor: model.Tensor) -> bool:
    """Whether a tensor is [k<K] with the record `field[k]`."""
    digits = [digit for axis in tensor.shape.axes for digit in axis.digits] if tensor.shape is not None else []
    items = [item for line in tensor.record for item in (*line.loops, *line.items)]
    if len(digits) != 1 or len(items) != 1 or digits[0] is None or not isinstance(items[0], g.RecordItem):
        return False
    names = [part.name if isinstance(part, g.Name) else "" for part in (digits[0].extent, *items[0].index)]
    return names == ["K", digits[0].name]


CONTAINERS = {"i16": 16, "i32": 32, "i64": 64}                    # integers of files that hold several elements
ELEMENTS = ("u8", "i8", "u16", "i16", "u32", "i32")              # integers that stored tensors hold


class _TensorReader:
    """Reads one tensor of a storage; `records` reads its record lines.  constants: values of variables, for a bit plane."""

    def __init__(self, program: Program, item: model.Tensor, problems: Problems, constants: Mapping[str, Index]) -> None:
        self.program = program
        self.item = item
        self.problems = problems
        self.records = RecordReader(program, item, problems, constants)
        self.fields = self.records.fields
        self.constants = self.records.constants

    def read(self) -> Tensor | None:
        item = self.item
        shape = self.read_shape(item.shape) if item.shape is not None else self.read_run(item.run)
        if shape is None:
            return None
        element, variables, axes, lines = shape
        if not ((element.is_float and element.bits >= 8) or element.name in ELEMENTS):
            self.problems.add(item.name.span, f"elements of a tensor are {', '.join(ELEMENTS)} or floats of 8 bits and more, not "
                              f"{element.name}", "let the record pack codes into these")
            return None
        part = next((part for line in lines for part in line.items if element.is_float and part.width != element.bits), None)
        if part is not None:
            self.problems.add(item.record_text.span, f"an element of '{item.name}' is a whole {element.name}, and the record has "
                                                     f"{part.width} bits of {part.field or 'padding'}", "words hold parts")
            return None
        bits = sum(part.step for line in lines for part in line.items for _ in range(prod(extent for _, extent in line.loops)))
        placements = tuple(self.placement(field, forms, lines, variables) for field, forms in self.records.used.items())
        if None in placements:
            return None
        kept = tuple(p for p in placements if p is not None)
        kind = item.shape.type.name if item.shape is not None and item.shape.type.name in self.program.params else element.name
        return Tensor(item.name.value, kind, element, variables, axes, lines, bits, kept, self.stored_change(element, lines),
                      item.optional is not None, item.omitted, tuple(alias.value for alias in (item.inside or item).aliases),
                      item.name.span, item.record_text.span, self.entropy_code(element, variables, axes),
                      (item.inside or item).seen, within=self.file_integer(element))

    def file_integer(self, element: Number) -> str:
        """The integer type in files that holds several elements; '' if files hold single elements."""
        kind = self.item.shape.within if self.item.shape is not None else None
        if kind is None:
            return ""
        bits = CONTAINERS.get(kind.name, 0)
        if element.is_float or bits <= element.bits or self.item.stream is not None or self.item.inside is not None:
            self.problems.add(kind.span, f"files hold integers in wider ones, such as i32 in i64; not {element.name} in "
                                         f"{kind.name}")
        return kind.name

    def entropy_code(self, element: Number, variables: tuple[AxisDigit, ...], axes: tuple[Axis, ...]) -> Stream | None:
        """The entropy code of the tensor, which holds bytes [N, K], or [N * K]."""
        call = self.item.stream
        if call is None:
            return None
        coding = CODECS.get(call.name)
        if coding is None:
            self.problems.add(call.span, f"unknown entropy code '{call.name}'{did_you_mean(call.name, CODECS)}")
            return None
        names = {role: role for role in coding.tensors}
        for value in call.arguments:
            self.problems.add(value.span, f"arguments of '{call.name}' are named: {', '.join(names)}")
        for key, value in call.keywords:
            if key.name not in names:
                self.problems.add(key.span, f"'{call.name}' has no tensor '{key.name}'{did_you_mean(key.name, names)}")
            elif not isinstance(value, g.Name):
                self.problems.add(value.span, f"'{key.name}' is the name of a tensor")
            else:
                names[key.name] = value.name
        others = [other.name.value for storage in self.program.spec.storages if self.item in storage.tensors
                  for other in storage.tensors if other is not self.item]
        twice = next((other for other in names.values() if [*names.values(), *others].count(other) > 1), None)
        if twice is not None:
            self.problems.add(call.span, f"two tensors of the storage are called '{twice}'")
        wanted = [name("N") * name("K")] if coding.flat else [name("N"), name("K")]
        if element.name != "u8" or [var.extent for var in variables] != wanted or len(axes) != len(wanted) \
                or self.item.optional is not None or self.item.stored or self.item.aliases:
            shape = "e<N*K" if coding.flat else "n<N, k<K"
            self.problems.add(call.span, f"'{call.name}' holds the bytes of u8[{shape}], and nothing is to be said of them",
                              "'optional', 'stored' and 'aliases' go with tensors of the file")
        return Stream(call.name, names)

    # -- shapes -------------------------------------------------------------------------------------------------------

    def read_shape(self, shape: g.Shape) -> tuple[Number, tuple[AxisDigit, ...], tuple[Axis, ...], tuple[RecordLine, ...]] | None:
        element = number_of(self.program, shape.type, self.problems, stored=True)
        scope = Scope({"N": name("N"), "K": name("K"), **self.constants, **self.program.dims},
                      f"the shape of '{self.item.name}'", self.problems, self.program.domain)
        variables: list[AxisDigit] = []
        axes: list[Axis] = []
        words = 0
        for axis in shape.axes:
            digits: list[str] = []
            for digit in axis.digits:
                if digit is None:
                    words += 1
                    digits.append("")
                    continue
                extent = scope.index(digit.extent)
                if digit.name in {var.name for var in variables} | self.constants.keys():
                    self.problems.add(digit.span, f"'{digit.name}' already names something else")
                if extent is not None:
                    variables.append(AxisDigit(digit.name, extent, True))
                    digits.append(digit.name)
            axes.append(Axis(tuple(digits)))
            if len(several := [digit for digit in digits if digit]) > 1:
                self.problems.add(axis.span, f"an axis of '{self.item.name}' has two variables, {several[0]} and {several[1]}: "
                                             "give each an axis of its own", "'seen' says the shape that files have")
                return None
        if words > 1:
            self.problems.add(shape.span, "a record's elements lie along one axis: 'word' may stand once")
            return None
        dense = self.dense_loop()
        if dense is not None and element is not None and words:
            return self.read_dense(element, tuple(variables), tuple(axes), *dense)
        names = {digit.name for axis in shape.axes for digit in axis.digits if digit is not None}
        lines = self.records.read_lines(self.item.record, names)              # also catches variables with a wrong extent
        if element is None or lines is None or len(variables) < len(names):
            return None
        return element, tuple(variables), tuple(axes), lines

    def read_run(self, axis: Text | None,
                 ) -> tuple[Number, tuple[AxisDigit, ...], tuple[Axis, ...], tuple[RecordLine, ...]] | None:
        """Bytes in records of consecutive elements along k: `u8[n<N, t<K/R word]` with local subscripts."""
        if axis is None:
            return None
        if axis.value != "k":
            self.problems.add(axis.span, f"a record runs along k, not '{axis}'")
            return None
        lines = self.records.read_lines(self.item.record, set(), local=True)
        if lines is None:
            return None
        covered = {field: self.shared_by(self.fields[field]) * (1 + self.highest(lines, field)) for field in self.records.used}
        if 0 in covered.values():
            return None
        run = max(covered.values())
        for field in covered:
            if run % self.shared_by(self.fields[field]):
                self.problems.add(self.item.record_text.span, f"a record of '{self.item.name}' holds {run} columns, which is "
                                  f"not a multiple of the {self.shared_by(self.fields[field])} that share one '{field}'")
                return None
            step = run // self.shared_by(self.fields[field])
            self.records.used[field] = [(Affine(0, (("n", 1),)), Affine(0, (("t", step),)))]
        extent = ix.exact(name("K"), run)
        digits = AxisDigit("n", name("N"), True), AxisDigit("t", extent, True)
        return number("u8"), digits, (Axis(("n",)), Axis(("t", ""))), lines

    def shared_by(self, field: Field) -> int:
        """How many columns share a value of a field; 0, with a problem, if that is not constant."""
        last = field.index[-1] if field.index else Index()
        if last == name("k"):
            return 1
        divisor = last.terms[0][0].args[1] if last.terms and last.terms[0][0].op == "div" else None
        if len(field.index) != 2 or axis_of(self.program, last) != "k" or divisor is None or not divisor.is_const:
            self.problems.add(field.span, f"field '{field.name}' is stored in records that run along k, so it is "
                                          "subscripted [n, k] or [n, k // constant]")
            return 0
        return divisor.const

    def highest(self, lines: tuple[RecordLine, ...], field: str) -> int:
        """The largest local subscript of a field in the record."""
        return max(piece.index[-1] for piece in record_pieces(lines) if piece.field == field)

    def placement(self, field: str, forms: list[tuple[Affine, ...]], lines: tuple[RecordLine, ...],
                  variables: tuple[AxisDigit, ...],
                  ) -> Placement | None:
        """The digits that select the record of each coordinate; all items of a field must agree."""
        loops = {loop for line in lines for loop, _ in line.loops}
        digits: list[tuple[str, ...]] = []
        tiles: list[int] = []
        for axis in range(len(forms[0])):
            units = [form[axis] for form in self.records.weights.get(field, []) if len(form) == len(forms[0])]
            moves = [tuple(term for term in form[axis].terms if term[0] not in loops) for form in forms]
            box = 1 + max(p.index[axis] for p in record_pieces(lines) if p.field == field)
            if any(unit for factors in units for unit in factors.values()) or any(len(terms) > 1 for terms in moves):
                carrying = self.carrying_digits(field, [dict(terms) for terms in moves], units, loops, box, variables)
            else:
                carrying = self.carrying_loop(field, moves, box)
            if carrying is None:
                return None
            digits.append(carrying[0])
            tiles.append(carrying[1])
        flat = len(forms[0]) == 1 and len(self.fields[field].index) == 2
        return Placement(field, tuple(digits), tuple(tiles), flat)

    def carrying_loop(self, field: str, moves: list[tuple[tuple[str, int], ...]], box: int) -> tuple[tuple[str, ...], int] | None:
        """The single variable that steps from record to record, or none."""
        if len(set(moves)) > 1:
            self.problems.add(self.item.record_text.span,
                              f"items of '{field}' must all move by the same step from record to record")
            return None
        return ((moves[0][0][0], ""), moves[0][0][1]) if moves[0] else (("",), box)

    def carrying_digits(self, field: str, moves: list[dict[str, int]], units: list[Weights], loops: set[str], box: int,
                        variables: tuple[AxisDigit, ...]) -> tuple[tuple[str, ...], int] | None:
        """Variables and a record's elements as digits of one number, each stepping by the product of faster extents."""
        span = self.item.record_text.span
        inside = {unit for factors in units for moving, unit in factors.items() if not moving or moving in loops}
        if len({tuple(sorted(terms.items())) for terms in moves}) > 1 or len(inside) > 1 or any(
                factors.get(var) != units[0].get(var) for factors in units for var in moves[0]):
            self.problems.add(span, f"items of '{field}' must all move by the same step from record to record")
            return None
        left = {var: _product_index(unit, moves[0][var]) for var, unit in units[0].items() if var in moves[0]}
        between = [var for var, weight in left.items() if weight.is_const and 0 < weight.const < box and not any(inside)]
        if box > 1 or inside:
            left[""] = _product_index(inside.pop() if inside else (), 1)
        if between:
            inner, extent = between[0], next(var.extent for var in variables if var.name == between[0])
            self.problems.add(span, f"items of '{field}' lie between those of the next record: '{inner}' steps by {left[inner]}, "
                                    f"and a record reaches over {box}; loop in the record, '{inner}<{extent}: ...', and write "
                                    f"'word' in place of the axis '{inner}'")
            return None
        digits: list[str] = []
        reach = Index(1)
        while left:
            step = next((digit for digit, weight in left.items() if expand_products(weight) == expand_products(reach)), None)
            if step is None:
                shown = ", ".join(f"'{digit or 'the record'}' by {weight}" for digit, weight in left.items())
                self.problems.add(span,
                                  f"a subscript of '{field}' leaves gaps or overlaps: its faster digits cover {reach}, so the "
                                  f"next must step by {reach}, and these do not: {shown}")
                return None
            digits.insert(0, step)
            reach = reach * (next(var.extent for var in variables if var.name == step) if step else Index(box))
            del left[step]
        return tuple(digits if "" in digits else [*digits, ""]), box

    # -- dense records ------------------------------------------------------------------------------------------------

    def dense_loop(self) -> tuple[g.Loop, Index] | None:
        """The first loop of a one-line record, if it runs along a whole axis: `k<K: q[n, k]`."""
        if len(self.item.record) != 1 or not self.item.record[0].loops:
            return None
        loop = self.item.record[0].loops[0]
        if set(AXES.values()) & set(g.names(loop.extent)):
            names = {"N": name("N"), "K": name("K"), **self.constants, **self.program.dims}
            extent = Scope(names, self.records.what, self.problems).index(loop.extent)
            return None if extent is None else (loop, extent)
        return None

    def read_dense(self, element: Number, variables: tuple[AxisDigit, ...], axes: tuple[Axis, ...], loop: g.Loop, extent: Index,
                   ) -> tuple[Number, tuple[AxisDigit, ...], tuple[Axis, ...], tuple[RecordLine, ...]] | None:
        """A stream without gaps along a whole axis, cut into the shortest records of whole elements: `t<ceil(K/P) word`.

        The last record may be partial, and ends with the stream.
        """
        line = self.item.record[0]
        lines = self.records.read_lines((replace(line, loops=line.loops[1:]),), {var.name for var in variables} | {loop.name})
        if lines is None:
            return None
        if any(unit for forms in self.records.weights.values() for form in forms for units in form for unit in units.values()):
            self.problems.add(self.item.record_text.span, "a stream's subscripts have constant factors")
            return None
        bits = sum(part.step for part in lines[0].items) * prod(e for _, e in lines[0].loops)
        period = lcm(bits, element.bits) // bits
        tile = next(word for word in ("t", "u", "v") if word not in {var.name for var in variables})
        items = tuple(replace(part, index=tuple(_chunk(form, loop.name, tile, period) for form in part.index))
                      for part in lines[0].items)
        self.records.used = {f: [tuple(_chunk(form, loop.name, tile, period) for form in forms) for forms in all_forms]
                             for f, all_forms in self.records.used.items()}
        words = period * bits // element.bits
        end = ix.ceil(extent * words, period) if words > 1 and period > 1 else None
        axes = tuple(Axis((tile, ""), end) if axis.digits == ("",) else axis for axis in axes)
        lines = (RecordLine(((loop.name, period), *lines[0].loops), items),)
        return element, (*variables, AxisDigit(tile, ix.ceil(extent, period), True)), axes, lines

    # -- stored operations --------------------------------------------------------------------------------------------

    def stored_change(self, element: Number, lines: tuple[RecordLine, ...]) -> StoredChange | None:
        """The rule of `stored` that applies to this program's parameters."""
        changes: list[StoredChange] = []
        for rule in self.item.stored:
            params = self.program.params
            for key, _ in rule.when:
                if key.value not in params:
                    self.problems.add(key.span, f"unknown parameter '{key}'{did_you_mean(key.value, params)}")
            target = rule.target.value
            if any(part.field == target and part.place is not None for line in lines for part in line.items):
                self.problems.add(rule.target.span, f"'{target}' is stored as digits of base {BASE}: 'stored' changes words and "
                                                    "fields of bits")
                continue
            if target != "word" and target not in self.records.used:
                self.problems.add(rule.target.span, f"'{target}' is neither 'word' nor a field of this tensor"
                                                    f"{did_you_mean(target, ['word', *self.records.used])}")
                continue
            if not all(params.get(key.value) in values for key, values in rule.when):
                continue
            operation = self.change_operation(rule)
            if operation is not None:
                op, amount = operation
                half = 1 << (element.bits if target == "word" else self.fields[target].bits) - 1
                signed = op == "+" or element.kind == "signed" or target != "word"
                amount = (amount + half) % (2 * half) - half if signed else amount % (2 * half)
                changes.append(StoredChange(None if target == "word" else target, op, amount))
        if len(changes) > 1:
            self.problems.add(self.item.stored[0].target.span, "two rules of 'stored' hold for the same parameters")
        return changes[0] if changes else None

    def change_operation(self, rule: model.StoredOperation) -> tuple[str, int] | None:
        """'+' or '^' and the constant of `word - constant` or `word ^ constant`; other operations might not be reversible."""
        value = rule.value
        if isinstance(value, g.Binary) and value.op in ("+", "-", "^") and isinstance(value.left, g.Name) \
                and value.left.name == rule.target.value:
            amount = Scope(self.constants, "a stored operation", self.problems).const(value.right, "the amount")
            return None if amount is None else ("^" if value.op == "^" else "+", -amount if value.op == "-" else amount)
        self.problems.add(value.span, f"a stored operation must be reversible: {rule.target} plus, minus or ^ a constant")
        return None


def _product_index(unit: tuple[Atom, ...], by: int) -> Index:
    index = Index(by)
    for atom in unit:
        index = index * Index(0, ((atom, 1),))
    return index


def _chunk(form: Affine, loop: str, tile: str, period: int) -> Affine:
    """Replaces loop variable i by period * tile + i."""
    step = form.coefficient(loop)
    return Affine(form.const, form.terms + (((tile, step * period),) if step else ()))
