"""Build the documentation site into `_docs/` without Quarto.

nbdev turns the pages into `_proc/` (API entries, cross references, hidden
cells gone); smalldocs renders them by the same `_quarto.yml` Quarto reads.
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROC, DOCS = ROOT / "_proc", ROOT / "_docs"
NUMBER = re.compile(r"^\d+[a-zA-Z0-9]*_")


def site_name(name: str) -> str:
    "nbdev's cross references leave the number out: 43_x.ipynb is x.html."
    return NUMBER.sub("", name)


def rename_pages():
    "Give processed pages, and every link to one, the names nbdev links to."
    pages = sorted(PROC.glob("*.ipynb"))
    if len(pages) < 2: sys.exit(f"only {len(pages)} processed pages in {PROC}: nothing to publish")
    names = {p.name: site_name(p.name) for p in pages}
    if len(set(names.values())) < len(names): sys.exit("two pages get the same name on the site")
    link = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    for path in [*pages, PROC / "sidebar.yml"]:
        text = link.sub(lambda m: names[m[0]], path.read_text())
        # The file's name already is its output's name.
        path.write_text(re.sub(r'"output-file: [^"]*",?\s*', "", text))
    for path in pages: path.rename(path.with_name(names[path.name]))


def smalldocs(*args: str):
    subprocess.run([Path(sys.executable).parent / "smalldocs", *args], cwd=PROC, check=True)


def main():
    from nbdev.serve import proc_nbs
    for folder in (PROC, DOCS): shutil.rmtree(folder, ignore_errors=True)
    proc_nbs(path=str(ROOT / "nbs"), n_workers=2)
    shutil.copy(ROOT / "_quarto.yml", PROC / "_quarto.yml")
    shutil.copytree(ROOT / "nbs" / "images", PROC / "images", dirs_exist_ok=True)
    rename_pages()
    smalldocs("render", ".")
    smalldocs("check", ".")
    shutil.move(PROC / "_docs", DOCS)
    print(f"{len(list(DOCS.glob('*.html')))} pages in {DOCS.relative_to(ROOT)}/")


if __name__ == "__main__": main()
