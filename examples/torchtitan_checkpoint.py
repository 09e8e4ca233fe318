"""Torchtitan's CheckpointManager saves its own kind of model and optimizer, and plsc's class head as one more state."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import PolynomialLR
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint

import plsc
from plsc import models
from plsc.data import TrainLoader, normalize, open_dataset
from plsc.optim import HeadState


class Schedules:
    """Learning rates of backbone and head, in the place of torchtitan's, which knows a warm-up and decay of its own."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
        self.schedules = [PolynomialLR(optimizer, total_iters=steps) for optimizer in optimizers]

    @property
    def step_number(self) -> int:
        """Steps taken."""
        return self.schedules[0].last_epoch

    def step(self) -> None:
        """Go on by a step."""
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """By the optimizers' numbers."""
        return {str(number): schedule.state_dict() for number, schedule in enumerate(self.schedules)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was read."""
        for number, schedule in enumerate(self.schedules):
            schedule.load_state_dict(state[str(number)])


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step taken. Goes on from the newest checkpoint below OUT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="avatars:200x10", help="or a folder per identity, a list, a .rec")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/torchtitan_checkpoint"))
    parser.add_argument("--load-step", type=int, default=-1, metavar="N", help="-1: the newest")
    args = parser.parse_args(argv)

    mesh = plsc.init()
    faces = open_dataset(args.data, image_size=48)
    batches = TrainLoader(faces, batch_size=32, rank=mesh.rank, world_size=mesh.world_size, seed=0)
    torch.manual_seed(0)
    net = plsc.data_parallel(models.create("resnet7", embedding_dim=128, image_size=48), mesh, strategy="fsdp")
    head = plsc.ShardedHead(128, faces.num_classes, mesh, margin=plsc.CosFace(s=24.0, m=0.2), seed=0)
    opt_net = OptimizersContainer([net], torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4})
    opt_head = plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=5e-4)
    schedules = Schedules([*opt_net, opt_head], args.steps)
    checkpoints = CheckpointManager(
        dataloader=batches,
        model_parts=[net],
        optimizers=opt_net,
        lr_schedulers=schedules,
        states={"head": HeadState(opt_head)},
        checkpoint_config=Checkpoint(enable=True, interval=args.save_every, last_save_model_only=False),
        sd_adapter=None,
        base_folder=str(args.out),
    )
    checkpoints.load(args.load_step)
    losses = []
    while schedules.step_number < args.steps:
        for images, labels in batches:  # the rest of an epoch
            loss = head(net(normalize(images.to(mesh.device))), labels.to(mesh.device))
            loss.backward()
            for part in (opt_net, opt_head):
                part.step()
                part.zero_grad()
            schedules.step()
            step = schedules.step_number
            losses.append(loss.item())
            if mesh.is_main:
                print(f"step {step}: loss {losses[-1]:.6f}")
            checkpoints.save(step, last_step=step == args.steps)
            if step == args.steps:
                break
    checkpoints.close()
    return losses


if __name__ == "__main__":
    main()
