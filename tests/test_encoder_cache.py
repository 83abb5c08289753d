"""The encoder cache and its budget, with the reference's bugs fixed."""
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minengine.config import compute_encoder_budget
from minengine.v1.core.encoder_cache_manager import EncoderCacheManager, choose_encoder_inputs
from minengine.v1.messages import PlaceholderRange


def make_request(req_id, *positions):
    positions = [PlaceholderRange(*p) for p in positions]
    return SimpleNamespace(
        request_id=req_id, mm_positions=positions,
        get_num_encoder_tokens=lambda i: positions[i].length)


def test_a_life():
    manager, r = EncoderCacheManager(10), make_request("r", (0, 4), (5, 6))
    assert not manager.has_cache(r, 0) and manager.can_allocate(r, 1)
    manager.allocate(r, 0)
    manager.allocate(r, 1)
    assert manager.num_free_slots == 0 and manager.get_cached_input_ids(r) == (0, 1)
    manager.free_encoder_input(r, 0)
    assert manager.num_free_slots == 4 and manager.get_freed_ids() == [("r", 0)]
    manager.free(r)
    manager.free(r)   # nothing left: no harm
    assert manager.get_freed_ids() == [("r", 1)] and manager.get_freed_ids() == []
    assert manager.num_free_slots == 10 and not manager.cached
    manager.check_invariants()


def test_errors_name_the_numbers():
    manager, r = EncoderCacheManager(10), make_request("r", (0, 4), (5, 7))
    manager.allocate(r, 0)
    with pytest.raises(ValueError, match="0 of r is cached already"): manager.allocate(r, 0)
    with pytest.raises(ValueError, match="1 of r needs 7 slots, 6 are free"): manager.allocate(r, 1)
    with pytest.raises(ValueError, match="1 of r is not cached"): manager.free_encoder_input(r, 1)
    with pytest.raises(ValueError, match="-1"): EncoderCacheManager(-1)
    assert manager.num_free_slots == 6
    manager.check_invariants()


def choose(r, computed, n, budget, manager): return choose_encoder_inputs(r, computed, n, budget, manager)


def test_the_rule_case_by_case():
    r, manager = make_request("r", (10, 20), (40, 20)), EncoderCacheManager(100)
    assert choose(r, 0, 10, 99, manager) == ([], 10, 99)     # ends before the image
    assert choose(r, 0, 11, 99, manager) == ([0], 11, 79)    # touches it: all of it
    assert choose(r, 0, 50, 99, manager) == ([0, 1], 50, 59)
    assert choose(r, 0, 50, 30, manager) == ([0], 40, 10)    # stops before the second
    assert choose(r, 0, 50, 10, manager) == ([], 10, 10)     # before the first
    assert choose(r, 10, 50, 10, manager) == ([], 0, 10)     # or not at all
    assert choose(r, 15, 5, 10, manager) == ([], 0, 10)      # a hit inside an image
    assert choose(r, 15, 5, 20, manager) == ([0], 5, 0)
    assert choose(r, 30, 5, 0, manager) == ([], 5, 0)        # its KV is there
    manager.allocate(r, 0)
    assert choose(r, 10, 30, 0, manager) == ([], 30, 0)      # its output is there
    assert manager.num_free_slots == 80                      # asking changes nothing


def test_bug_f_two_images_that_fit_one_by_one_do_not_fit_together():
    r, manager = make_request("r", (0, 100), (100, 100)), EncoderCacheManager(150)
    inputs, n, budget = choose(r, 0, 200, 1000, manager)
    assert (inputs, n, budget) == ([0], 100, 900)
    for i in inputs: manager.allocate(r, i)
    assert manager.num_free_slots == 50      # 0.7.3: -50
    manager.check_invariants()


def test_vllm_7996_a_chunk_never_ends_inside_an_image_it_did_not_encode():
    r = make_request("r", (5, 1792))
    for budget in (100, 1792):
        manager = EncoderCacheManager(4000)
        inputs, n, _ = choose(r, 0, 512, budget, manager)
        assert (inputs, n) == (([0], 512) if budget == 1792 else ([], 5))


def test_the_partial_scenario_of_the_release():
    # Budget 1024, three requests of 800 tokens with an image at 100..700.
    manager, budget, tokens, got = EncoderCacheManager(1024), 1024, 1024, []
    for i in range(3):
        r = make_request(str(i), (100, 600))
        inputs, n, budget = choose(r, 0, min(800, tokens), budget, manager)
        for j in inputs: manager.allocate(r, j)
        tokens -= n
        got.append((n, inputs))
    assert got == [(800, [0]), (100, []), (100, [])]


def test_budget_holds_any_single_image():
    assert compute_encoder_budget(0, 2048) == (0, 0)
    assert compute_encoder_budget(500, 2048) == (2048, 2048)
    assert compute_encoder_budget(5000, 2048) == (5000, 5000)   # vllm#16795


def plain_choice(positions, cached, computed, n, budget, free):
    "Token by token: stop before the first image that cannot be had."
    chosen = []
    for position in range(computed, computed + n):
        for i, (start, length) in enumerate(positions):
            if not start <= position < start + length: continue
            if i in cached or i in chosen: continue
            taken = sum(positions[j][1] for j in chosen)
            if taken + length > min(budget, free):
                # Bidirectional: not even the image's first tokens, unless computed before.
                return chosen, max(0, min(position, start) - computed)
            chosen.append(i)
    return chosen, n


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_the_rule_equals_a_walk_over_the_tokens(data):
    draw = lambda low, high: data.draw(st.integers(low, high))
    positions, at = [], 0
    for _ in range(draw(0, 4)):
        at += draw(0, 4)
        positions.append((at, draw(1, 6)))
        at += positions[-1][1]
    r, manager = make_request("r", *positions), EncoderCacheManager(draw(0, 20))
    for i in range(len(positions)):
        if draw(0, 3) == 0 and manager.can_allocate(r, i): manager.allocate(r, i)
    computed, n, budget = draw(0, at + 2), draw(1, 20), draw(0, 20)
    inputs, got_n, left = choose(r, computed, n, budget, manager)
    want = plain_choice(positions, manager.get_cached_input_ids(r), computed, n, budget, manager.num_free_slots)
    assert (inputs, got_n) == want
    assert left == budget - sum(positions[i][1] for i in inputs)
    for i in inputs: manager.allocate(r, i)   # they fit together
    manager.check_invariants()


class Lives(RuleBasedStateMachine):
    "Random requests come, take, give back and go; the manager's books stay true."
    def __init__(self):
        super().__init__()
        self.manager, self.requests, self.told, self.rng = EncoderCacheManager(30), {}, set(), random.Random(0)
        self.workers = set()   # what the workers hold

    @rule(lengths=st.lists(st.integers(1, 15), min_size=1, max_size=3))
    def arrive(self, lengths):
        req_id = f"r{len(self.requests)}"
        self.requests[req_id] = make_request(req_id, *[(20 * i, n) for i, n in enumerate(lengths)])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def take(self, data):
        r = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        i = data.draw(st.integers(0, len(r.mm_positions) - 1))
        if self.manager.has_cache(r, i) or not self.manager.can_allocate(r, i): return
        self.manager.allocate(r, i)
        self.tell()
        self.workers.add((r.request_id, i))   # frees first, then encodes

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def give_back(self, data, whole):
        r = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        held = self.manager.get_cached_input_ids(r)
        if whole: self.manager.free(r)
        elif held: self.manager.free_encoder_input(r, data.draw(st.sampled_from(held)))

    @rule()
    def tell(self): self.workers -= set(self.manager.get_freed_ids())

    @invariant()
    def true(self):
        self.manager.check_invariants()
        held = {(r, i) for r, inputs in self.manager.cached.items() for i in inputs}
        assert held == self.workers - set(self.manager.freed)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)
