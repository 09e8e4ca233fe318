"""FSDP2: fully_shard for the backbone beside plsc's class head, one checkpoint of both, read at any number of ranks."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import PolynomialLR

import plsc
from plsc import models
from plsc.data import TrainLoader, normalize, open_dataset
from plsc.optim import HeadState
from plsc.parallel import convert_sync_batchnorm


class BackboneState:
    """The sharded backbone and its optimizer, as torch's Stateful."""

    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Both as DTensors, by the weights' names."""
        net, optimizer = get_state_dict(self.net, self.optimizer)
        return {"net": net, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was read."""
        set_state_dict(self.net, self.optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"])


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="avatars:200x10", help="or a folder per identity, a list, a .rec")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2_dcp"))
    parser.add_argument("--resume", type=Path, metavar="OUT/step-N")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    mesh = plsc.init()
    faces = open_dataset(args.data, image_size=48)
    size = args.batch_size // mesh.world_size
    batches = TrainLoader(faces, batch_size=size, rank=mesh.rank, world_size=mesh.world_size, seed=0)
    torch.manual_seed(0)
    backbone = models.create("resnet7", embedding_dim=128, image_size=48).to(mesh.device)
    net = convert_sync_batchnorm(backbone, mesh)  # losses then do not depend on the number of ranks
    shards = init_device_mesh(mesh.device.type, (mesh.world_size,))
    for block in net.get_submodule("blocks").children():
        fully_shard(block, mesh=shards)
    fully_shard(net, mesh=shards)
    head = plsc.ShardedHead(128, faces.num_classes, mesh, margin=plsc.CosFace(s=24.0, m=0.2), seed=0)
    opt_net = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    opt_head = plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=5e-4)
    schedules = [PolynomialLR(optimizer, total_iters=args.steps) for optimizer in (opt_net, opt_head)]

    states: dict[str, Any] = {"backbone": BackboneState(net, opt_net), "head": HeadState(opt_head), "batches": batches}
    states |= {"schedule": schedules[0], "head_schedule": schedules[1]}
    if args.resume is not None:
        dcp.load(states, checkpoint_id=args.resume)
    step, losses = schedules[0].last_epoch, []
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
                dcp.save(states, checkpoint_id=args.out / f"step-{step}")
            if step == args.steps:
                break

    whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # on all ranks
    if mesh.is_main:
        backbone = models.create("resnet7", embedding_dim=128, image_size=48)
        backbone.load_state_dict(whole)
        models.save_model(backbone, args.out / "model.safetensors")
    return losses


if __name__ == "__main__":
    main()
