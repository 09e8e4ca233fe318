"""The backbone, replicated: every rank holds all of it and averages its gradients."""

import warnings

from torch import nn

from plsc.parallel.mesh import Mesh
from plsc.parallel.wide_gradients import WideGradients


def data_parallel(module: nn.Module, mesh: Mesh, gradients: WideGradients | None = None) -> nn.Module:
    """Move ``module`` to the mesh's device and average its gradients over the ranks (DDP).

    The class head returns embedding gradients multiplied by the number of ranks, so that DDP's average gives what
    one process on the concatenated batch would compute, whatever each rank's share of it. Buffers are rank 0's at
    the start and stay each rank's own after that, as with ``broadcast_buffers=False``.

    Args:
        module: maps (B, 3, H, W) to (B, D).
        mesh: the ranks.
        gradients: where ``module``'s layers sum in float64, what
            :func:`plsc.parallel.wide_gradients.sum_gradients_in_float64` gave: the ranks' exchange does then, too.

    Returns:
        ``module`` itself where there is one rank, else the DDP wrapper (``.module`` is the original).
    """
    module = module.to(mesh.device)
    if mesh.world_size == 1:
        return module
    from torch.nn.parallel import DistributedDataParallel  # late: it takes long to import

    ids = [mesh.device.index] if mesh.device.type == "cuda" else None
    with warnings.catch_warnings():  # its successor also synchronises at the start, which costs nothing to leave out
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        net = DistributedDataParallel(
            module,
            device_ids=ids,
            process_group=mesh.group,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
    if gradients is not None:
        net.register_comm_hook(gradients, WideGradients.exchange)
    return net
