"""A worker without a model that still knows when KV is wrong.

The "KV" of a token is a digest of everything up to it: tokens, images,
adapter. A slot that holds the wrong prefix is noticed when it is read, and the
next token is a pure function of what was read, so that one wrong slot changes
the output. It learns about requests from `SchedulerOutput`s only.
"""
from dataclasses import dataclass, field
from hashlib import blake2b

from minengine.v1.core.scheduler_output import SchedulerOutput
from minengine.v1.messages import ModelRunnerOutput

VOCAB, EOS, JUNK = 7, 0, 123_456


def absorb(digest: bytes, *what) -> bytes:
    return blake2b(digest + repr(what).encode(), digest_size=8).digest()


def prefix_digests(token_ids, images=(), adapter=None) -> list[bytes]:
    "One digest for each position: the prefix that ends there."
    digests, digest = [], absorb(b"", adapter)
    for position, token_id in enumerate(token_ids):
        seen = [(h, position - o) for o, n, h in images if o <= position < o + n]
        digest = absorb(digest, token_id, seen)
        digests.append(digest)
    return digests


def next_token(digest: bytes) -> int:
    return int.from_bytes(digest, "big") % VOCAB


def generate_alone(request, max_model_len) -> list[int]:
    "The naive loop: one request, no cache, every prefix from scratch."
    params, tokens, output = request.sampling_params, list(request.prompt_token_ids), []
    images = images_of(request.mm_positions, request.mm_hashes)
    limit = max_model_len if params.max_tokens is None else params.max_tokens
    while len(output) < limit and len(tokens) < max_model_len:
        token = next_token(prefix_digests(tokens, images, adapter_of(request.lora_request))[-1])
        tokens.append(token)
        output.append(token)
        if len(output) < params.min_tokens: continue
        if token == request.eos_token_id and not params.ignore_eos: break
        if token in params.stop_token_ids: break
    return output


def images_of(positions, hashes): return [(p.offset, p.length, h) for p, h in zip(positions, hashes)]


def adapter_of(lora): return getattr(lora, "lora_int_id", None)


@dataclass
class Row:
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    images: list = field(default_factory=list)
    adapter: int | None = None
    num_steps: int = 0


class FakeWorker:
    def __init__(self, block_size: int, num_drafts: int = 0):
        self.block_size, self.num_drafts = block_size, num_drafts
        self.kv: dict[int, bytes] = {}       # slot -> digest of the prefix
        self.rows: dict[str, Row] = {}
        self.encoder_cache: set[tuple[str, int]] = set()

    def slot(self, row, position):
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def poison(self, block_ids):
        "What nobody may read: reading it fails like NaN would."
        for block_id in block_ids:
            for slot in range(block_id * self.block_size, (block_id + 1) * self.block_size):
                self.kv.pop(slot, None)

    def execute(self, order: SchedulerOutput) -> ModelRunnerOutput:
        self._learn(order)
        work = {}
        for req_id, n in order.num_scheduled_tokens.items():   # all write …
            row, drafts = self.rows[req_id], order.scheduled_spec_decode_tokens.get(req_id, [])
            start, end = row.num_computed_tokens, row.num_computed_tokens + n
            token_ids = row.token_ids[:end - len(drafts)] + drafts
            assert len(token_ids) == end, f"{req_id}: {end} positions, {len(token_ids)} tokens"
            digests = prefix_digests(token_ids, row.images, row.adapter)
            for i, (offset, length, _) in enumerate(row.images):
                if offset < end and offset + length > start:
                    assert (req_id, i) in self.encoder_cache, f"{req_id}: image {i} is not encoded"
            for position in range(start, end): self.kv[self.slot(row, position)] = digests[position]
            work[req_id] = digests, drafts
        for req_id, (digests, _) in work.items():              # … before any reads
            row = self.rows[req_id]
            for position, digest in enumerate(digests):
                assert self.kv.get(self.slot(row, position)) == digest, (
                    f"{req_id}: the slot of position {position} holds something else")
        sampled, drafts = {}, {}
        for req_id, (digests, given) in work.items():
            sampled[req_id] = self._sample(self.rows[req_id], digests, given)
            drafts[req_id] = self._propose(self.rows[req_id])
        ids = list(sampled)
        return ModelRunnerOutput(
            ids, {i: n for n, i in enumerate(ids)}, list(sampled.values()),
            list(drafts.values()) if self.num_drafts else None)

    def _learn(self, order):
        for req_id in order.finished_req_ids:       # first: an id may be new again
            self.rows.pop(req_id, None)
            self.encoder_cache = {e for e in self.encoder_cache if e[0] != req_id}
        for entry in order.free_encoder_input_ids: self.encoder_cache.discard(tuple(entry))
        for new in order.scheduled_new_reqs:
            assert new.req_id not in self.rows, f"{new.req_id} is known"
            self.rows[new.req_id] = Row(
                list(new.prompt_token_ids), list(new.block_ids), new.num_computed_tokens,
                images_of(new.mm_positions, new.mm_hashes), adapter_of(new.lora_request))
        for data in order.scheduled_cached_reqs:
            row, start = self.rows[data.req_id], data.num_computed_tokens
            row.num_computed_tokens = start
            if data.resumed_from_preemption: row.block_ids = list(data.new_block_ids)
            else: row.block_ids += data.new_block_ids
            end = start + len(data.new_token_ids)
            assert row.token_ids[start:end] == data.new_token_ids, (
                f"{data.req_id}: {data.new_token_ids} at {start}, had {row.token_ids[start:end]}")
        for req_id, inputs in order.scheduled_encoder_inputs.items():
            self.encoder_cache |= {(req_id, i) for i in inputs}

    def _sample(self, row, digests, drafts):
        row.num_steps += 1
        if len(digests) - len(drafts) < len(row.token_ids): return [JUNK]   # a chunk
        tokens = []
        for i, draft in enumerate([*drafts, None]):
            tokens.append(next_token(digests[len(digests) - len(drafts) - 1 + i]))
            if draft != tokens[-1]: break
        row.token_ids += tokens
        return tokens

    def _propose(self, row):
        "Drafts, right more often than not."
        token_ids, drafts = list(row.token_ids), []
        for i in range((row.num_steps + len(token_ids)) % (self.num_drafts + 1)):
            right = next_token(prefix_digests(token_ids, row.images, row.adapter)[-1])
            drafts.append(right if (row.num_steps + i) % 3 else (right + 1) % VOCAB)
            token_ids.append(drafts[-1])
        return drafts


class Engine:
    "Scheduler and fake worker, up to `depth` steps on their way at once."

    def __init__(self, scheduler, depth: int = 1, num_drafts: int = 0):
        self.scheduler, self.depth = scheduler, depth
        self.manager = scheduler.kv_cache_manager
        self.worker = FakeWorker(self.manager.block_size, num_drafts)
        self.queue, self.requests, self.outputs = [], {}, {}

    def add(self, request):
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []

    def begin(self):
        "Schedule a step and compute it; its result stays on its way."
        scheduler = self.scheduler
        unfinished, idle = scheduler.has_unfinished_requests(), scheduler.get_num_unscheduled_requests()
        order = scheduler.schedule()
        order.check_invariants()
        assert order.total_num_scheduled_tokens <= scheduler.config.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        if unfinished and idle and not self.queue and not scheduler._given_up:
            assert order.total_num_scheduled_tokens, "an empty step with work to do"
        self.queue.append((order, self.worker.execute(order)))

    def end(self):
        "Take in the oldest result."
        order, result = self.queue.pop(0)
        for output in self.scheduler.update_from_output(order, result).outputs:
            got = self.outputs[output.request_id]
            assert got is not None, f"{output.request_id} has ended already"
            got += output.new_token_ids
            assert JUNK not in got
            if output.finished:
                request = self.requests[output.request_id]
                assert output.finish_reason is request.status.finish_reason
                assert got == list(request.output_token_ids)
        self.check()

    def step(self):
        if len(self.queue) < self.depth: self.begin()
        if len(self.queue) == self.depth: self.end()

    def abort(self, req_id):
        from minengine.v1.request import RequestStatus
        self.scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORTED)
        self.check()

    def check(self):
        self.scheduler.check_invariants()
        self.worker.poison(b.block_id for b in self.manager.pool.free_queue if b.block_hash is None)
        for request in self.scheduler.running: self.check_mirror(request)

    def check_mirror(self, request):
        "The worker's row says what the scheduler's request says."
        row = self.worker.rows[request.request_id]
        assert row.block_ids == [b.block_id for b in self.manager.req_to_blocks[request.request_id]]
        if request.in_flight is None:
            assert row.token_ids == list(request.all_token_ids), request.request_id

    def finish(self):
        "Run to the end; then everything must have come back."
        limit = 10_000
        while self.queue or self.scheduler.has_unfinished_requests():
            if self.scheduler.has_unfinished_requests() and len(self.queue) < self.depth: self.begin()
            else: self.end()
            limit -= 1
            assert limit, f"no end: running {self.scheduler.running}, waiting {self.scheduler.waiting}"
        assert self.manager.num_free_blocks == self.manager.num_gpu_blocks
        assert not self.manager.req_to_blocks and not self.manager.req_to_block_hashes
        self.worker.execute(self.scheduler.schedule())
        assert not self.worker.rows and not self.worker.encoder_cache
        assert self.scheduler.encoder_cache_manager.num_free_slots == self.scheduler.encoder_cache_manager.cache_size
        for request in self.requests.values(): self.check_result(request)

    def check_result(self, request):
        got = list(request.output_token_ids)
        want = generate_alone(request, self.scheduler.max_model_len)
        assert request.status.is_finished, f"{request.request_id}: {request.status!r}"
        if request.status.finish_reason.name == "ABORT" or isinstance(request.stop_reason, str):
            assert got == want[:len(got)], f"{request.request_id}: {got}, alone {want}"
        else:
            assert got == want, f"{request.request_id}: {got}, alone {want}"
        if isinstance(request.stop_reason, str):   # given up: it really did not fit
            assert self.manager.why_too_long(request.num_tokens)
