"""A training loop in plain torch: DistributedDataParallel for the backbone, plsc's class head beside it."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import PolynomialLR

import plsc
from plsc import models
from plsc.data import TrainLoader, normalize, open_dataset
from plsc.optim import HeadState


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="avatars:200x10", help="or a folder per identity, a list, a .rec")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/plain_torch"))
    parser.add_argument("--resume", type=Path, metavar="OUT/step-N")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    mesh = plsc.init()
    faces = open_dataset(args.data, image_size=48)
    batches = TrainLoader(faces, batch_size=32, rank=mesh.rank, world_size=mesh.world_size, seed=0)
    torch.manual_seed(0)
    backbone = models.create("resnet7", embedding_dim=128, image_size=48).to(mesh.device)
    ids = [mesh.device.index] if mesh.device.type == "cuda" else None
    net = DistributedDataParallel(backbone, device_ids=ids) if mesh.world_size > 1 else backbone
    head = plsc.ShardedHead(128, faces.num_classes, mesh, margin=plsc.CosFace(s=24.0, m=0.2), seed=0)
    opt_net = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    opt_head = plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=5e-4)
    schedules = [PolynomialLR(optimizer, total_iters=args.steps) for optimizer in (opt_net, opt_head)]

    # What is the same on every rank is saved by the first; the head's rows are saved by the ranks that have them.
    replicated: dict[str, Any] = {"net": backbone, "opt_net": opt_net, "batches": batches}
    replicated |= {"schedule": schedules[0], "head_schedule": schedules[1]}
    step = 0
    if args.resume is not None:
        states = torch.load(args.resume / "replicated.pt", map_location=mesh.device, weights_only=True)
        for name, part in replicated.items():
            part.load_state_dict(states[name])
        dcp.load({"head": HeadState(opt_head)}, checkpoint_id=args.resume / "head")
        step = schedules[0].last_epoch

    losses = []
    while step < args.steps:
        for images, labels in batches:  # the rest of an epoch
            loss = head(net(normalize(images.to(mesh.device))), labels.to(mesh.device))
            loss.backward()
            for optimizer, schedule in zip((opt_net, opt_head), schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            step += 1
            losses.append(loss.item())
            if mesh.is_main:
                print(f"step {step}: loss {losses[-1]:.6f}")
            if step % args.save_every == 0:
                folder = args.out / f"step-{step}"
                dcp.save({"head": HeadState(opt_head)}, checkpoint_id=folder / "head")
                if mesh.is_main:
                    torch.save({name: part.state_dict() for name, part in replicated.items()}, folder / "replicated.pt")
            if step == args.steps:
                break
    if mesh.is_main:
        models.save_model(net, args.out / "model.safetensors")
    return losses


if __name__ == "__main__":
    main()
