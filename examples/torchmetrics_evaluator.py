"""plsc's verification, identification and retrieval as a metric of torchmetrics, and by plsc's own evaluator object."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor

import plsc
from plsc import evaluation, models
from plsc.data import ImageDataset, TrainLoader, normalize, open_dataset
from plsc.parallel import convert_sync_batchnorm


class Recognition(torchmetrics.Metric):
    """Scores embeddings of identities that were not trained on; torchmetrics gathers them over the ranks."""

    embeddings: list[Tensor]
    labels: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("embeddings", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Collect a batch (b, D) with its labels (b,)."""
        self.embeddings.append(embeddings)
        self.labels.append(labels)

    def compute(self) -> dict[str, Any]:
        """Score all of it; plsc.evaluation.score says what there is in it."""
        embeddings, labels = (torchmetrics.utilities.dim_zero_cat(part) for part in (self.embeddings, self.labels))
        scores = evaluation.score(embeddings, labels)
        return {name: scores[name] for name in ("accuracy", "auc", "rank1", "images")}


@torch.no_grad()
def collect(net: torch.nn.Module, unseen: ImageDataset, mesh: Any, metrics: list[Any], batch_size: int = 64) -> None:
    """Give this rank's share of the images, embedded, to each of the metrics; ranks' shares follow each other."""
    net.eval()
    rows = torch.arange(len(unseen)).tensor_split(mesh.world_size)[mesh.rank]
    for part in rows.split(batch_size):
        images = torch.stack([unseen.image(int(row)) for row in part])
        embeddings = net(normalize(images.to(mesh.device)))
        for metric in metrics:
            metric.update(embeddings, torch.from_numpy(unseen.labels[part]).to(mesh.device))
    net.train()


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Train and evaluate; returns what each of the two metrics says in the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="avatars:200x10", help="or a folder per identity, a list, a .rec")
    parser.add_argument("--unseen", default="avatars:40x6@1000000", help="identities that are not trained on")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--evaluate-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/torchmetrics_evaluator"))
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    mesh = plsc.init()
    faces, unseen = (open_dataset(source, image_size=48) for source in (args.data, args.unseen))
    batches = TrainLoader(faces, batch_size=32, rank=mesh.rank, world_size=mesh.world_size, seed=0)
    torch.manual_seed(0)
    backbone = models.create("resnet7", embedding_dim=128, image_size=48)
    net = plsc.data_parallel(convert_sync_batchnorm(backbone, mesh), mesh)  # so that ranks evaluate one model
    head = plsc.ShardedHead(128, faces.num_classes, mesh, margin=plsc.CosFace(s=24.0, m=0.2), seed=0)
    opt_net = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    opt_head = plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=5e-4)
    metrics = [Recognition().to(mesh.device), evaluation.Evaluator(mesh)]
    step, found = 0, []
    while step < args.steps:
        for images, labels in batches:  # the rest of an epoch
            loss = head(net(normalize(images.to(mesh.device))), labels.to(mesh.device))
            loss.backward()
            for optimizer in (opt_net, opt_head):
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % args.evaluate_every == 0 or step == args.steps:
                collect(net, unseen, mesh, metrics)
                found = [metric.compute() for metric in metrics]
                for metric in metrics:
                    metric.reset()
                if mesh.is_main:
                    print(f"step {step}: loss {loss.item():.6f}, {found[0]}")
            if step == args.steps:
                break
    if mesh.is_main:
        models.save_model(net, args.out / "model.safetensors")
    return found


if __name__ == "__main__":
    main()
