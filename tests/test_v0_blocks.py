"""V0's blocks: allocators, evictor, tables, manager, against every row of the reference's own checks.

`tests/test_v0_block_properties.py` holds what must be true after any sequence of operations.
"""
import itertools
import random
from bisect import bisect_left

import pytest

from minengine.sampling_params import SamplingParams
from minengine.config import cdiv
from minengine.outputs import Logprob
from minengine.v0.block_allocator import NaiveBlockAllocator, NoFreeBlocksError, RefCounter
from minengine.v0.block_manager import AllocStatus, ComputedBlocksTracker, SelfAttnBlockSpaceManager
from minengine.v0.block_table import BlockTable, num_blocks_touched
from minengine.v0.cpu_gpu_allocator import CpuGpuBlockAllocator, Device
from minengine.v0.prefix_caching import (
    NEVER_ACCESSED, LRUEvictor, PrefixCachingBlockAllocator, hash_block_tokens)
from minengine.v0.sequence import Sequence, SequenceGroup, SequenceStatus

KINDS = ("naive", "prefix_caching")
ALLOCATORS = (NaiveBlockAllocator, PrefixCachingBlockAllocator)


def chain(allocator, tokens):
    "Full blocks for all of `tokens`, each the neighbour of the one before."
    blocks, size = [], allocator.block_size
    for i in range(0, len(tokens), size):
        blocks.append(allocator.allocate_immutable_block(blocks[-1] if blocks else None, tokens[i:i + size]))
    return blocks


def ids(blocks): return [b.block_id for b in blocks]


_seq_ids = itertools.count()


def make_group(prompt=4, num_seqs=1, status=SequenceStatus.WAITING, block_size=4):
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    seqs = [Sequence(next(_seq_ids), {"prompt_token_ids": tokens}, block_size) for _ in range(num_seqs)]
    for seq in seqs: seq.status = status
    return SequenceGroup(f"r{seqs[0].seq_id}", seqs, 0.0, SamplingParams())


def run(group, status=SequenceStatus.RUNNING):
    for seq in group.seqs: seq.status = status


def sample(seq, token=0): seq.append_token_id(token, {token: Logprob(0.0)})


def manager(gpu=8, cpu=8, block_size=4, **kwargs):
    return SelfAttnBlockSpaceManager(block_size, gpu, cpu, **kwargs)


def admitted(m, prompt=4, num_seqs=1):
    "A group that runs, its prompt computed."
    group = make_group(prompt, num_seqs, block_size=m.block_size)
    m.allocate(group)
    run(group)
    m.mark_blocks_as_computed(group, group.first_seq.get_len())
    group.update_num_computed_tokens(group.first_seq.get_len())
    return group


# ---- counts and the naive pool -----------------------------------------

def test_ref_counter():
    counter = RefCounter([3, 4])
    assert (counter.incr(3), counter.incr(3), counter.decr(3), counter.get(3), counter.get(4)) == (1, 2, 1, 1, 0)
    assert counter.decr(3) == 0
    with pytest.raises(ValueError, match="block 3 is free already"): counter.decr(3)
    with pytest.raises(KeyError): counter.incr(5)


@pytest.mark.parametrize("allocator_class", ALLOCATORS)
@pytest.mark.parametrize("num_blocks", [1, 7, 64])
def test_mutable_blocks_run_out(allocator_class, num_blocks):
    "[T] as many as there are, then NoFreeBlocksError; what is freed can be taken."
    pool = allocator_class(num_blocks, 16)
    blocks = [pool.allocate_mutable_block(None) for _ in range(num_blocks)]
    assert sorted(ids(blocks)) == list(range(num_blocks)) and pool.get_num_free_blocks() == 0
    with pytest.raises(NoFreeBlocksError, match=f"0 of {num_blocks} blocks are free"): pool.allocate_mutable_block(None)
    with pytest.raises(NoFreeBlocksError): pool.allocate_immutable_block(None, list(range(16)))
    for block in blocks: pool.free(block)
    assert pool.get_num_free_blocks() == num_blocks
    assert len({pool.allocate_mutable_block(None).block_id for _ in range(num_blocks)}) == num_blocks


def test_naive_immutable_blocks_run_out():
    pool = NaiveBlockAllocator(3, 4)
    for _ in range(3): pool.allocate_immutable_block(None, [1, 2, 3, 4])   # equal tokens, never shared
    with pytest.raises(NoFreeBlocksError): pool.allocate_immutable_block(None, [1, 2, 3, 4])


@pytest.mark.parametrize("allocator_class", ALLOCATORS)
def test_freed_last_is_taken_first(allocator_class):
    "[T] 100 times the same id; [V] last in, first out."
    pool = allocator_class(5, 4)
    first = pool.allocate_mutable_block(None).block_id
    for _ in range(100):
        block = pool.allocate_mutable_block(None)
        assert block.block_id == 1
        pool.free(block)
    blocks = [pool.allocate_mutable_block(None) for _ in range(4)]
    for block in blocks: pool.free(block)
    assert [pool.allocate_mutable_block(None).block_id for _ in range(4)] == [4, 3, 2, 1] and first == 0


@pytest.mark.parametrize("allocator_class", ALLOCATORS)
def test_double_free(allocator_class):
    "Field vllm#42571: a block is in the free list once."
    pool = allocator_class(2, 4)
    block = pool.allocate_mutable_block(None)
    block_id = block.block_id
    pool.free(block)
    block.block_id = block_id
    with pytest.raises(ValueError, match="block 0 is free already"): pool.free(block)
    assert pool.get_num_free_blocks() == 2


@pytest.mark.parametrize("allocator_class", ALLOCATORS)
def test_fork_frees_when_both_have_freed(allocator_class):
    "[T] nothing is free until the second holder lets go."
    pool = allocator_class(4, 4)
    blocks = chain(pool, range(8))
    forked = pool.fork(blocks)
    assert ids(forked) == ids(blocks) and pool.get_num_free_blocks() == 2
    for block in blocks: pool.free(block)
    assert pool.get_num_free_blocks() == 2
    for block in forked: pool.free(block)
    assert pool.get_num_free_blocks() == 4


@pytest.mark.parametrize("allocator_class", ALLOCATORS)
def test_first_appender_copies(allocator_class):
    pool = allocator_class(3, 4)
    block = pool.allocate_mutable_block(None)
    block.append_token_ids([1])
    twin, = pool.fork([block])
    block.append_token_ids([2])                     # the first to write moves out
    assert (block.block_id, twin.block_id) == (1, 0) and (block.token_ids, twin.token_ids) == ([1, 2], [1])
    twin.append_token_ids([3])                      # alone now: no copy
    assert pool.clear_copy_on_writes() == [(0, 1)] and pool.clear_copy_on_writes() == []


def test_copy_that_does_not_fit_changes_nothing():
    pool = NaiveBlockAllocator(1, 4)
    block = pool.allocate_mutable_block(None)
    pool.fork([block])
    with pytest.raises(NoFreeBlocksError): pool.cow_block_if_not_appendable(block)
    assert pool.refcounter.get(0) == 2 and pool.clear_copy_on_writes() == []


def test_too_many_tokens_for_a_block():
    block = NaiveBlockAllocator(1, 4).allocate_mutable_block(None)
    block.append_token_ids([1, 2, 3])
    with pytest.raises(ValueError, match="2 tokens for 1 empty slots"): block.append_token_ids([4, 5])
    assert block.token_ids == [1, 2, 3]


# ---- content hash ------------------------------------------------------

def test_hash_chain():
    "[T] equal for equal chains; None while not full, or if the one before has none."
    a, b = (chain(PrefixCachingBlockAllocator(4, 4), range(12)) for _ in range(2))
    assert [x.content_hash for x in a] == [x.content_hash for x in b]
    assert len({x.content_hash for x in a}) == 3
    pool = PrefixCachingBlockAllocator(4, 4)
    open_block = pool.allocate_mutable_block(None)
    open_block.append_token_ids([1, 2, 3])
    after = pool.allocate_mutable_block(open_block)
    assert open_block.content_hash is None
    after._extend([5, 6, 7, 8])
    assert after.is_full and after.content_hash is None
    open_block.append_token_ids([4])
    assert open_block.content_hash is not None and after.content_hash is not None
    first_again = pool.allocate_immutable_block(None, [5, 6, 7, 8])
    assert first_again.content_hash != after.content_hash   # the same tokens elsewhere


def test_hash_does_not_collide():
    """V0 compared Python's 64-bit hashes and no tokens; field vllm#12621.

    hash(-1) == hash(-2), and the two tuples below have one hash, too.
    """
    assert hash((1, -1)) == hash((1, -2))
    assert hash_block_tokens(None, [1, -1]) != hash_block_tokens(None, [1, -2])
    keys = [hash_block_tokens(prev, tokens, extra)
            for prev in (None, b"a" * 32) for tokens in ([], [1], [1, 2], [12])
            for extra in (None, ("lora", 1), ("lora", 2))]
    assert len(set(keys)) == len(keys)
    assert hash_block_tokens(None, [1, 2]) == hash_block_tokens(None, (1, 2))


def test_adapters_do_not_share():
    "Field vllm#3264: adapter A's KV is not B's."
    pool = PrefixCachingBlockAllocator(4, 4)
    blocks = [pool.allocate_immutable_block(None, [1, 2, 3, 4], extra)
              for extra in (None, ("lora", 1), ("lora", 2), ("lora", 1))]
    assert ids(blocks) == [0, 1, 2, 1]


# ---- evictor -----------------------------------------------------------

def test_evictor_order():
    "[T] oldest access first; of equals the one with the longest prefix; then the smallest id."
    evictor = LRUEvictor()
    for block_id, tokens, time in ((0, 16, 2.0), (1, 32, 2.0), (2, 16, 1.0), (4, 48, 3.0), (3, 48, 3.0)):
        evictor.add(block_id, bytes([block_id]), tokens, time)
    assert [evictor.evict()[0] for _ in range(5)] == [2, 1, 0, 3, 4]
    with pytest.raises(ValueError, match="no cached block is free"): evictor.evict()


def test_evictor_update_keeps_the_block_evictable():
    "V0's BUG: after update() a block counted as free, and evict() never found it."
    evictor = LRUEvictor()
    evictor.add(0, b"h0", 16, 1.0)
    evictor.update(0, 5.0)
    assert evictor.num_blocks == 1 and evictor.evict() == (0, b"h0")
    evictor.add(0, b"h0", 16, 1.0)
    evictor.add(1, b"h1", 16, 2.0)
    evictor.update(0, 5.0)
    assert [evictor.evict()[0] for _ in range(2)] == [1, 0]    # the newer time counts
    with pytest.raises(KeyError): evictor.update(0, 6.0)


def test_evictor_ignores_what_a_block_held_before():
    "V0 compared times only: the entry of an earlier stay could pass, and named contents long gone."
    evictor = LRUEvictor()
    for _ in range(2):
        evictor.add(5, b"a", 16, NEVER_ACCESSED)
        evictor.remove(5)                     # a hit: its entry stays in the heap
    evictor.add(5, b"a", 16, NEVER_ACCESSED)
    assert evictor.evict() == (5, b"a")       # two stale entries are left
    evictor.add(5, b"b", 16, NEVER_ACCESSED)
    assert evictor.evict() == (5, b"b")
    with pytest.raises(ValueError, match="block 5 is not in the evictor"): evictor.remove(5)


def test_evictor_cleans_up():
    evictor = LRUEvictor()
    evictor.add(0, b"", 16, 0.0)
    for i in range(1000):
        evictor.add(1, b"", 16, float(i))
        evictor.remove(1)
    assert len(evictor.priority_queue) <= 2 * LRUEvictor.CLEANUP_THRESHOLD and evictor.evict()[0] == 0


def test_evictor_against_a_sorted_list():
    rng, evictor, plain = random.Random(0), LRUEvictor(), {}
    for _ in range(3000):
        block_id, what = rng.randrange(12), rng.random()
        if block_id not in plain:
            plain[block_id] = (float(rng.randrange(4)), -rng.randrange(3), block_id, bytes([rng.randrange(3)]))
            evictor.add(block_id, plain[block_id][3], -plain[block_id][1], plain[block_id][0])
        elif what < 0.3:
            evictor.remove(block_id)
            del plain[block_id]
        elif what < 0.6:
            plain[block_id] = (float(rng.randrange(4)), *plain[block_id][1:])
            evictor.update(block_id, plain[block_id][0])
        else:
            entry = min(plain.values())
            assert evictor.evict() == (entry[2], entry[3])
            del plain[entry[2]]
        assert evictor.num_blocks == len(plain)


# ---- prefix-caching pool -----------------------------------------------

def test_equal_blocks_are_one_block():
    "[T] the same contents never run out: all are the same physical block."
    pool = PrefixCachingBlockAllocator(2, 4)
    blocks = [pool.allocate_immutable_block(None, [1, 2, 3, 4]) for _ in range(20)]
    assert set(ids(blocks)) == {0} and pool.refcounter.get(0) == 20 and pool.get_num_free_blocks() == 1


def test_distinct_blocks_run_out_and_come_back():
    "[T] a chain as long as the pool, freed and asked for again: the same ids, in order."
    pool = PrefixCachingBlockAllocator(5, 4)
    blocks = chain(pool, range(20))
    with pytest.raises(NoFreeBlocksError): pool.allocate_immutable_block(None, [9, 9, 9, 9])
    before = ids(blocks)
    for block in blocks: pool.free(block)
    assert pool.get_num_free_blocks() == 5 and ids(chain(pool, range(20))) == before


def test_free_counts_while_a_shared_chain_is_freed():
    "[T] constant while the first of two chains is freed, then one more for each block."
    pool = PrefixCachingBlockAllocator(10, 4)
    first, second = chain(pool, range(16)), chain(pool, range(16))
    for block in first:
        assert pool.get_num_free_blocks() == 6
        pool.free(block)
    for i, block in enumerate(second):
        assert pool.get_num_free_blocks() == 6 + i
        pool.free(block)
    assert pool.get_num_free_blocks() == 10


def test_promotion_changes_the_id():
    "A block that fills up with what another holds joins it; its own goes back."
    pool = PrefixCachingBlockAllocator(4, 4)
    there = pool.allocate_immutable_block(None, [1, 2, 3, 4])
    pool.mark_written([0])
    growing = pool.allocate_mutable_block(None)
    growing.append_token_ids([1, 2, 3])
    assert growing.block_id == 1
    growing.append_token_ids([4])
    assert growing.block_id == there.block_id == 0 and pool.refcounter.get(0) == 2
    assert pool.get_num_free_blocks() == 3 and pool.allocate_mutable_block(None).block_id == 1
    alone = pool.allocate_mutable_block(None)
    alone.append_token_ids([5, 6, 7, 8])             # unknown: keeps its own
    assert alone.block_id == 2


def test_promotion_joins_nothing_unwritten():
    "minengine: a block whose KV no step computes yet takes in no sequence that has its own."
    pool = PrefixCachingBlockAllocator(4, 4)
    pool.allocate_immutable_block(None, [1, 2, 3, 4])      # a later chunk of some prompt
    growing = pool.allocate_mutable_block(None)
    growing.append_token_ids([1, 2, 3, 4])
    assert growing.block_id == 1
    pool.free(growing)
    assert pool.get_num_free_blocks() == 3 and pool.evictor.num_blocks == 0


def test_promotion_leaves_copies_of_this_step_alone():
    "minengine: a block that the worker has yet to copy from is not handed out in the same step."
    pool = PrefixCachingBlockAllocator(4, 2)
    block = pool.allocate_mutable_block(None)
    block.append_token_ids([1])
    twin, = pool.fork([block])
    block.append_token_ids([2])                      # copies 0 to 1, and fills it
    twin.append_token_ids([2])                       # fills 0 with the same
    assert (block.block_id, twin.block_id) == (1, 0) and pool.clear_copy_on_writes() == [(0, 1)]
    pool.mark_blocks_as_computed()
    pool.free(twin)
    assert pool.get_num_free_blocks() == 3 and pool.evictor.num_blocks == 0   # nameless: freed for good


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_eviction_order(num_blocks):
    "[T] chain 1 of 2 blocks accessed at 1, chain 2 of the others at 2, all freed: chain 1's last block goes."
    pool = PrefixCachingBlockAllocator(num_blocks, 4)
    first = chain(pool, range(8))
    pool.mark_blocks_as_accessed(ids(first), 1.0)
    second = chain(pool, range(100, 100 + 4 * (num_blocks - 2)))
    pool.mark_blocks_as_accessed(ids(second), 2.0)
    last = first[-1].block_id
    for block in first + second: pool.free(block)
    assert pool.get_num_free_blocks() == num_blocks
    assert pool.allocate_mutable_block(None).block_id == last


def test_never_accessed_goes_first():
    pool = PrefixCachingBlockAllocator(2, 4)
    a, b = chain(pool, range(4)), chain(pool, range(4, 8))
    pool.mark_blocks_as_accessed([0], 1.0)
    for block in a + b: pool.free(block)
    assert pool.allocate_mutable_block(None).block_id == 1
    pool.mark_blocks_as_accessed([0], 2.0)                   # free: moves in the evictor
    assert pool.evictor.free_table[0][0] == 2.0


def test_touch_block():
    "[T] three sequences of one batch: nothing counts as computed before the step is planned, then all."
    pool = PrefixCachingBlockAllocator(8, 16)
    for _ in range(3):
        blocks = chain(pool, range(64))
        assert pool.find_cached_blocks_prefix([b.content_hash for b in blocks]) == 0
    pool.mark_blocks_as_computed()
    assert pool.find_cached_blocks_prefix([b.content_hash for b in blocks]) == 4


def test_find_cached_blocks_prefix():
    "[T] all, none, a part."
    pool = PrefixCachingBlockAllocator(8, 4)
    blocks = chain(pool, range(16))
    pool.mark_blocks_as_computed()
    hashes = [b.content_hash for b in blocks]
    assert pool.find_cached_blocks_prefix(hashes) == 4
    assert pool.find_cached_blocks_prefix([b"x", *hashes]) == 0 == pool.find_cached_blocks_prefix([])
    assert pool.find_cached_blocks_prefix([*hashes[:2], b"x", *hashes[2:]]) == 2
    for block in blocks: pool.free(block)
    assert pool.find_cached_blocks_prefix(hashes) == 4       # free, and still there


def test_a_hole_in_the_chain_ends_it():
    """V0 searched by halves, as if a cached block's predecessors were all cached.

    The first block of a chain can be older than the rest: here it was accessed
    at 1 by the last that held it. Halving would look at block 2 of 4 first,
    find it, and report 4 cached blocks, the evicted one among them.
    """
    pool = PrefixCachingBlockAllocator(4, 4)
    blocks = chain(pool, range(16))
    hashes = [b.content_hash for b in blocks]
    pool.mark_blocks_as_computed()
    pool.mark_blocks_as_accessed([0], 1.0)
    pool.mark_blocks_as_accessed([1, 2, 3], 2.0)
    for block in blocks: pool.free(block)
    assert pool.allocate_mutable_block(None).block_id == 0   # evicts the chain's start
    assert bisect_left(hashes, True, key=lambda h: h not in pool._cached_blocks) == 4
    assert pool.find_cached_blocks_prefix(hashes) == 0


def test_common_computed_block_ids():
    "[T] of one sequence all, of several the common beginning."
    pools = CpuGpuBlockAllocator.create("prefix_caching", 4, 0, 4)
    assert pools.get_common_computed_block_ids([[0, 1, 2]]) == [0, 1, 2]
    assert pools.get_common_computed_block_ids([[0, 1, 2], [0, 1, 3]]) == [0, 1]
    # V0 left empty lists out, as if a sequence with nothing computed did not matter.
    assert pools.get_common_computed_block_ids([[0, 1], []]) == []


def test_full_blocks_touched():
    "[T] 0 if all are held over there, 1 more for each that is there but free, none for an open block."
    source, target = PrefixCachingBlockAllocator(8, 4), PrefixCachingBlockAllocator(8, 4)
    there, moving = chain(target, range(16)), chain(source, range(16))
    assert target.get_num_full_blocks_touched(moving, 4) == 0
    target.free(there[-1])
    assert target.get_num_full_blocks_touched(moving, 4) == 1
    moving.append(source.allocate_mutable_block(moving[-1]))
    moving[-1].append_token_ids([0])
    assert target.get_num_full_blocks_touched(moving, 4) == 1
    target.free(there[-2])
    assert target.get_num_full_blocks_touched(moving, 4) == 2
    assert NaiveBlockAllocator(8, 4).get_num_full_blocks_touched(moving, 4) == 4


def test_reset():
    "[T] refused while a block is held; then nothing is known any more."
    pool = PrefixCachingBlockAllocator(4, 4)
    blocks = chain(pool, range(16))
    hashes = [b.content_hash for b in blocks]
    pool.mark_blocks_as_computed()
    assert not pool.reset_prefix_cache() and pool.find_cached_blocks_prefix(hashes) == 4
    for block in blocks: pool.free(block)
    assert pool.reset_prefix_cache() and pool.find_cached_blocks_prefix(hashes) == 0
    assert pool.get_num_free_blocks() == 4 and pool.get_prefix_cache_hit_rate() == 0.0
    assert len({b.block_id for b in chain(pool, range(100, 116))}) == 4


def test_hit_rate():
    "[T] hits over full prompt blocks asked for."
    pool = PrefixCachingBlockAllocator(4, 4)
    assert pool.get_prefix_cache_hit_rate() == 0.0
    chain(pool, range(8))
    assert pool.get_prefix_cache_hit_rate() == 0.0
    chain(pool, range(8))
    assert pool.get_prefix_cache_hit_rate() == 0.5
    for _ in range(200): chain(pool, range(8))
    assert pool.get_prefix_cache_hit_rate() > 0.99


def test_a_block_reused_is_not_found_by_its_old_name():
    "Field nano-vllm#163: filled for X, reused for Y, asked for X."
    pool = PrefixCachingBlockAllocator(1, 4)
    block, = chain(pool, [1, 2, 3, 4])
    name = block.content_hash
    pool.free(block)
    pool.allocate_mutable_block(None)
    pool.mark_blocks_as_computed()
    assert pool.find_cached_blocks_prefix([name]) == 0


# ---- two pools ---------------------------------------------------------

def test_block_ids_are_one_space():
    pools = CpuGpuBlockAllocator.create("naive", 3, 2, 4)
    assert list(pools.allocators[Device.GPU].all_block_ids) == [0, 1, 2]
    assert list(pools.allocators[Device.CPU].all_block_ids) == [3, 4]
    assert pools.allocators[Device.CPU].get_physical_block_id(4) == 1
    with pytest.raises(ValueError, match=r"block ids \[2\] in both pools"):
        CpuGpuBlockAllocator(NaiveBlockAllocator(3, 4), NaiveBlockAllocator(2, 4, 2))
    with pytest.raises(ValueError, match="allocator_type must be one of 'naive'"):
        CpuGpuBlockAllocator.create("best", 1, 1, 4)


def test_null_block():
    pools = CpuGpuBlockAllocator.create("naive", 3, 0, 4)
    assert not pools.has_null_block
    null = pools.allocate_or_get_null_block()
    assert pools.allocate_or_get_null_block() is null and pools.get_num_free_blocks(Device.GPU) == 2
    pools.free(null)
    assert pools.get_num_free_blocks(Device.GPU) == 2 and pools.has_null_block
    with pytest.raises(ValueError, match="null block must not be written"): null.append_token_ids([1])


# ---- block table -------------------------------------------------------

def table(kind="naive", block_size=4, gpu=64):
    return BlockTable(block_size, CpuGpuBlockAllocator.create(kind, gpu, 0, block_size))


def num_used(t): return t._allocator.get_num_total_blocks(Device.GPU) - t._allocator.get_num_free_blocks(Device.GPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("length", [1, 7, 16, 30])
def test_table_takes_one_block_for_each_piece(kind, block_size, length):
    "[T] allocate, append, fork and free, counted in blocks."
    t = table(kind, block_size)
    t.allocate(list(range(length)))
    assert num_used(t) == cdiv(length, block_size) == len(t.physical_block_ids) and t.num_full_slots == length
    t.append_token_ids(list(range(length, length + 9)))
    assert num_used(t) == cdiv(length + 9, block_size)
    child = t.fork()
    assert num_used(t) == cdiv(length + 9, block_size) and child.physical_block_ids == t.physical_block_ids
    t.free()
    assert num_used(t) == cdiv(length + 9, block_size)
    child.free()
    assert num_used(t) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length, ahead", [(1, 1), (4, 1), (5, 8), (6, 30)])
def test_ensured_slots_are_used(kind, length, ahead):
    "[T] ensure, then append as much: no more blocks."
    t = table(kind)
    t.allocate(list(range(length)))
    t.ensure_num_empty_slots(ahead)
    used = num_used(t)
    assert used == cdiv(length + ahead, 4)
    t.append_token_ids(list(range(1000, 1000 + ahead)))
    assert num_used(t) == used and t.num_full_slots == length + ahead


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("length", [1, 9, 16])
@pytest.mark.parametrize("extra", [1, 4, 9])
@pytest.mark.parametrize("append_to_parent", [True, False])
def test_copy_on_write(kind, block_size, length, extra, append_to_parent):
    "[T] a copy iff the last block is open; new blocks = ceil((len + append) / size) - len // size."
    t = table(kind, block_size)
    t.allocate(list(range(length)))
    child, used = t.fork(), num_used(t)
    writer, reader = (t, child) if append_to_parent else (child, t)
    before = list(reader.physical_block_ids)
    writer.append_token_ids(list(range(1000, 1000 + extra)))
    copies = t._allocator.clear_copy_on_writes()
    assert len(copies) == (length % block_size > 0)
    assert num_used(t) - used == cdiv(length + extra, block_size) - length // block_size
    assert reader.physical_block_ids == before
    if copies: assert copies == [(before[-1], writer.physical_block_ids[length // block_size])]


def test_fork_shares_no_slots_ahead():
    "minengine: V0 shared empty blocks, too; two bursts would have written to them."
    t = table()
    t.allocate([1, 2, 3, 4, 5])
    t.ensure_num_empty_slots(10)
    assert t.physical_block_ids == [0, 1, 2, 3] and t.fork().physical_block_ids == [0, 1]


def test_allocation_is_all_or_nothing():
    "Field vllm#18411."
    for kind in KINDS:
        t = table(kind, gpu=3)
        with pytest.raises(NoFreeBlocksError): t.allocate(list(range(13)))
        assert num_used(t) == 0 and t.physical_block_ids == [] and t.num_full_slots == 0


def test_unseen_tokens():
    t = table()
    t.allocate([1, 2, 3, 4, 5])
    assert t.get_unseen_token_ids([1, 2, 3, 4, 5]) == [] and t.get_unseen_token_ids([1, 2, 3, 4, 5, 6]) == [6]


@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("prompt", [1, 7, 8, 64])
@pytest.mark.parametrize("new", [1, 2, 17])
@pytest.mark.parametrize("ahead", [0, 1, 10])
def test_touched_blocks(block_size, prompt, new, ahead):
    "[T] the append formula: the open block counts as if it were new."
    touched = num_blocks_touched(new + ahead, prompt, block_size)
    first = prompt // block_size                              # where the first new token goes
    assert touched == (prompt + new + ahead - 1) // block_size - first + 1
    t = table(block_size=block_size, gpu=200)
    t.allocate(list(range(prompt)))
    used = num_used(t)
    t.append_token_ids(list(range(new)), ahead)
    taken = cdiv(prompt + new + ahead, block_size) - cdiv(prompt, block_size)
    assert num_used(t) - used == taken <= touched


# ---- computed blocks ---------------------------------------------------

def test_computed_blocks_tracker():
    "[T] 0, 0, 4, 4, 8: the first answer stands while a sequence is in prefill."
    pool = PrefixCachingBlockAllocator(8, 4)
    tracker = ComputedBlocksTracker(pool, 4)
    first, second = (make_group(8).first_seq for _ in range(2))
    assert tracker.get_num_cached_tokens(first) == 0
    blocks = chain(pool, range(4))
    pool.mark_blocks_as_computed()
    assert tracker.get_num_cached_tokens(first) == 0          # asked before
    assert tracker.get_num_cached_tokens(second) == 4
    blocks.append(pool.allocate_immutable_block(blocks[-1], [4, 5, 6, 7]))
    pool.mark_blocks_as_computed()
    assert tracker.get_num_cached_tokens(second) == 4
    second.data.update_num_computed_tokens(8)                 # decodes from now on
    assert tracker.get_num_cached_tokens(second) == 8
    tracker.remove_seq(first.seq_id)
    assert tracker.get_num_cached_tokens(first) == 8          # forgotten, asked anew
    assert ComputedBlocksTracker(None, 4).get_num_cached_tokens(first) == 0


def test_computed_blocks_tracker_sees_the_adapter():
    pool = PrefixCachingBlockAllocator(8, 4)
    pool.allocate_immutable_block(None, [0, 1, 2, 3], ("lora", 7))
    pool.mark_blocks_as_computed()
    adapter = type("Adapter", (), {"lora_int_id": 7})()
    tracker = ComputedBlocksTracker(pool, 4)
    plain = Sequence(next(_seq_ids), {"prompt_token_ids": [0, 1, 2, 3]}, 4)
    tuned = Sequence(next(_seq_ids), {"prompt_token_ids": [0, 1, 2, 3]}, 4, lora_request=adapter)
    assert (tracker.get_num_cached_tokens(plain), tracker.get_num_cached_tokens(tuned)) == (0, 4)


# ---- manager: admission and growth -------------------------------------

@pytest.mark.parametrize("watermark", [0.0, 0.5])
@pytest.mark.parametrize("num_used_blocks", [0, 3, 8])
def test_can_allocate(watermark, num_used_blocks):
    "[T] the grid: never if the empty pool would be left below the watermark, later if this one would."
    m = manager(gpu=10, block_size=4, watermark=watermark)
    if num_used_blocks: admitted(m, 4 * num_used_blocks)
    reserve = int(watermark * 10)
    for num_blocks in range(1, 13):
        status = m.can_allocate(make_group(4 * num_blocks))
        if 10 - num_blocks < reserve: assert status is AllocStatus.NEVER
        elif 10 - num_used_blocks - num_blocks >= reserve: assert status is AllocStatus.OK
        else: assert status is AllocStatus.LATER
    assert m.can_allocate(make_group(4), num_lookahead_slots=40) is AllocStatus.NEVER


def test_can_allocate_ignores_prefix_hits():
    m = manager(gpu=4, enable_caching=True)
    admitted(m, 12)
    assert m.can_allocate(make_group(12)) is AllocStatus.LATER


@pytest.mark.parametrize("prompt", [1, 8, 15])
@pytest.mark.parametrize("new, ahead", [(1, 0), (5, 3), (9, 0)])
def test_append_slots(prompt, new, ahead):
    "[T] blocks taken: pieces of prompt + new + ahead, less pieces of the prompt."
    m = manager(gpu=64)
    group = admitted(m, prompt)
    for _ in range(new): sample(group.first_seq)
    free = m.get_num_free_gpu_blocks()
    assert m.append_slots(group.first_seq, ahead) == []
    assert free - m.get_num_free_gpu_blocks() == cdiv(prompt + new + ahead, 4) - cdiv(prompt, 4)
    assert len(m.get_block_table(group.first_seq)) == cdiv(prompt + new + ahead, 4)


def test_can_append_is_conservative():
    "[V] 2 blocks, prompt 5: the open block has room, and V0 refuses all the same."
    m = manager(gpu=2)
    group = admitted(m, 5)
    sample(group.first_seq)
    assert not m.can_append_slots(group, 0) and m.get_num_free_gpu_blocks() == 0
    assert m.append_slots(group.first_seq, 0) == []           # it would have fitted


@pytest.mark.parametrize("caching", [False, True])
def test_fork_then_parent_appends(caching):
    "[V] table [0,1], open last block: copy (1,2), parent [0,2], child [0,1]."
    m = manager(enable_caching=caching)
    group = admitted(m, 6)
    parent = group.first_seq
    child = parent.fork(next(_seq_ids))
    group.add(child)
    m.fork(parent, child)
    sample(parent, 7), sample(child, 8)
    assert m.append_slots(parent, 0) == [(1, 2)] and m.append_slots(child, 0) == []
    assert m.get_block_table(parent) == [0, 2] and m.get_block_table(child) == [0, 1]
    m.check_invariants()
    m.free(parent)
    assert m.get_num_free_gpu_blocks() == 6
    m.free(child)
    assert m.get_num_free_gpu_blocks() == 8
    m.fork(parent, child)                                     # no such parent: nothing happens
    assert not m.block_tables
    with pytest.raises(ValueError, match="has a block table"):
        other = admitted(m, 4)
        m.fork(other.first_seq, other.first_seq)


def test_group_of_two_prompts_shares_all_blocks():
    m = manager()
    group = admitted(m, 6, num_seqs=2)
    assert [m.get_block_table(s) for s in group.seqs] == [[0, 1], [0, 1]] and m.get_num_free_gpu_blocks() == 6
    group = make_group(4)
    m.allocate(group)
    with pytest.raises(ValueError, match=f"sequence {group.first_seq.seq_id} has a block table"): m.allocate(group)


def test_free_is_for_anyone():
    m = manager()
    group = make_group(4)
    m.free(group.first_seq)                                   # never scheduled
    m.allocate(group)
    m.free(group.first_seq)
    m.free(group.first_seq)
    assert m.get_num_free_gpu_blocks() == 8


# ---- manager: swapping -------------------------------------------------

@pytest.mark.parametrize("caching", [False, True])
def test_swap_out_and_in(caching):
    "[T] free counts on both sides, rows of each pool, and the table's new ids."
    m = manager(gpu=8, cpu=8, enable_caching=caching)
    admitted(m, range(50, 54))
    group = admitted(m, 10)
    seq = group.first_seq
    sample(seq)
    assert m.get_block_table(seq) == [1, 2, 3] and m.can_swap_out(group)
    assert m.swap_out(group) == [(1, 0), (2, 1), (3, 2)]
    assert m.get_block_table(seq) == [8, 9, 10]
    assert (m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks()) == (7, 5)
    run(group, SequenceStatus.SWAPPED)
    m.check_invariants()
    assert m.can_swap_in(group, 0) is AllocStatus.OK
    pairs = m.swap_in(group)
    # Without caching the last freed comes first; with it the full blocks are still there.
    assert pairs == ([(0, 1), (1, 2), (2, 3)] if caching else [(0, 3), (1, 2), (2, 1)])
    assert m.get_block_table(seq) == [target for _, target in pairs]
    assert (m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks()) == (4, 8)
    run(group)
    m.append_slots(seq, 0)
    m.check_invariants()


@pytest.mark.parametrize("caching", [False, True])
def test_swap_loses_sharing(caching):
    "[V] two sequences, three blocks: four on the host."
    m = manager(enable_caching=caching)
    group = admitted(m, 6)
    parent = group.first_seq
    child = parent.fork(next(_seq_ids))
    group.add(child)
    m.fork(parent, child)
    sample(parent, 7), sample(child, 8)
    m.append_slots(parent, 0)
    if caching:
        # The host's pool shares by contents, so only the open blocks are two.
        assert m.swap_out(group) == [(0, 0), (2, 1), (0, 0), (1, 2)]
    else:
        assert m.swap_out(group) == [(0, 0), (2, 1), (0, 2), (1, 3)]
        assert m.get_num_free_cpu_blocks() == 4 and m.get_num_free_gpu_blocks() == 8


def test_can_swap():
    "Never, later and OK; the next token's block counts."
    m = manager(gpu=4, cpu=3)
    group = admitted(m, 8)
    sample(group.first_seq)
    assert m.can_swap_out(group)                              # 2 full + 1 for what comes
    m.swap_out(group)
    run(group, SequenceStatus.SWAPPED)
    assert m.can_swap_in(group, 0) is AllocStatus.OK
    assert m.can_swap_in(group, 8) is AllocStatus.NEVER       # 2 full + 3
    other = admitted(m, 8)
    assert m.can_swap_in(group, 0) is AllocStatus.LATER
    assert not m.can_swap_out(other)                          # the host is full


def test_swap_counts_slots_ahead():
    "V0 forgot blocks that are owned ahead: the host could run out in the middle of a swap."
    m = manager(gpu=8, cpu=3)
    group = admitted(m, 5)
    m.append_slots(group.first_seq, 8)                        # 4 blocks for 5 tokens
    sample(group.first_seq)
    assert len(m.get_block_table(group.first_seq)) == 4 and not m.can_swap_out(group)


def test_swap_in_that_can_never_be_is_never():
    "V0 said later for ever: the reserve alone kept a group out of an empty pool."
    m = manager(gpu=4, cpu=8, watermark=0.25)
    group = admitted(m, 12)
    sample(group.first_seq)
    m.swap_out(group)
    run(group, SequenceStatus.SWAPPED)
    assert m.get_num_free_gpu_blocks() == 4 and m.can_swap_in(group, 0) is AllocStatus.NEVER


def test_free_while_swapped_out():
    "V0 with prefix caching looked for the host's blocks on the device: a KeyError ended the engine."
    m = manager(enable_caching=True)
    group = admitted(m, 10)
    m.access_all_blocks_in_seq(group.first_seq, 1.0)
    m.swap_out(group)
    m.free(group.first_seq)
    m.check_invariants()
    assert (m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks()) == (8, 8)


# ---- manager: prefix cache ---------------------------------------------

def test_same_batch_shares_ids_and_computes_twice():
    "[V] two equal prompts in one batch: one set of blocks, no computed ones for the second."
    m = manager(enable_caching=True)
    a, b = make_group(8), make_group(8)
    for group in (a, b):
        assert m.get_num_cached_tokens(group.first_seq) == 0
        m.allocate(group)
        run(group)
    assert m.get_block_table(a.first_seq) == m.get_block_table(b.first_seq) == [0, 1]
    for group in (a, b): assert m.get_common_computed_block_ids(group.seqs) == []
    for group in (a, b): m.mark_blocks_as_computed(group, 8)
    assert m.get_num_cached_tokens(make_group(8).first_seq) == 8


def test_full_hit():
    "[V] 8 tokens found again: both blocks are computed, all 8 tokens cached."
    m = manager(enable_caching=True)
    m.free(admitted(m, 8).first_seq)
    again = make_group(8)
    assert m.get_num_cached_tokens(again.first_seq) == 8
    m.allocate(again)
    run(again)
    assert m.get_common_computed_block_ids(again.seqs) == [0, 1] == m.get_written_block_ids([0, 1])
    assert m.get_prefix_cache_hit_rate() == 0.5 and manager().get_prefix_cache_hit_rate() is None


def test_last_access_reaches_blocks_when_they_are_freed():
    m = manager(gpu=4, enable_caching=True)
    old, new = admitted(m, range(4)), admitted(m, range(4, 8))
    m.access_all_blocks_in_seq(old.first_seq, 2.0)
    m.access_all_blocks_in_seq(new.first_seq, 1.0)
    for group in (old, new): m.free(group.first_seq)
    third = admitted(m, range(100, 112))                      # 2 free blocks, then the evictor's oldest
    assert m.get_block_table(third.first_seq) == [2, 3, 1]


def test_manager_reset():
    m = manager(enable_caching=True)
    group = admitted(m, 8)
    assert not m.reset_prefix_cache()
    m.free(group.first_seq)
    assert m.reset_prefix_cache() and m.get_num_cached_tokens(make_group(8).first_seq) == 0
    assert manager().reset_prefix_cache()


def test_a_claim_that_waited_too_long_is_cut():
    """V0 froze the number of cached tokens at the first look, while the prompt waited and its blocks were evicted.

    The step is charged as V0 charged it; the worker is told what is there.
    """
    m = manager(gpu=4, enable_caching=True)
    m.free(admitted(m, 12).first_seq)
    late = make_group(12)
    assert m.get_num_cached_tokens(late.first_seq) == 12      # looked at, and left waiting
    other = admitted(m, range(50, 66))                        # takes all blocks
    m.free(other.first_seq)
    m.allocate(late)
    run(late)
    claim = m.get_common_computed_block_ids(late.seqs)
    assert len(claim) == 3 and m.get_written_block_ids(claim) == []
    m.mark_blocks_as_computed(late, 12)
    assert m.get_written_block_ids(claim) == claim            # from this step on


def test_an_unfinished_prompt_is_not_a_prefix():
    """V0 took all of a prompt's blocks for computed after its first chunk; field sglang#38355.

    4 of 12 tokens are computed when the request is aborted; the same prompt comes again.
    """
    m = manager(gpu=4, enable_caching=True)
    first = make_group(12)
    m.allocate(first)
    run(first)
    m.mark_blocks_as_computed(first, 4)
    first.update_num_computed_tokens(4)
    m.free(first.first_seq)
    again = make_group(12)
    assert m.get_num_cached_tokens(again.first_seq) == 12     # V0's claim, kept for the budget
    m.allocate(again)
    run(again)
    claim = m.get_common_computed_block_ids(again.seqs)
    assert len(claim) == 3 and m.get_written_block_ids(claim) == claim[:1]


def test_swapped_chunk_spoils_nobody():
    "What was never computed does not land in a host block that holds the real thing, nor come back over it."
    m = manager(gpu=8, cpu=8, enable_caching=True)
    whole = admitted(m, 8)
    m.swap_out(whole)
    run(whole, SequenceStatus.SWAPPED)
    other = admitted(m, range(50, 82))                        # evicts what was left on the device
    m.free(other.first_seq)
    part = make_group(8)
    m.allocate(part)
    run(part)
    m.mark_blocks_as_computed(part, 4)                        # a first chunk
    part.update_num_computed_tokens(4)
    pairs = m.swap_out(part)
    assert [target for _, target in pairs] == [0]             # V0 would have copied the second, too
    assert m.get_block_table(part.first_seq) == m.get_block_table(whole.first_seq) == [8, 9]
    m.check_invariants()


def test_two_half_computed_blocks_stay_two():
    """What one prompt computed of a block must not be overwritten by what another did not.

    Both have the same 4 tokens and half of them computed; one was swapped out.
    """
    m = manager(gpu=4, cpu=4, enable_caching=True)
    away, here = make_group(4), make_group(4)
    for group in (away, here):
        m.allocate(group)
        run(group)
        m.mark_blocks_as_computed(group, 2)
        group.update_num_computed_tokens(2)
        if group is away:
            assert m.swap_out(away) == [(0, 0)]
            run(away, SequenceStatus.SWAPPED)
    assert m.get_block_table(here.first_seq) == [0]
    assert m.can_swap_in(away, 0) is AllocStatus.OK and m.swap_in(away) == [(0, 1)]
    m.check_invariants()
    run(away)
    for group in (away, here): m.mark_blocks_as_computed(group, 2)
    for group in (away, here): m.free(group.first_seq)
    assert m.get_num_free_gpu_blocks() == 4


@pytest.mark.parametrize("length", [4, 8])
def test_prompt_that_fills_its_last_block(length):
    "Field nano-vllm#66: naming a full block twice is naming it once, also after a preemption at that length."
    m = manager(gpu=8, enable_caching=True)
    group = admitted(m, length)
    seq = group.first_seq
    sample(seq, 7)
    assert m.append_slots(seq, 0) == [] and len(m.get_block_table(seq)) == length // 4 + 1
    m.free(seq)                                               # preempted
    seq.reset_state_for_recompute()
    seq.status = SequenceStatus.WAITING
    assert m.get_num_cached_tokens(seq) == length and m.can_allocate(group) is AllocStatus.OK
    m.allocate(group)
    run(group)
    assert len(m.get_written_block_ids(m.get_common_computed_block_ids([seq]))) == length // 4
    m.check_invariants()


# ---- manager: sliding window -------------------------------------------

@pytest.mark.parametrize("block_size", [8])
@pytest.mark.parametrize("prompt", [1, 10, 300])
@pytest.mark.parametrize("window", [5, 20, 70])
def test_sliding_window(block_size, prompt, window):
    "[T] never more blocks than the window covers, and the null block."
    m = manager(gpu=1000, cpu=0, block_size=block_size, sliding_window=window)
    group = admitted(m, prompt)
    seq = group.first_seq
    assert 1000 - m.get_num_free_gpu_blocks() == cdiv(prompt, block_size)
    most = window // block_size + 2 + 1
    for i in range(150):
        sample(seq)
        m.append_slots(seq, 0)
        seq.data.update_num_computed_tokens(1)
        used = 1000 - m.get_num_free_gpu_blocks()
        assert used <= most + 1, f"{used} blocks"
        # Every position that the newest token attends to is in a real block.
        first = max(0, seq.get_len() - window)
        real = [b.block_id for b in m.block_tables[seq.seq_id].blocks[first // block_size:]]
        null = m.block_allocator._null_block
        assert null is None or null.block_id not in real
        m.check_invariants()
    m.free(seq)
    assert m.get_num_free_gpu_blocks() >= 999


def test_sliding_window_admits_whole_prompts_only():
    "V0 asked for a window's blocks and took the whole prompt's: the pool ran out in the middle."
    m = manager(gpu=10, sliding_window=4)                     # at most 3 blocks, V0 thought
    admitted(m, 20)
    assert m.can_allocate(make_group(20)) is AllocStatus.OK
    assert m.can_allocate(make_group(24)) is AllocStatus.LATER
    assert m.can_allocate(make_group(44)) is AllocStatus.NEVER


def test_sliding_window_forks_and_swaps():
    "V0 could do neither once blocks had left the window."
    m = manager(gpu=16, cpu=16, sliding_window=4)
    group = admitted(m, 30)
    parent = group.first_seq
    sample(parent)
    m.append_slots(parent, 0)
    assert m.block_tables[parent.seq_id].num_dropped == 4
    child = parent.fork(next(_seq_ids))
    group.add(child)
    m.fork(parent, child)
    assert m.get_block_table(child) == m.get_block_table(parent)
    m.check_invariants()
    assert m.can_swap_out(group) and len(m.swap_out(group)) == 8
    run(group, SequenceStatus.SWAPPED)
    m.check_invariants()
    assert len(m.swap_in(group)) == 8
    m.check_invariants()
    for seq in group.seqs: m.free(seq)
    assert m.get_num_free_gpu_blocks() == 15


def test_sliding_window_counts_the_null_block():
    "V0 forgot it: with the window's first blocks held by others, the pool ran out in the middle of a step."
    m = manager(gpu=6, cpu=0, sliding_window=4, enable_caching=True)
    group, other = admitted(m, 20), admitted(m, 20)
    sample(group.first_seq)
    assert m.get_num_free_gpu_blocks() == 1 and not m.can_append_slots(group, 0)
    m.free(other.first_seq)
    m.free(group.first_seq)
    assert m.reset_prefix_cache() and m.get_num_free_gpu_blocks() == 6


def test_null_block_does_not_hinder_a_reset():
    m = manager(gpu=16, sliding_window=4, enable_caching=True)
    group = admitted(m, 30)
    sample(group.first_seq)
    m.append_slots(group.first_seq, 0)
    assert not m.reset_prefix_cache()
    m.free(group.first_seq)
    assert m.reset_prefix_cache() and m.get_num_free_gpu_blocks() == 15


# ---- arguments ---------------------------------------------------------

@pytest.mark.parametrize("wrong, message", [
    ({"gpu": 0}, "num_gpu_blocks must be at least 1, got 0"),
    ({"cpu": -1}, "num_cpu_blocks must be at least 0, got -1"),
    ({"watermark": 1.5}, "watermark must be at most 1, got 1.5")])
def test_arguments(wrong, message):
    with pytest.raises(ValueError, match=message): manager(**wrong)
