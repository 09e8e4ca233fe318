"""The keys of [head]: margin, sampling, and storage of the class table."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plsc.errors import UsageError
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config.sections import Config  # which imports this module
    from plsc.losses.margins import Margin  # imports torch


def margin_keys() -> dict[str, tuple[str, ...]]:
    """The keys of [head] that each margin takes; one that is unset keeps the margin's own default."""
    from plsc.losses import MARGINS

    return {name: _keys_of(name) for name in MARGINS}


@functools.cache
def _keys_of(margin: str) -> tuple[str, ...]:
    from plsc.losses import MARGINS

    own = {field.name for field in dataclasses.fields(HeadConfig)}  # a package's margin may have further fields
    return tuple(field.name for field in dataclasses.fields(MARGINS[margin]) if field.name in own)


@dataclass(frozen=True)
class HeadConfig:
    """[head]: the class head; the number of classes comes from the data.

    Attributes:
        margin: Margin of the softmax.
        s: Scale of the cosines; unset: 64.
        m: Margin; unset: 0.5 (arcface, curricularface, elasticface), 0.4 (cosface, adaface), 1.7 (sphereface).
        m1: combined: m1 of cos(m1·θ + m2) − m3; unset: 1.
        m2: combined: m2 of cos(m1·θ + m2) − m3, in radians; unset: 0.5.
        m3: combined: m3 of cos(m1·θ + m2) − m3; unset: 0.
        h: adaface: factor of the embedding's standardised norm in the margin; unset: 0.333.
        rate: adaface, curricularface: weight of the newest batch, or micro-batch of optim.accumulate, in the running
            statistics; unset: 0.01.
        m_low: magface: margin at norm_low, in radians; unset: 0.45.
        m_high: magface: margin at norm_high, in radians; unset: 0.8.
        norm_low: magface: smallest embedding norm; unset: 10.
        norm_high: magface: largest embedding norm; unset: 110.
        penalty_weight: magface: weight of the penalty on small norms; unset: 35.
        std: elasticface: standard deviation of the margins drawn per sample; unset: 0.0125.
        base: elasticface: margin on the angle (arc) or on the cosine (cos); unset: arc.
        plus: elasticface: give the largest margins to the smallest cosines (ElasticFace+); unset: false.
        gradient: Gradient through the margin: exact, or straight_through, which applies the margin without gradient as
            arcface_torch does; unset: exact.
        centers: Sub-centres per class.
        sample_rate: Share of the classes that take part in a step (Partial FC); 1 is the exact softmax, 0 takes the
            classes of the batch alone.
        init_rows: Class centres that the table starts from: a .npy (classes, D), as plsc cluster writes centres.npy, a
            .safetensors of plsc table, or an embedding set of labelled images; random rows otherwise. Names
            that it has must be those of the data's classes. Where classes come and go, rows by name: of a run too,
            and of files that have the names beside them.
        weight_dtype: Storage type of the class weights; bfloat16 is rounded stochastically.
        momentum_dtype: Storage type of the class weights' momentum (adamw: of both moments); none trains without
            momentum.
        fp32_precision: How a GPU multiplies a float32 table: ieee, tf32 (factors of 11 bits, on the matrix units), or
            bf16x3 (16 bits, three bfloat16 products); bfloat16 tables are not concerned, and a CPU takes ieee alone.
        exponentials_memory: Memory of a GPU, such as 8GiB, in which the forward may keep a batch's exponentials until
            the update, which makes one product in the place of two then; unset: none.
        placement: Memory that holds class weights and momentum: device (the GPU), host (main memory), or mmap:FILE (a
            mapped file per rank).
    """

    margin: str = key("arcface", choices="plsc.losses:MARGINS", also_called=("loss",), is_fixed=True)
    s: float | None = key(None, above=0, in_stages=True)
    m: float | None = key(None, least=0, in_stages=True)
    m1: float | None = key(None, above=0, in_stages=True)
    m2: float | None = key(None, least=0, in_stages=True)
    m3: float | None = key(None, least=0, in_stages=True)
    h: float | None = key(None, above=0, in_stages=True)
    rate: float | None = key(None, above=0, most=1, in_stages=True)
    m_low: float | None = key(None, least=0, in_stages=True)
    m_high: float | None = key(None, least=0, in_stages=True)
    norm_low: float | None = key(None, above=0, in_stages=True)
    norm_high: float | None = key(None, above=0, in_stages=True)
    penalty_weight: float | None = key(None, least=0, in_stages=True)
    std: float | None = key(None, least=0, in_stages=True)
    base: str | None = key(None, choices=("arc", "cos"), in_stages=True)
    plus: bool | None = key(None, in_stages=True)
    gradient: str | None = key(None, choices=("exact", "straight_through"), in_stages=True)
    centers: int = key(1, least=1, is_fixed=True)
    sample_rate: float = key(1.0, least=0, most=1, in_stages=True)
    init_rows: str = key("")
    weight_dtype: str = key("float32", choices=("float32", "bfloat16"))
    momentum_dtype: str = key("float32", choices=("float32", "bfloat16", "int8", "none"))
    fp32_precision: str = key("ieee", choices=("ieee", "tf32", "bf16x3"))
    exponentials_memory: str | None = key(None)
    placement: str = key("device")

    def refusals(self, run: "Config") -> Iterator[str]:
        """Say, one after another, what of ``run`` does not go with these keys."""
        from plsc.head.options import exponentials_bytes
        from plsc.head.storage import TableStorage

        if run.optim.head_name == "adamw" and self.momentum_dtype == "none":
            yield 'head.momentum_dtype = "none" leaves adamw no moments; give bfloat16 or int8, or optim.head = "sgd"'
        try:
            TableStorage.of(self.weight_dtype, self.momentum_dtype, self.placement)
        except UsageError as error:
            yield re.sub(r"\b(placement)\b", r"head.\1", str(error))
        try:
            exponentials_bytes(self.exponentials_memory, "head.exponentials_memory")
        except UsageError as error:
            yield str(error)
        takes = _keys_of(self.margin)
        for name in dict.fromkeys(name for names in margin_keys().values() for name in names):
            if getattr(self, name) is not None and name not in takes:
                yield f"head.{name} is no key of the margin {self.margin}, which takes {', '.join(takes)}"
        try:
            make_margin(self)
        except UsageError as error:
            yield str(error)


def make_margin(head: HeadConfig) -> "Margin":
    """The margin that [head] describes; UsageError for values that it does not take."""
    from plsc.losses.margins import MARGINS

    parameters = {name: getattr(head, name) for name in _keys_of(head.margin)}
    try:
        return MARGINS[head.margin](**{name: value for name, value in parameters.items() if value is not None})
    except UsageError as error:
        raise UsageError(f"[head] margin {head.margin}: {error}") from None
