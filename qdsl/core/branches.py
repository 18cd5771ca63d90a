"""The kinds of side branches, terms added to a weight's decoded numbers; each is registered here once.

The compiler reads this table.  `runtime/weight/branch_kinds.py` decodes, slices and joins the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RANK, ENTRIES = "R", "E"                                         # extents that only a tensor's shape determines
COLUMN = "column"                                                # the field of column numbers, or of places in a column order
OPTIONAL = "plus"                                                # marks optional tensors of branches


@dataclass(frozen=True, slots=True)
class Role:
    """A field of a branch: the extent of each of its subscripts.  is_index: an i32 that is validated; else a float."""

    extents: tuple[str, ...]
    is_index: bool = False


@dataclass(frozen=True, slots=True)
class BranchKind:
    """summary: what the branch adds to weight [n, k], for the reference.  roles: its fields."""

    summary: str
    roles: Mapping[str, Role]


BRANCHES = {
    "low_rank": BranchKind("the sum over r of `up[n, r] * down[r, k]`, in rising r",
                           {"up": Role(("N", RANK)), "down": Role((RANK, "K"))}),
    "csr": BranchKind("`value[e]` where `column[e]` is k, for e from `start[n]` to `start[n + 1]`; columns of a row rise",
                      {"start": Role(("N + 1",), True), COLUMN: Role((ENTRIES,), True), "value": Role((ENTRIES,))}),
    "dense_rows": BranchKind("the sum of `row_value[r, k]` over those r where `row[r]` is n, in rising r",
                             {"row": Role((RANK,), True), "row_value": Role((RANK, "K"))}),
}
