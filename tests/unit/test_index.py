"""Index expressions: whatever the normal form makes of one, its value is that of plain integer arithmetic."""

from __future__ import annotations

import ast
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd, prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Domain, Index, divisor, substitute, text, value_bounds

PROPERTY = settings(max_examples=400, deadline=None, derandomize=True)
NAMES = ("a", "i", "j", "n", "N", "p", "q")
Tree = tuple                                                     # ('name', 'a'), ('const', 3) or (operation, tree, tree)


@dataclass(frozen=True)
class World:
    """What is known of the names, and some values of them for which it is true."""

    domain: Domain
    values: tuple[dict[str, int], ...]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """i and j are digits, a may be negative, n is not listed, 12 divides N, 8 divides p, and p and q are positive."""
    extents = {name: draw(st.sampled_from((1, 2, 3, 4, 8, 16))) for name in "ij"}
    least = draw(st.integers(-9, 3))
    most = draw(st.one_of(st.none(), st.integers(least, 20)))
    ranges = {"a": (least, most), "p": draw(st.sampled_from(((1, None), (8, None), (1, 40)))),
              "q": draw(st.sampled_from(((1, None), (1, 7)))), **{name: (0, extent - 1) for name, extent in extents.items()}}
    divisors = {name: draw(st.sampled_from(some)) for name, some in (("N", (1, 4, 6, 12)), ("p", (1, 2, 8)))}
    values = [{
        "a": draw(st.integers(least, 30 if most is None else most)), "n": draw(st.integers(0, 100)),
        "N": 12 * draw(st.integers(0, 9)), "p": 8 * draw(st.integers(1, 5)), "q": draw(st.integers(1, 7)),
        **{name: draw(st.integers(0, extent - 1)) for name, extent in extents.items()}} for _ in range(4)]
    return World(Domain(ranges, divisors), tuple(values))


CONSTANTS = st.sampled_from((0, 1, 2, 3, 4, 6, 8, 16, 32, -1, -4, 7))
LEAVES = st.one_of(CONSTANTS.map(lambda value: ("const", value)), st.sampled_from([("name", name) for name in NAMES]))
POSITIVE = st.recursive(
    st.sampled_from([("name", "p"), ("name", "q"), *(("const", value) for value in (1, 2, 3, 4, 8, 12, 16, 32))]),
    lambda inner: st.tuples(st.sampled_from(("+", "*", "ceil")), inner, inner), max_leaves=3)
EXACT = st.builds(lambda by: ("exact", ("name", "N"), ("const", by)), st.sampled_from((1, 2, 3, 4, 6, 12)))


def _larger(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    scaled = st.builds(lambda by, tree: ("exact", ("*", tree, by), by), POSITIVE, inner)
    return st.one_of(st.tuples(st.sampled_from("++-*"), inner, inner),
                     st.tuples(st.sampled_from(("div", "mod", "ceil")), inner, POSITIVE), EXACT, scaled)


TREES = st.recursive(LEAVES, _larger, max_leaves=8)
# Sums of multiples of names, which is what addresses are before they are divided.
SUMS = st.lists(st.tuples(st.sampled_from((1, 2, 3, 4, 8, 16, 32, -1, -8)), st.sampled_from(NAMES)), max_size=4).flatmap(
    lambda terms: CONSTANTS.map(lambda const: _sum(const, terms)))
ADDRESSES = st.builds(lambda op, top, by: (op, top, by), st.sampled_from(("div", "mod", "ceil")), SUMS, POSITIVE)
EXPRESSIONS = st.one_of(TREES, ADDRESSES)


def _sum(const: int, terms: list[tuple[int, str]]) -> Tree:
    tree: Tree = ("const", const)
    for coefficient, name in terms:
        tree = ("+", tree, ("*", ("const", coefficient), ("name", name)))
    return tree


def built(tree: Tree, domain: Domain = Domain()) -> Index:
    """The normal form."""
    op, *operands = tree
    if op == "const":
        return ix.as_index(operands[0])
    if op == "name":
        return ix.name(operands[0])
    left, right = (built(part, domain) for part in operands)
    if op in ("div", "mod"):
        return {"div": ix.div, "mod": ix.mod}[op](left, right, domain)
    if op in ("ceil", "exact"):
        return {"ceil": ix.ceil, "exact": ix.exact}[op](left, right)
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def plain(tree: Tree, values: Mapping[str, int]) -> int:
    """The value by Python's arithmetic."""
    op, *operands = tree
    if op == "const":
        return int(operands[0])
    if op == "name":
        return values[operands[0]]
    left, right = (plain(part, values) for part in operands)
    if op == "exact":
        assert left % right == 0
    if op in ("div", "exact"):
        return left // right
    if op == "mod":
        return left % right
    if op == "ceil":
        return -(-left // right)
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def read(source: str, values: Mapping[str, int]) -> int:
    """Text of an expression as Python reads it."""
    functions = {"__builtins__": {}, "cdiv": lambda a, b: -(-a // b)}
    return int(eval(source, functions, dict(values)))            # noqa: S307


# -- values --------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(EXPRESSIONS, worlds())
def test_a_normal_form_has_the_value_of_the_expression(tree: Tree, world: World) -> None:
    index = built(tree, world.domain)
    for values in world.values:
        assert index(values) == plain(tree, values)


@PROPERTY
@given(SUMS, st.sampled_from((2, 3, 8, 12, 32)), st.sampled_from((2, 4, 6, 16)), worlds())
def test_quotients_of_quotients_and_remainders_of_remainders_keep_their_values(
        tree: Tree, first: int, second: int, world: World) -> None:
    for outer in ("div", "mod"):
        for inner in ("div", "mod"):
            nested = (outer, (inner, tree, ("const", first)), ("const", second))
            index = built(nested, world.domain)
            assert [index(values) for values in world.values] == [plain(nested, values) for values in world.values]


def test_an_exact_division_that_leaves_a_remainder_raises() -> None:
    index = ix.exact(ix.name("K"), 32) * 4
    assert index({"K": 64}) == 8
    with pytest.raises(ArithmeticError, match="65 is not a multiple of 32"):
        index({"K": 65})


@pytest.mark.parametrize("op", [ix.div, ix.mod, ix.ceil, ix.exact])
def test_division_by_a_name_that_is_zero_raises(op: Callable[[Index, Index], Index]) -> None:
    index = op(ix.name("K"), ix.name("g"))
    with pytest.raises(ArithmeticError, match="division by zero"):
        index({"K": 64, "g": 0})


@PROPERTY
@given(EXPRESSIONS, worlds())
def test_names_are_those_of_the_text(tree: Tree, world: World) -> None:
    index = built(tree, world.domain)
    nodes = ast.walk(ast.parse(text(index), mode="eval"))
    assert index.names() == {node.id for node in nodes if isinstance(node, ast.Name)} - {"cdiv"}
    assert index.is_const == (not index.names())


def test_a_constant_is_an_index() -> None:
    assert ix.as_index(5) == Index(5) == ix.name("a") * 0 + 5
    assert ix.as_index(ix.name("a")) == ix.name("a")
    assert ix.name("a") + 2 - 2 == ix.name("a")


# -- text ----------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(EXPRESSIONS, worlds())
def test_text_has_the_value_of_the_expression(tree: Tree, world: World) -> None:
    index = built(tree, world.domain)
    assert str(index) == text(index)
    for values in world.values:
        assert read(text(index), values) == plain(tree, values)


@PROPERTY
@given(EXPRESSIONS, worlds())
def test_text_keeps_its_value_beside_an_operator(tree: Tree, world: World) -> None:
    index = built(tree, world.domain)
    left, right = text(index, 2), text(index, 3)
    for values in world.values:
        value = plain(tree, values)
        assert [read(f"{left} {op} 7", values) for op in ("*", "//", "%")] == [value * 7, value // 7, value % 7]
        assert [read(f"1000 {op} {right}", values) for op in ("*", "-")] == [1000 * value, 1000 - value]
        if value:
            assert [read(f"1000 {op} {right}", values) for op in ("//", "%")] == [1000 // value, 1000 % value]


@PROPERTY
@given(EXPRESSIONS, worlds())
def test_the_ceiling_division_of_a_text_has_the_name_that_is_asked_for(tree: Tree, world: World) -> None:
    index = built(tree, world.domain)
    assert text(index, cdiv="tl.cdiv") == text(index).replace("cdiv(", "tl.cdiv(")


@pytest.mark.parametrize("tree, wanted", [
    (("const", -3), "-3"),
    (("-", ("name", "b"), ("name", "a")), "b - a"),
    (("-", ("-", ("const", 0), ("name", "a")), ("*", ("const", 2), ("name", "b"))), "-(2 * b) - a"),
    (("-", ("const", 0), ("name", "a")), "-(a)"),
    (("-", ("const", 7), ("div", ("name", "a"), ("const", 2))), "7 - a // 2"),
    (("*", ("div", ("name", "a"), ("const", 2)), ("const", 4)), "4 * (a // 2)"),
    (("div", ("+", ("name", "a"), ("const", 3)), ("const", 4)), "(a + 3) // 4"),
    (("ceil", ("name", "K"), ("const", 32)), "cdiv(K, 32)"),
    (("+", ("*", ("const", 144), ("name", "t")), ("name", "i")), "144 * t + i"),
    (("mod", ("div", ("name", "k"), ("const", 32)), ("const", 2)), "k // 32 % 2"),
])
def test_known_texts(tree: Tree, wanted: str) -> None:
    assert text(built(tree)) == wanted


# -- sums ----------------------------------------------------------------------------------------------------------------


def _folded(parts: list[Index], draw: random.Random) -> Index:
    """The sum of the parts, two at a time and in any order."""
    parts = draw.sample(parts, len(parts))
    while len(parts) > 1:
        at = draw.randrange(len(parts) - 1)
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts[0]


@PROPERTY
@given(st.lists(EXPRESSIONS, min_size=1, max_size=5), worlds(), st.randoms(use_true_random=False))
@example([("div", ("name", "a"), ("const", 4)), ("mod", ("name", "a"), ("const", 4))], World(Domain(), ()), random.Random(2))
@example([("*", ("name", "p"), ("name", "qq")), ("*", ("name", "pq"), ("name", "q"))], World(Domain(), ()), random.Random(2))
@example([("exact", ("name", "N"), ("const", 4)), ("div", ("name", "N"), ("const", 4))], World(Domain(), ()), random.Random(2))
def test_a_sum_has_one_normal_form_in_every_order(trees: list[Tree], world: World, draw: random.Random) -> None:
    parts = [built(tree, world.domain) for tree in trees]
    forms = {_folded(parts, draw) for _ in range(6)} | {ix.combine([(part, 1) for part in parts])}
    assert len(forms) == 1
    assert len({text(form) for form in forms}) == 1


def test_equal_expressions_have_one_hash_and_copies_are_hashed_anew() -> None:
    n, k = ix.name("n"), ix.name("k")
    one, other = ix.div(n * 4 + k, 8), ix.div(k + n * 3 + n, 8)
    assert one == other and one is not other and hash(one) == hash(other) != hash(ix.div(n * 4 + k, 16))
    copied = pickle.loads(pickle.dumps(one))  # noqa: S301 (in another process texts have other hashes)
    assert copied == one and not hasattr(copied, "_hash") and hash(copied) == hash(one)


@PROPERTY
@given(EXPRESSIONS, EXPRESSIONS, worlds())
def test_what_is_added_and_taken_away_leaves_nothing(one: Tree, other: Tree, world: World) -> None:
    left, right = built(one, world.domain), built(other, world.domain)
    assert left - left == Index()
    assert left + right - right == left
    assert left * 3 - left - left == left
    assert ix.combine([(left, 2), (right, -1), (left, -2), (right, 1)]) == Index()


# -- digits --------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(st.lists(st.integers(2, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_digits_of_a_mixed_radix_number_fall_out(extents: list[int], scale: int) -> None:
    """Whole runs of digits, too, and so with every stride scaled."""
    names = [f"d{i}" for i in range(len(extents))]
    domain = Domain({name: (0, extent - 1) for name, extent in zip(names, extents, strict=True)})
    weights = [prod(extents[:i]) for i in range(len(extents) + 1)]
    number = ix.combine([(ix.name(name), weight * scale) for name, weight in zip(names, weights, strict=False)])
    for i, name in enumerate(names):
        above = ix.div(number, weights[i] * scale, domain)
        assert above == ix.combine([(ix.name(n), w // weights[i]) for n, w in zip(names[i:], weights[i:], strict=False)])
        assert ix.mod(above, extents[i], domain) == ix.name(name)
        assert ix.mod(number, weights[i] * scale, domain) == ix.combine(
            [(ix.name(n), w * scale) for n, w in zip(names[:i], weights, strict=False)])


def test_multiples_leave_a_division() -> None:
    k = ix.name("k")
    assert ix.div(k * 96 + 65, 32) == k * 3 + 2
    assert str(ix.div(k * 64 + ix.name("n") + 40, 32)) == "2 * k + (n + 8) // 32 + 1"
    assert str(ix.mod(k * 64 + ix.name("n") + 40, 32)) == "(n + 8) % 32"
    assert str(ix.div(ix.name("n") * 8 + 5, 32)) == "n // 4"
    assert str(ix.mod(ix.name("n") * 8 + 5, 32)) == "8 * (n % 4) + 5"


@pytest.mark.parametrize("unit", [2, 8])
def test_a_unit_is_divided_by_a_group_that_it_divides(unit: int) -> None:
    """What the docstring of _div_by_name says, and only where it is so."""
    place = ix.name("t") * unit + ix.name("i")
    domain = Domain({"i": (0, unit - 1), "group": (1, None)}, {"group": 32})
    assert str(ix.div(place, ix.name("group"), domain)) == f"t // (group // {unit})"
    for worse in (Domain({"i": (0, unit)}, {"group": 32}), Domain({"i": (0, unit - 1)}), Domain({"i": (-1, 1)}, {"group": 32})):
        assert str(ix.div(place, ix.name("group"), worse)) == f"({unit} * t + i) // group"


def test_a_unit_is_in_one_group_where_a_group_may_be_the_whole_axis() -> None:
    """Of which it divides the others: of a group that is the axis a unit of it is in the first."""
    place = ix.name("t") * 8 + ix.name("i")
    domain = Domain({"i": (0, 7), "group": (1, None)}, {"group": 1}, {"group": 32})
    assert str(ix.div(place, ix.name("group"), domain)) == "8 * t // group"
    assert str(ix.div(place, ix.name("group") * 2, domain)) == "(8 * t + i) // (2 * group)"
    for worse in (Domain({"i": (0, 8)}, {}, {"group": 32}), Domain({"i": (0, 7)}, {}, {"group": 4})):
        assert str(ix.div(place, ix.name("group"), worse)) == "(8 * t + i) // group"


def test_ceilings_of_ceilings_are_one_ceiling() -> None:
    K, g = ix.name("K"), ix.name("g")
    assert ix.ceil(ix.ceil(K, 8), 4) == ix.ceil(K, 32)
    assert ix.ceil(ix.ceil(K, g), 4) == ix.ceil(K, g * 4)
    assert ix.ceil(ix.ceil(K, 8) + 1, 4) != ix.ceil(K + 1, 32)
    assert (ix.ceil(K, 1), ix.ceil(Index(9), 4)) == (K, Index(3))


def test_exact_divisions_of_multiples_are_carried_out() -> None:
    K = ix.name("K")
    assert ix.exact(K * 12 + 8, 4) == K * 3 + 2
    assert ix.exact(K * 12 - 8, 4) == K * 3 - 2
    assert str(ix.exact(K * 12 + 8, 8)) == "(12 * K + 8) // 8"


def test_numbers_leave_a_product() -> None:
    a, b = ix.name("a"), ix.name("b")
    assert (a * 2) * (b * 3) == (a * b) * 6
    assert str((a * 2) * (b + 1)) == "2 * (a * (b + 1))"


# -- substitution --------------------------------------------------------------------------------------------------------


FREE = Domain({name: (-10**9, None) if name not in "pq" else (1, None) for name in NAMES})


@PROPERTY
@given(EXPRESSIONS, st.dictionaries(st.sampled_from("aijn"), EXPRESSIONS, max_size=3), st.one_of(st.none(), POSITIVE), worlds())
def test_substitution_has_the_value_of_the_expression_with_its_names_replaced(
        tree: Tree, trees: dict[str, Tree], positive: Tree | None, world: World) -> None:
    """All names at once: what comes in is not replaced again."""
    trees = {**trees, "q": positive} if positive is not None else trees
    index = substitute(built(tree, FREE), {name: built(new, world.domain) for name, new in trees.items()}, world.domain)
    for values in world.values:
        assert index(values) == plain(tree, {**values, **{name: plain(new, values) for name, new in trees.items()}})


@PROPERTY
@given(st.sampled_from((ix.div, ix.mod)), SUMS, st.sampled_from((2, 3, 8, 12, 32)), worlds())
def test_substitution_simplifies_as_building_does(
        op: Callable[[Index, int, Domain], Index], tree: Tree, by: int, world: World) -> None:
    top = built(tree, world.domain)
    kept = op(ix.name("whole"), by, Domain())
    assert substitute(kept, {"whole": top}, world.domain) == op(top, by, world.domain)


def test_substitution_keeps_names_that_are_not_replaced() -> None:
    place = ix.div(ix.name("k"), 32) * 18 + ix.name("n") * ix.name("b")
    assert substitute(place, {}) == place
    assert str(substitute(place, {"k": ix.name("t") * 32 + 3, "n": ix.name("k")})) == "18 * t + k * b"


# -- bounds and divisors -------------------------------------------------------------------------------------------------


@PROPERTY
@given(EXPRESSIONS, worlds())
def test_bounds_hold_every_value(tree: Tree, world: World) -> None:
    index = built(tree, world.domain)
    low, high = value_bounds(index, world.domain)
    for values in world.values:
        assert low is None or low <= plain(tree, values)
        assert high is None or plain(tree, values) <= high


@PROPERTY
@given(st.dictionaries(st.sampled_from(NAMES), st.integers(-9, 9)), st.integers(-20, 20), worlds())
def test_bounds_of_a_sum_of_names_are_its_extremes(terms: dict[str, int], const: int, world: World) -> None:
    """None exactly where a name without an upper bound moves the sum that way."""
    index = ix.combine([(Index(const), 1), *((ix.name(name), c) for name, c in terms.items())])
    ends: list[int | None] = [const, const]
    for name, coefficient in terms.items():
        least, most = world.domain.bounds.get(name, (0, None))
        for side, end in enumerate((least, most) if coefficient > 0 else (most, least)):
            ends[side] = None if ends[side] is None or (end is None and coefficient) else ends[side] + coefficient * (end or 0)
    assert value_bounds(index, world.domain) == tuple(ends)


@pytest.mark.parametrize("tree, wanted", [
    (("mod", ("name", "n"), ("const", 8)), (0, 7)),
    (("mod", ("name", "j"), ("const", 8)), (0, 5)),
    (("mod", ("name", "a"), ("const", 8)), (0, 7)),
    (("mod", ("name", "n"), ("name", "q")), (0, 6)),
    (("div", ("name", "n"), ("const", 8)), (0, None)),
    (("div", ("name", "i"), ("const", 8)), (0, 12)),
    (("div", ("name", "i"), ("name", "p")), (0, 25)),
    (("div", ("name", "a"), ("const", 8)), (None, None)),
    (("ceil", ("name", "i"), ("const", 8)), (0, 13)),
    (("exact", ("name", "i"), ("const", 8)), (0, 12)),
    (("*", ("name", "j"), ("name", "q")), (0, 35)),
    (("*", ("name", "p"), ("name", "p")), (16, None)),
])
def test_known_bounds(tree: Tree, wanted: tuple[int | None, int | None]) -> None:
    domain = Domain({"a": (-9, 20), "i": (0, 100), "j": (0, 5), "q": (1, 7), "p": (4, None)})
    assert value_bounds(built(tree, domain), domain) == wanted


@PROPERTY
@given(EXPRESSIONS, worlds())
def test_a_divisor_divides_every_value(tree: Tree, world: World) -> None:
    index = built(tree, world.domain)
    by = divisor(index, world.domain)
    for values in world.values:
        assert plain(tree, values) % by == 0 if by else plain(tree, values) == 0


@PROPERTY
@given(st.dictionaries(st.sampled_from(NAMES), st.integers(-64, 64)), st.integers(-64, 64), worlds())
def test_the_divisor_of_a_sum_of_names_is_the_greatest(terms: dict[str, int], const: int, world: World) -> None:
    index = ix.combine([(Index(const), 1), *((ix.name(name), c) for name, c in terms.items())])
    divisors = world.domain.divisors
    assert abs(divisor(index, world.domain)) == gcd(const, *(c * divisors.get(name, 1) for name, c in terms.items()))


def test_the_divisor_of_a_product_is_the_product_of_divisors() -> None:
    domain = Domain({}, {"g": 32})
    assert divisor(ix.name("g") * (ix.name("n") * 2 + 4) * 3, domain) == 192
