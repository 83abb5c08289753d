"""Write and run the pages: readable cell ids, saved outputs.

    python tools/nb.py to-text   nbs/47_v1_scheduler.ipynb > page.txt
    python tools/nb.py from-text page.txt nbs/47_v1_scheduler.ipynb
    python tools/nb.py export    nbs/47_v1_scheduler.ipynb
    python tools/nb.py run       nbs/47_v1_scheduler.ipynb
    python tools/nb.py check     nbs/47_v1_scheduler.ipynb

A page as text is its cells, each under a line `%% md cell-id` or
`%% code cell-id`. `from-text` keeps the outputs of cells that did not change.

`run` executes a page in a new kernel and saves its outputs; `check` executes
it, saves nothing, and compares the outputs' text with the saved ones. Times,
rates, addresses, ports, process ids and names of temporary files may differ
(VARIES, below); if anything else in a cell's output does, the cell says why
in its first lines: `#| varies: which threads arrive first`.
"""
import argparse
import difflib
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbdev.clean import clean_nb
from nbdev.export import nb_export
from execnb.nbio import read_nb, write_nb

ROOT = Path(__file__).parent.parent
HEADER = re.compile(r"^%% (md|code) ([a-z0-9][a-z0-9-]*)$", re.M)
KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}
KINDS = {"md": "markdown", "code": "code"}


def to_text(path: Path) -> str:
    "The cells of a notebook as text, without outputs."
    names = {kind: short for short, kind in KINDS.items()}
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(f"%% {names[c.cell_type]} {c.id}\n{c.source}" for c in cells) + "\n"


def from_text(text: str, path: Path):
    "Write the notebook that `text` describes; unchanged cells keep outputs."
    parts = HEADER.split(text)
    if parts[0].strip(): raise SystemExit(f"text before the first cell: {parts[0][:60]!r}")
    old = {c.id: c for c in nbformat.read(path, as_version=4).cells} if path.exists() else {}
    cells, seen = [], set()
    for short, cell_id, source in zip(parts[1::3], parts[2::3], parts[3::3]):
        if cell_id in seen: raise SystemExit(f"cell id {cell_id!r} twice")
        seen.add(cell_id)
        source = source.strip("\n")
        cell = {"cell_type": KINDS[short], "id": cell_id, "metadata": {}, "source": source}
        if short == "code":
            before = old.get(cell_id)
            same = before is not None and before.source == source
            cell |= {"execution_count": None, "outputs": before.get("outputs", []) if same else []}
        cells.append(cell)
    nb = {"cells": cells, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}
    nbformat.write(nbformat.from_dict(nb), path)
    clean(path)


def clean(path: Path):
    "What `nbdev_clean` does, for one notebook."
    nb = read_nb(path)
    clean_nb(nb, clear_all=False, clean_ids=True)
    write_nb(nb, path)


def merge_streams(outputs):
    "Join neighbouring pieces of one stream, which arrive as timing has it."
    merged = []
    for out in outputs:
        last = merged[-1] if merged else None
        if last and out.output_type == last.output_type == "stream" and out.name == last.name:
            last.text += out.text
        else: merged.append(out)
    return merged


def execute(path: Path, timeout_s: int = 300):
    "The notebook after every cell has run, in order, in a new kernel."
    nb = nbformat.read(path, as_version=4)
    # A hint about widgets that names the reader's folders is no output of ours.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    client = NotebookClient(nb, timeout=timeout_s, kernel_name="python3",
                            resources={"metadata": {"path": str(path.parent)}})
    try: client.execute()
    except CellExecutionError as error: raise SystemExit(f"{path.name}: {error}")
    nb.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for cell in nb.cells:
        if cell.cell_type == "code": cell.outputs = merge_streams(cell.outputs)
    return nb


def run(path: Path):
    "Execute a page and save the outputs."
    nbformat.write(execute(path), path)
    clean(path)


MOST_LINES = 30   # shown of one cell's difference
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNIT = r"(?:ns|us|µs|μs|ms|s|sec|seconds?|minutes?|min)"
RATE = r"(?:it|tok|tokens|prompts?|requests?|req|steps?|[KMGT]?i?B|GFLOPS?|[TG]FLOP)"
# What no two runs share, each with the word it is compared as.
VARIES = [(re.compile(pattern), word) for pattern, word in [
    (r"\x1b\[[0-9;]*m", ""),                                     # colours
    (r"\b0x[0-9a-f]{6,}\b", "ADDRESS"),
    (r"(?<=127\.0\.0\.1:)\d+|(?<=localhost:)\d+", "PORT"),
    (r"(/private)?/(tmp|var/folders)/[\w./+-]+", "TEMPORARY"),
    # nbdev finds the line by the bare name, which both engines may have.
    (r"/blob/main/minengine/[\w/]+\.py#L\d+", "SOURCE"),
    (r"\b(pid|process)[ =]\d+", r"\1 PID"),
    (r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?", "DATE"),
    (rf"{NUMBER} ?{RATE}(?: ?/ ?|\s+(?:per|a|each)\s+){UNIT}\b", "RATE"),
    (rf"{NUMBER} ?{UNIT}\b(?:/\w+)?", "TIME"),
]]


def steady(text: str) -> str:
    "What of an output's text has to be the same in each run."
    for pattern, word in VARIES: text = pattern.sub(word, text)
    # A table's column is as wide as its longest time.
    return re.sub(r"[ \t]+", " ", text).strip()


def texts(cell) -> list[str]:
    "The outputs of a cell as text; of a picture, only that there is one."
    found = []
    for out in cell.get("outputs", []):
        if out["output_type"] == "stream": found.append((out["name"], out["text"]))
        if out["output_type"] == "error": found.append(("error", out["evalue"]))
        found += [(kind, value if kind.startswith("text/") else "")
                  for kind, value in sorted(out.get("data", {}).items())]
    # HTML with a tag to a line: a difference shows where it is.
    return [f"{kind}: {steady(''.join(value))}".replace("><", ">\n<") for kind, value in found]


def varies(source: str) -> str | None:
    "Why a cell's output is another one each time, if the cell says so."
    found = re.search(r"^#\|\s*varies:[ \t]*(.*)$", source, re.M)
    return found and found[1].strip()


def differences(saved, fresh) -> list[str]:
    "Each cell whose saved output is not what the code gives now."
    found = []
    for old, new in zip(saved.cells, fresh.cells, strict=True):
        if old.cell_type != "code" or varies(old.source) is not None: continue
        before, now = texts(old), texts(new)
        if before == now: continue
        lines = list(difflib.unified_diff("\n".join(before).split("\n"), "\n".join(now).split("\n"),
                                          "saved", "now", lineterm="", n=1))
        if len(lines) > MOST_LINES: lines[MOST_LINES:] = [f"… {len(lines) - MOST_LINES} more lines"]
        found.append(f"cell {old.id}:\n" + "\n".join(line[:200] for line in lines))
    return found


def check(path: Path):
    "Execute a page; end with a message if its saved outputs are other ones."
    fresh = execute(path)
    clean_nb(fresh, clear_all=False, clean_ids=True)
    found = differences(nbformat.read(path, as_version=4), fresh)
    if found: raise SystemExit(f"{path.name}: saved outputs are not those of the code: run the page\n" + "\n".join(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["to-text", "from-text", "export", "run", "check"])
    parser.add_argument("paths", nargs="+", type=Path)
    args = parser.parse_args()
    if args.verb == "from-text":
        source, target = args.paths
        from_text(source.read_text(), target)
        return
    for path in args.paths:
        if args.verb == "to-text": sys.stdout.write(to_text(path))
        if args.verb == "export": nb_export(path.resolve(), lib_path=ROOT / "minengine")
        if args.verb == "run": run(path.resolve())
        if args.verb == "check": check(path.resolve())


if __name__ == "__main__": main()
