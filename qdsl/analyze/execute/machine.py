"""Runs the threads of a program: registers, the order of threads, barriers, findings and counts.

All threads of a batch of programs run in lockstep.  Diverged threads run lowest address first, so that they reconverge.  In other
orders one warp of each program runs alone until it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.analyze.execute.memory import Fault, GlobalMemory, Indices, InFlight
from qdsl.analyze.execute.numbers import UNSIGNED, Bits
from qdsl.analyze.execute.ptx import ExecutionError, Instruction, Program
from qdsl.analyze.execute.races import AccessingThreads, Clocks, ShadowMemory, is_ordered_in_program

WARP = 32
At = Indices | None                                              # executing threads; None is all
Step = Callable[["ThreadBatch", At], None]
FINDINGS = 100                                                   # the most per run


@dataclass(frozen=True, slots=True)
class Options:
    """The checks to do, and choices that hardware may make.

    races: unordered accesses.  written: reads of bytes that nothing wrote.  asynchronous: operands of copies and MMAs in flight.
    fragments: the same for registers of A, as ISA and PTX require; ptxas tracks these reads, and Triton relies on that.  counts:
    sectors and bank conflicts.  order: 'lockstep', 'reverse' (the last warp and program first), or a seed of a random order.
    sums: how matrix units add: 'exact', rounded once; 'truncated', products lose bits below the last place of the largest, with
    two more bits (FP8 of sm_90: 13 bits in all).  flush: matrix units read subnormals of 16 bits as zero.  steps: instructions
    per batch.
    """

    races: bool = True
    written: bool = True
    asynchronous: bool = True
    fragments: bool = False
    counts: bool = False
    order: str | int = "lockstep"
    sums: str = "exact"
    flush: bool = False
    steps: int = 5_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """Behaviour that hardware does not guarantee.  kind: race, unwritten, asynchronous, barrier, stores, dependent."""

    kind: str
    message: str
    instruction: str
    source: str
    program: tuple[int, int, int] = (0, 0, 0)
    thread: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}; thread {self.thread} of program {self.program}, {self.instruction}"


@dataclass(slots=True)
class RunLog:
    """The results of a run: findings, one per kind and instruction, and counts over all batches."""

    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    executed: Counter[int] = field(default_factory=Counter)      # threads, by instruction
    memory: Counter[str] = field(default_factory=Counter)
    issued: int = 0                                              # instructions times threads of the warps that reached them

    def add(self, finding: Finding) -> None:
        """Keep the first finding of its kind at its instruction, up to a maximum."""
        if len(self.findings) < FINDINGS:
            self.findings.setdefault((finding.kind, finding.instruction), finding)


class ThreadBatch:
    """The threads of some programs of a grid."""

    def __init__(self, program: Program, steps: Sequence[Step], memory: GlobalMemory, values: dict[str, bytes],
                 grid: tuple[int, int, int], programs: Sequence[int], warps: int, shared: int, options: Options, clocks: Clocks,
                 log: RunLog, state: dict[int, ShadowMemory]) -> None:
        self.program, self.steps, self.memory, self.values = program, steps, memory, values
        self.grid, self.options, self.clocks, self.log, self.global_shadows = grid, options, clocks, log, state
        self.per_program = WARP * warps
        self.count = len(programs) * self.per_program
        numbers = np.array(programs, np.int64)
        self.number = np.repeat(numbers, self.per_program)       # program number in the grid, per thread
        self.row = np.repeat(np.arange(len(programs)), self.per_program)
        self.thread = np.tile(np.arange(self.per_program, dtype=np.int64), len(programs))
        self.lane = self.thread % WARP
        self.warp = np.arange(self.count) // WARP
        self.registers: list[Bits] = [np.zeros(self.count, bool if bits == 1 else UNSIGNED[bits]) for bits in program.registers]
        self.shared_bytes = -(-max(shared, program.shared_bytes, 16) // 16) * 16
        self.shared = np.random.default_rng(1).integers(0, 256, len(programs) * self.shared_bytes, np.uint8)
        self.shared_written = np.zeros(len(self.shared), bool)
        self.granule = program.granules["shared"]
        self.shared_shadow = ShadowMemory(len(self.shared) // self.granule) if options.races else None
        self.epoch = np.zeros(self.count, np.int64)              # barriers of each thread's program
        self.warp_epoch = np.zeros(self.count, np.int64)
        self.fences = np.zeros(self.count, np.int64)             # proxy fences of each thread
        self.carry = np.zeros(self.count, bool)
        self.current: Instruction | None = None
        self.in_flight: set[int] = set()                         # registers that MMAs in flight write or read
        self.copies, self.products = (InFlight(self.count, len(self.shared)) for _ in range(2))
        self.fenced = np.full(self.count, -1, np.int64)          # barriers before a thread's last fence without a later store
        self.relaxed = np.full(self.count, -1, np.int64)         # a thread's last atomic
        self.waited = np.zeros(self.count, bool)                 # for the previous launch
        self.wait_epoch = np.full(len(programs), np.iinfo(np.int64).max)     # barriers before a program's first such wait
        self.has_products = any(instruction.name == "wgmma" for instruction in program.instructions)
        self.time = 0
        self.changed: dict[int, Indices] = {}                    # when each warp last wrote a register, and fenced all
        self.ordered = np.zeros(self.count // WARP, np.int64)
        self.proxy_writer = np.full(len(self.shared) // self.granule, -1, np.int64)
        self.proxy_fence = np.zeros(len(self.shared) // self.granule, np.int64)
        self.random = np.random.default_rng(options.order if isinstance(options.order, int) else 0)
        self._special: dict[str, NDArray[np.uint32]] = {}

    # -- what instructions use ---------------------------------------------------------------------------------------------

    def lanes(self, at: At) -> Indices:
        """The indices of executing threads; all for None."""
        return np.arange(self.count) if at is None else at

    def special_register(self, name: str) -> NDArray[np.uint32]:
        """A special register, a value per thread.  Raises ExecutionError."""
        if name not in self._special:
            x, y, _ = self.grid
            place = {"x": self.number % x, "y": self.number // x % y, "z": self.number // (x * y)}
            base, _, axis = name.partition(".")
            ones = np.ones(self.count, np.int64)
            values = {
                "%tid": self.thread if axis == "x" else 0 * ones, "%ntid": self.per_program * ones if axis == "x" else ones,
                "%ctaid": place.get(axis), "%nctaid": dict(zip("xyz", self.grid, strict=True)).get(axis, 0) * ones,
                "%laneid": self.lane, "%warpid": self.thread // WARP, "%clusterid": place.get(axis), "%cluster_ctaid": 0 * ones,
                "%cluster_ctarank": 0 * ones, "%nclusterid": dict(zip("xyz", self.grid, strict=True)).get(axis, 0) * ones,
                "%cluster_nctaid": ones, "%cluster_nctarank": ones, "%lanemask_lt": (1 << self.lane) - 1,
                "%lanemask_le": (2 << self.lane) - 1, "%lanemask_eq": 1 << self.lane,
                "%lanemask_gt": 0xFFFF_FFFF - ((2 << self.lane) - 1), "%lanemask_ge": 0xFFFF_FFFF - ((1 << self.lane) - 1),
            }.get(base)
            if values is None:
                raise ExecutionError(f"{self.current}: no register '{name}' is known")
            self._special[name] = np.asarray(values).astype(np.uint32)
        return self._special[name]

    def has_waited(self, lanes: Indices) -> NDArray[np.bool_]:
        """Whether the previous launch has ended for threads: they waited for it, or another thread did before a barrier."""
        return self.waited[lanes] | (self.epoch[lanes] > self.wait_epoch[self.row[lanes]])

    def who(self, lanes: Indices) -> AccessingThreads:
        """These threads as race detection compares them: program, thread, and barriers passed."""
        return AccessingThreads(self.number[lanes], self.thread[lanes], self.epoch[lanes], self.warp_epoch[lanes])

    def report(self, kind: str, message: str, lane: int) -> None:
        """Note a finding of a thread of the batch at the current instruction."""
        x, y, _ = self.grid
        number = int(self.number[lane])
        instruction = self.current
        self.log.add(Finding(kind, message, str(instruction), instruction.source if instruction else "",
                             (number % x, number // x % y, number // (x * y)), int(self.thread[lane])))

    def warps_of(self, at: At) -> int:
        """The number of warps of some threads."""
        return self.count // WARP if at is None else 1 + int(np.count_nonzero(np.diff(self.warp[at])))

    def whole_warps(self, at: At) -> Indices:
        """Executing lanes as [warps, 32].  Raises ExecutionError if part of a warp is missing."""
        lanes = self.lanes(at)
        if len(lanes) % WARP == 0:
            warps = lanes.reshape(-1, WARP)
            if (warps[:, 0] % WARP == 0).all() and (warps == warps[:, :1] + np.arange(WARP)).all():
                return warps
        raise ExecutionError(f"{self.current}: lanes of a warp are missing")

    # -- shared memory -----------------------------------------------------------------------------------------------------

    def shared_indices(self, lanes: Indices, address: Indices, size: int, what: str) -> Indices:
        """Places in the shared memory of all programs.  Raises Fault."""
        misaligned = address % size != 0
        outside = (address < 0) | (address + size > self.shared_bytes)
        if misaligned.any():
            place = int(misaligned.argmax())
            raise Fault(f"{what} of {size} shared bytes at {int(address[place])}, which {size} does not divide", place)
        if outside.any():
            place = int(outside.argmax())
            raise Fault(f"{what} of {size} bytes at {int(address[place])} of {self.shared_bytes} shared bytes", place)
        return self.row[lanes] * self.shared_bytes + address

    def check_shared_access(self, lanes: Indices, place: Indices, size: int, data: Bits | None = None) -> None:
        """Check an access of shared memory against earlier ones.  data: the bytes [lanes, size] to write."""
        write = data is not None
        if self.options.written:
            spread = (place[:, None] + np.arange(size)).reshape(-1) if size > 1 else place
            if write:
                self.shared_written[spread] = True
            elif not (is_written := self.shared_written[spread]).all():
                lane = int(np.flatnonzero(~is_written)[0]) // size
                byte = int(place[lane] % self.shared_bytes)
                self.report("unwritten", f"reads shared byte {byte} before anyone wrote it", int(lanes[lane]))
        if self.shared_shadow is not None:
            times = max(1, size // self.granule)
            granules = place // self.granule
            if times > 1:
                granules = (granules[:, None] + np.arange(times)).reshape(-1)
            who = self.who(lanes).repeated(times)
            race = self.shared_shadow.record_read(granules, who, is_ordered_in_program) if data is None else \
                self.shared_shadow.record_write(granules, who, is_ordered_in_program, lambda: (
                    self.shared[place[:, None] + np.arange(size)] != data).reshape(len(granules), -1).any(1))
            if write and self.has_products:
                self.proxy_writer[granules] = np.repeat(lanes, times)
                self.proxy_fence[granules] = np.repeat(self.fences[lanes], times)
            if race.any():
                which = int(np.flatnonzero(race)[0])
                byte = int(granules[which] * self.granule % self.shared_bytes)
                self.report("race", f"{'writes' if write else 'reads'} shared byte {byte} with no barrier after another "
                            "thread's access", int(lanes[which // times]))

    # -- products of warp groups, which read by another proxy and whose registers need a fence -----------------------------------

    def check_matrix_reads(self, groups: Indices, places: Indices, size: int) -> None:
        """Check the reads of warp groups [groups, 128] at places [groups, elements] of shared memory."""
        for lanes, place in zip(groups, places, strict=True):
            granules = np.unique((place[:, None] + np.arange(0, size, min(size, self.granule))) // self.granule)
            first = granules * self.granule
            for lane in lanes[[0, WARP]]:                        # two warps represent all
                self.check_shared_access(np.full(len(first), lane), first, self.granule)
            writer = self.proxy_writer[granules]
            missing = (writer >= 0) & (self.fences[writer] <= self.proxy_fence[granules])
            if self.options.races and missing.any():
                self.report("race", "a matrix product reads shared memory that was written without fence.proxy.async after it",
                            int(writer[int(np.flatnonzero(missing)[0])]))

    def check_ordered_registers(self, lanes: Indices, slots: frozenset[int]) -> None:
        """Find registers of a product that were written since the last wgmma.fence."""
        warps = np.unique(self.warp[lanes])
        for slot in slots & self.changed.keys():
            if (self.changed[slot][warps] > self.ordered[warps]).any():
                self.report("asynchronous", "a matrix product uses a register that was written without wgmma.fence after it",
                            int(lanes[0]))
                return

    # -- running -----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all threads to their end.  Raises ExecutionError for an unknown opcode, a fault, or a deadlock."""
        try:
            with np.errstate(all="ignore"):
                _Scheduler(self).run()
        except Fault as fault:
            lane = fault.place
            raise ExecutionError(f"{self.current}: {fault}; thread {int(self.thread[lane])} of program "
                                 f"{int(self.number[lane])}") from fault

    def execute_instruction(self, place: int, at: At) -> None:
        """Executes one instruction for some threads.  Raises Fault with the thread."""
        instruction = self.current = self.program.instructions[place]
        if self.in_flight and instruction.name != "wgmma" and self.in_flight & self.program.touched[place]:
            self.report("asynchronous", "touches a register of a matrix product that was not waited for", int(self.lanes(at)[0]))
        try:
            self.steps[place](self, at)
        except Fault as fault:
            raise Fault(str(fault), int(self.lanes(at)[fault.place])) from fault
        if self.has_products and self.options.asynchronous and instruction.name not in ("wgmma", "st"):
            self.time += 1
            warps = slice(None) if at is None else np.unique(self.warp[at])
            for slot in self.program.written[place]:
                self.changed.setdefault(slot, np.zeros(len(self.ordered), np.int64))[warps] = self.time


class _Scheduler:
    """Chooses the threads to run next; executes branches, exits and barriers itself."""

    def __init__(self, batch: ThreadBatch) -> None:
        self.batch = batch
        self.counter = np.zeros(batch.count, np.int64)           # the next instruction of each thread
        self.alive = np.ones(batch.count, bool)
        self.waits = np.full(batch.count, -1, np.int64)          # the barrier at which a thread waits
        self.uniform: int | None = 0 if batch.options.order == "lockstep" else None      # all threads are at this instruction
        self.unit = batch.thread // (4 * WARP if batch.has_products else WARP)       # a unit that runs alone: warp, or warp group
        units = int(self.unit.max()) + 1
        self.turns = None if batch.options.order == "lockstep" else list(range(units))[::-1] if batch.options.order == "reverse" \
            else batch.random.permutation(units).tolist()

    def run(self) -> None:
        batch, instructions = self.batch, self.batch.program.instructions
        executed = batch.log.executed
        for _ in range(batch.options.steps):
            place, at = self.next_threads()
            if place < 0:
                return
            if place >= len(instructions):
                raise ExecutionError("threads run past the last instruction of the entry")
            instruction = instructions[place]
            active = self.active_threads(instruction, at)
            executed[place] += batch.count if active is None else len(active)
            batch.log.issued += WARP * batch.warps_of(at)
            if instruction.name == "bra":
                self.execute_branch(instruction, place, at, active)
            elif instruction.name in ("ret", "exit"):
                self.exit_threads(place, at, active)
            elif instruction.name in ("bar", "barrier") and "warp" not in instruction.modifiers:
                batch.current = instruction
                self.wait_at_barrier(instruction, place, at, active)
            else:
                if active is None or len(active):
                    batch.execute_instruction(place, active)
                self.advance_threads(place, at)
        raise ExecutionError(f"{batch.current}: more than {batch.options.steps} instructions; does a loop never end?")

    def next_threads(self) -> tuple[int, At]:
        """The next instruction and the threads at it; -1 when all have ended."""
        if self.uniform is not None:
            return self.uniform, None
        ready = self.alive & (self.waits < 0)
        if not ready.any():
            return -1, None                                      # none waits: the last arrival opens a barrier
        if self.turns is not None:
            ready &= self.unit == next(turn for turn in self.turns if (ready & (self.unit == turn)).any())
        place = int(self.counter[ready].min())
        here = ready & (self.counter == place)
        return place, None if here.all() else np.flatnonzero(here)

    def active_threads(self, instruction: Instruction, at: At) -> At:
        """The threads whose predicate holds."""
        if instruction.predicate is None:
            return at
        holds = self.batch.registers[instruction.predicate.slot]
        holds = holds if at is None else holds[at]
        holds = ~holds if instruction.negated else holds
        return at if holds.all() else np.flatnonzero(holds) if at is None else at[holds]

    def advance_threads(self, place: int, at: At) -> None:
        if self.uniform is not None:
            self.uniform = place + 1
        else:
            self.counter[slice(None) if at is None else at] = place + 1
            self.meet()

    def meet(self) -> None:
        """Run in lockstep again if all threads are at one instruction."""
        if self.turns is None and (self.counter == self.counter[0]).all() and self.alive.all() and (self.waits < 0).all():
            self.uniform = int(self.counter[0])

    def part(self, place: int) -> None:
        if self.uniform is not None:
            self.counter[:] = place
            self.uniform = None

    def execute_branch(self, instruction: Instruction, place: int, at: At, active: At) -> None:
        target = self.batch.program.labels[instruction.operands[-1].name]  # type: ignore[union-attr]
        if self.uniform is not None and (active is None or not len(active)):
            self.uniform = target if active is None else place + 1
            return
        self.part(place)
        self.counter[slice(None) if at is None else at] = place + 1
        self.counter[slice(None) if active is None else active] = target
        self.meet()

    def exit_threads(self, place: int, at: At, active: At) -> None:
        self.part(place)
        self.counter[slice(None) if at is None else at] = place + 1
        self.alive[slice(None) if active is None else active] = False
        self.release_programs()

    def wait_at_barrier(self, instruction: Instruction, place: int, at: At, active: At) -> None:
        """bar.sync: every live thread of a program waits for the others."""
        batch = self.batch
        if instruction.modifiers[:1] not in (("sync",), ("cta",)) or len(instruction.operands) != 1:
            raise ExecutionError(f"{instruction}: only bar.sync of all threads is known")
        batch.whole_warps(active)                                # aligned: all lanes of a warp are at the same barrier
        if self.uniform is not None and active is None:
            batch.epoch += 1
            self.uniform = place + 1
            return
        self.part(place)
        self.counter[slice(None) if at is None else at] = place + 1
        self.waits[slice(None) if active is None else active] = place
        self.release_programs()

    def release_programs(self) -> None:
        """Release programs whose live threads all wait."""
        batch = self.batch
        waiting = (self.waits >= 0).reshape(-1, batch.per_program)
        complete: Any = (waiting | ~self.alive.reshape(waiting.shape)).all(1) & waiting.any(1)
        if complete.any():
            mine = complete[batch.row]
            ended = mine & ~self.alive
            if ended.any():
                batch.report("barrier", "waits for threads that have ended", int(np.flatnonzero(mine & self.alive)[0]))
            batch.epoch[mine] += 1
            self.waits[mine] = -1
        self.meet()
