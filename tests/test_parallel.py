"""Weights cut over simulated ranks, and weights laid out for the CPU."""
import threading

import pytest
import torch
from torch.nn import functional as F

from minengine import parallel
from minengine.parallel import ColumnParallelLinear
from minengine.parallel import MergedColumnParallelLinear
from minengine.parallel import ParallelLMHead
from minengine.parallel import QKVParallelLinear
from minengine.parallel import RowParallelLinear
from minengine.parallel import VocabParallelEmbedding
from minengine.parallel import allowed_tensor_parallel_sizes
from minengine.parallel import can_pack
from minengine.parallel import check_tensor_parallel_size
from minengine.parallel import divide
from minengine.parallel import get_tensor_model_parallel_rank
from minengine.parallel import get_tensor_model_parallel_world_size
from minengine.parallel import tensor_parallel_group

needs_packing = pytest.mark.skipif(not can_pack(torch.empty(4, 4)),
                                   reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def on_each_rank(size, build, **links):
    "What `build()` makes as each of `size` ranks."
    made = []
    for rank in range(size):
        with tensor_parallel_group(rank, size, **links): made.append(build())
    return made


def same(x): return x   # an all-reduce that hands back the partial sum


class Ranks:
    "Threads that really add up and join what they hold."

    def __init__(self, size):
        self.size, self.barrier = size, threading.Barrier(size, timeout=30)
        self.slots = [None] * size

    def _exchange(self, rank, x):
        self.slots[rank] = x
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()   # nobody overwrites before all have read
        return everyone

    def build(self, rank, make):
        with tensor_parallel_group(rank, self.size,
                all_reduce=lambda x: sum(self._exchange(rank, x)),
                all_gather=lambda x: torch.cat(self._exchange(rank, x), -1)):
            return make()

    def run(self, work):
        results = [None] * self.size
        def body(rank): results[rank] = work(rank)
        threads = [threading.Thread(target=body, args=(r,), daemon=True)
                   for r in range(self.size)]
        for t in threads: t.start()
        for t in threads: t.join(60)
        assert all(r is not None for r in results)
        return results


def test_divide():
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="12 does not divide by 5"): divide(12, 5)


def test_one_process_is_rank_0_of_1():
    assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (0, 1)
    with pytest.raises(KeyError):
        with tensor_parallel_group(1, 2): raise KeyError
    assert get_tensor_model_parallel_world_size() == 1   # restored after an error
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        with tensor_parallel_group(2, 2): pass


@pytest.mark.parametrize("heads, kv, size", [(28, 4, 8), (52, 52, 3), (9, 3, 2), (14, 2, 4), (12, 8, 12)])
def test_vllm_2652_heads_that_do_not_divide(heads, kv, size):
    "vllm#2652, #414, #5003, #11797: an early error that lists the allowed sizes."
    with pytest.raises(ValueError) as error: check_tensor_parallel_size(heads, kv, size)
    allowed = [int(n) for n in str(error.value).split("allowed sizes: ")[1].split(", ")]
    assert allowed == allowed_tensor_parallel_sizes(heads, kv) and size not in allowed
    for n in allowed:
        check_tensor_parallel_size(heads, kv, n)
        with tensor_parallel_group(n - 1, n): QKVParallelLinear(8, 4, heads, kv)
    with tensor_parallel_group(0, size), pytest.raises(ValueError, match="allowed sizes"):
        QKVParallelLinear(8, 4, heads, kv)


def test_allowed_sizes():
    assert allowed_tensor_parallel_sizes(28, 4) == [1, 2, 4, 28]
    assert allowed_tensor_parallel_sizes(32, 8) == [1, 2, 4, 8, 16, 32]
    assert allowed_tensor_parallel_sizes(9, 3) == [1, 3, 9]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_column_parallel_ranks_join_to_the_whole(size):
    w, b, x = torch.randn(24, 10), torch.randn(24), torch.randn(5, 10)
    def build():
        layer = ColumnParallelLinear(10, 24, bias=True)
        layer.weight_loader(layer.weight, w)
        layer.weight_loader(layer.bias, b)
        return layer
    parts = [layer(x) for layer in on_each_rank(size, build)]
    torch.testing.assert_close(torch.cat(parts, -1), F.linear(x, w, b))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_column_parallel(size):
    ws, x = [torch.randn(8, 10), torch.randn(12, 10)], torch.randn(5, 10)
    def build():
        layer = MergedColumnParallelLinear(10, [8, 12])
        for shard, w in enumerate(ws): layer.weight_loader(layer.weight, w, shard)
        return layer
    parts = [layer(x).split([8 // size, 12 // size], -1) for layer in on_each_rank(size, build)]
    for i, w in enumerate(ws):
        torch.testing.assert_close(torch.cat([p[i] for p in parts], -1), F.linear(x, w))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_ranks_add_up_and_the_bias_counts_once(size):
    w, b, x = torch.randn(10, 24), torch.randn(10), torch.randn(5, 24)
    def build():
        layer = RowParallelLinear(24, 10, bias=True)
        layer.weight_loader(layer.weight, w)
        layer.weight_loader(layer.bias, b)
        return layer
    layers = on_each_rank(size, build, all_reduce=same)
    parts = [layer(part) for layer, part in zip(layers, x.chunk(size, -1))]
    torch.testing.assert_close(sum(parts), F.linear(x, w, b))


@pytest.mark.parametrize("rows", [1, 5, 32, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype, pack", [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)])
def test_the_residual_is_added_to_the_bit_and_stays_as_it_is(rows, bias, dtype, pack):
    layer = RowParallelLinear(96, 64, bias=bias, dtype=dtype)
    for p in layer.parameters(): p.normal_()
    layer.process_weights_after_loading(pack)
    x, residual = torch.randn(rows, 96).to(dtype), torch.randn(rows, 64).to(dtype)
    before = residual.clone()
    assert torch.equal(layer(x, residual), residual + layer(x)) and torch.equal(residual, before)


@pytest.mark.parametrize("size", [2, 4])
def test_the_residual_counts_once_whatever_the_number_of_ranks(size):
    w, x, residual = torch.randn(10, 24), torch.randn(5, 24), torch.randn(5, 10)
    total = lambda part: sum(parts)              # what an all-reduce answers to each rank
    def build():
        layer = RowParallelLinear(24, 10)
        layer.weight_loader(layer.weight, w)
        return layer
    shares = x.chunk(size, -1)
    parts = [layer(part) for layer, part in zip(on_each_rank(size, build, all_reduce=same), shares)]
    for layer, part in zip(on_each_rank(size, build, all_reduce=total), shares):
        torch.testing.assert_close(layer(part, residual), residual + F.linear(x, w))


@pytest.mark.parametrize("heads, kv", [(8, 4), (8, 2), (8, 1), (8, 8)])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_transformers_48307_kv_heads_are_replicated(heads, kv, size):
    "transformers#48307: more ranks than key/value heads; each query head still meets its own."
    head_dim, x = 3, torch.randn(2, 5)
    w = {s: torch.randn(n * head_dim, 5) for s, n in (("q", heads), ("k", kv), ("v", kv))}
    def build():
        layer = QKVParallelLinear(5, head_dim, heads, kv)
        for shard_id, loaded in w.items(): layer.weight_loader(layer.weight, loaded, shard_id)
        return layer
    q, k, v = (F.linear(x, w[s]).unflatten(-1, (-1, head_dim)) for s in "qkv")
    for rank, layer in enumerate(on_each_rank(size, build)):
        assert layer.num_heads * size == heads and layer.num_kv_heads == max(1, kv // size)
        ours = layer(x).split([layer.q_size, layer.kv_size, layer.kv_size], -1)
        q1, k1, v1 = (y.unflatten(-1, (-1, head_dim)) for y in ours)
        for i in range(layer.num_heads):
            head = rank * layer.num_heads + i
            local_kv = i // (layer.num_heads // layer.num_kv_heads)
            torch.testing.assert_close(q1[:, i], q[:, head])
            torch.testing.assert_close(k1[:, local_kv], k[:, head // (heads // kv)])
            torch.testing.assert_close(v1[:, local_kv], v[:, head // (heads // kv)])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_vocabulary_is_shared_out_with_padding(size):
    table, ids, hidden = torch.randn(10, 4), torch.tensor([0, 9, 3, 6, 7, 3]), torch.randn(2, 4)
    ranks = Ranks(size)
    def make():
        embedding, head = VocabParallelEmbedding(10, 4), ParallelLMHead(10, 4)
        embedding.weight_loader(embedding.weight, table)
        head.weight_loader(head.weight, table)
        return embedding, head
    made = [ranks.build(rank, make) for rank in range(size)]
    for found, logits in ranks.run(lambda r: (made[r][0](ids), made[r][1](hidden))):
        torch.testing.assert_close(found, table[ids])
        torch.testing.assert_close(logits, hidden @ table.T)
        assert logits.dtype == torch.float32 and logits.shape == (2, 10)


def test_ranks_without_a_link_say_so():
    with tensor_parallel_group(0, 2):
        row, head = RowParallelLinear(4, 4), ParallelLMHead(4, 4)
    for layer in (row, head):
        layer.weight.zero_()
        with pytest.raises(RuntimeError, match="2 ranks but no all_"): layer(torch.zeros(1, layer.input_size))


def test_a_wrong_shape_is_named():
    column, row = ColumnParallelLinear(4, 6), RowParallelLinear(4, 6)
    qkv, embedding = QKVParallelLinear(4, 2, 2, 1), VocabParallelEmbedding(8, 4)
    for layer, loaded, shard, words in (
            (column, torch.zeros(5, 4), None, "expected 6 along dimension 0"),
            (column, torch.zeros(6, 3), None, r"\(6, 3\) does not fit \(6, 4\)"),
            (row, torch.zeros(6, 8), None, "expected 4 along dimension 1"),
            (qkv, torch.zeros(4, 4), "k", "expected 2 along dimension 0"),
            (embedding, torch.zeros(9, 4), None, "expected 8 along dimension 0")):
        with pytest.raises(ValueError, match=words): layer.weight_loader(layer.weight, loaded, shard)
    with pytest.raises(ValueError, match="shard_id must be 'q', 'k' or 'v', got None"):
        qkv.weight_loader(qkv.weight, torch.zeros(4, 4))
    merged = MergedColumnParallelLinear(4, [6, 6])
    with pytest.raises(ValueError, match=r"shard_id 2 is not in 0\.\.1"):
        merged.weight_loader(merged.weight, torch.zeros(6, 4), 2)


def test_the_checkpoint_may_have_another_dtype():
    layer = ColumnParallelLinear(4, 6, dtype=torch.float32)
    w = torch.randn(6, 4).bfloat16()
    layer.weight_loader(layer.weight, w)
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight, w.float())


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 32, 100])
def test_packed_gives_the_same(rows, bias):
    layer = ColumnParallelLinear(96, 160, bias=bias)
    for p in layer.parameters(): p.normal_()
    x = torch.randn(rows, 96)
    plain = layer(x)
    layer.process_weights_after_loading(pack=False)
    assert not layer.packed and layer.weight is not None
    layer.process_weights_after_loading(pack=True)
    layer.process_weights_after_loading(pack=True)   # twice does no harm
    assert layer.packed and layer.weight is None
    torch.testing.assert_close(layer(x), plain, atol=1e-4, rtol=1e-5)
    strided = torch.randn(rows, 200)[:, 8:104]
    assert layer(strided).shape == (rows, 160)


@needs_packing
def test_a_tied_embedding_survives_the_packing_of_its_head():
    embedding, head = VocabParallelEmbedding(10, 4), ParallelLMHead(10, 4)
    embedding.weight.normal_()
    head.tie(embedding)
    before = head(torch.eye(4))
    head.process_weights_after_loading()
    assert head.packed and embedding.weight is not None
    torch.testing.assert_close(head(torch.eye(4)), before)
    torch.testing.assert_close(embedding(torch.arange(10)).T, before)


@pytest.mark.parametrize("missing", ["_pack_weight", "_packed_linear", "_packed_linear_add"])
def test_without_onednn_the_plain_weight_stays(monkeypatch, missing):
    monkeypatch.setattr(parallel, missing, None)
    layer = ColumnParallelLinear(4, 6)
    layer.weight.normal_()
    layer.process_weights_after_loading(pack=True)
    assert not layer.packed and layer(torch.zeros(1, 4)).shape == (1, 6)


def test_other_dtypes_stay_plain():
    layer = ColumnParallelLinear(4, 6, dtype=torch.bfloat16)
    layer.process_weights_after_loading(pack=True)
    assert not layer.packed and not can_pack(layer.weight)
