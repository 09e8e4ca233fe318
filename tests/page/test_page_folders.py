"""The page in a real browser: folders of people, who is known already, and large pictures made smaller."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect
from support.page_actions import ADA, ADA_AGAIN, KURT
from support.page_kit import PageService, chosen, cosine, draw, drop, embedding, png

pytestmark = [pytest.mark.slow, pytest.mark.live]


@pytest.fixture
def staff(service: PageService, request: pytest.FixtureRequest) -> str:
    return service.collection(f"staff-{request.node.name}"[:60])


def test_a_folder_of_folders_is_enrolled_with_a_report(visit: Any, staff: str, service: PageService) -> None:
    page = visit(staff)
    page.get_by_role("tab", name="Enrol").click()
    files = {
        f"team/Person {number}/{side}.png": png(draw(1000 + 2 * number + side))
        for number in range(20)
        for side in (0, 1)
    }
    files |= {
        "team/Ada/one.png": png(ADA),
        "team/Ada/deeper/two.png": png(ADA_AGAIN),
        "team/Kurt/broken.png": b"\x89PNG\r\n\x1a\nbroken",
        "team/Kurt/good.png": png(KURT),
        "team/Nobody/empty.jpg": b"no picture",
        "team/notes.txt": b"text",
        "team/loose.png": png(draw(90)),
        "team/.DS_Store": b"hidden",
        "team/@eaDir/Ada.png": png(ADA),
        "team/Ada/@eaDir/one.png/SYNOPHOTO_THUMB_M.png": png(ADA),
    }
    drop(page, files)
    expect(page.locator("#many-title")).to_have_text("23 people with 45 pictures")
    expect(page.locator("#many-plan")).to_contain_text(
        "4 files will be left out: team/@eaDir/Ada.png (in a folder of the system's), …"
    )
    page.get_by_role("button", name="Enrol 23 people").click()
    expect(page.locator("#many-summary")).to_have_text("23 of 23 people: 22 enrolled, 1 left out.")
    report = page.locator("#many-report li")
    expect(report).to_have_count(2)
    expect(report.filter(has_text="Kurt")).to_contain_text("broken.png")
    expect(report.filter(has_text="Nobody")).to_contain_text("left out. empty.jpg")
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="As JSON").click()
    told = json.loads(Path(downloaded.value.path()).read_text())
    assert told["counts"]["enrolled"] == 22
    previews = ["team/@eaDir/Ada.png", "team/Ada/@eaDir/one.png/SYNOPHOTO_THUMB_M.png"]
    assert [one["name"] for one in told["files_left_out"]] == [*previews, "team/loose.png", "team/notes.txt"]
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="Download the report").click()
    assert "Kurt\tenrolled\t#" in Path(downloaded.value.path()).read_text()

    enrolled = {person.name: person for person in service.store.persons(staff)}
    assert {name: len(one.faces) for name, one in enrolled.items()} == {
        **{f"Person {number}": 2 for number in range(20)},
        "Ada": 2,
        "Kurt": 1,
    }
    (match,) = service.store.search(staff, [embedding(ADA_AGAIN)], k=1)[0]
    assert match.person == enrolled["Ada"].id
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#enrol-form")).to_be_visible()


def test_200_folders_a_few_at_a_time_and_stopped(visit: Any, staff: str, service: PageService) -> None:
    page = visit(staff)
    page.get_by_role("tab", name="Enrol").click()
    pages = {"flying": 0, "most": 0}

    def count(step: int) -> Any:
        def note(request: Any) -> None:
            if request.method == "POST" and "/persons" in request.url:
                pages["flying"] += step
                pages["most"] = max(pages["most"], pages["flying"])

        return note

    page.on("request", count(1))
    page.on("requestfinished", count(-1))
    drop(page, {f"all/{number:03}/face.png": png(draw(2000 + number)) for number in range(200)})
    page.get_by_role("button", name="Enrol 200 people").click()
    expect(page.locator("#many-summary")).to_have_text("200 of 200 people: 200 enrolled.", timeout=120_000)
    assert 1 < pages["most"] <= 3
    assert len(service.store.persons(staff, limit=1000)) == 200

    held: list[Any] = []
    page.route("**/persons?*", lambda route: held.append(route))
    drop(page, {f"more/{number}/face.png": png(draw(3000 + number)) for number in range(9)})
    page.get_by_role("button", name="Enrol 9 people").click()
    expect(page.locator("#many-progress")).to_be_visible()
    while len(held) < 3:
        page.wait_for_timeout(20)
    page.get_by_role("button", name="Stop").click()
    for one in list(held):
        one.continue_()
    expect(page.locator("#many-summary")).to_have_text("9 of 9 people: 3 enrolled, 6 not tried.")
    assert len(service.store.persons(staff, limit=1000)) == 203


def test_a_chosen_folder_of_pictures_is_one_person(visit: Any, staff: str, tmp_path: Path) -> None:
    folder = tmp_path / "Emmy"
    folder.mkdir()
    for number in (0, 1):
        (folder / f"{number}.png").write_bytes(png(draw(40 + number)))
    page = visit(staff)
    page.get_by_role("tab", name="Enrol").click()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a folder…").click()
    chooser.value.set_files(folder)
    expect(page.locator("#enrol-pictures li")).to_have_count(2)
    expect(page.locator("#enrol-pictures .caption")).to_have_text(["0.png", "1.png"])
    expect(page.locator("#enrol-name")).to_have_value("Emmy")
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(page.locator("#enrol-done")).to_contain_text(" with 2 faces.")


def test_who_is_known_is_added_to_or_enrolled_only_when_asked(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Enrol").click()
    page.locator("#enrol-pictures input").set_input_files(chosen(ADA_AGAIN))
    question = page.get_by_role("alertdialog", name="Already enrolled?")
    ada = service.store.persons(people)[0].id
    page.get_by_role("button", name="Enrol", exact=True).click()
    expect(question).to_contain_text(
        f"This picture matches Ada Lovelace (#{ada}) at {cosine(ADA, ADA_AGAIN):.3f}. Add it there, or enrol anyway?"
    )
    expect(page.get_by_role("button", name="Do not enrol")).to_be_focused()
    expect(question.get_by_label("Do the same for all")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#enrol-done")).to_contain_text("Nothing is enrolled.")
    assert len(service.store.persons(people)) == 4
    page.get_by_role("button", name="Enrol", exact=True).click()
    page.get_by_role("button", name="Add to Ada Lovelace").click()
    expect(page.locator("#enrol-done")).to_contain_text("Added 1 face to Ada Lovelace")
    assert len(service.store.persons(people)[0].faces) == 2
    page.locator("#enrol-pictures input").set_input_files(chosen(ADA_AGAIN))
    page.get_by_role("button", name="Enrol", exact=True).click()
    page.get_by_role("button", name="Enrol anyway").click()
    expect(page.locator("#enrol-done")).to_contain_text("Enrolled Person")
    assert len(service.store.persons(people)) == 5


def test_a_folder_asks_once_what_to_do_with_all_who_are_known(visit: Any, people: str, service: PageService) -> None:
    page = visit(people)
    page.get_by_role("tab", name="Enrol").click()
    pictures = {name: draw(seed, like=ADA) for seed, name in enumerate(("Kay", "Kim", "Kit"), 4000)}
    drop(page, {f"team/{name}/face.png": png(picture) for name, picture in {**pictures, "Ned": draw(91)}.items()})
    page.get_by_role("button", name="Enrol 4 people").click()
    question = page.get_by_role("alertdialog", name="Already enrolled?")
    expect(question).to_contain_text("This picture of K")
    question.get_by_label("Do the same for all that follow").check()
    question.get_by_role("button", name="Add to Ada Lovelace").click()
    expect(page.locator("#many-summary")).to_have_text("4 of 4 people: 1 enrolled, 3 added to a match.")
    assert len(service.store.persons(people)[0].faces) == 4
    assert service.store.persons(people)[-1].name == "Ned"


@pytest.mark.parametrize("kind", ["GIF", "BMP"])
def test_other_formats_are_sent_as_jpeg(visit: Any, people: str, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, kind)
    page = visit(people)
    with page.expect_response("**/search") as answered:
        page.locator("#search-picture input").set_input_files(
            {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": file.getvalue()}  # the name says nothing
        )
    assert answered.value.status == 200
    image = Image.open(io.BytesIO(base64.b64decode(answered.value.request.post_data_json["query"]["image"])))
    assert (image.format, image.size) == ("JPEG", (40, 30))
    np.testing.assert_allclose(np.asarray(image), np.broadcast_to([254, 0, 0], (30, 40, 3)), atol=4)


def test_a_large_picture_is_sent_smaller_and_upright(visit: Any, people: str) -> None:
    large = Image.new("RGB", (3000, 2000), "red")
    large.paste("blue", (0, 0, 1500, 2000))
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees: what is left comes to the top
    large.save(file, "JPEG", exif=exif)
    page = visit(people)
    for content, size in ((file.getvalue(), (1365, 2048)), (png(ADA), (16, 16)), (b"\0\0\0\x18ftypheic", None)):
        with page.expect_request("**/search") as asked:
            page.locator("#search-picture input").set_input_files(
                {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": content}
            )
        sent = base64.b64decode(asked.value.post_data_json["query"]["image"])
        if size == (1365, 2048):
            image = Image.open(io.BytesIO(sent))
            assert image.size == size
            top, bottom = (np.asarray(image)[row].mean(0) for row in (100, -100))
            assert top[2] > 200 > 50 > top[0]
            assert bottom[0] > 200 > 50 > bottom[2]
        else:
            assert sent == content  # small, or not decoded by the browser: the file as it is
    expect(page.locator("#search-error")).to_contain_text("photo.jpg")
    expect(page.locator("#search-picture .refused .why")).not_to_be_empty()
