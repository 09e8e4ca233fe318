"""The page in a real browser: a collection is moved to another model, watched, judged, cut over and rolled back."""

import base64
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from support.page_actions import HOSTILE, overflow
from support.page_kit import PageService, ProjectedEngine, chosen, draw, png

pytestmark = [pytest.mark.slow, pytest.mark.live]

AXE = Path(__file__).parent / "axe" / "axe.min.js"
PHONE = {"width": 390, "height": 844}
PERSONS, FACES = 12, 5  # an adapter is learned from fifty faces at the least


@pytest.fixture
def moving(serve: Any, tmp_path: Path) -> PageService:
    """A service with a next model, and a collection of which two persons have no kept picture."""
    service: PageService = serve(
        next_engine=ProjectedEngine(), keep_thumbnails=True, thumbnails=tmp_path / "thumbnails"
    )
    service.collection("staff")
    with httpx.Client(base_url=service.url, timeout=60) as client:
        for person in range(PERSONS):
            first = draw(100 * person)
            pictures = [draw(100 * person + at, like=first, share=0.9) for at in range(FACES)]
            inputs = [{"image": base64.b64encode(png(picture)).decode()} for picture in pictures]
            answer = client.post("v1/collections/staff/persons", json={"name": f"P{person}", "faces": inputs})
            assert answer.status_code == 201, answer.text
    service.enrol("staff", HOSTILE, [draw(9000)])
    service.enrol("staff", None, [draw(9001)])
    return service


def assert_accessible(page: Any) -> None:
    """No issue in any of axe-core's rules, and nothing wider than the window."""
    violations = page.evaluate("async () => (await axe.run()).violations")
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in violations] == []
    assert overflow(page) == 0


def press(page: Any, label: str, done: str, *, confirm: str | None = None) -> None:
    page.locator("#migration").get_by_role("button", name=label).click()
    if confirm is not None:
        page.locator("#confirm").get_by_role("button", name=confirm).click()
    expect(page.locator("#migration-done")).to_have_text(re.compile(done))


def status(service: PageService) -> dict[str, Any]:
    return dict(httpx.get(f"{service.url}v1/migrations/staff").json())


def test_a_collection_is_moved_from_the_page(visit: Any, moving: PageService) -> None:
    page = visit("staff", at=moving, viewport=PHONE, color_scheme="dark", bypass_csp=True)
    page.add_script_tag(path=AXE)
    page.get_by_role("tab", name="Service").click()
    button = page.locator("#migration").get_by_role("button", name=re.compile("…|^(Begin|Pause|Estimate|Judge|Roll)"))
    expect(button).to_have_text(["Begin the move"])
    press(page, "Begin the move", "has begun")
    expect(button).to_have_text(["Pause", "Estimate", "Judge", "Cut over…", "Cancel the move…"])

    count = page.locator("#migration-count")  # looked at again and again while it fills
    expect(count).to_have_text("60 of 62 faces with a vector of the new model, 2 without.")
    expect(page.locator("#migration-missing-title")).to_have_text("Missing: 2 people")
    missing = page.locator("#migration-missing-list li")
    expect(missing).to_have_text([f"{HOSTILE}#13 · 1 faceSend pictures…", "Person 14#14 · 1 faceSend pictures…"])
    page.get_by_role("button", name="Person 14", exact=True).click()
    expect(page.locator("#person-title")).to_have_text("Person 14")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Cut over…")).to_be_disabled()
    press(page, "Pause", "Paused")
    assert status(moving)["is_paused"]
    assert_accessible(page)
    press(page, "Resume", "goes on")
    for picture, told in ((draw(9000), "none of the pictures is one"), (draw(9001), "1 face of Person 14 with a")):
        with page.expect_file_chooser() as choosing:
            page.get_by_role("button", name="Send pictures of Person 14").click()
        choosing.value.set_files(chosen(picture))
        expect(page.locator("#migration-error:visible, #migration-done")).to_contain_text([told])
    expect(page.locator("#migration-error")).to_be_hidden()
    expect(missing).to_have_count(1)
    expect(page.locator("#migration-title")).to_be_focused()

    press(page, "Estimate", "1 face with an estimate")
    press(page, "Estimate", "1 face with an estimate")  # renewed
    press(page, "Judge", f"Judged by {PERSONS + 1} people")
    judgement = status(moving)["judgement"]
    rates = page.locator("#migration-rates")
    expect(rates.locator("thead th")).to_have_text(["Old model", "New model", "Estimates"])
    for column, space in enumerate(("old", "new", "estimated")):
        shown = [f"{100 * judgement['spaces'][space][key]:.1f}%" for key in ("tar", "used_tar")]
        cells = rates.locator("tbody tr").locator(f"td:nth-of-type({column + 1})")
        expect(cells.nth(0)).to_contain_text(shown[0])
        expect(cells.nth(1)).to_have_text(f"{judgement['spaces'][space]['threshold']:.3f}")
        expect(cells.nth(2)).to_contain_text(shown[1])
    low, high = (f"{100 * end:.1f}".replace("-", "−") for end in judgement["loss_interval"])
    lost = f"True accept rate lost by faces with an estimate: {100 * judgement['loss']:.1f} percentage points"
    expect(page.locator("#migration-loss")).to_contain_text(f"{lost} (95%: {low} to {high})")
    for name in judgement["curves"]:
        points = page.locator(f"#migration-roc polyline.{name}").get_attribute("points")
        assert len(points.split()) == len(judgement["curves"][name]["roc"]["far"])
    assert_accessible(page)

    page.get_by_role("button", name="Cut over…").click()
    told = rf"anew, which finds the threshold, and refused beyond a loss of 0\.01; .*{judgement['threshold']:.3f}"
    expect(page.locator("#confirm-text")).to_have_text(re.compile(told))
    page.locator("#confirm").get_by_role("button", name="Cut over").click()
    expect(page.locator("#confirm-error")).to_contain_text("allow a larger loss")
    page.locator("#confirm").get_by_role("button", name="Not yet").click()
    page.get_by_label("Largest loss").fill("2")
    expect(page.get_by_role("button", name="Cut over…")).to_be_disabled()
    page.get_by_label("Largest loss").fill("1")
    press(page, "Cut over…", "read the new model's", confirm="Cut over")
    expect(page.locator("#service-collections td").nth(2)).to_have_text("the next one")
    expect(button).to_have_text(["Roll back", "Finish…"])
    press(page, "Roll back", "read the old model's")
    assert not status(moving)["is_cut_over"]
    page.get_by_label("Threshold of the new model").fill("0.6")
    page.get_by_role("button", name="Cut over…").click()
    expect(page.locator("#confirm-text")).to_contain_text("is judged anew, with the threshold 0.6, and refused")
    page.locator("#confirm").get_by_role("button", name="Not yet").click()
    press(page, "Cut over…", "read the new model's", confirm="Cut over")
    assert status(moving)["thresholds"]["projected"] == 0.6
    page.get_by_role("button", name="Finish…").click()
    page.get_by_label("Type staff to confirm").fill("staff")
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.locator("#migration-done")).to_have_text(re.compile(r"is moved\. Start .* --threshold 0\.6 next time"))
    expect(page.locator("#migration-there")).to_have_text("staff is of the next model already.")
    expect(page.locator("#migration-title")).to_be_focused()


def test_an_error_is_shown_a_move_is_cancelled_and_nobody_else_sees_it(visit: Any, serve: Any, tmp_path: Path) -> None:
    service = serve(next_engine=ProjectedEngine())
    service.collection("staff")
    service.enrol("staff", "Ada", [draw(1)])
    page = visit("staff", at=service)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("tab", name="Service").click()
    press(page, "Begin the move", "has begun")
    page.get_by_role("button", name="Estimate").click()
    expect(page.locator("#migration-error")).to_contain_text("at the least")
    page.get_by_role("tab", name="Search").click()
    page.wait_for_timeout(2000)  # a look that was under way ends
    asked.clear()
    page.wait_for_timeout(2500)
    assert not any("migrations" in url for url in asked), "it asks while it is hidden"
    page.get_by_role("tab", name="Service").click()
    press(page, "Cancel the move…", "is cancelled", confirm="Delete the new vectors")
    expect(page.get_by_role("button", name="Begin the move")).to_be_visible()


def test_without_a_next_model_there_is_nothing_to_see(visit: Any, people: str) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Service").click()
    expect(page.locator("#manage-delete")).to_be_visible()
    expect(page.locator("#migration")).to_be_hidden()
