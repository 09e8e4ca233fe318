"""Losses, miners and samplers of pytorch-metric-learning, or of OML, beside plsc's class head."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import plsc
from plsc import models
from plsc.data import ImageDataset, normalize, open_dataset

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES, IMAGES = 8, 4  # of a rank's batch, and of each of its classes


class Images(Dataset[tuple[Tensor, int]]):
    """plsc's images as torch's data set."""

    def __init__(self, faces: ImageDataset) -> None:
        self.faces = faces

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.faces.image(row), int(self.faces.labels[row])


def pytorch_metric_learning(labels: list[int]) -> tuple[Loss, dict[str, Any]]:
    """Triplets that a miner finds in the batch, and DataLoader's options for IMAGES pictures of each of CLASSES."""
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner
    from pytorch_metric_learning.samplers import MPerClassSampler

    loss, mine, size = TripletMarginLoss(margin=0.2), MultiSimilarityMiner(), CLASSES * IMAGES
    sampler = MPerClassSampler(labels, IMAGES, size, length_before_new_iter=len(labels))
    return lambda x, y: loss(x, y, mine(x, y)), {"sampler": sampler, "batch_size": size}


def oml(labels: list[int]) -> tuple[Loss, dict[str, Any]]:
    """The same by OML, the package open-metric-learning."""
    from oml.losses.triplet import TripletLossWithMiner
    from oml.miners.inbatch_hard_tri import HardTripletsMiner
    from oml.samplers.balance import BalanceSampler

    loss = TripletLossWithMiner(margin=0.2, miner=HardTripletsMiner())
    return loss, {"batch_sampler": BalanceSampler(labels, n_labels=CLASSES, n_instances=IMAGES)}


LIBRARIES = {"pytorch-metric-learning": pytorch_metric_learning, "oml": oml}


def main(argv: list[str] | None = None) -> list[list[float]]:
    """Train; returns the losses of each step taken: the head's, over all ranks, and the triplets' of this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=LIBRARIES, default="pytorch-metric-learning")
    parser.add_argument("--data", default="avatars:200x10", help="or a folder per identity, a list, a .rec")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--weight", type=float, default=1.0, help="of the triplets' loss")
    parser.add_argument("--out", type=Path, default=Path("runs/metric_learning"))
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    mesh = plsc.init()
    faces = open_dataset(args.data, image_size=48)
    metric_loss, sampling = LIBRARIES[args.library](faces.labels.tolist())
    batches = DataLoader(Images(faces), **sampling)
    np.random.seed(mesh.rank)  # noqa: NPY002 (both libraries' samplers draw from it: each rank its own batches)
    torch.manual_seed(0)
    net = plsc.data_parallel(models.create("resnet7", embedding_dim=128, image_size=48), mesh)
    head = plsc.ShardedHead(128, faces.num_classes, mesh, margin=plsc.CosFace(s=24.0, m=0.2), seed=0)
    opt_net = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    opt_head = plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=5e-4)
    losses: list[list[float]] = []
    while len(losses) < args.steps:
        for images, labels in batches:
            embeddings, labels = net(normalize(images.to(mesh.device))), labels.to(mesh.device)
            of_classes = head(embeddings, labels)
            # Of this rank's triplets; data parallelism averages their gradients over the ranks as it does the head's.
            of_triplets = metric_loss(torch.nn.functional.normalize(embeddings), labels)
            (of_classes + args.weight * of_triplets).backward()
            for optimizer in (opt_net, opt_head):
                optimizer.step()
                optimizer.zero_grad()
            losses.append([of_classes.item(), of_triplets.item()])
            if mesh.is_main:
                print(f"step {len(losses)}: loss {losses[-1][0]:.6f}, of triplets {losses[-1][1]:.6f}")
            if len(losses) == args.steps:
                break
    if mesh.is_main:
        models.save_model(net, args.out / "model.safetensors")
    return losses


if __name__ == "__main__":
    main()
