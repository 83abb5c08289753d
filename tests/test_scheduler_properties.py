"""Whatever is added, stepped, aborted or reset, and in whatever order.

After every action: blocks in use + free = pool, reference counts equal holders,
no block in two tables but through a hit, cached blocks hold what their hash
says (the fake worker reads them), each request in one queue. At idle the pool
is whole. Every request ends, or fails with a reason. No step is empty while
there is work.
"""
from fake_worker import EOS, VOCAB, Engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import make_request, make_scheduler

from minengine.v1.core.block_hash import hash_block_tokens

TEXT = [(3 * i + i // 5) % VOCAB for i in range(80)]


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 24), block_size=st.sampled_from([1, 2, 4, 8]), budget=st.integers(5, 40),
        max_seqs=st.integers(1, 5), prealloc=st.sampled_from([0, 2, 16, 64]), caching=st.booleans(),
        max_model_len=st.integers(8, 64), depth=st.sampled_from([1, 1, 2, 3]), num_drafts=st.sampled_from([0, 0, 2]))
    def start(self, num_blocks, block_size, budget, max_seqs, prealloc, caching, max_model_len, depth, num_drafts):
        # The pool may be smaller than a request: such a request fails alone.
        self.engine = Engine(make_scheduler(
            num_blocks=num_blocks, block_size=block_size, budget=budget, max_seqs=max_seqs, prealloc=prealloc,
            caching=caching, max_model_len=max_model_len, encoder_budget=6, encoder_cache=7), depth, num_drafts)
        self.count = 0

    @rule(length=st.integers(1, 40), start=st.sampled_from([0, 0, 0, 1]), max_tokens=st.integers(0, 15),
          image=st.sampled_from([None, None, (1, 4, "x"), (1, 4, "y"), (6, 6, "x")]), ignore_eos=st.booleans())
    def add(self, length, start, max_tokens, image, ignore_eos):
        limit = self.engine.scheduler.max_model_len - (max_tokens > 0)
        prompt = TEXT[start:start + min(length, limit)]
        images = [image] if image and image[0] + image[1] <= len(prompt) else []
        self.engine.add(make_request(f"r{self.count}", prompt, max_tokens, images, EOS, ignore_eos=ignore_eos))
        self.count += 1

    @rule()
    def step(self): self.engine.step()

    @rule()
    def several_steps(self):
        for _ in range(5): self.engine.step()

    @precondition(lambda self: self.engine.queue)
    @rule()
    def end(self): self.engine.end()

    @rule(data=st.data())
    def abort(self, data):
        if self.count: self.engine.abort(f"r{data.draw(st.integers(0, self.count - 1))}")

    @rule(data=st.data())
    def abort_and_add_the_same_id(self, data):
        if not self.count: return
        req_id = f"r{data.draw(st.integers(0, self.count - 1))}"
        self.engine.abort(req_id)
        old = self.engine.requests[req_id]
        self.engine.check_result(old)
        self.engine.add(make_request(req_id, list(old.prompt_token_ids)[:5], 3, (), EOS))

    @rule()
    def reset(self):
        manager = self.engine.manager
        in_use = manager.num_free_blocks < manager.num_gpu_blocks
        assert self.engine.scheduler.reset_prefix_cache() is not in_use

    @invariant()
    def books_are_right(self):
        if hasattr(self, "engine"): self.engine.check()

    @invariant()
    def hits_are_shared_and_nothing_else_is(self):
        if not hasattr(self, "engine"): return
        tables = self.engine.manager.req_to_blocks
        for i, one in enumerate(tables.values()):
            assert len({b.block_id for b in one}) == len(one), "a block twice in one table"
            for other in list(tables.values())[:i]:
                shared = {b.block_id for b in one} & {b.block_id for b in other}
                # Shared blocks are a common beginning, all of them hashed.
                common = [a for a, b in zip(one, other) if a is b]
                assert len(common) == len(shared) and one[:len(common)] == other[:len(common)]
                assert all(b.block_hash for b in common)

    @invariant()
    def hashes_follow_from_tokens(self):
        if not hasattr(self, "engine"): return
        manager, size = self.engine.manager, self.engine.manager.block_size
        for request in self.engine.scheduler.running:
            if request.mm_positions: continue
            tokens, parent = list(request.all_token_ids), None
            for i in range(manager.num_cached_block.get(request.request_id, 0)):
                parent = hash_block_tokens(parent, tokens[i * size:(i + 1) * size])
                assert manager.req_to_blocks[request.request_id][i].block_hash == parent

    def teardown(self):
        if hasattr(self, "engine"): self.engine.finish()


AnyOrder.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestAnyOrder = AnyOrder.TestCase
