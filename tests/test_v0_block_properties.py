"""What must be true of V0's blocks after any sequence of operations, both pools, in any order.

A small scheduler makes random legal decisions; a fake worker moves and writes
a KV cache in which every slot holds the tokens that its key and value depend
on. Each planned token looks at every slot it attends to.
"""
import itertools
import random

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minengine.outputs import Logprob
from minengine.sampling_params import SamplingParams
from minengine.v0.block_manager import AllocStatus, SelfAttnBlockSpaceManager
from minengine.v0.cpu_gpu_allocator import Device
from minengine.v0.sequence import Sequence, SequenceGroup, SequenceStatus

MAX_LEN = 14   # tokens, so that groups grow past the pool now and then
RUNNING, WAITING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.SWAPPED


class FakeWorker:
    "A KV cache of prefixes: slot of position p holds tokens[:p + 1]."

    def __init__(self, block_size, num_gpu, num_cpu):
        self.block_size = block_size
        self.gpu = [[None] * block_size for _ in range(num_gpu)]
        self.cpu = [[None] * block_size for _ in range(num_cpu)]

    @staticmethod
    def move(source, target, pairs):
        rows = [list(source[s]) for s, _ in pairs]      # all reads, then all writes
        for (_, t), row in zip(pairs, rows): target[t] = row

    def prepare(self, swap_in, swap_out, copies):
        self.move(self.cpu, self.gpu, swap_in)
        self.move(self.gpu, self.cpu, swap_out)
        self.move(self.gpu, self.gpu, copies)

    def write(self, table, tokens, start, end):
        for p in range(start, end):
            self.gpu[table[p // self.block_size]][p % self.block_size] = tuple(tokens[:p + 1])

    def check(self, table, tokens, start, end, window):
        for p in range(0 if window is None else max(0, start - window + 1), end):
            found = self.gpu[table[p // self.block_size]][p % self.block_size]
            assert found == tuple(tokens[:p + 1]), (
                f"position {p} of {tokens}: slot of block {table[p // self.block_size]} holds {found}")

    def spoil(self, gpu_ids, cpu_rows):
        "Nothing may be read from blocks that are free and hold nothing for others."
        for i in gpu_ids: self.gpu[i] = ["spoilt"] * self.block_size
        for i in cpu_rows: self.cpu[i] = ["spoilt"] * self.block_size


class Blocks(RuleBasedStateMachine):
    @initialize(block_size=st.sampled_from([1, 2, 4]), gpu=st.integers(3, 12), cpu=st.sampled_from([0, 4, 12]),
                caching=st.booleans(), chunked=st.booleans(), lookahead=st.sampled_from([0, 0, 3]),
                window=st.sampled_from([None, None, 5]), watermark=st.sampled_from([0.0, 0.2]))
    def start(self, block_size, gpu, cpu, caching, chunked, lookahead, window, watermark):
        self.m = SelfAttnBlockSpaceManager(block_size, gpu, cpu, watermark, window, caching)
        self.worker = FakeWorker(block_size, gpu, cpu)
        self.chunked, self.lookahead, self.window = chunked, lookahead, window
        self.waiting, self.running, self.swapped = [], [], []
        self.ids, self.now = itertools.count(), 0.0

    # ---- requests come and go ----
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), n=st.sampled_from([1, 1, 2, 3]))
    def add(self, prompt, n):
        seq = Sequence(next(self.ids), {"prompt_token_ids": prompt}, self.m.block_size)
        params = SamplingParams(n=n, temperature=1.0)
        self.waiting.append(SequenceGroup(f"r{seq.seq_id}", [seq], 0.0, params))

    @precondition(lambda self: self.waiting + self.running + self.swapped)
    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        self.end(pick.choice(self.waiting + self.running + self.swapped))

    @rule()
    def reset_cache(self):
        idle = not self.m.block_tables
        assert self.m.reset_prefix_cache() or not idle

    def end(self, group):
        for queue in (self.waiting, self.running, self.swapped):
            if group in queue: queue.remove(group)
        for seq in group.get_unfinished_seqs():
            seq.status = SequenceStatus.FINISHED_ABORTED
            self.m.free(seq)

    # ---- one step ----
    @rule(rng=st.randoms(use_true_random=False))
    def step(self, rng):
        self.now += 1
        self.swap_out, self.swap_in, self.copies, self.plan = [], [], [], []
        stopped = self.plan_running(rng)
        if not stopped: self.plan_swapped(rng)
        if self.chunked or not self.plan: self.plan_waiting(rng)
        self.settle_hits()
        self.worker.prepare(self.swap_in, self.swap_out, self.copies)
        self.forward(rng)
        pools = self.m.block_allocator.allocators
        cpu = pools[Device.CPU]
        self.worker.spoil(pools[Device.GPU]._free_block_ids,
                          [cpu.get_physical_block_id(i) for i in cpu._free_block_ids])

    def slots_ahead(self, group): return 0 if group.is_prefill() else self.lookahead

    def plan_running(self, rng):
        "Go on with those that run, preempt from the tail; True if anyone had to go."
        queue, stopped = list(self.running), False
        while queue:
            group = queue.pop(0)
            if rng.random() < 0.15: continue               # no budget left for it
            while group and not self.m.can_append_slots(group, self.slots_ahead(group)):
                victim, stopped = queue.pop() if queue else group, True
                self.preempt(victim, rng)
                if victim is group: group = None
            if group: self.append_and_plan(group, rng)
        return stopped

    def append_and_plan(self, group, rng, whole=False):
        for seq in group.get_seqs(RUNNING):
            self.copies += self.m.append_slots(seq, self.slots_ahead(group))
        left = group.first_seq.get_num_new_tokens()
        part = self.chunked and group.is_prefill() and not whole
        self.plan.append((group, rng.randint(1, left) if part else left if group.is_prefill() else 1))

    def preempt(self, victim, rng):
        self.running.remove(victim)
        seqs = victim.get_seqs(RUNNING)
        if len(seqs) == 1 and rng.random() < 0.5 and len(victim.seqs) == 1:
            self.m.free(seqs[0])
            seqs[0].reset_state_for_recompute()
            seqs[0].status = WAITING
            self.waiting.insert(0, victim)
        elif self.m.can_swap_out(victim):
            self.swap_out += self.m.swap_out(victim)
            for seq in seqs: seq.status = SWAPPED
            self.swapped.append(victim)
        else: self.end(victim)

    def plan_swapped(self, rng):
        for group in list(self.swapped):
            status = self.m.can_swap_in(group, self.slots_ahead(group))
            if status is AllocStatus.NEVER: self.end(group)
            if status is AllocStatus.LATER:
                assert self.m.block_tables.keys() != {s.seq_id for s in group.seqs}, "alone, and later"
                return
            if status is not AllocStatus.OK: continue
            self.swap_in += self.m.swap_in(group)
            for seq in group.get_seqs(SWAPPED): seq.status = RUNNING
            self.swapped.remove(group)
            self.running.append(group)
            # V0 computes the rest of a prompt at once, unless no step could hold it.
            self.append_and_plan(group, rng, whole=rng.random() < 0.7)

    def plan_waiting(self, rng):
        for group in list(self.waiting):
            seq = group.first_seq
            cached = self.m.get_num_cached_tokens(seq)     # the first look counts
            status = self.m.can_allocate(group)
            if status is AllocStatus.NEVER: self.end(group)
            if status is AllocStatus.LATER:
                assert self.m.get_num_free_gpu_blocks() < self.m._num_usable_gpu_blocks, "alone, and later"
                return
            if status is not AllocStatus.OK: continue
            if rng.random() < 0.2: return
            self.m.allocate(group)
            seq.status = RUNNING
            self.waiting.remove(group)
            self.running.append(group)
            new = max(1, seq.get_len() - cached)
            chunk = seq.get_len() - new + (rng.randint(1, new) if self.chunked else new)
            self.plan.append((group, chunk))

    def settle_hits(self):
        "What each prompt may skip: claimed by V0, cut to what is there."
        self.skip = {}
        for group, chunk in reversed(self.plan):
            seqs = group.get_seqs(RUNNING)
            for seq in seqs: self.m.access_all_blocks_in_seq(seq, self.now)
            claim = self.m.get_common_computed_block_ids(seqs) if self.m.enable_caching else []
            self.skip[group.request_id] = len(self.m.get_written_block_ids(claim)) * self.m.block_size
            self.m.mark_blocks_as_computed(group, chunk)

    def forward(self, rng):
        work = []
        for group, chunk in self.plan:
            for seq in group.get_seqs(RUNNING):
                start = seq.get_num_computed_tokens()
                end = start + chunk
                if group.is_prefill(): start = min(max(start, self.skip[group.request_id]), end - 1)
                work.append((self.m.get_block_table(seq), seq.get_token_ids(), start, end))
        for table, tokens, start, end in work: self.worker.write(table, tokens, start, end)
        for table, tokens, start, end in work: self.worker.check(table, tokens, start, end, self.window)
        for group, chunk in self.plan:
            was_prefill = group.is_prefill()
            group.update_num_computed_tokens(chunk)
            if not group.is_prefill(): self.sample(group, rng, was_prefill)

    def sample(self, group, rng, was_prefill):
        if was_prefill and len(group.seqs) < group.num_samples:
            for _ in range(group.num_samples - 1):
                child = group.first_seq.fork(next(self.ids))
                group.add(child)
                self.m.fork(group.first_seq, child)
        for _ in range(1 if was_prefill else 1 + rng.randint(0, self.lookahead)):
            for seq in group.get_seqs(RUNNING):
                if seq.data.get_num_uncomputed_tokens():        # a burst goes on in its own slots
                    table, tokens, p = self.m.get_block_table(seq), seq.get_token_ids(), seq.get_len() - 1
                    self.worker.write(table, tokens, p, p + 1)
                    self.worker.check(table, tokens, p, p + 1, self.window)
                    seq.data.update_num_computed_tokens(1)
                token = rng.randint(0, 1)
                seq.append_token_id(token, {token: Logprob(0.0)})
        for seq in group.get_seqs(RUNNING):
            if seq.get_len() >= MAX_LEN or rng.random() < 0.1:
                seq.status = SequenceStatus.FINISHED_STOPPED
                self.m.free(seq)
        if group.is_finished(): self.running.remove(group)

    # ---- after each rule ----
    @invariant()
    def pools_and_tables_agree(self):
        if not hasattr(self, "m"): return
        self.m.check_invariants()
        alive = {s.seq_id for g in self.running + self.swapped for s in g.get_unfinished_seqs()}
        assert self.m.block_tables.keys() == alive
        if not alive:
            # At idle the pools are whole, but for the one null block.
            assert self.m.get_num_free_gpu_blocks() == self.m._num_usable_gpu_blocks
            assert self.m.get_num_free_cpu_blocks() == self.m.num_total_cpu_blocks

    def teardown(self):
        if not hasattr(self, "m"): return
        for group in self.waiting + self.running + self.swapped: self.end(group)
        self.pools_and_tables_agree()
        tracker = self.m._computed_blocks_tracker
        assert not tracker._seq_id_to_hashes and not tracker._seq_id_to_num_cached
        assert not self.m._last_access_blocks_tracker._seq_last_access


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None,
                               suppress_health_check=list(HealthCheck))


def test_long_random_runs():
    "The same machine without a search: many steps, fixed seeds."
    for seed in range(60):
        rng = random.Random(seed)
        blocks = Blocks()
        blocks.start(rng.choice([1, 2, 4]), rng.randint(3, 14), rng.choice([0, 6, 14]), rng.random() < 0.6,
                     rng.random() < 0.5, rng.choice([0, 3]), rng.choice([None, None, 5]), rng.choice([0.0, 0.2]))
        for _ in range(120):
            if rng.random() < 0.4:
                blocks.add([rng.randint(0, 1) for _ in range(rng.randint(1, 9))], rng.choice([1, 1, 2, 3]))
            blocks.step(rng)
            if rng.random() < 0.05 and blocks.waiting + blocks.running + blocks.swapped: blocks.abort(rng)
            blocks.pools_and_tables_agree()
        blocks.teardown()
