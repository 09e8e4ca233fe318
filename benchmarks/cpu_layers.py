"""Training steps on CPUs with the layers of plsc.models that are fast there, and with PyTorch's own instead.

    python benchmarks/cpu_layers.py [--rounds 12]

Networks with all, all but one, or none of the layers take turns in one process on one thread, so that other load meets
them alike: 32 pictures at 48x48, channels-last, forward and backward. Prints the milliseconds of processor time per
step (median) and adds them to benchmarks/results/cpu_layers.csv. A minute.
"""

import statistics
import time

import torch
from results_file import add_row, script_parser
from torch import nn

from plsc.models import create
from plsc.models.backbone import Backbone, PReLU
from plsc.models.mobilefacenet import GroupedConvolution, StridedDepthwise
from plsc.native.allocator import keep_freed_memory

BATCH, SIDE = 32, 48
# The layers of PyTorch's that each variant has in the place of ours.
VARIANTS: dict[str, tuple[type[nn.Module], ...]] = {
    "ours": (),
    "torch_prelu": (PReLU,),
    "torch_depthwise": (StridedDepthwise,),
    "torch_grouped": (GroupedConvolution,),
    "torch": (PReLU, StridedDepthwise, GroupedConvolution),
}


def build(replaced: tuple[type[nn.Module], ...]) -> Backbone:
    """A MobileFaceNet in which PyTorch's layers stand for those ``replaced``."""
    torch.manual_seed(0)
    network = create("mobilefacenet", embedding_dim=512, image_size=SIDE)
    for module in network.modules():
        if isinstance(module, replaced):
            # Their parameters are the same, so the base class of the layer is PyTorch's.
            module.__class__ = type(module).__mro__[1]
    return network.to(memory_format=torch.channels_last).train()


def milliseconds(precision: str, rounds: int) -> dict[str, float]:
    """Processor time per step of each variant."""
    networks = {name: build(replaced) for name, replaced in VARIANTS.items()}
    images = torch.randn(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for number in range(rounds + 2):  # the first two warm up
        for name, network in networks.items():
            start = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                embeddings = network(images)
            embeddings.float().square().mean().backward()
            network.zero_grad()
            if number >= 2:
                seconds[name].append(time.process_time() - start)
    return {name: round(1000 * statistics.median(times), 1) for name, times in seconds.items()}


def main() -> None:
    rounds = script_parser(__doc__, rounds=12).parse_args().rounds
    keep_freed_memory()
    torch.set_num_threads(1)
    for precision in ("bf16", "fp32"):
        times = milliseconds(precision, rounds)
        print(f"mobilefacenet {precision}: " + ", ".join(f"{name} {time:.0f} ms" for name, time in times.items()))
        columns = {f"{name}_ms": time for name, time in times.items()}
        add_row("cpu_layers", {"backbone": "mobilefacenet", "precision": precision, "rounds": rounds, **columns})


if __name__ == "__main__":
    main()
