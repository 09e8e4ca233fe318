"""Do compressed gradients, or averages of weights, train as accurate a model as plain exchange, for how many bytes?

    python benchmarks/comm_hooks.py [--methods none bf16 dgc …] [--data avatars:150x12] [--epochs 8] [--seeds 2]

trains ResNet-8 by SGD on two ranks, once per seed and method in turn, judges it on unseen avatars, and adds a row per
run to benchmarks/results/comm_hooks.csv: the accuracy, the bytes that a rank gives to the network per step once
warm-ups are over (tests/parallel/test_gradient_compression.py counts them on the wire), and their share of
plain training's, of this model and of IResNet-50 at 112 pixels. About a minute a run on two idle cores.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import torch
from avatar_runs import Recipe, compare, start_ranks
from results_file import script_parser

from plsc import config as configuration
from plsc.features.averaging.config import AveragingConfig
from plsc.models import create
from plsc.parallel import Mesh
from plsc.parallel.gradient_compression import gradient_exchange
from plsc.train.components import exchange_options

BASE: dict[str, Any] = {
    "data.image_size": 32,
    "data.batch_size": 16,
    "embedding_dim": 768,  # so that small tensors, which are sent whole, are no larger a share than in large models
    "optim.name": "sgd",
    "optim.lr": 0.05,
    "optim.weight_decay": 5e-4,
    "optim.betas": None,  # which sgd does not read
}
LARGE: dict[str, Any] = {"backbone": "iresnet50", "embedding_dim": 512, "data.image_size": 112}
START = 75  # of what begins at step 1,000 by default, which is longer than these runs
POWERSGD = {"parallel.comm_hook": "powersgd", "parallel.powersgd_start_step": START}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"parallel.comm_hook": "bf16"},
    "fp16": {"parallel.comm_hook": "fp16"},
    "powersgd, rank 1": {**POWERSGD, "parallel.powersgd_rank": 1},
    "powersgd, rank 4": {**POWERSGD, "parallel.powersgd_rank": 4},
    "dgc": {"parallel.comm_hook": "dgc"},
    "local_sgd": {"averaging.name": "local_sgd"},
    "post_local_sgd": {"averaging.name": "post_local_sgd", "averaging.start_step": START},
    "diloco": {"averaging.name": "diloco", "averaging.period": 16},
    # of the class table, a copy on each rank; the backbone's gradients are exchanged whole
    "geo": {
        "head_ranks": 1,
        "head.placement": "host",
        "replicas.staleness": 2,
        "replicas.averaging_period": 8,
    },
}


def sent_bytes(settings: Mapping[str, Any]) -> float:
    """The bytes that a rank contributes to the collectives of a step after the warm-up, the mean over a period."""
    config = configuration.load(overrides=settings)
    size = config.data.preprocessing.image_size
    backbone = create(config.backbone, embedding_dim=config.embedding_dim, image_size=size)
    options = exchange_options(config)
    exchange = gradient_exchange(config.parallel.comm_hook, backbone, Mesh(0, 2, 0, torch.device("cpu")), options)
    averaging = config.section(AveragingConfig)
    period = averaging.period if averaging.is_on(config) else 1
    return exchange.sent_bytes(backbone.parameters(), sys.maxsize) / period


def recipe(args: argparse.Namespace, method: str) -> Recipe:
    """Training by ``method``, with the bytes that it sends."""
    base = {**BASE, "data.train": args.data, "epochs": args.epochs}
    settings = {**base, **METHODS[method]}
    small = {"backbone": "resnet8", **settings}
    sent, whole = sent_bytes(small), sent_bytes({**base, "backbone": "resnet8"})
    share_of_large = sent_bytes({**settings, **LARGE}) / sent_bytes({**base, **LARGE})
    columns = {
        "data": args.data,
        "epochs": args.epochs,
        "method": method,
        "sent_bytes": round(sent),
        "share": round(sent / whole, 5),
        "share_iresnet50": round(share_of_large, 5),
    }
    return Recipe(method, settings, columns)


def main() -> None:
    parser = script_parser(__doc__, results="comm_hooks", data="avatars:150x12", epochs=8, seeds=2)
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    args = parser.parse_args()
    start_ranks(2)
    compare("comm_hooks", [recipe(args, method) for method in args.methods], args.seeds, args.out)


if __name__ == "__main__":
    main()
