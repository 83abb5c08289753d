"""Norms, rotary positions and the MLP, against transformers' own modules."""
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers import MistralConfig
from transformers import Qwen2Config
from transformers import Qwen2_5_VLTextConfig
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from minengine.model.layers import MLP
from minengine.model.layers import QKNorm
from minengine.model.layers import RMSNorm
from minengine.model.layers import ROPE_TYPES
from minengine.model.layers import SiluAndMul
from minengine.model.layers import apply_rotary
from minengine.model.layers import get_rope
from minengine.model.layers import rope_parameters
from minengine.parallel import tensor_parallel_group

HEAD_DIM, POSITIONS = 16, 64
ROPES = {
    "default": {},
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=2.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "yarn, own attention factor": dict(rope_type="yarn", factor=4.0, attention_factor=0.7,
                                       original_max_position_embeddings=16),
    "yarn, mscale": dict(rope_type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.3,
                         original_max_position_embeddings=16),
    "yarn, betas": dict(rope_type="yarn", factor=8.0, beta_fast=4, beta_slow=2, truncate=False,
                        original_max_position_embeddings=32),
    "yarn, no factor": dict(rope_type="yarn", factor=None, original_max_position_embeddings=16),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rope_config(name="default", theta=500.0, cls=LlamaConfig, **changes):
    settings = dict(rope_type=name.split(",")[0], rope_theta=theta) | ROPES[name] | changes
    return cls(hidden_size=4 * HEAD_DIM, num_attention_heads=4, num_key_value_heads=2,
               head_dim=HEAD_DIM, max_position_embeddings=POSITIONS, rope_parameters=settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vllm_9729_norm_rounds_where_transformers_rounds(dtype):
    "vllm#9729: in float32 inside, back to the model's dtype before the weight."
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.normal_()
    ours = RMSNorm(48, 1e-5, dtype)
    ours.weight.copy_(theirs.weight)
    x = torch.randn(7, 48).to(dtype) * 3
    assert torch.equal(ours(x), theirs(x))


def test_norm_leaves_its_input_alone():
    x = torch.randn(3, 8)
    before = x.clone()
    RMSNorm(8)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_head_norms_in_one_pass(dtype):
    q_norm, k_norm = (Qwen3RMSNorm(HEAD_DIM).to(dtype) for _ in "qk")
    ours = QKNorm(4, 2, HEAD_DIM, 1e-6, dtype)
    for norm, shard_id in ((q_norm, "q"), (k_norm, "k")):
        norm.weight.data.normal_()
        ours.weight_loader(ours.weight, norm.weight.data, shard_id)
    x = torch.randn(5, 6, HEAD_DIM).to(dtype)
    assert torch.equal(ours(x), torch.cat([q_norm(x[:, :4]), k_norm(x[:, 4:])], 1))
    with pytest.raises(ValueError, match=r"expected 16 numbers, got shape \(8,\)"):
        ours.weight_loader(ours.weight, torch.ones(8), "q")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROPES)
def test_rope_types(name, dtype):
    config = rope_config(name)
    positions = torch.randperm(POSITIONS)
    q, k = torch.randn(2, POSITIONS, 3, HEAD_DIM).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    wanted = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    ours = apply_rotary(torch.cat([q, k], 1), *get_rope(config, dtype=dtype)(positions))
    exact = dict(atol=0, rtol=0)   # vllm#9729: rounds where transformers rounds
    tolerance = dict(atol=2e-6, rtol=1e-5) if dtype == torch.float32 else exact
    torch.testing.assert_close(ours, torch.cat([w[0] for w in wanted], 1), **tolerance)


@pytest.mark.parametrize("name", ROPES)
def test_rope_types_really_differ(name):
    if name == "default": return
    config = rope_config(name)
    tables = [get_rope(c, max_len=2 * POSITIONS).table for c in (config, rope_config())]
    if name == "dynamic":   # the same as default up to the trained length
        assert torch.equal(tables[0][:POSITIONS], tables[1][:POSITIONS])
        tables = [t[POSITIONS:] for t in tables]
    assert (tables[0] - tables[1]).abs().max() > 0.1


def test_dynamic_rope_past_the_trained_length():
    "Position p turns as transformers turns it in the step that decodes token p."
    config = rope_config("dynamic")
    theirs, ours = LlamaRotaryEmbedding(config), get_rope(config, max_len=3 * POSITIONS)
    x = torch.randn(1, 1, 2, HEAD_DIM)
    for p in range(POSITIONS - 3, 3 * POSITIONS):
        cos, sin = theirs(x, torch.tensor([[p]]))
        wanted = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0][0]
        got = apply_rotary(x[0], *ours(torch.tensor([p])))
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_position_past_the_table_is_an_error():
    with pytest.raises(IndexError): get_rope(rope_config(), max_len=8)(torch.tensor([8]))


def test_old_and_new_spelling_of_rope_settings():
    old = SimpleNamespace(rope_theta=500.0, rope_scaling=dict(type="linear", factor=4.0),
                          hidden_size=64, num_attention_heads=4, max_position_embeddings=POSITIONS)
    assert torch.equal(get_rope(old).table, get_rope(rope_config("linear")).table)
    bare = SimpleNamespace(hidden_size=64, num_attention_heads=4, max_position_embeddings=POSITIONS)
    assert rope_parameters(bare)["rope_theta"] == 10_000.0
    assert rope_parameters(bare)["rope_type"] == "default"
    none = SimpleNamespace(rope_theta=7.0, rope_scaling=None, max_position_embeddings=8)
    assert rope_parameters(none)["rope_theta"] == 7.0


@pytest.mark.parametrize("cls", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_raw_config_files_of_every_family(cls):
    "A `config.json` before transformers 5, read as it stands and through the config class."
    raw = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
               max_position_embeddings=64, rope_theta=250.0, head_dim=HEAD_DIM,
               rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16))
    raw = json.loads(json.dumps(raw))
    assert torch.equal(get_rope(SimpleNamespace(**raw)).table, get_rope(cls(**raw)).table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in ROPES if name != "dynamic"])
def test_three_positions_per_token(name, dtype):
    "M-RoPE turns each section of a head by a position of its own, whatever the kind of turning."
    config = rope_config(name, cls=Qwen2_5_VLTextConfig, mrope_section=[2, 3, 3])
    positions = torch.randint(0, POSITIONS, (3, 21))
    heads = torch.randn(1, 21, 3, HEAD_DIM).to(dtype)
    cos_sin = Qwen2_5_VLRotaryEmbedding(config)(heads, positions[:, None])
    wanted = apply_rotary_pos_emb(heads, heads, *cos_sin, unsqueeze_dim=2)[0][0]
    ours = get_rope(config, dtype=dtype)
    got = apply_rotary(heads[0], *ours(positions))   # float32 rounds once less
    if dtype == torch.float32: torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    else: assert torch.equal(got, wanted)


def test_three_equal_positions_are_one():
    plain, mrope = get_rope(rope_config("yarn")), get_rope(rope_config("yarn", mrope_section=[2, 3, 3]))
    one = torch.randint(0, POSITIONS, (30,))
    for a, b, c in zip(plain(one), mrope(one), mrope(one.expand(3, -1))): assert torch.equal(a, b) and torch.equal(b, c)
    with pytest.raises(IndexError): mrope(torch.full((3, 1), POSITIONS))


def test_raw_config_files_of_qwen2_5_vl():
    "`mrope` in a file says where tokens stand; transformers reads it as the plain kind with sections."
    raw = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
               max_position_embeddings=64, rope_theta=250.0,
               rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]))
    raw = json.loads(json.dumps(raw))
    ours, theirs = get_rope(SimpleNamespace(**raw)), get_rope(Qwen2_5_VLTextConfig(**raw))
    assert ours.sections == theirs.sections and torch.equal(ours.table, theirs.table)


@pytest.mark.parametrize("kind", ["longrope", "su", "proportional", "nonsense"])
def test_an_unknown_rope_type_is_refused_by_name(kind):
    config = SimpleNamespace(rope_scaling=dict(type=kind, factor=2.0), hidden_size=64,
                             num_attention_heads=4, max_position_embeddings=64)
    with pytest.raises(ValueError, match=f"unknown rope type '{kind}'") as error: get_rope(config)
    assert all(known in str(error.value) for known in ROPE_TYPES)


@pytest.mark.parametrize("settings, words", [
    (dict(rope_type="linear"), "rope type 'linear' needs factor"),
    (dict(rope_type="llama3", factor=8.0), "needs low_freq_factor, high_freq_factor"),
    (dict(rope_type="mrope"), "rope type 'mrope' needs mrope_section"),
    (dict(mrope_section=[2, 3, 4]), r"three numbers with sum 8, got \[2, 3, 4\]"),
    (dict(mrope_section=[4, 4]), r"three numbers with sum 8, got \[4, 4\]"),
    (dict(mrope_section=[2, 3, 3], mrope_interleaved=True), "mrope_interleaved must be false"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor must be 1, got 0.5"),
    (dict(full_attention=dict(rope_theta=1.0)), "rope settings of their own for full_attention layers"),
])
def test_rope_settings_that_are_refused(settings, words):
    config = SimpleNamespace(rope_parameters=settings, hidden_size=64,
                             num_attention_heads=4, max_position_embeddings=64)
    with pytest.raises(ValueError, match=words): get_rope(config)
    odd = SimpleNamespace(hidden_size=60, num_attention_heads=4, max_position_embeddings=8)
    with pytest.raises(ValueError, match="head_dim must be even for rope, got 15"): get_rope(odd)


def test_rotation_keeps_what_attention_sees():
    "Scores depend on the distance alone, and lengths do not change."
    rope = get_rope(rope_config())
    q, k = torch.randn(2, 1, 1, HEAD_DIM)
    def turned(x, p): return apply_rotary(x, *rope(torch.tensor([p])))
    scores = [(turned(q, p + 5) * turned(k, p)).sum() for p in (0, 7, 40)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turned(q, 33).norm(), q.norm())


def test_apply_rotary_takes_a_strided_view_and_leaves_it_alone():
    rope = get_rope(rope_config())
    qkv = torch.randn(6, 5 * HEAD_DIM)
    before, cos_sin = qkv.clone(), rope(torch.arange(6))
    view = qkv[:, :3 * HEAD_DIM].unflatten(-1, (3, HEAD_DIM))
    out = apply_rotary(view, *cos_sin)
    assert out.is_contiguous() and torch.equal(qkv, before)
    torch.testing.assert_close(out, apply_rotary(view.contiguous(), *cos_sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(bias, dtype):
    theirs = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48, mlp_bias=bias)).to(dtype)
    ours = MLP(32, 48, bias, dtype)
    for kind in ("weight", "bias") if bias else ("weight",):
        for i, name in enumerate(("gate_proj", "up_proj")):
            layer = ours.gate_up_proj
            layer.weight_loader(getattr(layer, kind), getattr(getattr(theirs, name), kind).data, i)
        ours.down_proj.weight_loader(getattr(ours.down_proj, kind), getattr(theirs.down_proj, kind).data)
    x = torch.randn(5, 32).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))


def test_silu_and_mul():
    gate, up = torch.randn(2, 3, 8)
    both = torch.cat([gate, up], -1)
    before = both.clone()
    torch.testing.assert_close(SiluAndMul()(both), torch.nn.functional.silu(gate) * up)
    assert torch.equal(both, before)


def test_mlp_over_ranks_adds_up():
    gate_up, down, x = torch.randn(2, 48, 32), torch.randn(32, 48), torch.randn(5, 32)
    parts = []
    for rank in range(4):
        with tensor_parallel_group(rank, 4, all_reduce=lambda x: x): mlp = MLP(32, 48)
        for i in range(2): mlp.gate_up_proj.weight_loader(mlp.gate_up_proj.weight, gate_up[i], i)
        mlp.down_proj.weight_loader(mlp.down_proj.weight, down)
        parts.append(mlp(x))
    wanted = (torch.nn.functional.silu(x @ gate_up[0].T) * (x @ gate_up[1].T)) @ down.T
    torch.testing.assert_close(sum(parts), wanted, atol=1e-3, rtol=1e-4)
