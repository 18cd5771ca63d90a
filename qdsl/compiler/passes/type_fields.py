"""Types and subscripts of the fields.

Does: evaluates dims, gives every field its number type, its subscripts as functions of n and k, and its extents; notes which
axis each size parameter divides.  Does not: look at storages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Domain, Index, name
from qdsl.compiler.ir.program import Field, Program
from qdsl.compiler.passes.scope import Scope
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Field as SpecField
from qdsl.compiler.spec.source import Problems, did_you_mean
from qdsl.core.numbers import KNOWN_TYPES, Number, find_number, similar_type
from qdsl.core.shapes import compiled_step, listed
from qdsl.core.stored import PLANAR

AXES = {"n": "N", "k": "K"}


def type_fields(program: Program, problems: Problems) -> Program:
    """The program with dims, and fields with their number types, subscripts and extents.

    >>> shown(fields="s: 'f16[n, k // 64]', q: 'u3[n, k]'", decode="s * q", record="l<64: q[l]; s")
    program example.p
    fields
    s      f16      [n, k // 64]         of [N, cdiv(K, 64)]
    q      u3       [n, k]               of [N, K]
    """
    domain = _size_domain(program)
    names = {**{axis: name(axis) for axis in ("N", "K")}, **parameters(program)}
    dims: dict[str, Index] = {}
    for dim in program.spec.dims:
        value = Scope({**names, **dims}, f"dim '{dim.name}'", problems, domain).index(dim.value)
        if value is not None:
            dims[dim.name.value] = value
    program = replace(program, dims=dims, domain=domain)
    fields = tuple(field for item in program.spec.fields if (field := _type_field(program, item, problems)) is not None)
    for axis in AXES:
        _check_blocks(program, fields, axis, problems)
    _check_flat_blocks(fields, problems)
    return replace(program, fields=fields)


def _check_flat_blocks(fields: tuple[Field, ...], problems: Problems) -> None:
    """Checks that blocks of the flat position nest, and meet single weights and shared values, but no other blocks."""
    flat = [(field, atom) for field in fields for index in field.index if (atom := ix.flat_of(index)) is not None]
    if not flat:
        return
    for field in fields:
        if field.index and ix.flat_of(field.index[0]) is None and field.index != (name("n"), name("k")):
            problems.add(field.span, f"blocks of the flat position, as those of '{flat[0][0].name}', meet only fields of single "
                                     f"weights [n, k] and of all []; '{field.name}' is [{', '.join(map(str, field.index))}]")
    finest = min((atom.args[1] for _, atom in flat), key=lambda by: by.terms[0][1] if by.terms else by.const)
    for field, atom in flat:
        if (atom.op, atom.args[1]) != (flat[0][1].op, finest) and (atom.op == "mod" or quotient_of(atom.args[1], finest) is None):
            problems.add(field.span, f"blocks of {atom.args[1]} and of {finest} weights need not nest")


def quotient_of(size: Index, by: Index) -> int | None:
    """size / by, if that is an integer."""
    if size.is_const and by.is_const:
        return size.const // by.const if by.const and size.const % by.const == 0 else None
    if len(size.terms) != 1 or len(by.terms) != 1 or size.const or by.const or size.terms[0][0] != by.terms[0][0]:
        return None
    return size.terms[0][1] // by.terms[0][1] if size.terms[0][1] % by.terms[0][1] == 0 else None


def _check_blocks(program: Program, fields: tuple[Field, ...], axis: str, problems: Problems) -> None:
    """Along an axis, a block whose size is a parameter may meet single weights, but no other block."""
    blocks = {index.terms[0][0].args[1]: field for field in fields for index in field.index
              if axis in index.names() and index.terms[0][0].op == "div" and ix.flat_of(index) is None}
    named = [block for block in blocks if not block.is_const]
    if named and len(blocks) > 1:
        other = next(field for block, field in blocks.items() if block != named[0])
        problems.add(other.span, f"blocks of {named[0]} and of {next(b for b in blocks if b != named[0])} along {axis} need "
                                 "not nest; a block size that is a parameter stands alone")


def parameters(program: Program) -> dict[str, Index]:
    """The values of parameters in integer expressions: structural ones their value, sizes themselves."""
    fixed = {word: Index(value) for word, value in program.params.items() if isinstance(value, int)}
    return {**fixed, **{size: name(size) for size in program.sizes}}


def number_of(program: Program, kind: g.Type, problems: Problems, stored: bool = False) -> Number | None:
    """The number type of a type expression in this program.  stored: of the elements of a tensor, which may be u32."""
    word = kind.name
    if kind.parameter is not None:
        value = program.params.get(kind.parameter.name)
        if not isinstance(value, int):
            problems.add(kind.parameter.span, f"unknown integer parameter '{kind.parameter.name}'"
                                              f"{did_you_mean(kind.parameter.name, program.params)}")
            return None
        word += str(value)
    elif isinstance(chosen := program.params.get(word), str):
        word = chosen
    number_type = find_number(word)
    if number_type is None or kind.extent is not None or (number_type.name == "u32" and not stored):
        lists = [param.name.value for param in program.spec.params if isinstance(param.values[0], str)]
        near = similar_type(word)
        hint = f"; did you mean '{near}'?" if near else did_you_mean(word, lists)
        bits = word[1:] if word[0] in "ui" and word[1:] in {param.name.value for param in program.spec.params} else ""
        problems.add(kind.span, f"unknown type '{word}'{hint}", f"write {word[0]}{{{bits}}}" if bits else KNOWN_TYPES)
        return None
    return number_type


def _size_domain(program: Program) -> Domain:
    """Size parameters are at least 1, and multiples of what kernels may assume."""
    values = {p.name.value: listed(p.written) for p in program.spec.params if p.name.value in program.sizes}
    of_weights = [item.typed.type for item in program.spec.fields
                  if [part.name for part in item.typed.index if isinstance(part, g.Name)] == ["n", "k"]]
    words = [kind.name + str(program.params.get(kind.parameter.name) if kind.parameter else "") for kind in of_weights]
    codes = [] if program.storage == PLANAR else [kind.bits for word in words if (kind := find_number(word)) is not None]
    steps = {size: compiled_step(own, codes) for size, own in values.items()}
    return Domain(dict.fromkeys(values, (1, None)), {size: step for size, step in steps.items() if step})


def _type_field(program: Program, item: SpecField, problems: Problems) -> Field | None:
    word = item.name.value
    kind = item.typed.type
    groups: Index | None = None
    number_type: Number | None = None
    if kind.name == "index":
        scope = Scope({"N": name("N"), "K": name("K"), **parameters(program), **program.dims}, "an extent", problems)
        groups = scope.index(kind.extent) if kind.extent is not None else None
        if groups is None:
            problems.add(kind.span, "an index field says how many groups there are: index(G)")
            return None
        if group_size(groups) is None:
            problems.add(kind.span, f"the groups of an index field are ceil(K / size) many, not {groups}")
            return None
    else:
        number_type = number_of(program, kind, problems)
    shown = kind.name if number_type is None or kind.name in program.params else number_type.name
    shape = _table_extents(program, item) if number_type is not None else ()
    if any(extent.const < 1 for extent in shape):
        problems.add(item.typed.span, f"stored table '{word}' has an extent that is not positive")
        return None
    index = [_type_subscript(program, item, expr, problems) for expr in item.typed.index[:len(item.typed.index) - len(shape)]]
    if None in index or (number_type is None and groups is None):
        return None
    subscripts = tuple(i for i in index if i is not None)
    axes = [axis_of(program, i) for i in subscripts]
    if shape and any(ix.flat_of(i) is not None or str(i) in _index_fields(program) for i in subscripts):
        problems.add(item.typed.span, f"stored table '{word}' is of blocks of rows and columns, or of the whole weight")
        return None
    if any(ix.flat_of(i) is not None for i in subscripts) and len(subscripts) > 1:
        problems.add(item.typed.span, f"field '{word}' is subscripted by the flat position n * K + k and nothing else")
        return None
    if axes != sorted(set(axes), key="nk".index):
        problems.add(item.typed.span, f"field '{word}' is subscripted by n and then by k, each at most once")
        return None
    if groups is not None and subscripts != (name("k"),):
        problems.add(item.typed.span, f"index field '{word}' is subscripted by k alone: which group a column belongs to")
        return None
    extents = (*(_subscript_extent(program, i) for i in subscripts), *shape)
    by_places = not place_fields(program).isdisjoint(word for expr in item.typed.index for word in g.names(expr))
    return Field(word, shown, number_type, subscripts, extents, groups, item.name.span, by_places)


def _table_extents(program: Program, item: SpecField) -> tuple[Index, ...]:
    """The extents of a stored table, which are constants and come last; () for other fields."""
    scope = Scope({"n": name("n"), "k": name("k"), "N": name("N"), "K": name("K"), **_index_fields(program),
                   **parameters(program), **program.dims}, "", Problems(), program.domain)
    shape: list[Index] = []
    for expr in reversed(item.typed.index):
        extent = scope.index(expr)
        if extent is None or not extent.is_const:
            break
        shape.insert(0, extent)
    return tuple(shape)


def group_size(count: Index) -> Index | None:
    """The columns of a group, if there are ceil(K / size) groups, or K."""
    if count == name("K"):
        return Index(1)
    if len(count.terms) != 1 or count.const or count.terms[0][1] != 1 or count.terms[0][0].op not in ("ceil", "exact"):
        return None
    columns, size = count.terms[0][0].args
    return size if columns == name("K") and (size.is_const or size == name(str(size))) else None


def _index_fields(program: Program) -> dict[str, Index]:
    """Index fields of the spec, by name; as a subscript each means itself, or k for an order of columns."""
    places = place_fields(program)
    return {f.name.value: name("k" if f.name.value in places else f.name.value) for f in program.spec.fields
            if f.typed.type.name == "index"}


def place_fields(program: Program) -> set[str]:
    """The names of index fields that have a place for every column."""
    return {f.name.value for f in program.spec.fields if f.typed.type.name == "index" and f.typed.type.extent is not None
            and list(g.names(f.typed.type.extent)) == ["K"] and isinstance(f.typed.type.extent, g.Name)}


def _type_subscript(program: Program, item: SpecField, expr: g.Expr, problems: Problems) -> Index | None:
    names: Mapping[str, Index] = {"n": name("n"), "k": name("k"), "N": name("N"), "K": name("K"), **_index_fields(program),
                                  **parameters(program), **program.dims}
    index = Scope(names, f"a subscript of field '{item.name}'", problems, program.domain).index(expr)
    if index is None:
        return None
    if _is_flat_block(program, index):
        return index
    if isinstance(expr, g.Name) and expr.name in place_fields(program):
        problems.add(expr.span, f"'{expr.name}' has a place for every column, so that '{item.name}' is a field of k")
        return None
    inner = index
    if len(index.terms) == 1 and index.terms[0][1] == 1 and not index.const and index.terms[0][0].op == "div":
        inner, divisor = index.terms[0][0].args
        if not divisor.is_const and divisor != name(str(divisor)):
            inner = index
    if inner not in (name("n"), name("k"), *(name(field) for field in _index_fields(program) if inner is index)):
        exact = index.terms[0][0].op == "exact" if index.terms else False
        note = "write // for blocks" if exact else \
            "n is the row and k the column; N and K are how many there are" if index in (name("N"), name("K")) else ""
        problems.add(expr.span, f"a subscript of field '{item.name}' is n, k, n // size, k // size, (n*K + k) // size or an "
                                "index field"
                                f"{'' if exact else f', not {index}'}", *([note] if note else []))
        return None
    return index


def _is_flat_block(program: Program, index: Index) -> bool:
    """Whether a subscript is (n*K + k) // size, the size a parameter or a number, or (n*K + k) % (N*K / size)."""
    atom = ix.flat_of(index)
    if atom is None:
        return False
    by = atom.args[1]
    if atom.op == "mod":
        inner = by.terms[0][0] if len(by.terms) == 1 and not by.const and by.terms[0][1] == 1 else None
        whole = name("N") * name("K")
        return inner is not None and inner.op == "exact" and inner.args[0] == whole and _is_size(program, inner.args[1])
    return _is_size(program, by)


def _is_size(program: Program, size: Index) -> bool:
    """Whether an index is a number, a size parameter, or a multiple of one."""
    return size.is_const or (not size.const and len(size.terms) == 1 and str(size.terms[0][0].name) in program.sizes)


def axis_of(program: Program, index: Index) -> str:
    """'n' or 'k': the axis of a subscript; index fields belong to k."""
    return "n" if "n" in index.names() else "k"


def _subscript_extent(program: Program, index: Index) -> Index:
    atom = index.terms[0][0]
    if atom.op == "name" and atom.name not in AXES:
        kind = next(f.typed.type for f in program.spec.fields if f.name.value == atom.name)
        scope = Scope({"N": name("N"), "K": name("K"), **parameters(program), **program.dims}, "", Problems())
        return (scope.index(kind.extent) if kind.extent else None) or Index(1)
    if atom.op == "name":
        return name(AXES[atom.name])
    top, bottom = atom.args
    if ix.flat_of(index) is not None:
        return bottom if atom.op == "mod" else ix.ceil(name("N") * name("K"), bottom)
    return ix.ceil(name(AXES[str(top)]), bottom)
