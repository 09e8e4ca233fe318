"""The page in a real browser: its policy, its access, its widths and contrasts, and how it reads filters."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error, expect
from support.page_actions import ADA, DESKTOP, PHONE, TABS, overflow, search_for
from support.page_kit import PageService, chosen, draw

from plsc.gallery.filters import Filter

pytestmark = [pytest.mark.slow, pytest.mark.live]


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


def test_the_interface_is_described_at_docs_without_another_host(visit: Any, people: str) -> None:
    page = visit(people)  # which fails where another host is asked, or the policy is broken
    with page.expect_response("**/docs/swagger-ui-bundle.js") as script:
        page.get_by_role("link", name="API: every request").click()
    policy = script.value.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    expect(page.get_by_role("heading", name="plsc")).to_be_visible()
    page.get_by_role("button", name="POST /v1/compare Compare").click()
    expect(page.get_by_text("The cosine of two inputs, and whether").first).to_be_visible()
    page.get_by_role("button", name="Try it out").click()
    with page.expect_response("**/v1/compare") as answer:
        page.get_by_role("button", name="Execute").click()
    assert answer.value.json()["score"] == pytest.approx(1)  # the example is two times one picture


def test_not_even_a_mistake_of_its_own_makes_text_markup(chromium: Any, service: PageService) -> None:
    page = chromium.new_page()
    page.goto(service.url)
    with pytest.raises(Error, match="TrustedHTML"):
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
    for kind, role in (("error", "alert"), ("summary", "status"), ("warning", "status")):
        roles = page.locator(f".{kind}").evaluate_all("all => all.map((it) => it.getAttribute('role'))")
        assert set(roles) == {role}


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_nothing_is_wider_than_the_window(visit: Any, people: str, service: PageService, size: Any) -> None:
    service.enrol(people, "W" * 300, [draw(60)], **{"k" * 100: "v" * 300})
    page = visit(people, viewport=size)
    assert overflow(page) == 0
    search_for(page, chosen(draw(60), "n" * 200 + ".png"), 5)
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


def test_every_target_is_large_enough_for_a_finger(visit: Any, people: str, service: PageService) -> None:
    page = visit(people, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)

    def assert_large(where: str) -> None:
        small = page.evaluate(
            """[...document.querySelectorAll("button, a, input, select, [tabindex='0']")]
                .filter((it) => it.checkVisibility() && !it.matches(".skip"))
                .map((it) => [it.outerHTML.slice(0, 90), it.getBoundingClientRect()])
                .filter(([, box]) => box.width < 24 || box.height < 24)"""
        )
        assert small == [], where

    expect(page.locator("#search-picture").get_by_role("button", name="Take a picture")).to_be_visible()
    search_for(page, chosen(ADA), 4)
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        assert_large(tab)
    page.get_by_role("tab", name="Search").click()
    page.locator("#matches button.name").first.click()
    expect(page.locator("#person")).to_be_visible()
    assert_large("a person")


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
    for text, ground in (
        ("ink", "paper"),
        ("soft", "paper"),
        ("soft", "surface"),
        ("accent", "paper"),
        ("accent", "wash"),
        ("on-accent", "accent"),
        ("bad", "paper"),
        ("paper", "bad"),
    ):
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
    with pytest.raises(Error, match=r"condition|twice|JSON"):
        read_filter(written)
