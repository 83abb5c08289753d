"Attention backends against dense attention that knows nothing of blocks."
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minengine.attention.cpu import cpu_attention
from minengine.attention.kv_cache import make_kv_cache
from minengine.attention.kv_cache import write_kv
from minengine.attention.layer import Attention
from minengine.attention.layer import get_attention_backend
from minengine.attention.metadata import AttentionMetadata
from minengine.attention.metadata import get_forward_context
from minengine.attention.metadata import set_forward_context
from minengine.attention.reference import reference_attention

BACKENDS = {"reference": reference_attention, "cpu": cpu_attention}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def plain_attention(query, key, value, scale, window):
    "One sequence, all its keys, one query after the other, in float64."
    out = torch.empty(query.shape, dtype=torch.float64)
    group, num_computed = query.shape[1] // key.shape[1], len(key) - len(query)
    for row in range(len(query)):
        position = num_computed + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            keys = key[first:position + 1, head // group].double()
            weights = (keys @ query[row, head].double() * scale).softmax(0)
            out[row, head] = weights @ value[first:position + 1, head // group].double()
    return out


def close(found, wanted, tolerance=1e-5):
    "No number is further away than that; NaN is nowhere near anything."
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=tolerance)


class Step:
    "A random ragged batch in a paged pool in which all else is NaN."

    def __init__(self, query_lens, seq_lens, block_size=4, num_heads=4, num_kv_heads=2, head_dim=8,
                 dtype=torch.float32, seed=0, contiguous=False, spare_blocks=3, padding_rows=0, window=None,
                 heads_first=True):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
        counts = [-(-n // block_size) for n in seq_lens]
        ids = list(range(sum(counts) + spare_blocks))
        if not contiguous: rng.shuffle(ids)
        self.tables = [[ids.pop(0) for _ in range(count)] for count in counts]
        self.pool = make_kv_cache(sum(counts) + spare_blocks, block_size, num_kv_heads, head_dim, dtype,
                                  heads_first=heads_first)
        self.pool.fill_(torch.nan)
        self.metadata = AttentionMetadata.from_lists(query_lens, seq_lens, self.tables, block_size)
        self.metadata.check(self.pool.shape[1], block_size)
        self.keys = [draw(n, num_kv_heads, head_dim) for n in seq_lens]
        self.values = [draw(n, num_kv_heads, head_dim) for n in seq_lens]
        self.query = draw(sum(query_lens) + padding_rows, num_heads, head_dim)
        self.query_lens, self.seq_lens, self.scale = query_lens, seq_lens, head_dim ** -0.5
        self.window = window
        for i, table in enumerate(self.tables):
            first = 0 if window is None else max(0, seq_lens[i] - query_lens[i] - window + 1)
            slots = [table[p // block_size] * block_size + p % block_size for p in range(first, seq_lens[i])]
            write_kv(self.keys[i][first:], self.values[i][first:], self.pool, torch.tensor(slots, dtype=torch.int64))

    def run(self, backend, **kw):
        return BACKENDS[backend](self.query, self.pool, self.metadata, self.scale, self.window, **kw)

    def expected(self):
        out, row = torch.zeros(self.query.shape, dtype=torch.float64), 0
        for rows, key, value in zip(self.query_lens, self.keys, self.values):
            out[row:row + rows] = plain_attention(self.query[row:row + rows], key, value, self.scale, self.window)
            row += rows
        return out

    def check(self, backend, **kw):
        found = self.run(backend, **kw)
        assert found.dtype == self.query.dtype and found.shape == self.query.shape
        close(found, self.expected(), TOLERANCE[self.query.dtype])
        return found


@st.composite
def steps(draw):
    "Prefills, chunks and decodes in any mixture."
    kind = draw(st.sampled_from(["mixed", "mixed", "decode", "prefill"]))
    lens = st.integers(1, 40)
    seq_lens = draw(st.lists(lens, min_size=1, max_size=6))
    query_of = {"decode": lambda n: 1, "prefill": lambda n: n,
                "mixed": lambda n: draw(st.one_of(st.just(1), st.integers(0, n)))}[kind]
    query_lens = [query_of(n) for n in seq_lens]
    group, num_kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Step(query_lens, seq_lens, draw(st.sampled_from([1, 3, 4, 8, 16])), group * num_kv_heads, num_kv_heads,
                draw(st.sampled_from([4, 8, 20])), seed=draw(st.integers(0, 999)), contiguous=draw(st.booleans()),
                padding_rows=draw(st.integers(0, 3)), window=draw(st.sampled_from([None, None, 1, 3, 8, 100])),
                heads_first=draw(st.booleans()))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=80)
@given(steps())
def test_any_batch_equals_dense_attention_without_pages(backend, step):
    step.check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("query_lens, seq_lens", [
    ([1, 1, 1, 1, 1], [1, 16, 17, 300, 1025]), ([33, 70], [33, 70]), ([5, 1, 64, 1], [300, 9, 64, 129])],
    ids=["decode", "prefill", "mixed"])
def test_longer_sequences_and_half_precision(backend, dtype, query_lens, seq_lens):
    step = Step(query_lens, seq_lens, 16, 9, 3, 64, dtype)
    step.check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("contiguous", [True, False])
def test_rows_do_not_depend_on_their_company(backend, contiguous):
    query_lens, seq_lens = [1, 7, 1, 20, 1, 3], [50, 7, 513, 30, 1, 100]
    step = Step(query_lens, seq_lens, 16, 9, 3, 64, contiguous=contiguous)
    together, row = step.run(backend), 0
    for i, rows in enumerate(query_lens):
        alone = AttentionMetadata.from_lists([rows], [seq_lens[i]], [step.tables[i]], 16)
        found = BACKENDS[backend](step.query[row:row + rows], step.pool, alone, step.scale)
        close(found, together[row:row + rows])
        row += rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_step_gives_the_same_bits(backend):
    make = lambda: Step([1, 1, 40, 1], [900, 33, 40, 5], 16, 9, 3, 64, seed=3).run(backend)
    assert torch.equal(make(), make())


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_of_a_step_is_its_own(backend):
    "What a backend keeps on the metadata belongs to the step, not to a layer."
    step, other = Step([1, 5], [40, 12], seed=1), Step([1, 5], [40, 12], seed=1)
    step.run(backend)
    step.pool.mul_(0.5)                  # another layer: same blocks, other numbers
    step.values = [v * 0.5 for v in step.values]
    step.keys = [k * 0.5 for k in step.keys]
    step.check(backend)
    step.window = 3                      # and a layer with a sliding window
    step.check(backend)
    other.check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_are_zero_whatever_they_hold(backend):
    step = Step([1, 4], [30, 4], padding_rows=5)
    step.query[5:] = torch.nan
    out = torch.full_like(step.query, torch.nan)
    found = step.run(backend, out=out)
    assert found is out and not found[5:].any() and found[:5].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_sequences_is_all_padding(backend):
    step = Step([], [], padding_rows=2)
    assert not step.run(backend).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lengths_may_be_only_on_the_device(backend):
    step = Step([1, 4], [30, 9])
    step.metadata.query_start_loc_cpu = step.metadata.seq_lens_cpu = None
    step.check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_sequences_may_share_blocks(backend):
    "A common prefix of 8 tokens, stored once."
    step = Step([1, 1], [12, 11])
    for i in (0, 1): step.keys[i][:8], step.values[i][:8] = step.keys[0][:8], step.values[0][:8]
    tables = [step.tables[0], step.tables[0][:2] + step.tables[1][2:]]
    step.metadata = AttentionMetadata.from_lists([1, 1], [12, 11], tables, 4)
    step.check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_freed_blocks_full_of_nan_reach_nobody(backend):
    "A long sequence ends and leaves NaN; the next gets its blocks and few tokens."
    step = Step([1, 1, 6], [5, 31, 6], window=None)
    assert step.pool.isnan().any()       # beyond the last token, and in spare blocks
    step.check(backend)
    step = Step([1, 1, 6], [35, 31, 26], window=4)   # and behind the window
    step.check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_len", [1, 20])
def test_vllm_1486_offsets_beyond_32_bits(backend, query_len):
    "A sequence that lies past 2**31 numbers, in keys and in values."
    per_block = 16 * 8 * 128
    num_blocks = 2**31 // per_block + 2
    try: pool = make_kv_cache(num_blocks, 16, 8, 128)   # 16 GiB, hardly a page of it touched
    except (MemoryError, RuntimeError): pytest.skip("the system does not promise 16 GiB")
    metadata = AttentionMetadata.from_lists([20], [20], [[num_blocks - 1, num_blocks - 2]], 16)
    key, value = torch.randn(2, 20, 8, 128)
    write_kv(key, value, pool, metadata.slot_mapping)
    metadata = AttentionMetadata.from_lists([query_len], [20], [[num_blocks - 1, num_blocks - 2]], 16)
    query = torch.randn(query_len, 8, 128)
    found = BACKENDS[backend](query, pool, metadata, 0.1)
    close(found, plain_attention(query, key, value, 0.1, None))


class LargestNew(TorchDispatchMode):
    "Notes the largest tensor that an operator makes outside of `pool`."

    def __init__(self, pool):
        super().__init__()
        self.pool, self.numel = pool.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            dense = isinstance(x, torch.Tensor) and x.layout == torch.strided
            if dense and x.untyped_storage().data_ptr() != self.pool: self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("heads_first", [True, False])
def test_decoding_on_the_cpu_copies_no_keys_and_values(heads_first):
    step = Step([1] * 5 + [2], [200, 210, 190, 222, 100, 213], 16, 9, 3, 64, heads_first=heads_first)
    step.check("cpu")                    # the first layer makes the plan
    with LargestNew(step.pool) as largest: step.run("cpu")
    scores = 9 * (sum(step.seq_lens) + step.seq_lens[-1])
    assert largest.numel < 1.2 * scores < sum(step.seq_lens) * 3 * 64


def test_metadata_check_names_what_is_wrong():
    def build(**wrong):
        metadata = AttentionMetadata.from_lists([1, 3], [9, 3], [[0, 1, 2], [5]], 4)
        for name, value in wrong.items(): setattr(metadata, name, value)
        if "query_start_loc" in wrong: metadata.query_start_loc_cpu = None
        if "seq_lens" in wrong: metadata.seq_lens_cpu = None
        return metadata
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    build().check(6, 4)
    for words, wrong in {
        "block 5 is outside 0..4": {},
        "slot_mapping must be torch.int64, got torch.int32": dict(slot_mapping=ints(8, 20, 21, 22)),
        "4 tokens need as many slots, got 3": dict(slot_mapping=torch.tensor([8, 20, 21])),
        "2 seq_lens need 3 query_start_loc, got 2": dict(query_start_loc=ints(0, 4)),
        "runs from 0 to 5, not from 0 to 4": dict(query_start_loc=ints(0, 1, 5)),
        "sequence 1 has 3 rows of 2 tokens": dict(seq_lens=ints(9, 2)),
        "sequence 0 needs 4 blocks, its table has 3": dict(seq_lens=ints(13, 3), max_seq_len=13),
        "max_seq_len 8 is below 9": dict(max_seq_len=8),
        "max_query_len 2 is below 3": dict(max_query_len=2),
        "slots run from -2 to 22, the pool from 0 to 23": dict(slot_mapping=torch.tensor([-2, 20, 21, 22])),
    }.items():
        with pytest.raises(ValueError, match=words): build(**wrong).check(5 if not wrong else 6, 4)


def test_the_layer_writes_then_attends():
    step = Step([1, 4], [30, 9], padding_rows=2)
    whole = step.expected()
    new = [step.keys[0][29:], step.keys[1][5:]], [step.values[0][29:], step.values[1][5:]]
    key, value = (torch.cat(x + [torch.full((2, 2, 8), torch.nan)]).flatten(1) for x in new)
    pools = [torch.full_like(step.pool, torch.nan), step.pool]
    slots = step.metadata.slot_mapping
    step.pool[:, slots // 4, slots % 4] = torch.nan                      # not yet written
    for backend in BACKENDS:
        layer = Attention(4, 8, step.scale, 2, layer_index=1)
        with set_forward_context(step.metadata, pools, backend):
            found = layer(step.query.flatten(1), key, value)
        assert found.shape == (7, 32)
        close(found.view(7, 4, 8), whole)
        assert pools[0].isnan().all()


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_step_is_written_alike_in_both_orders_by_every_backend(heads_first):
    "Padding in the mapping and behind it; a second layer finds the first one's plan."
    pools = {name: [make_kv_cache(6, 4, 3, 8, heads_first=heads_first) for _ in range(2)] for name in BACKENDS}
    for name, layers in pools.items():
        metadata = AttentionMetadata.from_lists([2, 3], [2, 7], [[4], [1, 3]], 4)
        metadata.slot_mapping[3] = -1
        write, _ = get_attention_backend(name)
        for layer, pool in enumerate(layers):
            key, value = torch.randn(2, 7, 3, 8, generator=torch.Generator().manual_seed(layer))
            write(key, value, pool, metadata)
            assert torch.equal(pool[0, 4, :2], key[:2])
            assert torch.equal(pool[1, 3, 2], value[4]) and not pool[:, 3, 1].any()
    for layer in range(2): assert torch.equal(pools["reference"][layer], pools["cpu"][layer])


def test_a_profiling_run_gives_zeros_and_touches_no_cache():
    layer = Attention(4, 8, 1.0, 2, layer_index=7)
    with set_forward_context(None, [], "cpu"):
        assert not layer(torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16)).any()


def test_without_a_context_the_layer_says_what_to_do():
    layer = Attention(4, 8, 1.0, 2, layer_index=0)
    with pytest.raises(RuntimeError, match="set_forward_context"):
        layer(torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16))


def test_contexts_nest_and_a_failed_step_leaves_none():
    with set_forward_context(None, [], "cpu") as outer:
        with pytest.raises(KeyError):
            with set_forward_context(None, [], "reference"): raise KeyError
        assert get_forward_context() is outer
    with pytest.raises(RuntimeError): get_forward_context()


def test_two_engines_in_two_threads_have_two_contexts():
    seen = []
    def other():
        with pytest.raises(RuntimeError): get_forward_context()
        with set_forward_context(None, [], "reference"): seen.append(get_forward_context().backend)
    with set_forward_context(None, [], "cpu"):
        thread = threading.Thread(target=other)
        thread.start(); thread.join()
        assert seen == ["reference"] and get_forward_context().backend == "cpu"


def test_unknown_backends_and_uneven_heads_are_refused():
    with pytest.raises(ValueError, match="'flash'.*'reference', 'cpu' and 'triton'"): get_attention_backend("flash")
    with pytest.raises(ValueError, match="7 query heads .* 2 key/value heads"): Attention(7, 8, 1.0, 2, 0)


def test_a_compiled_graph_sees_one_opaque_operator():
    layer, targets = Attention(4, 8, 1.0, 2, layer_index=0), []
    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with set_forward_context(None, [], "cpu"):
        assert not compiled(torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16)).any()
    assert sum("minengine.attention" in t for t in targets) == 1
