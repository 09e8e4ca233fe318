"""Products of a vision transformer's blocks in 8-bit floating point (Micikevicius et al., 2022), by torchao.

Linear layers of the blocks multiply float8 copies of their inputs, weights and gradients, each scaled by its largest
value at that step (torchao's "tensorwise" recipe); weights, optimizer and everything else stay as they are. So
checkpoints and exports are those of a run without.
"""

import torch
from torch import nn

from plsc.errors import UsageError
from plsc.optim.eight_bit_adamw import import_torchao

MULTIPLE = 16  # of each size of a product: cuBLAS's condition
_CAPABILITY = (8, 9)  # of the first GPUs with products in float8: Ada, then Hopper


def convert_to_float8(backbone: nn.Module, device: torch.device, batch: int) -> int:
    """Let the linear layers of ``backbone``'s blocks multiply in float8, in place; on a CPU that is emulated.

    Args:
        backbone: a vision transformer, with its blocks in ``blocks``.
        device: where it will compute.
        batch: images of a pass.

    Returns:
        The number of layers.

    Raises:
        UsageError: torchao is not installed, the GPU has no such products, or a pass has no multiple of 16 tokens.
    """
    _check_device(device)
    tokens = int(getattr(backbone, "tokens_in_training", MULTIPLE)) * batch
    if tokens % MULTIPLE:
        raise UsageError(
            f"fp8 multiplies matrices whose sizes are multiples of {MULTIPLE}, and data.batch_size = {batch} makes "
            f"{tokens:,} tokens; give a batch size that is a multiple of {MULTIPLE}"
        )
    float8 = import_torchao("torchao.float8")
    config = float8.Float8LinearConfig(emulate=device.type == "cpu")
    float8.convert_to_float8_training(backbone, config=config, module_filter_fn=_multiplies_in_float8)
    return sum(type(module).__name__ == "Float8Linear" for module in backbone.modules())


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        raise UsageError(
            f"fp8 needs a GPU of compute capability 8.9 (Ada) or newer, and {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}; leave fp8 out"
        )


def _multiplies_in_float8(module: nn.Module, name: str) -> bool:
    if not (isinstance(module, nn.Linear) and "blocks" in name.split(".")):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
