"""Programs of torch.export that were made to harm: they run no code, and take memory or time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc.embedding.program import FORMAT, save_program
from plsc.models.preprocessing import Preprocessing
from untrusted.samples import EMBED, Case, Samples, arguments, members_of, packed

SIDE = 32
WIDE = 1500


class Program(nn.Module):
    """The mean of each channel, and what ``more`` adds to it."""

    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._more = more

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3)) + self._more(images)


def _constant(images: Tensor) -> Tensor:
    return torch.full((1264, 1000, 1000), 1.0).mean()


def _products(images: Tensor) -> Tensor:
    factor = torch.full((WIDE, WIDE), 0.5)
    product = factor
    for _ in range(300):
        product = product @ factor
    return product.mean()


def _bright(images: Tensor) -> Tensor:
    """All products of the bright pixels: none in noise, and 10^7 in a white picture."""
    bright = torch.masked_select(images, images > 5)
    return bright[:, None].mul(bright).sum()


def save(more: Callable[[Tensor], Tensor], path: Path) -> None:
    """Export the program that adds ``more``, without running it."""
    example = torch.zeros(2, 3, SIDE, SIDE)
    batch = torch.export.Dim("batch", min=1)
    exported = torch.export.export(Program(more), (example,), dynamic_shapes=({0: batch},))
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        node.args = (node.args[0], "assertion")  # an attacker would not leave the sentence, which is refused by itself
    about = {"format": FORMAT, "embedding_dim": 3, "contract_id": "0" * 16}
    save_program(exported, path, {**Preprocessing(SIDE).to_dict(), **about})


def _embedded(more: Callable[[Tensor], Tensor]) -> Case:
    def make(folder: Path, samples: Samples) -> list[str]:
        save(more, folder / "crafted.pt2")
        return arguments(EMBED, folder, samples, folder / "crafted.pt2")

    return make


def _without_contract(folder: Path, samples: Samples) -> list[str]:
    words = _embedded(lambda images: images.mean())(folder, samples)
    path = folder / "crafted.pt2"
    members = members_of(path.read_bytes())
    name = next(name for name in members if name.endswith("plsc.json"))
    contract: dict[str, Any] = json.loads(members[name])
    members[name] = json.dumps({key: value for key, value in contract.items() if key != "contract_id"}).encode()
    path.write_bytes(packed(members))
    return words


# Of each what its refusal says: another check refuses a file whose crafting no longer does what it is called.
_CRAFTED: dict[str, tuple[Case, str]] = {
    "4.7 GiB of a constant": (_embedded(_constant), "takes more memory than a model of its size"),
    "300 products of 1,500 x 1,500": (_embedded(_products), "seconds to load and run"),
    "products of the bright pixels": (_embedded(_bright), "has sizes that depend on the pictures"),
    "no contract_id": (_without_contract, "contract_id"),
}
CASES = {name: case for name, (case, _) in _CRAFTED.items()}
REASONS = {name: reason for name, (_, reason) in _CRAFTED.items()}
