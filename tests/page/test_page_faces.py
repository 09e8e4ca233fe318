"""The page in a real browser: pictures of several faces, each searched for, and enrolled where it is meant."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect
from support.group_picture import DrawnDetector, group, larger
from support.page_actions import AXE, DESKTOP, assert_accessible, choose_by_keyboard, overflow, tab_to
from support.page_kit import PageService, chosen, draw, drop, png

pytestmark = [pytest.mark.slow, pytest.mark.live]

PHONE = {"width": 390, "height": 844}
NAMES = [f"Person {letter}" for letter in "ABCDEFGH"]  # who are enrolled; four of the twelve are not
FACES = [draw(seed) for seed in range(200, 212)]
TWELVE = group([larger(face) for face in FACES], columns=4)  # of one size, so numbered as they stand
TWO = group([FACES[0], larger(FACES[1])])  # the second is the larger one


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageService]:
    service = PageService(tmp_path_factory.mktemp("seeing"), detector=DrawnDetector())
    yield service
    service.stop()


@pytest.fixture
def crowd(seeing: PageService, request: pytest.FixtureRequest) -> str:
    """A collection of this test's own with eight of the twelve."""
    name = seeing.collection("".join(letter for letter in request.node.name if letter.isalnum())[:60])
    for person, face in zip(NAMES, FACES, strict=False):
        seeing.enrol(name, person, [np.maximum(face, 1)])
    return name


def stored(seeing: PageService, collection: str, name: str) -> np.ndarray:
    """The vectors of the person of a name."""
    (person,) = [one.id for one in seeing.store.persons(collection, limit=20) if one.name == name]
    return seeing.store.vectors(collection, person)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_twelve_faces_have_boxes_names_and_a_list(
    visit: Any, seeing: PageService, crowd: str, size: Any, scheme: str
) -> None:
    page = visit(crowd, at=seeing, viewport=size, color_scheme=scheme, bypass_csp=True)
    page.add_script_tag(path=AXE)
    page.locator("#search-picture input").set_input_files(chosen(TWELVE))
    expect(page.locator("#search-faces .box")).to_have_count(12)
    expected = [*NAMES, *["unknown"] * 4]
    expect(page.locator("#search-faces .tag bdi")).to_have_text(expected)
    expect(page.locator("#search-faces li bdi")).to_have_text(expected)
    expect(page.locator("#search-faces-summary")).to_have_text(
        "12 faces in the picture, 8 above the threshold. Choose one to see its matches."
    )
    expect(page.locator("#search-summary")).to_contain_text("Face 1: 1 above the threshold among 8 people.")
    expect(page.locator("#search-faces .frame")).to_be_visible()
    frame = page.locator("#search-faces img").bounding_box()
    scale = frame["width"] / TWELVE.shape[1]
    for index, box in enumerate(page.locator("#search-faces .box").all()):
        left, top = (4 + 36 * (index % 4)) * scale, (4 + 36 * (index // 4)) * scale
        place = box.bounding_box()
        given = [place["x"] - frame["x"], place["y"] - frame["y"], place["width"], place["height"]]
        assert np.allclose(given, [left, top, 32 * scale, 32 * scale], atol=1.5)
    assert overflow(page) == 0
    assert_accessible(page, "twelve faces")
    page.locator("#search-faces .box").nth(3).click()
    expect(page.locator("#matches button.name").first).to_have_text("Person D")
    expect(page.locator("#search-faces [aria-pressed=true]")).to_contain_text("Person D")
    expect(page.locator("#search-faces .chosen .tag")).to_contain_text("Person D")


def test_each_face_is_reached_by_keyboard_and_added_to_a_match(visit: Any, seeing: PageService, crowd: str) -> None:
    page = visit(crowd, at=seeing)
    choose_by_keyboard(page, page.get_by_role("button", name="A picture to search by"), chosen(TWELVE))
    faces = page.locator("#search-faces li button")
    expect(faces).to_have_count(12)
    tab_to(page, faces.first)
    for place in range(1, 12):
        page.keyboard.press("ArrowDown")
        expect(faces.nth(place)).to_be_focused()
    page.keyboard.press("Enter")
    expect(faces.nth(11)).to_have_attribute("aria-pressed", "true")
    expect(faces.nth(11)).to_be_focused()
    expect(page.locator("#search-summary")).to_contain_text("Face 12: No match among 8 people.")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    expect(page.locator("#matches button.name").first).to_have_text("Person B")
    page.get_by_role("button", name="Add this picture to Person B").click()
    expect(page.locator("#search-done")).to_contain_text("The picture is now face")
    former, added = stored(seeing, crowd, "Person B")
    assert np.allclose(former, added, atol=1e-5)


def test_a_tried_threshold_names_other_faces(visit: Any, seeing: PageService, crowd: str) -> None:
    page = visit(crowd, at=seeing)
    page.locator("#search-picture input").set_input_files(chosen(TWELVE))
    expect(page.locator("#search-faces .known.box")).to_have_count(8)
    page.locator("#search-slider").press("Home")
    expect(page.locator("#search-faces-summary")).to_contain_text("12 above the threshold")
    page.locator("#search-picture input").set_input_files(chosen(group([FACES[0]])))
    expect(page.locator("#search-faces")).to_be_hidden()
    expect(page.locator("#matches button.name").first).to_have_text("Person A")


def test_an_enrolment_asks_which_face_is_meant(visit: Any, seeing: PageService, crowd: str) -> None:
    page = visit(crowd, at=seeing, bypass_csp=True)
    page.add_script_tag(path=AXE)
    page.get_by_role("tab", name="Enrol").click()
    page.locator("#enrol-pictures input").set_input_files([chosen(TWO, "two.png")])
    page.locator("#enrol-name").fill("New")
    page.get_by_role("button", name="Enrol", exact=True).click()
    dialog = page.get_by_role("dialog", name="Which face?")
    expect(dialog).to_contain_text("two.png shows 2 faces. Choose the one that is meant.")
    expect(dialog.locator(".box")).to_have_count(2)
    assert_accessible(page, "which face")
    dialog.get_by_role("button", name="Choose none").click()
    expect(page.locator("#enrol-error")).to_have_text("No face was chosen in two.png. Nothing is saved.")
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(dialog.locator(".frame")).to_be_visible()
    dialog.locator(".box").nth(1).click()
    expect(page.locator("#known-text")).to_contain_text("matches Person A")
    page.get_by_role("button", name="Enrol anyway").click()
    expect(page.locator("#enrol-done")).to_contain_text("Enrolled New")
    assert np.allclose(stored(seeing, crowd, "New"), stored(seeing, crowd, "Person A"), atol=1e-5)


def test_a_face_of_a_picture_is_added_in_a_persons_dialog(visit: Any, seeing: PageService, crowd: str) -> None:
    page = visit(crowd, at=seeing)
    page.get_by_role("tab", name="Browse").click()
    page.get_by_role("button", name="Person B", exact=True).click()
    page.locator("#person-add input").first.set_input_files([chosen(TWO, "two.png")])
    page.get_by_role("dialog", name="Which face?").get_by_role("button", name="Face 1").click()
    expect(page.locator("#person-done")).to_contain_text("Added face")
    former, added = stored(seeing, crowd, "Person B")
    assert np.allclose(former, added, atol=1e-5)


def test_a_folder_of_many_takes_the_largest_and_says_so(visit: Any, seeing: PageService, crowd: str) -> None:
    page = visit(crowd, at=seeing)
    page.get_by_role("tab", name="Enrol").click()
    drop(page, {"team/Rosa/a.png": png(group([FACES[8], larger(FACES[9])])), "team/Sam/b.png": png(group([FACES[10]]))})
    page.get_by_role("button", name="Enrol 2 people").click()
    expect(page.locator("#many-report")).to_contain_text("a.png shows 2 faces, and the largest was taken")


def test_more_matches_than_all_faces_may_have_are_of_the_largest(visit: Any, seeing: PageService, crowd: str) -> None:
    page = visit(crowd, at=seeing)
    page.locator("#search-k").fill("1000")
    page.locator("#search-picture input").set_input_files(chosen(TWO))
    expect(page.locator("#matches button.name")).to_have_count(len(NAMES))
    expect(page.locator("#search-faces")).to_be_hidden()
