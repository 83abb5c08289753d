"The built site: links, the reference, and what a browser sees."
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "tools"))
import docs          # noqa: E402
import docs_api      # noqa: E402

HERE = Path(__file__).parent
BLOB = "https://github.com/minengine/minengine/blob/main/"
MODULES = docs_api.read_package(ROOT)
PAGES = docs.read_pages()


# ---------------------------------------------------------------- without a browser

def test_no_link_leads_nowhere(site):
    assert docs.check_links(site) == []


def test_every_page_is_there(site):
    for page in PAGES: assert (site / f"{page.name}.html").exists(), page.source.name
    for module in MODULES: assert (site / f"api/{module.short}.html").exists(), module.name


def test_source_links_name_lines_that_exist(site):
    lines, checked = {}, 0
    for path in site.rglob("*.html"):
        for target in set(re.findall(rf'href="{BLOB}([^"]+)"', path.read_text())):
            file, _, line = target.partition("#L")
            if file not in lines:
                assert (ROOT / file).exists(), f"{path.name}: {target}"
                lines[file] = (ROOT / file).read_text().split("\n")
            if line: assert 1 <= int(line) <= len(lines[file]), f"{path.name}: {target}"
            checked += 1
    assert checked > 500


def entry_of(text: str, name: str) -> str:
    "The part of a reference page that is about one name."
    start = text.index(f'id="{name}"')
    end = re.compile(r'<h[23] class="anchored"').search(text, text.index("</h", start))
    return text[start:end.start() if end else len(text)]


@pytest.mark.parametrize("module", [m.name for m in MODULES])
def test_reference_has_every_public_name_and_parameter(site, module):
    "The reference is read from the source; Python itself says what it must hold."
    there = importlib.import_module(module)
    text = (site / f"api/{module.partition('.')[2]}.html").read_text()
    for name in there.__all__:
        assert f'id="{name}"' in text, f"{module}.{name} is not in the reference"
        value = getattr(there, name)
        if not inspect.isfunction(value): continue
        entry = entry_of(text, name)
        parameters = inspect.signature(value).parameters
        if parameters: assert "<table" in entry, f"{name}: no table"
        for parameter in parameters.values():
            star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            assert f"<code>{star}{parameter.name}</code>" in entry, f"{name}: {parameter.name} is not in its table"
    for name, value in vars(there).items():
        if name not in there.__all__ or not inspect.isclass(value): continue
        for method, code in vars(value).items():
            if not method.startswith("_") and (inspect.isfunction(code) or isinstance(code, property)):
                if getattr(code, "__module__", module) == module and hasattr(code, "__code__") and "<" in code.__code__.co_filename: continue
                assert f'id="{name}.{method}"' in text, f"{module}.{name}.{method} is not in the reference"


@pytest.mark.parametrize("page, name, target", [
    ("v1_scheduler.html", "Scheduler", "v1_scheduler.html#scheduler"),
    ("v0_scheduler.html", "Scheduler", "v0_scheduler.html#scheduler"),
    ("v1_free_block_queue.html", "KVCacheBlock", "v1_free_block_queue.html#kvcacheblock"),
    ("api/v1.core.free_block_queue.html", "KVCacheBlock", "v1.core.free_block_queue.html#KVCacheBlock"),
])
def test_names_lead_to_the_entry_that_is_meant(site, page, name, target):
    assert re.search(rf'<a href="{re.escape(target)}">(<code>)?{name}<', (site / page).read_text())


@pytest.mark.parametrize("engine, other", [("v0", "v1"), ("v1", "v0")])
def test_pages_of_one_engine_mean_its_own_names(site, engine, other):
    "A name that both engines have leads to this page's engine."
    both = {e.name for m in MODULES for e in m.entries if m.short.startswith(f"{engine}.")} \
        & {e.name for m in MODULES for e in m.entries if m.short.startswith(f"{other}.")}
    assert "Scheduler" in both
    for path in site.glob(f"{engine}_*.html"):
        for target, name in re.findall(r'<a href="([^"]+)"><code>(\w+)</code></a>', path.read_text()):
            if name in both: assert not target.removeprefix("api/").startswith(other), f"{path.name}: {name} leads to {target}"


# ---------------------------------------------------------------- in a browser

def faults(visits: dict, kind) -> dict:
    return {name: found for name, visit in visits.items() if (found := kind(visit))}


def test_every_page_loads_without_a_complaint(visits):
    assert len(visits) >= len(PAGES) + len(MODULES)
    assert faults(visits, lambda v: v["messages"]) == {}
    assert faults(visits, lambda v: not v["wide"]["title"] or v["wide"]["words"] < 15) == {}


def test_every_picture_is_there_and_has_words(visits):
    assert faults(visits, lambda v: v["wide"]["broken"]) == {}
    assert faults(visits, lambda v: v["wide"]["silent"]) == {}
    assert faults(visits, lambda v: v["wide"]["repeated"]) == {}, "ids repeat on a page"


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_nothing_overflows(visits, size):
    "At 1280 and at 390 pixels: what is wider than the screen scrolls in its own box."
    assert faults(visits, lambda v: v[size]["overflowing"] or v[size]["scrollWidth"] > v[size]["width"]) == {}


def search(page, words: str):
    page.fill("#quarto-search input", words)
    page.wait_for_selector(".search-result", timeout=20_000)
    return [a.get_attribute("href") for a in page.query_selector_all(".search-result")]


@pytest.mark.parametrize("words, first", [
    ("free block queue", "v1_free_block_queue.html"),
    ("Free Block", "v1_free_block_queue.html"),
    ("FreeKVCacheBlockQueue.popleft", "api/v1.core.free_block_queue.html"),
    ("prefix caching allocator", "v0_prefix_caching.html"),
    ("persistent batch", "v1_input_batch.html"),
])
def test_search_finds(browser, address, words, first):
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    found = search(page, words)
    assert first in [href.removeprefix("./").split("#")[0] for href in found[:3]], found
    page.keyboard.press("Escape")


def test_search_result_opens_its_page(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/api/index.html")   # links are relative, also from a folder
    search(page, "free block queue")
    page.click(".search-result >> nth=0")
    page.wait_for_url("**/v1_free_block_queue.html*")
    assert page.inner_text("h1") == "Free block queue"


def test_search_without_a_hit_says_so(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    page.fill("#quarto-search input", "xyzzyplugh")
    assert page.wait_for_selector(".search-none", timeout=20_000).inner_text() == "No results"


TEXTS = ["main p", "main pre code", "main td", ".sidebar-link", "#TOC a", ".navbar .nav-link", ".search-result-title",
         ".search-result-section", ".search-result-text", ".page-source", ".api-kind"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(browser, address, scheme):
    "What the system prefers is shown, and every kind of text has contrast 4.5 or more (3 on the bar)."
    page = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900}).new_page()
    for name in ("v1_scheduler.html", "api/v1.core.scheduler.html"):
        page.goto(f"{address}/{name}")
        search(page, "free block queue")
        page.wait_for_timeout(300)   # the theme fades in
        assert page.evaluate("document.documentElement.classList.contains('quarto-dark')") == (scheme == "dark")
        found = page.evaluate((HERE / "contrast.js").read_text(), TEXTS)
        weak = {s: round(r, 2) for s, r in found.items() if r is not None and r < (3 if "navbar" in s else 4.5)}
        assert not weak, f"{name}, {scheme}: {weak}"
        assert sum(r is not None for r in found.values()) >= len(TEXTS) - 2, found


def test_toggle_changes_the_scheme_and_stays(browser, address):
    page = browser.new_context(color_scheme="light").new_page()
    page.goto(f"{address}/index.html")
    is_dark = "document.documentElement.classList.contains('quarto-dark')"
    assert not page.evaluate(is_dark)
    page.click(".quarto-color-scheme-toggle")
    page.wait_for_function(is_dark)
    page.goto(f"{address}/glossary.html")
    assert page.evaluate(is_dark)


def test_phone_can_reach_list_and_search(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{address}/v1_scheduler.html")
    page.click(".quarto-btn-toggle >> nth=0")
    page.wait_for_selector("#quarto-sidebar.show")
    page.keyboard.press("Escape")
    page.click("#quarto-sidebar-glass", position={"x": 380, "y": 400})
    page.click(".navbar-toggler")
    page.wait_for_selector("#navbarCollapse.show")
    assert "v1_free_block_queue.html" in search(page, "free block queue")[0]
    box = page.query_selector(".smalldocs-search-results").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 391, box
