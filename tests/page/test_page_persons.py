"""The page in a real browser: enrolling and deleting; what it did is compared with the store."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.page_actions import ADA, ADA_AGAIN, HOSTILE, KURT, choose_by_keyboard, open_tab_by_keyboard, tab_to
from support.page_kit import PageService, chosen, cosine, draw, embedding

pytestmark = [pytest.mark.slow, pytest.mark.live]


def test_a_person_is_enrolled_by_mouse_and_then_found(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Enrol").click()
    first, second = draw(30), draw(31)
    page.locator("#enrol-pictures input").set_input_files([chosen(first), chosen(KURT), chosen(second, "second.png")])
    page.locator("#enrol-pictures li").nth(1).get_by_role("button").click()
    page.get_by_label("Name", exact=True).first.fill("Emmy Noether")
    entries = {"city": "Göttingen", "age": "53", "room": '"12"', "retired": "true", "long": "9007199254740993"}
    for key, value in entries.items():
        page.locator("#enrol-metadata").get_by_role("button", name="Add a field").click()
        page.keyboard.type(key)
        page.keyboard.press("Tab")
        page.keyboard.type(value)
    expect(page.locator("#enrol-metadata .kind")).to_have_text(["text", "number", "text", "yes or no", "number"])
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-done")).to_contain_text("Enrolled Emmy Noether")
    added = service.store.persons(people)[-1]
    assert added.name == "Emmy Noether"
    assert len(added.faces) == 2
    assert dict(added.metadata) == {
        "city": "Göttingen",
        "age": 53,
        "room": "12",
        "retired": True,
        "long": 9007199254740993,
    }
    for picture in (first, second):
        assert [match.person for match in service.store.search(people, [embedding(picture)], k=1)[0]] == [added.id]
    expect(page.locator("#enrol-pictures li")).to_have_count(0)
    page.locator("#enrol-done").get_by_role("button", name="Open").click()
    page.get_by_role("dialog").get_by_label("Name", exact=True).fill("Amalie Emmy Noether")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#person-done")).to_have_text("Saved.")
    changed = service.store.person(people, added.id)
    assert (changed.name, changed.metadata) == ("Amalie Emmy Noether", added.metadata)


def test_enrolling_nothing_is_told_and_enrols_nobody(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Enrol").click()
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-error")).to_have_text("Choose a picture first.")
    page.locator("#enrol-pictures input").set_input_files(chosen(draw(41)))
    for _ in range(2):
        page.locator("#enrol-metadata").get_by_role("button", name="Add a field").click()
        page.keyboard.type("city")
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-error")).to_contain_text('the field "city" appears twice')
    assert len(service.store.persons(people)) == 4


def test_a_searched_picture_becomes_a_face_of_a_match_or_a_new_person(
    visit: Any, people: str, service: PageService
) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA_AGAIN))
    page.get_by_role("button", name="Add this picture to Ada Lovelace").click()
    expect(page.locator("#matches .number").first).to_have_text("1.000")
    (_, face) = service.store.persons(people)[0].faces
    expect(page.locator("#search-done")).to_have_text(f"The picture is now face {face} of Ada Lovelace. Undo")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#search-done")).to_have_text(f"Undone: face {face} of Ada Lovelace is deleted.")
    expect(page.locator("#matches .number").first).to_have_text(f"{cosine(ADA, ADA_AGAIN):.3f}")
    assert len(service.store.persons(people)[0].faces) == 1
    page.get_by_role("button", name="Enrol this picture as a new person").click()
    expect(page.locator("#enrol-pictures img")).to_have_count(1)
    page.get_by_role("button", name="Enrol", exact=True).click()
    page.get_by_role("button", name="Enrol anyway").click()  # for it is Ada's
    expect(page.locator("#enrol-done")).to_contain_text("with 1 face")
    assert len(service.store.persons(people)) == 5


def test_a_picture_is_added_below_the_threshold_only_after_a_question(
    visit: Any, people: str, service: PageService
) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA_AGAIN))
    score = max(cosine(ADA_AGAIN, KURT), cosine(ADA_AGAIN, draw(20)))
    question = page.get_by_role("alertdialog", name="Add this picture to Kurt Gödel?")
    page.get_by_role("button", name="Add this picture to Kurt Gödel").click()
    expect(question).to_contain_text(
        f"The picture scores {score:.3f} with Kurt Gödel: below the threshold of 0.500. "
        f"The nearest is Ada Lovelace at {cosine(ADA, ADA_AGAIN):.3f}."
    )
    question.get_by_role("button", name="Do not add").click()
    expect(question).to_be_hidden()
    assert len(service.store.persons(people)[2].faces) == 2
    page.get_by_role("button", name="Add this picture to Kurt Gödel").click()
    question.get_by_role("button", name="Add it to Kurt Gödel").click()
    expect(page.locator("#search-done")).to_contain_text("of Kurt Gödel")
    assert len(service.store.persons(people)[2].faces) == 3
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#search-done")).to_be_empty()  # another picture's undo would be a trap


def test_enrolling_searching_a_wrong_click_and_its_undo_by_keyboard_alone(
    visit: Any, people: str, service: PageService
) -> None:
    page = visit(people)
    open_tab_by_keyboard(page, "Enrol")
    choose_by_keyboard(page, page.get_by_role("button", name="Pictures to enrol"), chosen(draw(70)))
    tab_to(page, page.locator("#enrol-name"))
    page.keyboard.type("Hedy")
    page.keyboard.press("Enter")
    expect(page.locator("#enrol-done")).to_contain_text("Enrolled Hedy")
    open_tab_by_keyboard(page, "Search")
    choose_by_keyboard(page, page.get_by_role("button", name="A picture to search by"), chosen(draw(71, like=draw(70))))
    expect(page.locator("#matches > li")).to_have_count(5)
    tab_to(page, page.get_by_role("button", name="Add this picture to Ada Lovelace"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Do not add")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Add this picture to Ada Lovelace")).to_be_focused()
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_role("button", name="Add it to Ada Lovelace"), back=True)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    assert len(service.store.persons(people)[0].faces) == 2
    page.keyboard.press("Enter")
    expect(page.locator("#search-done")).to_contain_text("Undone")
    expect(page.get_by_role("button", name="Search", exact=True)).to_be_focused()
    assert len(service.store.persons(people)[0].faces) == 1
    assert service.store.persons(people)[-1].name == "Hedy"


def test_thumbnails_stand_beside_matches_and_persons(visit: Any, serve: Any, tmp_path: Path) -> None:
    service = serve(thumbnails=tmp_path / "thumbnails", keep_thumbnails=True)
    service.enrol(service.collection("staff"), "Kurt", [KURT])  # past HTTP: without a thumbnail
    page = visit("staff", at=service)
    expect(page.locator("#kept")).to_contain_text("keeps a small crop of each enrolled picture")
    page.get_by_role("tab", name="Enrol").click()
    page.locator("#enrol-pictures input").set_input_files([chosen(ADA), chosen(ADA_AGAIN)])
    page.locator("#enrol-name").fill("Ada")
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-done")).to_contain_text("Enrolled Ada")
    page.get_by_role("tab", name="Search").click()
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    rows = page.locator("#matches > li")
    expect(rows.nth(0).locator("img.thumbnail")).to_be_visible()
    expect(rows.nth(0).locator("img.thumbnail")).to_have_js_property("naturalWidth", ADA.shape[1])
    expect(rows.nth(1).locator(".initials")).to_have_text("K")
    page.get_by_role("tab", name="Browse").click()
    expect(page.locator("#persons img.thumbnail")).to_have_count(1)
    page.get_by_role("button", name="Ada", exact=True).click()
    expect(page.locator("#person-faces img.thumbnail")).to_have_count(2)
    rows, pictures = (page.locator(f"#person-faces {part}").first.bounding_box() for part in ("li", "img.thumbnail"))
    assert pictures["x"] - rows["x"] < 8, "a face stands at the beginning of its row"
    page.locator("#person-faces").get_by_role("button", name="Show larger: Ada, face").first.click()
    larger = page.get_by_role("dialog", name="Ada, face")
    expect(larger.get_by_role("img", name="Ada, face")).to_be_visible()
    page.keyboard.press("Escape")
    expect(larger).to_be_hidden()
    expect(page.locator("#person")).to_be_visible()
    page.get_by_role("button", name="Delete face").first.click()
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.locator("#person-faces img.thumbnail")).to_have_count(1)
    assert len(list((tmp_path / "thumbnails").rglob("*.jpg"))) == 1


def test_an_address_under_the_link_key_is_a_link_and_nothing_else_is(visit: Any, serve: Any) -> None:
    service = serve(link_key="record")
    staff = service.collection("staff")
    service.enrol(staff, "Ada", [ADA], record="https://files.example.org/ada", city="https://example.org/")
    service.enrol(staff, "Kurt", [KURT], record="javascript:alert(1)")
    page = visit(staff, at=service)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    links = page.locator("main a")
    expect(links).to_have_count(1)
    expect(links).to_have_text("https://files.example.org/ada")
    assert [links.get_attribute(name) for name in ("href", "rel", "target")] == [
        "https://files.example.org/ada",
        "noopener noreferrer",
        "_blank",
    ]
    page.get_by_role("button", name="Ada", exact=True).click()
    expect(page.locator("#person a")).to_have_text("https://files.example.org/ada")


def test_a_person_is_deleted_only_after_a_second_yes(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    page.get_by_role("button", name="Ada Lovelace", exact=True).click()
    page.get_by_role("button", name="Delete this person…").click()
    question = page.get_by_role("alertdialog", name="Delete this person?")
    ada, *others = [person.id for person in service.store.persons(people)]
    lost = f"Ada Lovelace (#{ada}) with 1 face will no longer be found. This cannot be undone."
    expect(question).to_contain_text(lost)
    question.get_by_role("button", name="Keep").click()
    expect(question).to_be_hidden()
    assert len(service.store.persons(people)) == 4
    page.get_by_role("button", name="Delete this person…").click()
    question.get_by_role("button", name="Delete permanently").click()
    expect(page.locator("#person")).to_be_hidden()
    expect(page.locator("#matches > li")).to_have_count(3)
    assert [person.id for person in service.store.persons(people)] == others


def test_deleting_by_keyboard_and_escape_keeps(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    open_tab_by_keyboard(page, "Browse")
    first = page.locator("#persons button.name").first
    tab_to(page, first)
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_role("button", name="Delete this person…"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Keep")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    expect(page.locator("#person")).to_be_visible()
    assert len(service.store.persons(people)) == 4
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_role("button", name="Delete permanently"), back=True)
    page.keyboard.press("Enter")
    expect(page.locator("#person")).to_be_hidden()
    expect(page.locator("#persons > li")).to_have_count(3)
    assert [person.name for person in service.store.persons(people)] == [HOSTILE, "Kurt Gödel", None]


def test_a_face_is_added_and_one_deleted(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Browse").click()
    page.get_by_role("button", name="Kurt Gödel", exact=True).click()
    page.locator("#person-add input").set_input_files(chosen(draw(50)))
    expect(page.locator("#person-done")).to_contain_text("Added face")
    expect(page.locator("#person-faces li")).to_have_count(3)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#person-done")).to_have_text("Undone: 1 face deleted.")
    expect(page.locator("#person-faces li")).to_have_count(2)
    page.locator("#person-add input").set_input_files(chosen(draw(50)))
    expect(page.locator("#person-faces li")).to_have_count(3)
    kept = list(service.store.persons(people)[2].faces)
    page.get_by_role("button", name=f"Delete face {kept.pop(0)}").click()
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.locator("#person-faces li")).to_have_count(2)
    assert list(service.store.persons(people)[2].faces) == kept


def test_what_somebody_else_deleted_is_told(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Browse").click()
    expect(page.locator("#persons > li")).to_have_count(4)
    ada = service.store.persons(people)[0].id
    service.store.delete_person(people, ada)
    page.get_by_role("button", name="Ada Lovelace", exact=True).click()
    expect(page.locator("#page-error")).to_contain_text(str(ada))
    expect(page.locator("#person")).to_be_hidden()
