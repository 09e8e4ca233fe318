"""The list of planted defects follows the code."""

from pathlib import Path

from planted_defects import DEFECTS, planted

ROOT = Path(__file__).parents[1]


def test_every_planted_defect_has_its_place_and_its_guards() -> None:
    for defect in DEFECTS:
        assert planted((ROOT / defect.file).read_text(encoding="utf-8"), defect), defect.name
        assert defect.new != defect.old, defect.name
        assert all((ROOT / test).is_file() for test in defect.tests), defect.name
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 44
