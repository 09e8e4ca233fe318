"""Which embeddings may be compared: those of one model, and those of a model that was trained to be compatible with it.

A contract id (:func:`plsc.models.preprocessing.contract_id`) names the model of vectors. A model that was trained among
the class centres of an older one (backward-compatible training; Shen et al., "Towards Backward-Compatible
Representation Learning", CVPR 2020, arXiv:2003.11942) embeds into the older one's space: its queries search what the
older one enrolled, and what it enrols may lie beside that. Vectors of several such models have the ids of all as one
text, in the order in which they came, with commas between.
"""

from collections.abc import Collection

SEPARATOR = ","
UNKNOWN_CONTRACT = "unknown"  # of vectors whose model was not named


def models_in(contract_id: str) -> list[str]:
    """The models of vectors with this contract id, each by its own id."""
    return contract_id.split(SEPARATOR)


def is_of(contract_id: str, space: str) -> bool:
    """Whether every model of vectors with ``contract_id`` is one of those of the vectors in ``space``."""
    return set(models_in(contract_id)) <= set(models_in(space))


def may_search(contract_id: str, compatible_with: Collection[str], space: str) -> bool:
    """Whether a model's vectors may be compared with those in a space.

    Args:
        contract_id: of the model.
        compatible_with: the models in whose spaces it embeds, besides its own.
        space: the contract id of the vectors.
    """
    return is_of(contract_id, space) or set(models_in(space)) <= {contract_id, *compatible_with}


def joined(space: str, contract_id: str) -> str:
    """The contract id of the vectors in ``space`` with those of a model beside them."""
    return space if is_of(contract_id, space) else f"{space}{SEPARATOR}{contract_id}"
