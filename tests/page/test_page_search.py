"""The page in a real browser: searching and comparing; what it shows is compared with numpy."""

from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect
from support.page_actions import (
    ADA,
    ADA_AGAIN,
    GRACE,
    HOSTILE,
    KURT,
    choose_by_keyboard,
    expected_matches,
    open_tab_by_keyboard,
    search_for,
    shown_matches,
    tab_to,
)
from support.page_kit import chosen, cosine, draw, png

from plsc.evaluation.search_thresholds import SearchCalibration, SearchThresholds

pytestmark = [pytest.mark.slow, pytest.mark.live]


def test_a_chosen_picture_is_searched_and_names_stay_text(visit: Any, people: str) -> None:
    page = visit(people)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="A picture to search by").click()
    chooser.value.set_files(chosen(ADA_AGAIN))
    expect(page.locator("#matches > li")).to_have_count(4)
    assert shown_matches(page) == expected_matches(ADA_AGAIN)
    expect(page.locator("#search-summary")).to_have_text(
        f"1 above the threshold among 4 people. The best is Ada Lovelace at {cosine(ADA, ADA_AGAIN):.3f}."
    )
    expect(page.locator("#search-odds")).to_have_text(
        "At this threshold, about 5 in 1,000 strangers would match here by mistake."  # five faces, one in 1,000 each
    )
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
    search_for(page, chosen(ADA), 4)
    page.get_by_label("Results").fill("2")
    page.get_by_label("Results").press("Enter")
    expect(page.locator("#matches > li")).to_have_count(2)
    page.locator("#search-filter").fill('city = "Vienna", age > 40')
    page.locator("#search-filter").press("Enter")
    expect(page.locator("#matches button.name")).to_have_text(["Kurt Gödel"])
    expect(page.locator("#search-summary")).to_contain_text("No match among the filtered people. The nearest is")
    for typo, fields in (("ctiy = Vienna", "ctiy"), ("age >= 30, set lfw", "set lfw")):
        page.locator("#search-filter").fill(typo)
        page.locator("#search-filter").press("Enter")
        expect(page.locator("#search-warning")).to_have_text(
            f'nothing here has a field "{fields}"; fields: <b>note</b>, age, city.'
        )
        expect(page.locator("#search-summary")).to_have_text("No people here match the filter.")
    page.locator("#search-filter").fill('{"city": {"near": "Bern"}}')
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("#search-error")).to_contain_text("knows no 'near'")
    page.locator("#search-filter").fill("= 3")
    page.locator("#search-filter").press("Enter")
    expect(page.locator("#search-error")).to_contain_text("is not a condition")
    page.locator("#search-filter").fill("")
    page.get_by_label("Results").fill("0")
    page.get_by_label("Results").press("Enter")
    expect(page.locator("#search-form :invalid")).to_have_count(1)


def test_other_thresholds_are_tried_and_the_services_own_comes_back(visit: Any, people: str) -> None:
    page = visit(people)
    page.locator("#search-picture input").set_input_files(chosen(ADA_AGAIN))
    best = page.locator("#matches > li").first.locator(".judgement")
    expect(best).to_have_text("possible match")
    meaning = "threshold, 0.500. One in 1,000 pairs of strangers reaches it."
    expect(page.locator("#search-threshold")).to_contain_text(meaning)
    slider = page.get_by_label("Threshold").first
    slider.focus()
    page.keyboard.press("End")
    expect(page.locator("#search-threshold output")).to_have_text("1.000")
    expect(best).to_have_text("below threshold")
    expect(page.locator("#search-summary")).to_contain_text("No match among 4 people. The nearest is Ada Lovelace at")
    expect(page.locator("#search-odds")).to_be_empty()  # the rate is known of the service's own threshold alone
    page.keyboard.press("Home")
    assert {verdict for _, score, verdict in shown_matches(page) if float(score) >= 0} == {"possible match"}
    page.get_by_role("tab", name="Compare").click()
    expect(page.locator("#compare-threshold output")).to_have_text("0.000")
    page.get_by_role("button", name="Reset to 0.500").click()
    page.get_by_role("tab", name="Search").click()
    assert shown_matches(page) == expected_matches(ADA_AGAIN)


def test_the_threshold_of_the_collections_size_and_what_it_holds_are_told(visit: Any, serve: Any) -> None:
    body = tuple(np.linspace(-3, 2.7, 100).tolist())
    measured = SearchCalibration((0.0, 0.02), (0.1, 0.1), body, 0.003, 0.35, 0.05, 2000, 1.0)
    by_size = SearchThresholds(measured, 1e-3)  # evidence up to 2 persons
    service = serve(search_thresholds=by_size)
    few, many = service.collection("few"), service.collection("many")
    for collection, count in ((few, 2), (many, 3)):
        for number in range(count):
            service.enrol(collection, f"P{number}", [draw(number)])
    page = visit(few, service)
    told = (
        f"The mark is the threshold for searches among 2 people, {by_size.threshold(2, 2):.3f}. "
        "At most 1 in 1,000 strangers is taken for somebody among them, as predicted."
    )
    expect(page.locator("#search-threshold .hint")).to_have_text(told)
    search_for(page, chosen(draw(0)), 2)
    expect(page.locator("#matches .judgement").first).to_have_text("possible match")
    odds = "At this threshold, about 1 in 1,000 strangers would match here by mistake."
    expect(page.locator("#search-odds")).to_have_text(odds)
    page = visit(many, service)
    expect(page.locator("#search-threshold .hint")).to_contain_text(
        f"among 3 people, {by_size.threshold(3, 3):.3f}. At most 1 in 1,000 strangers is taken for somebody among "
        "them, as predicted. Beyond 2 nothing was measured: it is extrapolated."
    )
    page.get_by_role("tab", name="Compare").click()
    meant = "The mark is the service's threshold, 0.500. One in 1,000 pairs of strangers reaches it."
    expect(page.locator("#compare-threshold .hint")).to_have_text(meant)
    page.get_by_role("tab", name="Service").click()
    expect(page.locator("#service-figures")).to_contain_text(
        "by each collection's size, for an FPIR of 0.001; of two pictures 0.5, for a false-match rate of 0.001"
    )


def test_without_a_threshold_nobody_is_judged_until_one_is_tried(visit: Any, serve: Any) -> None:
    service = serve(threshold=None, false_match_rate=None)
    service.enrol(service.collection("staff"), "Ada", [ADA])
    page = visit("staff", at=service)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#matches .judgement")).to_have_text("no threshold")
    page.get_by_label("Threshold").first.press("ArrowRight")
    expect(page.locator("#matches .judgement")).to_have_text("possible match")
    page.get_by_role("button", name="Remove the threshold").click()
    expect(page.locator("#matches .judgement")).to_have_text("no threshold")


def test_two_pictures_are_compared_by_mouse(visit: Any, people: str) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-a input").set_input_files(chosen(ADA))
    expect(page.locator("#compare-verdict")).to_be_empty()
    page.locator("#compare-b input").set_input_files(chosen(ADA_AGAIN))
    expect(page.locator("#compare-verdict .number")).to_have_text(f"{cosine(ADA, ADA_AGAIN):.3f}")
    expect(page.locator("#compare-verdict .judgement")).to_have_text("possible match")
    page.locator("#compare-b input").set_input_files(chosen(KURT))
    expect(page.locator("#compare-verdict .number")).to_have_text(f"{cosine(ADA, KURT):.3f}")
    expect(page.locator("#compare-verdict .judgement")).to_have_text("below threshold")
    page.locator("#compare-a").get_by_role("button", name="Remove").click()
    expect(page.locator("#compare-verdict")).to_be_empty()


def test_two_pictures_are_compared_by_keyboard(visit: Any, people: str) -> None:
    page = visit(people)
    open_tab_by_keyboard(page, "Compare")
    choose_by_keyboard(page, page.get_by_role("button", name="One picture"), chosen(KURT))
    choose_by_keyboard(page, page.get_by_role("button", name="The other picture"), chosen(GRACE))
    expect(page.locator("#compare-verdict .number")).to_have_text(f"{cosine(KURT, GRACE):.3f}")
