"""Write and run the pages: readable cell ids, saved outputs.

    python tools/nb.py to-text   nbs/47_v1_scheduler.ipynb > page.txt
    python tools/nb.py from-text page.txt nbs/47_v1_scheduler.ipynb
    python tools/nb.py export    nbs/47_v1_scheduler.ipynb
    python tools/nb.py run       nbs/47_v1_scheduler.ipynb

A page as text is its cells, each under a line `%% md cell-id` or
`%% code cell-id`. `from-text` keeps the outputs of cells that did not change.
"""
import argparse
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


def run(path: Path, timeout_s: int = 300):
    "Execute every cell in order in a new kernel and save the outputs."
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
    nbformat.write(nb, path)
    clean(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["to-text", "from-text", "export", "run"])
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


if __name__ == "__main__": main()
