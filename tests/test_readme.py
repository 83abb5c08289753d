"README.md is the index page, and what it promises is there."
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_the_index_page():
    assert (ROOT / "README.md").read_text() == load_tool("readme").readme(), "run: python tools/readme.py"


def test_readme_is_short_and_its_links_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_every_page_is_in_the_reading_map():
    text = (ROOT / "README.md").read_text()
    pages = [p for p in (ROOT / "nbs").glob("[0-9]*.ipynb")]
    missing = [p.name for p in pages if f"nbs/{p.name}" not in text]
    assert not missing, f"the index does not list {missing}"
