"""MTCNN: three small networks, one after another, propose faces, refine them and place their landmarks.

Zhang et al., "Joint Face Detection and Alignment Using Multitask Cascaded Convolutional Networks", 2016. The weights
are those of the installed package ``mtcnn``, read out of its files without importing it or unpickling them; the
networks run in torch.

Boxes are float32 (n, 4) left, top, right, bottom, with the picture's outer edges at 0 and its sides.

The package (MIT) is made for TensorFlow; installed alone it is three files and their readers. Each file is an lz4 frame
around a pickle of a list of float32 arrays, in Keras's order and layout, with the arrays' bytes between its opcodes as
joblib writes them. :func:`pickletools.genops` tells the opcodes apart and executes none. Which array comes next is
known from the network.

A signature is not asked for: the files come with the package, as code does, and their hashes stand here, in the code
that reads them. Other files are refused.
"""

import hashlib
import io
import math
import pickletools
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from plsc.embedding.columns import Float32
from plsc.embedding.detector import Detector, Face
from plsc.errors import DataError, UsageError
from plsc.models.preprocessing import resize_image

LONGEST_SIDE = 1024  # pixels; larger pictures are scaled down for the search
SMALLEST_FACE = 20  # pixels of the picture that is searched, and at least the following share of its longest side
SMALLEST_SHARE = 1 / 32
CELL, STRIDE = 12, 2  # of the proposing network: it looks at 12x12 pixels in every second place
PYRAMID = 0.709  # from one size of the picture to the next: half the area
PROPOSAL_SCORE, REFINED_SCORE, FACE_SCORE = 0.6, 0.7, 0.7
LEVEL_OVERLAP, OVERLAP = 0.5, 0.7  # of two boxes that overlap by more, the better one is kept
MAX_PROPOSALS = 1000  # of one size of the picture
MAX_CANDIDATES = 256  # that the second and the third network look at
MEAN, STD = 127.5, 128.0
INSTALL = "pip install plsc-torch[detector]"
# SHA-256 of the networks' files in mtcnn 1.0.
DIGESTS = {
    "pnet": "ea6b0c3e685ebee3165326ad6484acc95f2ef78f1c94fbf40a55704fa989f7b5",
    "rnet": "cb00e6460f3c98b0bfafaba3c0a0ded4bdf6e62cee7174d969e8670d7e757fee",
    "onet": "94f6ea2f4cf985275ee958cdd762d17b6009348a4fb9d8c6be39ba73ffd22ca3",
}


class MtcnnDetector(Detector):
    """MTCNN with the weights of the package ``mtcnn``.

    The picture is searched at up to 1,024 pixels. Faces from 20 pixels there, and from a thirty-second of the longest
    side, are found.

    Args:
        threshold: the least score of a face; None: 0.7.

    Raises:
        UsageError: the extra is not installed.
        DataError: its files are damaged.
    """

    def __init__(self, threshold: float | None) -> None:
        self._threshold = FACE_SCORE if threshold is None else threshold
        networks = proposing(), refining(), placing()
        for network, path in zip(networks, weights_files(), strict=True):
            load_weights(network, path)
            network.eval().requires_grad_(False)
        self._propose, self._refine, self._place = networks
        self.fingerprint = hashlib.sha256("".join(DIGESTS.values()).encode()).hexdigest()[:16]

    @torch.inference_mode()
    def find(self, image: Tensor) -> list[Face]:
        """See :meth:`Detector.find`."""
        height, width = image.shape[1:]
        factor = min(LONGEST_SIDE / max(height, width), 1.0)
        sides = max(round(height * factor), 1), max(round(width * factor), 1)
        picture = resize_image(image, sides)
        squares = self._refined(picture, self._proposals(picture))
        scores, boxes, landmarks = (found.numpy() for found in self._placed(picture, squares))
        scale = np.array([width / sides[1], height / sides[0]], dtype=np.float32)
        boxes = np.clip(boxes * np.tile(scale, 2), 0, np.tile([width, height], 2)).astype(np.float32)
        landmarks = landmarks * scale - np.float32(0.5)  # from edges at 0 to pixel centres at integers
        return [Face(*found) for found in zip(boxes, scores.tolist(), landmarks, strict=True)]

    def _proposals(self, picture: Tensor) -> Tensor:
        """The squares (n, 4) in which ``picture`` uint8 (3, H, W) may show a face."""
        found = [self._level(level, picture.shape) for level in _pyramid(picture)]
        if not found:
            return torch.zeros(0, 4)
        scores, boxes, offsets = (torch.cat(parts) for parts in zip(*found, strict=True))
        kept = _best(boxes, scores, OVERLAP, MAX_CANDIDATES)
        return _square(_shifted(boxes[kept], offsets[kept]))

    def _level(self, level: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (n,), boxes (n, 4) in the picture of ``shape``, and their offsets (n, 4), of one size of it."""
        offsets, logits = self._propose(_normalised(level[None]))
        scores = softmax(logits, dim=1)[0, 1].flatten()
        offsets = offsets[0].flatten(1).T
        chosen = torch.nonzero(scores >= PROPOSAL_SCORE)[:, 0]
        columns = logits.shape[-1]
        corners = torch.stack([chosen % columns, chosen // columns], dim=1) * float(STRIDE)
        scale = torch.tensor([shape[2] / level.shape[2], shape[1] / level.shape[1]])
        boxes = torch.cat([corners, corners + CELL], dim=1) * scale.repeat(2)
        kept = _best(boxes, scores[chosen], LEVEL_OVERLAP, MAX_PROPOSALS)
        return scores[chosen][kept], boxes[kept], offsets[chosen][kept]

    def _refined(self, picture: Tensor, boxes: Tensor) -> Tensor:
        """The squares (n, 4) of those ``boxes`` that the second network takes for faces."""
        offsets, logits = self._refine(_patches(picture, boxes, 24))
        scores = softmax(logits, dim=1)[:, 1]
        chosen = scores >= REFINED_SCORE
        boxes, scores, offsets = boxes[chosen], scores[chosen], offsets[chosen]
        kept = _best(boxes, scores, OVERLAP, MAX_CANDIDATES)
        return _square(_shifted(boxes[kept], offsets[kept]))

    def _placed(self, picture: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (n,), boxes (n, 4) and landmarks (n, 5, 2) of the faces among ``boxes``, best first."""
        offsets, places, logits = self._place(_patches(picture, boxes, 48))
        scores = softmax(logits, dim=1)[:, 1]
        # The places are five x, then five y, as shares of the square.
        sides = boxes[:, 2:] - boxes[:, :2]
        landmarks = boxes[:, None, :2] + places.view(-1, 2, 5).transpose(1, 2) * sides[:, None]
        boxes = _shifted(boxes, offsets)
        chosen = scores >= self._threshold
        boxes, scores, landmarks = boxes[chosen], scores[chosen], landmarks[chosen]
        kept = _apart(boxes, scores)
        return scores[kept], boxes[kept], landmarks[kept]


class Network(nn.Module):
    """A body and several heads, parameters in the order of the package's files: (B, 3, H, W) -> one tensor a head."""

    def __init__(self, body: list[nn.Module], heads: list[nn.Module]) -> None:
        super().__init__()
        self.body, self.heads = nn.Sequential(*body), nn.ModuleList(heads)

    def forward(self, values: Tensor) -> list[Tensor]:
        """What the heads answer, in their order."""
        values = self.body(values)
        return [head(values) for head in self.heads]


class _Columns(nn.Module):
    """(B, C, H, W) -> (B, W*H*C): column by column, as the weights were trained."""

    def forward(self, values: Tensor) -> Tensor:
        return values.permute(0, 3, 2, 1).flatten(1)


def proposing() -> Network:
    """P-Net, fully convolutional: offsets of the box (4) and logits of no face and face (2) in each place."""
    body = [*_layer(3, 10, 3), _pool(2), *_layer(10, 16, 3), *_layer(16, 32, 3)]
    return Network(body, [nn.Conv2d(32, 4, 1), nn.Conv2d(32, 2, 1)])


def refining() -> Network:
    """R-Net, on 24x24 pixels: offsets of the box (4), logits (2)."""
    body = [*_layer(3, 28, 3), _pool(3), *_layer(28, 48, 3), _pool(3), *_layer(48, 64, 2), *_dense(576, 128)]
    return Network(body, [nn.Linear(128, 4), nn.Linear(128, 2)])


def placing() -> Network:
    """O-Net, on 48x48 pixels: offsets of the box (4), five landmarks (10), logits (2)."""
    body = [*_layer(3, 32, 3), _pool(3), *_layer(32, 64, 3), _pool(3), *_layer(64, 64, 3), _pool(2)]
    body += [*_layer(64, 128, 2), *_dense(1152, 256)]
    return Network(body, [nn.Linear(256, 4), nn.Linear(256, 10), nn.Linear(256, 2)])


def _layer(before: int, after: int, kernel: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, kernel), nn.PReLU(after)]


def _dense(before: int, after: int) -> list[nn.Module]:
    return [_Columns(), nn.Linear(before, after), nn.PReLU(after)]


def _pool(kernel: int) -> nn.Module:
    return nn.MaxPool2d(kernel, 2, ceil_mode=True)


def _pyramid(picture: Tensor) -> Iterator[Tensor]:
    """``picture`` uint8 (3, H, W) in the sizes in which a cell of the first network covers a face."""
    height, width = picture.shape[1:]
    scale = CELL / max(SMALLEST_FACE, SMALLEST_SHARE * max(height, width))
    while min(height, width) * scale >= CELL:
        yield resize_image(picture, (round(height * scale), round(width * scale)))
        scale *= PYRAMID


def _normalised(pixels: Tensor) -> Tensor:
    return (pixels.float() - MEAN) / STD


def _patches(picture: Tensor, boxes: Tensor, side: int) -> Tensor:
    """The ``boxes`` (n, 4) of ``picture`` as the networks see them: (n, 3, side, side), averaged, 0 outside."""
    from torchvision.ops import roi_align

    patches: Tensor = roi_align(_normalised(picture[None]), [boxes], side, aligned=True)
    return patches


def _best(boxes: Tensor, scores: Tensor, overlap: float, most: int) -> Tensor:
    """Indices of the ``most`` boxes of the best scores that non-maximum suppression keeps, best first."""
    from torchvision.ops import nms

    order = torch.argsort(scores, descending=True, stable=True)[: 8 * most]
    return order[nms(boxes[order], scores[order], overlap)][:most]


def _apart(boxes: Tensor, scores: Tensor) -> Tensor:
    """As :func:`_best`, where an overlap is the share of the smaller box: a face within a face goes as well."""
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1)
    left = torch.argsort(scores, descending=True, stable=True)
    kept = []
    while len(left):
        first, left = left[0], left[1:]
        kept.append(first)
        corners = torch.maximum(boxes[first, :2], boxes[left, :2]), torch.minimum(boxes[first, 2:], boxes[left, 2:])
        common = (corners[1] - corners[0]).clamp(min=0).prod(dim=1)
        left = left[common <= OVERLAP * torch.minimum(areas[first], areas[left])]
    return torch.stack(kept) if kept else left


def _shifted(boxes: Tensor, offsets: Tensor) -> Tensor:
    """``boxes`` with each side moved by the ``offsets``, which are shares of width and height."""
    return boxes + offsets * (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)


def _square(boxes: Tensor) -> Tensor:
    """Squares with the centres and the longer sides of ``boxes``."""
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = (boxes[:, 2:] - boxes[:, :2]).amax(dim=1, keepdim=True) / 2
    return torch.cat([centre - half, centre + half], dim=1)


def weights_files() -> list[Path]:
    """The installed files of the three networks.

    Raises:
        UsageError: the extra is not installed.
    """
    try:
        folder = Path(str(metadata.distribution("mtcnn").locate_file("mtcnn/assets/weights")))
    except metadata.PackageNotFoundError:
        raise UsageError(f"the detector mtcnn needs the package mtcnn: {INSTALL}") from None
    return [folder / f"{name}.lz4" for name in DIGESTS]


def load_weights(network: nn.Module, path: Path) -> None:
    """Fill ``network``, whose parameters are in the file's order, with the arrays of ``path``.

    Raises:
        UsageError: the extra is not installed.
        DataError: the file is missing, or another than that of mtcnn 1.0.
    """
    parameters = list(network.parameters())
    arrays = _arrays(path, [_keras_shape(parameter) for parameter in parameters])
    with torch.no_grad():
        for parameter, array in zip(parameters, arrays, strict=True):
            values = torch.from_numpy(array)
            if parameter.dim() > 1:  # (height, width, in, out) -> (out, in, height, width); (in, out) -> (out, in)
                values = values.permute(3, 2, 0, 1) if parameter.dim() == 4 else values.T
            parameter.copy_(values.reshape(parameter.shape))


def _keras_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    return (*shape[2:], shape[1], shape[0]) if len(shape) > 1 else shape


def _arrays(path: Path, shapes: Sequence[tuple[int, ...]]) -> list[Float32]:
    """The arrays of ``path``: one of each shape, in this order."""
    stream = io.BytesIO(_decompressed(path))
    found: list[Float32] = []
    previous = ""
    for opcode, _, _ in pickletools.genops(stream):
        # An array's description ends with a dictionary that builds it; padding and the numbers follow.
        if (previous, opcode.name) == ("SETITEMS", "BUILD"):
            stream.read(stream.read(1)[0])
            shape = shapes[len(found)]
            numbers = np.frombuffer(stream.read(4 * math.prod(shape)), "<f4")
            found.append(numbers.reshape(shape).copy())
        previous = opcode.name
    return found


def _decompressed(path: Path) -> bytes:
    try:
        import lz4.frame
    except ImportError:
        raise UsageError(f"the detector mtcnn needs the package lz4: {INSTALL}") from None
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); install it again: {INSTALL}") from None
    if hashlib.sha256(packed).hexdigest() != DIGESTS[path.stem]:
        raise DataError(f"{path} does not hold the weights of mtcnn 1.0; install it again: {INSTALL}")
    content: bytes = lz4.frame.decompress(packed)
    return content
