"""V1's scheduler: the reference's scenarios and golden traces, and what differs on purpose."""
import pytest
from scheduling import EOS, counts, make_request, make_result, make_scheduler, names, new_blocks, step

from minengine.sampling_params import SamplingParams
from minengine.v1.core.scheduler import logprob_starts, tokens_wanted
from minengine.v1.core.scheduler_output import SchedulerOutput
from minengine.v1.messages import EngineCoreEventType, FinishReason, LogprobsLists, ModelRunnerOutput
from minengine.v1.request import NO_LIMIT, Request, RequestStatus, check_stop

R = RequestStatus


# ---- requests (V073 2.1) -----------------------------------------------

def test_status_reasons():
    assert [s.is_finished for s in R] == [False] * 3 + [True] * 4
    assert [str(s.finish_reason) for s in R if s.is_finished] == ["stop", "length", "abort", "length"]
    assert R.RUNNING.finish_reason is None


def test_token_lists_cannot_diverge():
    prompt = [1, 2, 3]
    request = make_request("r", prompt)
    prompt.append(4)
    assert request.prompt_token_ids == [1, 2, 3] and request.num_prompt_tokens == 3
    for view in (request.output_token_ids, request.all_token_ids):
        for method in ("append", "extend", "insert", "pop", "remove", "clear", "__setitem__"):
            assert not hasattr(view, method)
    request.append_output_token_ids(7)
    request.append_output_token_ids([8, 9])
    assert request.output_token_ids == [7, 8, 9] and request.all_token_ids[2:] == [3, 7, 8, 9]
    assert (request.num_tokens, request.num_output_tokens) == (6, 3)
    request.spec_token_ids = [1, 2]
    assert request.num_tokens_with_spec == 8


def test_bad_requests():
    with pytest.raises(ValueError, match="request r: 0 prompt tokens"): make_request("r", [])
    with pytest.raises(ValueError, match="1 mm_hashes for 0 image"):
        Request("r", None, [1], SamplingParams(), mm_hashes=["h"])
    with pytest.raises(ValueError, match="image at 2, length 3"): make_request("r", 4, images=[(2, 3)])
    with pytest.raises(ValueError, match="image at 1, length 2"): make_request("r", 4, images=[(0, 2), (1, 2)])


@pytest.mark.parametrize("outputs, params, status, reason", [
    ([5], dict(max_tokens=2), R.RUNNING, None),
    ([5, 6], dict(max_tokens=2), R.FINISHED_LENGTH_CAPPED, None),
    ([5, EOS], dict(max_tokens=2), R.FINISHED_LENGTH_CAPPED, None),   # V0 says stop
    ([EOS], {}, R.FINISHED_STOPPED, None),
    ([EOS], dict(ignore_eos=True), R.RUNNING, None),
    ([EOS], dict(ignore_eos=True, stop_token_ids=[EOS]), R.FINISHED_STOPPED, EOS),
    ([42], dict(stop_token_ids=[42, 43]), R.FINISHED_STOPPED, 42),
    ([9], dict(eos_token_ids=[EOS, 9]), R.FINISHED_STOPPED, 9),
    ([EOS], dict(eos_token_ids=[EOS, 9]), R.FINISHED_STOPPED, None),
    ([9], dict(eos_token_ids=[9], ignore_eos=True), R.RUNNING, None),
    ([EOS], dict(min_tokens=2), R.RUNNING, None),                     # vllm#26317
    ([42, 42], dict(min_tokens=2, stop_token_ids=[42]), R.FINISHED_STOPPED, 42),
    ([5] * 10, dict(max_tokens=None), R.FINISHED_LENGTH_CAPPED, None),
])
def test_check_stop(outputs, params, status, reason):
    request = make_request("r", 10, **params)
    request.status = R.RUNNING
    request.append_output_token_ids(outputs)
    assert check_stop(request, 20) == (status is not R.RUNNING)
    assert (request.status, request.stop_reason) == (status, reason)


def test_window_of_12_leaves_2_tokens_to_a_prompt_of_10():
    scheduler = make_scheduler(max_model_len=12)
    scheduler.add_request(request := make_request("r", 10, max_tokens=None))
    assert request.max_tokens == NO_LIMIT
    while scheduler.has_unfinished_requests(): step(scheduler)
    assert request.num_output_tokens == 2 and request.status is R.FINISHED_LENGTH_CAPPED


def test_events_are_recorded_once_and_drained():
    scheduler = make_scheduler(num_blocks=4, prealloc=0, log_stats=True)
    for name in "ab": scheduler.add_request(make_request(name, 31, max_tokens=9))
    kinds = {name: [] for name in "ab"}
    while scheduler.has_unfinished_requests():
        for name, output in step(scheduler)[1].items():
            kinds[name] += [e.type for e in output.events or []]
    E = EngineCoreEventType
    assert kinds == {"a": [E.QUEUED, E.SCHEDULED], "b": [E.QUEUED, E.SCHEDULED, E.PREEMPTED]}


def in_flight(scheduler, *requests, num_scheduled, drafts):
    "Put requests into a step by hand, everything computed but the last token."
    for request in requests:
        request.num_computed_tokens = request.num_tokens - 1
        request.status, request.in_flight = R.RUNNING, num_scheduled
        scheduler.requests[request.request_id] = request
        scheduler.running.append(request)
    drafts = {i: d for i, d in drafts.items() if d}
    return SchedulerOutput([], [], num_scheduled, sum(num_scheduled.values()), drafts, {}, 0, set(), [])


@pytest.mark.parametrize("params, num_scheduled, drafts, sampled, expected", [
    (dict(max_tokens=10), {"0": 1, "1": 3}, {"1": [10]}, [[EOS], [10, 11]],
     {"0": (R.FINISHED_STOPPED, None, [EOS]), "1": (R.RUNNING, None, [10, 11])}),
    (dict(max_tokens=10, stop_token_ids=[42, 43]), {"0": 3, "1": 2}, {"0": [10, 42], "1": [13]}, [[10, 42, 12], [13, 14]],
     {"0": (R.FINISHED_STOPPED, 42, [10, 42]), "1": (R.RUNNING, None, [13, 14])}),
    (dict(max_tokens=2), {"0": 3, "1": 1}, {"0": [10, 11]}, [[10, 11, 12], [13]],
     {"0": (R.FINISHED_LENGTH_CAPPED, None, [10, 11]), "1": (R.RUNNING, None, [13])}),
    (dict(max_tokens=10, ignore_eos=True), {"0": 3}, {"0": [EOS, 10]}, [[EOS, 10, 11]],
     {"0": (R.RUNNING, None, [EOS, 10, 11])}),
])
def test_stop_table(params, num_scheduled, drafts, sampled, expected):
    scheduler = make_scheduler()
    requests = {i: make_request(i, 100, **params) for i in num_scheduled}
    order = in_flight(scheduler, *requests.values(), num_scheduled=num_scheduled, drafts=drafts)
    outputs = scheduler.update_from_output(order, ModelRunnerOutput(
        list(requests), {i: row for row, i in enumerate(requests)}, sampled)).outputs
    for (name, (status, reason, tokens)), output in zip(expected.items(), outputs):
        request = requests[name]
        assert (request.status, request.stop_reason, list(request.output_token_ids)) == (status, reason, tokens)
        assert (output.new_token_ids, output.finish_reason) == (tokens, status.finish_reason)
        assert (request in scheduler.running) == (status is R.RUNNING)
        assert (name in scheduler.finished_req_ids) == status.is_finished


# ---- queues (V073 2.5, 2.9) --------------------------------------------

def test_add_and_abort():
    scheduler = make_scheduler()
    requests = [make_request(str(i), 10) for i in range(10)]
    for i, request in enumerate(requests):
        scheduler.add_request(request)
        assert len(scheduler.waiting) == i + 1 and request.request_id in scheduler.requests
    for i, request in enumerate(requests):
        assert scheduler.get_num_unfinished_requests() == 10 - i
        scheduler.finish_requests(request.request_id, R.FINISHED_ABORTED)
        assert request.request_id not in scheduler.requests and len(scheduler.waiting) == 9 - i
    assert not scheduler.has_unfinished_requests() and scheduler.has_finished_requests()
    assert scheduler.schedule().finished_req_ids == set(map(str, range(10)))
    assert not scheduler.has_finished_requests(), "told once"


def test_finish_refuses_what_is_no_end():
    with pytest.raises(ValueError, match="RUNNING"): make_scheduler().finish_requests([], R.RUNNING)


def test_schedule_takes_all_that_fits():
    scheduler = make_scheduler()
    requests = [make_request(str(i), 10) for i in range(10)]
    for request in requests: scheduler.add_request(request)
    order = scheduler.schedule()
    assert len(order.scheduled_new_reqs) == 10 and not order.scheduled_cached_reqs
    assert not order.finished_req_ids and counts(order) == {str(i): 10 for i in range(10)}
    assert not scheduler.waiting and scheduler.running == requests


def test_lifecycle():
    scheduler = make_scheduler()
    sizes = lambda: (len(scheduler.waiting), len(scheduler.running))
    scheduler.add_request(make_request("0", 10, max_tokens=3))
    assert sizes() == (1, 0)
    step(scheduler)
    scheduler.add_request(make_request("1", 10))
    step(scheduler)
    assert sizes() == (0, 2)
    for name in "23": scheduler.add_request(make_request(name, 10))
    step(scheduler)
    assert sizes() == (0, 3), "request 0 has its three tokens"
    scheduler.finish_requests(["2"], R.FINISHED_ABORTED)
    assert names(scheduler.running) == ["1", "3"]
    scheduler.finish_requests(["1", "3"], R.FINISHED_ABORTED)
    assert sizes() == (0, 0)
    scheduler.add_request(again := make_request("0", 10, max_tokens=2))   # the id is free again
    while scheduler.has_unfinished_requests(): step(scheduler)
    assert again.num_output_tokens == 2
    assert scheduler.kv_cache_manager.num_free_blocks == 10_000


def test_an_id_in_use_is_refused():
    "vllm#8393: two requests under one id."
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", 3))
    with pytest.raises(ValueError, match="'r' is in use"): scheduler.add_request(make_request("r", 3))
    assert scheduler.get_num_unfinished_requests() == 1


def test_images_ten_requests():
    scheduler = make_scheduler(encoder_budget=8192)
    for i in range(10): scheduler.add_request(make_request(str(i), 200, images=[(i, 100)]))
    order, _ = step(scheduler)
    assert order.scheduled_encoder_inputs == {str(i): [0] for i in range(10)}
    assert counts(order) == {str(i): 200 for i in range(10)}


def test_images_partial_prefill():
    scheduler = make_scheduler(budget=1024, encoder_budget=1024)
    for i in range(3): scheduler.add_request(make_request(str(i), 800, images=[(100, 600)]))
    order, _ = step(scheduler)
    assert counts(order) == {"0": 800, "1": 100, "2": 100}
    assert order.scheduled_encoder_inputs == {"0": [0]}
    order, _ = step(scheduler)
    assert counts(order) == {"0": 1, "1": 700}
    assert order.scheduled_encoder_inputs == {"1": [0]} and len(order.scheduled_cached_reqs) == 2
    assert names(scheduler.running) == ["0", "1", "2"]


def test_concurrent_batches():
    "Two steps on their way at once: a request in flight is not scheduled again."
    scheduler = make_scheduler(budget=1024, max_seqs=2)
    scheduler.add_request(make_request("0", 512))
    first = scheduler.schedule()
    assert counts(first) == {"0": 512} and scheduler.get_num_unscheduled_requests() == 0
    scheduler.add_request(make_request("1", 512))
    assert scheduler.get_num_unscheduled_requests() == 1
    second = scheduler.schedule()
    assert counts(second) == {"1": 512}
    scheduler.update_from_output(first, make_result(first))
    third = scheduler.schedule()
    assert counts(third) == {"0": 1}
    scheduler.update_from_output(second, make_result(second))
    assert counts(scheduler.schedule()) == {"1": 1}


def test_batch_queue_call_by_call():
    scheduler = make_scheduler(budget=10, max_seqs=2, caching=False)
    for i in "01": scheduler.add_request(make_request(i, 12, max_tokens=20))
    def schedule(expected):
        order = scheduler.schedule()
        assert counts(order) == expected
        return order
    def update(order, expected):
        outputs = scheduler.update_from_output(order, make_result(order)).outputs
        scheduler.check_invariants()
        assert [o.request_id for o in outputs] == expected
    a, b = schedule({"0": 10}), schedule({"1": 10})
    assert counts(scheduler.schedule()) == {}, "everybody is in flight"
    update(a, [])
    c = schedule({"0": 2})
    update(b, [])
    d = schedule({"1": 2})
    update(c, ["0"])
    e = schedule({"0": 1})
    update(d, ["1"])
    schedule({"1": 1})
    update(e, ["0"])


def test_two_preempted_in_one_step_keep_their_order():
    "vllm#41951: FCFS puts the victims at the head, the older one first."
    scheduler = make_scheduler(num_blocks=8, prealloc=0)
    for i in range(4): scheduler.add_request(make_request(str(i), 32))
    step(scheduler)
    scheduler.running[0].append_output_token_ids([1] * 15)   # needs two blocks at once
    scheduler.running[1].append_output_token_ids([1] * 15)
    order = scheduler.schedule()
    assert names(scheduler.running) == ["0", "1"] and names(scheduler.waiting) == ["2", "3"]
    assert counts(order) == {"0": 16, "1": 16} and scheduler.num_preempted == 2


def test_resumed_request_sends_all_tokens_and_replaces_blocks():
    scheduler = make_scheduler(num_blocks=2, prealloc=0, caching=False)
    a, b = make_request("a", 16, max_tokens=2), make_request("b", 16, max_tokens=2)
    for request in (a, b): scheduler.add_request(request)
    step(scheduler, {"a": [1], "b": [2]})
    order, _ = step(scheduler)
    assert counts(order) == {"a": 1} and b.status is R.PREEMPTED
    assert (b.num_computed_tokens, "b" in scheduler.kv_cache_manager.req_to_blocks) == (0, False)
    order, _ = step(scheduler)
    [data] = order.scheduled_cached_reqs
    assert data.resumed_from_preemption and data.num_computed_tokens == 0
    assert data.new_token_ids == [*b.prompt_token_ids, 2] and len(data.new_block_ids) == 2
    assert order.finished_req_ids == {"a"}


def test_the_step_that_preempts_admits_nobody():
    scheduler = make_scheduler(num_blocks=4, prealloc=0, caching=False)
    for name in "ab": scheduler.add_request(make_request(name, 32))
    step(scheduler)
    scheduler.add_request(make_request("c", 3))
    order, _ = step(scheduler)
    assert counts(order) == {"a": 1} and names(scheduler.waiting) == ["b", "c"]


def test_partial_prefill_ignores_the_sampled_token():
    scheduler = make_scheduler(budget=16)
    scheduler.add_request(request := make_request("r", 20))
    _, outputs = step(scheduler, {"r": [77]})
    assert not outputs and request.num_output_tokens == 0 and request.num_computed_tokens == 16
    _, outputs = step(scheduler, {"r": [78]})
    assert outputs["r"].new_token_ids == [78]


def test_running_requests_without_budget_stay():
    scheduler = make_scheduler(budget=16, max_seqs=4)
    for i in "012": scheduler.add_request(make_request(i, 12))
    seen = [counts(step(scheduler)[0]) for _ in range(4)]
    assert seen == [{"0": 12, "1": 4}, {"0": 1, "1": 8, "2": 7}, {"0": 1, "1": 1, "2": 5}, {"0": 1, "1": 1, "2": 1}]


def test_data_for_workers_is_new_every_step():
    "0.7.3 changed one object per request in place: unsafe while two steps are on their way."
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", 4))
    step(scheduler)
    (first, _), (second, _) = step(scheduler), step(scheduler)
    assert first.scheduled_cached_reqs[0] is not second.scheduled_cached_reqs[0]
    assert [o.scheduled_cached_reqs[0].num_computed_tokens for o in (first, second)] == [4, 5]


def test_full_hit_recomputes_one_block():
    "nano-vllm#199, #114, #117, #144; vllm#30320, #53706."
    scheduler = make_scheduler(num_blocks=20, prealloc=0)
    prompt = list(range(32))
    scheduler.add_request(make_request("a", prompt, max_tokens=1))
    step(scheduler, {"a": [7]})
    scheduler.add_request(b := make_request("b", prompt, max_tokens=1))
    order, outputs = step(scheduler, {"b": [7]})
    [new] = order.scheduled_new_reqs
    assert (new.num_computed_tokens, new.block_ids, counts(order)) == (16, [0, 2], {"b": 16})
    assert outputs["b"].new_token_ids == [7] and outputs["b"].num_cached_tokens == 16
    assert b.num_cached_tokens == 16


def test_same_step_hit():
    "Blocks can be hit as soon as they are scheduled: the batch writes before it reads."
    scheduler = make_scheduler(num_blocks=20, prealloc=0)
    for name in "ab": scheduler.add_request(make_request(name, list(range(40))))
    order, _ = step(scheduler)
    assert {r.req_id: r.num_computed_tokens for r in order.scheduled_new_reqs} == {"a": 0, "b": 32}


# ---- golden traces (V073 2.21) -----------------------------------------

def golden(scheduler, arrivals, num_steps):
    "Per step: counts, new blocks, order."
    rows = []
    for n in range(num_steps):
        for request in arrivals.get(n, []): scheduler.add_request(request)
        order, _ = step(scheduler)
        rows.append((counts(order), {i: b for i, b in new_blocks(order).items() if b}, order))
    return rows


def test_t1():
    scheduler = make_scheduler(num_blocks=64, block_size=4, budget=32, prealloc=0)
    rows = golden(scheduler, {0: [make_request("A", 20, 4)], 1: [make_request("B", 40, 4)],
                              2: [make_request("C", 6, 4)]}, 6)
    assert [r[0] for r in rows] == [
        {"A": 20}, {"A": 1, "B": 31}, {"A": 1, "B": 9, "C": 6}, {"A": 1, "B": 1, "C": 1},
        {"B": 1, "C": 1}, {"B": 1, "C": 1}]
    assert [r[1] for r in rows] == [
        {"A": [0, 1, 2, 3, 4]}, {"A": [5], "B": [6, 7, 8, 9, 10, 11, 12, 13]},
        {"B": [14, 15], "C": [16, 17]}, {"B": [18]}, {}, {"C": [19]}]
    assert rows[4][2].finished_req_ids == {"A"}


@pytest.mark.parametrize("caching, step5, step6, step10", [
    (False, {"A": [4], "B": [5]}, [0, 1, 6], [4]),
    (True, {"A": [5], "B": [4]}, [5, 6, 1], [0]),
])
def test_t2(caching, step5, step6, step10):
    scheduler = make_scheduler(num_blocks=8, block_size=4, prealloc=0, caching=caching)
    rows = golden(scheduler, {0: [make_request(name, 8, 6) for name in "ABC"]}, 11)
    assert rows[0][1] == {"A": [0, 1], "B": [2, 3], "C": [4, 5]}
    assert rows[1][:2] == ({"A": 1, "B": 1}, {"A": [6], "B": [7]})
    assert [r[0] for r in rows[2:5]] == [{"A": 1, "B": 1}] * 3
    assert rows[5][:2] == ({"A": 1, "B": 1}, step5)
    assert rows[6][:2] == ({"C": 9}, {"C": step6}) and rows[6][2].finished_req_ids == {"A", "B"}
    [resumed] = rows[6][2].scheduled_cached_reqs
    assert resumed.resumed_from_preemption and resumed.num_computed_tokens == 0
    assert rows[10][:2] == ({"C": 1}, {"C": step10})


def test_t2_preallocation_causes_the_preemption_it_wanted_to_save():
    scheduler = make_scheduler(num_blocks=8, block_size=4, prealloc=4)
    rows = golden(scheduler, {0: [make_request(name, 8, 6) for name in "ABC"]}, 5)
    assert rows[0][1] == {"A": [0, 1, 2], "B": [3, 4, 5], "C": [6, 7]}
    assert rows[1][0] == {"A": 1, "B": 1} and names(scheduler.waiting) == ["C"]
    order = scheduler.schedule()
    assert (counts(order), new_blocks(order)["A"]) == ({"A": 1}, [7, 6])
    assert names(scheduler.waiting) == ["B", "C"]
    assert [b.block_id for b in scheduler.kv_cache_manager.pool.free_queue] == [5, 4, 3]
    scheduler.update_from_output(order, make_result(order))
    order = scheduler.schedule()
    b, c = order.scheduled_cached_reqs
    assert (b.num_computed_tokens, b.new_block_ids, counts(order)) == (12, [3, 4, 5, 6, 7], {"B": 1, "C": 9})
    assert (c.num_computed_tokens, c.new_block_ids) == (0, [2, 1, 0])


def test_t4():
    scheduler = make_scheduler(num_blocks=64, block_size=4, budget=16, prealloc=0)
    prompt = list(range(22))
    rows = golden(scheduler, {i: [make_request(name, prompt, 3)] for i, name in enumerate("XYZ")}, 5)
    assert [r[0] for r in rows] == [
        {"X": 16}, {"X": 6, "Y": 2}, {"X": 1, "Y": 1, "Z": 2}, {"X": 1, "Y": 1, "Z": 1}, {"Z": 1}]
    assert [r[1] for r in rows[:3]] == [
        {"X": [0, 1, 2, 3]}, {"X": [4, 5], "Y": [0, 1, 2, 3, 4, 6]}, {"Z": [0, 1, 2, 3, 4, 7]}]
    for n in (1, 2): assert rows[n][2].scheduled_new_reqs[0].num_computed_tokens == 20
    assert [r[2].num_common_prefix_blocks for r in rows][:2] == [4, 5]
    assert rows[4][2].num_common_prefix_blocks == 6


def test_rollback_of_rejected_drafts():
    scheduler = make_scheduler(num_blocks=64, block_size=4, prealloc=0)
    scheduler.add_request(request := make_request("r", 13))
    step(scheduler, {"r": [1]}, {"r": [7, 8, 9]})
    assert (request.num_computed_tokens, request.num_tokens) == (13, 14)
    order = scheduler.schedule()
    assert counts(order) == {"r": 4} and order.scheduled_spec_decode_tokens == {"r": [7, 8, 9]}
    assert order.scheduled_cached_reqs[0].new_token_ids == [1]
    assert scheduler.kv_cache_manager.num_cached_block["r"] == 3
    scheduler.update_from_output(order, make_result(order, {"r": [7, 99]}, {}))
    assert (request.num_computed_tokens, request.num_tokens) == (15, 16)
    assert request.output_token_ids == [1, 7, 99]
    order = scheduler.schedule()
    assert counts(order) == {"r": 1} and order.scheduled_cached_reqs[0].new_token_ids == [99]
    assert scheduler.kv_cache_manager.num_cached_block["r"] == 4


# ---- drafts ------------------------------------------------------------

def test_drafts_are_cut_by_the_budget():
    scheduler = make_scheduler(budget=16, prealloc=0)
    for i in range(8): scheduler.add_request(make_request(str(i), 2))
    step(scheduler, drafts={str(i): [1, 2, 3] for i in range(8)})
    order, _ = step(scheduler, drafts={})
    assert counts(order) == {"0": 4, "1": 4, "2": 4, "3": 4}
    assert [r.request_id for r in scheduler.running if r.spec_token_ids] == ["4", "5", "6", "7"]
    request = scheduler.running[4]
    assert tokens_wanted(request, 99, 8192) == 4 and tokens_wanted(request, 2, 8192) == 2


def test_drafts_stop_at_the_window():
    "BUG K of 0.7.3, vllm#16087: 30 tokens + 5 drafts in a window of 32."
    scheduler = make_scheduler(num_blocks=4, max_model_len=32, prealloc=0)
    scheduler.add_request(request := make_request("r", 29))
    step(scheduler, {"r": [1]}, {"r": [2, 3, 4, 5, 6]})
    order, outputs = step(scheduler, {"r": [2, 3, 4]})
    assert counts(order) == {"r": 3} and order.scheduled_spec_decode_tokens == {"r": [2, 3]}
    assert outputs["r"].new_token_ids == [2, 3] and request.num_tokens == 32
    assert outputs["r"].finish_reason is FinishReason.LENGTH


def test_preemption_clears_drafts():
    "vllm#28558."
    scheduler = make_scheduler(num_blocks=4, prealloc=0, caching=False)
    for name in "ab": scheduler.add_request(make_request(name, 32))
    step(scheduler, drafts={"a": [], "b": [1, 2, 3]})
    order, _ = step(scheduler)
    assert counts(order) == {"a": 1} and not order.scheduled_spec_decode_tokens
    assert scheduler.waiting[0].spec_token_ids == []


def test_drafts_are_dropped_before_anybody_is_preempted():
    scheduler = make_scheduler(num_blocks=4, prealloc=0)
    for name in "ab": scheduler.add_request(make_request(name, 31))
    step(scheduler, drafts={"a": [1, 2, 3], "b": [1, 2, 3]})
    order, _ = step(scheduler)
    assert counts(order) == {"a": 1, "b": 1} and not scheduler.num_preempted


def test_drafts_do_not_outlive_their_step():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", 4))
    step(scheduler, drafts={"r": [1, 2]})
    step(scheduler, {"r": [9]}, drafts=None)
    assert counts(step(scheduler)[0]) == {"r": 1}


# ---- encoder budget ----------------------------------------------------

def test_two_images_share_one_cache():
    "BUG F of 0.7.3: each was asked about alone, so both fitted."
    scheduler = make_scheduler(encoder_budget=150, encoder_cache=100)
    scheduler.add_request(make_request("r", 200, images=[(10, 75), (100, 75)]))
    seen = []
    while not seen or seen[-1] != {"r": 1}: seen.append(counts(step(scheduler)[0]))
    assert seen == [{"r": 100}, {"r": 100}, {"r": 1}]


def test_preemption_frees_encoder_entries():
    "BUG M of 0.7.3: a deadlock with an empty step."
    scheduler = make_scheduler(num_blocks=10, encoder_budget=100, prealloc=0, caching=False, max_model_len=200, budget=134)
    requests = {"C": make_request("C", 15), "A": make_request("A", 155, images=[(10, 60), (90, 65)]),
                "P": make_request("P", 94, images=[(4, 40)])}
    for request in requests.values(): scheduler.add_request(request)
    seen = []
    while scheduler.has_unfinished_requests():
        seen.append(counts(step(scheduler)[0]))
        assert seen[-1], f"an empty step after {seen}"
    assert seen[:2] == [{"C": 15, "A": 90, "P": 29}, {"C": 1}]
    assert all(r.status is R.FINISHED_LENGTH_CAPPED for r in requests.values())
    assert all(r.num_output_tokens == 16 or r.stop_reason for r in requests.values())
    assert scheduler.encoder_cache_manager.num_free_slots == 100


def test_failed_allocation_keeps_no_encoder_slots():
    scheduler = make_scheduler(num_blocks=4, encoder_budget=100, prealloc=0, caching=False)
    scheduler.add_request(make_request("a", 48, max_tokens=9))
    step(scheduler)
    scheduler.add_request(make_request("b", 40, images=[(0, 30)]))
    step(scheduler)
    assert names(scheduler.waiting) == ["b"] and scheduler.encoder_cache_manager.num_free_slots == 100


def test_image_longer_than_the_encoder_is_refused():
    "vllm#16795."
    scheduler = make_scheduler(encoder_budget=100)
    with pytest.raises(ValueError, match="image of 101 tokens, the encoder takes at most 100"):
        scheduler.add_request(make_request("r", 200, images=[(0, 101)]))
    with pytest.raises(ValueError, match="at most 0"):
        make_scheduler().add_request(make_request("r", 200, images=[(0, 1)]))


# ---- what can never run; liveness --------------------------------------

def test_prompts_that_fit_no_window():
    scheduler = make_scheduler(max_model_len=32)
    with pytest.raises(ValueError, match="32 prompt tokens, at most 31 fit max_model_len 32"):
        scheduler.add_request(make_request("r", 32))
    scheduler.add_request(make_request("r", 32, max_tokens=0))
    with pytest.raises(ValueError, match="33 prompt tokens"):
        scheduler.add_request(make_request("s", 33, max_tokens=0))
    assert scheduler.get_num_unfinished_requests() == 1


def test_prompt_longer_than_the_pool_ends_with_a_reason():
    "vllm#2163, vllm#45414: never block the queue for ever."
    scheduler = make_scheduler(num_blocks=4, max_model_len=1000)
    for name, n in (("big", 65), ("small", 10)): scheduler.add_request(make_request(name, n))
    order, outputs = step(scheduler)
    assert counts(order) == {"small": 10}
    big = outputs["big"]
    assert big.finish_reason is FinishReason.LENGTH and big.new_token_ids == []
    assert big.stop_reason == "65 tokens need 5 KV cache blocks, there are 4"


def test_output_longer_than_the_pool_ends_with_what_there_is():
    scheduler = make_scheduler(num_blocks=4, max_model_len=1000, prealloc=0)
    scheduler.add_request(a := make_request("a", 30, max_tokens=999))
    scheduler.add_request(b := make_request("b", 10, max_tokens=4))
    outputs = {}
    while scheduler.has_unfinished_requests():
        order, out = step(scheduler)
        assert order.total_num_scheduled_tokens or out
        outputs |= out
    # Its 64th token is computed and makes the 65th; that one has no place.
    assert a.status is R.FINISHED_LENGTH_CAPPED and a.num_tokens == 65
    assert outputs["a"].finish_reason is FinishReason.LENGTH and outputs["a"].new_token_ids == []
    assert "need 5 KV cache blocks" in outputs["a"].stop_reason
    assert b.num_output_tokens == 4 and scheduler.kv_cache_manager.num_free_blocks == 4


def test_outputs_of_a_step_without_tokens():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add_request(make_request("big", 100))
    order = scheduler.schedule()
    assert order.total_num_scheduled_tokens == 0 and not scheduler.has_unfinished_requests()
    [output] = scheduler.update_from_output(order, None).outputs
    assert output.request_id == "big" and output.finished
    assert order.finished_req_ids == {"big"}, "workers never knew it; telling them is harmless"


def test_a_step_is_never_empty_because_somebody_made_room():
    "P gives up its blocks and the encoder slots A was waiting for: A goes on in the same step."
    scheduler = make_scheduler(num_blocks=10, budget=119, encoder_budget=100, prealloc=0, caching=False)
    scheduler.add_request(make_request("A", 155, images=[(10, 60), (90, 65)], max_tokens=4))
    scheduler.add_request(make_request("P", 94, images=[(4, 40)], max_tokens=4))
    assert counts(step(scheduler)[0]) == {"A": 90, "P": 29}
    order, _ = step(scheduler)
    assert counts(order) == {"A": 65} and names(scheduler.waiting) == ["P"]
    assert ("P", 0) in order.free_encoder_input_ids and order.scheduled_encoder_inputs == {"A": [1]}
    while scheduler.has_unfinished_requests():
        assert step(scheduler)[0].total_num_scheduled_tokens


def test_max_num_seqs_limits_what_runs():
    "vllm#53130."
    scheduler = make_scheduler(max_seqs=2)
    requests = [make_request(str(i), 5, max_tokens=1 + i) for i in range(6)]
    for request in requests: scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        assert len(step(scheduler)[0].num_scheduled_tokens) <= 2
    assert [r.num_output_tokens for r in requests] == [1, 2, 3, 4, 5, 6]


def test_scoring_request():
    "max_tokens=0: the prompt is computed, nothing is generated."
    scheduler = make_scheduler(budget=16)
    scheduler.add_request(request := make_request("r", 20, max_tokens=0, prompt_logprobs=1))
    assert not step(scheduler)[1]
    order = scheduler.schedule()
    logprobs = LogprobsLists([[1, 2]] * 19, [[-1.0, -2.0]] * 19, [1] * 19)
    result = make_result(order, {"r": [5]})
    result.prompt_logprobs_dict = {"r": logprobs}
    [output] = scheduler.update_from_output(order, result).outputs
    assert output.new_token_ids == [] and output.finish_reason is FinishReason.LENGTH
    assert output.new_prompt_logprobs is logprobs and request.num_output_tokens == 0
    assert not scheduler.has_unfinished_requests()


def test_prompt_logprobs_skip_the_cache():
    "vllm#3251: token ids 0..32 twice."
    scheduler = make_scheduler()
    for name in "ab": scheduler.add_request(make_request(name, list(range(33)), prompt_logprobs=1))
    assert counts(step(scheduler)[0]) == {"a": 33, "b": 33}


def test_each_request_gets_its_own_logprobs():
    scheduler = make_scheduler()
    for name, k in (("a", 1), ("b", None), ("c", 1)): scheduler.add_request(make_request(name, 4, logprobs=k))
    order = scheduler.schedule()
    result = make_result(order, {"a": [10], "b": [20], "c": [30]})
    result.logprobs = LogprobsLists([[10, 1], [20, 2], [30, 3]], [[-1., -1.], [-2., -2.], [-3., -3.]], [1, 2, 3])
    outputs = {o.request_id: o for o in scheduler.update_from_output(order, result).outputs}
    assert outputs["a"].new_logprobs == ([[10, 1]], [[-1., -1.]], [1])
    assert outputs["b"].new_logprobs is None
    assert outputs["c"].new_logprobs == ([[30, 3]], [[-3., -3.]], [3])


def test_logprob_rows_of_several_tokens():
    assert logprob_starts([[1], [], [2]], 3) == [0, 1, 2]      # a row for each request
    assert logprob_starts([[1, 2], [3], [4]], 4)[:3] == [0, 2, 3]  # a row for each token


# ---- aborts at every moment --------------------------------------------

def test_abort_between_schedule_and_update():
    "vllm#42157."
    scheduler = make_scheduler()
    for name in "ab": scheduler.add_request(make_request(name, 4))
    order = scheduler.schedule()
    scheduler.finish_requests(["a", "never heard of"], R.FINISHED_ABORTED)
    outputs = scheduler.update_from_output(order, make_result(order)).outputs
    assert [o.request_id for o in outputs] == ["b"]
    order, _ = step(scheduler)
    assert counts(order) == {"b": 1} and order.finished_req_ids == {"a"}


def test_abort_of_a_finished_request_does_nothing():
    "vllm#25067."
    scheduler = make_scheduler()
    scheduler.add_request(request := make_request("r", 4, max_tokens=1))
    step(scheduler)
    for _ in range(2): scheduler.finish_requests(["r"], R.FINISHED_ABORTED)
    assert request.status is R.FINISHED_LENGTH_CAPPED
    assert scheduler.kv_cache_manager.num_free_blocks == 10_000


def test_same_id_again_while_the_old_step_is_on_its_way():
    "An id is finished and new in one order; the old step's token is nobody's."
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", 4))
    old = scheduler.schedule()
    scheduler.finish_requests("r", R.FINISHED_ABORTED)
    scheduler.add_request(again := make_request("r", 4))
    new = scheduler.schedule()
    assert new.finished_req_ids == {"r"} and counts(new) == {"r": 4}
    assert not scheduler.update_from_output(old, make_result(old, {"r": [1]})).outputs
    [output] = scheduler.update_from_output(new, make_result(new, {"r": [2]})).outputs
    assert output.new_token_ids == [2] and again.output_token_ids == [2]


def test_victim_is_never_in_flight():
    scheduler = make_scheduler(num_blocks=4, prealloc=0, caching=False, budget=64)
    scheduler.add_request(a := make_request("a", 32))
    step(scheduler)
    scheduler.add_request(make_request("b", 32))
    scheduler.running[0].in_flight = {}          # pretend: a is in an older step
    first = scheduler.schedule()
    assert counts(first) == {"b": 32}
    a.in_flight = None                           # a's result came; b is on its way
    order = scheduler.schedule()
    assert counts(order) == {} and names(scheduler.running) == ["b"] and names(scheduler.waiting) == ["a"]
    [output] = scheduler.update_from_output(first, make_result(first)).outputs
    assert output.request_id == "b"
    scheduler.check_invariants()


def test_reset_of_the_prefix_cache():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", 40, max_tokens=1))
    order = scheduler.schedule()
    assert scheduler.reset_prefix_cache() is False
    scheduler.update_from_output(order, make_result(order))
    assert scheduler.reset_prefix_cache() is True


def test_stats():
    scheduler = make_scheduler(num_blocks=6, prealloc=0, log_stats=True)
    for name in "ab": scheduler.add_request(make_request(name, list(range(32)), max_tokens=9))
    order = scheduler.schedule()
    stats = scheduler.update_from_output(order, make_result(order)).scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (2, 0, 0.5)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_preempted_reqs) == (4, 2, 0)
    assert scheduler.make_stats().prefix_cache_queries == 0, "counters start again"
    assert make_scheduler().make_stats() is None


def test_invariants_notice():
    scheduler = make_scheduler()
    scheduler.add_request(request := make_request("r", 4))
    step(scheduler)
    request.status = R.WAITING
    with pytest.raises(AssertionError, match="r runs as"): scheduler.check_invariants()
    request.status, request.num_computed_tokens = R.RUNNING, 9
    with pytest.raises(AssertionError, match="9 of 5 tokens"): scheduler.check_invariants()
