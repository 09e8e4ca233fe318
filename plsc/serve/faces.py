"""The faces of a picture: which of several an enrolment means, and all of them where a caller asks for every face.

They are numbered from 1, the largest first, in every answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from plsc.embedding.detector import Face
from plsc.serve.decoding import MOST_FACES, DecodedImage
from plsc.serve.errors import ApiError
from plsc.serve.limits import charge
from plsc.serve.schemas import Float32, Input, check_direction
from plsc.serve.service import Service


def show_face(face: Face) -> dict[str, Any]:
    """A :class:`plsc.serve.errors.SeenFace` as JSON."""
    box, landmarks = (np.round(each.astype(np.float64), 2).tolist() for each in (face.box, face.landmarks))
    return {"number": face.number, "box": box, "landmarks": landmarks, "score": round(face.score, 4)}


def show_taken(picture: DecodedImage | None) -> dict[str, Any]:
    """How many faces a picture shows, and the box of the one that was taken; nothing where no detector looked."""
    if picture is None or not picture.taken:
        return {}
    return {"faces_found": picture.found, "box": show_face(picture.taken[0])["box"]}


def refuse_several(inputs: Sequence[Input], names: Sequence[str], pictures: Sequence[DecodedImage | None]) -> None:
    """:class:`ApiError` 422, with the faces of all such pictures, where one has several and its input names none."""
    several = [
        (name, picture)
        for item, name, picture in zip(inputs, names, pictures, strict=True)
        if picture is not None and picture.found > 1 and item.face is None
    ]
    if several:
        name, picture = several[0]
        faces = [{"input": name, **show_face(face)} for name, picture in several for face in picture.faces]
        message = (
            f"{name} shows {picture.found} faces, listed here with the largest first: give face=1 to "
            f"face={len(picture.faces)}, or face=largest"
        )
        raise ApiError(422, message, details={"faces": faces})


async def every_face(
    service: Service, inputs: Sequence[Input], names: Sequence[str], deadline: float, space: str
) -> tuple[Float32, list[DecodedImage]]:
    """The vectors (F, D) of every face in pictures, picture after picture; the caller is charged for each face.

    Raises:
        ApiError: 413 for more pictures than a request's inputs allow, with :data:`MOST_FACES` of each; 422 for an input
            that is no picture, or a picture that cannot be used.
    """
    most = max(service.settings.limits.inputs // MOST_FACES, 1)
    if len(inputs) > most:
        raise ApiError(413, f"{len(inputs)} pictures; every face is looked for in at most {most} in a request")
    for item, name in zip(inputs, names, strict=True):
        if item.image is None or item.landmarks is not None or item.face is not None:
            raise ApiError(422, f"{name}: every face is looked for in pictures; leave vectors, landmarks and face out")
    model = service.model_for(space)
    decoded = list(await service.decode_all(inputs, names, deadline, model, every_face=True))
    owners = [name for name, picture in zip(names, decoded, strict=True) for _ in picture.taken]
    charge(len(owners) - len(inputs) + 1)  # for the pictures it is charged already
    vectors = await service.embed_pixels(torch.cat([picture.pixels for picture in decoded]), deadline, model)
    for vector, name in zip(vectors, owners, strict=True):
        check_direction(vector, name)
    return vectors, decoded
