"""The side branches of a format: terms added to the decoded weight, and the layout of their tensors.

Does: finds the tensor of every field of a branch, and checks that the digits of its axes make up the field's subscripts, each
once.  Does not: look into the storages, all of which have these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index, name, product_of
from qdsl.compiler.ir.program import Branch, BranchTensor, Program
from qdsl.compiler.passes.scope import Scope
from qdsl.compiler.passes.type_fields import number_of, parameters
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec import model
from qdsl.compiler.spec.source import Problems, did_you_mean
from qdsl.core.branches import BRANCHES, COLUMN, ENTRIES, RANK, Role
from qdsl.core.numbers import TORCH_FLOATS

INDEX, WORD, HALF = "i32", 32, 16                                # the type of indices; bits of words and of half words
WORDS = "words i32[e<E] hold two in 16 bits each, column[e].lo:16 value[e]; values are f16"
FLOATS = ("f32", "f16", "bf16")                                  # types of values of a branch
assert set(FLOATS) <= TORCH_FLOATS.keys()


def read_branches(program: Program, problems: Problems) -> Program:
    """The program with its branches; adds a problem for a tensor that holds no field of its branch.

    >>> shown(more='''plus:
    ...   csr:
    ...     rows: {tensor: "i32[n<N + 1]", record: "start[n]"}
    ...     cols: {tensor: "i32[e<E]", record: "column[e]"}
    ...     vals: {tensor: "f32[e<E]", record: "value[e]"}''')
    plus csr
    rows i32 [N + 1]: start of digits [N + 1], by subscripts ((0,),)
    cols i32 [E]: column of digits [E], by subscripts ((0,),)
    vals f32 [E]: value of digits [E], by subscripts ((0,),)
    """
    spec = program.spec
    if not spec.plus:
        return program
    if any(tensor.stream for tensor in program.tensors):
        problems.add(spec.plus[0].kind.span, "a weight in an entropy code has no branch beside it")
    _check_names(program, problems)
    branches = [_read_branch(program, branch, problems) for branch in spec.plus]
    return replace(program, plus=tuple(branch for branch in branches if branch is not None))


def _check_names(program: Program, problems: Problems) -> None:
    """Tensors of branches, and their fields, must have unique names."""
    spec = program.spec
    taken = {item.stored_name.value for storage in spec.storages for item in storage.tensors}
    taken |= {param.name.value for param in spec.params}
    for tensor in spec.branch_tensors:
        if tensor.name.value in taken:
            problems.add(tensor.name.span, f"'{tensor.name}' already names something else")
        taken.add(tensor.name.value)
    fields = {field.name for field in program.fields}
    for dim in spec.dims:
        if dim.name.value in (RANK, ENTRIES):
            problems.add(dim.name.span, f"'{dim.name}' is an extent of branches, which tensors' shapes say")
    for branch in spec.plus:
        for role in BRANCHES[branch.kind.value].roles:
            if role in fields:
                problems.add(branch.kind.span, f"'{role}' is a field of '{branch.kind}', and of the format too")


def _read_branch(program: Program, branch: model.Branch, problems: Problems) -> Branch | None:
    """The branch with its tensors in the order of its fields; None if some are wrong."""
    roles = BRANCHES[branch.kind.value].roles
    read = [_read_tensor(program, branch, tensor, item, half, problems) for tensor in branch.tensors
            for item, half in _record_fields(tensor, roles)]
    tensors = {tensor.role: tensor for tensor in read if tensor is not None}
    if None in read:
        return None
    if missing := [role for role in roles if role not in tensors]:
        problems.add(branch.kind.span, f"no tensor of '{branch.kind}' holds {_shown(missing[0], roles[missing[0]])}")
        return None
    if len(read) > len(tensors):
        problems.add(branch.kind.span, f"two tensors of '{branch.kind}' hold the same field")
        return None
    ordered = [tensor for tensor in branch.tensors if tensor.ordered]
    fields = [{item.field.name for line in tensor.record for item in line.fields if item.field} for tensor in ordered]
    if any(COLUMN not in names for names in fields) or \
            (ordered and all(storage.order is None for storage in program.spec.storages)):
        problems.add(ordered[0].name.span, f"'{COLUMN}' alone has places for columns, in a format whose storages have an 'order'")
    return Branch(branch.kind.value, tuple(tensors[role] for role in roles), bool(ordered))


def _shown(field: str, role: Role) -> str:
    return f"'{field}' [{', '.join(role.extents)}]"


def _read_tensor(program: Program, branch: model.Branch, tensor: model.Tensor, item: g.RecordItem | None,
                 half: tuple[str, int] | None,
                 problems: Problems) -> BranchTensor | None:
    """The tensor of a branch's field; None, with a problem, if it is wrong.  half: how words hold the field."""
    roles = BRANCHES[branch.kind.value].roles
    if item is None or item.field is None or tensor.shape is None:
        problems.add(tensor.record_text.span, "a tensor of a branch holds one field, element by element",
                     f"'{branch.kind}' has {', '.join(_shown(field, role) for field, role in roles.items())}",
                     *([WORDS] if branch.kind.value == "csr" else []))
        return None
    field = item.field.name
    if field not in roles:
        problems.add(item.span, f"'{branch.kind}' has no field '{field}'{did_you_mean(field, roles)}")
        return None
    if not half and not _check_type(program, tensor.shape.type, field, roles[field], problems):
        return None
    loops = [digit for axis in tensor.shape.axes for digit in axis.digits if digit is not None]
    constants = {**parameters(program), **{word: dim for word, dim in program.dims.items() if dim.is_const}}
    extents = {word: name(word) for word in ("N", "K", RANK, ENTRIES)}
    scope = Scope({**constants, **extents}, f"the shape of '{tensor.name}'", problems)
    read = [scope.index(loop.extent) for loop in loops]
    digits = [extent for extent in read if extent is not None]
    if len(digits) < len(loops) or any(None in axis.digits for axis in tensor.shape.axes):
        if len(digits) == len(loops):
            problems.add(tensor.shape.span, "a tensor of a branch has no records, and so no 'word'")
        return None
    order = _subscripts(item, field, [loop.name for loop in loops], digits, roles[field], constants, problems)
    if order is None:
        return None
    place = dict(zip((loop.name for loop in loops), digits, strict=True))
    axes = [product_of([place[digit.name] for digit in axis.digits if digit is not None]) for axis in tensor.shape.axes]
    if tensor.seen:
        axes = [name(RANK if extent.value == "?" else extent.value) for extent in tensor.seen]
        if sorted(map(str, axes)) != sorted(roles[field].extents):
            problems.add(tensor.seen[0].span, f"files show '{tensor.name}' by the extents of its field, '?' for {RANK}")
            return None
    return BranchTensor(field, tensor.name.value, tensor.shape.type.name, tuple(digits), order, tuple(axes),
                        tuple(alias.value for alias in tensor.aliases), half)


def _record_fields(tensor: model.Tensor, roles: Mapping[str, Role]) -> list[tuple[g.RecordItem | None, tuple[str, int] | None]]:
    """The single item of a record, with None; or two halves of a 32-bit word with their places.

    The low half is a list's index, the high half its value in f16.
    """
    lines = tensor.record
    items = lines[0].items if len(lines) == 1 and not lines[0].loops else ()
    parts = [item for item in items
             if isinstance(item, g.RecordItem) and not item.again and (item.part == "whole" or _is_half(item))]
    listed = [roles.get(item.field.name if item.field is not None else "", Role(())) for item in parts]
    if len(parts) == len(items) == WORD // HALF and tensor.shape is not None and tensor.shape.type.name == INDEX \
            and [role.is_index for role in listed] == list(map(_is_half, parts)) and sum(map(_is_half, parts)) == 1 \
            and all(role.extents == (ENTRIES,) for role in listed):
        return [(item, (INDEX if _is_half(item) else "f16", i * HALF)) for i, item in enumerate(parts)]
    return [(parts[0] if len(parts) == len(items) == 1 and not _is_half(parts[0]) else None, None)]


def _is_half(item: g.RecordItem) -> bool:
    """Whether an item is the low half of a word."""
    return item.part == "lo" and isinstance(item.width, g.Number) and item.width.value == HALF


def _check_type(program: Program, kind: g.Type, field: str, role: Role, problems: Problems) -> bool:
    """Whether elements are i32 for an index, floats for values; adds a problem if not."""
    number = number_of(program, kind, problems, stored=True)
    if number is None:
        return False
    allowed = (INDEX,) if role.is_index else FLOATS
    if number.name not in allowed:
        problems.add(kind.span, f"'{field}' is {' or '.join(allowed)}, not {number.name}")
    return number.name in allowed


def _subscripts(item: g.RecordItem, field: str, names: Sequence[str], digits: Sequence[Index], role: Role,
                constants: dict[str, Index],
                problems: Problems) -> tuple[tuple[int, ...], ...] | None:
    """For every subscript its digits, slowest first, as indices into all digits; None, with a problem, if they do not match."""
    if len(item.index) != len(role.extents):
        problems.add(item.span, f"{_shown(field, role)} has {len(role.extents)} subscripts, not {len(item.index)}")
        return None
    scope = Scope({**constants, **{word: name(word) for word in names}}, "a subscript", problems)
    order: list[tuple[int, ...]] = []
    for expr, whole in zip(item.index, role.extents, strict=True):
        index = scope.index(expr)
        if index is None:
            return None
        steps = sorted(((coefficient, names.index(atom.name)) for atom, coefficient in index.terms if atom.op == "name"))
        if len(steps) < len(index.terms) or index.const or not _digits_cover(steps, digits, whole):
            problems.add(expr.span, f"variables of '{field}' do not run through {whole}, each position once")
            return None
        order.append(tuple(place for _, place in reversed(steps)))
    if sorted(place for places in order for place in places) != list(range(len(names))):
        problems.add(item.span, "every variable of the tensor stands in one subscript, once")
        return None
    return tuple(order)


def _digits_cover(steps: Sequence[tuple[int, int]], digits: Sequence[Index], whole: str) -> bool:
    """Whether digits, fastest first, each step by the product of faster extents, up to the extent of a subscript."""
    extent = name("N") + 1 if whole == "N + 1" else name(whole)
    reach = 1
    for i, (step, place) in enumerate(steps):
        if step != reach:
            return False
        if i == len(steps) - 1:
            return digits[place] == (extent if reach == 1 else ix.exact(extent, Index(reach)))
        if not digits[place].is_const:
            return False
        reach *= digits[place].const
    return False
