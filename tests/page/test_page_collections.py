"""The page in a real browser: browsing, collections and the service's figures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.page_actions import ADA, TABS, open_tab_by_keyboard, tab_to
from support.page_kit import PageService, chosen, draw

from plsc.serve.settings import Items

pytestmark = [pytest.mark.slow, pytest.mark.live]


def test_a_collection_is_browsed_page_by_page(visit: Any, service: PageService) -> None:
    many = service.collection("many")
    for number in range(60):
        service.enrol(many, f"Person of {number}", [draw(number)], even=number % 2 == 0, number=number)
    page = visit(many)
    page.get_by_role("tab", name="Browse").click()
    names = page.locator("#persons button.name")
    back, following = (page.get_by_role("button", name=name) for name in ("Previous", "Next"))
    seen = []
    for last in (False, False, True):
        expect(names).to_have_count(10 if last else 25)
        seen += names.all_inner_texts()
        assert following.is_disabled() == last
        if not last:
            following.click()
            expect(names.first).to_have_text(f"Person of {len(seen)}")
    assert seen == [f"Person of {number}" for number in range(60)]
    expect(page.locator("#browse-summary")).to_have_text("51 to 60 of 60.")
    back.press("Enter")
    expect(page.locator("#browse-summary")).to_have_text("26 to 50 of 60.")

    page.locator("#browse-filter").fill("!even, number >= 3")
    page.locator("#browse-filter").press("Enter")
    expect(page.locator("#browse-summary")).to_have_text("No people here match the filter.")
    expect(page.locator("#browse-warning")).to_be_empty()
    page.locator("#browse-filter").fill("evn = true")
    page.locator("#browse-filter").press("Enter")
    expect(page.locator("#browse-warning")).to_have_text('nothing here has a field "evn"; fields: even, number.')
    page.locator("#browse-filter").fill("even = false, number >= 51")
    page.locator("#browse-filter").press("Enter")
    expect(names).to_have_text([f"Person of {number}" for number in (51, 53, 55, 57, 59)])
    page.locator("#browse-name").fill("OF 5")
    page.locator("#browse-name").press("Enter")
    expect(names).to_have_text([f"Person of {number}" for number in (51, 53, 55, 57, 59)])
    page.locator("#browse-filter").fill("")
    page.locator("#browse-filter").press("Enter")
    expect(names).to_have_text([f"Person of {number}" for number in (5, *range(50, 60))])


def test_browsing_by_keyboard(visit: Any, people: str) -> None:
    page = visit(people)
    open_tab_by_keyboard(page, "Browse")
    tab_to(page, page.locator("#browse-name"))
    page.keyboard.type("gödel")
    page.keyboard.press("Enter")
    expect(page.locator("#persons button.name")).to_have_text(["Kurt Gödel"])
    tab_to(page, page.locator("#persons button.name"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Kurt Gödel")).to_be_visible()
    expect(page.get_by_role("dialog")).to_contain_text("face ")


def test_a_collection_is_made_by_mouse_and_by_keyboard(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("button", name="New…").click()
    dialog = page.get_by_role("dialog", name="New collection")
    for name, status in ((people, 409), ("My Staff!", 400)):
        dialog.get_by_label("Name").fill(name)
        with page.expect_response("**/v1/collections") as answer:
            dialog.get_by_role("button", name="Create").click()
        assert answer.value.status == status
        expect(page.locator("#making-error")).to_have_text(answer.value.json()["error"]["message"])
    expect(page.locator("#making-error")).to_have_text(
        "a collection's name begins with a letter and has letters, digits, _ . - only, 64 at most, unlike 'My Staff!'"
    )
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="New…").click()
    expect(dialog.get_by_label("Name")).to_have_value("")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()

    tab_to(page, page.locator("#new-collection"))
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("guests")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_label("Collection", exact=True)).to_have_value("guests")
    assert "guests" in [one.name for one in service.store.collections()]
    page.get_by_role("tab", name="Browse").click()
    expect(page.locator("#browse-summary")).to_have_text("No people are enrolled here yet.")


def test_an_empty_service_asks_for_a_collection(visit: Any, serve: Any) -> None:
    service = serve()
    page = visit(at=service)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#search-error")).to_have_text("There is no collection yet; create one first.")
    page.get_by_role("tab", name="Enrol").click()
    expect(page.locator("#enrol-send")).to_be_disabled()


def test_the_services_figures_are_shown(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Service").click()
    figures = page.locator("#service-figures")
    faces = sum(one.faces for one in service.store.collections())
    for text in (f"{faces} faces", "pixels", "0.5, for a false-match rate of 0.001", "admin", "16 × 16 pixels"):
        expect(figures).to_contain_text(text)
    row = page.locator("#service-collections tbody tr").filter(has=page.get_by_text(people, exact=True))
    expect(row.locator("td").nth(0)).to_have_text("4")
    expect(row.locator("td").nth(1)).to_have_text("5")
    expect(page.locator("#service-limits")).to_contain_text("16 MiB")


def test_a_collection_is_deleted_only_by_its_name(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Service").click()
    page.get_by_role("button", name="Delete the collection…").click()
    question = page.get_by_role("alertdialog", name="Delete the collection?")
    expect(question).to_contain_text(f"{people} with 4 people will be deleted")
    sure = question.get_by_role("button", name="Delete permanently")
    expect(sure).to_be_disabled()
    question.get_by_label(f"Type {people} to confirm").fill(people[:-1])
    expect(sure).to_be_disabled()
    question.get_by_role("button", name="Keep").click()
    page.get_by_role("button", name="Delete the collection…").click()
    question.get_by_label(f"Type {people} to confirm").fill(people)
    sure.click()
    expect(page.locator("#manage-done")).to_have_text(f"{people} is deleted.")
    assert people not in [one.name for one in service.store.collections()]
    expect(page.get_by_label("Collection", exact=True)).not_to_have_value(people)


def test_a_collections_list_is_downloaded(visit: Any, people: str) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Service").click()
    page.get_by_role("button", name="Download the list…").click()
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="Download", exact=True).click()
    assert downloaded.value.suggested_filename == f"{people}.json"
    told = json.loads(Path(downloaded.value.path()).read_text())
    assert [len(person["faces"]) for person in told["persons"]] == [1, 1, 2, 1]
    assert told["persons"][2]["metadata"] == {"city": "Vienna", "age": 71}
    expect(page.locator("#manage-done")).to_have_text("The list has 4 people.")


def test_a_snapshot_is_taken_after_a_question(visit: Any, serve: Any, tmp_path: Path) -> None:
    service = serve(snapshots=tmp_path / "snapshots")
    page = visit(service.collection("staff"), at=service)
    page.get_by_role("tab", name="Service").click()
    page.get_by_role("button", name="Take a snapshot…").click()
    question = page.get_by_role("alertdialog", name="Take a snapshot?")
    question.get_by_role("button", name="Take a snapshot").click()
    expect(page.locator("#manage-done")).to_contain_text("MiB.")
    (snapshot,) = (tmp_path / "snapshots").iterdir()
    expect(page.locator("#manage-done")).to_contain_text(snapshot.name)


def test_products_are_no_people(visit: Any, serve: Any) -> None:
    service = serve(items=Items.parse("products"))
    service.enrol(service.collection("shop"), None, [ADA], colour="red")
    page = visit("shop", at=service, bypass_csp=True)
    page.locator("#search-picture input").set_input_files(chosen(draw(80)[:8], "wide.png"))
    expect(page.locator("#matches button.name")).to_have_text(["Product 1"])
    expect(page.locator("#search-warning")).to_be_empty()  # crops are aligned of faces alone
    page.get_by_role("button", name="Product 1", exact=True).click()
    expect(page.get_by_role("button", name="Delete this product…")).to_be_visible()
    page.get_by_role("button", name="Delete picture 1").click()
    page.get_by_role("button", name="Keep").click()
    page.keyboard.press("Escape")
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        words = page.locator("body").inner_text().lower()
        assert not re.search(r"\b(person|people|persons|faces?|somebody|nobody|who|stranger|crops)\b", words), tab
        assert "product" in words or tab == "Compare"
