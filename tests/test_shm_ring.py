"""The ring in shared memory: whole messages, in order, for every reader, whatever the sizes and the speeds."""
import multiprocessing
import os
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minengine.processes import end_process, spawn
from minengine.shm_ring import (
    RingHandle, ShmRing, attach, may_read, may_write, read_chunk, split_message, wait_until, write_chunk)


def make(num_readers, **sizes):
    writer = ShmRing.create(num_readers, **sizes)
    return writer, [ShmRing(writer.handle, rank) for rank in range(num_readers)]


def drop(writer, readers):
    for reader in readers: reader.close()
    writer.unlink()
    writer.close()


@given(st.binary(max_size=50), st.integers(1, 60))
def test_a_message_is_its_parts(data, chunk_bytes):
    parts = split_message(data, chunk_bytes)
    assert b"".join(part for _, part in parts) == data
    assert all(len(part) <= chunk_bytes for _, part in parts)
    assert [to_come for to_come, _ in parts] == [len(data) - sum(len(p) for _, p in parts[:i + 1]) for i in range(len(parts))]


class Chunk(RuleBasedStateMachine):
    "One chunk, three readers, in any order: nobody reads twice, misses one, or sees half of one."
    def __init__(self):
        super().__init__()
        self.chunk, self.sent, self.got = memoryview(bytearray(64)), 0, [0, 0, 0]

    @precondition(lambda self: may_write(self.chunk, 3))
    @rule()
    def write(self):
        assert self.got == [self.sent] * 3   # nothing is overwritten that somebody has to read
        self.sent += 1
        write_chunk(self.chunk, 3, self.sent, bytes([self.sent % 256]) * (self.sent % 40))

    @rule(rank=st.integers(0, 2))
    def read(self, rank):
        if not may_read(self.chunk, rank):
            assert self.got[rank] == self.sent
            return
        self.got[rank] += 1
        assert read_chunk(self.chunk, 3, rank) == (self.sent, bytes([self.sent % 256]) * (self.sent % 40))

    @invariant()
    def flags_are_flags(self): assert set(bytes(self.chunk[:4])) <= {0, 1}


TestChunk = Chunk.TestCase
TestChunk.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=30), st.integers(1, 3), st.integers(1, 4), st.integers(1, 64), st.randoms())
def test_every_reader_gets_every_message_in_order(messages, num_readers, num_chunks, chunk_bytes, rng):
    "In threads; a ring may be much smaller than a message, and wraps around many times."
    writer, readers = make(num_readers, num_chunks=num_chunks, chunk_bytes=chunk_bytes)
    got = [[] for _ in readers]
    def read(rank):
        for _ in messages: got[rank].append(readers[rank].receive(timeout_s=30))
    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(num_readers)]
    for thread in threads: thread.start()
    for message in messages: assert writer.send(message, timeout_s=30) > len(message)
    for thread in threads: thread.join(30)
    assert got == [messages] * num_readers
    drop(writer, readers)


def test_a_slow_reader_holds_the_writer_back_and_loses_nothing():
    writer, (fast, slow) = make(2, num_chunks=3, chunk_bytes=64)
    for i in range(3):
        writer.send(i, timeout_s=1)
        assert fast.receive(timeout_s=1) == i
    with pytest.raises(TimeoutError): writer.send(3, timeout_s=0.01)
    assert slow.receive(timeout_s=1) == 0
    writer.send(3, timeout_s=1)   # the message that did not start at all did no harm
    assert [slow.receive(timeout_s=1) for _ in range(3)] == [1, 2, 3] and fast.receive(timeout_s=1) == 3
    with pytest.raises(TimeoutError): fast.receive(timeout_s=0.01)
    drop(writer, [fast, slow])


def test_a_message_that_was_cut_off_breaks_the_ring():
    writer, (reader,) = make(1, num_chunks=2, chunk_bytes=32)
    with pytest.raises(TimeoutError): writer.send(bytes(500), timeout_s=0.01)
    with pytest.raises(TimeoutError): reader.receive(timeout_s=0.01)
    for call in (lambda: writer.send(1), lambda: reader.receive()):
        with pytest.raises(RuntimeError, match="is broken"): call()
    drop(writer, [reader])


def test_what_cannot_be_pickled_is_refused_before_anything_is_written():
    writer, (reader,) = make(1)
    with pytest.raises(Exception, match="pickle"): writer.send(lambda: 0)
    writer.send("next", timeout_s=1)
    assert reader.receive(timeout_s=1) == "next"
    drop(writer, [reader])


def test_wrong_sides_and_sizes():
    writer, (reader,) = make(1)
    with pytest.raises(RuntimeError, match="a reader cannot send"): reader.send(1)
    with pytest.raises(RuntimeError, match="the writer cannot receive"): writer.receive()
    with pytest.raises(ValueError, match="rank 1 is not in 0..0"): ShmRing(writer.handle, 1)
    drop(writer, [reader])
    for sizes in (dict(num_readers=0), dict(num_readers=1, num_chunks=0), dict(num_readers=1, chunk_bytes=0)):
        with pytest.raises(ValueError, match="must be at least 1, got 0"): ShmRing.create(**sizes)
    with pytest.raises(FileNotFoundError): attach("psm_nobody")


@given(st.integers(1, 9), st.integers(1, 500))
def test_chunks_do_not_overlap(num_readers, chunk_bytes):
    stride = RingHandle("x", num_readers, 1, chunk_bytes).stride
    assert stride >= 1 + num_readers + 12 + chunk_bytes and stride % 64 == 0


def test_waiting_is_late_by_a_tenth_at_most(monkeypatch):
    "It spins, then sleeps a tenth of what it has waited, and asks `check` before each sleep."
    now, sleeps, checks = [0.0], [], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "sched_yield", lambda: now.__setitem__(0, now[0] + 1e-5), raising=False)
    def sleep(seconds):
        sleeps.append((now[0], seconds))
        now[0] += seconds or 1e-5
    monkeypatch.setattr(time, "sleep", sleep)
    wait_until(lambda: now[0] > 0.2, check=lambda: checks.append(now[0]))
    pauses = [s for s in sleeps if s[1]]
    assert len(pauses) == len(checks) and all(s <= max(at / 10, 1e-9) + 1e-12 and s <= 0.005 for at, s in pauses)
    assert now[0] <= 0.2 * 1.1 and len(pauses) < 120


# --- processes ------------------------------------------------------------------------

def arrays(seed, count):
    "int64 arrays of random lengths, about half of them larger than a chunk."
    rng = np.random.default_rng(seed)
    for _ in range(count): yield rng.integers(0, 1 << 40, rng.integers(1, 1000))


def read_arrays(handle, rank, count, ok):
    "In a process: compare with the same random numbers, at a pace of its own."
    ring, pace = ShmRing(handle, rank), random.Random(rank)
    ok.send("here")
    equal = True
    for wanted in arrays(7, count):
        equal &= bool(np.array_equal(ring.receive(timeout_s=60), wanted))
        if pace.random() < 0.05: time.sleep(0.001 * pace.random())
    ok.send(equal)


def test_processes_at_different_paces():
    "As vLLM's own test: every reader sees identical arrays in order, in place and in several chunks."
    count, (ours, theirs) = 600, multiprocessing.Pipe(duplex=False)
    writer = ShmRing.create(2, num_chunks=2, chunk_bytes=4096)
    readers = [spawn(read_arrays, f"reader-{rank}", (writer.handle, rank, count, theirs)) for rank in range(2)]
    try:
        for _ in readers: assert ours.poll(60) and ours.recv() == "here"
        writer.unlink()
        assert not os.path.exists(f"/dev/shm/{writer.handle.name}")
        for array in arrays(7, count): writer.send(array, timeout_s=60)
        for _ in readers: assert ours.poll(60) and ours.recv() is True
    finally:
        for reader in readers: end_process(reader, 5)
        writer.close()


def test_a_dead_reader_is_noticed_by_who_looks():
    "The ring waits for ever; `check` is how its user says that there is nobody to wait for."
    writer, readers = make(2, num_chunks=1, chunk_bytes=64)
    writer.send(0, timeout_s=1)
    def check(): raise RuntimeError("reader 1 is gone")
    with pytest.raises(RuntimeError, match="reader 1 is gone"): writer.send(1, check=check)
    drop(writer, readers)
