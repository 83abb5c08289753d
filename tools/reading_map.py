"""Print the index's reading map: the parts of the sidebar, their pages, minutes to read each.

    python tools/reading_map.py            the table, to paste into nbs/index.ipynb
    python tools/reading_map.py --check    exit with 1 if the index has another one

Names that pages have in the index are kept; a new page gets its title.
"""
import json
import math
import re
import sys
from pathlib import Path

import yaml

NBS = Path(__file__).parent.parent / "nbs"
WORDS_A_MINUTE, LINES_A_MINUTE = 240, 20   # a reader of prose, of code


def cells(page: str) -> list[dict]:
    return json.loads((NBS / page).read_text())["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def minutes(page: str) -> int:
    "Time to read a page once, exercises not counted; in fives."
    words = lines = 0
    for cell in cells(page):
        text = source(cell)
        if text.startswith("#| hide"): continue
        if cell["cell_type"] == "markdown": words += len(text.split())
        else: lines += sum(bool(line.strip()) for line in text.splitlines())
    return max(5, 5 * round((words / WORDS_A_MINUTE + lines / LINES_A_MINUTE) / 5))


def title(page: str) -> str:
    first = source(cells(page)[0]).splitlines()[0].removeprefix("# ")
    word = first.split()[0]
    is_name = word != "A" and (word[1:] != word[1:].lower() or re.search(r"\d", word) or word.isupper())
    return first if is_name else first[0].lower() + first[1:]


def known_names() -> dict[str, str]:
    text = "\n".join(source(cell) for cell in cells("index.ipynb") if cell["cell_type"] == "markdown")
    table = text[text.index("| Part |"):] if "| Part |" in text else ""
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return {page: name for name, page in re.findall(r"\[([^\]]+)\]\((\w+\.ipynb)\)", "\n".join(rows))}


def reading_map() -> str:
    names, total = known_names(), 0
    rows = ["| Part | Pages, with minutes | Hours |", "|---|---|---|"]
    for part in yaml.safe_load((NBS / "sidebar.yml").read_text())["website"]["sidebar"]["contents"]:
        if isinstance(part, str): continue
        times = {page: minutes(page) for page in part["contents"]}
        pages = " · ".join(f"[{names.get(page) or title(page)}]({page}) {time}" for page, time in times.items())
        total += sum(times.values())
        rows.append(f"| {part['section']} | {pages} | {math.ceil(sum(times.values()) / 30) / 2:g} |")
    rows.append(f"| All | | {math.ceil(total / 60)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    table = reading_map()
    if "--check" not in sys.argv: print(table)
    elif table not in "\n".join(source(cell) for cell in cells("index.ipynb")):
        sys.exit("the index's reading map is old: python tools/reading_map.py prints the new one")
