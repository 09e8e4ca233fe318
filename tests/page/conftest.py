"""A browser and a service for the page's tests."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright
from support.page_actions import ADA, DESKTOP, EDSGER, GRACE, HOSTILE, KURT
from support.page_kit import CHROMIUM_FLAGS, PageService, draw

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")  # no longer: while Playwright's event loop lives, tests cannot run their own
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        assert "PLSC_REQUIRE_CHROMIUM" not in os.environ, "there is no Chromium, which PLSC_REQUIRE_CHROMIUM asks for"
        pytest.skip("needs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageService]:
    service = PageService(tmp_path_factory.mktemp("page"))
    yield service
    service.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., PageService]]:
    """``serve(**settings)``: a service of the test's own."""
    started: list[PageService] = []

    def start(**settings: Any) -> PageService:
        started.append(PageService(tmp_path, **settings))
        return started[-1]

    yield start
    for service in started:
        service.stop()


@pytest.fixture
def people(service: PageService, request: pytest.FixtureRequest) -> str:
    """A collection of this test's own, with four persons."""
    name = service.collection(re.sub(r"\W", "-", request.node.name)[:60])
    service.enrol(name, "Ada Lovelace", [ADA], city="London", age=36)
    service.enrol(name, HOSTILE, [GRACE], **{"<b>note</b>": "<script>alert(2)</script>"})
    service.enrol(name, "Kurt Gödel", [KURT, draw(20)], city="Vienna", age=71)
    service.enrol(name, None, [EDSGER])
    return name


@pytest.fixture
def visit(chromium: Any, service: PageService) -> Iterator[Callable[..., Any]]:
    """``visit(collection)``: the page with that collection chosen; it may ask nobody else and may not fail unseen."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def go(collection: str | None = None, at: PageService = service, ready: bool = True, **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        expect.set_options(timeout=30_000)  # a loaded machine is slow: a wait that ends early costs nothing
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(f"a dialog: {dialog.message}"))
        page.on("console", lambda message: _listen(message, troubles))
        page.on("request", lambda asked: asked.url.startswith((at.url, "blob:", "data:")) or troubles.append(asked.url))
        page.on("filechooser", lambda _: None)  # from now on: told just before a key press, it would come too late
        page.goto(at.url)
        if ready:
            expect(page.locator("#health-word")).to_have_text("ready")
        if collection is not None:
            page.get_by_label("Collection", exact=True).select_option(collection)
        return page

    yield go
    for context in contexts:
        context.close()
    assert troubles == []


def _listen(message: Any, troubles: list[str]) -> None:
    """Browsers log every answer that is not 2xx: those are shown on the page and are no trouble."""
    if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
        troubles.append(message.text)
