"""The four persons of the page's tests, and what its users do: look, press Tab, choose, open."""

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from support.page_kit import cosine, draw

PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 860}
HOSTILE = "<img src=x onerror=alert(1)>"
AXE = Path(__file__).parents[1] / "page" / "axe" / "axe.min.js"
TABS = ("Search", "Compare", "Enrol", "Browse", "Service")

ADA, GRACE, KURT, EDSGER = (draw(seed) for seed in range(4))
ADA_AGAIN = draw(10, like=ADA)


def expected_matches(query: Any) -> list[tuple[str, ...]]:
    """Name, score and judgement of the four persons, best first, as numpy has it."""
    faces = {
        "Ada Lovelace": [ADA],
        HOSTILE: [GRACE],
        "Kurt Gödel": [KURT, draw(20)],
        "Person": [EDSGER],
    }
    scores = {name: max(cosine(query, face) for face in own) for name, own in faces.items()}
    return [
        (name, f"{score:.3f}", "possible match" if score >= 0.5 else "below threshold")
        for name, score in sorted(scores.items(), key=lambda item: -item[1])
    ]


def shown_matches(page: Any) -> list[tuple[str, ...]]:
    """Name, score and judgement of the matches on the page; who has no name is called by the id, left out here."""
    rows = page.locator("#matches > li").all()
    parts = (".number", ".judgement")
    names = [re.sub(r"^Person \d+$", "Person", row.locator("button.name").inner_text()) for row in rows]
    return [(name, *(row.locator(part).inner_text() for part in parts)) for name, row in zip(names, rows, strict=True)]


def tab_to(page: Any, target: Any, *, back: bool = False) -> None:
    """Press Tab until ``target`` has the focus."""
    for _ in range(60):
        if target.evaluate("it => it === document.activeElement"):
            return
        page.keyboard.press("Shift+Tab" if back else "Tab")
    raise AssertionError(f"Tab does not reach {target}")


def choose_by_keyboard(page: Any, button: Any, *pictures: Any) -> None:
    tab_to(page, button)
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(list(pictures))


def open_tab_by_keyboard(page: Any, name: str) -> None:
    """From the beginning of the page to a tab by Tab and arrows."""
    selected = page.locator("[role=tab][aria-selected=true]")
    tab_to(page, selected)
    page.keyboard.press("Home")
    for _ in range(TABS.index(name)):
        page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name=name)).to_be_focused()
    expect(page.get_by_role("tabpanel", name=name)).to_be_visible()


def search_for(page: Any, picture: Any, count: int) -> None:
    """Search by a chosen picture, which finds ``count`` persons."""
    page.locator("#search-picture input").set_input_files(picture)
    expect(page.locator("#matches > li")).to_have_count(count)


def overflow(page: Any) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def assert_accessible(page: Any, view: str) -> None:
    """No issue of any impact, in any of axe-core's rules."""
    found = page.evaluate("async () => (await axe.run()).violations")
    issues = [
        (issue["id"], issue["impact"], node["html"][:200], node["failureSummary"])
        for issue in found
        for node in issue["nodes"]
    ]
    assert issues == [], f"{view}: {issues}"
