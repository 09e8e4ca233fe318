"""The page in a real browser, against the real service; what it shows is compared with numpy and with the store."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

from page_kit import CHROMIUM_FLAGS, PageService, chosen, cosine, draw, embedding, png  # noqa: E402

from plsc.gallery.filters import Filter  # noqa: E402
from plsc.serve.settings import Limits  # noqa: E402
from plsc.serve.tokens import add_token  # noqa: E402

expect = api.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 860}
HOSTILE = "<img src=x onerror=alert(1)>"
TABS = ("Search", "Compare", "Enrol", "Browse", "Service")

ADA, GRACE, KURT, EDSGER = (draw(seed) for seed in range(4))
ADA_AGAIN = draw(10, like=ADA)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageService]:
    service = PageService(tmp_path_factory.mktemp("page"))
    yield service
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
        page.set_default_timeout(10_000)
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


def expected_matches(query: Any) -> list[tuple[str, ...]]:
    """Name, score and judgement of the four persons, best first, as numpy has it."""
    faces = {
        "Ada Lovelace": [ADA], HOSTILE: [GRACE], "Kurt Gödel": [KURT, draw(20)], "Person": [EDSGER],
    }  # fmt: skip
    scores = {name: max(cosine(query, face) for face in own) for name, own in faces.items()}
    return [
        (name, f"{score:.3f}", "same person" if score >= 0.5 else "someone else")
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


def overflow(page: Any) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


# Searching


def test_a_chosen_picture_is_searched_and_names_stay_text(visit: Any, people: str) -> None:
    page = visit(people)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="A picture to search by").click()
    chooser.value.set_files(chosen(ADA_AGAIN))
    expect(page.locator("#matches > li")).to_have_count(4)
    assert shown_matches(page) == expected_matches(ADA_AGAIN)
    expect(page.locator("#search-summary")).to_contain_text("4 matches; the best is Ada Lovelace")
    assert page.locator("#search-picture img").evaluate("image => image.naturalWidth") == ADA.shape[1]
    hostile = page.locator("#matches > li").filter(has_text=HOSTILE)
    expect(hostile).to_contain_text("<script>alert(2)</script>")
    assert page.locator("#matches img, #matches script, #matches b").count() == 0
    expect(page.locator("#matches > li").first).to_contain_text("London")


def test_searching_by_keyboard_alone(visit: Any, people: str) -> None:
    page = visit(people)
    choose_by_keyboard(page, page.get_by_role("button", name="A picture to search by"), chosen(KURT))
    expect(page.locator("#matches > li")).to_have_count(4)
    names = page.locator("#matches button.name")
    tab_to(page, names.first)
    page.keyboard.press("ArrowDown")
    expect(names.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(names.nth(3)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    expect(names.first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Kurt Gödel")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#person")).to_be_hidden()
    expect(names.first).to_be_focused()
    tab_to(page, page.get_by_role("button", name="Choose another"), back=True)
    page.keyboard.press("Escape")
    expect(page.locator("#matches > li")).to_have_count(0)
    expect(page.get_by_role("button", name="A picture to search by")).to_be_focused()


@pytest.mark.parametrize("how", ["paste", "drop"])
def test_pictures_are_pasted_and_dropped_anywhere(visit: Any, people: str, how: str) -> None:
    page = visit(people)
    page.evaluate(
        """([bytes, how]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "", { type: "image/png" }));
            const event = how === "paste"
                ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
                : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
            document.querySelector("footer").dispatchEvent(event);
        }""",
        [list(png(GRACE)), how],
    )
    expect(page.locator("#matches > li")).to_have_count(4)
    assert shown_matches(page) == expected_matches(GRACE)


def test_the_number_of_matches_and_a_filter_are_asked_of_the_service(visit: Any, people: str) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#matches > li")).to_have_count(4)
    page.get_by_label("At most").fill("2")
    page.get_by_label("At most").press("Enter")
    expect(page.locator("#matches > li")).to_have_count(2)
    page.locator("#search-filter").fill('city = "Vienna", age > 40')
    page.locator("#search-filter").press("Enter")
    expect(page.locator("#matches button.name")).to_have_text(["Kurt Gödel"])
    page.locator("#search-filter").fill('{"city": {"near": "Bern"}}')
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("#search-error")).to_contain_text("knows no 'near'")
    page.locator("#search-filter").fill("= 3")
    page.locator("#search-filter").press("Enter")
    expect(page.locator("#search-error")).to_contain_text("is no condition")
    page.locator("#search-filter").fill("")
    page.get_by_label("At most").fill("0")
    page.get_by_label("At most").press("Enter")
    expect(page.locator("#search-form :invalid")).to_have_count(1)


def test_other_thresholds_are_tried_and_the_services_own_comes_back(visit: Any, people: str) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA_AGAIN))
    best = page.locator("#matches > li").first.locator(".judgement")
    expect(best).to_have_text("same person")
    expect(page.locator("#search-threshold")).to_contain_text("the service's own: 0.500, where one in 1,000 strangers")
    slider = page.get_by_label("Same person from").first
    slider.focus()
    page.keyboard.press("End")
    expect(page.locator("#search-threshold output")).to_have_text("1.000")
    expect(best).to_have_text("someone else")
    page.keyboard.press("Home")
    assert {verdict for _, score, verdict in shown_matches(page) if float(score) >= 0} == {"same person"}
    page.get_by_role("tab", name="Compare").click()
    expect(page.locator("#compare-threshold output")).to_have_text("0.000")
    page.get_by_role("button", name="Back to the service's 0.500").click()
    page.get_by_role("tab", name="Search").click()
    assert shown_matches(page) == expected_matches(ADA_AGAIN)


def test_without_a_threshold_nobody_is_judged_until_one_is_tried(visit: Any, tmp_path: Path) -> None:
    service = PageService(tmp_path, threshold=None, false_match_rate=None)
    try:
        service.enrol(service.collection("staff"), "Ada", [ADA])
        page = visit("staff", at=service)
        page.locator("#search-picture input").set_input_files(chosen(ADA))
        expect(page.locator("#matches .judgement")).to_have_text("no threshold")
        page.get_by_label("Same person from").first.press("ArrowRight")
        expect(page.locator("#matches .judgement")).to_have_text("same person")
        page.get_by_role("button", name="Judge no more").click()
        expect(page.locator("#matches .judgement")).to_have_text("no threshold")
    finally:
        service.stop()


# Comparing


def test_two_pictures_are_compared_by_mouse(visit: Any, people: str) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-a input").set_input_files(chosen(ADA))
    expect(page.locator("#compare-verdict")).to_be_empty()
    page.locator("#compare-b input").set_input_files(chosen(ADA_AGAIN))
    expect(page.locator("#compare-verdict .number")).to_have_text(f"{cosine(ADA, ADA_AGAIN):.3f}")
    expect(page.locator("#compare-verdict .judgement")).to_have_text("same person")
    page.locator("#compare-b input").set_input_files(chosen(KURT))
    expect(page.locator("#compare-verdict .number")).to_have_text(f"{cosine(ADA, KURT):.3f}")
    expect(page.locator("#compare-verdict .judgement")).to_have_text("someone else")
    page.locator("#compare-a").get_by_role("button", name="Remove").click()
    expect(page.locator("#compare-verdict")).to_be_empty()


def test_two_pictures_are_compared_by_keyboard(visit: Any, people: str) -> None:
    page = visit(people)
    open_tab_by_keyboard(page, "Compare")
    choose_by_keyboard(page, page.get_by_role("button", name="One picture"), chosen(KURT))
    choose_by_keyboard(page, page.get_by_role("button", name="The other picture"), chosen(GRACE))
    expect(page.locator("#compare-verdict .number")).to_have_text(f"{cosine(KURT, GRACE):.3f}")


# Enrolling


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
        "city": "Göttingen", "age": 53, "room": "12", "retired": True, "long": 9007199254740993,
    }  # fmt: skip
    for picture in (first, second):
        assert [match.person for match in service.store.search(people, [embedding(picture)], k=1)[0]] == [added.id]
    expect(page.locator("#enrol-pictures li")).to_have_count(0)
    page.locator("#enrol-done").get_by_role("button", name="Open").click()
    page.get_by_role("dialog").get_by_label("Name", exact=True).fill("Amalie Emmy Noether")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#person-done")).to_have_text("Saved.")
    changed = service.store.person(people, added.id)
    assert (changed.name, changed.metadata) == ("Amalie Emmy Noether", added.metadata)


def test_a_person_is_enrolled_by_keyboard(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    open_tab_by_keyboard(page, "Enrol")
    choose_by_keyboard(page, page.get_by_role("button", name="Pictures of the person"), chosen(draw(40)))
    tab_to(page, page.locator("#enrol-name"))
    page.keyboard.type("Sofya")
    page.keyboard.press("Enter")
    expect(page.locator("#enrol-done")).to_contain_text("Enrolled Sofya")
    assert [person.name for person in service.store.persons(people)][-1] == "Sofya"


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
    expect(page.locator("#enrol-error")).to_contain_text('the field "city" is there twice')
    assert len(service.store.persons(people)) == 4


def test_a_searched_picture_becomes_a_face_of_a_match_or_a_new_person(
    visit: Any, people: str, service: PageService
) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA_AGAIN))
    page.get_by_role("button", name="Add this picture to Ada Lovelace").click()
    expect(page.locator("#matches .number").first).to_have_text("1.000")
    expect(page.locator("#search-summary")).to_contain_text("of Ada Lovelace")
    assert len(service.store.persons(people)[0].faces) == 2
    page.get_by_role("button", name="Enrol this picture as a new person").click()
    expect(page.locator("#enrol-pictures img")).to_have_count(1)
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-done")).to_contain_text("with 1 face")
    assert len(service.store.persons(people)) == 5


# Deleting


def test_a_person_is_deleted_only_after_a_second_yes(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    page.get_by_role("button", name="Ada Lovelace", exact=True).click()
    page.get_by_role("button", name="Delete this person…").click()
    question = page.get_by_role("alertdialog", name="Delete this person?")
    ada, *others = [person.id for person in service.store.persons(people)]
    expect(question).to_contain_text(f"Ada Lovelace (#{ada}) with 1 face will no longer be found. There is no undo.")
    question.get_by_role("button", name="Keep").click()
    expect(question).to_be_hidden()
    assert len(service.store.persons(people)) == 4
    page.get_by_role("button", name="Delete this person…").click()
    question.get_by_role("button", name="Delete for good").click()
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
    tab_to(page, page.get_by_role("button", name="Delete for good"), back=True)
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
    kept = list(service.store.persons(people)[2].faces)
    page.get_by_role("button", name=f"Delete face {kept.pop(0)}").click()
    page.get_by_role("button", name="Delete for good").click()
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


# Browsing and collections


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
    expect(page.locator("#browse-summary")).to_have_text("Nobody here fits.")
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
    for name, status in ((people, 409), ("no spaces", 400)):
        dialog.get_by_label("Name").fill(name)
        with page.expect_response("**/v1/collections") as answer:
            dialog.get_by_role("button", name="Create").click()
        assert answer.value.status == status
        expect(page.locator("#making-error")).to_have_text(answer.value.json()["error"]["message"])
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
    expect(page.locator("#browse-summary")).to_have_text("Nobody is enrolled here yet.")


def test_an_empty_service_asks_for_a_collection(visit: Any, tmp_path: Path) -> None:
    service = PageService(tmp_path)
    try:
        page = visit(at=service)
        page.locator("#search-picture input").set_input_files(chosen(ADA))
        expect(page.locator("#search-error")).to_have_text("There is no collection yet; create one first.")
        page.get_by_role("tab", name="Enrol").click()
        expect(page.locator("#enrol-send")).to_be_disabled()
    finally:
        service.stop()


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
    expect(page.locator("#service-limits")).to_contain_text("32 MiB")


# What goes wrong


@pytest.mark.parametrize(
    ("content", "told"), [(b"\x89PNG\r\n\x1a\nbroken", "query"), (b"no picture at all", "JPEG, PNG or WEBP")]
)
def test_a_broken_image_is_told_in_the_services_words(visit: Any, people: str, content: bytes, told: str) -> None:
    page = visit(people)
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": content}
    with page.expect_response("**/search") as answer:
        page.locator("#search-picture input").set_input_files(broken)
    message = answer.value.json()["error"]["message"]
    assert told in message
    expect(page.locator("#search-error")).to_have_text(message)
    expect(page.locator("#search-picture .blind")).to_have_text("no preview of broken.png")
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#matches > li")).to_have_count(4)
    expect(page.locator("#search-error")).to_be_hidden()

    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-a input").set_input_files(broken)
    page.locator("#compare-b input").set_input_files(chosen(ADA))
    expect(page.locator("#compare-error")).to_contain_text(told.replace("query", "a"))
    page.get_by_role("tab", name="Enrol").click()
    page.locator("#enrol-pictures input").set_input_files([chosen(ADA), broken])
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-error")).to_contain_text("faces[1]")
    expect(page.locator("#enrol-pictures li")).to_have_count(2)


def test_a_picture_beyond_the_limit_is_not_sent(visit: Any, tmp_path: Path) -> None:
    service = PageService(tmp_path, limits=Limits(body_bytes=2**20))
    try:
        page = visit(service.collection("staff"), at=service)
        large = {"name": "large.png", "mimeType": "image/png", "buffer": bytes(2**20 * 4 // 5)}
        page.locator("#search-picture input").set_input_files(large)
        expect(page.locator("#search-error")).to_contain_text("The service takes 1 MiB at a time")
    finally:
        service.stop()


def test_tokens_wrong_reading_and_writing(visit: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    reader, writer = add_token(tokens, "reader", "read"), add_token(tokens, "writer", "write")
    service = PageService(tmp_path, tokens=tokens)
    try:
        service.enrol(service.collection("staff"), "Ada", [ADA])
        page = visit(at=service)
        field = page.get_by_label("Token", exact=True)
        expect(field).to_be_focused()
        expect(page.locator("#page-error")).to_be_hidden()
        expect(page.locator("#search-threshold")).not_to_contain_text("no threshold")  # nobody knows yet
        for wrong, told in (("plsc_wrong", "a token is needed"), ("two words", "without spaces"), ("ключ", "letters")):
            field.fill(wrong)
            field.press("Enter")
            expect(page.locator("#token-error")).to_contain_text(told)
            assert page.evaluate("sessionStorage.getItem('plsc-token')") is None
        field.fill(reader)
        field.press("Enter")
        expect(page.locator("#token-form")).to_be_hidden()
        expect(page.get_by_label("Collection", exact=True)).to_have_value("staff")
        page.locator("#search-picture input").set_input_files(chosen(ADA))
        expect(page.locator("#matches > li")).to_have_count(1)
        assert page.get_by_role("button", name="Add this picture to Ada").count() == 0
        page.locator("#matches button.name").click()
        expect(page.get_by_role("dialog", name="Ada")).to_be_visible()
        expect(page.get_by_role("button", name="Delete this person…")).to_have_count(0)
        page.keyboard.press("Escape")
        page.get_by_role("tab", name="Enrol").click()
        expect(page.locator("#enrol-done")).to_contain_text("may only read")
        expect(page.locator("#enrol-send")).to_be_disabled()

        page.reload()
        expect(page.get_by_label("Collection", exact=True)).to_have_value("staff")
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.getItem('plsc-token')]") == [
            0, "", reader,
        ]  # fmt: skip
        page.get_by_role("tab", name="Service").click()
        page.get_by_role("button", name="Use another token…").click()
        field.fill(writer)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#service-figures")).to_contain_text("write")
        page.get_by_role("tab", name="Enrol").click()
        expect(page.locator("#enrol-send")).to_be_enabled()
        page.get_by_role("tab", name="Service").click()
        page.get_by_role("button", name="Forget the token").click()
        expect(field).to_be_focused()
        assert page.evaluate("sessionStorage.getItem('plsc-token')") is None
        expect(page.get_by_label("Collection", exact=True)).to_be_disabled()
    finally:
        service.stop()


def test_a_service_that_is_gone_is_told_and_its_return_noticed(visit: Any, tmp_path: Path) -> None:
    service = PageService(tmp_path)
    try:
        service.enrol(service.collection("staff"), "Ada", [ADA])
        page = visit("staff", at=service)
        service.stop()
        page.locator("#search-picture input").set_input_files(chosen(ADA))
        expect(page.locator("#search-error")).to_contain_text(f"The service at {service.url[7:-1]} does not answer")
        expect(page.locator("#health-word")).to_have_text("not answering")
        page.get_by_role("tab", name="Service").click()
        page.get_by_role("button", name="Ask again").click()
        expect(page.locator("#service-error")).to_contain_text("does not answer")
        service.start()
        page.get_by_role("button", name="Ask again").click()
        expect(page.locator("#health-word")).to_have_text("ready")
        page.get_by_role("tab", name="Search").click()
        page.get_by_role("button", name="Search", exact=True).click()
        expect(page.locator("#matches button.name")).to_have_text(["Ada"])
        expect(page.locator("#search-error")).to_be_hidden()
    finally:
        service.stop()


# The page itself


def test_the_page_is_served_under_a_strict_policy(service: PageService) -> None:
    import httpx

    with httpx.Client(base_url=service.url) as client:
        page = client.get("/")
        assert page.headers["x-content-type-options"] == "nosniff"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert page.headers["referrer-policy"] == "no-referrer"
        assert client.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
        assert client.get("/page/none.js").status_code == 404
        folder = Path(__file__).parents[2] / "plsc" / "serve" / "page"
        for path in folder.iterdir():
            assert client.get(f"/page/{path.name}").text == path.read_text(encoding="utf-8")
    scripts = re.findall(r'(?:modulepreload" href|src)="page/([a-z]+\.js)"', page.text)
    assert sorted(scripts) == sorted(path.name for path in folder.glob("*.js"))  # asked for at once, not one by one
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=|https?://", page.text)


def test_not_even_a_mistake_of_its_own_makes_text_markup(chromium: Any, service: PageService) -> None:
    page = chromium.new_page()
    page.goto(service.url)
    with pytest.raises(api.Error, match="TrustedHTML"):
        page.evaluate("document.querySelector('footer').innerHTML = '<b>bold</b>'")
    page.close()


def test_every_control_has_a_name_and_every_message_a_live_region(visit: Any, people: str) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    page.locator("#matches button.name").first.click()
    page.locator("#person-metadata").get_by_role("button", name="Add a field").click()
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input:not([type=file]), select, dialog, [role=group]")].filter((it) =>
            !(it.labels?.length || it.getAttribute("aria-label") || it.getAttribute("aria-labelledby")
              || it.textContent.trim())).map((it) => it.outerHTML)"""
    )
    assert nameless == []
    for kind, role in (("error", "alert"), ("summary", "status")):
        roles = page.locator(f".{kind}").evaluate_all("all => all.map((it) => it.getAttribute('role'))")
        assert set(roles) == {role}


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_nothing_is_wider_than_the_window(visit: Any, people: str, service: PageService, size: Any) -> None:
    service.enrol(people, "W" * 300, [draw(60)], **{"k" * 100: "v" * 300})
    page = visit(people, viewport=size)
    assert overflow(page) == 0
    page.locator("#search-picture input").set_input_files(chosen(draw(60), "n" * 200 + ".png"))
    expect(page.locator("#matches > li")).to_have_count(5)
    assert overflow(page) == 0
    single = page.locator("#matches .number, .where label, #new-collection").evaluate_all(
        "all => all.map((it) => { const range = document.createRange(); range.selectNodeContents(it);"
        " return new Set([...range.getClientRects()].map((box) => box.top)).size; })"
    )
    assert set(single) == {1}  # lines of what must not be broken
    page.locator("#matches button.name").first.click()
    expect(page.locator("#person")).to_be_visible()
    assert page.locator("#person").evaluate("it => it.scrollWidth - it.clientWidth") == 0
    page.keyboard.press("Escape")
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        assert overflow(page) == 0, tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(visit: Any, scheme: str) -> None:
    page = visit(color_scheme=scheme)
    colours = page.evaluate(
        """() => Object.fromEntries(["paper", "surface", "ink", "soft", "accent", "on-accent", "wash", "bad"]
            .map((name) => {
                const probe = document.createElement("i");
                probe.style.color = `var(--${name})`;
                document.body.append(probe);
                const found = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
                probe.remove();
                return [name, found];
            }))"""
    )
    for text, ground in (("ink", "paper"), ("soft", "paper"), ("soft", "surface"), ("accent", "paper"),
                         ("accent", "wash"), ("on-accent", "accent"), ("bad", "paper"), ("paper", "bad")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)  # WCAG 2.2, 1.4.3


def contrast(one: list[int], other: list[int]) -> float:
    """The contrast ratio of two sRGB colours, by WCAG 2.2."""

    def luminance(colour: list[int]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.fixture(scope="module")
def read_filter(chromium: Any, service: PageService) -> Iterator[Callable[[str], Any]]:
    """The page's own reading of a filter."""
    page = chromium.new_page()
    page.goto(service.url)
    yield lambda text: page.evaluate("async (text) => (await import('/page/scalars.js')).readFilter(text)", text)
    page.close()


@pytest.mark.parametrize(
    ("written", "filter"),
    [
        ("", None),
        ("city = Bern", {"city": {"eq": "Bern"}}),
        ("age>=30,age < 40", {"age": {"gte": 30, "lt": 40}}),
        ('name != "a, b", room="12"', {"name": {"ne": "a, b"}, "room": {"eq": "12"}}),
        ("email, !phone", {"email": {"exists": True}, "phone": {"exists": False}}),
        ("member = true, score <= -1.5", {"member": {"eq": True}, "score": {"lte": -1.5}}),
        ('"a = b" > 3', {"a = b": {"gt": 3}}),
        ('{"city": {"in": ["Bern", "Basel"]}}', {"city": {"in": ["Bern", "Basel"]}}),
        ("plate = 007", {"plate": {"eq": "007"}}),
        ("url = http://x?a=b", {"url": {"eq": "http://x?a=b"}}),
    ],
)
def test_filters_as_people_write_them(read_filter: Any, written: str, filter: Any) -> None:
    assert read_filter(written) == filter
    if filter is not None:
        Filter.parse(filter)  # the service takes it


@pytest.mark.parametrize("written", ["= 3", "a = 1, a = 2", "city >", '{"city"', "!a = 3", '"open'])
def test_filters_that_mean_nothing_are_refused(read_filter: Any, written: str) -> None:
    with pytest.raises(api.Error, match=r"condition|twice|JSON"):
        read_filter(written)
