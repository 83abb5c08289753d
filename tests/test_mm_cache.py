"""Caches of processed images: who goes, what is pinned, and two sides that never disagree."""
import random
import threading
from collections import deque

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minengine.multimodal.cache import (
    MirroredCacheReceiver, MirroredCacheSender, MultiModalCacheMiss, ProcessorCache, commit_entries, item_nbytes,
    plan_entries)
from minengine.sampling_params import SamplingParams
from minengine.v1.engine.wire import FrameType, WireError, decode, encode
from minengine.v1.messages import EngineCoreRequest, PlaceholderRange

NAMES = "ABCDEFGH"


def item(name: str, num_bytes: int) -> dict:
    "An image of a size whose numbers say whose they are."
    return {"pixel_values": torch.full((num_bytes,), ord(name[0]), dtype=torch.uint8)}


def request(names, size_of, req_id="r") -> EngineCoreRequest:
    places = [PlaceholderRange(i, 1) for i in range(len(names))]
    return EngineCoreRequest(req_id, None, [1] * (len(names) + 1), SamplingParams(), None, 0.0,
                             [item(n, size_of[n]) for n in names], list(names), places)


def is_whole(message: EngineCoreRequest, names, size_of):
    assert message.mm_hashes == list(names)
    for name, got in zip(names, message.mm_inputs, strict=True):
        assert torch.equal(got["pixel_values"], item(name, size_of[name])["pixel_values"]), name


def travel(message: EngineCoreRequest) -> EngineCoreRequest:
    "As bytes, and back."
    return decode([bytes(frame) for frame in encode(FrameType.ADD, message)])[1]


# Plain data.

def test_bytes_of_an_item():
    assert item_nbytes({}) == 0
    assert item_nbytes({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.uint8)}) == 24 + 5
    assert item_nbytes({"a": 7, "b": [1, 2, 3], "c": (1,)}) == 8 * 5


sizes = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 12), max_size=8)


@settings(max_examples=300, deadline=None)
@given(held=sizes, own=sizes, spare=st.integers(0, 20))
def test_a_plan_keeps_what_it_promises(held, own, spare):
    own = {name: held.get(name, size) for name, size in own.items()}   # a name has one size
    capacity = sum(held.values()) + spare
    before = dict(held)
    new, evicted = plan_entries(held, capacity, own)
    assert held == before, "a plan changes nothing"
    assert not set(evicted) & set(own), "a request's own images are pinned"
    assert set(new) <= set(own) - set(held)
    assert list(evicted) == [n for n in held if n in evicted], "the oldest go first"
    after = dict(held)
    commit_entries(after, own, new, evicted)
    assert sum(after.values()) <= capacity
    assert set(after) == set(held) - set(evicted) | set(new)
    kept = [n for n in own if n in after]
    assert list(after)[len(after) - len(kept):] == kept, "own images are the most recent, in order"
    # Nobody goes in vain: with one victim less, the new ones would not fit.
    if evicted: assert sum(after.values()) + held[evicted[-1]] > capacity
    # What is left out could not have been kept: not even without the others.
    pinned = sum(size for n, size in held.items() if n in own)
    for name in own:
        if name not in after: assert pinned + sum(new.values()) + own[name] > capacity


def test_a_request_larger_than_the_cache_works_uncached():
    # vllm#28525, #28496, #26195: a cache for 5 images, one request with 20, sent twice.
    images = {f"image {i}": {"x": torch.zeros(10, dtype=torch.uint8)} for i in range(20)}
    cache = ProcessorCache(50)
    for _ in range(2):
        found = {name: cache.get(name) or value for name, value in images.items()}
        assert all(found[name] is images[name] for name in images)
        cache.commit(found)
        cache.check_invariants()
    assert list(cache.items) == [f"image {i}" for i in range(5)]
    assert cache.num_hits == 5


def test_images_of_a_request_do_not_push_each_other_out():
    cache = ProcessorCache(30)
    for name in "ABC": cache.commit({name: item(name, 10)})
    # A is the oldest and wanted: B goes for D.
    cache.commit({"D": item("D", 10), "A": item("A", 10)})
    assert list(cache.sizes) == ["C", "D", "A"] and set(cache.items) == set("CDA")


def test_an_image_larger_than_the_cache_pushes_nobody_out():
    cache = ProcessorCache(30)
    cache.commit({"A": item("A", 20)})
    cache.commit({"B": item("B", 31)})
    assert list(cache.items) == ["A"] and cache.get("B") is None


def test_looking_is_not_using():
    # Only an accepted request makes its images recent.
    cache = ProcessorCache(20)
    for name in "AB": cache.commit({name: item(name, 10)})
    assert cache.get("A")
    cache.commit({"C": item("C", 10)})
    assert list(cache.sizes) == ["B", "C"]


def test_a_cache_without_room_keeps_nothing_and_clear_forgets():
    cache = ProcessorCache(0)
    cache.commit({"A": item("A", 1)})
    assert not cache.items
    cache = ProcessorCache(10)
    cache.commit({"A": item("A", 1)})
    cache.clear()
    cache.check_invariants()
    assert cache.get("A") is None


def test_threads_share_one_cache():
    cache, errors = ProcessorCache(100), []
    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(300):
                name = rng.choice(NAMES)
                cache.get(name)
                cache.commit({name: item(name, 17)})
                if rng.random() < 0.05: cache.clear()
                cache.check_invariants()
        except BaseException as error: errors.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors


# The mirror.

class Wire:
    "A sender, a receiver, and what is between them."

    def __init__(self, capacity: int):
        self.sender, self.receiver = MirroredCacheSender(capacity), MirroredCacheReceiver()
        self.under_way = deque()

    def send(self, names, size_of, fails=False):
        def put(message):
            if fails: raise WireError("cannot be sent")
            self.under_way.append(travel(message))
        before = dict(self.sender.sizes), dict(self.sender.stale)
        whole = request(names, size_of)
        if fails:
            with pytest.raises(WireError): self.sender.send(whole, put)
            assert (self.sender.sizes, self.sender.stale) == before
            assert list(self.sender.sizes) == list(before[0]), "not even the order"
        else: self.sender.send(whole, put)
        is_whole(whole, names, size_of)
        assert whole.mm_evict is None, "the caller's request is not touched"

    def arrive(self):
        message = self.under_way.popleft()
        self.receiver.fill(message)
        return message

    def check(self):
        self.sender.check_invariants()
        if not self.under_way:
            assert set(self.sender.sizes) | set(self.sender.stale) == set(self.receiver.items)


@pytest.mark.parametrize("capacity", [0, 10, 25, 1000])
def test_same_image_twice_in_a_request_travels_once(capacity):
    size_of, wire = dict(A=10, B=10, C=30), Wire(capacity)
    for names in ("ABA", "AAA", "BCAC"):
        wire.send(names, size_of)
        message, = wire.under_way
        sent = [n for n, i in zip(names, message.mm_inputs) if i is not None]
        assert len(sent) == len(set(sent))
        is_whole(wire.arrive(), names, size_of)
        wire.check()
    if capacity == 1000: assert wire.sender.num_left_out == 3 + 3 + 4 - 3


def test_a_known_image_does_not_travel_and_its_tensor_is_shared():
    size_of, wire = dict(A=100_000), Wire(10**6)
    wire.send("A", size_of)
    first = wire.arrive()
    wire.send("A", size_of)
    assert len(encode(FrameType.ADD, wire.under_way[0])) == 2, "no raw frame for the tensor"
    assert wire.arrive().mm_inputs[0] is first.mm_inputs[0]


def test_request_larger_than_the_cache_across_processes():
    # vllm#28525: 20 images for a cache of 5, twice.
    names = [chr(65 + i) for i in range(20)]
    size_of, wire = dict.fromkeys(names, 10), Wire(50)
    for _ in range(2):
        wire.send(names, size_of)
        is_whole(wire.arrive(), names, size_of)
        wire.check()
    assert wire.sender.num_left_out == 5
    assert len(wire.receiver.items) == 5


def test_many_requests_under_way_when_an_image_is_evicted():
    # vllm#16273, #31404, #34749, #46747: everybody is sent before anything arrives.
    size_of, wire = dict.fromkeys(NAMES, 10), Wire(20)
    plan = ["A", "AB", "C", "AB", "CD", "A", "BA", "DC", "A"]
    for names in plan: wire.send(names, size_of)
    for names in plan: is_whole(wire.arrive(), names, size_of)
    wire.check()


def test_text_passes_by_and_in_process_nothing_is_kept():
    # vllm#17284, #16875: one process has both roles, and no mirror.
    wire, sent = Wire(100), []
    text = EngineCoreRequest("r", None, [1], SamplingParams(), None, 0.0)
    wire.sender.send(text, sent.append)
    assert sent == [text] and sent[0] is text
    wire.receiver.fill(text)
    for _ in range(2):
        message = request("AB", dict(A=1, B=1))
        inputs = message.mm_inputs
        wire.receiver.fill(message)
        assert message.mm_inputs is inputs and not wire.receiver.items


def test_reset_on_both_sides():
    # vllm#42995: one side was reset, the other was not.
    size_of, wire = dict(A=5, B=5), Wire(100)
    wire.send("AB", size_of)
    wire.arrive()
    wire.sender.reset(); wire.receiver.clear()
    wire.send("A", size_of)
    is_whole(wire.arrive(), "A", size_of)
    assert list(wire.receiver.items) == ["A"] == list(wire.sender.sizes)


def test_reset_of_the_sender_alone_heals_with_the_next_images():
    size_of, wire = dict(A=5, B=5, C=5), Wire(100)
    wire.send("AB", size_of)
    wire.sender.reset()          # while the first is under way
    wire.send("BC", size_of)
    wire.arrive()
    is_whole(wire.arrive(), "BC", size_of)
    assert set(wire.receiver.items) == {"B", "C"} == set(wire.sender.sizes)
    wire.check()


def test_a_miss_is_an_error_of_one_request_and_heals():
    # vllm#45658, #32469: a miss must not end the engine.
    size_of, wire = dict(A=5, B=5), Wire(100)
    wire.send("A", size_of)
    wire.under_way.clear()       # lost: cannot happen on one socket
    wire.send("BA", size_of)
    with pytest.raises(MultiModalCacheMiss, match=r"image 1 \(A\) was left out as known, but it is not in this process"):
        wire.arrive()
    assert list(wire.receiver.items) == ["B"], "what came with it is kept, as the books have it"
    wire.sender.reset()          # what a client does about such a refusal
    wire.send("BA", size_of)
    is_whole(wire.arrive(), "BA", size_of)
    wire.check()


def test_malformed_requests_are_refused_and_change_nothing():
    receiver = MirroredCacheReceiver()
    for hashes in (None, ["A"], ["A", "B", "C"]):
        message = request("AB", dict(A=1, B=1))
        message.mm_hashes, message.mm_evict = hashes, []
        with pytest.raises(ValueError, match="2 mm_inputs, but [013] mm_hashes"): receiver.fill(message)
    assert not receiver.items
    sender = MirroredCacheSender(10)
    message = request("AB", dict(A=1, B=1))
    message.mm_hashes = ["A"]
    with pytest.raises(ValueError): sender.send(message, pytest.fail)
    assert not sender.sizes


class TwoSides(RuleBasedStateMachine):
    "Any order of sent, unsendable, refused and reset requests, with delays: never a miss, never a difference."

    @initialize(capacity=st.integers(0, 30), sizes=st.lists(st.integers(0, 14), min_size=8, max_size=8))
    def start(self, capacity, sizes):
        self.size_of, self.wire, self.waiting = dict(zip(NAMES, sizes)), Wire(capacity), deque()

    names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6)

    @rule(names=names)
    def send(self, names):
        self.wire.send(names, self.size_of)
        self.waiting.append(names)

    @rule(names=names)
    def cannot_be_sent(self, names): self.wire.send(names, self.size_of, fails=True)

    @precondition(lambda self: self.waiting)
    @rule(refused=st.booleans())
    def arrive(self, refused):
        message, names = self.wire.arrive(), self.waiting.popleft()
        is_whole(message, names, self.size_of)
        if refused: del message   # the core says no afterwards: the images have arrived all the same

    @rule()
    def reset_sender(self): self.wire.sender.reset()

    @precondition(lambda self: not self.waiting)
    @rule()
    def reset_both(self):         # as the call does: behind everything that was sent
        self.wire.sender.reset()
        self.wire.receiver.clear()
        self.wire.sender.stale.clear()

    @invariant()
    def same(self):
        if hasattr(self, "wire"): self.wire.check()

    def teardown(self):
        while getattr(self, "waiting", ()): self.arrive(False)
        if hasattr(self, "wire"): self.wire.check()


TwoSides.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTwoSides = TwoSides.TestCase
