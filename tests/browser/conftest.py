"""The browser's fixtures: a JupyterLab and a Chromium that all tests of a module share."""

from __future__ import annotations

import pytest
from lab import FLAGS, Server, chromium_path


@pytest.fixture(scope="module")
def chromium():
    if chromium_path() is None:
        pytest.skip("no Chromium: apt install chromium, or name a browser by the variable CHROMIUM")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(chromium, tmp_path_factory):
    one = Server(tmp_path_factory.mktemp("lab"))
    yield one
    one.close()


def pytest_exception_interact(node, call):
    """Keep a picture of the page on which a test has failed; while fixtures are taken down, there is none any more."""
    notebook = getattr(node, "funcargs", {}).get("notebook")
    if notebook is not None and call.when == "call":
        notebook.picture(f"failure-{node.name}", notebook.page)
