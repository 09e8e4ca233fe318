"""What does not go together in a configuration: each is refused before a process starts, in one line that says why."""

import dataclasses
import re
from typing import Any

import pytest

from plsc import config
from plsc.config import Config
from plsc.errors import UsageError

FSDP, TP = {"parallel.strategy": "fsdp"}, {"backbone": "vit_tiny", "parallel.tp": 2}
PP = {"backbone": "vit_tiny", "parallel.pp": 2}
DGC, LOCAL = {"parallel.comm_hook": "dgc"}, {"averaging.name": "local_sgd"}
GROUPS = {"averaging.name": "hierarchical", "averaging.group_ranks": 2}
CLIPPED = {"optim.clip_norm": 1.0, "optim.clip_head": True}
TABLES = {"head_ranks": 1, "head.placement": "host", "replicas.averaging_period": 3}
ASYNC = {"head_ranks": 1, "head.placement": "host", "asynchronous.mode": "full"}
EIGHT_BITS = {"optim.name": "adamw", "optim.state_dtype": "int8"}
FLOAT8 = {"backbone": "vit_tiny", "precision": "bf16", "fp8": True, "data.batch_size": 32}
JOURNAL = {"head.placement": "mmap:table", "journal.enabled": True, "eval.sets": ("avatars:4x2",)}
GRAPHS = {"compile": True, "compile_mode": "reduce-overhead"}
MOMENTS = "leaves adamw no moments"
REFUSED: list[tuple[dict[str, Any], str]] = [
    # strategies
    ({"parallel.strategy": "fspd"}, "did you mean fsdp"),
    ({**FSDP, "optim.name": "lamb"}, 'strategy = "zero1"'),
    ({"parallel.strategy": "hsdp", "optim.name": "muon"}, "whole layers"),
    ({**FSDP, "parallel.comm_hook": "powersgd"}, 'comm_hook = "bf16"'),
    ({**FSDP, "parallel.bucket_mb": 5.0}, "bucket_mb"),
    ({**DGC, "parallel.strategy": "zero1"}, "momenta"),
    ({"parallel.strategy": "zero1", "parallel.offload": True}, "fsdp and hsdp"),
    ({"parallel.shard_ranks": 2}, "hsdp"),
    # tensor parallelism
    ({**TP, "backbone": "iresnet18"}, "backbone = 'iresnet18' has none"),
    ({**TP, "backbone": "timm:test_resnet"}, "backbone = 'timm:test_resnet' has none"),
    ({**TP, "parallel.tp": 3}, "does not divide the 8 heads"),
    ({**TP, "parallel.strategy": "zero1"}, 'is "zero1"; give "fsdp"'),
    ({**TP, "parallel.strategy": "zero2"}, 'is "zero2"; give "fsdp"'),
    ({"parallel.strategy": "zero2", "parallel.offload": True}, "fsdp and hsdp"),
    ({**TP, "optim.name": "lamb"}, "looks at whole layers, which parallel.tp = 2 cuts"),
    ({**TP, "parallel.comm_hook": "powersgd"}, "parallel.tp = 2 sums parts"),
    ({**TP, "parallel.bucket_mb": 1.0}, "parallel.tp = 2 sums block by block"),
    ({**TP, "compile": True}, "leave compile out"),
    # CUDA graphs
    ({"compile_mode": "reduce-overhead"}, "no effect without compile = true"),
    ({**GRAPHS, "optim.accumulate": 2}, "leave it or optim.accumulate out"),
    ({**GRAPHS, **FSDP}, 'one GPU, and parallel.strategy = "fsdp"'),
    # pipelines
    ({**PP, "backbone": "iresnet50"}, "cuts the blocks of vit_tiny"),
    ({**PP, "parallel.pp": 13, "data.batch_size": 64}, "vit_tiny has 12 blocks"),
    ({**PP, "parallel.pp": 7, "parallel.pp_schedule": "interleaved"}, "makes 14 stages"),
    ({**PP, "parallel.pp_micro_batches": 1}, "without work"),
    ({**PP, "parallel.pp_micro_batches": 3, "parallel.pp_schedule": "interleaved"}, "no multiple of pp = 2"),
    ({**PP, "data.batch_size": 7}, "two samples for each of the pipeline's 4"),
    ({**PP, **FSDP, "optim.name": "lamb"}, "whole layers"),
    ({**PP, "parallel.strategy": "zero1", "parallel.tp": 2}, 'give "fsdp"'),
    ({**PP, **LOCAL}, "stage by stage"),
    ({**PP, "parallel.comm_hook": "powersgd"}, "stage by stage"),
    ({**PP, "head_ranks": 2}, "leave head_ranks out"),
    ({**PP, "compile": True}, "leave compile out"),
    ({**PP, "parallel.pp": 1, "parallel.pp_micro_batches": 4}, "leave it out"),
    # hooks
    ({"parallel.comm_hook": "zip"}, "comm_hook"),
    ({**DGC, "parallel.dgc_sparsity": 1.0}, "dgc_sparsity"),
    ({"parallel.comm_hook": "powersgd", "parallel.powersgd_start_step": 1}, "powersgd_start_step"),
    ({"parallel.bucket_mb": 0}, "bucket_mb"),
    ({**DGC, "parallel.communicators": 2}, "parallel.comm_hook = 'dgc' has none"),
    ({**FSDP, "parallel.communicators": 2}, "parallel.strategy = 'fsdp' has none"),
    ({**DGC, "precision": "fp16"}, "loss scales differ"),
    ({"parallel.comm_hook": "powersgd", "precision": "fp16"}, "loss scales differ"),
    ({**DGC, "optim.name": "adamw"}, "takes the place of sgd's momentum"),
    ({**DGC, **CLIPPED}, "optim.clip_head"),
    # averages of weights
    ({"averaging.name": "gossip"}, "averaging"),
    ({**LOCAL, "averaging.period": 1}, "averaging.period"),
    ({**LOCAL, "parallel.comm_hook": "bf16"}, "sends weights, and no gradients"),
    ({**LOCAL, **FSDP}, 'does not go with parallel.strategy = "fsdp"'),
    ({**LOCAL, "sync_batchnorm": True}, "sync_batchnorm"),
    ({**LOCAL, **CLIPPED}, "optim.clip_head"),
    ({"averaging.name": "hierarchical"}, "needs groups"),
    ({**GROUPS, "averaging.group_period": 3}, "no multiple of averaging.group_period = 3"),
    # averages of tables
    ({**TABLES, "head_ranks": 0}, "give head_ranks"),
    ({**TABLES, "replicas.staleness": 4}, "replicas.staleness is from 0 to replicas.averaging_period"),
    ({**TABLES, "replicas.staleness": 1, "head.placement": "device"}, 'give head.placement="host"'),
    ({**TABLES, **CLIPPED}, "optim.clip_head"),
    ({**TABLES, "replicas.averaging_period": 0}, "replicas.averaging_period = 0 is out of range"),
    # steps without collectives
    ({**ASYNC, "asynchronous.mode": "geo"}, "asynchronous"),
    ({**ASYNC, "head_ranks": 0}, "give head_ranks = 1"),
    ({**ASYNC, "head.placement": "device"}, 'head.placement = "host"'),
    ({**ASYNC, "asynchronous.mode": "half", "asynchronous.staleness": 6}, "give 7 or more, or a shorter period"),
    ({**ASYNC, **FSDP}, 'does not go with parallel.strategy = "fsdp"'),
    ({**ASYNC, "parallel.comm_hook": "bf16"}, 'does not go with parallel.comm_hook = "bf16"'),
    ({**ASYNC, **LOCAL}, 'does not go with averaging.name = "local_sgd"'),
    ({**ASYNC, "replicas.averaging_period": 2}, "does not go with replicas.averaging_period = 2"),
    ({**ASYNC, "sync_batchnorm": True}, "does not go with sync_batchnorm = true"),
    ({**ASYNC, "checkpoint.every_minutes": 5.0}, "does not go with checkpoint.every_minutes = 5.0"),
    ({**ASYNC, "dynamic.max_classes": 9}, "does not go with dynamic.max_classes = 9: nobody has tried"),
    ({**ASYNC, **EIGHT_BITS}, 'does not go with optim.state_dtype = "int8"'),
    ({**ASYNC, "precision": "fp16"}, "a loss scale of its own"),
    # storage of the table, and of moments
    ({"head.exponentials_memory": "8 apples"}, "head.exponentials_memory '8 apples' is no amount of memory"),
    *[({"head.placement": wrong}, "head.placement is") for wrong in ("gpu", "mmap", "mmap:")],
    ({"head.margin": "mlcd", "negative_filter.cosine": 0.5}, "leave negative_filter out"),
    ({"head.margin": "mlcd", "labels.reduction": "sum"}, 'labels.reduction = "sum" means nothing with it'),
    ({**PP, "dynamic.max_classes": 9}, "dynamic.max_classes is not made for parallel.pp = 2"),
    ({**JOURNAL, "head.placement": "host"}, "journal = true is for tables in a mapped file"),
    ({**JOURNAL, "checkpoint.keep.best": 1}, "journal = true does not go with checkpoint.keep.best = 1"),
    ({**JOURNAL, "checkpoint.keep.every_hours": 12}, "a journal goes back to the last checkpoints alone"),
    ({**JOURNAL, **ASYNC, "head.placement": "mmap:table"}, "does not go with journal = true"),
    *[
        ({"optim.name": name, "head.momentum_dtype": "none"}, MOMENTS)
        for name in ("adamw", "lamb", "lion", "muon", "adafactor")
    ],
    ({**EIGHT_BITS, "optim.name": "sgd"}, 'is for adamw, and optim.name is "sgd"'),
    ({**EIGHT_BITS, **TP}, "parts of rows, which parallel.tp = 2 cuts elsewhere"),
    ({**EIGHT_BITS, **LOCAL}, 'averaging.name = "local_sgd" does not go with optim.state_dtype = "int8"'),
    # products in float8
    ({**FLOAT8, "backbone": "iresnet18"}, 'and backbone is "iresnet18"; leave fp8 out'),
    ({**FLOAT8, "precision": "fp16"}, 'precision is "fp16"; give "bf16"'),
    ({**FLOAT8, "parallel.tp": 2}, "fp8 = true does not go with parallel.tp = 2"),
    ({**FLOAT8, "parallel.pp": 2}, "fp8 = true does not go with parallel.pp = 2"),
]


def of_features(changes: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """The marks of the rare features whose sections are given."""
    core = {field.name for field in dataclasses.fields(Config)}
    sections = {key.partition(".")[0] for key in changes} - core
    return [pytest.mark.feature(name) for name in sorted(sections)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(changes, message, id=str(changes), marks=of_features(changes)) for changes, message in REFUSED],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as refusal:
        config.load(None, {"backbone": "iresnet18", **changes})
    assert "\n" not in str(refusal.value)


def test_a_head_beside_adamw_may_have_no_moments_by_sgd() -> None:
    given = config.load(None, {"optim.name": "lamb", "head.momentum_dtype": "none", "optim.head": "sgd"})
    assert given.optim.head_name == "sgd"
