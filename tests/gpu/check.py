"""The GPU check, part by part; see check.sh.

Each part is a process of its own with a time limit of its own: one that fails,
hangs or takes the device down does not stop the others. Rows come one a line,
so that those made before a part ended are kept.
"""
import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common import MARK, ROOT, Settings

TOTAL_S = {False: 455, True: 900}   # all parts together, by dry; a busy CPU is slow
PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec")


@dataclass
class Part:
    "One part: its module, its seconds, and whether it can be right or wrong."
    name: str
    gpu_s: float
    dry_s: float
    decides: bool        # its failure is the check's failure
    rows: list = field(default_factory=list)
    seconds: float = 0.0
    end: str = "not run" # "done", "failed", "out of time"
    tail: str = ""       # of what it said, if it did not end well


# Those of one group run side by side; nothing runs beside what is timed.
GROUPS = [
    [Part("kernels", 110, 300, True), Part("equality", 130, 300, True),
     Part("ranks", 100, 300, True)],
    [Part("attention", 45, 300, False)],
    [Part("throughput", 235, 300, False)],
    [Part("timeline", 50, 300, False)],
]


def run_part(part: Part, args, budget_s: float):
    "Run a part's process to its end or to the end of its time."
    env = os.environ | {"TRITON_INTERPRET": str(int(args.dry))} | ({"OMP_NUM_THREADS": "1"} if args.dry else {})
    command = [sys.executable, str(Path(__file__)), "--part", part.name, "--budget", f"{budget_s:.0f}",
               "--seed", str(args.seed)] + ["--dry"] * args.dry
    started, lines = time.monotonic(), []
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    # The part stops by itself at its budget; this is for one that cannot.
    watch = threading.Timer(budget_s + 15, lambda: os.killpg(process.pid, signal.SIGKILL))
    watch.start()
    for line in process.stdout:
        if line.startswith(MARK): part.rows.append(json.loads(line[len(MARK):]) | {"part": part.name})
        else:
            lines = [*lines[-60:], line]
            if args.verbose: sys.stderr.write(line)
    code, part.seconds = process.wait(), round(time.monotonic() - started, 1)
    watch.cancel()
    part.end = "done" if code == 0 else "out of time" if code == -signal.SIGKILL else "failed"
    if code: part.tail = "".join(lines)[-3000:]


def device_facts(dry: bool) -> dict:
    import torch
    if dry: return dict(device=f"CPU, {platform.machine()}", cuda=None)
    limits = torch.cuda.get_device_properties(0)
    return dict(device=limits.name, cuda=torch.version.cuda, memory_bytes=limits.total_memory,
                multiprocessors=limits.multi_processor_count,
                capability=f"{limits.major}.{limits.minor}")


def installed(package: str) -> str | None:
    try: return version(package)
    except PackageNotFoundError: return None


def verdict(parts: list[Part]) -> list[str]:
    "Everything that is wrong, in words; nothing: all is right."
    wrong = []
    for part in parts:
        if part.decides and part.end != "done": wrong.append(f"{part.name}: {part.end}")
        checked = [row for row in part.rows if "ok" in row]
        if part.decides and not checked: wrong.append(f"{part.name}: nothing was checked")
        wrong += [f"{part.name}: {row.get('what')}: {row.get('problem', 'wrong')}" for row in checked if not row["ok"]]
    return wrong


def report(parts: list[Part], wrong: list[str], args, started) -> dict:
    return dict(
        bench="gpu-check", date=started.isoformat(timespec="seconds"), dry=args.dry, seed=args.seed,
        **device_facts(args.dry),
        versions={"python": platform.python_version()} | {p: installed(p) for p in PACKAGES},
        correct=not wrong, wrong=wrong,
        parts=[dict(part=p.name, end=p.end, seconds=p.seconds, num_rows=len(p.rows)) | ({"tail": p.tail} if p.tail else {})
               for p in parts],
        rows=[row for p in parts for row in p.rows])


def run_all(args) -> int:
    import torch
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA device: run with --dry", file=sys.stderr)
        return 2
    started, end = datetime.now(timezone.utc), time.monotonic() + TOTAL_S[args.dry]
    parts = []
    for group in GROUPS:
        group = [part for part in group if not args.parts or part.name in args.parts]
        threads = []
        for part in group:
            budget = min(part.dry_s if args.dry else part.gpu_s, end - time.monotonic())
            parts.append(part)
            if budget < 5: part.end = "out of time"
            else: threads.append(threading.Thread(target=run_part, args=(part, args, budget)))
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        for part in group:
            bad = sum(row.get("ok") is False for row in part.rows)
            print(f"{part.name:12} {part.end:12} {part.seconds:6.1f} s {len(part.rows):5} rows, {bad} wrong", flush=True)
    wrong = verdict(parts)
    path = Path(args.json or ROOT / "build" / "gpu-check.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report(parts, wrong, args, started), indent=1) + "\n")
    for line in wrong: print("WRONG", line)
    for part in parts:
        if part.tail: print(f"--- {part.name}\n{part.tail}", file=sys.stderr)
    print("correct" if not wrong else f"{len(wrong)} things are wrong", "-", path)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--json", metavar="PATH", help="where to write; default build/gpu-check.json")
    parser.add_argument("--parts", nargs="+", choices=[p.name for group in GROUPS for p in group])
    parser.add_argument("--seed", type=int, default=None, help="default: the time, so that inputs are fresh")
    parser.add_argument("--verbose", action="store_true", help="show what the parts say")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seed is None: args.seed = int(time.time()) % 2**31
    if not args.part: return run_all(args)
    import_module(args.part).run(Settings(args.dry, args.budget, args.seed), *map(int, args.share.split("/")))
    return 0


if __name__ == "__main__": sys.exit(main())
