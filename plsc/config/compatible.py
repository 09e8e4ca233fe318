"""The keys of [compatible]: a new backbone whose queries search the gallery of an old one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config.sections import Config  # which imports this module


@dataclass(frozen=True)
class CompatibleConfig:
    """[compatible]: embeddings that can be compared with those of an old model (backward-compatible training).

    Attributes:
        with_: The old model's class centres, which stay as they are: its run or checkpoint (the rows of its class
            table), a .safetensors of plsc table export, or the embedding set that the old model made of data.train
            (plsc embed), whose mean of each class is its centre; empty: none. Classes are known by their names.
        weight: Weight in the loss of the run of the influence loss: the softmax of the new embeddings over the old
            centres, of the pictures whose class has one.
        s: Scale of the cosines with the old centres; unset: head.s, or 64.
        m: Margin of the cosine with a picture's own centre, cos θ − m as in cosface; 0: none.
    """

    with_: str = key("")
    weight: float = key(1.0, above=0)
    s: float | None = key(None, above=0)
    m: float = key(0.2, least=0, below=1)

    def refusals(self, run: "Config") -> Iterator[str]:
        """Say, one after another, what of ``run`` does not go with these keys."""
        if not self.with_:
            if self != CompatibleConfig():
                yield "[compatible] has no old class centres: give compatible.with, or leave the section out"
            return
        if run.table:
            yield "compatible.with is made for a single class table; leave it out, or [[table]]"
        if "*" in run.frozen and not run.stage:
            yield 'frozen = "*" trains nothing that compatible.with could change; leave one of them out'
