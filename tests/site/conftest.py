"""The built site, and what a browser saw on each of its pages.

Both are made once for all test processes. MINENGINE_SITE names a site that is
built already (.ci/run sets it); else it is built into a temporary folder.
Without Chromium the tests that need it are skipped; MINENGINE_CHROMIUM names
one that is not on the PATH.
"""
import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BUILD_LIMIT_S = 900
# What a page says of itself, at the width it has now.
LOOK = (Path(__file__).parent / "look.js").read_text()
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    "A folder that all test processes of this run share."
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def site(shared):
    "The folder of the built site."
    if given := os.environ.get("MINENGINE_SITE"):
        assert (Path(given) / "index.html").exists(), f"MINENGINE_SITE={given} holds no site"
        return Path(given)
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            done = subprocess.run([sys.executable, ROOT / "tools/docs.py", "--out", folder], cwd=ROOT,
                                  capture_output=True, text=True, timeout=BUILD_LIMIT_S)
            assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return folder


def find_chromium() -> str | None:
    return os.environ.get("MINENGINE_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="session")
def address(site):
    "The site, served."
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def started_browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: the site is not looked at")
    path = find_chromium()
    if path is None: pytest.skip("no Chromium: the site is not looked at")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser():
    with started_browser() as browser: yield browser


def visit_all(site: Path, address: str) -> dict:
    "Open every page, wide and narrow, and write down what is wrong with it."
    visits = {}
    with started_browser() as browser:
        page = browser.new_page(viewport=WIDE)
        seen = []
        page.on("console", lambda m: seen.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: seen.append(f"exception: {e}"))
        # What the browser gives up because the next page is opened is no fault of the site.
        page.on("requestfailed", lambda r: None if r.failure == "net::ERR_ABORTED" else seen.append(f"failed: {r.url}: {r.failure}"))
        page.on("response", lambda r: seen.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
        page.on("request", lambda r: None if r.url.startswith((address, "data:")) else seen.append(f"from elsewhere: {r.url}"))
        for path in sorted(site.rglob("*.html")):
            name = path.relative_to(site).as_posix()
            seen.clear()
            page.set_viewport_size(WIDE)
            page.goto(f"{address}/{name}", wait_until="load")
            wide = page.evaluate(LOOK)
            page.set_viewport_size(PHONE)
            narrow = page.evaluate(LOOK)
            visits[name] = {"messages": list(seen), "wide": wide, "narrow": narrow}
    return visits


@pytest.fixture(scope="session")
def visits(site, address, shared):
    "For each page what the browser said, and what LOOK found, wide and narrow."
    kept = shared / "visits.json"
    with FileLock(shared / "visits.lock"):
        if not kept.exists(): kept.write_text(json.dumps(visit_all(site, address)))
    return json.loads(kept.read_text())
