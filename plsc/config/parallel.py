"""The keys of [parallel]: placement of the backbone on the ranks, and the exchange of gradients or weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plsc.errors import UsageError
from plsc.toml_keys import key, options_of

if TYPE_CHECKING:
    from plsc.config.sections import Config  # which imports this module
    from plsc.parallel.strategies import StrategyOptions

# Their step depends on norms or products of a whole layer.
_WHOLE_LAYER_OPTIMIZERS = ("lars", "lamb", "adafactor", "muon")


@dataclass(frozen=True)
class ParallelConfig:
    """[parallel]: how the backbone lies on the ranks, and how these exchange its gradients.

    Attributes:
        strategy: Placement of the backbone: ddp (whole on every rank), zero1 (whole, but for the optimizer's state,
            which is spread over the ranks), zero2 (the optimizer's state and gradients are spread; weights are gathered
            once a step), fsdp (weights, gradients and optimizer state spread over all ranks; weights
            are gathered block by block), hsdp (spread over shard_ranks, replicated across). None changes the results.
            auto takes the fastest that fits by plsc plan, and says why.
        shard_ranks: hsdp: consecutive ranks that share one set of weights, a divisor of all; 0: the ranks of a machine.
            With tp, it counts groups of tp ranks.
        tp: Tensor parallelism of vision transformers (vit_*, ViTs of timm): consecutive ranks that share the heads and
            hidden units of each block, and see the same images; a divisor of the ranks and of the heads. 1: off.
        offload: fsdp, hsdp: keep weights, gradients and optimizer state in main memory; the update runs there.
        pp: Pipeline parallelism of ViTs: the ranks are cut into so many stages, a divisor of all ranks, which hold
            consecutive blocks of the backbone; strategy and tp are those of a stage's ranks, and the class table lies
            on those of the last one. 1: none.
        pp_schedule: Schedule of a pipeline: gpipe (all forward passes, then all backward passes), 1f1b (alternating, so
            that fewer activations are kept), interleaved (1f1b with two stages per rank: shorter waits, more messages).
        pp_micro_batches: Micro-batches into which a pipeline cuts a batch, at least pp; 0: twice pp. Batch
            normalisation sees one at a time, as under optim.accumulate.
        comm_hook: Compression of the backbone's gradients on their way between ranks: bf16 and fp16 send 16 bits each;
            powersgd (rank-r approximation) and dgc (Deep Gradient Compression: the largest elements) send a small part,
            and keep the rest on the rank for later steps. None of them goes with sync_batchnorm's exact sums, which it
            switches off.
        bucket_mb: MiB of gradients that are exchanged together, while the backward pass goes on; unset: DDP's own 25,
            the first bucket 1.
        communicators: Communicators of all ranks over which those buckets go in turn, so that the next one begins while
            one is still on its way: for networks that one communicator does not fill. Each takes memory and streams of
            its own on a GPU.
        powersgd_rank: powersgd: rank of the approximation of a gradient as a matrix.
        powersgd_start_step: powersgd: steps of the run that are exchanged whole before it compresses.
        dgc_sparsity: dgc: share of a tensor's elements that a step does not send; 0 sends all.
        dgc_warmup_epochs: dgc: epochs over which the sparsity rises from 0.75 in four stages; 0: none.
        dgc_dense_below: dgc: tensors with fewer elements than this are sent whole.
        timeout_seconds: Seconds in which no rank makes progress, after which the run ends and names the ranks that the
            others wait for, with what they are at; after 30 s, or half of it, train.log names them already. Evaluations
            and checkpoints have no limit while some rank works there.
    """

    strategy: str = key("ddp", choices="plsc.parallel.strategies:CHOICES")
    shard_ranks: int = key(0, least=0)
    tp: int = key(1, least=1)
    offload: bool = key(False)
    pp: int = key(1, least=1)
    pp_schedule: str = key("1f1b", choices="plsc.parallel.strategies:STAGES_OF_A_RANK")
    pp_micro_batches: int = key(0, least=0)
    comm_hook: str = key("none", choices="plsc.parallel.gradient_compression:HOOKS")
    bucket_mb: float | None = key(None, above=0)
    communicators: int = key(1, least=1)
    powersgd_rank: int = key(1, least=1)
    powersgd_start_step: int = key(1000, least=2)
    dgc_sparsity: float = key(0.999, least=0, below=1)
    dgc_warmup_epochs: float = key(4.0, least=0)
    dgc_dense_below: int = key(16384, least=1)
    timeout_seconds: float = key(600.0, above=0)

    def refusals(self, run: "Config") -> Iterator[str]:
        """Say, one after another, what of ``run`` does not go with these keys."""
        yield from _of_the_hook(run)
        yield from _of_communicators(run)
        yield from _of_the_strategy(run)
        yield from _of_a_pipeline(run)
        yield from _of_tensor_parallelism(run)

    def strategy_options(self) -> "StrategyOptions":
        """The strategy that the section describes, whose numbers are the keys of the same names."""
        from plsc.parallel.strategies import StrategyOptions

        return options_of(StrategyOptions, self, name=self.strategy)

    @property
    def delays_gradients(self) -> bool:
        """Whether ranks keep parts of gradients for later steps."""
        from plsc.parallel.gradient_compression import HOOKS

        return HOOKS[self.comm_hook].delays_gradients

    @property
    def cuts_weights(self) -> bool:
        """Whether the strategy leaves ranks parts of weights alone."""
        from plsc.parallel.strategies.layout import CUT_WEIGHTS

        return self.strategy in CUT_WEIGHTS


def _of_the_hook(run: "Config") -> Iterator[str]:
    hook, optim = run.parallel.comm_hook, run.optim
    if run.parallel.delays_gradients and run.precision == "fp16":
        yield (
            f'parallel.comm_hook = "{hook}" adds gradients of several steps, whose loss scales differ under precision '
            '= "fp16"; give precision = "bf16"'
        )
    if hook == "dgc" and optim.name != "sgd":
        yield (
            f'parallel.comm_hook = "dgc" takes the place of sgd\'s momentum, and optim.name is "{optim.name}"; give '
            'optim.name = "sgd", or comm_hook = "powersgd"'
        )
    if hook == "dgc" and optim.clip_head:
        yield (
            'parallel.comm_hook = "dgc" clips each tensor before the exchange, so optim.clip_head has no common norm '
            "to clip; leave it out"
        )


def _of_communicators(run: "Config") -> Iterator[str]:
    parallel = run.parallel
    other = {
        "comm_hook": parallel.comm_hook not in ("none", "bf16", "fp16"),
        "strategy": parallel.strategy not in ("ddp", "zero1", "auto"),
        "tp": parallel.tp > 1,
        "pp": parallel.pp > 1,
    }
    found = [name for name, is_set in other.items() if is_set]
    if parallel.communicators > 1 and found:
        yield (
            f"parallel.communicators = {parallel.communicators} is for DDP's buckets, of which parallel.{found[0]} = "
            f"{getattr(parallel, found[0])!r} has none to share out; leave it out"
        )


def _of_the_strategy(run: "Config") -> Iterator[str]:
    parallel = run.parallel
    name = parallel.strategy
    if name != "hsdp" and parallel.shard_ranks:
        yield f'parallel.shard_ranks is a number of hsdp, and parallel.strategy is "{name}"; leave it out'
    if name == "zero1" and parallel.comm_hook == "dgc":
        yield (
            'parallel.comm_hook = "dgc" keeps momenta on every rank, which zero1 spreads; give comm_hook = "powersgd", '
            'or strategy = "ddp"'
        )
    if parallel.offload and name not in ("fsdp", "hsdp"):
        yield f'parallel.offload goes with fsdp and hsdp, and parallel.strategy is "{name}"'
    if parallel.cuts_weights:
        yield from _of_parts(run, f'parallel.strategy = "{name}"')


def _of_parts(run: "Config", cause: str) -> Iterator[str]:
    """What needs whole weights or gradients, which ``cause`` cuts in parts."""
    parallel, optim = run.parallel, run.optim
    if optim.name in _WHOLE_LAYER_OPTIMIZERS:
        yield (
            f'optim.name = "{optim.name}" looks at whole layers, which {cause} cuts in parts; '
            'give strategy = "zero1", whose weights are whole, or sgd, adamw or lion, which go element by element'
        )
    if parallel.delays_gradients:
        yield (
            f'parallel.comm_hook = "{parallel.comm_hook}" compresses whole gradients, and {cause} '
            'sums parts; give comm_hook = "bf16", or strategy = "zero1" or "ddp"'
        )
    if parallel.bucket_mb is not None:
        yield f"parallel.bucket_mb is of ddp and zero1; {cause} sums block by block"


def _of_a_pipeline(run: "Config") -> Iterator[str]:
    from plsc.models.vit import SHAPES
    from plsc.parallel.strategies import STAGES_OF_A_RANK

    parallel, pp = run.parallel, run.parallel.pp
    if pp == 1:
        if parallel.pp_micro_batches:
            yield "parallel.pp_micro_batches is a number of pipelines, and parallel.pp is 1; leave it out"
        return
    cause = f"parallel.pp = {pp}"
    if run.backbone not in SHAPES:
        yield (
            f'{cause} cuts the blocks of {", ".join(SHAPES)}, and backbone is "{run.backbone}"; give one of them, '
            'or strategy = "fsdp"'
        )
    stages = pp * STAGES_OF_A_RANK[parallel.pp_schedule]
    if stages > SHAPES[run.backbone].depth:
        yield (
            f'{cause} with pp_schedule = "{parallel.pp_schedule}" makes {stages} stages, and {run.backbone} has '
            f"{SHAPES[run.backbone].depth} blocks; give a smaller pp"
        )
    yield from _of_micro_batches(run, parallel.pp_micro_batches or 2 * pp)
    if parallel.delays_gradients:
        yield (
            f"{cause} exchanges gradients stage by stage, which powersgd and dgc do not know; give "
            'comm_hook = "none", "bf16" or "fp16"'
        )
    if run.compile:
        yield (
            f"{cause} does not go with compile yet: compiled blocks failed in a stage's forward pass when they were "
            "tried; leave compile out"
        )
    if run.head_ranks:
        yield f"{cause} shards the class table over the ranks of the last stage; leave head_ranks out"


def _of_micro_batches(run: "Config", count: int) -> Iterator[str]:
    parallel = run.parallel
    if count < parallel.pp:
        yield (
            f"parallel.pp_micro_batches = {count} leaves some of the pipeline's {parallel.pp} ranks without work at "
            f"any time; give {parallel.pp} or more"
        )
    if parallel.pp_schedule == "interleaved" and count % parallel.pp:
        yield (
            f"parallel.pp_micro_batches = {count} is no multiple of pp = {parallel.pp}, as the interleaved schedule "
            "needs; give one"
        )
    if run.data.batch_size < 2 * count:
        yield (
            f"data.batch_size = {run.data.batch_size} has less than two samples for each of the pipeline's {count} "
            f"micro-batches, and batch normalisation needs two; give {2 * count} or more, or fewer pp_micro_batches"
        )


def _of_tensor_parallelism(run: "Config") -> Iterator[str]:
    parallel, cause = run.parallel, f"parallel.tp = {run.parallel.tp}"
    if parallel.tp == 1:
        return
    if parallel.strategy in ("zero1", "zero2"):
        yield (
            f'{cause} goes with ddp, fsdp and hsdp, and parallel.strategy is "{parallel.strategy}"; give "fsdp", '
            "which spreads the optimizer's state too"
        )
    yield from _of_parts(run, cause)
    if run.compile:
        yield f"{cause} splits layers by hooks that torch.compile does not take: leave compile out"
    import torch

    from plsc.models import create
    from plsc.parallel.strategies.tensor_parallel import check_tensor_parallel

    with torch.device("meta"):
        size = run.data.preprocessing.image_size
        backbone = create(run.backbone, embedding_dim=run.embedding_dim, image_size=size)
    try:
        check_tensor_parallel(backbone, run.backbone, parallel.tp)
    except UsageError as error:
        yield str(error)
