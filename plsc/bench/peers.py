"""The heads that ours is compared with: each builder returns a function that makes one training step."""

import importlib.util
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plsc.bench.setting import Setting
from plsc.errors import UsageError
from plsc.parallel.mesh import Mesh

Step = Callable[[Tensor, Tensor], Tensor]  # (embeddings (b, D) that want a gradient, labels (b,)) to the loss

LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
SCALE, MARGIN = 64.0, 0.5
_PARTIAL_FC, _MARGINS = "partial_fc_v2.py", "losses.py"


def training_step(loss_of: Step, optimizer: torch.optim.Optimizer) -> Step:
    """Forward, backward and update."""

    def step(embeddings: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(embeddings, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class _Table(nn.Module):
    """The whole class table on every rank."""

    def __init__(self, setting: Setting, mesh: Mesh) -> None:
        super().__init__()
        table = torch.empty(setting.classes, setting.dim, device=mesh.device)
        self.weight = nn.Parameter(table.normal_(0, 0.01))


class DenseArcFace(_Table):
    """ArcFace as one would write it down: all logits (b, C), autograd for everything."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of this rank's samples."""
        cos = F.linear(F.normalize(embeddings), F.normalize(self.weight))
        target = cos.gather(1, labels[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        with_margin = (target.acos() + MARGIN).cos()
        return F.cross_entropy(cos.scatter(1, labels[:, None], with_margin) * SCALE, labels)


class PlainSoftmax(_Table):
    """torch's own fused loss: neither cosines nor a margin, thus less work than the others do."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of this rank's samples."""
        fused: Any = F.linear_cross_entropy
        # Its documentation says that chunks are a gain only where the batch is at least as large as D.
        options = None
        if embeddings.shape[0] >= embeddings.shape[1]:
            options = torch.nn.LinearCrossEntropyOptions()
        loss: Tensor = fused(embeddings, self.weight, labels, options=options)
        return loss


def dense(setting: Setting, mesh: Mesh) -> Step:
    """Full logits; replicas of the table kept equal by DistributedDataParallel."""
    return _replicated(DenseArcFace(setting, mesh), mesh)


def linear_cross_entropy(setting: Setting, mesh: Mesh) -> Step:
    """``F.linear_cross_entropy``; replicas of the table kept equal by DistributedDataParallel."""
    return _replicated(PlainSoftmax(setting, mesh), mesh)


def linear_cross_entropy_missing() -> str | None:
    """Why it cannot run; None where it can."""
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"


def partial_fc(sampled: bool) -> Callable[[Setting, Mesh], Step]:
    """arcface_torch's PartialFC_V2, set up as its own train_v2.py does for SGD in float32."""

    def build(setting: Setting, mesh: Mesh) -> Step:
        folder = check_partial_fc(setting.partial_fc)
        if not dist.is_initialized():  # it asks for a process group even where it is alone
            backend = "nccl" if mesh.device.type == "cuda" else "gloo"
            alone: Any = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=alone, rank=0, world_size=1)
        if mesh.device.type == "cpu":
            _stay_on_cpu()
        margin = _load(folder / _MARGINS).CombinedMarginLoss(SCALE, 1.0, MARGIN, 0.0)
        rate = setting.sample_rate if sampled else 1.0
        head = _load(folder / _PARTIAL_FC).PartialFC_V2(margin, setting.dim, setting.classes, rate, False)
        head.train().to(mesh.device)
        groups = [{"params": head.parameters()}]
        return training_step(head, torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY))

    return build


def check_partial_fc(folder: str | Path | None) -> Path:
    """The folder, if it holds what is needed of arcface_torch; a :class:`UsageError` says what is missing."""
    wanted = "name the folder recognition/arcface_torch of an insightface checkout"
    if folder is None:
        raise UsageError(f"PartialFC_V2 needs --partial-fc FOLDER; {wanted}")
    path = Path(folder).absolute()
    for name in (_PARTIAL_FC, _MARGINS):
        if not (path / name).is_file():
            raise UsageError(f"--partial-fc {folder}: there is no {name} in it; {wanted}")
    return path


def partial_fc_version(folder: Path) -> str:
    """Which PartialFC_V2 it is: the beginning of its file's SHA-256."""
    return f"{_PARTIAL_FC} {sha256((folder / _PARTIAL_FC).read_bytes()).hexdigest()[:12]}"


def _replicated(module: nn.Module, mesh: Mesh) -> Step:
    whole: nn.Module = module
    if mesh.world_size > 1:
        whole = nn.parallel.DistributedDataParallel(module, process_group=mesh.group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    return training_step(whole, optimizer)


def _load(file: Path) -> ModuleType:
    name = f"_peer_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _stay_on_cpu() -> None:
    """Its code calls .cuda() on every tensor that it makes; on a CPU that shall mean the tensor itself."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
