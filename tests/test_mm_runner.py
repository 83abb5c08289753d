"""Images in V1's worker: encoded once, held while needed, and the right rows in the right places."""
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mm_fake import IMAGE_TOKEN, Engine, FakeModel, alone, image_item

from minengine.sampling_params import SamplingParams
from minengine.v1.messages import PlaceholderRange
from minengine.v1.worker.encoder_runner import EncoderOutputs, image_key, image_slices, run_encoder
from minengine.v1.worker.input_batch import CachedRequestState

A, B, C = (1, 5), (2, 7), (3, 5)   # (which image, its rows)


# --- which rows a chunk needs ------------------------------------------------------

def test_slices_equal_a_loop_over_positions():
    "Every chunk of a prompt with three images, two of them side by side."
    spans = [PlaceholderRange(2, 3), PlaceholderRange(5, 4), PlaceholderRange(11, 1)]
    row_at = {p.offset + row: (i, row) for i, p in enumerate(spans) for row in range(p.length)}
    for start in range(14):
        for end in range(start, 15):
            found = [(i, row) for i, low, high in image_slices(spans, start, end) for row in range(low, high)]
            assert found == [row_at[p] for p in range(start, end) if p in row_at], (start, end)
            assert all(low < high for _, low, high in image_slices(spans, start, end))


@settings(max_examples=200, deadline=None)
@given(gaps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=5), cuts=st.lists(st.integers(0, 70), max_size=6))
def test_the_slices_of_all_chunks_are_every_row_once(gaps, cuts):
    spans, at = [], 0
    for gap, length in gaps:
        spans.append(PlaceholderRange(at + gap, length))
        at += gap + length
    cuts = sorted({0, at, *(c for c in cuts if c < at)})
    rows = [(i, row) for start, end in zip(cuts, cuts[1:]) for i, low, high in image_slices(spans, start, end) for row in range(low, high)]
    assert rows == [(i, row) for i, p in enumerate(spans) for row in range(p.length)]


# --- the store -----------------------------------------------------------------------

def rows(n, value=0.0): return torch.full((n, 3), value)


def test_field_vllm_54284_a_reference_for_each_occurrence():
    "The first occurrence's release must not drop it for the second."
    store = EncoderOutputs(10)
    store.add("cat", rows(5, 1))
    assert store.acquire("r", 0, "cat") and store.acquire("r", 1, "cat") and store.acquire("other", 0, "cat")
    store.release("r", 0)
    assert store.get("r", 0) is None and store.get("r", 1)[0, 0] == 1 and store.get("other", 0) is store.get("r", 1)
    store.release_request("r")
    with pytest.raises(ValueError, match="no room for 6 encoder rows: 5 of 10 are in use"): store.make_room(6)
    assert store.get("other", 0) is not None
    store.release("other", 0)
    store.make_room(6)
    assert store.num_rows == 0 and not store.acquire("r", 0, "cat")


def test_an_idle_output_stays_until_its_room_is_needed_and_the_longest_idle_goes_first():
    store = EncoderOutputs(10)
    for name in "ab":
        store.add(name, rows(4))
        store.acquire(name, 0, name)
    store.release("b", 0)
    store.release("a", 0)
    assert list(store.idle) == ["b", "a"] and store.num_rows == 8
    assert store.acquire("again", 0, "b")         # in use, then idle again: now the youngest
    store.release("again", 0)
    store.add("c", rows(5))
    assert set(store.outputs) == {"b", "c"}
    store.check_invariants()


def test_releasing_what_is_not_held_changes_nothing():
    store = EncoderOutputs(4)
    store.release("nobody", 0)
    store.release_request("nobody")
    store.add("x", rows(4))
    store.acquire("r", 1, "x")
    store.release("r", 0)
    assert store.get("r", 1) is not None
    store.check_invariants()


class StoreMachine(RuleBasedStateMachine):
    "Against a plain model: who holds what. Rows never pass the limit; what is held never goes."
    def __init__(self):
        super().__init__()
        self.store, self.held = EncoderOutputs(20), {}

    @rule(req=st.integers(0, 3), i=st.integers(0, 3), image=st.integers(0, 6))
    def want(self, req, i, image):
        if (req, i) in self.held: return
        length = 2 + image
        if not self.store.acquire(str(req), i, image):
            in_use = sum(2 + k for k in set(self.held.values()))
            if in_use + length > 20:
                with pytest.raises(ValueError, match="no room"): self.store.add(image, rows(length, image))
                return
            self.store.add(image, rows(length, image))
            assert self.store.acquire(str(req), i, image)
        self.held[req, i] = image

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data):
        req, i = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[req, i]
        self.store.release(str(req), i)

    @rule(req=st.integers(0, 3))
    def finish(self, req):
        self.held = {k: v for k, v in self.held.items() if k[0] != req}
        self.store.release_request(str(req))

    @invariant()
    def books(self):
        self.store.check_invariants()
        for (req, i), image in self.held.items():
            output = self.store.get(str(req), i)
            assert len(output) == 2 + image and (output == image).all()


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase


def state_with(parts, req_id="r", hashes=True):
    positions, items, digests, at = [], [], [], 0
    for identity, length in parts:
        positions.append(PlaceholderRange(at, length))
        items.append(image_item(identity, length))
        digests.append(f"h{identity}")
        at += length
    return CachedRequestState(
        req_id, [IMAGE_TOKEN] * at, SamplingParams(), [], 0, mm_inputs=items, mm_hashes=digests if hashes else [], mm_positions=positions)


def test_keys_are_content_and_length_or_nobodys():
    one, two = state_with([A, B, A]), state_with([(1, 6)])
    assert image_key(one, 0) == image_key(one, 2) != image_key(one, 1)
    assert image_key(one, 0) != image_key(two, 0)   # same digest, another length: another output
    unnamed = state_with([A, A], hashes=False)
    assert len({image_key(unnamed, 0), image_key(unnamed, 0), image_key(unnamed, 1)}) == 3


def test_the_wrong_number_of_rows_is_an_error_with_both_numbers():
    state = state_with([A])
    state.mm_positions = [PlaceholderRange(0, 6)]
    with pytest.raises(ValueError, match="r: image 0 has 5 encoder rows for 6 placeholders"):
        run_encoder(FakeModel(), [(state, 0)])
    class Silent(FakeModel):
        def get_multimodal_embeddings(self, items): return []
    with pytest.raises(ValueError, match="0 encoder outputs for 1 images"): run_encoder(Silent(), [(state, 0)])


def test_each_output_has_its_own_memory():
    "A row of a batched result would keep the whole batch alive."
    class Batched(FakeModel):
        def get_multimodal_embeddings(self, items): return list(torch.zeros(len(items), 5, 3).unbind())
    outputs = run_encoder(Batched(), [(state_with([A, C]), 0), (state_with([A, C]), 1)])
    assert [o.untyped_storage().nbytes() for o in outputs] == [o.nbytes for o in outputs]


# --- merged by position ---------------------------------------------------------------

PROMPTS = {
    "one": [10, 11, 12, A, 13, 14],
    "first": [B, 20, 21],
    "last": [30, 31, B],
    "two": [40, A, 41, 42, B, 43],
    "side by side": [50, A, B, 51],
    "same twice": [60, A, 61, A, 62],
    "same side by side": [A, A],
    "many": [A, 70, B, 71, 72, C, A, 73, (4, 1), (5, 1), 74],
}


@pytest.mark.parametrize("uses_mrope", [False, True], ids=["plain", "mrope"])
@pytest.mark.parametrize("name", PROMPTS)
def test_field_vllm_7996_10290_8028_18414_a_chunk_boundary_at_every_offset(name, uses_mrope):
    "The first chunk ends at each position of the prompt, then the second: the checks are in the engine."
    parts = PROMPTS[name]
    length = sum(1 if isinstance(p, int) else p[1] for p in parts)
    for first in range(1, length + 1):
        for second in {1, 2, length}:
            engine = Engine(uses_mrope, caching=False)
            engine.add("r", parts)
            for budget in (first, second, 32):
                engine.config.scheduler_config.max_num_batched_tokens = budget
                engine.step()
            engine.run()
            engine.check_tokens()
            assert engine.runs == len({p for p in parts if not isinstance(p, int)})


def test_field_vllm_7996_an_image_of_1792_tokens_and_512_a_step():
    engine = Engine(max_model_len=2048, block_size=16, num_blocks=128, budget=512, encoder_budget=1792)
    engine.add("a", [*range(5), (1, 1792), *range(5)])
    engine.run()
    engine.check_tokens()
    assert [order.total_num_scheduled_tokens for order in engine.orders][:4] == [512, 512, 512, 266] and engine.runs == 1


def test_field_vllm_18414_a_chunk_that_only_encodes_what_it_touches():
    "The image is scheduled with the chunk that ends right before it? No: with the first that touches it."
    engine = Engine(budget=8, caching=False)
    engine.add("a", [1, 2, 3, 4, 5, 6, 7, 8, (1, 9), 3])
    orders = [engine.step() for _ in range(3)]
    assert [o.scheduled_encoder_inputs for o in orders] == [{}, {"a": [0]}, {}]
    engine.run()
    engine.check_tokens()


@pytest.mark.parametrize("budget", range(1, 20))
def test_every_token_budget(budget):
    engine = Engine(budget=max(budget, 8), encoder_budget=14)   # the config wants a budget of 8 requests
    engine.config.scheduler_config.max_num_batched_tokens = budget
    for name, parts in PROMPTS.items(): engine.add(name, parts)
    engine.add("words", [1, 2, 3, 4, 5, 6])
    engine.run()
    engine.check_tokens()


@pytest.mark.parametrize("uses_mrope", [False, True], ids=["plain", "mrope"])
def test_preemption_at_every_point_of_an_image(uses_mrope):
    "Stopped with `computed` at each position of the prompt and behind it, then resumed."
    parts = PROMPTS["many"]
    length = sum(1 if isinstance(p, int) else p[1] for p in parts)
    for stop in range(1, length + 3):
        engine = Engine(uses_mrope, caching=False)
        engine.add("other", [1, 2, B, 3], max_tokens=40)
        engine.step()
        request = engine.add("r", parts)
        while request.num_computed_tokens < stop:
            left = min(stop, length) - request.num_computed_tokens
            engine.config.scheduler_config.max_num_batched_tokens = 1 + max(left, 1)
            engine.step()
        engine.preempt("r")
        engine.config.scheduler_config.max_num_batched_tokens = 32
        order = engine.step()
        assert [d.req_id for d in order.scheduled_cached_reqs if d.resumed_from_preemption] == ["r"]
        engine.run()
        engine.check_tokens()


def test_preempted_by_a_small_pool():
    rng = random.Random(0)
    engine = Engine(num_blocks=20, budget=12, encoder_budget=14, caching=False)
    for i in range(8): engine.add(str(i), random_parts(rng), max_tokens=12)
    engine.run()
    engine.check_tokens()
    assert engine.scheduler.num_preempted > 0


def random_parts(rng, max_images=3, images=6):
    parts = [rng.randrange(90) for _ in range(rng.randrange(1, 12))]
    for _ in range(rng.randrange(max_images + 1)):
        identity = rng.randrange(1, images)
        parts.insert(rng.randrange(len(parts) + 1), (identity, 1 + identity * 2))
    return parts


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_books_and_rows_under_random_scheduling(seed):
    "Arrivals, aborts, ids used again, small pools, small encoder caches. Each step is checked by the engine."
    rng = random.Random(seed)
    budget = rng.choice([8, 12, 32])
    engine = Engine(
        rng.random() < 0.3, num_blocks=rng.choice([20, 30, 64]), budget=budget, caching=rng.random() < 0.5,
        encoder_budget=rng.choice([11, 16, 40]), encoder_cache=rng.choice([11, 16, 40]))
    for i in range(12):
        if rng.random() < 0.8: engine.add(str(i), random_parts(rng), max_tokens=rng.randrange(1, 10))
        for _ in range(rng.randrange(0, 4)): engine.step()
        alive = list(engine.scheduler.requests)
        if alive and rng.random() < 0.3:
            gone = rng.choice(alive)
            engine.abort(gone)
            del engine.requests[gone]
            if rng.random() < 0.6: engine.add(gone, random_parts(rng), max_tokens=3)   # the same id again
    engine.run()
    engine.check_tokens()
    store = engine.images.outputs
    assert not store.held and store.num_rows <= store.capacity
    assert engine.runner.requests == {}


def test_liveness_with_a_cache_that_holds_one_image():
    "Every request wants the whole cache; all of them end."
    for budget in (8, 9, 13, 32):
        engine = Engine(budget=budget, encoder_budget=7, num_blocks=40)
        for i in range(6): engine.add(str(i), [i, (10 + i, 7), 80, (20 + i, 7), 81, (10, 7)])
        engine.run()
        engine.check_tokens()


# --- who is told what -----------------------------------------------------------------

def test_finished_and_new_under_one_id_in_one_order():
    "The old request's references go first; what it freed must not hit the new one."
    engine = Engine(budget=8, caching=False)
    engine.add("a", [1, 2, (1, 9), 3], max_tokens=20)
    engine.step()                              # in the middle of the image
    assert engine.images.outputs.held == {"a": {0: ("image-1-9", 9)}}
    engine.abort("a")
    engine.add("a", [(2, 9), 5])
    order = engine.step()
    assert "a" in order.finished_req_ids and ("a", 0) in order.free_encoder_input_ids
    assert engine.images.outputs.held == {"a": {0: ("image-2-9", 9)}}
    engine.run()
    engine.check_tokens()


def test_a_failed_encoder_leaves_a_worker_that_works():
    engine = Engine(caching=False)
    engine.add("a", [1, A, 2])
    engine.model.fail = True
    with pytest.raises(RuntimeError, match="out of luck"): engine.step()
    engine.model.fail = False
    engine.abort("a")
    engine.add("b", [1, A, 2])
    engine.run()
    assert engine.tokens["b"] == alone(engine.requests["b"], 4) and engine.runs == 2   # a try counts


def test_field_vllm_45658_32469_a_missing_output_is_encoded_again():
    "It cannot happen while scheduler and worker agree; if it does, nobody dies and the tokens are right."
    engine = Engine(budget=8, caching=False)
    engine.add("a", [1, 2, (1, 9), 3, 4])
    engine.step()
    engine.images.outputs.release("a", 0)
    engine.check_books = lambda: None
    while engine.scheduler.has_unfinished_requests(): engine.step()
    assert engine.images.num_misses == 1 and engine.runs == 2
    engine.check_tokens()


def test_text_only_requests_of_a_model_that_sees():
    for uses_mrope in (False, True):
        engine = Engine(uses_mrope)
        engine.add("a", [1, 2, 3])
        engine.add("b", [1, A, 3])
        engine.run()
        engine.check_tokens()
        assert engine.model.calls == [[1]]


def test_images_of_one_step_go_through_the_tower_together():
    engine = Engine(budget=64, encoder_budget=64)
    engine.add("a", [1, A, B])
    engine.add("b", [2, C, A])
    engine.step()
    assert engine.model.calls == [[1, 2, 3]]   # of four images, three are different


def test_without_hashes_nothing_is_shared():
    engine = Engine(caching=False)
    engine.add("a", [1, A, 2], hashes=False)
    engine.add("b", [1, A, 2], hashes=False)
    engine.run()
    engine.check_tokens()
    assert engine.runs == 2


def test_profile_run_holds_a_full_cache():
    engine = Engine(budget=32, encoder_cache=500)
    seen = []
    engine.runner.run_model = lambda ids, positions, embeds: seen.append((ids, positions, embeds)) or torch.zeros(len(embeds), 97)
    engine.model.compute_logits = lambda hidden: hidden
    engine.runner.profile_run()
    assert engine.model.calls == [[0, 0, 0]]   # 32 rows a step: three of the largest, of nine rows
    ids, positions, embeds = seen[0]
    assert ids is None and embeds.shape == (32, 3) and positions.shape == (32,)
    assert embeds.untyped_storage().nbytes() >= (500 + 32) * 3 * 4


# --- counted ---------------------------------------------------------------------------

def two_at_once(engine):
    engine.add("a", [1, A, 2])
    engine.add("b", [3, A, 4])
    engine.run()


def one_after_the_other(engine, then=lambda engine: None):
    engine.add("a", [1, A, 2])
    engine.run()
    then(engine)
    engine.add("b", [3, A, 4])   # another text before it: no block of the first can be used
    engine.run()


def push_out(engine):
    "Another image takes the only place."
    engine.add("push", [5, (9, 7), 6])
    engine.run()


COUNTS = [
    # what happens, encoder cache, images encoded, why
    ("one image", 32, lambda e: (e.add("a", [1, A, 2]), e.run()), 1, "it is encoded once, whatever the chunks"),
    ("same image twice in a prompt", 32, lambda e: (e.add("a", [1, A, 2, A, 3]), e.run()), 1, "the second place refers to the first's output"),
    ("same, room for one image only", 7, lambda e: (e.add("a", [1, A, 2, A, 3]), e.run()), 1, "idle, not gone, until the second place needs it"),
    ("two requests at once", 32, two_at_once, 1, "one output, two references"),
    ("two requests, one after the other", 32, one_after_the_other, 1, "still there: nobody needed its room"),
    ("the same, pushed out between them", 7, lambda e: one_after_the_other(e, push_out), 3, "A, the other image, A again"),
    ("two different images", 32, lambda e: (e.add("a", [1, A, C, 2]), e.run()), 2, "same length, other content"),
    ("same image, other length", 32, lambda e: (e.add("a", [1, (1, 5), (1, 6)]), e.run()), 2, "other rows"),
]


@pytest.mark.parametrize("budget", [8, 9, 32])
@pytest.mark.parametrize("name, cache, story, count, why", COUNTS, ids=[c[0] for c in COUNTS])
def test_how_often_the_encoder_runs(name, cache, story, count, why, budget):
    engine = Engine(budget=budget, encoder_budget=32, encoder_cache=cache, caching=False)
    story(engine)
    engine.check_tokens()
    assert engine.runs == count, why


def test_preempted_in_the_middle_of_an_image_it_is_not_encoded_again():
    engine = Engine(budget=8, caching=False)
    engine.add("a", [1, 2, (1, 9), 3])
    engine.step()
    engine.preempt("a")
    engine.run()
    engine.check_tokens()
    assert engine.runs == 1


def test_preempted_and_pushed_out_it_is_encoded_again():
    engine = Engine(budget=8, encoder_budget=9, caching=False)
    engine.add("a", [1, 2, (1, 9), 3], max_tokens=2)
    engine.step()
    engine.preempt("a")
    engine.scheduler.waiting.rotate(-1)
    engine.add("b", [4, (2, 9), 5], max_tokens=2)
    engine.scheduler.waiting.rotate(1)   # somebody else comes first
    engine.run()
    engine.check_tokens()
    assert engine.runs == 3
