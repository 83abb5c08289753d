"KV cache: what is written where, and that nothing else changes."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minengine.attention.kv_cache import _repeat_a_real_row
from minengine.attention.kv_cache import copy_blocks
from minengine.attention.kv_cache import kv_cache_block_bytes
from minengine.attention.kv_cache import make_kv_cache
from minengine.attention.kv_cache import rows_of_slots
from minengine.attention.kv_cache import slot_mapping
from minengine.attention.kv_cache import swap_blocks
from minengine.attention.kv_cache import write_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_pool(num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, seed=0, heads_first=False):
    pool = make_kv_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, heads_first=heads_first)
    return pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed)))


def same_bits(a, b):
    "Equal as bytes, so that NaN equals the same NaN."
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_shape_and_bytes():
    pool = make_kv_cache(5, 16, 3, 64, torch.bfloat16)
    assert pool.shape == (2, 5, 16, 3, 64) and not pool.any()
    assert kv_cache_block_bytes(16, 3, 64, torch.bfloat16, 30) == 30 * pool[:, 0].nbytes


@pytest.mark.parametrize("at", range(4))
def test_a_size_below_one_is_named(at):
    sizes = [5, 16, 3, 64]
    sizes[at] = 0
    name = ["num_blocks", "block_size", "num_kv_heads", "head_dim"][at]
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"): make_kv_cache(*sizes)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.integers(1, 32), st.data())
def test_slot_mapping_is_the_formula(table, block_size, data):
    end = data.draw(st.integers(0, len(table) * block_size))
    start = data.draw(st.integers(0, end))
    slots = slot_mapping(table, start, end, block_size)
    assert [(s // block_size, s % block_size) for s in slots] == [
        (table[p // block_size], p % block_size) for p in range(start, end)]


def test_slot_mapping_refuses_what_the_table_does_not_hold():
    assert slot_mapping([7, 2], 0, 32) [-1] == 2 * 16 + 15
    with pytest.raises(IndexError, match="position 32 is past 2 blocks of 16"): slot_mapping([7, 2], 0, 33)
    with pytest.raises(IndexError, match="position -1"): slot_mapping([7, 2], -1, 3)


def test_slots_beyond_32_bits_stay_exact():
    assert slot_mapping([2**31], 3, 4, 16) == [2**35 + 3]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_write_changes_the_named_slots_and_no_others(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    pool = random_pool(dtype=dtype, heads_first=data.draw(st.booleans()))
    before, num_slots = pool.clone(), 24
    slots = data.draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=10))
    padded = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 4))))
    extra_rows = data.draw(st.integers(0, 3))
    key, value = torch.randn(2, len(padded) + extra_rows, 2, 8).to(dtype)
    write_kv(key, value, pool, torch.tensor(padded, dtype=torch.int64))
    for row, slot in enumerate(padded):
        if slot < 0: continue
        assert torch.equal(pool[0].flatten(0, 1)[slot], key[row])
        assert torch.equal(pool[1].flatten(0, 1)[slot], value[row])
    others = [s for s in range(num_slots) if s not in slots]
    assert torch.equal(pool.flatten(1, 2)[:, others], before.flatten(1, 2)[:, others])


def test_vllm_13418_the_slots_decide_how_many_rows_are_written():
    "A batch of 5 padded to 8 rows: three rows have no slot and must not be written."
    pool = random_pool()
    before = pool.clone()
    key, value = torch.randn(2, 8, 2, 8)
    key[5:], value[5:] = torch.nan, torch.nan
    write_kv(key, value, pool, torch.arange(5))
    assert torch.equal(pool.flatten(1, 2)[0, :5], key[:5])
    assert torch.equal(pool.flatten(1, 2)[:, 5:], before.flatten(1, 2)[:, 5:])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-1, 23), max_size=8, unique_by=lambda slot: slot if slot >= 0 else object()))
def test_repeating_a_real_row_writes_what_dropping_padding_writes(slots):
    "The way without a look, which a device takes, against the way with one."
    if not slots: return
    with_look, without = random_pool(), random_pool()
    kv, slots = torch.randn(2, len(slots), 2, 8), torch.tensor(slots)
    write_kv(*kv, with_look, slots)
    pool = without.flatten(1, 2)
    targets, rows = _repeat_a_real_row(slots, kv, pool)
    pool.index_copy_(1, targets, rows)
    assert torch.equal(with_look, without)


@pytest.mark.gpu
def test_writing_on_a_device_does_not_wait_for_it():
    pool, on_device = random_pool(), random_pool().cuda()
    kv, slots = torch.randn(2, 4, 2, 8), torch.tensor([3, -1, 17, -1])
    write_kv(*kv, pool, slots)
    device_kv, device_slots = kv.cuda(), slots.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try: write_kv(*device_kv, on_device, device_slots)
    finally: torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(on_device.cpu(), pool)


def test_rows_may_be_views_of_a_fused_projection():
    pool, fused = random_pool(), torch.randn(5, 64)
    key, value = (x.view(5, 2, 8) for x in fused[:, 32:].split(16, dim=1))
    write_kv(key, value, pool, torch.tensor([3, 1, 9, -1, 20]))
    assert torch.equal(pool[1].flatten(0, 1)[20], fused[4, 48:].view(2, 8))


def test_a_cache_with_gaps_has_no_rows():
    "They would not lie one behind the other, and reading them would read others."
    whole = random_pool(head_dim=16)
    with pytest.raises(ValueError, match="gaps.*strides"): rows_of_slots(torch.tensor([3]), whole[..., :8])


def test_slots_must_be_64_bit():
    with pytest.raises(ValueError, match="int32"):
        write_kv(*torch.randn(2, 1, 2, 8), random_pool(), torch.zeros(1, dtype=torch.int32))


def test_a_slot_outside_the_pool_is_refused():
    with pytest.raises(IndexError): write_kv(*torch.randn(2, 1, 2, 8), random_pool(), torch.tensor([24]))


def test_vllm_1486_offsets_beyond_32_bits():
    "Over 2**31 numbers before the last block; only its pages are ever touched."
    num_blocks = 2**31 // (16 * 8 * 128) + 2
    pool = torch.empty(2, num_blocks, 16, 8, 128, dtype=torch.int8)
    key, value = torch.randint(-128, 128, (2, 1, 8, 128), dtype=torch.int8)
    slot = num_blocks * 16 - 1
    write_kv(key, value, pool, torch.tensor([slot]))
    assert same_bits(pool[0, -1, -1], key[0]) and same_bits(pool[1, -1, -1], value[0])
    copy_blocks([pool], [(num_blocks - 1, 3)])
    assert same_bits(pool[:, 3], pool[:, -1])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_copy_blocks_reads_every_source_first(data):
    pools = [random_pool(seed=i) for i in range(3)]
    before = [p.clone() for p in pools]
    targets = data.draw(st.lists(st.integers(0, 5), unique=True, max_size=6))
    pairs = [(data.draw(st.integers(0, 5)), target) for target in targets]
    copy_blocks(pools, pairs)
    source_of = {target: source for source, target in pairs}
    for pool, old in zip(pools, before):
        assert torch.equal(pool, old[:, [source_of.get(b, b) for b in range(6)]])


@pytest.mark.parametrize("orders", [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swap_out_and_in_again_is_bit_for_bit(dtype, orders):
    pool = random_pool(dtype=dtype, heads_first=orders[0])
    host = make_kv_cache(3, 4, 2, 8, dtype, heads_first=orders[1])
    pool[:, 4, 0, 0, 0] = torch.nan
    pool[:, 4, 0, 0, 1] = -0.0
    before = pool.clone()
    swap_blocks(pool, host, [(4, 0), (1, 2)])
    assert same_bits(host[:, 0], before[:, 4]) and same_bits(host[:, 2], before[:, 1])
    pool[:, [1, 4]] = torch.nan   # somebody else used the blocks meanwhile
    swap_blocks(host, pool, [(0, 3), (2, 4)])
    assert same_bits(pool[:, 3], before[:, 4]) and same_bits(pool[:, 4], before[:, 1])


def test_one_shared_block_may_be_swapped_to_two_places():
    pool, host = random_pool(), make_kv_cache(3, 4, 2, 8)
    swap_blocks(pool, host, [(0, 0), (0, 2)])
    assert torch.equal(host[:, 0], host[:, 2]) and torch.equal(host[:, 0], pool[:, 0])


@pytest.mark.parametrize("pair, words", [((-1, 0), "source block -1 is outside 0..5"), ((6, 0), "source block 6"),
                                         ((0, 3), "target block 3 is outside 0..2"), ((0, -1), "target block -1")])
def test_a_block_outside_its_pool_is_named(pair, words):
    with pytest.raises(IndexError, match=words): swap_blocks(random_pool(), make_kv_cache(3, 4, 2, 8), [pair])


def test_a_target_may_be_written_once():
    with pytest.raises(ValueError, match=r"written twice: \[2, 2\]"): copy_blocks([random_pool()], [(0, 2), (1, 2)])


def test_pools_of_different_layout_are_refused():
    with pytest.raises(ValueError, match="pools differ"): swap_blocks(random_pool(), make_kv_cache(3, 8, 2, 8), [(0, 0)])
