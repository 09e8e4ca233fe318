"""DynamicHead: a class table whose classes come and go while it trains, known by keys and not by numbers.

Each shard keeps its classes dense, in the first rows of memory that was reserved for the most there may be: a pass
visits consecutive rows as in a fixed table, none is copied when the table grows, and memory that no row has come to is
not taken from the system (but by a GPU). Where a class goes, the shard's last one takes its place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.arguments import as_integer
from plsc.errors import UsageError
from plsc.features.dynamic.agreed_keys import any_lack, are_fit, same_keys
from plsc.features.dynamic.dense_rows import DenseRows, evenly_placed, shares
from plsc.features.dynamic.first_rows import FirstRows
from plsc.features.dynamic.key_map import KeyMap, Keys
from plsc.head.class_table import SMALLEST_NORM, TableShape
from plsc.head.kept_rows import KeptClasses, KeptKeys, KeptRows
from plsc.head.sharded_head import ShardedHead
from plsc.losses.margins import Margin
from plsc.parallel.collectives import all_gather_numbers, all_gather_rows, all_reduce_sum
from plsc.parallel.mesh import Mesh

_NO_LABEL = -1


class DynamicHead(ShardedHead):
    """A :class:`plsc.ShardedHead` whose labels are keys, and whose classes are inserted when they are first seen.

    A training batch with a key that has no row inserts it before its loss: on the shard with the fewest classes, the
    smaller keys first. Ranks that bring the same key make one row, and no result depends on the ranks' order. All that
    holds of a fixed table's loss, gradients and updates holds here, over the classes that there are.

    Other differences: ``class_range`` are this rank's class numbers, which begin at a multiple of the shard's capacity;
    ``weight`` has as many rows as there are classes now; AdamW's correction of the bias counts the head's steps, not
    a row's.

    Communication beside :class:`plsc.ShardedHead`'s: 16 bytes per rank and step; where keys are new, 8 + 4·D bytes for
    each sample of theirs, to all ranks.

    Args:
        dim: width D of embeddings and class weights.
        max_classes: the most classes there may be, over all shards. Memory is reserved for so many rows and taken as
            they come: a CPU's and the host's. A GPU's, and a mapped file's, is taken at once.
        mesh: as :class:`plsc.ShardedHead` takes it.
        margin: likewise.
        first_rows: what a new class begins with: "mean", the direction of the mean of its unit embeddings in the batch
            (weight imprinting: Qi et al., CVPR 2018), or "random", N(0, 0.01²), from ``seed`` and key. Both have the
            length that random rows have, 0.01·√D. Of several sub-centres, those after the first are the mean with
            noise as large. The optimizer's state begins at zero.
        admit_after: samples of a key that are seen before it gets a row; until then they have no label. A key that
            is given twice among a sample's labels counts once.
        expire_after: steps of the head's optimizer, of one batch or of several that accumulate, without a sample of a
            key after which it is removed; None: it stays. Looked after at the end of every tenth part of so many.
            Moves 8 bytes more per sample.
        **options: :class:`plsc.ShardedHead`'s others, but ``update="autograd"``. Replicas that step by themselves
            are made equal before each :meth:`remove`, :meth:`merge` and :meth:`split` too.
            Classes that options keep as they are may be FILE.txt of names (:meth:`use_names`) or keys: they keep
            what they begin with, whenever they come. Where rows stay in files that outlive the run, store
            :meth:`key_state` whenever these are saved, and load it when they are back; ``max_classes`` and the ranks
            then stay as they were.

    Attributes:
        key_map: the keys, their rows and names; the same on every rank. To be changed by the methods here alone.
        num_classes: those that there are now, of all shards.
        steps: of its optimizer that had a batch, skipped ones included.

    Raises:
        UsageError: an argument is out of its range, or is one that a table of one size takes alone.
    """

    def __init__(
        self,
        dim: int,
        max_classes: int,
        mesh: Mesh | None = None,
        margin: Margin | str | None = None,
        first_rows: str = "mean",
        admit_after: int = 1,
        expire_after: int | None = None,
        **options: Any,
    ) -> None:
        if options.get("update", "fused") != "fused":
            raise UsageError('a head whose classes come and go is updated by its own optimizers: leave update="fused"')
        if first_rows not in ("mean", "random"):
            raise UsageError(f'first_rows must be "mean" or "random", not {first_rows!r}')
        self.max_classes = as_integer(max_classes, "the head's max_classes", 1)
        self.admit_after = as_integer(admit_after, "the head's admit_after", 1)
        self.expire_after = expire_after
        if expire_after is not None:
            self.expire_after = as_integer(expire_after, "the head's expire_after", 1)
        self._kept_keys: KeptKeys | None = None
        super().__init__(dim, max_classes, mesh, margin, **options)
        if self.admit_after > 1 and self.margin.changes_negatives:
            raise UsageError(
                f"{type(self.margin).__name__} needs a label of each sample, and with admit_after = "
                f"{self.admit_after} some have none: leave it out, or take another margin"
            )
        self.first_rows, self.key_map = first_rows, KeyMap()
        self._first = FirstRows(self.dim, self.centers, self.seed)
        self._rows = DenseRows(self.softmax.table)
        self._names: Sequence[str] | None = None
        self._label_keys: Keys | None = None
        self.steps = 0
        self._counts = [0] * self.mesh.head.world_size  # classes of each shard
        self._resize(self._counts)

    @property
    def _most_classes(self) -> int:
        return self.max_classes

    def _own_classes(self) -> tuple[int, int]:
        first = self.mesh.head.rank * self._shard_capacity
        return first, first

    @property
    def _shard_capacity(self) -> int:
        return -(-self.max_classes // self.mesh.head.world_size)

    def keep(self, classes: KeptClasses) -> None:
        """See :meth:`plsc.ShardedHead.keep`; by keys, whenever their rows come."""
        self._kept_keys = classes.by_key()
        are_all, rows = self._kept_keys.are_all, self._shard_capacity * self.centers
        self.softmax.table.kept = KeptRows(torch.full((rows,), are_all, device=self.mesh.device), are_all)

    def _renew_kept(self) -> None:
        """Let the rows that kept keys have now be kept."""
        kept, keys = self.softmax.table.kept, self._kept_keys
        if kept is not None and keys is not None and not keys.are_all:
            shards, classes = self.key_map.find(keys.among(self.key_map.known_keys))
            kept.set_classes(classes[shards == self.mesh.head.rank], self.centers)

    def _table_shape(self, shape: TableShape) -> TableShape:
        capacity = self._shard_capacity * self.centers
        return replace(shape, total_rows=capacity * self.mesh.head.world_size, capacity=capacity)

    # Losses.

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int] | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the global batch, as :meth:`plsc.ShardedHead.forward`.

        Args:
            embeddings: this rank's (b, D).
            labels: keys (b,) or (b, K), int64 from 0 on, best on the CPU: those on a GPU are waited for. -1 is no
                label. In eval mode and under no_grad() nothing is inserted, and keys without a row are no labels.
            sizes: b of every rank.
            weights: (b, K) of the labels' losses.

        Raises:
            UsageError: a key is negative, on whatever rank; there is no room for another class; or as
                :meth:`plsc.ShardedHead.forward`.
        """
        keys = self._keys_of(labels) if are_fit(embeddings, labels) else None
        lacking = self._agreed_to_lack(keys)
        if keys is not None and self.training and torch.is_grad_enabled():
            if lacking:
                lacking = self._insert_new(embeddings.detach(), keys)
            if self.expire_after is not None:
                self._see(keys)
        numbers = labels if keys is None else self.numbers_of(labels)
        if lacking and numbers.dim() == 1:
            numbers = numbers[:, None]
        return super().forward(embeddings, numbers, sizes, weights)

    def use_names(self, names: Sequence[str] | None) -> None:
        """Let labels be places in ``names`` from now on, and their keys those of the names. Every rank calls.

        Args:
            names: of a data set's classes, such as ``dataset.class_names``; None: labels are keys.
        """
        self._names, self._label_keys = names, None if names is None else self.key_map.keys_of(names)
        self._renew_kept()

    @property
    def names(self) -> Sequence[str]:
        """Those that labels are places in; none where labels are keys."""
        return self._names or ()

    def numbers_of(self, labels: Tensor) -> Tensor:
        """Return the class numbers of ``labels`` (any shape), int64 on the CPU, -1 where a key has no row."""
        return torch.from_numpy(self._classes_of(self._keys_of(labels)))

    def _classes_of(self, keys: Keys) -> Keys:
        """The class numbers of ``keys`` (any shape), -1 where a key has no row."""
        shards, classes = self.key_map.find(keys)
        return np.where(shards >= 0, shards * np.int64(self._shard_capacity) + classes, _NO_LABEL)

    def prefetch(self, labels: Tensor, sizes: Sequence[int] | None = None) -> None:
        """As :meth:`plsc.ShardedHead.prefetch`, with the keys of the batch, none of which is inserted yet."""
        numbers = self.numbers_of(labels)
        super().prefetch(numbers[:, None] if numbers.dim() == 1 else numbers, sizes)

    def _keys_of(self, labels: Tensor) -> Keys:
        """The keys of ``labels``, of the same shape; what is no place in the names is -2."""
        given = labels.detach().cpu().numpy().astype(np.int64)
        if self._label_keys is None:
            return given
        inside = (given >= 0) & (given < len(self._label_keys))
        keys = self._label_keys[np.where(inside, given, 0)] if len(self._label_keys) else given
        return np.where(inside, keys, np.where(given == _NO_LABEL, _NO_LABEL, -2))

    def _agreed_to_lack(self, keys: Keys | None) -> bool:
        """Whether any rank has keys without a row; UsageError on all ranks where one has a negative key."""
        lacking = 0 if keys is None else int(((self.key_map.find(keys)[0] < 0) & (keys >= 0)).sum())
        return any_lack(keys, lacking, self.mesh)

    # Classes that come.

    def insert(self, keys: Tensor | Sequence[int], rows: Tensor | None = None) -> None:
        """Give each of ``keys`` (m,) without a row a class. Every rank calls with the same arguments.

        Args:
            keys: int64 from 0 on; those that have a row keep it.
            rows: (m, D), or (m, K, D) with K sub-centres, the first values; None: random ones.

        Raises:
            UsageError: ranks differ, rows do not fit, or there is no room.
        """
        wanted = same_keys(self.mesh, keys)
        if rows is None:
            values = self._first.random(wanted)
        else:
            values = rows.detach().cpu().double().reshape(len(rows), -1, self.dim) if rows.numel() else torch.empty(0)
            if values.shape != (len(wanted), self.centers, self.dim):
                shape = (len(wanted), *([] if self.centers == 1 else [self.centers]), self.dim)
                raise UsageError(f"rows are {tuple(rows.shape)}; {len(wanted)} new classes take {shape}")
        new, first = np.unique(wanted, return_index=True)
        is_new = self.key_map.find(new)[0] < 0
        self._add(new[is_new], values[torch.from_numpy(first[is_new])])

    def _insert_new(self, embeddings: Tensor, keys: Keys) -> bool:
        """Insert the keys that have no row on any rank, by this rank's embeddings (b, D) and keys (b,) or (b, K).

        Returns whether some are not admitted yet.
        """
        lacking = (self.key_map.find(keys)[0] < 0) & (keys >= 0) & _first_of_sample(keys)
        samples = np.nonzero(lacking)[0]
        unit = torch.nn.functional.normalize(embeddings[torch.from_numpy(samples).to(embeddings.device)].float())
        sizes = [count for (count,) in all_gather_numbers([len(samples)], self.mesh)]
        device = self.mesh.device
        found = all_gather_rows(torch.from_numpy(keys[lacking]).to(device), self.mesh, sizes).cpu().numpy()
        vectors = all_gather_rows(unit.to(device), self.mesh, sizes).cpu().numpy()
        new, is_new = self.key_map.admitted(found, self.admit_after), np.ones(len(found), dtype=bool)
        if self.admit_after > 1:
            is_new = np.isin(found, new)
            found, vectors = found[is_new], vectors[is_new]
        by_mean = self.first_rows == "mean"
        self._add(new, self._first.means(new, found, vectors) if by_mean else self._first.random(new))
        return not is_new.all()

    def _see(self, keys: Keys) -> None:
        """Note that the present step has ``keys`` of this rank; every rank calls."""
        sizes = [count for (count,) in all_gather_numbers([keys.size], self.mesh)]
        own = torch.from_numpy(keys.ravel()).to(self.mesh.device)
        self.key_map.see(all_gather_rows(own, self.mesh, sizes).cpu().numpy(), self.steps)

    def end_step(self) -> None:
        """Count a step, and remove the classes of which too many had no sample.

        What a step accumulates from several batches is known at its end alone.
        """
        now, most = self.steps, self.expire_after
        self.steps += 1
        if most is not None and now % max(most // 10, 1) == 0:
            gone = self.key_map.keys[now - self.key_map.seen > most]
            if len(gone):
                self.remove(gone.tolist())

    def _add(self, keys: Keys, values: Tensor) -> None:
        """Make classes of new ``keys`` (m,), sorted, from ``values`` (m, K, D), each on the shard that has fewest."""
        self._refuse_beyond_room(len(keys))
        shards, classes, counts = evenly_placed(len(keys), self._counts)
        self.key_map.add(keys, shards, classes, self.steps)
        own = shards == self.mesh.head.rank
        self._resize(counts)
        self._renew_kept()
        self._write(classes[own], values[torch.from_numpy(own)])

    # Classes that go, or change their keys.

    def remove(self, keys: Tensor | Sequence[int]) -> None:
        """Remove the classes of ``keys``, with all that is stored of them. Every rank calls with the same.

        A class that other keys share stays as theirs. Rows are overwritten at once. A key that a later batch brings is
        a new class: leave it out of the data too.

        Raises:
            UsageError: a key has no row; ranks differ; batches wait for the optimizer.
        """
        gone = np.unique(same_keys(self.mesh, keys))
        shards, classes = self._rows_of_all(gone)
        self._refuse_while_batches_wait("classes")
        self._make_replicas_equal()
        self.key_map.discard(gone)
        counts = list(self._counts)
        for shard in np.unique(shards).tolist():
            free = np.unique(classes[shards == shard])
            taken = self.key_map.classes[self.key_map.shards == shard]
            free = free[~np.isin(free, taken)]
            counts[shard] -= len(free)
            self._close_gaps(shard, free, counts[shard])
        self._resize(counts)
        self.use_names(self._names)

    def merge(self, sources: Tensor | Sequence[int], into: int) -> None:
        """Let the keys ``sources`` be of the class of the key ``into``, whose direction becomes the mean of all.

        Its length and its optimizer's state stay. Every rank calls with the same.

        Raises:
            UsageError: a key has no row; ranks differ; batches wait for the optimizer.
        """
        others = np.setdiff1d(same_keys(self.mesh, sources), [into])
        named = same_keys(self.mesh, [into, *others.tolist()])
        self._make_replicas_equal()
        rows = self.rows_of(named.tolist()).double()
        lengths = rows.norm(dim=2, keepdim=True).clamp(min=SMALLEST_NORM)
        mean = torch.nn.functional.normalize((rows / lengths).mean(0), dim=1) * lengths[0]
        names = {key: self.key_map.names[key] for key in others.tolist() if key in self.key_map.names}
        self.remove(others.tolist())
        (shard,), (place,) = self.key_map.find(np.array([into]))
        self.key_map.add(others, np.full(len(others), shard), np.full(len(others), place), self.steps)
        self.key_map.enter_names(names)
        self._renew_kept()
        if shard == self.mesh.head.rank:
            self._write(np.array([place]), mean[None], keeps_state=True)

    def split(self, key: int, into: Tensor | Sequence[int]) -> None:
        """Make classes of the keys ``into``, with the rows of ``key``, which stays, and no optimizer state.

        They are new, or share the class of ``key`` so far (:meth:`merge`). Samples of them then tell the classes apart.
        Every rank calls with the same.

        Raises:
            UsageError: ``key`` has no row, or is among the others; one of them is of another class; ranks differ; there
                is no room.
        """
        new = np.unique(same_keys(self.mesh, into))
        self._make_replicas_equal()
        rows = self.rows_of([key])
        (own,) = self._classes_of(np.array([key]))
        classes = self._classes_of(new)
        self._refuse_known(new[(classes != _NO_LABEL) & (classes != own) | (new == key)])
        self._refuse_beyond_room(len(new))
        self.key_map.leave(new)
        self.insert(torch.from_numpy(new), rows.expand(len(new), -1, -1))

    def rename(self, old: int, new: int) -> None:
        """Let the class of the key ``old`` be that of ``new``, which is not there. Every rank calls with the same.

        Raises:
            UsageError: ``old`` has no row, or ``new`` has one; ranks differ.
        """
        pair = same_keys(self.mesh, [old, new])
        self._rows_of_all(pair[:1])
        self._refuse_known(pair[1:])
        self.key_map.renamed(old, new)
        self._renew_kept()

    def rows_of(self, keys: Tensor | Sequence[int]) -> Tensor:
        """Return the rows (m, K, D) of ``keys`` (m,) in the table's dtype, on the CPU, on every rank; all call.

        Raises:
            UsageError: a key has no row; ranks differ.
        """
        shards, classes = self._rows_of_all(same_keys(self.mesh, keys))
        weight = self.weight.detach().view(-1, self.centers, self.dim)
        rows = torch.zeros(len(shards), self.centers, self.dim, dtype=weight.dtype)
        own = torch.from_numpy(shards == self.mesh.head.rank)
        rows[own] = weight[torch.from_numpy(classes)[own].to(weight.device)].cpu()
        return all_reduce_sum(rows.to(self.mesh.device), self.mesh.head).cpu()

    def _resize(self, counts: list[int]) -> None:
        """Let the shards have so many classes."""
        self._counts, self.num_classes = counts, sum(counts)
        rank, table = self.mesh.head.rank, self.softmax.table
        if len(table.parameter) != counts[rank] * self.centers:
            table.resize(counts[rank] * self.centers)
        table.stored_at = sum(counts[:rank]) * self.centers, sum(counts) * self.centers
        first = rank * self._shard_capacity
        self.class_range = first, first + counts[rank]
        self.softmax.sampler = replace(self.softmax.sampler, first=first, stop=first + counts[rank])

    def _rows_of_all(self, keys: Keys) -> tuple[NDArray[np.int32], Keys]:
        shards, classes = self.key_map.find(keys)
        if (shards < 0).any():
            raise UsageError(f"the key {keys[shards < 0][0]} has no row in the head")
        return shards, classes

    def _refuse_beyond_room(self, more: int) -> None:
        if self.num_classes + more > self.max_classes:
            raise UsageError(
                f"{more:,} new classes do not fit beside {self.num_classes:,}: max_classes is {self.max_classes:,}; "
                "make it larger, or remove classes"
            )

    def _refuse_known(self, keys: Keys) -> None:
        known = keys[self.key_map.find(keys)[0] >= 0]
        if len(known):
            raise UsageError(f"the key {known[0]} has a row in the head already")

    def _make_replicas_equal(self) -> None:
        """Average replicas that step by themselves, before their classes are read, go or move; all ranks call."""
        if self.softmax.exchange.steps_apart:
            self._refuse_while_batches_wait("classes")
            self.softmax.exchange.meet()

    def _close_gaps(self, shard: int, free: Keys, count: int) -> None:
        """Move a shard's last classes to the places ``free`` (sorted), so that the first ``count`` are in use."""
        targets = free[free < count]
        sources = np.setdiff1d(np.arange(count, count + len(free)), free)
        self.key_map.moved(shard, sources, targets)
        if shard == self.mesh.head.rank:
            self._rows.move(sources, targets, count)

    def _write(self, classes: Keys, values: Tensor, *, keeps_state: bool = False) -> None:
        """Store ``values`` (m, K, D) as rows of this shard's ``classes`` (m,), with state of zeros."""
        self._rows.write(classes, values, keeps_state=keeps_state)
        for pending in self.softmax.pending.batches:
            pending.version = self.softmax.table.version

    # What is stored.

    def mean_norm(self) -> float:
        """The mean ‖W‖ over all classes and sub-centres that there are; NaN where there is none."""
        return super().mean_norm() if self.num_classes else math.nan

    def key_state(self) -> dict[str, Tensor]:
        """The keys for a checkpoint, as tensors that are the same on every rank; rows are in ``sharded_state()``."""
        state = self.key_map.state(np.cumsum([0, *self._counts])[:-1].tolist())
        if self.expire_after is None:  # nobody takes note of what batches have: a later run counts from its beginning
            state["seen"].fill_(-1)
        if self.softmax.table.outlives_run:  # whose rows stay in the files of their shards
            state["counts"] = torch.tensor(self._counts)
        return state

    def get_extra_state(self) -> dict[str, Any]:
        """As :meth:`plsc.ShardedHead.get_extra_state`, with the number of steps."""
        return {**super().get_extra_state(), "steps": self.steps}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned; former versions counted batches in the place of steps."""
        super().set_extra_state(state)
        self.steps = int(state.get("steps", state["forwards"]))

    def load_key_state(self, state: Mapping[str, Tensor]) -> None:
        """Take what :meth:`key_state` gave, at any number of ranks: before the rows are loaded into sharded_state().

        A table whose files outlive the run has the rows already, at as many ranks as before.

        Raises:
            DataError: it is none, or damaged.
            UsageError: there is no room for so many classes.
        """
        total = int(state["classes"].max()) + 1 if "classes" in state and len(state["classes"]) else 0
        if total > self.max_classes:
            raise UsageError(f"max_classes = {self.max_classes:,} is too few for the {total:,} classes that are stored")
        had = state.get("counts") if self.softmax.table.outlives_run else None
        counts = shares(total, self.mesh.head.world_size, self._shard_capacity, had)
        self._make_replicas_equal()
        self.key_map.load_state(state, np.cumsum([0, *counts])[:-1].tolist())
        self._resize(counts)
        self.use_names(self._names)

    def extra_repr(self) -> str:
        """For print()."""
        return f"{super().extra_repr()}, at most {self.max_classes} classes"


def _first_of_sample(keys: Keys) -> NDArray[np.bool_]:
    """Where each key of a sample's (b, K) is given first; of (b,), everywhere."""
    if keys.ndim == 1:
        return np.ones(keys.shape, dtype=bool)
    order = np.argsort(keys, axis=1, kind="stable")
    ordered, first = np.take_along_axis(keys, order, 1), np.ones(keys.shape, dtype=bool)
    np.put_along_axis(first, order[:, 1:], ordered[:, 1:] != ordered[:, :-1], 1)
    return first
