"""plsc plan counts old class centres: resident rows, their pass, and no update or checkpoint of them."""

import pytest
import torch
from safetensors.torch import save_file

from plsc.config import load
from plsc.plan import Hardware, Links, link_speed, named_device, plan
from plsc.plan.planner import as_text

pytestmark = pytest.mark.slow

CLASSES, OLD, DIM, GPUS = 2_000_000, 3_000, 512, 4


def planned(changes):
    device = named_device("h100")
    links = Links(link_speed("nvlink", device, "--link"), link_speed("infiniband", device, "--between"))
    config = load(None, {"backbone": "mobilefacenet", "embedding_dim": DIM, "precision": "bf16", **changes})
    return plan(config, CLASSES, Hardware(device, device.memory, links, None), gpus=GPUS)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_centres_take_their_rows_and_a_pass(tmp_path, dtype):
    save_file({"weight": torch.zeros(OLD, DIM)}, tmp_path / "old.safetensors")
    dtypes = {"head.weight_dtype": dtype}
    free = planned(dtypes)
    here = planned({**dtypes, "compatible.with": str(tmp_path / "old.safetensors")})
    away = planned({**dtypes, "compatible.with": "runs/elsewhere"})
    for other, classes in ((here, OLD), (away, CLASSES)):
        added = dict(other.configured.memory.kept)
        row = DIM * (4 if dtype == "float32" else 2) + 4  # the weights and 1/norm
        assert added.pop("old class centres") == classes / GPUS * row
        assert added == free.configured.memory.kept
        assert other.configured.memory.checkpoint == free.configured.memory.checkpoint
        assert other.as_dict()["disk"] == free.as_dict()["disk"]
        assert other.as_dict()["classes"] == CLASSES
        assert f"old class centres: {classes:,} x {DIM}, stored as {dtype}" in as_text(other)
    products = {name: each.configured.timing.parts["head, products"] for name, each in (("f", free), ("a", away))}
    assert products["a"] == pytest.approx(1.5 * products["f"], rel=0.01)  # a pass of two
    assert here.configured.timing.seconds < away.configured.timing.seconds
