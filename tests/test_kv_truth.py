"""Every slot that is read holds the right prefix, and no setting changes a token.

The fake worker knows only what `SchedulerOutput`s tell it; its tokens are a
function of the KV it reads. So equality with the naive loop proves block
tables, prefix hits, eviction, chunks, preemption, drafts and image keys.
"""
import itertools

import pytest
from fake_worker import EOS, VOCAB, Engine, FakeWorker, generate_alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduling import make_request, make_scheduler

PREFIX = [t % VOCAB for t in range(3, 40)]


class Adapter:
    def __init__(self, lora_int_id): self.lora_int_id = lora_int_id


def prompts(num):
    "Prompts that share beginnings of many lengths."
    return [PREFIX[:(7 * i) % 30 + 1] + [(i * j) % VOCAB for j in range(i % 5)] for i in range(num)]


def run(arrivals, **settings):
    depth, num_drafts = settings.pop("depth", 1), settings.pop("num_drafts", 0)
    engine = Engine(make_scheduler(**settings), depth, num_drafts)
    for n in itertools.count():
        for request in arrivals.get(n, []): engine.add(request)
        if n > max(arrivals): break
        engine.step()
    engine.finish()
    return engine


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [4, 16, 2048])
@pytest.mark.parametrize("block_size, num_blocks", [(1, 64), (4, 17), (8, 9), (16, 300)])
@pytest.mark.parametrize("prealloc", [0, 64])
def test_every_setting_gives_the_same_tokens(caching, budget, block_size, num_blocks, prealloc):
    requests = [make_request(f"r{i}", prompt, max_tokens=12, eos=EOS, ignore_eos=i % 2 == 0)
                for i, prompt in enumerate(prompts(12))]
    arrivals = {}
    for i, request in enumerate(requests): arrivals.setdefault(i * i % 9, []).append(request)
    engine = run(arrivals, num_blocks=num_blocks, block_size=block_size, budget=budget, max_seqs=4,
                 max_model_len=60, prealloc=prealloc, caching=caching)
    for request in requests:
        assert engine.outputs[request.request_id] == generate_alone(request, 60)


def test_the_worker_notices_a_wrong_block():
    "The oracle itself: swap two blocks behind the scheduler's back."
    engine = Engine(make_scheduler(num_blocks=20, block_size=4))
    engine.add(make_request("r", PREFIX[:20], eos=None))
    engine.step()
    row = engine.worker.rows["r"]
    row.block_ids[0], row.block_ids[1] = row.block_ids[1], row.block_ids[0]
    with pytest.raises(AssertionError, match="slot of position 0 holds something else"): engine.step()
    assert FakeWorker(4).kv.get(0) is None, "what was never written is never right"


def test_small_pools_do_preempt():
    engine = Engine(make_scheduler(num_blocks=12, block_size=4, max_model_len=48, prealloc=0))
    for i in range(4): engine.add(make_request(f"r{i}", PREFIX[i:i + 9], max_tokens=20, eos=None))
    engine.finish()
    assert engine.scheduler.num_preempted > 0


IMAGES = [[], [(2, 5, "a")], [(2, 5, "b")], [(1, 4, "a"), (6, 4, "b")], [(3, 4, "a")], [(0, 8, "a"), (8, 5, "c")]]
one_request = st.fixed_dictionaries(dict(
    start=st.integers(0, 2), length=st.integers(1, 24), tail=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    max_tokens=st.integers(1, 12), images=st.sampled_from(IMAGES), adapter=st.sampled_from([None, None, 1, 2]),
    when=st.integers(0, 6), abort_at=st.sampled_from([None] * 5 + [1, 3, 6]),
    min_tokens=st.sampled_from([0, 0, 4]), prompt_logprobs=st.sampled_from([None, None, 1])))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    plan=st.lists(one_request, min_size=1, max_size=8),
    block_size=st.sampled_from([1, 2, 4, 8]), extra_blocks=st.integers(0, 12), budget=st.sampled_from([6, 9, 24, 100]),
    max_seqs=st.integers(1, 5), prealloc=st.sampled_from([0, 3, 64]), caching=st.booleans(),
    depth=st.sampled_from([1, 1, 2]), num_drafts=st.sampled_from([0, 0, 3]))
def test_any_arrival_pattern(plan, block_size, extra_blocks, budget, max_seqs, prealloc, caching, depth, num_drafts):
    max_model_len = 42
    pool = -(-max_model_len // block_size) + extra_blocks
    engine = Engine(make_scheduler(
        num_blocks=pool, block_size=block_size, budget=budget, max_seqs=max_seqs, max_model_len=max_model_len,
        prealloc=prealloc, caching=caching, encoder_budget=9, encoder_cache=10), depth, num_drafts)
    for n in range(12):
        for i, r in enumerate(plan):
            if r["abort_at"] is not None and n == r["when"] + r["abort_at"]: engine.abort(f"r{i}")
            if n != r["when"]: continue
            prompt = PREFIX[r["start"]:r["start"] + r["length"]] + r["tail"]
            fitting = [im for im in r["images"] if im[0] + im[1] <= len(prompt)]
            request = make_request(
                f"r{i}", prompt, r["max_tokens"], fitting, EOS, min_tokens=min(r["min_tokens"], r["max_tokens"]),
                prompt_logprobs=r["prompt_logprobs"])
            request.lora_request = r["adapter"] and Adapter(r["adapter"])
            engine.add(request)
        engine.step()
    engine.finish()
