"""The keys of [labels] and [negative_filter], by their names of now and before."""

import pytest

from plsc.config import class_tables, from_dict, load
from plsc.errors import UsageError
from plsc.features.labels.config import LabelsConfig
from plsc.features.negative_filter.config import NegativeFilterConfig


def test_stored_configurations_have_the_keys_by_their_former_names():
    head = {"positives": "kept", "label_reduction": "sum", "labels_per_step": 3, "negative_filter": 0.7}
    run = from_dict({"steps": 1, "data": {"train": "avatars:4x2"}, "head": head})
    assert run.section(LabelsConfig) == LabelsConfig("kept", "sum", 3)
    assert run.section(NegativeFilterConfig) == NegativeFilterConfig(0.7)


def test_a_value_in_place_of_the_section_is_the_cosine():
    run = load(None, {"data.train": "avatars:4x2", "negative_filter": 0.7})
    assert run.section(NegativeFilterConfig).cosine == 0.7


def test_each_table_may_have_its_own():
    tables = [
        {"name": "plain", "data": {"train": "avatars:4x2"}},
        {"name": "scenes", "data": {"train": "avatars:4x2"}, "labels": {"positives": "kept"}, "negative_filter": 0.5},
    ]
    plain, scenes = (table.config for table in class_tables(from_dict({"steps": 1, "table": tables})))
    assert not plain.features
    assert scenes.section(LabelsConfig).positives == "kept"
    assert scenes.section(NegativeFilterConfig).cosine == 0.5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("labels.positives", "kept", 'no loss of each: labels.positives = "kept" means nothing'),
        ("labels.reduction", "sum", 'no loss of each: labels.reduction = "sum" means nothing'),
        ("negative_filter", 0.5, "leave negative_filter out"),
    ],
)
def test_a_margin_with_one_term_for_all_labels_is_refused(key, value, message):
    with pytest.raises(UsageError, match=message):
        load(None, {"data.train": "avatars:4x2", "head.margin": "mlcd", key: value})
