"""What the checkers of the PTX machine say of small programs: with the instruction that makes them right, and without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qdsl.analyze.execute import ExecutionError, Options
from tests.support.ptx import entry, run

# Every thread stores to shared memory, and loads what the thread of another warp, or of another lane, stored.
OTHER_WARP = "mul.lo.u32 %r1, %r60, 4; st.shared.b32 [%r1], %r60; {} xor.b32 %r2, %r1, 128; ld.shared.b32 %r3, [%r2];"
OTHER_LANE = "mul.lo.u32 %r1, %r60, 4; st.shared.b32 [%r1], %r60; {} xor.b32 %r2, %r1, 4; ld.shared.b32 %r3, [%r2];"
OUT = "mul.wide.u32 %d10, %r63, 4; add.s64 %d10, %d10, %d0; st.global.b32 [%d10], %r3;"
COPY = ("mul.lo.u32 %r1, %r60, 16; mul.wide.u32 %d10, %r60, 16; add.s64 %d11, %d10, %d1; "
        "cp.async.cg.shared.global [%r1], [%d11], 16; "
        "cp.async.commit_group; {} ld.shared.b32 %r3, [%r1];") + OUT
# A warp group multiplies ones of shared memory [64, 16] by ones [8, 16]; plain matrices of 8 rows of 16 bytes.
PRODUCT = ("mov.b32 %r10, 0x3C003C00; mul.lo.u32 %r1, %r60, 16; st.shared.v4.b32 [%r1], {{%r10, %r10, %r10, %r10}}; "
           "st.shared.v4.b32 [%r1+2048], {{%r10, %r10, %r10, %r10}}; {proxy} {barrier}"
           f"mov.b64 %d20, {(128 >> 4) << 16 | (256 >> 4) << 32}; "
           f"mov.b64 %d21, {2048 >> 4 | (128 >> 4) << 16 | (256 >> 4) << 32}; "
           "mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0; {fence} "
           "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r20, %r21, %r22, %r23}}, %d20, %d21, 1, 1, 1, 0, 0; "
           "wgmma.commit_group.sync.aligned; {wait} mov.b32 %r3, %r20;") + OUT
RIGHT = {"proxy": "fence.proxy.async.shared::cta;", "barrier": "bar.sync 0;", "fence": "wgmma.fence.sync.aligned;",
         "wait": "wgmma.wait_group.sync.aligned 0;"}


def words(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def kinds(*arguments: object, **keywords: object) -> set[str]:
    return {finding.kind for finding in run(*arguments, **keywords).findings}  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["lockstep", "reverse", 3])
def test_a_barrier_orders_the_threads_of_a_program(order: str | int) -> None:
    """Without one it is a race in any order, though in lockstep every value is right."""
    for exchange, fine, wrong in ((OTHER_WARP, "bar.sync 0;", "bar.warp.sync -1;"), (OTHER_LANE, "bar.warp.sync -1;", "")):
        out = words(64)
        options = Options(order=order)
        assert kinds(exchange.format(fine) + OUT, out, threads=64, shared=256, outputs=(out,), options=options) == set()
        assert torch.equal(out, torch.arange(64, dtype=torch.int32) ^ (32 if exchange is OTHER_WARP else 1))
        assert kinds(exchange.format(wrong) + OUT, out, threads=64, shared=256, outputs=(out,), options=options) >= {"race"}
    assert kinds(OTHER_WARP.format("") + OUT, words(64), threads=64, shared=256, options=Options(races=False,
        written=False)) == set()


def test_a_value_is_read_before_the_next_is_stored() -> None:
    again = OTHER_WARP.format("bar.sync 0;") + "{} add.u32 %r4, %r3, 1; st.shared.b32 [%r1], %r4;" + OUT
    assert kinds(again.format("bar.sync 0;"), words(64), threads=64, shared=256) == set()
    assert kinds(again.format(""), words(64), threads=64, shared=256) == {"race"}


def test_threads_that_store_one_value_at_one_place() -> None:
    """Compilers let threads that hold the same value store it; other values race, in one instruction too."""
    for order in ("lockstep", "reverse"):
        for value, wanted in (("%r3", set()), ("%r60", {"race"})):
            body = f"mov.b32 %r3, 5; st.shared.b32 [0], {value};" + OUT
            assert kinds(body, words(64), threads=64, shared=256, options=Options(order=order)) == wanted


def test_accesses_of_other_widths_meet() -> None:
    """A thread stores 16 bytes, and one of another warp loads the last four."""
    body = ("setp.lt.u32 %p1, %r60, 32; and.b32 %r1, %r60, 31; mul.wide.u32 %d10, %r1, 16; add.s64 %d11, %d10, %d1; "
            "@%p1 st.global.v4.b32 [%d11], {{%r60, %r60, %r60, %r60}}; {} @!%p1 ld.global.b32 %r3, [%d11+12];")
    for barrier, wanted in (("bar.sync 0;", set()), ("", {"race"})):
        space = words(128)
        assert kinds(body.format(barrier), words(1), space, threads=64, workspaces=(space,)) == wanted


def test_bytes_that_nobody_wrote() -> None:
    assert kinds("mul.lo.u32 %r1, %r60, 4; ld.shared.b32 %r3, [%r1];" + OUT, words(32), shared=128) == {"unwritten"}
    space = words(32)
    body = "mul.wide.u32 %d10, %r60, 4; add.s64 %d11, %d10, %d1; {} ld.global.b32 %r3, [%d11];" + OUT
    assert kinds(body.format(""), words(32), space, workspaces=(space,)) == {"unwritten"}
    assert kinds(body.format("st.global.b32 [%d11], %r60;"), words(32), space, workspaces=(space,)) == set()
    assert kinds(body.format(""), words(32), space) == set()


def test_outputs_are_stored_once() -> None:
    out = words(64)
    assert kinds("mov.b32 %r3, 1;" + OUT, out, threads=64, outputs=(out,)) == set()
    (finding,) = run("mov.b32 %r3, 1;" + OUT, out, threads=32, outputs=(out,)).findings
    assert (finding.kind, finding.message) == ("stores", "element 32 of 't0' was never stored")
    (finding,) = run("mov.b32 %r3, 1;" + OUT + OUT, out, threads=64, outputs=(out,)).findings
    assert finding.message == "element 0 of 't0' was stored more than once"
    other = words(64)
    assert "which is no output" in str(run("mov.b32 %r3, 1;" + OUT, other, out, threads=64, outputs=(out,)).findings[0])


def test_outputs_in_one_storage_are_stored_once_each() -> None:
    storage = words(64)
    both = "mov.b32 %r3, 1;" + OUT + OUT.replace("%d10, %d0", "%d10, %d1")
    assert kinds(both, storage[:32], storage[32:], outputs=(storage[:32], storage[32:])) == set()
    (finding,) = run("mov.b32 %r3, 1;" + OUT, storage[:32], storage[32:], outputs=(storage[:32], storage[32:])).findings
    assert finding.message == "element 0 of 't1' was never stored"
    early = "mul.wide.u32 %d10, %r63, 4; add.s64 %d10, %d10, %d0; ld.global.b32 %r3, [%d10];" + both
    assert kinds(early, storage[:32], storage[32:], outputs=(storage[:32], storage[32:])) == {"unwritten"}
    with pytest.raises(ExecutionError, match=r"a tensor \[7\] that is declared is no argument of the launch"):
        run("mov.b32 %r3, 1;" + OUT, storage, outputs=(words(7),))


def test_a_storage_that_begins_anywhere() -> None:
    """Words of 16 bytes lie where their addresses say, though the first byte of the storage lies at no multiple of 16."""
    memory = np.zeros(1024 + 16, np.uint8)
    first = -memory.ctypes.data % 16 + 4
    tensor = torch.from_numpy(memory[first:first + 1024])
    run("mul.wide.u32 %d10, %r60, 16; add.s64 %d10, %d10, %d0; st.global.v4.b32 [%d10], {%r60, %r60, %r60, %r60};", tensor[12:])
    assert tensor[12:12 + 512].view(32, 16)[:, ::4].eq(torch.arange(32)[:, None]).all() and tensor[12 + 512:].eq(0).all()


def test_copies_are_waited_for() -> None:
    """They are done as late as the wait allows, so that without one the result is wrong, too."""
    data = torch.arange(128, dtype=torch.int32)
    out = words(32)
    assert kinds(COPY.format("cp.async.wait_group 0;"), out, data, shared=512, outputs=(out,)) == set()
    assert torch.equal(out, data[::4])
    for missing in ("", "cp.async.wait_group 1;"):
        assert "asynchronous" in kinds(COPY.format(missing), out, data, shared=512)
        assert not torch.equal(out, data[::4])
    through = COPY.replace("[%r1];" + OUT, "[%r2];" + OUT)
    late = "cp.async.wait_group 0; {} xor.b32 %r2, %r1, 512;"
    assert kinds(through.format(late.format("bar.sync 0;")), words(64), torch.zeros(256, dtype=torch.int32), threads=64,
                 shared=1024) == set()
    assert kinds(through.format(late.format("")), words(64), torch.zeros(256, dtype=torch.int32), threads=64,
                 shared=1024) == {"race"}


def test_products_of_warp_groups() -> None:
    out = words(128)
    assert kinds(PRODUCT.format(**RIGHT), out, threads=128, shared=4096, outputs=(out,)) == set()
    assert (out.view(torch.float32) == 16).all()
    for left_out, kind in (("proxy", "race"), ("barrier", "race"), ("fence", "asynchronous"), ("wait", "asynchronous")):
        assert kind in kinds(PRODUCT.format(**{**RIGHT, left_out: ""}), words(128), threads=128, shared=4096), left_out
    bytes_too = PRODUCT + "st.shared.b8 [4095], %h1;"            # then checks are for each byte, and elements have two
    again = {"barrier": "bar.sync 0; st.shared.b8 [%r1+1], %h1;"}
    for pieces, wanted in (({}, set()), ({"barrier": ""}, {"race"}), ({"proxy": ""}, {"race"}), (again, {"race"})):
        assert kinds(bytes_too.format(**{**RIGHT, **pieces}), words(128), threads=128, shared=4096) == wanted, pieces
    unwritten = bytes_too.replace("st.shared.v4.b32 [%r1+2048], {{%r10, %r10, %r10, %r10}};", "")
    assert "unwritten" in kinds(unwritten.format(**RIGHT), words(128), threads=128, shared=4096)
    refilled = PRODUCT.replace("{wait}", "st.shared.b32 [%r1], %r60; {wait}")
    assert "asynchronous" in kinds(refilled.format(**RIGHT), words(128), threads=128, shared=4096)


# The same with ones of A [64, 16] in registers.
FRAGMENTS = PRODUCT.replace("{{%r20, %r21, %r22, %r23}}, %d20, %d21, 1, 1, 1, 0, 0;",
                            "{{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, %d21, 1, 1, 1, 0;").replace(
    "mov.b64 %d20", "mov.b32 %r11, %r10; mov.b32 %r12, %r10; mov.b32 %r13, %r10; mov.b64 %d20")


def test_registers_of_a_product_that_are_written_before_its_wait() -> None:
    """The ISA forbids it; ptxas allows for it, so that it is a finding for those who ask."""
    early = RIGHT | {"wait": "mov.b32 %r12, 0; " + RIGHT["wait"]}
    for asked in (False, True):
        for pieces, wanted in ((RIGHT, set()), (early, {"asynchronous"} if asked else set())):
            out = words(128)
            assert kinds(FRAGMENTS.format(**pieces), out, threads=128, shared=4096, options=Options(fragments=asked)) == wanted
            assert bool((out.view(torch.float32) == 16).all()) == (not wanted)


# A program stores data and raises a flag; the other waits for the flag and loads the data.
FLAG = ("setp.eq.u32 %p1, %r61, 0; @!%p1 bra READ;\n mul.wide.u32 %d10, %r60, 4; add.s64 %d11, %d10, %d1; "
        "st.global.b32 [%d11], %r60; {barrier} "
        "setp.eq.u32 %p2, %r60, 0; @%p2 atom.{release}.gpu.global.exch.b32 %r5, [%d2], 1; ret;\n"
        "READ: setp.eq.u32 %p2, %r60, 0; @!%p2 bra READY;\n"
        "WAIT: atom.{acquire}.gpu.global.or.b32 %r5, [%d2], 0; setp.eq.u32 %p3, %r5, 0; "
        "@%p3 bra WAIT;\nREADY: {barrier} xor.b32 %r2, %r60, 32; "
        "mul.wide.u32 %d10, %r2, 4; add.s64 %d11, %d10, %d1; ld.global.b32 %r3, [%d11];"
        "mul.wide.u32 %d10, %r60, 4; add.s64 %d10, %d10, %d0; st.global.b32 [%d10], %r3;")


def test_atomics_order_programs() -> None:
    """A release after a barrier and an acquire before one; without any of these, or at the scope of a program, it is a race."""
    right = {"barrier": "bar.sync 0;", "release": "release", "acquire": "acquire"}
    for change, wanted in (({}, set()), ({"barrier": ""}, {"race"}), ({"release": "relaxed"}, {"race"}), ({"acquire": "relaxed"},
        {"race"})):
        out, data, flag = words(64), words(64), words(1)
        assert kinds(FLAG.format(**{**right, **change}), out, data, flag, threads=64, programs=2,
                     workspaces=(data,)) == wanted, change
        assert torch.equal(out, torch.arange(64, dtype=torch.int32) ^ 32)
    body = FLAG.format(**right).replace(".gpu.", ".cta.")
    data = words(64)
    assert kinds(body, words(64), data, words(1), threads=64, programs=2, workspaces=(data,)) == {"race"}


@pytest.mark.parametrize(("before", "after", "wanted"), [
    ("bar.sync 0; fence.acq_rel.gpu;", "fence.acq_rel.gpu; bar.sync 0;", set()),
    ("bar.sync 0;", "fence.acq_rel.gpu; bar.sync 0;", {"race"}),
    ("bar.sync 0; fence.acq_rel.gpu;", "bar.sync 0;", {"race"}),
    ("bar.sync 0; fence.acq_rel.cta;", "fence.acq_rel.gpu; bar.sync 0;", {"race"}),
    # a fence orders what came before it: not what other threads do until the next barrier, nor a store of its thread
    ("fence.acq_rel.gpu; bar.sync 0;", "fence.acq_rel.gpu; bar.sync 0;", {"race"}),
    ("bar.sync 0; fence.acq_rel.gpu; setp.eq.u32 %p4, %r60, 0; @%p4 st.global.b32 [%d11], %r60;",
     "fence.acq_rel.gpu; bar.sync 0;", {"race"})])
def test_fences_order_what_relaxed_atomics_pass_on(before: str, after: str, wanted: set[str]) -> None:
    body = FLAG.format(barrier="{}", release="relaxed", acquire="relaxed").format(before, after)
    out, data, flag = words(64), words(64), words(1)
    assert kinds(body, out, data, flag, threads=64, programs=2, workspaces=(data,)) == wanted


# Loads what the launch before wrote, and stores it elsewhere.
AFTER = ("mul.wide.u32 %d10, %r63, 4; add.s64 %d11, %d10, %d1; add.s64 %d12, %d10, %d2; {first} ld.global.b32 %r4, [%d12]; "
         "{second} ld.global.b32 %r3, [%d11]; {third}" + OUT)


@pytest.mark.parametrize(("pieces", "wanted"), [
    ({"second": "griddepcontrol.wait;"}, set()), ({"first": "griddepcontrol.launch_dependents; griddepcontrol.wait;"}, set()),
    ({"second": "griddepcontrol.launch_dependents;"}, {"dependent"}), ({"third": "griddepcontrol.wait;"}, {"dependent"}),
    ({"second": "setp.eq.u32 %p1, %r60, 0; @%p1 griddepcontrol.wait; bar.sync 0;"}, set()),
    ({"second": "setp.eq.u32 %p1, %r60, 0; @%p1 griddepcontrol.wait;"}, {"dependent"}),
    ({"first": "st.global.b32 [%d12], %r60; griddepcontrol.wait;"}, {"dependent"}),
    ({"first": "red.global.add.u32 [%d12], %r60; griddepcontrol.wait;"}, {"dependent"}),
    ({"first": "shl.b32 %r1, %r60, 2; cp.async.ca.shared.global [%r1], [%d11], 4; griddepcontrol.wait; "
               "cp.async.wait_all;"}, {"dependent"})])
def test_a_dependent_launch_waits_for_the_one_before(pieces: dict[str, str], wanted: set[str]) -> None:
    """What the one before writes is read after the wait, of the thread or before a barrier; and stores come after it."""
    body = AFTER.format(**{"first": "", "second": "", "third": "", **pieces})
    out, data, weights = words(64), torch.arange(64, dtype=torch.int32), words(64)
    assert kinds(body, out, data, weights, threads=64, shared=256, after=(data,)) == wanted
    assert torch.equal(out, torch.arange(64, dtype=torch.int32))
    assert kinds(body, out, data, weights, threads=64, shared=256) == set()


def test_atomics_add_in_any_order() -> None:
    for order in ("lockstep", 5):
        total = words(1)
        assert kinds("red.global.add.s32 [%d0], %r63;", total, threads=64, programs=3, options=Options(order=order)) == set()
        assert total.item() == sum(range(192))


# -- faults ------------------------------------------------------------------------------------------------------------------


def test_an_access_that_faults_names_thread_place_and_tensor() -> None:
    body = "mul.wide.u32 %d10, %r63, 4; add.s64 %d10, %d10, %d0;\nst.global.b32 [%d10{}], %r63;"
    run(body.format(""), words(64), threads=64)
    with pytest.raises(ExecutionError,
                       match=r"line \d+: st\.global\.b32.*a store of 4 bytes at byte 256 of 't0', which has 256; thread 63 of"):
        run(body.format("+4"), words(64), threads=64)
    with pytest.raises(ExecutionError,
                       match=r"a store of 4 bytes at 0x7f[0-9a-f]+, which 4 does not divide; thread 0 of program 0"):
        run(body.format("+2"), words(64), threads=64)
    with pytest.raises(ExecutionError, match="a store of 4 bytes at 0x0, below every tensor"):
        run("mov.b64 %d10, 0; st.global.b32 [%d10], %r60;", words(64))
    with pytest.raises(ExecutionError, match="a load of 4 bytes at 128 of 128 shared bytes"):
        run("ld.shared.b32 %r3, [128];", words(1), shared=128)


def test_views_of_one_storage_are_one_allocation() -> None:
    """An access beside a view is out of bounds where no other view lies."""
    storage = words(96)
    run("mov.b32 %r3, 7;" + OUT, storage[32:64], storage[:8])
    assert storage[32:64].eq(7).all() and storage[64:].eq(0).all() and storage[:32].eq(0).all()
    with pytest.raises(ExecutionError, match="at byte 128 of 't0', which has 128"):
        run("mov.b32 %r3, 7;" + OUT, storage[32:64], threads=64)


def test_a_loop_that_never_ends_meets_a_limit() -> None:
    with pytest.raises(ExecutionError, match=r"more than 1000 instructions; does a loop never end\?"):
        run("LOOP: add.u32 %r1, %r1, 1; bra LOOP;", words(1), options=Options(steps=1000))


@pytest.mark.parametrize("body", ["setp.lt.u32 %p1, %r60, 32; @%p1 bra END; bar.sync 0; END: mov.u32 %r3, 1;",
                                  "setp.eq.u32 %p1, %r60, 5; @%p1 bar.sync 0;"])
def test_a_barrier_that_threads_miss(body: str) -> None:
    """A warp that never comes is a finding once it has ended; a lane that is missing is an error at once."""
    try:
        findings = run(body, words(1), threads=64).findings
    except ExecutionError as error:
        assert "lanes of a warp are missing" in str(error)
    else:
        assert [finding.kind for finding in findings] == ["barrier"]


def test_a_shuffle_whose_lanes_are_missing() -> None:
    with pytest.raises(ExecutionError, match="its mask names lanes that are not here"):
        run("setp.lt.u32 %p1, %r60, 16; @%p1 shfl.sync.bfly.b32 %r1, %r60, 1, 31, -1;", words(1))


@pytest.mark.parametrize(("text", "message"), [
    ("", "no entry"), (entry("mov.u32 %r1, 1;").replace("ret;\n}\n", ""), "the PTX ends within its entry"),
    (entry("bra NOWHERE;"), "no label"), (entry("add.s32 %r1, %r99, 1;"), "no variable '%r99' is known|no register"),
    (entry("mov.u32 %r1, 12x;"), "cannot read the number '12x'"),
    (entry("mov.b16 %h1, 1.5;"), "1.5 stands where a type of 16 bits"),
    (entry("@p9 mov.u32 %r1, 1;"), "'p9' is no register"), (entry("$$$;"), "cannot read")])
def test_ptx_that_cannot_be_read(text: str, message: str) -> None:
    from qdsl.analyze.execute import execute_ptx

    with pytest.raises(ExecutionError, match=message):
        execute_ptx(text, [("a", words(1)), ("b", words(1))], (1,), 1, 0)


def test_addresses_need_64_bits() -> None:
    """A tensor of 5 GB, of which a page exists: an offset that wraps at 32 bits is found at once."""
    large = torch.zeros(5 << 30, dtype=torch.int8)
    body = ("mov.u32 %r1, 1200000000; {} add.s64 %d10, %d10, %d0; add.u32 %r3, %r60, 9; mul.wide.u32 %d11, %r60, 4; "
            "add.s64 %d10, %d10, %d11; st.global.b32 [%d10], %r3;")
    run(body.format("mul.wide.u32 %d10, %r1, 4;"), large)
    assert large[4_800_000_000:4_800_000_128].view(torch.int32).tolist() == list(range(9, 41))
    wrapped = torch.zeros(1 << 20, dtype=torch.int8)
    with pytest.raises(ExecutionError, match="of 't0', which has 1048576"):
        run(body.format("mul.lo.u32 %r1, %r1, 4; cvt.u64.u32 %d10, %r1;"), wrapped)


def test_instructions_that_warps_issue() -> None:
    """Counted as the text says, where the loop that loads goes round 7 times; predicated off or not."""
    loop = ("LOOP: mul.wide.u32 %d10, %r60, 4; add.s64 %d10, %d10, %d0; ld.global.b32 %r3, [%d10]; add.u32 %r1, %r1, 1; "
            "setp.lt.u32 %p2, %r60, 3; @%p2 add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r1, {}; @%p1 bra LOOP;")
    execution = run("mov.u32 %r1, 0;" + loop.format(7), words(64), threads=64, programs=3)
    count = execution.program.instructions_per_thread
    assert execution.issued == 192 * count(7) == 192 * (count(1) + 6 * 8)
    assert execution.instructions == execution.issued - 3 * 7 * (64 - 3) - 3 * 64         # the last branch is not taken


def test_counts_of_sectors_and_banks() -> None:
    """A warp that loads words side by side touches 4 sectors; 32 words apart, 32 sectors, and as many passes over banks."""
    data = words(32 * 32)
    for step, sectors in ((4, 4), (8, 8), (128, 32)):
        body = f"mul.wide.u32 %d10, %r60, {step}; add.s64 %d10, %d10, %d0; ld.global.b32 %r3, [%d10];"
        counts = run(body, data, options=Options(counts=True)).memory
        assert (counts["load requests"], counts["load sectors"], counts["load bytes"]) == (1, sectors, 128)
    for step, passes in ((4, 1), (8, 2), (128, 32), (0, 1)):
        body = f"mul.lo.u32 %r1, %r60, {step}; st.shared.b32 [%r1], %r61;"
        assert run(body, data, shared=4096, options=Options(counts=True)).memory["shared store passes"] == passes
    wide = "mul.lo.u32 %r1, %r60, 16; st.shared.v4.b32 [%r1], {%r61, %r61, %r61, %r61};"
    assert run(wide, data, shared=4096, options=Options(counts=True)).memory["shared store passes"] == 4
