"Part 1: every kernel against the reference, on fresh inputs, NaN wherever no one may look."
import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from common import MARK, ROOT, Settings, emit, recorded

DTYPES = ("float32", "bfloat16", "float16")
# (head_dim, query heads per KV head): Llama-3.1-8B, Qwen3-0.6B, SmolLM2, odd ones
SHAPES = [(128, 4), (128, 2), (64, 3), (80, 1), (96, 7)]


def all_cases(tests, settings: Settings) -> list[tuple]:
    "Real shapes first, then every pair of values of the grid, shuffled."
    rng = random.Random(settings.seed)
    if settings.dry:
        return [(batch, 64, 2, 8, dtype, window, 40) for batch, dtype, window in zip(
            tests.BATCHES, (*DTYPES, "bfloat16", "float32"), (None, 9, None, None, 40))]
    first = [(batch, *shape, 16, dtype, None, 0)
             for batch in tests.BATCHES for shape in SHAPES for dtype in DTYPES]
    rest = [(batch, *case) for batch in tests.BATCHES for case in tests.cases(batch, False)]
    rest += [(batch, 256, 4, 16, dtype, None, 0) for batch in tests.BATCHES for dtype in DTYPES]
    rng.shuffle(rest)
    return first + rest


def run_share(tests, settings: Settings, share: int, shares: int):
    "Every `shares`-th case until the time is over; then say how many were left."
    mine = all_cases(tests, settings)[share::shares]
    num_done = 0
    for case in mine:
        if settings.left_s < 5: break
        name = " ".join(map(str, case[:6]))
        with recorded(name):
            error, splits = tests.run_case(*case, settings.device, seed=settings.seed + num_done)
            emit(what=name, ok=True, error=error, splits=splits)
        num_done += 1
    emit(what="attention cases", done=num_done, of=len(mine))


def run_small(tests, settings: Settings):
    "The write kernel and the edges, whose rows say what was checked."
    for name, check in (("writes", tests.run_writes), ("edges", tests.run_edges)):
        said = io.StringIO()
        with recorded(name), contextlib.redirect_stdout(said):
            check(settings.device)
        for line in said.getvalue().splitlines():
            if line.startswith(MARK): print(line, flush=True)   # its failure
            elif line.startswith("{"):
                row = json.loads(line)
                problem = {k: row[k] for k in ("problem",) if k in row}
                emit(what=" ".join(map(str, row["case"])), ok=not problem, **problem)


def run(settings: Settings, share: int = 0, shares: int = 1):
    sys.path.insert(0, str(ROOT / "tests"))
    num_processes = 1 if settings.dry else min(10, os.cpu_count() or 1)
    if shares == 1 and num_processes > 1:   # compiling takes most of the time
        command = [sys.executable, str(Path(__file__).parent / "check.py"), "--part", "kernels",
                   "--budget", f"{settings.left_s:.0f}", "--seed", str(settings.seed)]
        children = [subprocess.Popen([*command, "--share", f"{i}/{num_processes}"]) for i in range(num_processes)]
        codes = [child.wait() for child in children]
        if any(codes): sys.exit(f"processes ended with {codes}")
        return
    import test_triton_attention as tests
    if share == 0: run_small(tests, settings)
    run_share(tests, settings, share, shares)
