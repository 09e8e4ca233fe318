"""Lightning with manual optimisation: DDP wraps the module, and plsc's class head stays beside it."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning  # of the package lightning: import lightning
import torch
import torch.distributed.checkpoint as dcp
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import PolynomialLR

import plsc
from plsc import models
from plsc.data import TrainLoader, normalize, open_dataset
from plsc.optim import HeadState


class Recognition(lightning.LightningModule):
    """A backbone that learns by the loss of a class head, which is no part of the module.

    Args:
        head_optimizer: of the head.
        steps: of the whole run.
        out: the folder that the head's checkpoints are written into.
    """

    def __init__(self, head_optimizer: plsc.HeadSGD, steps: int, out: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = models.create("resnet7", embedding_dim=128, image_size=48)
        self.beside = (head_optimizer.head,)  # a tuple: DDP would send the shard of a registered module to all ranks
        self.head_optimizer, self.steps, self.out = head_optimizer, steps, out
        self.head_schedule = PolynomialLR(head_optimizer, total_iters=steps)
        self.losses: list[float] = []

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the backbone's alone: Lightning counts a step for each optimizer that it knows."""
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        return {"optimizer": sgd, "lr_scheduler": PolynomialLR(sgd, total_iters=self.steps)}

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Step both optimizers."""
        images, labels = batch
        loss = self.beside[0](self.net(normalize(images)), labels)
        self.manual_backward(loss)
        optimizer = self.optimizers()
        optimizer.step()
        self.head_optimizer.step()
        optimizer.zero_grad()
        for schedule in (self.lr_schedulers(), self.head_schedule):
            schedule.step()
        self.losses.append(loss.item())
        self.print(f"step {self.global_step}: loss {loss.item():.6f}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the head beside Lightning's file, each rank its rows; Lightning calls this on every rank."""
        checkpoint["head"] = str(self.out / f"head-{self.global_step}")
        checkpoint["head_schedule"] = self.head_schedule.state_dict()
        dcp.save({"head": HeadState(self.head_optimizer)}, checkpoint_id=checkpoint["head"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read it."""
        self.head_schedule.load_state_dict(checkpoint["head_schedule"])
        dcp.load({"head": HeadState(self.head_optimizer)}, checkpoint_id=checkpoint["head"])


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="avatars:200x10", help="or a folder per identity, a list, a .rec")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning_module"))
    parser.add_argument("--resume", type=Path, metavar="OUT/step=N.ckpt")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    mesh = plsc.init()  # before the Trainer, which takes these ranks over
    faces = open_dataset(args.data, image_size=48)
    # Each rank's batches are its own already.
    batches = TrainLoader(faces, batch_size=32, rank=mesh.rank, world_size=mesh.world_size, seed=0)
    torch.manual_seed(0)
    head = plsc.ShardedHead(128, faces.num_classes, mesh, margin=plsc.CosFace(s=24.0, m=0.2), seed=0)
    module = Recognition(plsc.HeadSGD(head, lr=0.02, momentum=0.9, weight_decay=5e-4), args.steps, args.out)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    trainer = lightning.Trainer(
        accelerator=mesh.device.type,
        devices=local_ranks,
        num_nodes=mesh.world_size // local_ranks,
        strategy="ddp" if mesh.world_size > 1 else "auto",
        use_distributed_sampler=False,
        max_steps=args.steps,
        callbacks=[ModelCheckpoint(args.out, "{step}", every_n_train_steps=args.save_every, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches, ckpt_path=args.resume)
    if mesh.is_main:
        models.save_model(module.net, args.out / "model.safetensors")
    return module.losses


if __name__ == "__main__":
    main()
