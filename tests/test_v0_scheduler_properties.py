"""V0's scheduler under random life: requests come, fork, end, are swapped out and aborted, in any order.

After each step the books of both pools are checked, the fake worker has read
every slot that the model would read, and the engine has made progress. At the
end each sequence has the tokens of a loop that runs it alone.
"""
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from v0_fake_worker import V0Engine, V0FakeWorker
from v0_scheduling import make_group, make_scheduler

PREFIX = [t % 7 for t in range(3, 60)]
QUIET = dict(deadline=None, suppress_health_check=list(HealthCheck))


class Adapter:
    def __init__(self, lora_int_id): self.lora_int_id = lora_int_id


class Adapters: max_loras = 1


def prompts(num):
    "Prompts that share beginnings of many lengths."
    return [PREFIX[:(7 * i) % 30 + 1] + [(i * j) % 7 for j in range(i % 5)] for i in range(num)]


def run(num, engine, **params):
    for i, prompt in enumerate(prompts(num)):
        n = 1 + i % 3 if params.get("several") else 1
        engine.add(make_group(i, prompt, engine.manager.block_size, arrival=float(i), priority=i * 7 % 3,
                              max_tokens=12, n=n, ignore_eos=i % 2 == 0))
        for _ in range(i % 3): engine.step()
    engine.finish()
    return engine


POOLS = [(1, 64, 30), (4, 17, 12), (4, 17, 0), (8, 9, 9), (16, 300, 4)]   # block size, device, host


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_every_setting_gives_the_same_tokens(chunked, caching, mode, pool):
    block_size, num_gpu, num_cpu = pool
    budget = 20 if chunked else 64
    scheduler = make_scheduler(budget, 5, 60, num_gpu, num_cpu, block_size, chunked, caching, preemption_mode=mode)
    run(16, V0Engine(scheduler), several=True)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("settings", [
    dict(policy="priority"), dict(num_scheduler_steps=4), dict(use_async_output_proc=True),
    dict(chunked=True, num_scheduler_steps=4), dict(chunked=True, use_async_output_proc=True),
    dict(chunked=True, max_num_partial_prefills=2, max_long_partial_prefills=2), dict(delay_factor=0.1),
    dict(policy="priority", use_async_output_proc=True)], ids=str)
def test_every_option_gives_the_same_tokens(mode, caching, settings):
    scheduler = make_scheduler(64, 5, 60, 17, 12, 4, caching=caching, preemption_mode=mode, **settings)
    run(16, V0Engine(scheduler), several="use_async_output_proc" not in settings and "num_scheduler_steps" not in settings)


def test_these_pools_do_preempt_and_swap():
    swaps, copies = 0, 0
    scheduler = make_scheduler(64, 5, 60, 17, 12, 4, preemption_mode="swap")
    engine = V0Engine(scheduler)
    for i, prompt in enumerate(prompts(16)): engine.add(make_group(i, prompt, 4, max_tokens=12, n=1 + i % 3, ignore_eos=True))
    while scheduler.has_unfinished_seqs():
        outputs = engine.step()[1]
        swaps += len(outputs.blocks_to_swap_in)
        copies += len(outputs.blocks_to_copy)
    assert scheduler.num_cumulative_preemption > 5 and swaps > 9 and copies > 9


# ---- the oracle itself -------------------------------------------------

def started(**settings):
    engine = V0Engine(make_scheduler(num_gpu=9, max_seqs=2, **settings))
    for i in range(2): engine.add(make_group(i, PREFIX[i:i + 9], max_tokens=9, ignore_eos=True))
    engine.step()
    return engine


def test_the_worker_notices_a_wrong_table():
    engine = started()
    table = engine.manager.block_tables[engine.groups["0"].first_seq.seq_id]
    table.physical_block_ids[:2] = table.physical_block_ids[1::-1]
    with pytest.raises(AssertionError, match=r"0: position 0 in slot \(1, 0\) is wrong"): engine.step()


def without_copies(worker, metadata, outputs):
    outputs.blocks_to_copy.clear()
    return V0FakeWorker.execute(worker, metadata, outputs)


def without_swaps(worker, metadata, outputs):
    outputs.blocks_to_swap_out.clear()
    return V0FakeWorker.execute(worker, metadata, outputs)


def swaps_out_late(worker, metadata, outputs):
    pairs, outputs.blocks_to_swap_out = outputs.blocks_to_swap_out, []
    sampled = V0FakeWorker.execute(worker, metadata, outputs)
    outputs.blocks_to_swap_out = pairs
    V0FakeWorker.execute(worker, [], outputs)
    return sampled


@pytest.mark.parametrize("spoiled", [without_copies, without_swaps, swaps_out_late])
def test_the_worker_notices_what_was_not_done_in_order(monkeypatch, spoiled):
    engine = V0Engine(make_scheduler(num_gpu=9, num_cpu=9, preemption_mode="swap"))
    for i in range(3): engine.add(make_group(i, PREFIX[i:i + 9], max_tokens=9, n=2, ignore_eos=True))
    monkeypatch.setattr(engine.worker, "execute", lambda *args: spoiled(engine.worker, *args))
    with pytest.raises(AssertionError, match="is wrong"): engine.finish()


# ---- random workloads --------------------------------------------------

one_request = st.fixed_dictionaries(dict(
    start=st.integers(0, 2), length=st.integers(1, 24), tail=st.lists(st.integers(0, 6), max_size=4),
    max_tokens=st.integers(1, 12), n=st.sampled_from([1, 1, 1, 2, 3]), priority=st.integers(0, 2),
    adapter=st.sampled_from([None, None, 1, 2]), min_tokens=st.sampled_from([0, 0, 1]), when=st.integers(0, 6),
    abort_at=st.sampled_from([None] * 5 + [1, 3, 6])))

any_settings = st.fixed_dictionaries(dict(
    num_gpu=st.integers(6, 24), num_cpu=st.sampled_from([0, 3, 8, 30]), block_size=st.sampled_from([1, 2, 4, 5]),
    chunked=st.booleans(), caching=st.booleans(), preemption_mode=st.sampled_from([None, "recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "fcfs", "priority"]), budget=st.integers(6, 40), max_seqs=st.integers(1, 6),
    extra=st.sampled_from([{}, {}, dict(use_async_output_proc=True), dict(num_scheduler_steps=3),
                           dict(delay_factor=0.01), dict(max_num_partial_prefills=2, max_long_partial_prefills=2)])))


def make_engine(given_settings):
    "A scheduler for settings that do not exclude each other."
    s = dict(given_settings)
    s |= s.pop("extra")
    if "max_num_partial_prefills" in s: s["chunked"] = True
    if s["chunked"]: s["policy"] = "fcfs"
    elif s["budget"] < 40: s["budget"] = 40
    s["budget"] = max(s["budget"], 2 * s["block_size"], s["max_seqs"])
    return V0Engine(make_scheduler(max_model_len=40, lora_config=Adapters(), **s))


def group_of(engine, name, r):
    config = engine.scheduler.scheduler_config
    alone = config.use_async_output_proc or config.num_scheduler_steps > 1
    prompt = PREFIX[r["start"]:r["start"] + r["length"]] + r["tail"]
    return make_group(name, prompt, engine.manager.block_size, float(r["when"]), r["priority"],
                      r["adapter"] and Adapter(r["adapter"]), max_tokens=r["max_tokens"],
                      n=1 if alone else r["n"], min_tokens=r["min_tokens"])


@settings(max_examples=200, **QUIET)
@given(any_settings, st.lists(one_request, min_size=1, max_size=10))
def test_random_workloads(given_settings, requests):
    engine = make_engine(given_settings)
    for now in itertools.count():
        for i, r in enumerate(requests):
            if r["when"] == now: engine.add(group_of(engine, str(i), r))
        if now > 6: break
        for i, r in enumerate(requests):
            if r["abort_at"] == now and str(i) in engine.scheduler._request_ids: engine.abort(str(i))
        engine.step()
    engine.finish()


class AnyOrder(RuleBasedStateMachine):
    "Adds, steps, aborts, forks (n > 1), swaps and resets, as they come."

    @initialize(given_settings=any_settings)
    def start(self, given_settings):
        self.engine, self.num = make_engine(given_settings), 0

    @rule(r=one_request)
    def add(self, r):
        self.engine.add(group_of(self.engine, str(self.num), r))
        self.num += 1

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times): self.engine.step()

    @precondition(lambda self: self.engine.scheduler._request_ids)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.scheduler._request_ids))))

    @precondition(lambda self: len(self.engine.scheduler.running) > 1 and not self.engine.use_async)
    @rule()
    def preempt_the_last(self):
        "As if the pool had run dry: a victim from the tail, whatever it is doing."
        scheduler, pairs = self.engine.scheduler, []
        group = scheduler.running.pop()
        mode = scheduler._preempt(group, pairs)
        # What is swapped out between steps must be copied before the next one.
        self.engine.worker.move(pairs, *self.engine.manager.block_allocator.allocators)
        if mode is None: scheduler._given_up.remove(group)
        else: (scheduler.swapped if mode.name == "SWAP" else scheduler.waiting).appendleft(group)
        self.engine.check()

    @rule()
    def reset_the_cache(self): self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def books_agree(self):
        if hasattr(self, "engine"): self.engine.scheduler.check_invariants()

    def teardown(self):
        if hasattr(self, "engine"): self.engine.finish()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=25, **QUIET)
TestAnyOrder = AnyOrder.TestCase
