"""V0's fake worker: KV that knows its prefix, in two pools, and an engine around it.

The "KV" of a token is a digest of everything up to it. The worker swaps in,
swaps out, copies, then computes; every slot it reads must hold the digest of
the right prefix, or it says which one does not. The next token is a function
of the last digest and of which of its group's sequences this is, so outputs
can be compared with a loop that runs one sequence alone.
"""
from fake_worker import EOS, absorb, next_token, prefix_digests

from minengine.outputs import Logprob
from minengine.v0.cpu_gpu_allocator import Device
from minengine.v0.sequence import SequenceStatus
from v0_scheduling import SEQ_IDS, check_step

MAX_EMPTY_STEPS = 2   # in a row: V0 makes room in one step, and uses it in the next


def sample(digest, index) -> int: return next_token(absorb(digest, index))


def generate_alone(prompt, params, max_model_len, index=0, adapter=None) -> list[int]:
    "The naive loop: one sequence, no cache, with V0's rules for the end."
    tokens, output = list(prompt), []
    while True:
        output.append(sample(prefix_digests(tokens, (), adapter)[-1], index))
        tokens.append(output[-1])
        if ends(output, len(tokens), params, max_model_len): return output


def ends(output, length, params, max_model_len) -> bool:
    if len(output) < params.min_tokens: return False
    if output[-1] == EOS and not params.ignore_eos: return True
    return length > max_model_len or len(output) == params.max_tokens


class V0FakeWorker:
    def __init__(self, block_size):
        self.block_size = block_size
        self.kv = {Device.GPU: {}, Device.CPU: {}}   # (row, offset) -> digest
        self.index_of = {}                           # sequence id -> which of n
        self.adapter_of = {}                         # sequence id -> adapter
        self.num_computed = 0                        # tokens, over all steps

    def move(self, pairs, source, target):
        source, target = self.kv[source], self.kv[target]
        for src, dst in pairs:
            for i in range(self.block_size):
                target.pop((dst, i), None)
                if (src, i) in source: target[dst, i] = source[src, i]

    def poison(self, device, rows):
        "What nobody may read: reading it fails like NaN would."
        for row in rows:
            for i in range(self.block_size): self.kv[device].pop((row, i), None)

    def execute(self, metadata, outputs) -> dict[str, list[tuple[int, list[int]]]]:
        "Sampled tokens of each group: (parent sequence, tokens) by sample."
        self.move(outputs.blocks_to_swap_in, Device.CPU, Device.GPU)
        self.move(outputs.blocks_to_swap_out, Device.GPU, Device.CPU)
        self.move(outputs.blocks_to_copy, Device.GPU, Device.GPU)
        rows = [Row(self, told, seq_id) for told in metadata for seq_id in told.seq_data]
        num_steps = max([told.state.num_steps for told in metadata], default=1)
        for n in range(num_steps):
            assert all(row.told.state.num_steps == num_steps for row in rows), "bursts differ"
            for row in rows: row.write()    # all write …
            for row in rows: row.read()     # … before any reads
        sampled = {}
        for row in rows:
            if row.told.do_sample: sampled.setdefault(row.told.request_id, []).extend(row.samples)
        return sampled


class Row:
    "One sequence in one step, or in a burst of steps."

    def __init__(self, worker, told, seq_id):
        self.worker, self.told, self.seq_id = worker, told, seq_id
        data = told.seq_data[seq_id]
        self.tokens, self.table = list(data.get_token_ids()), list(told.block_tables[seq_id])
        self.start, self.end = data.get_num_computed_tokens(), data.get_len()
        first = told.is_prompt and not data.get_output_len()
        self.indices = range(num_samples(told)) if first else [worker.index_of[seq_id]]
        if told.is_prompt:
            self.end = min(self.end, self.start + told.token_chunk_size)
            skipped = len(told.computed_block_nums) * worker.block_size
            assert told.computed_block_nums == self.table[:len(told.computed_block_nums)]
            if skipped > self.start: self.start = min(skipped, self.end - 1)
        else: assert self.end - self.start == 1 == told.token_chunk_size, f"{seq_id}: {self.start}, {self.end}"
        self.samples = []

    def slot(self, position):
        block, offset = divmod(position, self.worker.block_size)
        return self.table[block], offset

    def write(self):
        adapter = self.worker.adapter_of.get(self.seq_id)
        self.digests = prefix_digests(self.tokens[:self.end], (), adapter)
        for position in range(self.start, self.end):
            self.worker.kv[Device.GPU][self.slot(position)] = self.digests[position]
        self.worker.num_computed += self.end - self.start

    def read(self):
        for position, digest in enumerate(self.digests):
            held = self.worker.kv[Device.GPU].get(self.slot(position))
            assert held == digest, f"{self.told.request_id}: position {position} in slot {self.slot(position)} is wrong"
        if not self.told.do_sample: return
        if self.samples: self.samples[0][1].append(sample(self.digests[-1], self.indices[0]))
        else: self.samples = [(self.seq_id, [sample(self.digests[-1], i)]) for i in self.indices]
        self.tokens.append(self.samples[0][1][-1])
        self.start, self.end = self.end, self.end + 1


def num_samples(told): return max(told.sampling_params.n, told.sampling_params.best_of or 1)


class V0Engine:
    "Scheduler, fake worker, and the engine's loop around them."

    def __init__(self, scheduler):
        self.scheduler, self.manager = scheduler, scheduler.block_manager
        self.worker = V0FakeWorker(self.manager.block_size)
        self.max_model_len = scheduler.scheduler_config.max_model_len
        self.use_async = scheduler.use_async_output_proc
        self.groups, self.pending, self.num_empty = {}, [], 0
        if self.use_async: scheduler.output_proc_callback = self.process_pending

    def add(self, group):
        self.scheduler.add_seq_group(group)
        self.groups[group.request_id] = group
        self.worker.index_of[group.first_seq.seq_id] = 0
        self.worker.adapter_of[group.first_seq.seq_id] = group.lora_int_id or None

    def step(self):
        metadata, outputs, allow_async = self.scheduler.schedule()
        check_step(self.scheduler, metadata, outputs)
        for group in outputs.ignored_seq_groups: assert group.is_finished()
        if not allow_async: self.process_pending()
        sampled = self.worker.execute(metadata, outputs)
        self.process_pending()     # while the model ran
        for told, scheduled in zip(metadata, outputs.scheduled_seq_groups):
            if scheduled.seq_group.is_finished(): continue   # one step late
            self.advance(scheduled, told, sampled.get(told.request_id, []))
        if not allow_async: self.process_pending()
        self.scheduler.free_finished_seq_groups()
        self.check(outputs)
        return metadata, outputs

    def advance(self, scheduled, told, samples):
        "Add the sampled tokens; whether one of them is the last may be seen later."
        group = scheduled.seq_group
        if not samples: return group.update_num_computed_tokens(scheduled.token_chunk_size)
        num_forks, parent = len(samples) - len(told.seq_data), group.first_seq
        if num_forks: samples = self.fork(group, parent, scheduled, samples)
        for seq_id, tokens in samples:
            seq = group.seqs_dict[seq_id]
            if seq.is_finished(): continue
            if not num_forks: seq.data.update_num_computed_tokens(scheduled.token_chunk_size)
            for i, token in enumerate(tokens):
                if i: seq.data.update_num_computed_tokens(1)
                seq.append_token_id(token, {token: Logprob(0.0)})
                if self.use_async: continue
                if self.check_end(seq, group): break
        if self.use_async: self.pending.append(group)

    def fork(self, group, parent, scheduled, samples):
        group.update_num_computed_tokens(scheduled.token_chunk_size)
        ids = [parent.seq_id]
        for i in range(1, len(samples)):
            child = parent.fork(next(SEQ_IDS))
            self.worker.index_of[child.seq_id] = i
            self.worker.adapter_of[child.seq_id] = group.lora_int_id or None
            group.add(child)
            self.scheduler.fork_seq(parent, child)
            ids.append(child.seq_id)
        return [(i, tokens) for i, (_, tokens) in zip(ids, samples)]

    def check_end(self, seq, group) -> bool:
        if not ends(seq.get_output_token_ids(), seq.get_len(), group.sampling_params, self.max_model_len):
            return False
        seq.status = SequenceStatus.FINISHED_STOPPED
        return True

    def process_pending(self, request_id=None):
        "Look for ends, of all requests or of one."
        todo = [g for g in self.pending if request_id in (None, g.request_id)]
        self.pending = [g for g in self.pending if g not in todo]
        for group in todo:
            for seq in group.get_unfinished_seqs(): self.check_end(seq, group)
        if request_id is None and todo: self.scheduler.free_finished_seq_groups()

    def abort(self, *names):
        self.scheduler.abort_seq_group(names)
        for name in names:
            assert self.groups[name].is_finished()
        self.pending = [g for g in self.pending if not g.is_finished()]
        self.check()

    def check(self, outputs=None):
        scheduler, manager = self.scheduler, self.manager
        scheduler.check_invariants()
        for device, pool in manager.block_allocator.allocators.items():
            self.worker.poison(device, map(pool.get_physical_block_id, pool._free_block_ids))
        if outputs is None: return
        idle = not outputs.scheduled_seq_groups and not outputs.ignored_seq_groups
        self.num_empty = self.num_empty + 1 if idle and scheduler.has_unfinished_seqs() else 0
        assert self.num_empty <= MAX_EMPTY_STEPS, (
            f"{self.num_empty} empty steps: waiting {scheduler.waiting}, "
            f"running {scheduler.running}, swapped {scheduler.swapped}")

    def finish(self):
        "Run to the end; then all blocks must have come back."
        limit = 5_000
        while self.scheduler.has_unfinished_seqs():
            self.step()
            limit -= 1
            assert limit, f"no end: {self.scheduler.running}"
        self.process_pending()
        manager = self.manager
        assert manager.get_num_free_gpu_blocks() == manager.num_total_gpu_blocks
        assert manager.get_num_free_cpu_blocks() == manager.num_total_cpu_blocks
        assert not manager.block_tables and not self.scheduler._request_ids
        tracker = manager._computed_blocks_tracker
        assert not tracker._seq_id_to_hashes and not tracker._seq_id_to_num_cached
        ended = self.scheduler.get_and_reset_finished_requests_ids()
        assert sorted(ended) == sorted(self.groups), "each request ends once"
        for group in self.groups.values(): self.check_result(group)

    def check_result(self, group):
        statuses = SequenceStatus
        for seq in group.seqs:
            got, index = list(seq.get_output_token_ids()), self.worker.index_of[seq.seq_id]
            want = generate_alone(seq.prompt_token_ids, group.sampling_params, self.max_model_len,
                                  index, group.lora_int_id or None)
            name = f"{group.request_id}, sequence {index}"
            assert seq.is_finished(), f"{name}: {seq}"
            if seq.status in (statuses.FINISHED_ABORTED, statuses.FINISHED_IGNORED):
                # Async: a token may be there that a late look would have dropped.
                n = min(len(got), len(want))
                assert got[:n] == want[:n] and len(got) <= len(want) + self.use_async, f"{name}: {got}, alone {want}"
                if seq.status == statuses.FINISHED_IGNORED: assert seq.stop_reason, name
            else: assert got == want, f"{name}: {got}, alone {want}"
