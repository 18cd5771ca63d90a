"""Hostile input: a spec is refused with SpecError or compiles, soon, and nothing of its text becomes code.

Mutated and random specs are drawn by hypothesis, always the same ones; what once went wrong, or could, stands below by name.
"""

from __future__ import annotations

import ast
import builtins
import re
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qdsl.compiler.emit.module.module import module_files
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.keys import KEYS, TENSOR_KEYS
from qdsl.compiler.spec.schema import parse
from qdsl.compiler.spec.source import SpecError
from tests.support.paths import ROOT

GOOD = tuple(path.read_text() for folder in (ROOT / "specs", ROOT / "tests" / "specs") for path in sorted(folder.glob("*.yaml")))
SECONDS = 2.0                   # of this process, which leaves a busy machine room; the goal is one
MEMORY = 2 << 30

BLOCK = """format: hostile
weight: [N, K]
fields:
  d: f16[n, k // 32]
  q: u4[n, k]
decode: d * (q - 8)
storage:
  gguf:
    blocks:
      run: k
      record: |
        d
        l<16: q[l] q[l + 16]
"""
PLAIN = """format: hostile
weight: [N, K]
fields:
  q: u8[n, k]
decode: q
storage:
  plain:
    codes:
      tensor: u8[n<N, k<K]
      record: q[n, k]
"""
GROUP = """format: hostile
params: {bits: [4, 8], group: [128, 64, -1]}
dims: {G: ceil(K / group)}
weight: [N, K]
fields:
  g: index(G)[k]
  q: u{bits}[n, k]
  z: u{bits}[n, g]
  s: f16[n, g]
decode: (q - z) * s
encode: minmax(code=q, zero=z, scale=s)
storage:
  wide:
    codes:
      tensor: i32[n<N, word]
      record: "k<K: q[n, k]"
    zeros:
      tensor: i32[word, g<G]
      record: "n<N: z[n, g]"
    scales:
      tensor: f16[n<N, g<G]
      record: s[n, g]
    g_idx:
      tensor: i32[k<K]
      record: g[k]
      optional: k // group
"""
ENCODE = "encode: signmax(code=q, scale=d, divisor=-8)\n"


# -- the oracle -------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Not an Exception, so that no handler on the way takes it."""


@contextmanager
def bounded() -> Iterator[None]:
    """At most SECONDS of processor time and MEMORY more bytes of address space."""
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGVTALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def survives(text: str) -> bool:
    """Whether the text compiles; fails unless it does so cleanly or is refused with places inside the text."""
    try:
        with bounded():
            files = module_files(compile_spec(parse(text, "hostile.yaml")))
    except SpecError as error:
        lines = text.split("\n")
        assert error.problems
        for problem in error.problems:
            assert 1 <= problem.span.line <= len(lines)
            assert 1 <= problem.span.column <= len(lines[problem.span.line - 1]) + 1
            assert problem.render().startswith("hostile.yaml:")
        return False
    except TooLong:
        pytest.fail(f"more than {SECONDS} seconds for\n{text[:3000]}")
    for path, code in files.items():
        check_module(path, code, files)
    return True


NAME = re.compile(r"_?[A-Za-z][A-Za-z0-9_]*\Z")
IMPORTS = ("torch", "triton", "typing", "qdsl.encode", "qdsl.runtime", "qdsl.core.numbers")
BUILTINS = {"True", "False", "None", "dict", "float", "int", "len", "max", "min", "range", "str", "sum", "tuple", "zip"}


def check_module(path: str, code: str, files: Mapping[str, str]) -> None:
    """Only the imports that generated code may have, only names that it made, and no character that does not print."""
    assert re.match(r"[a-z][a-z0-9_]*(/[a-z_][a-z0-9_]*)?\.py\Z", path), path
    assert all(letter == "\n" or letter.isprintable() for letter in code)
    compile(code, path, "exec", dont_inherit=True)
    tree = ast.parse(code)
    defined: set[str] = set()
    read: set[str] = set()
    siblings = {Path(file).stem for file in files}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                assert all(alias.name.split(".")[0] in ("torch", "triton") for alias in names), ast.unparse(node)
                defined |= {alias.asname or alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=source, names=names, level=level):
                allowed = ({source} if source else {alias.name for alias in names}) <= siblings if level else \
                    any(source == start or str(source).startswith(f"{start}.") for start in IMPORTS)
                assert allowed and level <= 1, ast.unparse(node)
                defined |= {alias.asname or alias.name for alias in names}
            case ast.FunctionDef(name=name):
                defined.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Name(id=name):
                read.add(name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                assert NAME.match(name) and not name.startswith("__"), name
            case ast.Global() | ast.Nonlocal() | ast.ClassDef() | ast.Lambda() | ast.Await() | ast.JoinedStr():
                raise AssertionError(f"generated code has no {type(node).__name__}")
    assert all(NAME.match(name) for name in defined | read), defined | read
    assert read <= defined | BUILTINS, read - defined - BUILTINS
    assert not (defined & {name for name in vars(builtins) if name.startswith("__")} or "eval" in read or "exec" in read)


# -- by name ----------------------------------------------------------------------------------------------------------


def inserted(after: str, text: str, base: str = BLOCK) -> str:
    assert after in base
    return base.replace(after, after + text, 1)


def swapped(old: str, new: str, base: str = BLOCK) -> str:
    assert old in base
    return base.replace(old, new, 1)


def lines(form: str, count: int) -> str:
    """`count` lines, each the form with its number in place of #, and the one before in place of @."""
    return "".join(form.replace("#", str(i)).replace("@", str(i - 1)) for i in range(1, count + 1))


WORDS = swapped("u8[n<N, k<K]", "i32[t<K/8 word, n<N]", swapped("q: u8", "q: u4", PLAIN))
CASES = {
    # text that would be code
    "detect_value": BLOCK + "detect: {gguf: 'x\", \"a\": __import__(\"os\").getpid(), \"b\": \"c'}\n",
    "detect_key": BLOCK + "detect: {'a\": __import__(\"os\").getpid(), \"b': 1}\n",
    "detect_quote": BLOCK + "detect: {gguf: Q\"_0}\n",
    "detect_backslash": BLOCK + "detect: {gguf: 'x\\'}\n",
    "detect_lines": BLOCK + "detect:\n  gguf: |\n    a\n    b\n",
    "detect_octal": BLOCK + "detect: {gguf: 007}\n",
    "detect_other_digit": BLOCK + "detect: {gguf: \u00b2}\n",
    "detect_right_to_left": BLOCK + "detect: {gguf: a\u202eb}\n",
    "detect_braces": BLOCK + "detect: {gguf: '{{ 7 * 7 }}{% raw %}'}\n",
    "detect_empty": BLOCK + "detect: {gguf: , a: [], b: {}, c: ''}\n",
    "title_docstring": BLOCK + "title: '\"\"\"'\n",
    "title_single_quotes": BLOCK + "title: a''' + b'''\n",
    "title_braces": BLOCK + "title: '{{ 7 * 7 }}{name!r}'\n",
    "alias_quote": inserted("run: k\n", "      aliases: ['a\"', \"b'\"]\n"),
    "decode_block_text": swapped("decode: d * (q - 8)", "decode: |\n  d * (q - 8)"),
    "decode_two_lines": swapped("decode: d * (q - 8)", "decode: |\n  d *\n  (q - 8)"),
    "decode_infinite": swapped("d * (q", "1e400 * d * (q"),
    "decode_too_large_for_f32": swapped("d * (q", "1e300 * d * (q"),
    "divisor_infinite": BLOCK + swapped("-8", "1e400", ENCODE),
    "parameter_named_like_argument": GROUP.replace("group", "options"),
    "parameter_named_weight": GROUP.replace("group", "weight"),
    "parameter_named_like_tensor": GROUP.replace("group", "codes"),
    "field_and_its_temporary": swapped("d: f16", "q_split: f16").replace("d * (", "q_split * (").replace("        d\n",
                                                                                                    "        q_split\n"),
    # sizes that explode
    "tile_of_a_billion": swapped("k<K]\n      record: q[n, k]", "t<K/1000000000]\n      record: q[n, 1000000000*t]", PLAIN),
    "tile_beyond_memory": swapped("q[n, k]\n", "q[8589934591*n, k]\n", PLAIN).replace("i<8: ", ""),
    "block_of_billions": swapped("k // 32", "k // 8589934591"),
    "subscript_of_billions": swapped("q[l + 16]", "q[8589934591*l]"),
    "bit_in_the_billions": swapped("q[l + 16]", "q[l + 16].at(8589934591*l):4"),
    "loop_of_a_billion": swapped("l<16", "l<1000000000"),
    "loops_of_loops": swapped("l<16", "l<65536 a<65536 b<65536 c<65536"),
    "dims_that_double": inserted("[N, K]\n", "dims:\n  A0: N * K + N\n" + lines("  A#: A@ * A@ + N\n", 40), PLAIN),
    "numbers_that_double": inserted("[N, K]\n", "dims:\n  A0: 2**32\n" + lines("  A#: A@ * A@\n", 40), PLAIN),
    "a_million_variants": swapped("(q - 8)", "(q - p1 - p2 - p3)").replace(
        "fields:", "params:\n" + lines(f"  p#: [{', '.join(map(str, range(1, 101)))}]\n", 3) + "fields:"),
    "types_of_types": inserted("fields:\n", lines("  a#: p#[n]\n", 8), PLAIN).replace(
        "fields:", "params:\n" + lines("  p#: [f32, f16, bf16, e4m3, e5m2, u8, i8, u4]\n", 8) + "fields:"),
    "many_sizes": inserted("[N, K]\n", "params:\n" + lines("  p#: [32, 64, 128, 256, 512]\n", 100), PLAIN),
    "many_fields_in_a_long_record": swapped("l<16:", "l<1024: " + " ".join(f"a{i}[l]" for i in range(1, 61)) + "\n        l<16:")
    .replace("fields:\n", "fields:\n" + lines("  a#: u1[n, k]\n", 60)),
    "many_fields_read": inserted("fields:\n", lines("  a#: u8[n, k]\n", 150), PLAIN).replace(
        "decode: q", "decode: q" + "".join(f" + a{i}" for i in range(1, 151))) + lines(
        "    t#:\n      tensor: u8[n<N, k<K]\n      record: a#[n, k]\n", 150),
    "many_tensors": inserted("fields:\n", lines("  a#: u8[n]\n", 800), PLAIN) + lines(
        "    t#:\n      tensor: u8[n<N]\n      record: a#[n]\n", 800),
    "many_storages": PLAIN + lines("  s#:\n    codes:\n      tensor: u8[n<N, k<K]\n      record: q[n, k]\n", 1000),
    "many_unknown_keys": PLAIN + lines("formatt#: 1\n", 4000),
    "many_unknown_types": inserted("fields:\n", lines("  a#: unsigned[n, k]\n", 4000), PLAIN),
    "many_record_lines": BLOCK + "        d q\n" * 5000,
    "256_kib_of_record": BLOCK + "        d q\n" * 20000,
    "256_kib_of_comment": PLAIN + "# x\n" * 65000,
    "256_kib_in_a_line": PLAIN + "title: " + "x " * 130000,
    "256_kib_of_colons": ":" * 260000,
    "256_kib_of_brackets": PLAIN + "detect: " + "[" * 260000,
    "256_kib_of_dashes": PLAIN + "detect:\n  " + "- " * 130000,
    "more_than_256_kib": PLAIN + "\n" * 300000,
    "10000_nodes": PLAIN + "detect: {" + "".join(f"a{i}: 1, " for i in range(4900)) + "}\n",
    "deep_parentheses": swapped("(q - 8)", "(" * 900 + "q" + ")" * 900),
    "many_minus_signs": swapped("(q - 8)", "-" * 1900 + "q"),
    "long_number": swapped("q - 8", "q - " + "9" * 1900),
    "long_fraction": swapped("q - 8", "q - 0." + "1" * 1900),
    "long_exponent": swapped("q - 8", "q - 1e" + "9" * 1900),
    "power_of_powers": swapped("q - 8", "q - 2**2**2**2**2"),
    # legal in parts, senseless as a whole
    "only_padding_in_a_record": BLOCK + "    more:\n      run: k\n      record: pad:8\n",
    "only_padding_in_a_tensor": BLOCK + "    more:\n      tensor: u8[]\n      record: pad:8\n",
    "index_of_a_constant": GROUP.replace("ceil(K / group)", "4"),
    "index_without_blocks": swapped("optional: k // group", "optional: 0", GROUP),
    "index_by_quotient": swapped("optional: k // group", "optional: k / group", GROUP),
    "index_by_column": swapped("optional: k // group", "optional: k", GROUP),
    "index_by_row": swapped("optional: k // group", "optional: n", GROUP),
    "sizes_without_a_common_divisor": swapped("[128, 64, -1]", "[7, 9]", GROUP),
    "scale_squared": swapped("d: f16[n, k // 32]", "d: f16[n, k]", BLOCK.replace("(q - 8)", "d").replace(
        "        d\n", "        l<32: d[l]\n")) + swapped("-8", "1", ENCODE),
    "subscript_backwards": swapped("q[n, k]\n", "q[n, 0 - k]\n", PLAIN),
    "subscript_before_the_first": swapped("l<16: q[l] q[l + 16]", "l<1: q[l - 1] q[l - 1]"),
    "bit_before_the_first": swapped("q[n, k]\n", "q[n, k].at(0 - 1):8\n", PLAIN),
    "flat_and_not": swapped("q[n, k]\n", "q[n, k].lo:4 q[k].hi:4\n", PLAIN),
    "extent_never_whole": swapped("k<K]", "k<(2*K + 1)/2]", PLAIN),
    "extent_of_nothing": swapped("k<K]", "k<0]", PLAIN),
    "extent_negative": swapped("k<K]", "k<0 - K]", PLAIN),
    "tensor_of_no_axes": swapped("u8[n<N, k<K]", "u8[]", PLAIN),
    "elements_of_12_bits": PLAIN.replace("u8", "u12"),
    "elements_of_4_bits": PLAIN.replace("u8", "u4"),
    "elements_of_small_floats": PLAIN.replace("u8", "e2m1"),
    "everything_optional": inserted("k<K]\n", "      optional: 0\n", PLAIN),
    "stored_on_a_float": inserted("run: k\n", "      stored: {d: d - 1}\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_named_text(name: str) -> None:
    survives(CASES[name])


REFUSED = {
    "field_beside_its_block": swapped("k // 32", "k // 32 + 1"),
    "field_twice_its_block": swapped("k // 32", "2 * (k // 32)"),
    "extent_that_no_sample_shows": PLAIN.replace("fields:\n", "params: {group: [128]}\nfields:\n  s: f16[n, k // group]\n")
    + "    scale:\n      tensor: f16[n<N, g<N/group]\n      record: s[n, g]\n",
    "elements_of_3_bits": PLAIN.replace("u8", "u3"),
    "infinite_constant": CASES["decode_infinite"],
    "infinite_divisor": CASES["divisor_infinite"],
    "optional_out_of_range": inserted("fields:\n", "  z: u4[n]\n", PLAIN).replace("decode: q", "decode: q - z")
    .replace("    codes:\n", "    where: {z: 99}\n    codes:\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_named_text_is_refused(name: str) -> None:
    assert not survives(REFUSED[name])


@pytest.mark.parametrize("name", ["BLOCK", "PLAIN", "GROUP"])
def test_named_base_compiles(name: str) -> None:
    assert survives({"BLOCK": BLOCK + ENCODE, "PLAIN": PLAIN, "GROUP": GROUP}[name])


# -- drawn ------------------------------------------------------------------------------------------------------------


TOKENS = (
    "__import__('os')", '"; import os', "'''", '"""', "{{", "}}", "{%", "\u202e", "\u2028", "\0", "\t", "\\", "\\n", "#", "é",
    "²", "9" * 400, "0x10", "010", "1e400", "0.1", "(" * 60, "[" * 40, "i<1000000000", "i<65536 j<65536: ", "K/1000000000",
    "1000000000*", "**", "//", "%", "-", "<", ":", ",", "=", "'", '"', "|", ">", "&a ", "*a", "!!str ", "<<: ", "? ", "- ",
    "---\n",
    "...\n", "%YAML 1.1\n", "\n", "  ", "n", "k", "N", "K", "word", "pad:1 ", ".lo:1", ".hi:2", ".at(i):1",
    "ceil(", "lcm(", "index(G)",
    "u1", "u16", "i32", "f32", "e8m0", "where: {z: 0}\n", "run: k\n", "optional: 0\n", "stored: {word: word - 1}\n", "no", "~",
)
PIECE = re.compile(r"[A-Za-z_]+|\d+|[^\sA-Za-z0-9_]")
NUMBERS = ("0", "1", "2", "3", "5", "7", "16", "31", "33", "64", "256", "65536", "4294967296")


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A good spec in which some pieces are deleted, doubled, exchanged or replaced, most of them so that YAML remains."""
    text = draw(st.sampled_from(GOOD))
    for _ in range(draw(st.integers(1, 3))):
        pieces = list(PIECE.finditer(text))
        rows = text.split("\n")
        if not pieces:
            break
        here, source = (draw(st.sampled_from(pieces)) for _ in range(2))
        row, other = (draw(st.integers(0, len(rows) - 1)) for _ in range(2))
        at = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(("piece", "number", "token", "insert", "delete", "double", "cut", "row", "copy", "drop"))):
            case "piece":
                text = text[:here.start()] + source.group() + text[here.end():]
            case "number":
                text = text[:here.start()] + draw(st.sampled_from(NUMBERS)) + text[here.end():]
            case "token":
                text = text[:here.start()] + draw(st.sampled_from(TOKENS)) + text[here.end():]
            case "insert":
                text = text[:at] + draw(st.sampled_from(TOKENS)) + text[at:]
            case "delete":
                text = text[:here.start()] + text[here.end():]
            case "double":
                text = text[:here.end()] + text[here.start():]
            case "cut":
                text = text[:at]
            case "row":
                rows[row], rows[other] = rows[other], rows[row]
                text = "\n".join(rows)
            case "copy":
                text = "\n".join([*rows[:row], rows[other], *rows[row:]])
            case "drop":
                text = "\n".join(rows[:row] + rows[row + 1:])
    return text


ATOMS = st.sampled_from(("n", "k", "i", "l", "t", "d", "q", "N", "K", "0", "1", "2", "3", "8", "16", "32", "p", "0.5"))
EXPRESSIONS = st.recursive(ATOMS, lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from((" + ", " - ", "*", " // ", " % ", "/", "**")), inner).map("".join),
    inner.map("({})".format), inner.map("-{}".format), st.tuples(inner, inner).map(lambda ab: f"ceil({ab[0]} / {ab[1]})")),
    max_leaves=4)
SUBSCRIPTS = st.sampled_from(("[n, k]", "[n, k // 8]", "[n // 4, k // 16]", "[n]", "[k]", "[]", "[n, k // p]", "[n // p]"))
TYPES = st.sampled_from(("u1", "u2", "u3", "u4", "u5", "u8", "u12", "u16", "i3", "i8", "i32", "f16", "bf16", "f32", "e4m3",
                         "e2m1"))
WIDTHS = st.sampled_from(("", "", "", ".lo:1", ".hi:2", ".lo:4", ".at(1):2", ".at(i):1"))
PLACES = EXPRESSIONS.map("[{}]".format) | st.sampled_from(("", "[n, k]", "[l]", "[8*t + i]"))
ITEMS = st.tuples(st.sampled_from("dq"), PLACES, WIDTHS).map("".join) | st.sampled_from(("pad:1", "pad:4", "pad:8"))
DIGITS = st.lists(ITEMS, min_size=1, max_size=3).map(" ".join).map("base3({})".format) | PLACES.map("base3(j<5: q{})".format)
COPIES = ITEMS.map("again({})".format)
LOOPS = st.sampled_from(("", "", "i<2: ", "i<8: ", "l<16: ", "l<4 i<2: ", "k<K: ", "n<N: "))
SHAPES = st.sampled_from(("run: k", "tensor: u8[n<N, k<K]", "tensor: i32[t<K/8 word, n<N]", "tensor: i32[n<N, word]",
                          "tensor: u8[n<N, t<K/8]", "tensor: f16[n<N, i<ceil(K/8)]", "tensor: u8[e<N*K/2]",
                          "tensor: i16[n<N/4, k<K/16 word]", "tensor: f32[]"))


@st.composite
def invented(draw: st.DrawFn) -> str:
    """A spec of the right shape with random types, expressions and records; now and then one compiles."""
    text = f"format: hostile\nweight: [N, K]\nparams: {{p: {draw(st.sampled_from(('[32]', '[128, 64]', '[4, -1]')))}}}\nfields:\n"
    text += "".join(f"  {field}: {draw(TYPES)}{draw(SUBSCRIPTS)}\n" for field in "dq")
    formula = draw(st.sampled_from(("d * q", "d * (q - 8)", "q", "d", "-q * d / 3")) | EXPRESSIONS)
    text += f"decode: {formula}\nstorage:\n  made:\n"
    for tensor in "ab"[:draw(st.integers(1, 2))]:
        record = "".join(f"        {draw(LOOPS)}{' '.join(draw(st.lists(ITEMS | DIGITS | COPIES, min_size=1, max_size=3)))}\n"
                         for _ in range(draw(st.integers(1, 2))))
        text += f"    {tensor}:\n      {draw(SHAPES)}\n      record: |\n{record}"
    return text


SCALARS = st.one_of(st.sampled_from((*KEYS, *TENSOR_KEYS, "q", "f16[n, k]", "d * q", "u8[n<N, k<K]", "q[n, k]", "yes", "1")),
                    st.text(max_size=12), st.integers(), st.floats(), st.none(), st.booleans())
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=4),
                     max_leaves=12)


@st.composite
def dumped(draw: st.DrawFn) -> str:
    """Any YAML, under the keys of a spec as often as not."""
    tree = draw(st.one_of(TREES, st.fixed_dictionaries(dict.fromkeys(("format", "fields", "decode", "storage"), TREES))))
    return yaml.safe_dump(tree, allow_unicode=True, default_flow_style=draw(st.booleans()))


def drawn(count: int) -> settings:
    """The same examples at every run, and no search for smaller ones: a failure shows its text."""
    return settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate),
                    suppress_health_check=list(HealthCheck))


@drawn(140)
@given(mutated())
def test_mutated_specs(text: str) -> None:
    survives(text)


@drawn(100)
@given(invented())
def test_invented_specs(text: str) -> None:
    survives(text)


@drawn(40)
@given(dumped())
def test_any_yaml(text: str) -> None:
    survives(text)


@drawn(20)
@given(st.text(max_size=300))
def test_any_text(text: str) -> None:
    survives(text)
