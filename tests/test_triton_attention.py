"""The Triton kernels: right in the interpreter, clean from the compiler.

Triton decides on its first import whether kernels run in Python or on a GPU,
so each check is a process of its own, started with the switch it needs:

    TRITON_INTERPRET=1 python tests/test_triton_attention.py decode
    python tests/test_triton_attention.py decode --device cuda
    python tests/test_triton_attention.py compile --arch 90

Add --full for the whole grid instead of every pair of its values, and --table
to compile every tile that the table of sizes can give.
"""
import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

HEAD_DIMS, GROUPS = (64, 80, 96, 128), (1, 2, 3, 4, 5, 6, 7, 8)
BLOCK_SIZES, DTYPES = (8, 16, 24, 32), ("float32", "bfloat16", "float16")
WINDOWS, SMS = (None, 9, 40), (1, 40)   # few multiprocessors: no splits
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1.5e-3}   # absolute and relative

# (rows of the step, tokens after it) of each sequence, for block size b and
# g query heads per KV head; `many` rows are more than one tile takes.
def many(g): return 140 // g + 3

BATCHES = {
    "decode": lambda b, g: ([1, 1, 1, 1], [1, b, b + 1, 150]),
    "long": lambda b, g: ([1, 1], [1030, 33]),
    "drafts": lambda b, g: ([2, 1, 5], [2, 70, b]),
    "chunk": lambda b, g: ([many(g), 9], [many(g) + 2 * b, 9]),
    "mixed": lambda b, g: ([many(g), 1, 0, 3], [many(g), 67, 5, b]),
}

# No kernel may spill registers in a loop. Variants off the table's grid (odd
# groups, blocks, windows) may set a few numbers aside when a program starts
# and fetch them when it ends, up to a limit.
MAY_SET_ASIDE_BYTES = 32
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}   # of a program, by architecture


# ---------------------------------------------------------------- the cases

def pairwise(*axes, seed=0):
    "Few rows that hold every pair of values of any two axes (greedy)."
    rng = random.Random(seed)
    pairs = lambda row: {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(axes)), 2)}
    missing = set().union(*(pairs(row) for row in itertools.product(*map(range, map(len, axes)))))
    rows = []
    while missing:
        i, a, j, b = min(missing)
        tries = [[rng.randrange(len(axis)) for axis in axes] for _ in range(40)]
        for row in tries: row[i], row[j] = a, b
        best = max(tries, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(tuple(axis[k] for axis, k in zip(axes, best)))
    return rows


def cases(batch, full):
    "(head_dim, group, block_size, dtype, window, num_sms) for one kind of batch."
    axes = (HEAD_DIMS, GROUPS, BLOCK_SIZES, DTYPES, WINDOWS, SMS)
    if full: return [row for row in itertools.product(*axes)]
    rows = pairwise(*axes, seed=sorted(BATCHES).index(batch))
    return rows[::2] if batch == "mixed" else rows   # its two launches have their own grids


# ---------------------------------------------------------------- run in a process of its own

def make_step(query_lens, seq_lens, block_size, group, head_dim, dtype, window, device, padding=3, num_kv_heads=2,
              seed=0):
    "Query, cache and metadata of a step; NaN wherever no one may look."
    import torch
    from minengine.attention.metadata import AttentionMetadata
    from minengine.attention.triton import triton_write_kv
    rng = random.Random(seed)
    draw = lambda rows, heads: torch.randn(rows, heads, head_dim, generator=generator).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-tokens // block_size) for tokens in seq_lens]
    ids = list(range(sum(counts) + 3))
    rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    cache = torch.full((2, sum(counts) + 3, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    step = AttentionMetadata.from_lists(query_lens, seq_lens, tables, block_size, device)
    step.check(cache.shape[1], block_size)
    # Write what the step may see; a window's past may belong to others by now.
    whole = AttentionMetadata.from_lists(seq_lens, seq_lens, tables, block_size, device)
    for i, (rows, tokens) in enumerate(zip(query_lens, seq_lens)):
        if window is None: continue
        start = sum(seq_lens[:i])
        whole.slot_mapping[start:start + max(0, tokens - rows - window + 1)] = -1
    triton_write_kv(draw(sum(seq_lens), num_kv_heads).to(device), draw(sum(seq_lens), num_kv_heads).to(device),
                    cache, whole.slot_mapping)
    for i, table in enumerate(tables): step.block_table[i, len(table):] = 2**31 - 1
    query = draw(sum(query_lens) + padding, num_kv_heads * group).to(device)
    query[sum(query_lens):] = torch.nan
    return query, cache, step


def run_case(batch, head_dim, group, block_size, dtype_name, window, num_sms, device, seed=0):
    import torch
    import minengine.attention.triton as kernels
    from minengine.attention.reference import reference_attention
    if device == "cpu": kernels._device_limits = lambda device: (90, num_sms)
    dtype = getattr(torch, dtype_name)
    query_lens, seq_lens = BATCHES[batch](block_size, group)
    query, cache, step = make_step(query_lens, seq_lens, block_size, group, head_dim, dtype, window, device,
                                   num_kv_heads=1 if batch == "chunk" else 2, seed=seed)
    out = torch.full_like(query, torch.nan)
    scale = head_dim ** -0.5
    result = kernels.triton_attention(query, cache, step, scale, window, out)
    real = sum(query_lens)
    assert result is out and not out.isnan().any(), "NaN in the output"
    assert not out[real:].any(), "padding rows are not zero"
    wanted = reference_attention(query[:real].float(), cache.float(), step, scale, window)
    error = ((out[:real].float() - wanted).abs() / (1 + wanted.abs())).max().item()
    assert error < TOLERANCE[dtype_name], f"differs by {error}"
    launches = next(iter(step.plans.values()))
    return error, [launch.num_splits for launch in launches]


def run_cases(batch, full, device):
    for case in cases(batch, full):
        row = {"case": [batch, *case]}
        try: row["error"], row["splits"] = run_case(batch, *case, device)
        except Exception as problem: row["problem"] = f"{type(problem).__name__}: {problem}"[:500]
        print(json.dumps(row), flush=True)


def run_writes(device):
    "The KV write kernel against the plain one: padding, short mappings, slices of one tensor."
    import torch
    from minengine.attention.kv_cache import make_kv_cache, write_kv
    from minengine.attention.triton import triton_write_kv
    for dtype, heads, head_dim in itertools.product((torch.float32, torch.bfloat16), (1, 3), (64, 80)):
        qkv = torch.randn(7, 5 * heads * head_dim).to(dtype).to(device)
        key = qkv[:, 3 * heads * head_dim:4 * heads * head_dim].view(7, heads, head_dim)
        value = qkv[:, 4 * heads * head_dim:].view(7, heads, head_dim)
        slots = torch.tensor([5, -1, 17, 0, -1], device=device)   # two rows of padding behind
        ours = make_kv_cache(3, 8, heads, head_dim, dtype, device)
        theirs = ours.clone()
        triton_write_kv(key, value, ours, slots)
        write_kv(key, value, theirs, slots)
        problem = {} if torch.equal(ours, theirs) else {"problem": "caches differ"}
        print(json.dumps({"case": ["write", str(dtype), heads, head_dim], "error": 0.0} | problem), flush=True)
        triton_write_kv(key, value, ours, slots[:0])   # nothing to do
        for wrong in (torch.zeros(8, dtype=torch.int64, device=device),):
            try: triton_write_kv(key, value, ours, wrong)
            except ValueError as error: assert "8 slots" in str(error)
            else: raise AssertionError("more slots than rows")


def run_edges(device):
    "No rows, no sequences, only padding; a strided query; inputs that do not fit."
    import torch
    from minengine.attention.metadata import AttentionMetadata
    from minengine.attention.reference import reference_attention
    from minengine.attention.triton import triton_attention
    report = lambda name: print(json.dumps({"case": [name], "error": 0.0}), flush=True)
    query, cache, step = make_step([1, 3], [20, 9], 8, 2, 64, torch.float32, None, device, padding=0)
    empty = AttentionMetadata.from_lists([], [], [], 8, device)
    assert not triton_attention(query, cache, empty, 1.0).any()
    assert triton_attention(query[:0], cache, empty, 1.0).shape == (0, 4, 64)
    report("no sequences")
    idle = AttentionMetadata.from_lists([0, 0], [0, 5], [[], [1]], 8, device)   # a padded batch
    assert not triton_attention(query, cache, idle, 1.0).any()
    report("no queries")
    wide = torch.randn(4, 9 * 64, device=device)
    sliced = wide[:, 64:5 * 64].view(4, 4, 64)
    found = triton_attention(sliced, cache, step, 0.125)
    wanted = reference_attention(sliced.contiguous(), cache, step, 0.125)
    assert (found - wanted).abs().max() < 2e-5
    report("slice of a wider tensor")
    turned = torch.randn(4, 64, 4, device=device).transpose(1, 2)
    found = triton_attention(turned, cache, step, 0.125)
    assert (found - reference_attention(turned.contiguous(), cache, step, 0.125)).abs().max() < 2e-5
    report("scattered numbers")
    blind = AttentionMetadata(step.num_tokens, step.query_start_loc, step.seq_lens, step.block_table,
                              step.slot_mapping, step.max_query_len, step.max_seq_len)
    found = triton_attention(sliced, cache, blind, 0.125)
    assert torch.equal(found, triton_attention(sliced, cache, step, 0.125))
    report("no host copies")
    from minengine.attention.layer import Attention
    from minengine.attention.metadata import set_forward_context
    layer, rows = Attention(4, 64, 0.125, num_kv_heads=2, layer_index=0), []
    key, value = torch.randn(2, 4, 128, device=device)
    for backend in ("reference", "triton"):
        with set_forward_context(step, [cache.clone()], backend): rows.append(layer(query.flatten(1), key, value))
    assert (rows[0] - rows[1]).abs().max() < 2e-5
    report("through the attention layer")
    bad = {"do not fit": (query[:, :3], cache, 1.0, None), "the cache torch.float32": (query.half(), cache, 1.0, None),
           "contiguous": (query, cache.transpose(0, 1).contiguous().transpose(0, 1), 1.0, None),
           "at least 1, got 0": (query, cache, 1.0, 0)}
    for message, (q, kv, scale, window) in bad.items():
        try: triton_attention(q, kv, step, scale, window)
        except ValueError as error: assert message in str(error), error
        else: raise AssertionError(f"no error: {message}")
    report("bad input")


def run_addresses():
    "Slots and addresses are computed in 64 bits: block 2**27 of a pool that is not there."
    import torch
    import triton
    import triton.language as tl
    from minengine.attention.triton_kernels import _key_pointers
    globals().update(triton=triton, tl=tl, key_pointers=_key_pointers)

    @triton.jit
    def probe(cache, table, out, BLOCK: "tl.constexpr"):
        position = tl.arange(0, 16) + 16
        pointers = key_pointers(  # noqa: F821 - from globals(), as kernels see it
            cache, table, 1, position, position >= 0, True, 8, 128, 128, BLOCK)
        where = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(out + where, pointers.to(tl.int64, bitcast=True))

    cache, out = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(16, 128, dtype=torch.int64)
    probe[1,](cache, torch.tensor([0, 2**27, 0, 0], dtype=torch.int32), out, BLOCK=16)
    row, column = torch.arange(16)[:, None], torch.arange(128)[None, :]
    wanted = cache.data_ptr() + 2 * (((2**27 * 16 + row) * 8 + 1) * 128 + column)
    assert torch.equal(out, wanted)
    print(json.dumps({"case": ["addresses"], "error": 0.0}))


def table_variants():
    "Every tile that the table can give, with and without a split: (KernelShape, step, split)."
    import torch
    from minengine.attention.triton import KernelShape
    return [(KernelShape(4, 8, head_dim, 16, 0, dtype), step, split)
            for head_dim in (64, 128, 256) for dtype in (torch.float32, torch.bfloat16)
            for step in ("decode", "drafts", "prefill") for split in (False, True)]


def run_compile(arch, full, table):
    import torch
    from minengine.attention.triton import KernelShape, compile_ahead
    variants = table_variants() if table else None
    if full:
        shapes = pairwise(GROUPS, (2, 3, 4, 8), HEAD_DIMS, BLOCK_SIZES, (0, 512), (torch.float32, torch.bfloat16, torch.float16))
        variants = [(KernelShape(*shape), step, split) for shape in shapes
                    for step in ("decode", "drafts", "prefill") for split in (False, True)]
    for report in compile_ahead(arch, variants):
        print(json.dumps({"case": [report.kernel], "error": 0.0} | vars(report)), flush=True)


# ---------------------------------------------------------------- what pytest runs

def run(name, *args, interpret=True):
    "Rows that one process of this file prints; its problems, if any, fail the test."
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(interpret))}
    done = subprocess.run([sys.executable, __file__, name, *args], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, "nothing ran"
    problems = [row for row in rows if "problem" in row]
    assert not problems, "\n".join(f"{row['case']}: {row['problem']}" for row in problems)
    return rows


def test_pairwise_covers_the_grid():
    axes = (HEAD_DIMS, GROUPS, BLOCK_SIZES, DTYPES, WINDOWS, SMS)
    for batch in set(BATCHES) - {"mixed"}:
        rows = cases(batch, full=False)
        for i, j in itertools.combinations(range(len(axes)), 2):
            assert {(row[i], row[j]) for row in rows} == set(itertools.product(axes[i], axes[j])), batch


@pytest.mark.parametrize("batch", BATCHES)
def test_attention_in_the_interpreter(batch):
    rows = run(batch)
    if batch != "chunk": assert any(max(row["splits"]) > 1 for row in rows), "no case split its keys"
    assert any(min(row["splits"]) == 1 for row in rows), "no case went without a split"


def test_write_kv_in_the_interpreter():
    run("writes")


def test_edges_in_the_interpreter():
    run("edges")
    run("addresses")


def check_reports(rows, arch, may_spill=0):
    for row in rows:
        name = row["kernel"]
        assert not row["loop_spills"], f"{name} spills in a loop on sm_{arch}: {row['spill_bytes']} bytes"
        assert row["spill_bytes"] <= may_spill, f"{name} spills {row['spill_bytes']} bytes on sm_{arch}"
        assert row["shared_bytes"] <= SHARED_BYTES[arch], f"{name}: {row['shared_bytes']} bytes of shared memory"
        if name.startswith(("combine", "write")): continue
        assert row["wide_copies"] >= 4, f"{name}: keys and values do not travel in 16-byte copies"
        wanted = "-" if "fp32" in name else "wgmma" if arch == 90 and not name.startswith("decode") else "mma"
        assert row["matrix_unit"] == wanted, f"{name} multiplies with {row['matrix_unit']}"


@pytest.mark.parametrize("arch", (80, 90))
def test_compiles_without_spills(arch):
    check_reports(run("compile", "--arch", str(arch), interpret=False), arch)


def test_table_variants_cover_the_table():
    from minengine.attention.triton import _TILES
    wanted = {(arch, itemsize, step, head_dim) for (arch, itemsize, step), tiles in _TILES.items() for head_dim in tiles}
    found = {(arch, shape.dtype.itemsize, step, shape.head_pad) for arch in (80, 90) for shape, step, _ in table_variants()}
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("arch", (80, 90))
def test_every_tile_of_the_table_compiles_without_spills(arch):
    check_reports(run("compile", "--arch", str(arch), "--table", interpret=False), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", (80, 90))
def test_many_variants_compile_without_spills_in_loops(arch):
    rows = run("compile", "--arch", str(arch), "--full", interpret=False)
    check_reports(rows, arch, may_spill=MAY_SET_ASIDE_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
def test_full_grid_in_the_interpreter(batch):
    run(batch, "--full")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [*BATCHES, "writes", "edges"])
def test_on_the_gpu(batch):
    run(batch, "--device", "cuda", interpret=False)


def test_import_without_triton():
    "The module imports on a machine without Triton and says what is missing on use."
    code = """
import sys
sys.modules["triton"] = None
import torch
from minengine.attention.metadata import AttentionMetadata
from minengine.attention.triton import triton_attention
step = AttentionMetadata.from_lists([1], [1], [[0]], 8)
try: triton_attention(torch.zeros(1, 1, 16), torch.zeros(2, 1, 8, 1, 16), step, 1.0)
except ImportError as error: assert "pip install triton" in str(error)
else: raise AssertionError("ran without Triton")
"""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cpu_tensors_need_the_interpreter():
    code = """
import torch
from minengine.attention.metadata import AttentionMetadata
from minengine.attention.triton import triton_attention
step = AttentionMetadata.from_lists([1], [1], [[0]], 8)
try: triton_attention(torch.zeros(1, 1, 16), torch.zeros(2, 1, 8, 1, 16), step, 1.0)
except ValueError as error: assert "TRITON_INTERPRET=1" in str(error)
else: raise AssertionError("ran on the CPU")
"""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*BATCHES, "writes", "edges", "addresses", "compile"])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--table", action="store_true", help="compile every tile of the table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arch", type=int, default=90)
    args = parser.parse_args()
    if args.name == "compile": run_compile(args.arch, args.full, args.table)
    elif args.name == "writes": run_writes(args.device)
    elif args.name == "edges": run_edges(args.device)
    elif args.name == "addresses": run_addresses()
    else: run_cases(args.name, args.full, args.device)


if __name__ == "__main__": main()
