"""Every view of the page, checked by axe-core (tests/page/axe: version 4.14.1 from npm, unchanged, MPL-2.0)."""

from typing import Any

import pytest
from playwright.sync_api import expect
from support.page_actions import ADA, ADA_AGAIN, AXE, DESKTOP, KURT, assert_accessible
from support.page_kit import PageService, chosen, draw, drop, png

pytestmark = [pytest.mark.slow, pytest.mark.live]

SMALL_PHONE = {"width": 390, "height": 844}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, SMALL_PHONE], ids=["desktop", "phone"])
def test_no_view_has_an_issue(visit: Any, people: str, service: PageService, size: Any, scheme: str) -> None:
    page = visit(people, viewport=size, color_scheme=scheme, bypass_csp=True)
    page.add_script_tag(path=AXE)
    assert_accessible(page, "an empty search")
    page.locator("#search-picture input").set_input_files(chosen(draw(80)[:8], "wide.png"))
    expect(page.locator("#search-warning")).not_to_be_empty()
    assert_accessible(page, "a doubtful picture")
    page.locator("#search-picture input").set_input_files(chosen(ADA_AGAIN))
    expect(page.locator("#matches .above")).to_have_count(1)
    page.locator("#search-filter").fill("= 3")
    assert_accessible(page, "matches")
    page.get_by_role("button", name="Add this picture to Kurt Gödel").click()
    expect(page.locator("#confirm")).to_be_visible()
    assert_accessible(page, "the question before adding")
    page.get_by_role("button", name="Add it to Kurt Gödel").click()
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    assert_accessible(page, "what can be undone")
    page.locator("#search-filter").press("Enter")
    expect(page.locator("#search-error")).to_be_visible()
    assert_accessible(page, "an error")

    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-a input").set_input_files(chosen(ADA))
    page.locator("#compare-b input").set_input_files(chosen(KURT))
    expect(page.locator("#compare-verdict .below")).to_be_visible()
    assert_accessible(page, "a comparison")
    page.get_by_role("tab", name="Enrol").click()
    page.locator("#enrol-pictures input").set_input_files([chosen(ADA), chosen(KURT)])
    page.locator("#enrol-metadata").get_by_role("button", name="Add a field").click()
    assert_accessible(page, "enrolling")
    drop(page, {"team/Rosa/a.png": png(draw(81)), "team/Sam/b.png": b"broken"})
    assert_accessible(page, "a folder")
    page.get_by_role("button", name="Enrol 2 people").click()
    expect(page.get_by_role("button", name="As JSON")).to_be_visible()
    assert_accessible(page, "the report of a folder")
    page.get_by_role("tab", name="Browse").click()
    expect(page.locator("#persons > li")).to_have_count(5)
    assert_accessible(page, "browsing")
    page.get_by_role("button", name="Ada Lovelace", exact=True).click()
    expect(page.locator("#person")).to_be_visible()
    assert_accessible(page, "a person")
    page.get_by_role("button", name="Delete this person…").click()
    expect(page.locator("#confirm")).to_be_visible()
    assert_accessible(page, "the question before deleting")
    page.get_by_role("button", name="Keep").click()
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Service").click()
    assert_accessible(page, "the service's figures")
    page.get_by_role("button", name="Use another token…").click()
    assert_accessible(page, "the token")
    page.get_by_role("button", name="New…").click()
    expect(page.locator("#making")).to_be_visible()
    assert_accessible(page, "a new collection")
