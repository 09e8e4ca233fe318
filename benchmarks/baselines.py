"""Baselines of `plsc bench head`, `train`, `search`, `cluster` and `data`: what `--baselines` adds beside ours.

Heads with the whole table on every rank in PyTorch's own parts; a plain training loop; insightface's PartialFC_V2 and
the loop of its train_v2.py, whose files are read from a checkout's recognition/arcface_torch; numpy, faiss and usearch.
"""

import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plsc.bench.comparison import ARCFACE, SGD, Contestant, Task, is_sampled, load_file
from plsc.bench.data import Batches
from plsc.bench.head import Step, training_step
from plsc.bench.search import Search, SearchData
from plsc.bench.train import CLIP_NORM, Images
from plsc.data import decode_image
from plsc.errors import UsageError
from plsc.index.rows import Float32, Int64
from plsc.models import create
from plsc.models.preprocessing import normalize
from plsc.parallel.mesh import Mesh

_PARTIAL_FC, _MARGINS, _BACKBONES = "partial_fc_v2.py", "losses.py", "backbones/iresnet.py"
_FAISS_KMEANS = {"spherical": True, "min_points_per_centroid": 1, "max_points_per_centroid": 2**31 - 1}
FAISS_BLOCKS = (1024, 4096, 16384, 65536)  # rows per matrix product that faiss is tried with; the first is its default


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, **SGD)


def _replicated(module: nn.Module, mesh: Mesh) -> nn.Module:
    """The module, whose replicas DistributedDataParallel keeps equal."""
    if mesh.world_size == 1:
        return module
    return nn.parallel.DistributedDataParallel(module, process_group=mesh.group, gradient_as_bucket_view=True)


# Heads with the whole table on every rank ---------------------------------------------------------------------------


class _Table(nn.Module):
    """Class table (C, D), replicated on every rank."""

    def __init__(self, task: Task, mesh: Mesh) -> None:
        super().__init__()
        table = torch.empty(task.classes, task.dim, device=mesh.device)
        self.weight = nn.Parameter(table.normal_(0, 0.01))


class DenseArcFace(_Table):
    """ArcFace in its textbook form: all logits (b, C), and autograd for everything."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples."""
        cos = F.linear(F.normalize(embeddings), F.normalize(self.weight))
        target = cos.gather(1, labels[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        with_margin = (target.acos() + ARCFACE["m"]).cos()
        return F.cross_entropy(cos.scatter(1, labels[:, None], with_margin) * ARCFACE["s"], labels)


class PlainSoftmax(_Table):
    """PyTorch's fused loss: neither cosines nor a margin, so less work than the other heads do."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples."""
        fused: Any = F.linear_cross_entropy
        # Its documentation says that chunks are a gain only where the batch is at least as large as D.
        options = None
        if embeddings.shape[0] >= embeddings.shape[1]:
            options = torch.nn.LinearCrossEntropyOptions()
        loss: Tensor = fused(embeddings, self.weight, labels, options=options)
        return loss


def _whole_table(kind: type[_Table], task: Task, mesh: Mesh) -> Step:
    module = kind(task, mesh)
    return training_step(_replicated(module, mesh), _sgd(module.parameters()))


def why_no_linear_cross_entropy() -> str | None:
    """The reason why this torch lacks the fused loss; None where it has it."""
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"


# PartialFC_V2 of insightface's arcface_torch ------------------------------------------------------------------------


def _partial_fc(task: Task, mesh: Mesh) -> Step:
    """PartialFC_V2 as arcface_torch's train_v2.py sets it up for SGD in float32."""
    head = _partial_fc_head(task, task.sample_rate if is_sampled(task.contestant) else 1.0, mesh)
    return training_step(head, _sgd([{"params": head.parameters()}]))


def _partial_fc_head(task: Task, sample_rate: float, mesh: Mesh) -> nn.Module:
    """Make the PartialFC_V2 of the task's folder, with ArcFace's margin."""
    folder = _checked(task.peer, "--partial-fc")
    if not dist.is_initialized():  # it needs a process group even on a single rank
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if mesh.device.type == "cpu":
        # Its code calls .cuda() on every tensor that it makes.
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    margin = load_file(folder / _MARGINS).CombinedMarginLoss(ARCFACE["s"], 1.0, ARCFACE["m"], 0.0)
    head: nn.Module = load_file(folder / _PARTIAL_FC).PartialFC_V2(margin, task.dim, task.classes, sample_rate, False)
    return head.train().to(mesh.device)


def _checked(folder: str | Path | None, option: str, *more: str) -> Path:
    """The absolute path of a folder that holds arcface_torch's files, and ``more`` of them; else UsageError."""
    fix = "name the folder recognition/arcface_torch of an insightface checkout"
    if folder is None:
        raise UsageError(f"PartialFC_V2 needs {option} FOLDER: {fix}")
    path = Path(folder).absolute()
    for name in (_PARTIAL_FC, _MARGINS, *more):
        if not (path / name).is_file():
            raise UsageError(f"{option} {folder}: there is no {name} in it; {fix}")
    return path


def _versions(option: str, *more: str) -> Callable[[str | Path | None], str]:
    """Make a check of the folder that returns the beginnings of its files' SHA-256: they carry no version."""

    def versions(folder: str | Path | None) -> str:
        path = _checked(folder, option, *more)
        hashes = ((path / name, sha256((path / name).read_bytes()).hexdigest()[:12]) for name in (_PARTIAL_FC, *more))
        return ", ".join(f"{file.name} {digest}" for file, digest in hashes)

    return versions


# Training loops -----------------------------------------------------------------------------------------------------


class _Recogniser(nn.Module):
    """Backbone and all logits in one module, as a classifier is written in PyTorch."""

    def __init__(self, task: Task, mesh: Mesh) -> None:
        super().__init__()
        self.backbone = create(task.backbone, embedding_dim=task.dim, image_size=task.image_size).to(mesh.device)
        self.head = DenseArcFace(task, mesh)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(task.precision)
        self._autocast = torch.autocast(task.device, dtype=dtype, enabled=dtype is not None)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples."""
        with self._autocast:
            embeddings = self.backbone(images)
        loss: Tensor = self.head(embeddings.float(), labels)
        return loss


def _plain(task: Task, mesh: Mesh) -> Callable[[Images], float]:
    net = _replicated(_Recogniser(task, mesh).train(), mesh)
    weights = list(net.parameters())
    return _loop(task, lambda batch: net(*batch), _sgd(weights), weights)


def _arcface_torch(task: Task, mesh: Mesh) -> Callable[[Images], float]:
    """Set up backbone, PartialFC_V2 and DistributedDataParallel with the options of arcface_torch's train_v2.py."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    warnings.simplefilter("ignore")  # its autocast is of a form that torch now warns of
    folder = _checked(task.peer, "--arcface-torch", _BACKBONES)
    if task.precision == "bf16":
        raise UsageError("arcface_torch trains in fp32 and fp16")
    head = _partial_fc_head(task, 1.0, mesh)
    make = getattr(load_file(folder / _BACKBONES), task.backbone, None)
    if make is None:
        raise UsageError(f"arcface_torch has no {task.backbone} in {_BACKBONES}")
    backbone = make(False, dropout=0.0, fp16=task.precision == "fp16", num_features=task.dim).to(mesh.device)
    ids = [mesh.device.index] if mesh.device.type == "cuda" else None
    net = nn.parallel.DistributedDataParallel(
        backbone, device_ids=ids, broadcast_buffers=False, bucket_cap_mb=16, find_unused_parameters=True
    )
    net.register_comm_hook(None, fp16_compress_hook)
    net.train()
    net._set_static_graph()
    optimizer = _sgd([{"params": net.parameters()}, {"params": head.parameters()}])
    return _loop(task, lambda batch: head(net(batch[0]), batch[1]), optimizer, list(net.parameters()))


def _loop(
    task: Task, loss_of: Callable[[Images], Tensor], optimizer: torch.optim.Optimizer, clipped: list[nn.Parameter]
) -> Callable[[Images], float]:
    """Return the step that both loops take: forward, backward, clipping, update, and the loss as a number."""
    scaler = torch.amp.GradScaler(task.device, enabled=task.precision == "fp16")

    def step(batch: Images) -> float:
        loss = loss_of(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(clipped, CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()  # both log the loss of every step, for which a GPU's host waits

    return step


def _on_device(batch: Images, mesh: Mesh) -> Images:
    """Both take normalised images on the device, as arcface_torch's loader brings them: this is not measured."""
    images, labels = batch
    return normalize(images.to(mesh.device)), labels.to(mesh.device)


# Searches -----------------------------------------------------------------------------------------------------------


def _numpy(data: SearchData, threads: int) -> Search:
    base = np.array(data.rows, subok=False)

    def search(queries: Float32, k: int) -> Int64:
        scores = queries @ base.T
        rows = np.argpartition(scores, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(scores, rows, axis=1), axis=1)
        found: Int64 = np.take_along_axis(rows, order, axis=1)
        return found

    return search


def _faiss(data: SearchData, threads: int) -> Search:
    import faiss

    faiss.omp_set_num_threads(threads)
    flat = faiss.IndexFlatIP(data.rows.shape[1])
    rows = data.rows
    for start in range(0, len(rows), 16384):  # never the whole mapped file in memory beside faiss's copy
        flat.add(np.array(rows[start : start + 16384], subok=False))

    def search(queries: Float32, k: int) -> Int64:
        found: Int64 = flat.search(queries, k)[1]
        return found

    return search


def _tune_faiss(search: Search, queries: Float32) -> str:
    """Set the block size with which ``queries`` take the least time."""
    import faiss

    times = {}
    for block in FAISS_BLOCKS:
        faiss.cvar.distance_compute_blas_database_bs = block
        search(queries, 10)
        start = time.perf_counter()
        search(queries, 10)
        times[block] = time.perf_counter() - start
    best = min(times, key=lambda block: times[block])
    faiss.cvar.distance_compute_blas_database_bs = best
    return f"blocks of {best}"


def _usearch(data: SearchData, threads: int) -> Search:
    from usearch.index import MetricKind
    from usearch.index import search as exact_search

    base = np.array(data.rows, subok=False)

    def search(queries: Float32, k: int) -> Int64:
        found: Any = exact_search(base, queries, k, MetricKind.IP, exact=True, threads=threads)
        return np.asarray(found.keys, dtype=np.int64).reshape(len(queries), -1)

    return search


def _needs(module: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) else f"{module} is not installed"


_SUPER_SEED = 42  # of superkmeans' own draws


def _cluster_rows(folder: Path) -> Float32:
    rows: Float32 = np.load(folder / "rows.npy", allow_pickle=False)
    return rows


def _rows_from_common_start(draws: Callable[[int], Int64], folder: Path) -> Float32:
    """The rows in an order in which those that ``draws(N)`` begins with are the common first centres.

    A clustering that takes no first centres draws rows by its seed; so it is given these rows there.
    """
    rows, start = _cluster_rows(folder), np.load(folder / "start_rows.npy", allow_pickle=False)
    drawn = draws(len(rows))
    order = np.empty(len(rows), dtype=np.int64)
    order[drawn[: len(start)]] = start
    order[drawn[len(start) :]] = np.setdiff1d(np.arange(len(rows)), start)
    return rows[order]


def _drawn_by_faiss(count: int) -> Int64:
    """faiss::rand_perm as faiss::SuperKMeans calls it."""
    from plsc.index.scan import load_faiss

    faiss = load_faiss()
    drawn = np.empty(count, dtype=np.int32)
    faiss.rand_perm(faiss.swig_ptr(drawn), count, faiss.SuperKMeansParameters().seed + 1)
    return drawn.astype(np.int64)


def _drawn_by_superkmeans(count: int) -> Int64:
    """libstdc++'s std::shuffle of 0 to ``count``, above 65,536, by std::mt19937: Lemire's bounded numbers."""
    engine = np.random.RandomState(_SUPER_SEED)  # the same generator, seeded alike
    numbers = iter(engine.randint(0, 1 << 32, 2 * count, dtype=np.uint32).tolist())
    drawn = list(range(count))
    for last in range(1, count):
        bound = last + 1
        product = next(numbers) * bound
        while product % (1 << 32) < (1 << 32) % bound:
            product = next(numbers) * bound
        other = product >> 32
        drawn[last], drawn[other] = drawn[other], drawn[last]
    return np.array(drawn)


def _why_no_super_kmeans() -> str | None:
    if (reason := _needs("faiss")()) is not None:
        return reason
    from plsc.index.scan import load_faiss

    faiss = load_faiss()
    return None if hasattr(faiss, "SuperKmeans") else f"faiss {faiss.__version__} has no SuperKmeans; 1.15 has it"


def _faiss_kmeans(rows: Float32, start: Float32, iterations: int, threads: int) -> tuple[Float32, int]:
    """faiss.Kmeans on all points, not on a sample of them, from the same first centres."""
    from plsc.index.scan import load_faiss

    faiss = load_faiss()
    faiss.omp_set_num_threads(threads)
    kmeans = faiss.Kmeans(rows.shape[1], len(start), niter=iterations, **_FAISS_KMEANS)
    kmeans.train(rows, init_centroids=start)
    return kmeans.centroids, iterations


def _faiss_super_kmeans(rows: Float32, start: Float32, iterations: int, threads: int) -> tuple[Float32, int]:
    """faiss.SuperKmeans on all points."""
    from plsc.index.scan import load_faiss

    faiss = load_faiss()
    faiss.omp_set_num_threads(threads)
    kmeans = faiss.SuperKmeans(rows.shape[1], len(start), niter=iterations, **_FAISS_KMEANS)
    kmeans.train(rows)
    return kmeans.centroids, iterations


def _super_kmeans(rows: Float32, start: Float32, iterations: int, threads: int) -> tuple[Float32, int]:
    """superkmeans on all points, in float32, without early ends; assignments are right with high probability."""
    superkmeans: Any = importlib.import_module("superkmeans")
    options = {"sampling_fraction": 1.0, "hierarchical": False, "angular": True, "early_termination": False}
    kmeans = superkmeans.SuperKMeans(
        len(start), rows.shape[1], iters=iterations, n_threads=threads, seed=_SUPER_SEED, **options
    )
    return kmeans.train(rows), iterations


# Loaders of pictures ------------------------------------------------------------------------------------------------


def _as_plsc(data: bytes) -> Tensor:
    return decode_image(data, "a picture")


def _webdataset(is_fast: bool, folder: Path, workers: int, batch: int) -> Batches:
    import webdataset

    how = webdataset.handle_extension("jpg", _as_plsc) if is_fast else "torchrgb8"
    shards = sorted(map(str, folder.glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000).decode(how)
    data = data.to_tuple("jpg", "cls").batched(batch)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader: Batches = webdataset.WebLoader(data, batch_size=None, **options)
    return loader


def _data_loader(dataset: Any, workers: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0, **options)


def _imagefolder(is_fast: bool, folder: Path, workers: int, batch: int) -> Batches:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.v2.functional import pil_to_tensor

    way = {"loader": lambda path: _as_plsc(Path(path).read_bytes())} if is_fast else {"transform": pil_to_tensor}
    return _data_loader(ImageFolder(str(folder / "folder"), **way), workers, batch)


def _datasets(folder: Path, workers: int, batch: int) -> Batches:
    import datasets

    files, cache = str(folder / "images.parquet"), str(folder / "cache")
    rows = datasets.load_dataset("parquet", data_files=files, cache_dir=cache, split="train").with_format("torch")
    return _data_loader(rows, workers, batch, collate_fn=_stacked)


def _stacked(rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([row["image"] for row in rows]), torch.stack([row["label"] for row in rows])


# The table ----------------------------------------------------------------------------------------------------------


BASELINES = {
    "head": {
        "dense": Contestant("dense logits, autograd", partial(_whole_table, DenseArcFace)),
        "linear-cross-entropy": Contestant(
            "F.linear_cross_entropy (no margin)",
            partial(_whole_table, PlainSoftmax),
            why_not=why_no_linear_cross_entropy,
        ),
        "partial-fc": Contestant("PartialFC_V2", _partial_fc, peer=_versions("--partial-fc")),
        "partial-fc-sampled": Contestant("PartialFC_V2, sampled", _partial_fc, peer=_versions("--partial-fc")),
    },
    "train": {
        "arcface-torch": Contestant(
            "arcface_torch", _arcface_torch, _on_device, peer=_versions("--arcface-torch", _BACKBONES)
        ),
        "plain": Contestant("DDP, all logits", _plain, _on_device),
    },
    "search": {
        "numpy": Contestant("numpy", _numpy),
        "faiss": Contestant("faiss flat, as shipped", _faiss, why_not=_needs("faiss")),
        "faiss-tuned": Contestant("faiss flat, block size tuned", _faiss, prepare=_tune_faiss, why_not=_needs("faiss")),
        "usearch": Contestant("usearch, exact", _usearch, why_not=_needs("usearch")),
    },
    "cluster": {
        "faiss": Contestant(
            "faiss.Kmeans, spherical, all points", _faiss_kmeans, _cluster_rows, why_not=_needs("faiss")
        ),
        "faiss-super": Contestant(
            "faiss.SuperKmeans, spherical, all points",
            _faiss_super_kmeans,
            partial(_rows_from_common_start, _drawn_by_faiss),
            why_not=_why_no_super_kmeans,
        ),
        "superkmeans": Contestant(
            "superkmeans, angular, all points",
            _super_kmeans,
            partial(_rows_from_common_start, _drawn_by_superkmeans),
            why_not=_needs("superkmeans"),
        ),
    },
    "data": {
        "webdataset": Contestant("webdataset", partial(_webdataset, False), why_not=_needs("webdataset")),
        "webdataset-fast": Contestant(
            "webdataset, plsc decodes", partial(_webdataset, True), why_not=_needs("webdataset")
        ),
        "imagefolder": Contestant("ImageFolder, DataLoader", partial(_imagefolder, False)),
        "imagefolder-fast": Contestant("ImageFolder, plsc decodes", partial(_imagefolder, True)),
        "datasets": Contestant("datasets, DataLoader", _datasets, why_not=_needs("datasets")),
    },
}
