#!/usr/bin/env python3
"""The live page of a cache as people use it, in Debian's Chromium through playwright. Last line: `N passed, N failed`.

KV4=path/to/kv4 picks the tool (default: build/kv4 of this tree).
"""
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from running_cache_test import replay_with_page, running_cache, serving
from tool import equal, ok, run_tests

PATIENCE_MS = 120_000  # a machine may be busy
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def open_page(address):
    """A page of a browser that must not complain, and may ask nobody but the tool."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
                                         timeout=PATIENCE_MS)
        page, problems, asked = browser.new_page(), [], []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: problems.append(error))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        yield page
        equal(problems, [])
        assert all(url.startswith((address, "data:")) for url in asked), asked
        browser.close()


def test_live_page_of_a_running_cache():
    with tempfile.TemporaryDirectory() as folder:
        folder = str(Path(folder) / "gpu0")
        with running_cache(folder), serving(folder) as (_, server, first), open_page(first["address"]) as page:
            expect(page.locator("#status")).to_contain_text("prompts' tokens were found")
            expect(page.locator("#map i")).to_have_count(512)
            expect(page.locator("#tiers tr")).to_have_count(2)
            expect(page.locator("#tenants tr")).to_have_count(3)
            assert page.locator("#requests tr").count() >= 2
            # The map can be hovered: a block says what it is, and is marked.
            block = page.locator("#map i.held").first.element_handle()  # this one, whatever becomes of it
            block.hover()
            assert re.fullmatch(r"block \d+: (held by a request|kept, evictable|free)", block.get_attribute("title"))
            equal(block.evaluate("cell => getComputedStyle(cell).outlineStyle"), "solid")
            # It goes on by itself, and says when nobody is there any more.
            updates = int(page.get_attribute("body", "data-updates"))
            for _ in range(2):  # without a text for the page to evaluate: its policy forbids that
                now = page.get_attribute("body", "data-updates")
                expect(page.locator("body")).not_to_have_attribute("data-updates", now)
            points = page.get_attribute("#rate", "points").split()
            assert len(points) > updates, points
            server.terminate()
            expect(page.locator("#status")).to_contain_text("nobody serves this page any more")


def test_page_of_a_replay():
    with replay_with_page() as (_, _, address, state), open_page(address) as page:
        expect(page.locator("body")).to_have_attribute("data-updates", str(state["updates"]))
        expect(page.locator("#status")).to_have_text(state["headline"])
        equal(page.locator("#map i[title^='block ']").count(), 512)
        equal(len(page.get_attribute("#rate", "points").split()), len(state["rates"]))
        for table, cell in (("tiers", "host"), ("cache", "blocks evicted"), ("tenants", "256")):
            assert page.locator(f"#{table} td", has_text=cell).count() > 0, (table, cell)


def test_plan_page():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"
        ok("plan", "--context", "128K", "--requests", "4", "--html", str(path))
        with open_page(path.as_uri()) as page:
            expect(page.locator("svg").first).to_be_visible()
            equal(page.evaluate("document.body.dataset.plots"), str(page.locator("svg").count()))


if __name__ == "__main__":
    sys.exit(run_tests(globals()))
