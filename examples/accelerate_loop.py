"""Hugging Face Accelerate: it prepares the backbone and both optimizers; plsc's class head stays beside them."""

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
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
    parser.add_argument("--accumulate", type=int, default=1, metavar="BATCHES", help="of a step")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate_loop"))
    parser.add_argument("--resume", type=Path, metavar="OUT/step-N")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    mesh = plsc.init(accelerator.device)  # the same ranks
    faces = open_dataset(args.data, image_size=48)
    # Each rank's batches are its own already: Accelerate has nothing to prepare there.
    batches = TrainLoader(faces, batch_size=32, rank=mesh.rank, world_size=mesh.world_size, seed=0)
    torch.manual_seed(0)
    net = models.create("resnet7", embedding_dim=128, image_size=48)
    head = plsc.ShardedHead(128, faces.num_classes, mesh, margin=plsc.CosFace(s=24.0, m=0.2), seed=0)
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    head_sgd = plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=5e-4)
    # Not prepared: Accelerate would step them once for each rank.
    schedules = [PolynomialLR(optimizer, total_iters=args.steps) for optimizer in (sgd, head_sgd)]
    net, opt_net, opt_head = accelerator.prepare(net, sgd, head_sgd)
    accelerator.register_for_checkpointing(batches, *schedules)
    if args.resume is not None:
        accelerator.load_state(args.resume)
        dcp.load({"head": HeadState(head_sgd)}, checkpoint_id=args.resume / "head")

    step, losses, parts = schedules[0].last_epoch, [], []
    while step < args.steps:
        for images, labels in batches:  # the rest of an epoch
            with accelerator.accumulate(net):  # steps and zero_grad() count with the last batch of a group only
                loss = head(net(normalize(images.to(mesh.device))), labels.to(mesh.device))
                accelerator.backward(loss)
                parts.append(loss.item())
                for optimizer in (opt_net, opt_head):
                    optimizer.step()
                    optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            for schedule in schedules:
                schedule.step()
            step += 1
            losses.append(sum(parts) / len(parts))
            parts.clear()
            accelerator.print(f"step {step}: loss {losses[-1]:.6f}")
            if step % args.save_every == 0:
                accelerator.save_state(args.out / f"step-{step}")
                dcp.save({"head": HeadState(head_sgd)}, checkpoint_id=args.out / f"step-{step}" / "head")
            if step == args.steps:
                break
    if accelerator.is_main_process:
        models.save_model(accelerator.unwrap_model(net), args.out / "model.safetensors")
    return losses


if __name__ == "__main__":
    main()
