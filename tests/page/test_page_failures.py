"""The page in a real browser: what goes wrong is told, and mended where it can be."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.page_actions import ADA, search_for
from support.page_kit import chosen, draw

from plsc.serve.settings import Limits
from plsc.serve.tokens import add_token

pytestmark = [pytest.mark.slow, pytest.mark.live]


@pytest.mark.parametrize(
    ("content", "told"), [(b"\x89PNG\r\n\x1a\nbroken", "query"), (b"no picture at all", "JPEG, PNG, WEBP or AVIF")]
)
def test_a_broken_image_is_told_in_the_services_words(visit: Any, people: str, content: bytes, told: str) -> None:
    page = visit(people)
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": content}
    with page.expect_response("**/search") as answer:
        page.locator("#search-picture input").set_input_files(broken)
    message = answer.value.json()["error"]["message"]
    assert told in message
    expect(page.locator("#search-error")).to_have_text(message.replace("query", "broken.png", 1))
    expect(page.locator("#search-picture .blind")).to_have_text("no preview of broken.png")
    search_for(page, chosen(ADA), 4)
    expect(page.locator("#search-error")).to_be_hidden()

    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-a input").set_input_files(broken)
    page.locator("#compare-b input").set_input_files(chosen(ADA))
    expect(page.locator("#compare-error")).to_contain_text("broken.png ")
    page.get_by_role("tab", name="Enrol").click()
    page.locator("#enrol-pictures input").set_input_files([chosen(ADA), broken])
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-error")).to_contain_text("broken.png ")
    expect(page.locator("#enrol-pictures li")).to_have_count(2)


def test_a_picture_that_is_no_crop_is_doubted_by_its_name(visit: Any, people: str) -> None:
    page = visit(people)
    wide = chosen(draw(80)[:8], "group photo.png")
    told = "group photo.png: 16x8 pixels are not square; give an aligned crop."
    search_for(page, wide, 4)
    expect(page.locator("#search-warning")).to_have_text(told)
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#search-warning")).to_be_empty()
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-a input").set_input_files(wide)
    page.locator("#compare-b input").set_input_files(chosen(ADA))
    expect(page.locator("#compare-warning")).to_have_text(told)
    page.get_by_role("tab", name="Enrol").click()
    page.locator("#enrol-pictures input").set_input_files([chosen(draw(33)), wide])
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-warning")).to_have_text(told)
    page.get_by_role("tab", name="Browse").click()
    page.get_by_role("button", name="Ada Lovelace", exact=True).click()
    page.locator("#person-add input").set_input_files(wide)
    expect(page.locator("#person-warning")).to_have_text(told)


def test_a_picture_beyond_the_limit_is_not_sent(visit: Any, serve: Any) -> None:
    service = serve(limits=Limits(body_bytes=2**20))
    page = visit(service.collection("staff"), at=service)
    large = {"name": "large.png", "mimeType": "image/png", "buffer": bytes(2**20 * 4 // 5)}
    page.locator("#search-picture input").set_input_files(large)
    expect(page.locator("#search-error")).to_contain_text("The service takes 1 MiB per request")


def test_tokens_wrong_reading_and_writing(visit: Any, serve: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    reader, writer = add_token(tokens, "reader", "read"), add_token(tokens, "writer", "write")
    service = serve(tokens=tokens)
    service.enrol(service.collection("staff"), "Ada", [ADA])
    page = visit(at=service, ready=False)
    expect(page.locator("#health-word")).to_have_text("token needed")
    expect(page.get_by_role("tab")).to_have_count(0)  # nothing that could not be used
    expect(page.locator("#search-form")).to_be_hidden()
    field = page.get_by_label("Token", exact=True)
    expect(field).to_be_focused()
    expect(page.locator("#page-error")).to_be_hidden()
    expect(page.locator("#search-threshold")).not_to_contain_text("no threshold")  # nobody knows yet
    for wrong, told in (
        ("plsc_wrong", "The service does not know this token."),
        ("two words", "without spaces"),
        ("ключ", "letters"),
    ):
        field.fill(wrong)
        field.press("Enter")
        expect(page.locator("#token-error")).to_contain_text(told)
        assert page.evaluate("sessionStorage.getItem('plsc-token')") is None
    field.fill(reader)
    field.press("Enter")
    expect(page.locator("#token-form")).to_be_hidden()
    expect(page.locator("#health-word")).to_have_text("ready")
    expect(page.get_by_label("Collection", exact=True)).to_have_value("staff")
    search_for(page, chosen(ADA), 1)
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
        0,
        "",
        reader,
    ]
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
    expect(page.get_by_label("Collection", exact=True)).to_be_hidden()


def test_a_token_that_may_only_search_is_told_what_it_may_not(visit: Any, serve: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    camera = add_token(tokens, "camera", "search")
    service = serve(tokens=tokens)
    service.enrol(service.collection("staff"), "Ada", [ADA])
    page = visit(at=service, ready=False)
    page.get_by_label("Token", exact=True).fill(camera)
    page.get_by_label("Token", exact=True).press("Enter")
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#matches > li")).to_contain_text("Ada")
    expect(page.locator("#matches button")).to_have_count(0)
    page.get_by_role("tab", name="Browse").click()
    expect(page.locator("#browse-summary")).to_contain_text("may only search")
    expect(page.locator("#browse-error")).to_be_hidden()
    page.get_by_role("tab", name="Enrol").click()
    expect(page.locator("#enrol-done")).to_contain_text("may only search")


def test_a_service_that_is_gone_is_told_and_its_return_noticed(visit: Any, serve: Any) -> None:
    service = serve()
    service.enrol(service.collection("staff"), "Ada", [ADA])
    page = visit("staff", at=service)
    service.stop()
    page.locator("#search-picture input").set_input_files(chosen(ADA))
    expect(page.locator("#search-error")).to_contain_text(f"The service at {service.url[7:-1]} does not answer")
    expect(page.locator("#health-word")).to_have_text("not answering")
    page.get_by_role("tab", name="Service").click()
    page.get_by_role("button", name="Refresh").click()
    expect(page.locator("#service-error")).to_contain_text("does not answer")
    service.start()
    page.get_by_role("button", name="Refresh").click()
    expect(page.locator("#health-word")).to_have_text("ready")
    page.get_by_role("tab", name="Search").click()
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("#matches button.name")).to_have_text(["Ada"])
    expect(page.locator("#search-error")).to_be_hidden()
