"""The pages for users of both engines: the map is complete, the glossary leads somewhere,
each of the ten pages that users asked for is there, and every exercise has its answer.
"""
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NBS = ROOT / "nbs"
PAGES = sorted(NBS.glob("*.ipynb"))


def words(page: Path) -> str:
    "All sources of a page; what is in its outputs does not count."
    return "\n".join("".join(c["source"]) for c in json.loads(page.read_text())["cells"])


def markdown(page: Path) -> str:
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def rows(text: str) -> list[list[str]]:
    "Cells of each row of a page's tables, but for their heads."
    found = []
    for table in re.findall(r"(?:^\|.*\|\n?)+", text, re.M):
        lines = table.strip().split("\n")
        assert re.fullmatch(r"[|\- ]+", lines[1]), f"no head: {lines[0]}"
        found += [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return found


# ---------------------------------------------------------------- the map of modules

MAP = markdown(NBS / "98b_module_map.ipynb")
NAMED = re.findall(r"\[([a-z_0-9.]+)\]\((\w+\.ipynb)\)", MAP)


def package_modules() -> set[str]:
    files = [p.relative_to(ROOT / "minengine").with_suffix("") for p in (ROOT / "minengine").rglob("*.py")]
    return {".".join(f.parts) for f in files if not f.name.startswith("_")}


def test_the_map_has_every_module_and_no_other():
    named, there = {module for module, _ in NAMED}, package_modules()
    assert not there - named, f"not on nbs/98b_module_map.ipynb: {sorted(there - named)}"
    assert not named - there, f"on the map, and no module: {sorted(named - there)}"


def test_the_map_leads_to_the_page_that_exports_the_module():
    for module, page in NAMED:
        exported = re.search(r"^#\|\s*default_exp\s+(\S+)", words(NBS / page), re.M)
        assert exported and exported[1] == module, f"{page} does not export {module}"


def test_wings_are_in_their_columns():
    for row in rows(MAP):
        if len(row) != 5: continue
        for wing, cell in (("v0.", row[1]), ("v1.", row[2])):
            for module, _ in re.findall(r"\[([a-z_0-9.]+)\]\((\w+\.ipynb)\)", cell):
                assert module.startswith(wing), f"{row[0]}: {module} in the other wing's column"


def test_names_of_the_map_are_there():
    names = re.findall(r"`([a-z_0-9.]+):(\w+)`", MAP)
    assert len(names) > 30
    for module, name in names:
        assert hasattr(importlib.import_module(f"minengine.{module}"), name), f"no {name} in {module}"


def test_links_to_vllm_are_of_the_release():
    for page in PAGES:
        for link in re.findall(r"https://github\.com/vllm-project/vllm/(?:blob|tree)/([^/)]+)", markdown(page)):
            assert link == "v0.7.3", f"{page.name}: a link to {link}"


# ---------------------------------------------------------------- the glossary

GLOSSARY = rows(markdown(NBS / "99_glossary.ipynb"))


def plain(text: str) -> str:
    "Words alone: no marks, no hyphens, one space between two."
    return " ".join(re.sub(r"[*`_-]", " ", text).lower().split())


def uses(text: str, term: str) -> bool:
    "A word of the text begins with the term; plurals do."
    return re.search(r"\b" + re.escape(term), text) is not None


@pytest.mark.parametrize("row", GLOSSARY, ids=lambda row: re.sub(r"\W+", "-", row[0]).strip("-"))
def test_a_term_leads_to_pages_that_use_it(row):
    pages = re.findall(r"\]\((\w+\.ipynb)\)", row[-1])
    assert pages, f"{row[0]}: no page"
    texts = {page: plain(words(NBS / page)) for page in pages}
    terms = [plain(re.sub(r" \(of .*\)", "", t)) for t in row[0].split(",")]   # "delta (of M-RoPE)"
    for term in terms: assert any(uses(text, term) for text in texts.values()), f"{term!r} is not on {', '.join(pages)}"
    for page, text in texts.items(): assert any(uses(text, term) for term in terms), f"{page} uses none of {row[0]}"


def test_a_term_is_defined_once():
    terms = [plain(term) for row in GLOSSARY for term in row[0].split(",")]
    twice = {term for term in terms if terms.count(term) > 1}
    assert not twice, f"defined more than once: {twice}"


@pytest.mark.parametrize("term", """
    num_computed_tokens, num_cached_tokens, num_scheduled_tokens, num_prompt_tokens, num_output_tokens,
    m-rope, delta (of m-rope), window (of a tower), placeholder, patch, tower, merger, span, encoder budget, encoder cache, image cache, draft, proposer,
    acceptance, rejection, bonus token, recovered token, lookahead slots, rank, tensor parallel, all-reduce, ring
    """.replace("\n", " ").split(","), ids=str.strip)
def test_words_that_must_be_there(term):
    known = {plain(t) for row in GLOSSARY for t in row[0].split(",")}
    assert plain(term) in known


# ---------------------------------------------------------------- what users asked for

ASKED = {  # the ten pages, and words that show that they are about it
    "a request's life, V0 and V1": ("00_tour", ["prefill", "decode", "Through V1", "V0"]),
    "counters": ("98c_block_edges", ["num_computed_tokens", "just sampled"]),
    "block edges by hand": ("98c_block_edges", ["edge", "block_size"]),
    "preemption: recompute and swap": ("95c_preemption", ["recompute", "swap"]),
    "the key of the prefix cache": ("42_v1_block_hash", ["image", "cache_salt", "lora"]),
    "the sampler's order, raw and processed": ("50_v1_sampler", ["processed", "raw", "temperature"]),
    "detokenising and stop strings": ("04b_output_text", ["stop string", "held back"]),
    "processes": ("98e_processes_for_users", ["__main__", "breakpoint", "notebook"]),
    "what fits": ("98f_what_fits", ["weights", "KV cache", "what_fits"]),
    "what differs on purpose": ("98g_not_vllm", ["on purpose", "why"]),
}


@pytest.mark.parametrize("subject", ASKED)
def test_what_users_asked_for_has_a_page(subject):
    page, signs = ASKED[subject]
    text = words(NBS / f"{page}.ipynb").lower()
    for sign in signs: assert sign.lower() in text, f"{page} does not mention {sign}"


def test_no_word_of_difference_is_without_a_cell():
    "Every heading in bold on 98a is followed by a cell that runs."
    cells = json.loads((NBS / "98a_differences.ipynb").read_text())["cells"]
    checked = 0
    for cell, following in zip(cells, cells[1:]):
        text = "".join(cell["source"])
        if cell["cell_type"] != "markdown" or not re.match(r"(## .*\n\n)?\*\*(?!\d)", text): continue
        if text.startswith("**In short"): continue
        checked += 1
        assert following["cell_type"] == "code" and following["outputs"], f"{cell['id']}: nothing runs here"
    assert checked >= 18


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_exercises_have_folded_answers(page):
    for cell in json.loads(page.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "markdown" or not text.startswith("## Try it"): continue
        asked, answered = len(re.findall(r"^\*\*\d+\.\*\*", text, re.M)), text.count("<details>")
        assert asked and asked == answered == text.count("</details>"), f"{cell['id']}: {asked} asked, {answered} answered"
