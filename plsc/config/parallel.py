"""The keys of [parallel]: placement of the backbone on the ranks, and the exchange of gradients or weights."""

from dataclasses import dataclass

from plsc.toml_keys import key


@dataclass(frozen=True)
class ParallelConfig:
    """[parallel]: how the backbone lies on the ranks, and how these exchange its gradients.

    Attributes:
        strategy: Placement of the backbone: ddp (whole on every rank), zero1 (whole, but for the optimizer's state,
            which is spread over the ranks), fsdp (weights, gradients and optimizer state spread over all ranks; weights
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
        powersgd_rank: powersgd: rank of the approximation of a gradient as a matrix.
        powersgd_start_step: powersgd: steps of the run that are exchanged whole before it compresses.
        dgc_sparsity: dgc: share of a tensor's elements that a step does not send; 0 sends all.
        dgc_warmup_epochs: dgc: epochs over which the sparsity rises from 0.75 in four stages; 0: none.
        dgc_dense_below: dgc: tensors with fewer elements than this are sent whole.
        averaging: Averages of the backbone's weights in the place of its gradients: with local_sgd each rank steps by
            its own gradients, and all average their weights every averaging_period steps; post_local_sgd begins with
            that at averaging_start_step; hierarchical averages more often within groups of ranks; diloco takes an outer
            step by what the ranks have changed. The class head stays exact at every step.
        averaging_period: Steps from one average over all ranks to the next; diloco is published with 500.
        averaging_start_step: post_local_sgd: steps of the run before it, in which gradients are averaged.
        averaging_group_ranks: Consecutive ranks (those of a machine, say) that average their gradients with each other
            at every step, whatever averaging; a divisor of all ranks; 1: none do.
        averaging_group_period: hierarchical: steps from one average of weights within such a group to the next, a
            divisor of averaging_period; 1: their gradients are averaged at every step.
        outer_lr: diloco: learning rate of the outer optimizer, SGD with Nesterov's momentum.
        head_averaging_period: Steps after which the class tables of head groups (head_ranks), each updated by its own
            group's samples, are averaged; 1: gradients are summed over the groups at every step, and the tables stay
            equal.
        outer_momentum: diloco: momentum of the outer optimizer.
        timeout_seconds: Seconds in which no rank makes progress, after which the run ends and names the ranks that the
            others wait for, with what they are at; after 30 s, or half of it, train.log names them already. Evaluations
            and checkpoints have no limit.
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
    powersgd_rank: int = key(1, least=1)
    powersgd_start_step: int = key(1000, least=2)
    dgc_sparsity: float = key(0.999, least=0, below=1)
    dgc_warmup_epochs: float = key(4.0, least=0)
    dgc_dense_below: int = key(16384, least=1)
    averaging: str = key("none", choices="plsc.parallel.model_averaging:AVERAGINGS")
    averaging_period: int = key(8, least=2)
    averaging_start_step: int = key(1000, least=1)
    averaging_group_ranks: int = key(1, least=1)
    averaging_group_period: int = key(1, least=1)
    outer_lr: float = key(0.7, above=0)
    head_averaging_period: int = key(1, least=1)
    outer_momentum: float = key(0.9, least=0, below=1)
    timeout_seconds: float = key(600.0, above=0)
