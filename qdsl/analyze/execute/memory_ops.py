"""Instructions that access memory: loads, stores, atomics, fences, and the wait for the previous launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qdsl.analyze.execute.machine import WARP, At, Step, ThreadBatch
from qdsl.analyze.execute.memory import Allocation, Indices
from qdsl.analyze.execute.numbers import SIGNED, UNSIGNED, Bits, decode, encode, is_float
from qdsl.analyze.execute.operands import Context, broadcast, element, joined, opcode, split_pairs
from qdsl.analyze.execute.ptx import Address, Symbol, type_bits
from qdsl.analyze.execute.races import ShadowMemory

SECTOR, BANKS = 32, 32                                           # bytes; banks of 4 bytes


@opcode("ld", "ldu")
def load(context: Context) -> Step:
    """Loads from a space of memory, or from the parameters."""
    kind, modifiers = context.kind, context.modifiers
    bits = type_bits(kind)
    if "param" in modifiers:
        return _load_parameter(context, bits)
    puts = context.targets(0)
    widths = [getattr(part, "bits", bits) for part in getattr(context.operand(0), "parts", (context.operand(0),))]
    address, size = context.address(1), bits // 8 * len(puts)
    read = shared_load if "shared" in modifiers else global_load
    acquire = bool({"acquire"} & modifiers)
    if {"local", "const"} & modifiers:
        raise context.unknown("its state space is not known")

    def step(batch: ThreadBatch, at: At) -> None:
        lanes, place = batch.lanes(at), address(batch, at)
        data = np.ascontiguousarray(read(batch, lanes, place, size)).view(UNSIGNED[bits]).reshape(len(lanes), len(puts))
        for column, (put, width) in enumerate(zip(puts, widths, strict=True)):
            value = data[:, column]
            if kind[0] == "s" and width > bits:
                value = value.view(SIGNED[bits]).astype(SIGNED[width])
            put(batch, at, np.ascontiguousarray(value))
        if acquire:
            _acquire(batch, lanes, place)
    return step


def _load_parameter(context: Context, bits: int) -> Step:
    """A parameter, the same in all threads."""
    operand = context.operand(1)
    if not isinstance(operand, Address) or not isinstance(operand.base, Symbol):
        raise context.unknown("an operand is no parameter")
    if operand.base.name not in context.program.parameters:
        raise context.unknown(f"no parameter '{operand.base.name}'")
    name, first, puts = operand.base.name, operand.offset, context.targets(0)

    def step(batch: ThreadBatch, at: At) -> None:
        for number, put in enumerate(puts):
            start = first + number * bits // 8
            value = np.frombuffer(batch.values[name][start:start + bits // 8], UNSIGNED[bits])
            put(batch, at, np.repeat(value, len(batch.lanes(at))))
    return step


@opcode("st")
def store(context: Context) -> Step:
    """Stores to a space of memory."""
    bits, modifiers = type_bits(context.kind), context.modifiers
    sources, address = context.sources(1, bits), context.address(0)
    size = bits // 8 * len(sources)
    if {"local", "const", "param"} & modifiers:
        raise context.unknown("its state space is not known")
    write = shared_store if "shared" in modifiers else global_store

    def step(batch: ThreadBatch, at: At) -> None:
        lanes, place = batch.lanes(at), address(batch, at)
        values = broadcast(batch, at, [source(batch, at) for source in sources])
        data = values[0][:, None] if len(values) == 1 else np.stack(values, 1)
        if "release" in modifiers:
            _release(batch, lanes, place, batch.epoch[lanes])
        write(batch, lanes, place, np.ascontiguousarray(data).view(np.uint8).reshape(len(lanes), size))
    return step


# -- shared memory -------------------------------------------------------------------------------------------------------


def shared_load(batch: ThreadBatch, lanes: Indices, address: Indices, size: int) -> Bits:
    """Bytes as rows of words.  Raises Fault."""
    place = batch.shared_indices(lanes, address, size, "a load")
    batch.check_shared_access(lanes, place, size)
    if batch.options.counts:
        count_banks(batch, lanes, address, size, "shared load")
    word = min(size, 8)
    rows = batch.shared.view(UNSIGNED[8 * word])[(place // word)[:, None] + np.arange(size // word)] if size > 8 else \
        batch.shared.view(UNSIGNED[8 * word])[place // word][:, None]
    check_in_flight(batch, lanes, place, size, "reads")
    return rows


def shared_store(batch: ThreadBatch, lanes: Indices, address: Indices, data: Bits) -> None:
    """Store rows of bytes.  Raises Fault."""
    size = data.shape[1]
    place = batch.shared_indices(lanes, address, size, "a store")
    check_in_flight(batch, lanes, place, size, "writes")
    batch.check_shared_access(lanes, place, size, data)
    if batch.options.counts:
        count_banks(batch, lanes, address, size, "shared store")
    word = min(size, 8)
    batch.shared.view(UNSIGNED[8 * word])[(place // word)[:, None] + np.arange(size // word)] = \
        data.view(UNSIGNED[8 * word]).reshape(len(lanes), -1)
    if batch.options.races and (overwritten := (batch.shared[place[:, None] + np.arange(size)] != data).any(1)).any():
        batch.report("race", "threads store different values at one place", int(lanes[int(np.flatnonzero(overwritten)[0])]))


def check_in_flight(batch: ThreadBatch, lanes: Indices, place: Indices, size: int, verb: str) -> None:
    """Note accesses of bytes that an asynchronous copy will write, and writes of bytes that an MMA will read."""
    for title, flight in (("copies", batch.copies), ("products", batch.products))[:1 if verb == "reads" else 2]:
        if batch.options.asynchronous and flight.pending and (hit := flight.touches(place, size)).any():
            lane = int(lanes[int(np.flatnonzero(hit)[0])])
            batch.report("asynchronous", f"{verb} shared memory of {title} in flight that were not waited for", lane)


# -- global memory -------------------------------------------------------------------------------------------------------


def global_load(batch: ThreadBatch, lanes: Indices, address: Indices, size: int) -> Bits:
    """Bytes as rows of words.  Raises Fault."""
    if batch.options.counts:
        count_sectors(batch, lanes, address, size, "load")
    word = min(size, 8)
    out = np.empty((len(lanes), size // word), UNSIGNED[8 * word])
    for allocation, chosen, offset in batch.memory.locate_accesses(address, size, "a load"):
        _check_global_access(batch, allocation, lanes if chosen is None else lanes[chosen], offset, size)
        words, index = allocation.as_words(allocation.data, offset, size)
        if chosen is None:
            return words[index]
        out[chosen] = words[index]
    return out


def global_store(batch: ThreadBatch, lanes: Indices, address: Indices, data: Bits) -> None:
    """Store rows of bytes.  Raises Fault."""
    size = data.shape[1]
    if batch.options.counts:
        count_sectors(batch, lanes, address, size, "store")
    batch.fenced[lanes] = -1
    for allocation, chosen, offset in batch.memory.locate_accesses(address, size, "a store"):
        some, rows = (lanes, data) if chosen is None else (lanes[chosen], data[chosen])
        _check_global_access(batch, allocation, some, offset, size, rows)
        words, index = allocation.as_words(allocation.data, offset, size)
        words[index] = rows.view(words.dtype)


def _check_global_access(batch: ThreadBatch, allocation: Allocation, lanes: Indices, offset: Indices, size: int,
                         data: Bits | None = None) -> None:
    """Check an access against earlier ones.  data: the bytes to write."""
    write = data is not None
    if batch.memory.is_dependent:
        check_dependent(batch, allocation, lanes, offset, size, write)
    if write and allocation.stores is not None:
        words, index = allocation.as_words(allocation.stores, offset, size)
        np.add.at(words, index.reshape(-1), _ones(words))
    if allocation.written is None:
        if write and batch.memory.outputs:
            batch.report("stores", f"stores to {allocation.byte_name(offset[0])}, which is no output", int(lanes[0]))
        return
    words, index = allocation.as_words(allocation.written, offset, size)
    if write:
        words[index] = _ones(words)
    elif batch.options.written and (missing := (words[index] != _ones(words)).any(1)).any():
        which = int(np.flatnonzero(missing)[0])
        batch.report("unwritten", f"reads {allocation.byte_name(offset[which])} before anyone wrote it", int(lanes[which]))
    if batch.options.races:
        _check_race(batch, allocation, lanes, offset, size, data)


def _ones(words: Bits) -> Any:
    """A word whose bytes are all 1."""
    return words.dtype.type(int.from_bytes(bytes([1]) * words.itemsize))


def _check_race(batch: ThreadBatch, allocation: Allocation, lanes: Indices, offset: Indices, size: int,
                data: Bits | None) -> None:
    granule = batch.program.granules["global"]
    shadow = batch.global_shadows.get(allocation.start)
    if shadow is None:
        shadow = batch.global_shadows[allocation.start] = ShadowMemory(len(allocation.data) // granule + 2)
    times = max(1, size // granule)
    place = (offset + allocation.start % granule) // granule
    place = (place[:, None] + np.arange(times)).reshape(-1) if times > 1 else place
    who = batch.who(lanes).repeated(times)
    if data is None:
        race = shadow.record_read(place, who, batch.clocks.is_ordered)
    else:
        race = shadow.record_write(place, who, batch.clocks.is_ordered, lambda: (
            allocation.data[offset[:, None] + np.arange(size)] != data).reshape(len(place), -1).any(1))
    if race.any():
        which = int(np.flatnonzero(race)[0]) // times
        batch.report("race", f"{'reads' if data is None else 'writes'} {allocation.byte_name(offset[which])} "
                     "with nothing that orders it after another thread's access", int(lanes[which]))


def check_dependent(batch: ThreadBatch, allocation: Allocation, lanes: Indices, offset: Indices, size: int, write: bool) -> None:
    """Note a store before the wait for the previous launch, or a load of data that the previous launch writes."""
    early = ~batch.has_waited(lanes)
    if not write:
        early &= np.any([(offset < end) & (offset + size > first) for first, end in allocation.before], axis=0)
    if early.any():
        which = int(np.flatnonzero(early)[0])
        what = "stores to" if write else "loads"
        batch.report("dependent", f"{what} {allocation.byte_name(offset[which])} before griddepcontrol.wait", int(lanes[which]))


# -- counts ----------------------------------------------------------------------------------------------------------------


def _group_by_warp(batch: ThreadBatch, lanes: Indices, values: Indices) -> Indices:
    """Values as [warps, 32 * columns]; inactive lanes repeat an active one."""
    warp = batch.warp[lanes]
    first = np.r_[True, warp[1:] != warp[:-1]]
    group = np.cumsum(first) - 1
    columns = values.shape[1]
    table = np.repeat(values[first][:, :1], WARP * columns, 1).reshape(-1, WARP, columns)
    table[group, lanes % WARP] = values
    return table.reshape(len(table), -1)


def _distinct(table: Indices) -> Indices:
    ordered = np.sort(table, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)


def count_sectors(batch: ThreadBatch, lanes: Indices, address: Indices, size: int, what: str) -> None:
    """Count the 32-byte sectors of global memory that a warp's request touches."""
    counts = batch.log.memory
    sectors = _distinct(_group_by_warp(batch, lanes, (address // SECTOR)[:, None]))
    counts[f"{what} requests"] += len(sectors)
    counts[f"{what} sectors"] += int(sectors.sum())
    counts[f"{what} bytes"] += len(lanes) * size


def count_banks(batch: ThreadBatch, lanes: Indices, address: Indices, size: int, what: str) -> None:
    """Count passes over shared memory: the number of different words in a bank, by quarters of a warp for 16-byte accesses."""
    words = (address // 4)[:, None] + np.arange(max(1, size // 4))
    table = _group_by_warp(batch, lanes, words).reshape(-1, WARP, words.shape[1])
    share = WARP * 4 // max(4, size) if size > 4 else WARP
    passes = 0
    for start in range(0, WARP, share):
        some = np.sort(table[:, start:start + share].reshape(len(table), -1), axis=1)
        fresh = np.c_[np.ones((len(some), 1), bool), some[:, 1:] != some[:, :-1]]
        bank = np.zeros((len(some), BANKS), np.int64)
        rows = np.broadcast_to(np.arange(len(some))[:, None], some.shape)
        np.add.at(bank, (rows[fresh], some[fresh] % BANKS), 1)
        passes += int(bank.max(1).sum())
    batch.log.memory[f"{what} requests"] += len(table)
    batch.log.memory[f"{what} passes"] += passes
    batch.log.memory[f"{what} ideal passes"] += len(table) * (WARP // share)


# -- atomics and fences ----------------------------------------------------------------------------------------------------


def _release(batch: ThreadBatch, lanes: Indices, address: Indices, epoch: Indices) -> None:
    """Publish the order of a program's earlier accesses at an address, for programs that acquire it there."""
    for lane, place, before in zip(lanes.tolist(), address.tolist(), epoch.tolist(), strict=True):
        batch.clocks.release(place, int(batch.number[lane]), int(batch.thread[lane]), before)


def _acquire(batch: ThreadBatch, lanes: Indices, address: Indices) -> None:
    for lane, place in zip(lanes.tolist(), address.tolist(), strict=True):
        batch.clocks.acquire(place, int(batch.number[lane]), int(batch.thread[lane]), int(batch.epoch[lane]))


ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: old + value, "min": min, "max": max, "and": lambda old, value: old & value,
    "or": lambda old, value: old | value, "xor": lambda old, value: old ^ value, "exch": lambda old, value: value,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1}


@opcode("atom", "red")
def atomic(context: Context) -> Step:
    """Executes an atomic thread by thread, and element by element: in order, or in a random order if the batch has one."""
    kind, modifiers, first = context.kind, context.modifiers, 1 if context.instruction.name == "red" else 2
    size, combine = type_bits(kind) // 8, _atomic_function(context)
    address, is_shared = context.address(first - 1), "shared" in modifiers
    vectors = [context.sources(place, 8 * size) for place in range(first, len(context.instruction.operands))]
    puts = context.targets(0) if first == 2 else []
    orders = not is_shared and "cta" not in modifiers            # programs
    acquire, release = bool({"acquire", "acq_rel"} & modifiers), bool({"release", "acq_rel"} & modifiers)

    def step(batch: ThreadBatch, at: At) -> None:
        lanes, place = batch.lanes(at), address(batch, at)
        parts = [broadcast(batch, at, [source(batch, at) for source in part]) for part in zip(*vectors, strict=True)]
        results = np.zeros((len(parts), len(lanes)), UNSIGNED[8 * size])
        order = np.arange(len(lanes)) if batch.options.order == "lockstep" else batch.random.permutation(len(lanes))
        for number in order:
            one = slice(number, number + 1)
            lane, target = lanes[one], place[one]
            if orders and (release or batch.fenced[lane[0]] >= 0):
                _release(batch, lane, target, batch.epoch[lane] if release else batch.fenced[lane])
            if len(parts) > 1 and not is_shared:
                batch.memory.locate_accesses(target, size * len(parts), "an atomic")
            for column, part in enumerate(parts):
                words, index = _atomic_word(batch, lane, target + column * size, size, is_shared)
                results[column, number] = words[index][0]
                words[index] = combine(words[index], [value[one] for value in part])
            if orders:
                batch.relaxed[lane] = target
                if acquire:
                    _acquire(batch, lane, target)
        for put, result in zip(puts, results, strict=False):
            put(batch, at, result)
    return step


def _atomic_function(context: Context) -> Callable[[Bits, list[Bits]], Bits]:
    """The function of an atomic: the value to store, from the old one and the operands."""
    kind, bits, part = context.kind, type_bits(context.kind), element(context.kind)
    operation = next((name for name in (*ATOMIC, "cas") if name in context.modifiers), None)
    if operation is None:
        raise context.unknown()

    def combine(old: Bits, values: list[Bits]) -> Bits:
        if operation == "cas":
            return np.where(old == values[0], values[1], old)
        if is_float(part):
            x, y = decode(split_pairs(old, kind), part), decode(split_pairs(values[0], kind), part)
            return joined(encode((x.astype(np.float64) + y) if operation == "add" else
                                 {"min": np.fmin, "max": np.fmax}[operation](x, y), part), kind)
        view = SIGNED[bits] if kind[0] == "s" else UNSIGNED[bits]
        value = ATOMIC[operation](int(old.view(view)[0]), int(values[0].view(view)[0]))
        return np.array([value & ((1 << bits) - 1)], UNSIGNED[bits])
    return combine


def _atomic_word(batch: ThreadBatch, lane: Indices, address: Indices, size: int, is_shared: bool) -> tuple[Any, Indices]:
    """Memory as words, and the index of the word that a thread's atomic changes.  Raises Fault."""
    if is_shared:
        place = batch.shared_indices(lane, address, size, "an atomic")
        batch.shared_written[place[0]:place[0] + size] = True
        return batch.shared.view(UNSIGNED[8 * size]), place // size
    ((allocation, _, offset),) = batch.memory.locate_accesses(address, size, "an atomic")
    if batch.memory.is_dependent:
        check_dependent(batch, allocation, lane, offset, size, write=True)
    for marks in (allocation.written, allocation.stores):
        if marks is not None:
            marks[offset[0]:offset[0] + size] = 1
    words, index = allocation.as_words(allocation.data, offset, size)
    return words, index[:, 0]


@opcode("prefetch")
def prefetch(context: Context) -> Step:
    """Prefetches a line of memory; not a read, so the previous launch may still write it.  Raises Fault."""
    address = context.address(0)
    if "global" not in context.modifiers:
        return lambda batch, at: None

    def step(batch: ThreadBatch, at: At) -> None:
        batch.memory.locate_accesses(address(batch, at), 1, "a prefetch")
    return step


@opcode("fence", "membar")
def fence(context: Context) -> Step:
    """A proxy fence, or a fence that turns relaxed atomics before and after it into release and acquire."""
    if "proxy" in context.modifiers:
        if "async" not in context.modifiers:
            raise context.unknown()

        def proxy(batch: ThreadBatch, at: At) -> None:
            batch.fences[batch.lanes(at)] += 1
        return proxy
    if "cta" in context.modifiers:
        return lambda batch, at: None

    def step(batch: ThreadBatch, at: At) -> None:
        lanes = batch.lanes(at)
        batch.fenced[lanes] = batch.epoch[lanes]
        done = lanes[batch.relaxed[lanes] >= 0]
        _acquire(batch, done, batch.relaxed[done])
    return step


@opcode("griddepcontrol")
def dependent_launch(context: Context) -> Step:
    """wait: the previous launch has ended, and its writes are visible.  launch_dependents: the next launch may begin."""
    context.only("wait", "launch_dependents")
    if "wait" not in context.modifiers:
        return lambda batch, at: None

    def wait(batch: ThreadBatch, at: At) -> None:
        lanes = batch.lanes(at)
        batch.waited[lanes] = True
        np.minimum.at(batch.wait_epoch, batch.row[lanes], batch.epoch[lanes])
    return wait
