"""V0's scheduler: the reference's scenarios and golden traces, its quirks, and what differs on purpose."""
import time
from types import SimpleNamespace

import pytest
from v0_fake_worker import V0Engine
from v0_scheduling import add, append, chunks, finish_step, fork, make_plan, make_group, make_scheduler, names, schedule, step, tables

from minengine.v0.block_manager import AllocStatus
from minengine.v0.queues import PreemptionMode, choose_preemption_mode
from minengine.v0.scheduling_budget import PartialPrefillMetadata, SchedulingBudget, chunk_size, count_new_tokens
from minengine.v0.sequence import SequenceStatus

S = SequenceStatus


def add_all(scheduler, num, length, first=0, **params):
    groups = [make_group(first + i, length, scheduler.cache_config.block_size, **params) for i in range(num)]
    for group in groups: scheduler.add_seq_group(group)
    return groups


def run_prompts(scheduler, num, length, **params):
    groups = add_all(scheduler, num, length, **params)
    step(scheduler)
    assert names(scheduler.running) == names(groups)
    return groups


def cannot_append(scheduler, monkeypatch, *names, times=None):
    "Say that these groups find no slots; with `times`, so often only."
    real, left = scheduler.block_manager.can_append_slots, [times]
    def can(group, num_lookahead_slots):
        if group.request_id not in names or left[0] == 0: return real(group, num_lookahead_slots)
        if left[0]: left[0] -= 1
        return False
    monkeypatch.setattr(scheduler.block_manager, "can_append_slots", can)


def answer(scheduler, monkeypatch, question, status):
    monkeypatch.setattr(scheduler.block_manager, question, lambda *args, **kwargs: status)


# ---- budget (V073 1.2) -------------------------------------------------

def test_budget_counts_each_request_once():
    budget = SchedulingBudget(token_budget=4, max_num_seqs=4)
    for _ in range(2):
        budget.add_num_batched_tokens("1", 2, 7)
        budget.add_num_seqs("1", 2)
    assert (budget.num_batched_tokens, budget.num_cached_tokens, budget.num_curr_seqs) == (2, 7, 2)
    budget.subtract_num_batched_tokens("2", 2)
    budget.subtract_num_seqs("2", 2)
    assert (budget.num_batched_tokens, budget.num_curr_seqs) == (2, 2)
    for _ in range(2):
        budget.subtract_num_batched_tokens("1", 2)
        budget.subtract_num_seqs("1", 2)
    assert (budget.num_batched_tokens, budget.num_cached_tokens, budget.num_curr_seqs) == (0, 7, 0)


def test_budget_limits():
    budget = SchedulingBudget(token_budget=4, max_num_seqs=4)
    assert budget.can_schedule(num_new_tokens=4, num_new_seqs=1) and budget.can_schedule(1, 4)
    assert not budget.can_schedule(5, 1) and not budget.can_schedule(1, 5)
    budget.add_num_batched_tokens("a", 4, 99)
    assert budget.remaining_token_budget() == 0, "cached tokens are free of charge"
    assert budget.can_schedule(0, 1) and not budget.can_schedule(1, 1)
    with pytest.raises(AssertionError, match="1 tokens of 0 sequences"): budget.can_schedule(1, 0)


@pytest.mark.parametrize("new, remaining, slot, block_size, chunk", [
    (60, 64, 64, None, 60), (60, 4, 64, None, 4), (60, 64, 32, None, 32), (60, 0, 64, None, 0),
    (50, 14, 14, 4, 12), (50, 60, 30, 4, 28), (12, 14, 14, 4, 12), (1, 3, 3, 4, 0), (1, 4, 4, 4, 1),
])
def test_chunk_size(new, remaining, slot, block_size, chunk):
    assert chunk_size(new, remaining, slot, block_size) == chunk


def test_count_new_tokens():
    prompt, decode = make_group("p", 8).first_seq, make_group("d", 8).first_seq
    decode.data.update_num_computed_tokens(8)
    append(decode)
    assert count_new_tokens([prompt], None) == (8, 0)
    assert count_new_tokens([decode, decode], None) == (2, 0)
    assert count_new_tokens([prompt], lambda seq: 4) == (4, 4)
    assert count_new_tokens([prompt], lambda seq: 8) == (1, 7), "a full hit leaves one to compute"
    prompt.data.update_num_computed_tokens(6)
    assert count_new_tokens([prompt], lambda seq: 4) == (2, 0), "hits were used up by an earlier chunk"
    assert count_new_tokens([], None) == (0, 0)


# ---- the default policy (V073 1.3) -------------------------------------

def test_simple():
    scheduler = make_scheduler(max_seqs=4, max_model_len=16)
    groups = add_all(scheduler, 4, 4)
    metadata, outputs = step(scheduler)
    assert [s.seq_group for s in outputs.scheduled_seq_groups] == groups and outputs.num_batched_tokens == 16
    assert not (outputs.blocks_to_copy or outputs.blocks_to_swap_in or outputs.blocks_to_swap_out)
    assert [m.token_chunk_size for m in metadata] == [4] * 4 and all(m.do_sample for m in metadata)
    metadata, outputs = step(scheduler)
    assert chunks(outputs) == [(str(i), 1) for i in range(4)] and outputs.num_batched_tokens == 4
    assert outputs.num_prefill_groups == 0 and not outputs.is_empty()


def test_prompts_go_first_and_alone():
    scheduler = make_scheduler(budget=30, max_seqs=2, num_gpu=64)
    add(scheduler, make_group("A", 1))
    assert chunks(step(scheduler)[1]) == [("A", 1)]
    add(scheduler, make_group("B", 30))
    assert chunks(step(scheduler)[1]) == [("B", 30)], "A stalls"
    assert chunks(step(scheduler)[1]) == [("A", 1), ("B", 1)]


def test_preempt_then_abort():
    scheduler = make_scheduler(max_seqs=2, num_gpu=2, num_cpu=2)
    add_all(scheduler, 2, 4)
    assert step(scheduler)[1].num_batched_tokens == 8
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("0", 1)] and outputs.num_batched_tokens == 1 and outputs.preempted == 1
    assert not (outputs.blocks_to_swap_in or outputs.blocks_to_swap_out)
    scheduler.abort_seq_group("0")
    metadata, outputs = step(scheduler)
    assert chunks(outputs) == [("1", 5)] and metadata[0].is_prompt, "its one output is part of the prompt now"


def test_max_num_seqs():
    scheduler = make_scheduler(max_seqs=2)
    add_all(scheduler, 4, 4)
    assert chunks(step(scheduler)[1]) == [("0", 4), ("1", 4)]
    assert chunks(step(scheduler)[1]) == [("0", 1), ("1", 1)] and names(scheduler.waiting) == ["2", "3"]


def test_the_head_blocks_those_behind_it():
    scheduler = make_scheduler(num_gpu=4)
    add(scheduler, make_group("x", 9))
    step(scheduler)
    add(scheduler, make_group("big", 12), make_group("small", 2))
    assert chunks(step(scheduler)[1]) == [("x", 1)] and names(scheduler.waiting) == ["big", "small"]


def test_delay_factor(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    scheduler = make_scheduler(delay_factor=0.5)
    add(scheduler, make_group("A", 8, arrival=now[0]))
    step(scheduler)
    now[0] += 1
    add(scheduler, make_group("B", 8, arrival=now[0]))
    assert chunks(step(scheduler)[1]) == [("A", 1)] and scheduler.last_prompt_latency == 1.0
    now[0] += 0.6
    assert chunks(step(scheduler)[1]) == [("B", 8)]


def test_the_delay_ends_when_nothing_runs(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    scheduler = make_scheduler(delay_factor=100)
    add(scheduler, make_group("A", 8, arrival=now[0], max_tokens=2))
    step(scheduler)
    now[0] += 10
    add(scheduler, make_group("B", 8, arrival=now[0]))
    assert chunks(step(scheduler)[1]) == [("A", 1)]
    assert chunks(step(scheduler)[1]) == [("B", 8)], "A is gone"


def test_the_clock_of_the_delay_runs_inside_a_step(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    scheduler = make_scheduler(delay_factor=0.5)
    add_all(scheduler, 2, 4)
    step(scheduler)      # looks three times: at each prompt, and once more
    assert (scheduler.prev_time, scheduler.prev_prompt, scheduler.last_prompt_latency) == (2.0, True, 0.0)
    step(scheduler)
    assert (scheduler.prev_time, scheduler.prev_prompt, scheduler.last_prompt_latency) == (3.0, False, 1.0)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_that_is_too_long_is_ignored(chunked):
    scheduler = make_scheduler(budget=100, max_model_len=30, num_gpu=64, chunked=chunked)
    group = add(scheduler, make_group("long", 60))
    plan = make_plan(100, enable_chunking=chunked)
    out, budget = scheduler._schedule_prefills(plan), plan.budget
    assert names(out.ignored_seq_groups) == ["long"] and not out.seq_groups
    assert (budget.num_batched_tokens, budget.num_curr_seqs, len(scheduler.waiting)) == (0, 0, 0)
    assert group.first_seq.status == S.FINISHED_IGNORED
    assert S.get_finished_reason(S.FINISHED_IGNORED) == "length"
    assert group.first_seq.stop_reason == "60 tokens, a prompt has at most 30"


@pytest.mark.parametrize("tokens, used, num, scheduled, batched, waiting", [
    (0, 0, 1, 0, 0, 1), (60, 0, 2, 1, 60, 1), (60, 30, 1, 0, 30, 1), (90, 30, 1, 1, 90, 0)])
def test_prefill_token_budget(tokens, used, num, scheduled, batched, waiting):
    scheduler = make_scheduler(budget=100, num_gpu=160)
    add_all(scheduler, num, 60)
    plan = make_plan(tokens)
    plan.budget.add_num_batched_tokens("used before", used)
    out, budget = scheduler._schedule_prefills(plan), plan.budget
    assert (len(out.seq_groups), budget.num_batched_tokens, len(scheduler.waiting)) == (scheduled, batched, waiting)


@pytest.mark.parametrize("used, scheduled", [(0, 2), (2, 0)])
def test_prefill_max_seqs(used, scheduled):
    scheduler = make_scheduler(num_gpu=64)
    add_all(scheduler, 3, 4)
    plan = make_plan(seqs=2)
    if used: plan.budget.add_num_seqs("used before", used)
    out, budget = scheduler._schedule_prefills(plan), plan.budget
    assert len(out.seq_groups) == scheduled and len(scheduler.waiting) == 3 - scheduled
    assert budget.num_curr_seqs == 2


def test_prefill_with_adapters():
    scheduler = make_scheduler(num_gpu=64, lora_config=SimpleNamespace(max_loras=1))
    adapters = [SimpleNamespace(lora_int_id=i) for i in (1, 2)]
    add(scheduler, *[make_group(f"a{a.lora_int_id}", 4, lora=a) for a in adapters], make_group("plain", 4))
    out = scheduler._schedule_prefills(make_plan(loras=(loras := set()), max_loras=1))
    assert names(s.seq_group for s in out.seq_groups) == ["a1", "plain"] and loras == {1}
    assert names(scheduler.waiting) == ["a2"]


def test_rows_of_one_adapter_are_neighbours():
    scheduler = make_scheduler(num_gpu=64, chunked=True, lora_config=SimpleNamespace(max_loras=2))
    lora = {i: SimpleNamespace(lora_int_id=i) for i in (1, 2)}
    for name, i in (("d", 2), ("c", 1), ("b", 2)): add(scheduler, make_group(name, 4, lora=lora[i]))
    assert [name for name, _ in chunks(step(scheduler)[1])] == ["c", "b", "d"]
    add(scheduler, make_group("z", 4, lora=lora[1]), make_group("a", 4, lora=lora[2]))
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("z", 4), ("a", 4), ("c", 1), ("b", 1), ("d", 1)] and outputs.num_prefill_groups == 2


def test_prefill_can_allocate(monkeypatch):
    scheduler = make_scheduler(num_gpu=64)
    group = add(scheduler, make_group("1", 4))
    answer(scheduler, monkeypatch, "can_allocate", AllocStatus.LATER)
    out = scheduler._schedule_prefills(make_plan())
    assert not out.seq_groups and not out.ignored_seq_groups and len(scheduler.waiting) == 1
    answer(scheduler, monkeypatch, "can_allocate", AllocStatus.NEVER)
    out = scheduler._schedule_prefills(make_plan())
    assert names(out.ignored_seq_groups) == ["1"] and not scheduler.waiting and group.is_finished()


def test_a_pool_that_is_too_small_ends_a_request():
    scheduler = make_scheduler(num_gpu=2)
    group = add(scheduler, make_group("1", 9))
    metadata, outputs = schedule(scheduler)
    assert outputs.is_empty() and names(outputs.ignored_seq_groups) == ["1"] and not metadata
    assert group.first_seq.stop_reason == "9 tokens need more KV cache blocks than there are"
    assert not scheduler.has_unfinished_seqs() and scheduler.get_and_reset_finished_requests_ids() == ["1"]


def test_decodes_preempt_from_the_tail(monkeypatch):
    scheduler = make_scheduler(num_gpu=64)
    run_prompts(scheduler, 3, 4)
    cannot_append(scheduler, monkeypatch, "1")
    out = scheduler._schedule_running(plan := make_plan())
    assert names(s.seq_group for s in out.decode_seq_groups) == ["0"] and not out.prefill_seq_groups
    assert names(out.preempted) == ["2", "1"] and not out.swapped_out and out.num_preempted == 2
    assert not (out.blocks_to_swap_out or out.blocks_to_copy) and plan.budget.num_batched_tokens == 1


def test_the_preempted_come_back_in_their_old_order(monkeypatch):
    scheduler = make_scheduler(num_gpu=64)
    run_prompts(scheduler, 3, 4)
    add(scheduler, make_group("new", 60))
    answer(scheduler, monkeypatch, "can_allocate", AllocStatus.LATER)
    cannot_append(scheduler, monkeypatch, "1")
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("0", 1)] and outputs.preempted == 2
    assert names(scheduler.waiting) == ["1", "2", "new"]


def run_pairs(scheduler, num):
    "Groups of two sequences each, as after a prompt with n = 2."
    groups = run_prompts(scheduler, num, 60, n=2, max_tokens=9)
    for group in groups: fork(scheduler, group)
    return groups


def test_several_sequences_are_swapped(monkeypatch):
    scheduler = make_scheduler(budget=500, num_gpu=64, num_cpu=64)
    groups = run_pairs(scheduler, 3)
    cannot_append(scheduler, monkeypatch, "2")
    monkeypatch.setattr(scheduler.block_manager, "swap_out", lambda group: [(5, 7)])
    out = scheduler._schedule_running(make_plan())
    assert names(s.seq_group for s in out.decode_seq_groups) == ["0", "1"]
    assert not out.preempted and out.swapped_out == [groups[2]] and out.blocks_to_swap_out == [(5, 7)]
    assert [seq.status for seq in groups[2].seqs] == [S.SWAPPED] * 2


def test_decode_copies(monkeypatch):
    scheduler = make_scheduler(num_gpu=64)
    run_prompts(scheduler, 1, 60)
    monkeypatch.setattr(scheduler.block_manager, "append_slots", lambda *args: [(2, 3)])
    assert scheduler._schedule_running(make_plan()).blocks_to_copy == [(2, 3)]


def swap_out(scheduler, group):
    scheduler.running.remove(group)
    pairs = []
    scheduler._swap_out(group, pairs)
    scheduler.swapped.append(group)
    return pairs


def test_swapped_come_back(monkeypatch):
    scheduler = make_scheduler(budget=500, num_gpu=99, num_cpu=64)
    group, = run_pairs(scheduler, 1)
    out = swap_out(scheduler, group)
    assert len(out) == 30, "sharing is lost on the way"
    plan = make_plan()
    back, budget = scheduler._schedule_swapped(plan), plan.budget
    assert names(s.seq_group for s in back.decode_seq_groups) == ["0"] and not back.prefill_seq_groups
    assert len(back.blocks_to_swap_in) == 30 and not scheduler.swapped
    assert (budget.num_curr_seqs, budget.num_batched_tokens) == (2, 2), "a token for each sequence (vllm#4451)"


def test_swapped_wait_for_room(monkeypatch):
    scheduler = make_scheduler(budget=500, num_gpu=99, num_cpu=99)
    groups = run_pairs(scheduler, 3)
    for group in groups[:2]: swap_out(scheduler, group)
    answer(scheduler, monkeypatch, "can_swap_in", AllocStatus.LATER)
    plan = make_plan()
    out, budget = scheduler._schedule_swapped(plan), plan.budget
    assert len(scheduler.swapped) == 2 and not out.decode_seq_groups and not out.blocks_to_swap_in
    assert (budget.num_curr_seqs, budget.num_batched_tokens) == (0, 0)


def test_swapped_wait_for_budget():
    scheduler = make_scheduler(budget=500, num_gpu=99, num_cpu=99)
    for group in run_pairs(scheduler, 2): swap_out(scheduler, group)
    out = scheduler._schedule_swapped(make_plan(seqs=3))
    assert names(s.seq_group for s in out.decode_seq_groups) == ["0"] and names(scheduler.swapped) == ["1"]


def test_infeasible_swapped(monkeypatch):
    scheduler = make_scheduler(budget=500, num_gpu=99, num_cpu=64)
    group, = run_pairs(scheduler, 1)
    swap_out(scheduler, group)
    answer(scheduler, monkeypatch, "can_swap_in", AllocStatus.NEVER)
    plan = make_plan()
    out, budget = scheduler._schedule_swapped(plan), plan.budget
    assert out.infeasible_seq_groups == [group] and not scheduler.swapped and not out.decode_seq_groups
    assert (budget.num_curr_seqs, budget.num_batched_tokens) == (0, 0)
    # minengine: 0.7.3 lost its blocks on the host.
    assert scheduler.block_manager.get_num_free_cpu_blocks() == 64
    scheduler.check_invariants()


def test_swapped_copies(monkeypatch):
    scheduler = make_scheduler(budget=500, num_gpu=99, num_cpu=64)
    group, = run_pairs(scheduler, 1)
    swap_out(scheduler, group)
    monkeypatch.setattr(scheduler.block_manager, "append_slots", lambda seq, n: [(2, 3)] if seq is group.first_seq else [])
    assert scheduler._schedule_swapped(make_plan()).blocks_to_copy == [(2, 3)]


@pytest.mark.parametrize("caching", [True, False])
def test_prefills_know_the_cache(caching):
    scheduler = make_scheduler(budget=12, max_seqs=3, max_model_len=12, num_gpu=16, num_cpu=16, caching=caching)
    common = [1, 2, 3, 4]
    A = add(scheduler, make_group("A", common + [5, 6, 7, 8]))
    step(scheduler), step(scheduler)
    B, C = make_group("B", common + [21, 22, 23, 24]), make_group("C", common + [31, 32, 33, 34])
    add(scheduler, B, C)
    metadata, outputs = schedule(scheduler)
    if caching:
        assert chunks(outputs) == [("B", 8), ("C", 8)] and outputs.num_batched_tokens == 16
        block = scheduler.block_manager.get_block_table(A.first_seq)[:1]
        assert [m.computed_block_nums for m in metadata] == [block, block]
    else:
        assert chunks(outputs) == [("B", 8)] and metadata[0].computed_block_nums == []


# ---- quirks of the default policy --------------------------------------

def test_can_append_is_pessimistic_and_the_livelock_ends():
    "V0: a request alone in too small a pool preempts itself for each token."
    scheduler = make_scheduler(num_gpu=2)
    group = add(scheduler, make_group("r", 5, max_tokens=16))
    history = []
    while scheduler.has_unfinished_seqs():
        metadata, outputs = step(scheduler)
        history.append((chunks(outputs), outputs.preempted))
    # A whole prefill for each token, an empty step between, though a slot was free.
    assert history == [([("r", 5)], 0), ([], 1), ([("r", 6)], 0), ([], 1), ([("r", 7)], 0), ([], 1),
                       ([("r", 8)], 0), ([], 1), ([], 0)]
    assert group.first_seq.status == S.FINISHED_IGNORED and group.first_seq.get_output_len() == 4
    assert S.get_finished_reason(group.first_seq.status) == "length"
    assert "9 tokens need more KV cache blocks" in group.first_seq.stop_reason


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_infeasible_requests_end(mode):
    "V073's end-to-end case: 96 tokens, room for half of them."
    scheduler = make_scheduler(budget=128, block_size=16, num_gpu=2 + 96 // 16 // 2, num_cpu=10, preemption_mode=mode)
    engine = V0Engine(scheduler)
    engine.add(make_group("r", list(range(20)), 16, max_tokens=96, ignore_eos=True))
    engine.finish()
    assert engine.groups["r"].first_seq.status == S.FINISHED_IGNORED


def test_a_step_of_swaps_alone():
    scheduler = make_scheduler(num_gpu=3, preemption_mode="swap", max_seqs=2)
    add_all(scheduler, 1, 8)
    step(scheduler)
    add_all(scheduler, 1, 4, first=1)
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("1", 4)]
    outputs = step(scheduler)[1]     # 0 takes its third block from 1
    assert chunks(outputs) == [("0", 1)] and len(outputs.blocks_to_swap_out) == 1 and not outputs.is_empty()


# ---- the chunked-prefill policy (V073 1.4) -----------------------------

def make_chunked(budget=64, max_seqs=60, max_model_len=80, num_gpu=64, num_cpu=64, **settings):
    return make_scheduler(budget, max_seqs, max_model_len, num_gpu, num_cpu, chunked=True, **settings)


def test_two_prompts_of_60():
    scheduler = make_chunked()
    add_all(scheduler, 2, 60)
    metadata, outputs = step(scheduler)
    assert chunks(outputs) == [("0", 60), ("1", 4)] and outputs.num_batched_tokens == 64
    assert [m.do_sample for m in metadata] == [True, False]
    metadata, outputs = step(scheduler)
    assert chunks(outputs) == [("1", 56), ("0", 1)] and outputs.num_batched_tokens == 57
    assert outputs.num_prefill_groups == 1 and [m.is_prompt for m in metadata] == [True, False]


def test_decodes_chunks_and_new_prompts_mix():
    scheduler = make_chunked()
    add_all(scheduler, 2, 60)
    step(scheduler)
    add_all(scheduler, 2, 60, first=2)
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("2", 7), ("1", 56), ("0", 1)] and outputs.num_prefill_groups == 2
    assert names(scheduler.running) == ["0", "1", "2"] and names(scheduler.waiting) == ["3"]
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("3", 9), ("2", 53), ("0", 1), ("1", 1)] and outputs.num_batched_tokens == 64


def test_concurrent_partial_prefills():
    scheduler = make_chunked(max_num_partial_prefills=2, max_long_partial_prefills=2)
    add_all(scheduler, 2, 60)
    assert [chunks(step(scheduler)[1]) for _ in range(3)] == [
        [("0", 32), ("1", 32)], [("0", 28), ("1", 28)], [("0", 1), ("1", 1)]]


def test_by_default_every_prompt_is_long():
    scheduler = make_chunked(max_num_partial_prefills=2)
    add_all(scheduler, 2, 60)
    assert [chunks(step(scheduler)[1]) for _ in range(2)] == [[("0", 60)], [("1", 60), ("0", 1)]]


def make_long(**settings):
    return make_chunked(max_model_len=2000, num_gpu=800, max_num_partial_prefills=2, max_long_partial_prefills=1,
                        long_prefill_token_threshold=1000, **settings)


def test_long_prompts_go_one_by_one():
    scheduler = make_long()
    add_all(scheduler, 2, 1200)
    assert chunks(step(scheduler)[1]) == [("0", 64)] and names(scheduler.waiting) == ["1"]


def test_short_prompts_pass_long_ones():
    scheduler = make_long()
    add(scheduler, *[make_group(name, n) for name, n in (("L0", 1200), ("L1", 1200), ("s0", 40), ("s1", 40))])
    steps = [chunks(step(scheduler)[1]) for _ in range(4)]
    assert steps == [[("L0", 32), ("s0", 32)],
                     [("s1", 24), ("L0", 32), ("s0", 8)],
                     [("L0", 32), ("s1", 16), ("s0", 1)],     # 49 of 64: a slot stays empty
                     [("L0", 62), ("s0", 1), ("s1", 1)]]
    assert names(scheduler.waiting) == ["L1"]


def test_prompts_about_to_decode_are_next_in_line():
    scheduler = make_long()
    add(scheduler, *[make_group(name, n) for name, n in (("L0", 1200), ("s0", 40))])
    step(scheduler), schedule(scheduler)
    assert names(scheduler.running) == ["s0", "L0"], "s0 ends in this step"


def test_maximal_decoding():
    scheduler = make_chunked(budget=2, max_seqs=2, max_model_len=8)
    add_all(scheduler, 2, 2)
    assert chunks(step(scheduler)[1]) == [("0", 2)]
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("1", 1), ("0", 1)] and outputs.num_prefill_groups == 1
    add_all(scheduler, 1, 2, first=2)
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("1", 1), ("0", 1)] and outputs.num_prefill_groups == 1
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("0", 1), ("1", 1)] and outputs.num_prefill_groups == 0
    scheduler.abort_seq_group("0")
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("2", 1), ("1", 1)] and outputs.num_prefill_groups == 1


def test_a_prompt_above_the_budget_is_cut():
    scheduler = make_chunked(budget=32, max_seqs=32, max_model_len=64)
    group = add(scheduler, make_group("1", 48))
    assert chunks(step(scheduler)[1]) == [("1", 32)] and group.is_prefill()


def test_a_prompt_above_the_window_is_ignored():
    scheduler = make_chunked(max_model_len=32)
    add(scheduler, make_group("1", 48))
    assert names(schedule(scheduler)[1].ignored_seq_groups) == ["1"]


def test_a_long_prompt_does_not_slip_in_by_its_first_chunk():
    "minengine: 0.7.3 compared the chunk with the window, and ran this."
    scheduler = make_chunked(budget=16, max_seqs=16, max_model_len=32)
    add(scheduler, make_group("1", 48))
    assert names(schedule(scheduler)[1].ignored_seq_groups) == ["1"]


def test_chunked_swap(monkeypatch):
    scheduler = make_chunked(budget=30, max_seqs=30, num_gpu=16, num_cpu=16, preemption_mode="swap")
    group = add(scheduler, make_group("1", 60))
    assert chunks(step(scheduler)[1]) == [("1", 30)]
    cannot_append(scheduler, monkeypatch, "1", times=2)     # asked before, and in the loop
    outputs = step(scheduler)[1]
    assert not chunks(outputs) and outputs.num_batched_tokens == 0 and outputs.preempted == 1
    assert len(outputs.blocks_to_swap_out) == 15 and not outputs.blocks_to_swap_in
    assert group.first_seq.status == S.SWAPPED and group.first_seq.get_num_computed_tokens() == 30
    add(scheduler, make_group("2", 60))
    metadata, outputs = step(scheduler)
    assert chunks(outputs) == [("1", 30)] and len(outputs.blocks_to_swap_in) == 15 and not outputs.blocks_to_swap_out
    assert metadata[0].is_prompt and metadata[0].do_sample and names(scheduler.waiting) == ["2"]


def test_chunked_preemption_starts_over(monkeypatch):
    scheduler = make_chunked(budget=30, max_seqs=30, num_gpu=16)
    group = add(scheduler, make_group("1", 60))
    assert chunks(step(scheduler)[1]) == [("1", 30)]
    answer(scheduler, monkeypatch, "can_allocate", AllocStatus.LATER)
    with monkeypatch.context() as patch:
        cannot_append(scheduler, patch, "1")
        outputs = step(scheduler)[1]
    assert not chunks(outputs) and outputs.preempted == 1 and names(scheduler.waiting) == ["1"]
    assert group.first_seq.get_num_computed_tokens() == 0
    answer(scheduler, monkeypatch, "can_allocate", AllocStatus.OK)
    assert [chunks(step(scheduler)[1]) for _ in range(3)] == [[("1", 30)], [("1", 30)], [("1", 1)]]


def test_room_made_by_a_preemption_goes_to_the_newest():
    "V0: the preempted are put back only after the waiting ones were looked at."
    scheduler = make_chunked(num_gpu=5)
    add(scheduler, make_group("A", 8), make_group("B", 8))
    step(scheduler)
    add(scheduler, make_group("C", 3))
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("C", 3), ("A", 1)] and names(scheduler.waiting) == ["B"] and outputs.preempted == 1


def test_chunks_end_at_blocks_with_caching():
    scheduler = make_chunked(caching=True)
    add_all(scheduler, 2, 50)
    assert [chunks(step(scheduler)[1]) for _ in range(2)] == [[("0", 50), ("1", 12)], [("1", 38), ("0", 1)]]


def test_slots_end_at_blocks_with_caching():
    scheduler = make_chunked(budget=60, caching=True, max_num_partial_prefills=2, max_long_partial_prefills=2)
    add_all(scheduler, 2, 50)
    assert [chunks(step(scheduler)[1]) for _ in range(2)] == [[("0", 28), ("1", 28)], [("0", 22), ("1", 22)]]


def test_hits_are_free_of_charge():
    scheduler = make_chunked(budget=4, max_seqs=4, block_size=2, caching=True)
    prompt = list(range(8))
    add(scheduler, make_group("A", prompt, 2))
    assert [chunks(step(scheduler)[1]) for _ in range(2)] == [[("A", 4)], [("A", 4)]]
    add(scheduler, make_group("B", prompt, 2), make_group("C", prompt[:6], 2))
    metadata, outputs = schedule(scheduler)
    assert chunks(outputs) == [("B", 8), ("C", 6), ("A", 1)] and outputs.num_batched_tokens == 15
    assert [m.computed_block_nums for m in metadata[:2]] == [[0, 1, 2, 3], [0, 1, 2]]


def test_lookahead_of_a_step_of_prompts():
    scheduler = make_chunked(num_lookahead_slots=4)
    add_all(scheduler, 1, 30)
    assert step(scheduler)[1].num_lookahead_slots == 0
    add_all(scheduler, 1, 30, first=1)
    outputs = step(scheduler)[1]
    assert outputs.num_lookahead_slots == 4 and outputs.num_prefill_groups == 1 and len(chunks(outputs)) == 2


@pytest.mark.parametrize("caching, most", [(True, 17), (False, 24)])
def test_rounding_starves_decodes(caching, most):
    "V0: less than a block of budget counts as none, for decodes too."
    scheduler = make_chunked(budget=32, max_seqs=32, block_size=16, caching=caching)
    add_all(scheduler, 24, 2, max_tokens=99)
    for _ in range(20): outputs = step(scheduler)[1]
    assert len(chunks(outputs)) == most and len(scheduler.waiting) == 24 - most


# ---- prefix hits (V073 1.5, 1.6) ---------------------------------------

def test_equal_prompts_of_one_step_are_both_computed():
    scheduler = make_scheduler(caching=True)
    add(scheduler, make_group("A", list(range(8))), make_group("B", list(range(8))))
    metadata, outputs = schedule(scheduler)
    assert tables(metadata) == {"A": [0, 1], "B": [0, 1]} and [m.computed_block_nums for m in metadata] == [[], []]
    assert outputs.num_batched_tokens == 16


def test_a_full_hit_computes_one_token():
    scheduler = make_scheduler(caching=True, max_seqs=2)
    add(scheduler, make_group("A", list(range(8))))
    step(scheduler)
    add(scheduler, make_group("B", list(range(8))))
    plan = make_plan()
    out, budget = scheduler._schedule_prefills(plan), plan.budget
    assert out.seq_groups[0].token_chunk_size == 8
    assert (budget.num_batched_tokens, budget.num_cached_tokens) == (1, 7)


def test_the_first_answer_stands():
    "V0: what was not cached when a request first came to the head stays uncached for it."
    scheduler = make_scheduler(budget=16, max_model_len=16, max_seqs=1, num_gpu=16, caching=True)
    add(scheduler, make_group("A", list(range(8)), max_tokens=2), make_group("B", list(range(8))))
    step(scheduler), step(scheduler)
    metadata, _ = schedule(scheduler)
    assert metadata[0].request_id == "B" and metadata[0].computed_block_nums == []


def test_blocks_that_were_overwritten_meanwhile_are_computed():
    "minengine: 0.7.3 skipped them, and read whatever was there."
    scheduler = make_scheduler(budget=48, max_model_len=48, max_seqs=2, num_gpu=12, caching=True)
    engine = V0Engine(scheduler)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    engine.add(make_group("A", prompt, max_tokens=1, ignore_eos=True))
    engine.step()
    for name, length, most in (("x", 30, 9), ("y", 9, 25)):
        engine.add(make_group(name, [(len(name) + i * i) % 7 for i in range(length)], max_tokens=most, ignore_eos=True))
    engine.step()
    engine.add(make_group("B", prompt + [3], max_tokens=3, ignore_eos=True))
    engine.step()
    assert scheduler.block_manager.get_num_cached_tokens(engine.groups["B"].first_seq) == 8, "counted as cached"
    while engine.groups["B"].first_seq.status == S.WAITING: metadata, _ = engine.step()
    told, = [m for m in metadata if m.request_id == "B"]
    assert len(told.computed_block_nums) < 2 and told.token_chunk_size == 9
    engine.finish()


def test_blocks_of_a_prompt_cut_short_are_computed():
    "minengine: 0.7.3 called them computed as soon as they were allocated."
    scheduler = make_chunked(budget=8, max_seqs=4, num_gpu=32, caching=True)
    engine = V0Engine(scheduler)
    prompt = [(i * i + 1) % 7 for i in range(24)]
    engine.add(make_group("A", prompt))
    engine.step()
    engine.abort("A")                   # two of six blocks are computed
    engine.add(make_group("B", prompt, max_tokens=2, ignore_eos=True))
    metadata, outputs = engine.step()
    assert metadata[0].computed_block_nums == tables(metadata)["B"][:2] and chunks(outputs) == [("B", 24)]
    engine.finish()


def test_a_prompt_may_skip_what_its_own_step_computes():
    "V0: KV of a whole batch is written before any of it is read."
    scheduler = make_chunked(budget=16, max_seqs=4, num_gpu=32, caching=True)
    engine = V0Engine(scheduler)
    prompt = [(i * i + 1) % 7 for i in range(24)]
    engine.add(make_group("A", prompt, max_tokens=3, ignore_eos=True))
    engine.step()
    engine.add(make_group("B", prompt, max_tokens=3, ignore_eos=True))
    metadata, outputs = engine.step()
    assert chunks(outputs) == [("B", 24), ("A", 8)] and len(metadata[0].computed_block_nums) == 6
    engine.finish()


# ---- priorities (V073 1.7) ---------------------------------------------

def make_priority(num_gpu=4, mode=None, **settings):
    return make_scheduler(num_gpu=num_gpu, policy="priority", preemption_mode=mode, **settings)


def test_priority_acts_one_step_late():
    scheduler = make_priority()
    add(scheduler, make_group("lo", 7, priority=5, arrival=0.0), make_group("lo2", 7, priority=5, arrival=1.0))
    step(scheduler)
    add(scheduler, make_group("hi", 7, priority=0, arrival=2.0))
    outputs = step(scheduler)[1]
    assert chunks(outputs) == [("lo", 1)] and outputs.preempted == 0, "forced ones are not counted here"
    assert names(scheduler.waiting) == ["hi", "lo2"] and scheduler.num_cumulative_preemption == 1
    assert chunks(step(scheduler)[1]) == [("hi", 7)]
    assert names(scheduler.running) == ["lo", "hi"]


def test_priority_sorts_after_it_has_looked():
    "V0: an urgent request behind another one is seen a step later."
    scheduler = make_priority()
    add(scheduler, make_group("lo", 11, priority=5))
    step(scheduler)
    add(scheduler, make_group("mid", 15, priority=5, arrival=1.0), make_group("hi", 15, priority=0, arrival=2.0))
    assert chunks(step(scheduler)[1]) == [("lo", 1)] and names(scheduler.waiting) == ["hi", "mid"]
    assert not chunks(step(scheduler)[1]), "lo is preempted"
    assert chunks(step(scheduler)[1]) == [("hi", 15)]


def test_an_urgent_request_among_many():
    "vllm#9342: ten seats, fifteen requests, then one that cannot wait."
    scheduler = make_priority(num_gpu=100, max_seqs=10)
    engine = V0Engine(scheduler)
    for i in range(15): engine.add(make_group(i, [1, 2, 3, i % 7], max_tokens=8, arrival=float(i), ignore_eos=True))
    engine.step()
    engine.add(make_group("urgent", [4, 5, 6], max_tokens=8, priority=-100, arrival=99.0, ignore_eos=True))
    ended = []
    while scheduler.has_unfinished_seqs():
        engine.step()
        ended += scheduler.get_and_reset_finished_requests_ids()
    assert ended.index("urgent") < 10 and sorted(ended) == sorted(engine.groups)
    for group in engine.groups.values(): engine.check_result(group)


def test_nobody_is_preempted_for_what_can_never_run():
    scheduler = make_priority(num_gpu=4)
    add(scheduler, make_group("lo", 7, priority=5))
    step(scheduler)
    add(scheduler, make_group("mid", 15, priority=3), make_group("never", 60, priority=0))
    step(scheduler)
    assert names(scheduler.waiting) == ["never", "mid", "lo"], "mid made room for itself"
    outputs = step(scheduler)[1]
    assert names(outputs.ignored_seq_groups) == ["never"] and chunks(outputs) == [("mid", 15)]


@pytest.mark.parametrize("n", [1, 2])
def test_priority_swaps_without_losing_anything(n):
    "minengine: 0.7.3 threw the list of swapped blocks away."
    scheduler = make_priority(num_gpu=9, num_cpu=9, mode="swap")
    engine = V0Engine(scheduler)
    for i in range(2):
        engine.add(make_group(f"lo{i}", [1, 2, 3, 4, i], max_tokens=8, n=n, priority=5, arrival=float(i), ignore_eos=True))
    engine.step(), engine.step()
    engine.add(make_group("hi", [6, 5, 4, 3] * 7, max_tokens=8, priority=0, arrival=9.0, ignore_eos=True))
    outputs = engine.step()[1]
    assert outputs.blocks_to_swap_out and not outputs.blocks_to_swap_in
    while not engine.groups["hi"].is_finished():
        outputs = engine.step()[1]
        assert not outputs.blocks_to_swap_in, "first the urgent one, then those that made room"
    engine.finish()
    assert all(seq.status == S.FINISHED_STOPPED for g in engine.groups.values() for seq in g.seqs)


# ---- bursts (V073 1.9) -------------------------------------------------

def test_burst_of_eight():
    scheduler = make_scheduler(num_gpu=16, num_scheduler_steps=8)
    group = add(scheduler, make_group("r", 4))
    metadata, outputs = step(scheduler)
    assert metadata[0].state.num_steps == 1 and outputs.num_lookahead_slots == 0 and tables(metadata) == {"r": [0]}
    metadata, outputs = schedule(scheduler)
    assert metadata[0].state.num_steps == 8 and outputs.num_lookahead_slots == 7
    assert tables(metadata) == {"r": [0, 1, 2]} and outputs.num_batched_tokens == 1
    assert group.state is metadata[0].state


def test_burst_in_chunked_mode():
    scheduler = make_chunked(num_scheduler_steps=8)
    add_all(scheduler, 1, 4)
    metadata, outputs = step(scheduler)
    assert metadata[0].state.num_steps == 8 and outputs.num_lookahead_slots == 7 and outputs.num_prefill_groups == 1
    assert len(tables(metadata)["0"]) == 3, "slots for 4 + 8 tokens"
    add_all(scheduler, 1, 4, first=1)
    metadata, outputs = schedule(scheduler)
    assert [m.state.num_steps for m in metadata] == [8, 8] and outputs.num_prefill_groups == 1


@pytest.mark.parametrize("caching", [False, True])
def test_bursts_defer_prompts_instead_of_cutting(caching):
    scheduler = make_chunked(budget=48, max_seqs=48, caching=caching, num_scheduler_steps=8)
    add(scheduler, make_group("24", 24), make_group("30", 30))
    assert chunks(schedule(scheduler)[1]) == [("24", 24)] and names(scheduler.waiting) == ["30"]


@pytest.mark.parametrize("chunked", [False, True])
def test_bursts_give_the_same_tokens(chunked):
    engine = V0Engine(make_scheduler(budget=64, max_seqs=4, max_model_len=48, num_gpu=24, chunked=chunked,
                                     num_scheduler_steps=4))
    for i in range(6): engine.add(make_group(i, [i % 7] * (3 * i + 1), max_tokens=3 * i + 2))
    engine.finish()


# ---- async outputs (V073 1.10, the scheduler's part) -------------------

def test_async_is_allowed_for_single_sequences():
    scheduler = make_scheduler(num_gpu=64, use_async_output_proc=True)
    add_all(scheduler, 2, 4)
    assert scheduler.schedule()[2]
    add(scheduler, make_group("n", 4, n=2))
    assert not scheduler.schedule()[2]
    assert not make_scheduler().schedule()[2], "off"


def test_async_stops_at_the_window():
    scheduler = make_scheduler(budget=8, max_seqs=8, num_gpu=64, use_async_output_proc=True)
    engine = V0Engine(scheduler)
    engine.add(make_group("r", [1] * 7, max_tokens=None, ignore_eos=True))
    steps = [chunks(engine.step()[1]) for _ in range(3)]
    assert steps == [[("r", 7)], [("r", 1)], []], "no slot is asked for past the window"
    assert engine.groups["r"].is_finished()
    engine.finish()


def test_async_looks_at_the_window_of_those_that_run():
    "0.7.3 looked at a group's first sequence, also after its end; the second was never scheduled again."
    scheduler = make_scheduler(budget=8, max_seqs=8, num_gpu=64, use_async_output_proc=True)
    group = add(scheduler, make_group("n", 7, n=2, max_tokens=None))
    step(scheduler)
    child = fork(scheduler, group)
    append(group.first_seq)   # the first has outgrown the window, the second has not
    group.first_seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
    scheduler.free_finished_seq_groups()
    assert (group.first_seq.get_len(), child.get_len()) == (9, 8)
    assert [chunks(schedule(scheduler)[1]) for _ in range(2)] == [[("n", 1)]] * 2


def test_async_looks_for_the_end_before_it_preempts():
    scheduler = make_scheduler(max_seqs=2, num_gpu=4, use_async_output_proc=True)
    engine = V0Engine(scheduler)
    engine.add(make_group("A", [1, 2, 3, 4, 5, 6, 1], max_tokens=9, ignore_eos=True))
    engine.add(make_group("B", [1] * 4, max_tokens=2, ignore_eos=True))
    while not engine.groups["B"].is_finished(): outputs = engine.step()[1]
    assert outputs.preempted == 0 and chunks(outputs) == [("A", 1)], "B had ended: its blocks are taken, not it"
    engine.finish()


# ---- golden traces (V073 2.21) -----------------------------------------

def golden(scheduler, arrivals, num_steps, max_tokens):
    "Per step: scheduled chunks, tables that changed, swaps."
    rows, known = [], {}
    for n in range(num_steps):
        for name, length in arrivals.get(n, []): add(scheduler, make_group(name, length, max_tokens=max_tokens))
        metadata, outputs = step(scheduler)
        now = tables(metadata)
        rows.append((chunks(outputs), {i: t for i, t in now.items() if known.get(i) != t},
                     outputs.blocks_to_swap_out, outputs.blocks_to_swap_in))
        known |= now
    return rows


def ids(a, b): return list(range(a, b + 1))


T1 = {0: [("A", 20)], 1: [("B", 40)], 2: [("C", 6)]}


def test_golden_trace_1_default():
    rows = golden(make_scheduler(num_gpu=64), T1, 7, 4)
    assert [row[:2] for row in rows] == [
        ([("A", 20)], {"A": ids(0, 4)}),
        ([("B", 40)], {"B": ids(5, 14)}),
        ([("C", 6)], {"C": [15, 16]}),
        ([("A", 1), ("B", 1), ("C", 1)], {"A": ids(0, 4) + [17], "B": ids(5, 14) + [18]}),
        ([("A", 1), ("B", 1), ("C", 1)], {}),
        ([("A", 1), ("B", 1), ("C", 1)], {"C": [15, 16, 19]}),
        ([], {})]


def test_golden_trace_1_chunked():
    rows = golden(make_scheduler(budget=32, max_seqs=32, max_model_len=64, num_gpu=64, chunked=True), T1, 6, 4)
    assert [row[:2] for row in rows] == [
        ([("A", 20)], {"A": ids(0, 4)}),
        ([("B", 31), ("A", 1)], {"A": ids(0, 5), "B": ids(6, 15)}),
        ([("C", 6), ("B", 9), ("A", 1)], {"C": [16, 17]}),
        ([("A", 1), ("B", 1), ("C", 1)], {"B": ids(6, 15) + [18]}),
        ([("B", 1), ("C", 1)], {}),
        ([("B", 1), ("C", 1)], {"C": [16, 17, 5]})]     # A's block, freed last


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_golden_trace_2(mode):
    scheduler = make_scheduler(num_gpu=8, preemption_mode=mode)
    rows = golden(scheduler, {0: [(name, 8) for name in "ABC"]}, 11, 6)
    both, swap = [("A", 1), ("B", 1)], mode == "swap"
    first = ([(name, 8) for name in "ABC"], {"A": [0, 1], "B": [2, 3], "C": [4, 5]}, [], [])
    preempt = (both, {"A": [0, 1, 6], "B": [2, 3, 7]}, [(4, 0), (5, 1)] if swap else [], [])
    again = ([("C", 1 if swap else 9)], {"C": [4, 7, 3]}, [], [(0, 4), (1, 7)] if swap else [])
    alone = ([("C", 1)], {}, [], [])
    assert rows == [first, preempt, *[(both, {}, [], [])] * 3,
                    (both, {"A": [0, 1, 6, 5], "B": [2, 3, 7, 4]}, [], []),
                    again, alone, alone, alone, ([("C", 1)], {"C": [4, 7, 3, 2]}, [], [])]


# ---- what 0.7.3 died of or lost ----------------------------------------

@pytest.mark.parametrize("num_seqs, wanted, can_swap, mode", [
    (1, None, True, "RECOMPUTE"), (1, "recompute", True, "RECOMPUTE"), (1, "swap", True, "SWAP"),
    (1, "swap", False, "RECOMPUTE"), (2, None, True, "SWAP"), (2, "recompute", True, "SWAP"),
    (2, "swap", False, None), (2, None, False, None)])
def test_choose_preemption_mode(num_seqs, wanted, can_swap, mode):
    assert choose_preemption_mode(num_seqs, wanted, can_swap) is (mode and PreemptionMode[mode])


def test_no_room_on_the_host_means_recompute():
    "0.7.3: RuntimeError, and the engine was dead."
    scheduler = make_scheduler(num_gpu=6, num_cpu=3, preemption_mode="swap", max_seqs=3)
    engine = V0Engine(scheduler)
    for i in range(3): engine.add(make_group(i, [i, 1, 2, 3, 4, 5, 6, i], max_tokens=8, ignore_eos=True))
    engine.step()
    outputs = engine.step()[1]
    assert len(outputs.blocks_to_swap_out) == 2 and names(scheduler.swapped) == ["2"]
    while not outputs.preempted or scheduler.num_cumulative_preemption < 2: outputs = engine.step()[1]
    assert not outputs.blocks_to_swap_out and names(scheduler.waiting) == ["1"]
    assert scheduler.num_swap_fallbacks == 1
    engine.finish()


def test_several_sequences_without_room_on_the_host_end_with_a_reason():
    scheduler = make_scheduler(num_gpu=9, num_cpu=0, max_seqs=8)
    engine = V0Engine(scheduler)
    for i in range(2): engine.add(make_group(i, [1, 2, 3, 4, 5, i], n=2, max_tokens=9, ignore_eos=True))
    engine.step()
    ignored = []
    while scheduler.has_unfinished_seqs(): ignored += names(engine.step()[1].ignored_seq_groups)
    assert ignored == ["1"]
    assert [seq.stop_reason for seq in engine.groups["1"].seqs] == ["no host memory to swap 2 sequences to"] * 2
    assert [seq.status for seq in engine.groups["0"].seqs] == [S.FINISHED_STOPPED] * 2
    engine.finish()


def test_a_survivor_of_several_can_be_recomputed():
    "0.7.3's scheduler took it for a decode if the first sequence had ended."
    scheduler = make_scheduler(num_gpu=32, num_cpu=0)
    group = run_prompts(scheduler, 1, 6, n=2, max_tokens=9)[0]
    child = fork(scheduler, group)
    step(scheduler)
    group.first_seq.status = S.FINISHED_STOPPED
    scheduler.free_finished_seq_groups()
    scheduler.running.clear()
    assert scheduler._preempt(group, []) is PreemptionMode.RECOMPUTE
    scheduler.waiting.append(group)
    metadata, outputs = step(scheduler)
    assert chunks(outputs) == [("0", 8)] and metadata[0].is_prompt and list(metadata[0].seq_data) == [child.seq_id]


def test_what_is_left_of_a_swapped_prompt_is_cut_if_it_fits_no_step():
    "0.7.3 waited for a step of 70 tokens under a budget of 30."
    scheduler = make_chunked(budget=30, max_seqs=30, max_model_len=200, num_gpu=40, num_cpu=40, preemption_mode="swap")
    engine = V0Engine(scheduler)
    engine.add(make_group("r", [i % 7 for i in range(100)], max_tokens=3, ignore_eos=True))
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        cannot_append(scheduler, patch, "r")
        assert engine.step()[1].blocks_to_swap_out
    outputs = engine.step()[1]
    assert chunks(outputs) == [("r", 30)] and len(outputs.blocks_to_swap_in) == 25
    engine.finish()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_prompt_that_fills_the_pool_alone_goes_on(mode):
    "0.7.3 started it over and over: the next chunk's slots were there, and it asked for one more block."
    scheduler = make_chunked(budget=22, max_seqs=4, max_model_len=40, num_gpu=6, num_cpu=8, preemption_mode=mode)
    engine = V0Engine(scheduler)
    engine.add(make_group("r", [i % 7 for i in range(24)], max_tokens=1, ignore_eos=True))
    assert [chunks(engine.step()[1]) for _ in range(2)] == [[("r", 22)], [("r", 2)]]
    engine.finish()


def test_several_sequences_wait_for_a_step_with_room():
    "A group of three is not cut: next to a chunk it overran the budget, and an assertion ended the engine."
    scheduler = make_chunked(budget=15, max_seqs=5, num_gpu=22, max_num_partial_prefills=2, max_long_partial_prefills=2)
    engine = V0Engine(scheduler)
    engine.add(make_group("one", [i % 7 for i in range(24)], max_tokens=2, ignore_eos=True))
    engine.add(make_group("three", [1, 2, 3], n=3, max_tokens=2, ignore_eos=True))
    assert [chunks(engine.step()[1]) for _ in range(3)] == [
        [("one", 7), ("three", 3)], [("one", 15)], [("one", 2), ("three", 1)]]
    engine.finish()


def test_a_swapped_request_that_leaves_no_reserve_ends():
    "0.7.3 waited for ever: the reserve counted for `now`, and not for `never`."
    scheduler = make_scheduler(budget=2048, num_gpu=100, num_cpu=100, preemption_mode="swap")
    group = add(scheduler, make_group("r", 396, max_tokens=9))
    step(scheduler)
    swap_out(scheduler, group)
    assert names(schedule(scheduler)[1].ignored_seq_groups) == ["r"]
    assert not scheduler.has_unfinished_seqs() and scheduler.block_manager.get_num_free_cpu_blocks() == 100


def test_no_new_groups_of_several_while_some_are_swapped_out():
    "vllm#5578: they would fill the host pool."
    scheduler = make_chunked(budget=500, num_gpu=99)
    groups = run_pairs(scheduler, 2)
    swap_out(scheduler, groups[1])
    with pytest.MonkeyPatch.context() as patch:
        answer(scheduler, patch, "can_swap_in", AllocStatus.LATER)
        add(scheduler, make_group("pair", 4, n=2))
        assert chunks(step(scheduler)[1]) == [("0", 1)] and names(scheduler.waiting) == ["pair"]
        scheduler.abort_seq_group("pair")
        add(scheduler, make_group("single", 4))
        assert chunks(step(scheduler)[1]) == [("single", 4), ("0", 1)]


def test_seats_for_all_samples_are_kept_from_the_start():
    scheduler = make_scheduler(num_gpu=64, max_seqs=5)
    add(scheduler, make_group("three", 4, n=3), make_group("more", 4, n=2, best_of=3), make_group("one", 4))
    assert chunks(step(scheduler)[1]) == [("three", 4)], "the head waits for three seats"


def test_more_sequences_than_seats_can_never_run():
    scheduler = make_scheduler(max_seqs=2)
    group = add(scheduler, make_group("r", 4, n=3))
    assert names(schedule(scheduler)[1].ignored_seq_groups) == ["r"]
    assert group.first_seq.stop_reason == "3 sequences, max_num_seqs is 2"


@pytest.mark.parametrize("settings, words", [
    (dict(chunked=True, policy="priority"), "exclude each other"),
    (dict(max_num_partial_prefills=2), "needs enable_chunked_prefill"),
    (dict(num_scheduler_steps=4, num_lookahead_slots=5), "num_lookahead_slots must be 3 for num_scheduler_steps=4, got 5"),
    (dict(chunked=True, caching=True, budget=12, max_seqs=12, block_size=16), r"max_num_batched_tokens \(12\) must be at least 16"),
    (dict(chunked=True, caching=True, budget=24, max_seqs=24, block_size=16, max_num_partial_prefills=2), "at least 32: 2 prompts a step"),
    (dict(chunked=True, budget=2, max_seqs=2, max_num_partial_prefills=3), "at least 3: 3 prompts a step"),
    (dict(num_gpu=0), "num_gpu_blocks must be at least 1, got 0"),
])
def test_settings_under_which_requests_never_end_are_refused(settings, words):
    with pytest.raises(ValueError, match=words): make_scheduler(**settings)


# ---- in and out --------------------------------------------------------

def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    add(scheduler, make_group("r", 4, max_tokens=1))
    with pytest.raises(ValueError, match="request id 'r' is in use"): add(scheduler, make_group("r", 4))
    step(scheduler)
    add(scheduler, make_group("r", 4))


def test_abort_wherever_it_is():
    scheduler = make_scheduler(num_gpu=5, max_seqs=3, preemption_mode="swap")
    add_all(scheduler, 2, 8)
    step(scheduler), step(scheduler)
    add_all(scheduler, 1, 8, first=2)
    assert (names(scheduler.running), names(scheduler.swapped), names(scheduler.waiting)) == (["0"], ["1"], ["2"])
    scheduler.abort_seq_group(["1", "2", "unknown"])
    scheduler.abort_seq_group("0")
    scheduler.abort_seq_group("0")     # again: nothing
    assert not scheduler.has_unfinished_seqs()
    assert scheduler.get_and_reset_finished_requests_ids() == ["2", "1", "0"]
    assert not scheduler.get_and_reset_finished_requests_ids()
    manager = scheduler.block_manager
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (5, 8)
    scheduler.check_invariants()


def test_abort_reaches_every_sequence():
    "vllm#14326"
    scheduler = make_scheduler(budget=500, num_gpu=64)
    group, = run_pairs(scheduler, 1)
    scheduler.abort_seq_group("0")
    assert [seq.status for seq in group.seqs] == [S.FINISHED_ABORTED] * 2
    assert scheduler.block_manager.get_num_free_gpu_blocks() == 64 and not scheduler._request_ids


def test_abort_of_what_ended_in_this_very_step():
    "vllm#25067: 0.7.3 kept its blocks."
    scheduler = make_scheduler()
    group, = run_prompts(scheduler, 1, 4)
    group.first_seq.status = S.FINISHED_STOPPED      # seen, not freed yet
    scheduler.abort_seq_group("0")
    assert group.first_seq.status == S.FINISHED_STOPPED
    assert scheduler.block_manager.get_num_free_gpu_blocks() == 8
    scheduler.free_finished_seq_groups()
    scheduler.check_invariants()


def test_abort_between_plan_and_result():
    "vllm#42157"
    scheduler = make_scheduler(num_gpu=16)
    add_all(scheduler, 2, 4)
    metadata, outputs = schedule(scheduler)
    scheduler.abort_seq_group("0")
    outputs.scheduled_seq_groups.pop(0), metadata.pop(0)     # the engine skips what is finished
    finish_step(scheduler, metadata, outputs)
    assert chunks(step(scheduler)[1]) == [("1", 1)]


def test_forked_sequences_share_until_one_writes():
    scheduler = make_scheduler(num_gpu=16)
    group, = run_prompts(scheduler, 1, 6, n=2, max_tokens=9)
    child = fork(scheduler, group)
    metadata, outputs = step(scheduler)
    assert outputs.blocks_to_copy == [(1, 2)], "the first appender copies"
    assert metadata[0].block_tables == {group.first_seq.seq_id: [0, 2], child.seq_id: [0, 1]}
    assert step(scheduler)[1].blocks_to_copy == []


def test_reset_of_the_prefix_cache():
    scheduler = make_scheduler(caching=True)
    add(scheduler, make_group("r", list(range(8)), max_tokens=1))
    schedule(scheduler)
    assert not scheduler.reset_prefix_cache(), "in use"
    scheduler.abort_seq_group("r")
    assert scheduler.reset_prefix_cache()
    assert make_scheduler().get_prefix_cache_hit_rate() is None and scheduler.get_prefix_cache_hit_rate() == 0.0


@pytest.mark.parametrize("spoil, words", [
    (lambda s, g: setattr(g.first_seq, "status", S.WAITING), "in the queue RUNNING"),
    (lambda s, g: s.running.clear(), "0 requests in queues, 1 known"),
    (lambda s, g: s.running.append(g), "2 requests in queues, 1 known"),
    (lambda s, g: s.block_manager.free(g.first_seq), "with blocks: False"),
    (lambda s, g: g.first_seq.data.update_num_computed_tokens(1), "all 5 tokens computed"),
])
def test_invariants_notice(spoil, words):
    scheduler = make_scheduler()
    group, = run_prompts(scheduler, 1, 4)
    scheduler.check_invariants()
    spoil(scheduler, group)
    with pytest.raises(AssertionError, match=words): scheduler.check_invariants()


def test_partial_prefills_count_long_ones_that_run():
    config = make_long().scheduler_config
    waiting = [make_group(i, n) for i, n in enumerate((1200, 1200, 40, 40))]
    running = make_group("r", 1200)
    partial = PartialPrefillMetadata.from_queues([], waiting, config)
    assert (partial.schedulable_prefills, partial.long_prefills) == (2, 0)
    partial.maybe_increment_partial_prefills(waiting[0])
    assert not partial.can_schedule(waiting[1]) and partial.can_schedule(waiting[2])
    partial = PartialPrefillMetadata.from_queues([running], waiting[:2], config)
    assert (partial.schedulable_prefills, partial.long_prefills) == (1, 1)
