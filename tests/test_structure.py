"""What holds the house together: pages and package agree, floors are kept.

Each check names the page or module it is about.
"""
import ast
import builtins
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minengine"
PAGES = sorted((ROOT / "nbs").glob("*.ipynb"))
MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts)
    for p in PACKAGE.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py"))

# A module may import from its own floor and those below.
FLOORS = {
    "config": 0, "sampling_params": 0, "outputs": 0, "tokenizer": 0, "output_text": 0,
    "model": 1, "attention": 1, "logits": 1, "parallel": 1, "inputs": 1, "rejection": 1, "ngram": 1,
    "distributed": 1, "processes": 0, "shm_ring": 0,
    "multimodal": 2, "v0": 3, "v1": 3, "llm": 4, "server": 4,
    "cli": 5, "bench": 5, "bench_serve": 5, "bench_images": 5, "bench_spec": 5, "bench_workers": 5, "snapshot": 5, "trace": 5, "trace_reader": 5, "drawing": 5, "view": 5,
    "replay": 5, "record": 5, "compare": 5,
}
LEAVES = {"cli", "bench", "bench_serve", "bench_images", "bench_spec", "bench_workers", "snapshot", "trace", "trace_reader", "drawing", "view", "replay", "record", "compare"}  # nobody imports these but each other


def cells(page: Path):
    return json.loads(page.read_text())["cells"]


def source(cell) -> str:
    return "".join(cell["source"])


def exported_module(page: Path) -> str | None:
    for cell in cells(page):
        found = re.search(r"^#\|\s*default_exp\s+(\S+)", source(cell), re.M)
        if found: return "minengine." + found[1]
    return None


def imports(module: str) -> set[str]:
    "Names of minengine modules that `module` imports anywhere in its code."
    path = ROOT / (module.replace(".", "/") + ".py")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import): found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[:-node.level]
                base = ".".join(parts + ([base] if base else []))
            found.add(base)
            found |= {f"{base}.{a.name}" for a in node.names}
    return {name for name in found if name in MODULES}


def room(module: str) -> str:
    return module.split(".")[1]


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    "A fresh export of all pages, beside the committed package."
    folder = tmp_path_factory.mktemp("export")
    files = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                           cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in files:
        if name.split("/")[0] not in ("nbs", "minengine", "settings.ini", "setup.py", "pyproject.toml"): continue
        if not (ROOT / name).is_file(): continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for command in ("nbdev_export", "nbdev_clean"):
        done = subprocess.run([Path(sys.executable).parent / command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return folder


def test_export_leaves_no_diff(exported):
    for path in sorted(PACKAGE.rglob("*.py")):
        again = exported / path.relative_to(ROOT)
        assert again.exists(), f"{path.relative_to(ROOT)} is not made by any page"
        assert again.read_text() == path.read_text(), f"{path.relative_to(ROOT)} differs from its page: export again"
    for path in sorted((exported / "minengine").rglob("*.py")):
        assert (ROOT / path.relative_to(exported)).exists(), f"{path.relative_to(exported)} was not committed"


def test_notebooks_are_clean(exported):
    for page in PAGES:
        again = (exported / page.relative_to(ROOT)).read_text()
        assert again == page.read_text(), f"{page.name}: run nbdev_clean"


def test_no_orphan_module_and_one_page_each():
    owners = {}
    for page in PAGES:
        module = exported_module(page)
        if module is None: continue
        assert module not in owners, f"{page.name} and {owners[module]} both export {module}"
        owners[module] = page.name
    assert sorted(owners) == MODULES


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_form(page):
    all_cells = cells(page)
    ids = [c["id"] for c in all_cells]
    assert len(set(ids)) == len(ids), "cell ids repeat"
    for cell in all_cells:
        assert not re.fullmatch(r"[0-9a-f]{8}", cell["id"]), f"cell id {cell['id']} is not a word"
    title = source(all_cells[0]).split("\n")
    assert title[0].startswith("# ") and title[-1].startswith("> "), "first cell: title and one '> ' line"
    assert len([line for line in title if line.strip()]) == 2, "first cell: nothing but title and '> ' line"
    for cell in all_cells:
        check_cell(cell)


def check_cell(cell):
    text, name = source(cell), cell["id"]
    if cell["cell_type"] == "markdown":
        assert "base64," not in text and ":::" not in text and "```{mermaid}" not in text, name
        for heading in re.findall(r"^#+ .*$", text, re.M):
            assert not heading.rstrip().endswith(" -"), f"{name}: {heading!r} would leave the site"
        return
    lines = text.split("\n")
    body = [i for i, line in enumerate(lines) if line.strip() and not line.startswith("#|")]
    late = [line for line in lines[body[0]:] if line.startswith("#|")] if body else []
    assert not late, f"{name}: directive after other lines: {late}"
    assert "import *" not in text, name
    exported = re.search(r"^#\|\s*exports?\b", text, re.M)
    if exported:
        assert not re.search(r"^\s*[%!]", text, re.M), f"{name}: magic in an exported cell"
        limit = 130 if re.search(r"^class ", text, re.M) else 45
        assert len(lines) <= limit, f"{name}: {len(lines)} lines in an exported cell"
    for out in cell["outputs"]:
        assert out["output_type"] != "error", f"{name}: saved output is an error"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_imports_stand_alone(page):
    "The site's build runs every cell that holds an import, with all that is in it."
    if exported_module(page) is None: return
    for cell in cells(page):
        text = source(cell)
        if cell["cell_type"] != "code" or re.search(r"^#\|\s*export", text, re.M): continue
        if re.search(r"^(?:from|import) ", text, re.M):
            assert cell["id"].startswith("imports"), f"{cell['id']}: move the imports to the imports cell"


def quoted_names(node) -> set[str]:
    "Names inside the quoted annotations of a function, or of a class's constructor."
    if isinstance(node, ast.ClassDef):
        return set().union(*(quoted_names(n) for n in node.body
                             if isinstance(n, ast.FunctionDef) and n.name == "__init__"))
    if not isinstance(node, ast.FunctionDef): return set()
    args = node.args
    notes = [a.annotation for a in args.args + args.kwonlyargs + args.posonlyargs] + [node.returns]
    texts = [n.value for note in notes if note for n in ast.walk(note)
             if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {n.id for text in texts for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_annotations_resolve_where_they_stand(page):
    "The site describes a function as soon as its cell has run: later names are unknown then."
    known = set(dir(builtins))
    for cell in cells(page):
        text = source(cell)
        if cell["cell_type"] != "code" or not re.search(r"^#\|\s*exports?\b", text, re.M): continue
        body = ast.parse(text).body
        for node in body:
            known |= {getattr(node, "name", "")} | {a.asname or a.name for a in getattr(node, "names", ())}
            known |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in body:
            if getattr(node, "name", "_").startswith("_"): continue
            unknown = quoted_names(node) - known
            assert not unknown, f"{cell['id']}: {node.name} is annotated with {unknown}, defined later"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_was_executed(page):
    "A page without any saved output was never run."
    code = [c for c in cells(page) if c["cell_type"] == "code"]
    assert not code or any(c["outputs"] for c in code), "no saved outputs: run the page"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_between_pages(page):
    for cell in cells(page):
        if cell["cell_type"] != "markdown": continue
        for target in re.findall(r"\]\(([^)#:\s]+\.(?:ipynb|svg|png))(?:#[^)]*)?\)", source(cell)):
            assert (page.parent / target).exists(), f"{cell['id']}: {target} is not there"


def test_sidebar_lists_every_page():
    listed = re.findall(r"[\w]+\.ipynb", (ROOT / "nbs" / "sidebar.yml").read_text())
    assert sorted(listed) == sorted(p.name for p in PAGES)
    numbered = [name for name in listed if name != "index.ipynb"]
    assert numbered == sorted(numbered), "the sidebar keeps the order of the numbers"


@pytest.mark.parametrize("module", MODULES)
def test_floors(module):
    own = room(module)
    assert own in FLOORS, f"{module}: no floor is known for {own}"
    for other in imports(module):
        assert FLOORS[room(other)] <= FLOORS[own], f"{module} imports {other} from above"
        assert {own, room(other)} != {"v0", "v1"}, f"{module} imports the other wing: {other}"
        if room(other) in LEAVES: assert own in LEAVES, f"{module} imports {other}"
    if module.startswith("minengine.v1.worker"):
        assert "minengine.v1.core.scheduler" not in imports(module), "a worker imports the scheduler"


# A model that sees images needs later pages; they are imported inside a function, and never for a text model.
DOORS = {
    ("25_v0_model_runner.ipynb", "minengine.v0.images"),
    ("26b_v0_executor.ipynb", "minengine.v0.distributed_executor"),
    ("27c_v0_input_preprocessor.ipynb", "minengine.v0.images"),
    ("54_v1_worker.ipynb", "minengine.v1.worker.encoder_runner"),
    ("55_v1_executor.ipynb", "minengine.v1.multiproc_executor"),
    ("55_v1_executor.ipynb", "minengine.v1.ray_executor"),
    ("56_v1_engine_core.ipynb", "minengine.multimodal.cache"),
    ("57d_v1_mp_client.ipynb", "minengine.multimodal.cache"),
    ("57e_v1_async_mp_client.ipynb", "minengine.multimodal.cache"),
    ("59_v1_processor.ipynb", "minengine.multimodal.cache"),
    ("59_v1_processor.ipynb", "minengine.multimodal.media"),
    ("59_v1_processor.ipynb", "minengine.multimodal.processor"),
}


def test_pages_import_lower_numbers_only():
    page_of = {exported_module(p): p.name for p in PAGES if exported_module(p)}
    for page in PAGES:
        # The tour shows the finished thing.
        if page.name in ("index.ipynb", "00_tour.ipynb"): continue
        for cell in cells(page):
            if cell["cell_type"] != "code": continue
            for module in re.findall(r"^\s*(?:from|import) (minengine[\w.]+)", source(cell), re.M):
                owner = page_of.get(module)
                if owner is None: continue
                # The command line names every benchmark; it imports one when asked.
                if page.name == "85_cli.ipynb" and module.startswith(("minengine.bench", "minengine.compare")): continue
                if (page.name, module) in DOORS:
                    assert not re.search(rf"^(?:from|import) {module}\b", source(cell), re.M), f"{page.name}: import {module} where it is needed"
                    continue
                assert owner < page.name, f"{page.name} ({cell['id']}) imports {module} from {owner}"


# V0 keeps its scheduler beside its workers; V1 in a folder of its own.
V0_SCHEDULING = ["sequence", "block_allocator", "prefix_caching", "cpu_gpu_allocator", "block_table",
                 "block_manager", "scheduling_budget", "queues", "passes", "scheduler"]
SCHEDULING = [m for m in MODULES if m.startswith("minengine.v1.core.")] + [f"minengine.v0.{m}" for m in V0_SCHEDULING]


@pytest.mark.parametrize("module", SCHEDULING)
def test_schedulers_import_no_torch(module):
    "Scheduling is plain Python: it must run where there is no torch."
    code = (f"import sys, {module}; "
            "bad = {'torch', 'transformers', 'zmq', 'fastapi'} & set(sys.modules); "
            "sys.exit(str(bad) if bad else 0)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{module}: {done.stderr}"


# Libraries are imported once; each module of ours then starts in a process that has seen none of the others.
IMPORT_ALONE = """
import importlib, json, os, sys, traceback
import fastapi, gguf, huggingface_hub, IPython, matplotlib.pyplot, msgspec, PIL.Image, prometheus_client, pydantic, safetensors.torch
import torch, torch._dynamo, torch.distributed, tqdm.auto, transformers, triton.language, uvicorn, zmq.asyncio
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
for module in sys.argv[1:]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        try: importlib.import_module(module); error = ""
        except BaseException: error = traceback.format_exc()
        os.write(writer, error.encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe: print(json.dumps([module, pipe.read()]), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def import_errors():
    done = subprocess.run([sys.executable, "-W", "error::SyntaxWarning", "-c", IMPORT_ALONE, *MODULES],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_alone(module, import_errors):
    assert import_errors[module] == "", import_errors[module]


def test_package_needs_no_notebook_tools():
    for module in MODULES:
        text = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        for tool in ("fastcore", "nbdev", "pytest", "IPython", "matplotlib"):
            found = re.search(rf"^(?:from|import) {tool}\b", text, re.M)
            assert not found, f"{module} imports {tool}"


def test_no_undefined_names():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "minengine", "tests", "tools"],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_version_is_in_one_place():
    version = re.search(r"^version = (\S+)", (ROOT / "settings.ini").read_text(), re.M)[1]
    assert f'__version__ = "{version}"' in (PACKAGE / "__init__.py").read_text()
