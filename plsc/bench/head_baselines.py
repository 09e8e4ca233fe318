"""Class heads that `plsc bench head` measures: ours in several precisions, and the baselines beside them."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.head import ShardedHead
from plsc.losses import ArcFace
from plsc.optim import HeadSGD
from plsc.parallel.mesh import Mesh

Step = Callable[[Tensor, Tensor], Tensor]  # embeddings (b, D) that require a gradient, labels (b,) -> loss

LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
SCALE, MARGIN = 64.0, 0.5
_PARTIAL_FC, _MARGINS = "partial_fc_v2.py", "losses.py"


@dataclass(frozen=True)
class BenchConfig:
    """One measurement: a head at a size, on the ranks of this machine.

    ``batch`` is per rank; ``threads`` are the CPU threads of a rank; ``device`` is "cpu" or "cuda"; ``partial_fc`` is
    the folder with insightface's partial_fc_v2.py; ``memory_bytes`` is what a rank on a CPU may allocate.
    """

    implementation: str
    classes: int
    batch: int
    dim: int = 512
    nproc: int = 2
    threads: int = 1
    steps: int = 3
    device: str = "cpu"
    sample_rate: float = 0.1
    partial_fc: str | None = None
    memory_bytes: int | None = None

    @property
    def global_batch(self) -> int:
        """Samples of all ranks."""
        return self.batch * self.nproc

    def with_at_most(self, classes: int) -> "BenchConfig":
        """Return the same measurement with at most ``classes`` classes."""
        return replace(self, classes=min(self.classes, classes))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class HeadImplementation:
    """A class head under measurement: its label in tables, and a builder of its training step on this rank.

    ``ours`` separates the library's heads from the baselines; ``sampled`` heads leave classes out of a step.
    """

    label: str
    build: Callable[[BenchConfig, Mesh], Step]
    ours: bool = False
    sampled: bool = False


def training_step(loss_of: Step, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step of forward, backward and update."""

    def step(embeddings: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(embeddings, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# Ours ---------------------------------------------------------------------------------------------------------------


def _sharded_head(
    weight: torch.dtype, momentum: torch.dtype | None, *, sampled: bool = False
) -> Callable[[BenchConfig, Mesh], Step]:
    def build(config: BenchConfig, mesh: Mesh) -> Step:
        rate = config.sample_rate if sampled else 1.0
        head = ShardedHead(config.dim, config.classes, mesh, ArcFace(s=SCALE, m=MARGIN), rate, weight, momentum)
        decay = MOMENTUM if momentum is not None else 0.0
        return training_step(head, HeadSGD(head, lr=LR, momentum=decay, weight_decay=WEIGHT_DECAY))

    return build


# Baselines with the whole table on every rank -----------------------------------------------------------------------


class _Table(nn.Module):
    """Class table (C, D), replicated on every rank."""

    def __init__(self, config: BenchConfig, mesh: Mesh) -> None:
        super().__init__()
        table = torch.empty(config.classes, config.dim, device=mesh.device)
        self.weight = nn.Parameter(table.normal_(0, 0.01))


class DenseArcFace(_Table):
    """ArcFace in its textbook form: all logits (b, C), and autograd for everything."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples."""
        cos = F.linear(F.normalize(embeddings), F.normalize(self.weight))
        target = cos.gather(1, labels[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        with_margin = (target.acos() + MARGIN).cos()
        return F.cross_entropy(cos.scatter(1, labels[:, None], with_margin) * SCALE, labels)


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


def _dense(config: BenchConfig, mesh: Mesh) -> Step:
    return _replicated(DenseArcFace(config, mesh), mesh)


def _linear_cross_entropy(config: BenchConfig, mesh: Mesh) -> Step:
    return _replicated(PlainSoftmax(config, mesh), mesh)


def _replicated(module: nn.Module, mesh: Mesh) -> Step:
    """Return the training step of replicas that DistributedDataParallel keeps equal."""
    whole: nn.Module = module
    if mesh.world_size > 1:
        whole = nn.parallel.DistributedDataParallel(module, process_group=mesh.group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    return training_step(whole, optimizer)


# PartialFC_V2 of insightface's arcface_torch ------------------------------------------------------------------------


def _partial_fc(*, sampled: bool) -> Callable[[BenchConfig, Mesh], Step]:
    """Return a builder of PartialFC_V2 as arcface_torch's train_v2.py sets it up for SGD in float32."""

    def build(config: BenchConfig, mesh: Mesh) -> Step:
        rate = config.sample_rate if sampled else 1.0
        head = partial_fc_head(check_partial_fc(config.partial_fc), config.dim, config.classes, rate, mesh)
        groups = [{"params": head.parameters()}]
        return training_step(head, torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY))

    return build


def partial_fc_head(folder: Path, dim: int, classes: int, sample_rate: float, mesh: Mesh) -> nn.Module:
    """Make the PartialFC_V2 of a folder that :func:`check_partial_fc` has seen, with ArcFace's margin."""
    if not dist.is_initialized():  # it needs a process group even on a single rank
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if mesh.device.type == "cpu":
        # Its code calls .cuda() on every tensor that it makes.
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    margin = load_file(folder / _MARGINS).CombinedMarginLoss(SCALE, 1.0, MARGIN, 0.0)
    head: nn.Module = load_file(folder / _PARTIAL_FC).PartialFC_V2(margin, dim, classes, sample_rate, False)
    return head.train().to(mesh.device)


def check_partial_fc(folder: str | Path | None, option: str = "--partial-fc", *more: str) -> Path:
    """Return the absolute path of a folder that holds arcface_torch's files, and ``more`` of them.

    Raises:
        UsageError: no folder is given by ``option``, or a file is missing in it.
    """
    fix = "name the folder recognition/arcface_torch of an insightface checkout"
    if folder is None:
        raise UsageError(f"PartialFC_V2 needs {option} FOLDER: {fix}")
    path = Path(folder).absolute()
    for name in (_PARTIAL_FC, _MARGINS, *more):
        if not (path / name).is_file():
            raise UsageError(f"{option} {folder}: there is no {name} in it; {fix}")
    return path


def partial_fc_version(folder: Path) -> str:
    """Return the beginning of the SHA-256 of partial_fc_v2.py, which carries no version of its own."""
    return f"{_PARTIAL_FC} {sha256((folder / _PARTIAL_FC).read_bytes()).hexdigest()[:12]}"


def load_file(file: Path) -> ModuleType:
    """Import a file once under a name of its own: arcface_torch is no package."""
    name = f"_peer_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


# The table of implementations ---------------------------------------------------------------------------------------

_BF16, _FP32, _INT8 = torch.bfloat16, torch.float32, torch.int8

IMPLEMENTATIONS = {
    "plsc": HeadImplementation("plsc, bf16 + int8", _sharded_head(_BF16, _INT8), ours=True),
    "plsc-no-momentum": HeadImplementation("plsc, bf16, no momentum", _sharded_head(_BF16, None), ours=True),
    "plsc-fp32": HeadImplementation("plsc, fp32 + fp32", _sharded_head(_FP32, _FP32), ours=True),
    "plsc-sampled": HeadImplementation(
        "plsc, bf16 + int8, sampled", _sharded_head(_BF16, _INT8, sampled=True), ours=True, sampled=True
    ),
    "plsc-fp32-sampled": HeadImplementation(
        "plsc, fp32 + fp32, sampled", _sharded_head(_FP32, _FP32, sampled=True), ours=True, sampled=True
    ),
    "dense": HeadImplementation("dense logits, autograd", _dense),
    "linear-cross-entropy": HeadImplementation("F.linear_cross_entropy (no margin)", _linear_cross_entropy),
    "partial-fc": HeadImplementation("PartialFC_V2", _partial_fc(sampled=False)),
    "partial-fc-sampled": HeadImplementation("PartialFC_V2, sampled", _partial_fc(sampled=True), sampled=True),
}
NEED_PARTIAL_FC = ("partial-fc", "partial-fc-sampled")
ROOFLINE = "floor"  # measured beside the heads; its name in results and in --contestants


def label(name: str, sample_rate: float) -> str:
    """Return an implementation's name for tables, with the share of classes that it samples."""
    if name == ROOFLINE:
        return "roofline (product alone)"
    return IMPLEMENTATIONS[name].label.replace("sampled", f"r = {sample_rate:g}")


def unavailable(name: str) -> str | None:
    """Return the reason why this implementation cannot run here at all; None where it can."""
    if name != "linear-cross-entropy":
        return None
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"
