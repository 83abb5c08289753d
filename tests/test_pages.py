"""Every page runs top to bottom in a kernel of its own, each as a test of its
own, and gives the outputs that are saved in it.

`python tools/nb.py check PAGE` does the same; tools/nb.py says what may differ.
"""
import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))
import nb          # noqa: E402

PAGES = sorted((ROOT / "nbs").glob("*.ipynb"))
LIMIT_S = 240  # pages take seconds; this only ends one that hangs


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_gives_its_saved_outputs(page):
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env.pop("MPLBACKEND", None)   # a kernel shows its pictures in the page
    done = subprocess.run([sys.executable, ROOT / "tools/nb.py", "check", page], cwd=ROOT,
                          capture_output=True, text=True, timeout=LIMIT_S, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


# ---------------------------------------------------------------- the comparison itself

@pytest.mark.parametrize("one, two", [
    ("1.25 ms", "900 µs"), ("took 3 s for 4 requests", "took 17.5 s for 4 requests"),
    ("12.3 tokens/s", "1,204 tokens/s"), ("88 requests per second", "7 requests per second"),
    ("<Block at 0x7f01aabbccdd>", "<Block at 0x7f01aabb0000>"), ("http://127.0.0.1:8000/v1", "http://127.0.0.1:43210/v1"),
    ("/tmp/tmpab12/model", "/tmp/tmpzz/model"), ("step    1.2 ms  a", "step  100.2 ms  a"),
])
def test_what_two_runs_need_not_share(one, two):
    assert nb.steady(one) == nb.steady(two)


@pytest.mark.parametrize("one, two", [
    ("4 requests", "5 requests"), ("16 blocks", "17 blocks"), ("[1, 2]", "[2, 1]"), ("3 steps", "4 steps"),
    ("Paris", "Rome"), ("0.25", "0.26"), ("625.1 MiB", "625.2 MiB"), ("128 tokens a step", "129 tokens a step"),
    ("seq_0", "seq_1"), ("slot 28", "slot 29"), ("ValueError: 9", "ValueError: 8"),
])
def test_what_two_runs_share(one, two):
    assert nb.steady(one) != nb.steady(two)


def page_of(*cells):
    "A notebook of code cells, each given as (source, text of its output)."
    return nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_code_cell(source, id=f"cell-{i}", outputs=[nbformat.v4.new_output("stream", text=text)])
        for i, (source, text) in enumerate(cells)])


def test_a_stale_output_is_found_and_named():
    saved, fresh = page_of(("1 + 1", "2"), ("f()", "old")), page_of(("1 + 1", "2"), ("f()", "new"))
    found = nb.differences(saved, fresh)
    assert len(found) == 1 and found[0].startswith("cell cell-1:") and "-stdout: old" in found[0] and "+stdout: new" in found[0]
    assert nb.differences(saved, copy.deepcopy(saved)) == []


def test_a_lost_or_added_output_is_found():
    saved = page_of(("f()", "text"))
    fresh = copy.deepcopy(saved)
    fresh.cells[0].outputs = []
    assert nb.differences(saved, fresh) and nb.differences(fresh, saved)
    picture = nbformat.v4.new_output("display_data", data={"image/png": "AAAA", "text/plain": "<Figure>"})
    other = nbformat.v4.new_output("display_data", data={"image/png": "BBBB", "text/plain": "<Figure>"})
    saved.cells[0].outputs, fresh.cells[0].outputs = [picture], [other]
    assert nb.differences(saved, fresh) == [], "pictures are compared by their being there"


def test_a_cell_that_varies_says_why():
    source = "#| varies: which thread comes first\nrace()"
    assert nb.varies(source) == "which thread comes first"
    assert nb.varies("race()  # varies: no directive") is None
    assert nb.differences(page_of((source, "a")), page_of((source, "b"))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_reasons_are_given(page):
    for cell in nbformat.read(page, as_version=4).cells:
        reason = nb.varies(cell.source) if cell.cell_type == "code" else None
        assert reason is None or len(reason.split()) >= 3, f"{cell.id}: say why its output varies"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_pictures_have_words(page):
    "`#| fig-alt: what there is to see`, for those who cannot see it; it is a line of YAML, so without a colon and a space."
    for cell in nbformat.read(page, as_version=4).cells:
        if not any("image/png" in out.get("data", {}) for out in cell.get("outputs", [])): continue
        words = re.search(r"^#\|\s*fig-alt:[ \t]*(.*)$", cell.source, re.M)
        assert words and len(words[1].split()) >= 5 and ": " not in words[1], f"{cell.id}: say in #| fig-alt: what the picture shows"
