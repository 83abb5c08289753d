"""Blocks, their hashes and their tables: the reference's scenarios, row by row.

Numbers are those of vLLM 0.7.3 where it is right. Rows of field reports are
named in the tests that meet them.
"""
import subprocess
import sys

import pytest

from minengine.sampling_params import SamplingParams
from minengine.v1.core.block_hash import ROOT_HASH
from minengine.v1.core.block_hash import extend_block_hashes
from minengine.v1.core.block_hash import generate_block_hash_extra_keys
from minengine.v1.core.block_hash import hash_block_tokens
from minengine.v1.core.block_hash import hash_request_tokens
from minengine.v1.core.free_block_queue import FreeKVCacheBlockQueue
from minengine.v1.core.free_block_queue import KVCacheBlock
from minengine.v1.core.kv_cache_manager import BlockPool
from minengine.v1.core.kv_cache_manager import KVCacheManager
from minengine.v1.core.kv_cache_manager import PrefixCacheStats
from minengine.v1.core.kv_cache_manager import PrefixCachingMetrics
from minengine.v1.core.kv_cache_manager import count_common_prefix
from minengine.v1.core.kv_cache_manager import find_prefix
from minengine.v1.messages import PlaceholderRange
from minengine.v1.request import Request


def make_request(name, token_ids, images=(), **kw):
    "A request; `images` are (offset, length, hash)."
    return Request(
        name, None, list(token_ids), kw.pop("params", None) or SamplingParams(max_tokens=99),
        mm_positions=[PlaceholderRange(o, n) for o, n, _ in images],
        mm_hashes=[h for *_, h in images if h], **kw)


def make_manager(num_blocks=10, block_size=16, prealloc=16, caching=True, max_model_len=8192):
    return KVCacheManager(block_size, num_blocks, max_model_len, caching, prealloc)


def blocks(num_blocks, *tail, size=16):
    "Tokens of `num_blocks` full blocks, all different, and some more."
    return [i for i in range(num_blocks) for _ in range(size)] + list(tail)


def ids(blocks): return [b.block_id for b in blocks]


def table(manager, request): return ids(manager.req_to_blocks.get(request.request_id, []))


def free_order(manager): return ids(manager.pool.free_queue)


def start(manager, request):
    "Admit a request as the scheduler does: (hits, new blocks), ids."
    hits, num_hit_tokens = manager.get_computed_blocks(request)
    new = manager.allocate_slots(request, request.num_tokens - num_hit_tokens, hits)
    if new is None: return ids(hits), None
    request.num_computed_tokens = request.num_tokens
    manager.check_invariants()
    return ids(hits), ids(new)


def decode(manager, request, token_ids):
    "Append tokens, then make room for them: ids of the new blocks."
    request.append_output_token_ids(list(token_ids))
    new = manager.allocate_slots(request, len(token_ids))
    request.num_computed_tokens += len(token_ids)
    manager.check_invariants()
    return ids(new)


def free(manager, *requests):
    for r in requests:
        manager.free(r)
        manager.free_block_hashes(r)
        manager.check_invariants()


# ---- the free queue (V073 2.2) -----------------------------------------

def test_queue_of_five_pops_in_order_then_raises():
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(5)])
    assert [queue.popleft().block_id for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no free blocks"): queue.popleft()


def test_queue_of_one_empties_and_fills():
    block = KVCacheBlock(0)
    queue = FreeKVCacheBlockQueue([block])
    assert queue.popleft() is block and list(queue) == [] and queue.num_free_blocks == 0
    queue.append(block)
    assert list(queue) == [block] and queue.num_free_blocks == 1


def test_queue_gives_up_middle_first_and_last():
    pool = [KVCacheBlock(i) for i in range(5)]
    queue = FreeKVCacheBlockQueue(pool)
    for out, left in ((2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3])):
        queue.remove(pool[out])
        assert ids(queue) == left and queue.num_free_blocks == len(left)


# ---- hashes (V073 2.3) -------------------------------------------------

def test_hash_depends_on_parent_tokens_and_keys():
    parent = bytes(32)
    one = hash_block_tokens(parent, (1, 2, 3), (("lora", 1),))
    assert one == hash_block_tokens(parent, [1, 2, 3], (("lora", 1),)) and len(one) == 32
    others = [hash_block_tokens(None, (1, 2, 3), (("lora", 1),)),
              hash_block_tokens(parent, (1, 2, 4), (("lora", 1),)),
              hash_block_tokens(parent, (1, 2, 3), (("lora", 2),)),
              hash_block_tokens(parent, (1, 2, 3)), ROOT_HASH]
    assert len({one, *others}) == 6


def test_hash_is_the_same_in_every_process():
    "vllm#12621: not Python's salted or predictable `hash`."
    code = ("from minengine.v1.core.block_hash import hash_block_tokens as h;"
            "print(h(None, [1, -1, 2**40], (('salt', 'x'),)).hex())")
    got = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONHASHSEED": seed}).stdout.strip() for seed in ("1", "2")}
    assert got == {hash_block_tokens(None, [1, -1, 2**40], (("salt", "x"),)).hex()}


def test_minus_one_and_minus_two_differ():
    "CPython's hash(-1) == hash(-2); ours must not care."
    assert hash_block_tokens(None, [-1]) != hash_block_tokens(None, [-2])


IMAGES = [(0, 5, "h1"), (10, 5, "h2")]


@pytest.mark.parametrize("start, end, keys", [
    (0, 5, (("image", "h1", 0),)),
    (3, 8, (("image", "h1", -3),)),
    (8, 10, None),
    (0, 15, (("image", "h1", 0), ("image", "h2", 10))),
])
def test_extra_keys_of_images(start, end, keys):
    request = make_request("r", range(20), IMAGES)
    assert generate_block_hash_extra_keys(request, start, end) == keys


def test_extra_keys_of_text_are_none():
    assert generate_block_hash_extra_keys(make_request("r", range(20)), 0, 5) is None


def test_hash_request_tokens_tells_images_apart():
    one = hash_request_tokens(3, make_request("a", range(6), [(0, 3, "h1"), (3, 3, "h2")]))
    two = hash_request_tokens(3, make_request("b", range(6), [(0, 3, "h1"), (3, 3, "h3")]))
    none = hash_request_tokens(3, make_request("c", range(6)))
    assert len(one) == 2 and one[0] == two[0] and one[1] != two[1]
    assert none[0] not in (one[0], two[0])


def test_only_full_blocks_are_hashed_and_outputs_count():
    request = make_request("r", range(5))
    assert len(hash_request_tokens(4, request)) == 1
    request.append_output_token_ids([7, 8, 9])
    assert hash_request_tokens(4, request) == hash_request_tokens(4, make_request("s", [0, 1, 2, 3, 4, 7, 8, 9]))


def test_images_without_hashes_are_refused():
    request = make_request("r", range(8), [(0, 5, None)])
    with pytest.raises(ValueError, match="1 images and 0 hashes"):
        hash_request_tokens(4, request)


def test_decode_and_prompt_agree_on_image_keys():
    "BUG G and H2 of 0.7.3: the same block had one key in a prompt, another in decode."
    for images in ([(1, 3, "a"), (5, 2, "b")],     # G: two images in one block
                   [(0, 16, "a")],                 # H2: a block begins where the image ends
                   [(3, 9, "a"), (12, 4, "b")]):
        tokens = list(range(24))
        whole = hash_request_tokens(8, make_request("p", tokens, images))
        for cut in range(max(o + n for o, n, _ in images), 24):
            request, chain = make_request("d", tokens[:cut], images), []
            extend_block_hashes(chain, request, 8, cut // 8)
            request.append_output_token_ids(tokens[cut:])
            extend_block_hashes(chain, request, 8, 3)
            assert chain == whole, (images, cut)


def test_two_layouts_of_one_image_have_different_keys():
    "vllm#36708: placeholders and image ids line up, positions do not."
    tokens = [5] * 8
    assert (hash_request_tokens(8, make_request("a", tokens, [(1, 4, "x")]))
            != hash_request_tokens(8, make_request("b", tokens, [(2, 4, "x")])))


def test_same_text_other_picture_never_hits():
    "vllm#20261."
    manager = make_manager(20)
    a = make_request("a", blocks(3), [(4, 20, "maze-1")])
    start(manager, a)
    assert start(manager, make_request("b", blocks(3), [(4, 20, "maze-2")]))[0] == []
    assert manager.get_computed_blocks(make_request("c", blocks(3), [(4, 20, "maze-1")]))[1] == 48


class Lora:
    def __init__(self, lora_int_id, lora_name="x"): self.lora_int_id, self.lora_name = lora_int_id, lora_name


def test_adapters_never_share_blocks():
    "vllm#3264, vllm#30931: the key is the unique id, not the name."
    chains = [hash_request_tokens(4, make_request("r", range(8), lora_request=lora))
              for lora in (None, Lora(1), Lora(2))]
    assert len({h for chain in chains for h in chain}) == 6


def test_cache_salt_keeps_tenants_apart():
    chains = [hash_request_tokens(4, make_request("r", range(8), cache_salt=salt))
              for salt in (None, "a", "b")]
    assert len({h for chain in chains for h in chain}) == 6


def test_prefix_caching_metrics():
    metrics = PrefixCachingMetrics(interval=5)
    assert metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=1, queries=20, hits=9))
    metrics.observe(PrefixCacheStats(requests=4, queries=80, hits=16))
    assert metrics.hit_rate == 0.25
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=2))
    assert metrics.total == PrefixCacheStats(requests=5, queries=90, hits=18)
    assert metrics.hit_rate == 0.2
    metrics.observe(PrefixCacheStats(reset=True))
    assert metrics.hit_rate == 0.0


# ---- the manager's scenario table (V073 2.4) ---------------------------

def test_prefill_share_free_reuse():
    manager = make_manager()
    r0 = make_request("0", blocks(3, *[3] * 7))
    assert start(manager, r0) == ([], [0, 1, 2, 3, 4])
    hashed = [b.block_id for b in manager.pool.blocks if b.block_hash]
    assert hashed == [0, 1, 2]

    r1 = make_request("1", blocks(3, *[3] * 5))
    assert start(manager, r1) == ([0, 1, 2], [5, 6])
    assert [b.ref_cnt for b in manager.pool.blocks[:3]] == [2, 2, 2]
    assert manager.num_free_blocks == 3

    free(manager, r0, r1)
    assert free_order(manager) == [7, 8, 9, 4, 3, 6, 5, 2, 1, 0]

    r2 = make_request("2", blocks(3, *[3] * 6))
    assert start(manager, r2) == ([0, 1, 2], [7, 8])
    assert free_order(manager) == [9, 4, 3, 6, 5]
    free(manager, r2)
    assert free_order(manager) == [9, 4, 3, 6, 5, 8, 7, 2, 1, 0]

    r3 = make_request("3", [99] * 144)
    assert start(manager, r3) == ([], [9, 4, 3, 6, 5, 8, 7, 2, 1, 0])
    assert manager.num_free_blocks == 0 and manager.usage == 1
    free(manager, r3)


def test_decode_takes_blocks_and_hashes_full_ones():
    manager, request = make_manager(), make_request("0", blocks(3, *[3] * 7))
    seen = [len(start(manager, request)[1])]
    num_hashed = [manager.num_cached_block["0"]]
    for n in (4, 15, 17):
        seen.append(len(decode(manager, request, [8] * n)))
        num_hashed.append(manager.num_cached_block["0"])
    assert seen == [5, 0, 0, 2] and num_hashed == [3, 3, 4, 5]


def test_eviction_order():
    manager = make_manager()
    r0 = make_request("0", blocks(5, *[5] * 7))
    assert start(manager, r0)[1] == [0, 1, 2, 3, 4, 5, 6]
    r1 = make_request("1", blocks(8)[80:])
    assert start(manager, r1)[1] == [7, 8, 9]
    assert manager.num_free_blocks == 0
    free(manager, r0, r1)
    assert free_order(manager) == [6, 5, 4, 3, 2, 1, 0, 9, 8, 7]
    r2 = make_request("2", blocks(5)[:35])
    assert start(manager, r2) == ([0, 1], [6, 5])
    assert manager.num_free_blocks == 6


def test_hits_are_held_before_others_are_taken():
    "vllm#37076, vllm#39146: a block that was hit is not the one that is overwritten."
    manager = make_manager(num_blocks=4, prealloc=0)
    r0, r1 = make_request("0", blocks(2)), make_request("1", [7] * 32)
    assert (start(manager, r0)[1], start(manager, r1)[1]) == ([0, 1], [2, 3])
    free(manager, r0, r1)
    assert free_order(manager) == [1, 0, 3, 2]
    assert start(manager, make_request("2", blocks(3))) == ([0, 1], [3])
    assert free_order(manager) == [2]


def test_caching_off():
    manager = make_manager(num_blocks=4, block_size=4, prealloc=0, caching=False)
    r0 = make_request("0", range(10))
    assert start(manager, r0) == ([], [0, 1, 2])
    free(manager, r0)
    assert free_order(manager) == [3, 0, 1, 2], "given back from the front: nothing to protect"
    r1 = make_request("1", range(16))
    assert start(manager, r1) == ([], [3, 0, 1, 2])
    assert start(manager, make_request("2", range(4))) == ([], None)
    assert not len(manager.pool.cached)


@pytest.mark.parametrize("prealloc, taken", [(0, 1), *[(p, 2) for p in range(1, 5)], *[(p, 3) for p in range(5, 8)]])
def test_preallocation(prealloc, taken):
    manager = make_manager(block_size=4, prealloc=prealloc)
    assert len(start(manager, make_request("0", [1]))[1]) == taken


def test_default_preallocation_of_a_40_token_prompt():
    assert len(start(make_manager(prealloc=64), make_request("0", range(40)))[1]) == 7


def test_failed_allocation_changes_nothing():
    "vllm#18411: three hits in use, three evictable ones, three blocks free, four wanted."
    manager = make_manager(num_blocks=10, prealloc=0)
    holder = make_request("0", blocks(3))
    start(manager, holder)                       # 0 1 2 stay in use
    longer = make_request("1", blocks(6))
    start(manager, longer)                       # 3 4 5, then free but cached
    free(manager, longer)
    start(manager, make_request("2", [50] * 16)) # one of the other four
    assert manager.num_free_blocks == 6
    hungry = make_request("3", blocks(6, *[9] * 64))
    before = free_order(manager)
    assert start(manager, hungry) == ([0, 1, 2, 3, 4, 5], None)
    assert [b.ref_cnt for b in manager.pool.blocks[:6]] == [1, 1, 1, 0, 0, 0]
    assert free_order(manager) == before and table(manager, hungry) == []
    manager.check_invariants()


def test_reset():
    manager, request = make_manager(), make_request("0", blocks(3, 1))
    start(manager, request)
    assert manager.reset_prefix_cache() is False and len(manager.pool.cached) == 3
    free(manager, request)
    assert manager.reset_prefix_cache() is True
    assert not len(manager.pool.cached)
    assert all(b.block_hash is None for b in manager.pool.blocks)
    assert manager.take_stats().reset
    assert start(manager, make_request("1", blocks(3, 1)))[0] == []


def test_image_keys_in_prompt_and_decode():
    images = [(11, 10, "aaa"), (30, 18, "bbb")]
    manager = make_manager(20, prealloc=0)
    r0 = make_request("0", blocks(3, *[5] * 10), [*images, (50, 8, "ccc")])
    start(manager, r0)
    hashes = [tuple(k[1] for k in generate_block_hash_extra_keys(r0, i, i + 16)) for i in (0, 16, 32, 48)]
    assert hashes == [("aaa",), ("aaa", "bbb"), ("bbb",), ("ccc",)]
    assert manager.num_cached_block["0"] == 3
    decode(manager, r0, [8] * 6)     # the fourth block is full now
    assert manager.num_cached_block["0"] == 4
    r1 = make_request("1", blocks(3, *[5] * 10, *[8] * 6), [*images, (50, 8, "ddd")])
    assert start(manager, r1)[0] == [0, 1, 2]
    r2 = make_request("2", blocks(3, *[5] * 10, *[8] * 6), [*images, (50, 8, "ccc")])
    assert manager.get_computed_blocks(r2)[1] == 64, "decode and prompt made one key"


def test_second_identical_prompt_shares_and_its_last_block_has_two_holders():
    manager = make_manager(prealloc=0)
    first, second = make_request("0", blocks(2)), make_request("1", blocks(2))
    start(manager, first)
    hits, num_tokens = manager.get_computed_blocks(second)
    assert (ids(hits), num_tokens) == ([0, 1], 32)
    # The scheduler drops the last hit: one token has to be computed.
    assert ids(manager.allocate_slots(second, 16, hits[:1])) == [2]
    assert table(manager, second) == [0, 2]
    last = manager.req_to_block_hashes["1"][1]
    assert list(manager.pool.cached.blocks_of[last]) == [1, 2]
    assert ids(find_prefix(manager.pool.cached, manager.req_to_block_hashes["0"])) == [0, 1]
    manager.check_invariants()


def test_stats_count_every_look_up():
    manager, request = make_manager(num_blocks=2, prealloc=0), make_request("0", blocks(3))
    for _ in range(2): assert start(manager, request) == ([], None)
    stats = manager.take_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 6, 0)
    assert manager.take_stats() == PrefixCacheStats()


def test_prompt_logprobs_skip_reads_and_still_write():
    "vllm#3251, #3914, #8268, #23399, #42245."
    manager, params = make_manager(20, prealloc=0), SamplingParams(prompt_logprobs=1)
    assert start(manager, make_request("0", range(33), params=params)) == ([], [0, 1, 2])
    assert start(manager, make_request("1", range(33), params=params)) == ([], [3, 4, 5])
    assert start(manager, make_request("2", range(33))) == ([0, 1], [6])


def test_common_prefix_counts_all_running():
    manager = make_manager(prealloc=0)
    a, b = make_request("a", blocks(2, 1)), make_request("b", blocks(2, 2))
    start(manager, a)
    assert count_common_prefix(manager.req_to_blocks["a"], 1) == 3
    start(manager, b)
    assert count_common_prefix(manager.req_to_blocks["a"], 2) == 2
    assert count_common_prefix(manager.req_to_blocks["b"], 3) == 0


# ---- errors and field reports ------------------------------------------

def test_zero_tokens_and_too_many_tokens():
    manager, request = make_manager(max_model_len=32), make_request("0", range(40))
    with pytest.raises(ValueError, match="at least 1, got 0"): manager.allocate_slots(request, 0)
    with pytest.raises(ValueError, match="3 blocks more, max_model_len leaves room for 2"):
        manager.allocate_slots(request, 40)
    manager.check_invariants()
    with pytest.raises(ValueError, match="num_gpu_blocks must be at least 1, got 0"): make_manager(0)


def test_why_too_long():
    manager = make_manager(num_blocks=4)
    assert manager.why_too_long(64) is None
    assert manager.why_too_long(65) == "65 tokens need 5 KV cache blocks, there are 4"


def test_double_free():
    "vllm#42571, vllm#25067: a table is freed once; a block twice in one call is an error."
    manager, request = make_manager(), make_request("0", blocks(1))
    start(manager, request)
    free(manager, request, request, make_request("unknown", [1]))
    pool = BlockPool(2)
    [block] = pool.take(1)
    with pytest.raises(ValueError, match="block 0 is free already"): pool.give_back([block, block])
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"): pool.take(3)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="has a hash already"):
        for _ in range(2): pool.cached.add(block, b"x")


def test_reused_block_is_forgotten():
    "nano-vllm#163, #153: X, freed and overwritten by Y, is not found any more."
    manager = make_manager(num_blocks=2, prealloc=0)
    x, y = make_request("x", blocks(2)), make_request("y", [7] * 32)
    start(manager, x)
    free(manager, x)
    start(manager, y)
    free(manager, y)
    assert manager.get_computed_blocks(make_request("x2", blocks(2))) == ([], 0)
    assert manager.get_computed_blocks(make_request("y2", [7] * 32))[1] == 32


def test_duplicates_of_a_block_are_evicted_one_by_one():
    manager = make_manager(num_blocks=4, prealloc=0)
    a, b = make_request("a", blocks(1)), make_request("b", blocks(1))
    manager.allocate_slots(a, 16)
    manager.allocate_slots(b, 16)       # no look-up: a second copy
    free(manager, a, b)
    start(manager, make_request("c", [9] * 48))   # overwrites 2, 3, 0
    assert manager.get_computed_blocks(make_request("d", blocks(1)))[1] == 16
    manager.check_invariants()


def test_idle_pool_counts_shared_blocks_once():
    "sglang#35270, bytedance-iaas/sglang#508: two prefixes that share blocks, then idle."
    manager = make_manager(prealloc=0)
    ab, ac = make_request("ab", blocks(2, *[1] * 16)), make_request("ac", blocks(2, *[2] * 16))
    start(manager, ab)
    start(manager, ac)
    free(manager, ab, ac)
    assert manager.num_free_blocks == 10
    start(manager, make_request("big", [3] * 160))   # everything can be evicted
    assert not manager.num_free_blocks


def test_abort_between_chunks_drops_only_its_own_reference():
    "sglang#38355, sglang#36855."
    manager = make_manager(prealloc=0)
    first, second = make_request("0", blocks(4)), make_request("1", blocks(4))
    manager.allocate_slots(first, 32)     # first chunk: blocks 0, 1 are findable
    first.num_computed_tokens = 32
    assert start(manager, second)[0] == [0, 1]
    free(manager, first)
    assert table(manager, second)[:2] == [0, 1]
    assert manager.pool.blocks[0].ref_cnt == 1


def test_prompt_of_exactly_one_block_then_decode():
    "nano-vllm#66, #68: the full last block has its hash already."
    manager, request = make_manager(prealloc=0), make_request("0", blocks(1))
    start(manager, request)
    assert decode(manager, request, [1]) == [1]
    manager.free(request)                 # preempted: hashes stay
    request.num_computed_tokens = 0
    assert start(manager, request)[0] == [0]
    assert decode(manager, request, [2]) == []


def test_registering_skips_what_drafts_delay():
    "A block counts as full without its drafts; the skip loop catches up."
    manager = make_manager(num_blocks=8, block_size=4, prealloc=0)
    request = make_request("0", range(13))
    start(manager, request)
    request.append_output_token_ids(1)
    request.spec_token_ids = [7, 8, 9]
    assert ids(manager.allocate_slots(request, 4)) == [4]
    assert manager.num_cached_block["0"] == 3
    request.spec_token_ids = []
    request.append_output_token_ids([7, 99])
    request.num_computed_tokens = 15
    assert manager.allocate_slots(request, 1) == []
    assert manager.num_cached_block["0"] == 4
    manager.check_invariants()


def test_invariants_notice():
    manager, request = make_manager(), make_request("0", blocks(2))
    start(manager, request)
    manager.pool.blocks[0].ref_cnt += 1
    with pytest.raises(AssertionError, match="block 0: ref_cnt 2, 1 holders"): manager.check_invariants()
    manager.pool.blocks[0].ref_cnt -= 1
    manager.req_to_block_hashes["0"][0] = b"wrong"
    with pytest.raises(AssertionError, match="something else than its hash says"): manager.check_invariants()
