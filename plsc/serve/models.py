"""The models of a service: which of them embeds for a collection, by the collection's contract id."""

from collections.abc import Mapping
from typing import NamedTuple

from plsc.embedding.contracts import is_of, may_search
from plsc.embedding.embedder import EmbeddingModel, compatible_contracts
from plsc.errors import ConflictError, NotFoundError
from plsc.gallery.store import Store
from plsc.gallery.values import Collection


class Unsearched(NamedTuple):
    """The errors of collections that no model of a service searches, by name; and whether all collections are such."""

    refusals: Mapping[str, ConflictError]
    are_all: bool


class Models:
    """The model of a service and, if there is one, that to which collections may be moved.

    Args:
        embedders: by contract id, the service's own model first.
        flip: whether embeddings are averages over picture and mirror image.
    """

    def __init__(self, embedders: Mapping[str, EmbeddingModel], flip: bool) -> None:
        self._compatible_with = {each: compatible_contracts(embedder, flip) for each, embedder in embedders.items()}

    def compatible_with(self, model: str) -> tuple[str, ...]:
        """The contract ids of other models, to whose vectors those of ``model`` may be compared."""
        return self._compatible_with[model]

    def member(self, space: str) -> str | None:
        """The model that has vectors among those with the contract id ``space``; None: none of these."""
        return next((model for model in self._compatible_with if is_of(model, space)), None)

    def searching(self, space: str) -> str | None:
        """The model whose queries search vectors with the contract id ``space``: a member, or a compatible one."""
        found = (model for model, others in self._compatible_with.items() if may_search(model, others, space))
        return self.member(space) or next(found, None)

    def queried_by(self, space: str, *, is_moving: bool) -> str | None:
        """The model whose queries search a collection: while it is moved, one that it has vectors of alone."""
        if space in self._compatible_with:
            return space
        return self.member(space) if is_moving else self.searching(space)

    def unsearched(self, store: Store) -> Unsearched:
        """The collections of a store that none of these models searches."""
        collections = store.collections()
        found = [info for info in collections if not self._searches(store, info)]
        return Unsearched({info.name: self.refusal(info) for info in found}, len(found) == len(collections) > 0)

    def _searches(self, store: Store, info: Collection) -> bool:
        space = info.contract_id
        if space in self._compatible_with or self.searching(space) is None:
            return space in self._compatible_with
        try:
            _, migration = store.spaces(info.name)
        except NotFoundError:  # deleted meanwhile
            return True
        return self.queried_by(space, is_moving=migration is not None) is not None

    def refusal(self, info: Collection) -> ConflictError:
        """The error for a collection that no model searches, or none while it is moved."""
        mend = "serve it with its own model until the move that is under way is finished"
        if self.searching(info.contract_id) is None:
            mend = (
                "serve it with its own model, or one that is compatible with it, move it to this one (--next-model, or "
                "plsc gallery migrate), or use another collection"
            )
        return ConflictError(
            f"collection {info.name} holds embeddings of the contract {info.contract_id}, and this service's model "
            f"makes {next(iter(self._compatible_with))}; {mend}"
        )
