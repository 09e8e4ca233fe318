"""Options of a class head, in groups: of its table here, and of each rare feature where that lives.

A group is a frozen dataclass. ``plsc.ShardedHead`` takes groups, or their fields as keywords: each keyword is of one
group, which :data:`KEYWORDS` names.
"""

import dataclasses
import numbers
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from plsc.arguments import as_integer
from plsc.errors import UsageError
from plsc.extensions import Registry, is_subclass
from plsc.nearest import did_you_mean
from plsc.sizes import parse_memory

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead  # which imports this module
    from plsc.head.storage import MappedTables
    from plsc.losses.margins import Margin  # imports torch

_Group = TypeVar("_Group")


@dataclass(frozen=True)
class HeadFeature:
    """A rare feature of a class head: a frozen dataclass of its options.

    A head without them has what :meth:`attach` gives by the defaults of those in :data:`ATTRIBUTES`.
    """

    def mapped_tables(self, placement: str) -> "MappedTables | None":
        """What makes a table in mapped files; None: the core. UsageError where ``placement`` names no file for it."""
        return None

    @property
    def filters_negatives(self) -> bool:
        """Whether :attr:`plsc.head.sharded_softmax.ShardedSoftmax.negatives` is set, which PyTorch's passes take."""
        return False

    def check(self, margin: "Margin") -> None:
        """Raise UsageError where it does not go with the margin, before the head has a table."""

    def attach(self, head: "ShardedHead") -> None:
        """Take part in a head that is whole; UsageError where it cannot."""


@dataclass(frozen=True)
class TableOptions:
    """Options of the class table that are rarer than arguments of their own.

    Attributes:
        centers: sub-centres K per class; a class's cosine is that of its nearest (Deng et al., ECCV 2020).
        seed: of first weights, sampling and rounding.
        update: "fused" lets the head's optimizers do pass 2 and the step, chunk by chunk; "autograd" leaves
            ``weight.grad`` for any optimizer instead.
        chunk_classes: classes per chunk; by default chosen from the batch and the device. Results depend on it
            by the order of float32 sums at most.
        placement: where the table and the optimizer's state lie. "device": in the memory of the device that computes.
            "host": in ordinary memory, pinned for a GPU. "mmap:FILE": in files FILE.rankR-of-W.NAME, mapped; they are
            working memory of this run, and overwritten by the next, unless another option keeps them. From host and
            file, rows come to the device while it computes (see :meth:`plsc.ShardedHead.prefetch`) and go back behind
            it: results are those of "device", bit for bit. 1/norms and int8 scales of a mapped table stay in memory.
        backend: "torch", "cpu" or "triton" computes; None chooses the fastest that can, or ``PLSC_HEAD_BACKEND``.
        fp32_precision: how a GPU multiplies a float32 table, whatever torch's own setting is: "ieee", "tf32" (factors
            of 11 bits, on the matrix units) or "bf16x3" (16 bits: each factor is the sum of two bfloat16 numbers, in
            three products; Triton's passes only). Tables of other dtypes are not concerned. A CPU takes "ieee" alone.
        exponentials_memory: bytes, or an amount such as "8GiB", in which the forward may keep a batch's exponentials
            until the update, which then makes one product with the rows it has them for in the place of two. They take
            a number of the table's dtype for each class of the shard and sample of the head group. Where they are
            many, it has the first chunks' alone. Gradients differ by the rounding of that dtype. Compiled passes on a
            CPU, passes that store no weights (:mod:`plsc.head.backends.triton_shape`), CurricularFace, sub-centres,
            several labels, and batches that are no multiple of 8 keep none.

    Raises:
        UsageError: an option is out of its range.
    """

    centers: int = 1
    seed: int = 0
    update: Literal["fused", "autograd"] = "fused"
    chunk_classes: int | None = None
    placement: str = "device"
    backend: str | None = None
    fp32_precision: str = "ieee"
    exponentials_memory: int | str | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        object.__setattr__(self, "centers", as_integer(self.centers, "the head's centers", 1))
        object.__setattr__(self, "seed", as_integer(self.seed, "the head's seed"))
        if self.chunk_classes is not None:
            chunk = as_integer(self.chunk_classes, "the head's chunk_classes", 1)
            object.__setattr__(self, "chunk_classes", chunk)
        object.__setattr__(self, "exponentials_memory", exponentials_bytes(self.exponentials_memory))
        if self.update not in ("fused", "autograd"):
            raise UsageError(f'update must be "fused" or "autograd", not {self.update!r}')
        if self.placement != "device" and self.update != "fused":
            raise UsageError(f'placement {self.placement!r} leaves no gradient of the whole table: give update="fused"')


def exponentials_bytes(amount: int | str | None, name: str = "the head's exponentials_memory") -> int:
    """Bytes for exponentials, 0 where ``amount`` is None; UsageError where it is none."""
    if isinstance(amount, str):
        return parse_memory(amount, name, examples='"8GiB" or "500MB"')
    return 0 if amount is None else as_integer(amount, name, 0)


# Each keyword with the group that has it, imported when the keyword is given.
KEYWORDS: Registry[str | type] = Registry(
    "plsc.head_options",
    {
        **{field.name: TableOptions for field in dataclasses.fields(TableOptions)},
        **dict.fromkeys(
            ("positives", "label_reduction", "labels_per_step"), "plsc.features.labels.options:LabelOptions"
        ),
        **dict.fromkeys(("averaging_period", "staleness"), "plsc.features.replicas.averaging:ReplicaOptions"),
        "journal": "plsc.features.journal.journaled_table:JournalOptions",
        "negative_filter": "plsc.features.negative_filter.filter:NegativeFilterOptions",
        "frozen_rows": "plsc.features.frozen.rows:FrozenRows",
    },
    is_subclass(HeadFeature),
    "a subclass of plsc.head.options.HeadFeature",
)

# Attributes of a head that a group's attach() gives, by the keyword of the group.
ATTRIBUTES = dict.fromkeys(("journal", "set_savepoint", "roll_back", "undo_journal"), "journal")


# Keywords whose groups every head has, and attaches behind those that were given.
ALWAYS = ("positives",)


class Options:
    """The groups of a head's options.

    Args:
        groups: as the head takes them.
        keywords: fields of groups by their names.

    Raises:
        UsageError: a keyword is of no group, or is given twice; a group is none, or refuses its values.
    """

    def __init__(self, groups: Iterable[object], keywords: Mapping[str, Any]) -> None:
        self._groups: dict[type, Any] = {}
        for group in groups:
            if not dataclasses.is_dataclass(group) or isinstance(group, type):
                raise UsageError(f"a head's options are groups such as plsc.TableOptions(centers=3), not {group!r}")
            if type(group) in self._groups:
                raise UsageError(f"options has two {type(group).__name__}; give one")
            self._groups[type(group)] = group
        by_group: dict[type, dict[str, Any]] = {}
        for name, value in keywords.items():
            by_group.setdefault(group_of(name), {})[name] = value
        for kind, values in by_group.items():
            if kind in self._groups:
                raise UsageError(f"{next(iter(values))} is given beside {kind.__name__}; give it there")
            self._groups[kind] = kind(**values)
        for kind in map(group_of, ALWAYS):
            self._groups[kind] = self._groups.pop(kind, None) or kind()

    def value(self, name: str) -> Any:
        """The value of a keyword; its default where it was not given."""
        return getattr(self.get(group_of(name)), name)

    def get(self, kind: type[_Group]) -> _Group:
        """The group of this kind; its defaults where none was given."""
        return cast(_Group, self._groups.get(kind) or kind())

    @property
    def features(self) -> list[HeadFeature]:
        """The groups that are rare features."""
        return [group for group in self._groups.values() if isinstance(group, HeadFeature)]

    def mapped_tables(self, placement: str) -> "MappedTables | None":
        """Of the feature that makes a table in mapped files, where one does."""
        return next((found for each in self.features if (found := each.mapped_tables(placement))), None)


def group_of(keyword: str) -> type:
    """The group that has a keyword; UsageError where none has it."""
    group = KEYWORDS.find(keyword)
    if group is None:
        raise UsageError(f"a head has no option {keyword}{did_you_mean(keyword, KEYWORDS)}")
    return pkgutil.resolve_name(group) if isinstance(group, str) else group


def check_sample_rate(sample_rate: object) -> None:
    """UsageError unless ``sample_rate`` is a number from 0 to 1."""
    if not isinstance(sample_rate, numbers.Real) or not 0 <= float(sample_rate) <= 1:  # NaN is in no range
        raise UsageError(f"sample_rate is a share of the classes from 0 to 1, not {sample_rate!r}")
