"""Clipping scales gradients of every dtype as one product each would."""

import torch

from plsc.optim.gradients import clip_by_norm_


def test_gradients_of_several_dtypes_are_scaled_as_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16)
    gradients = [torch.randn(5, 3, generator=generator).to(dtype) for dtype in dtypes]
    norm = torch.tensor(7.0)
    expected = [gradient * (0.3 / (norm + 1e-6)).to(gradient) for gradient in gradients]
    assert clip_by_norm_(gradients, norm, 0.3) is norm
    assert all(torch.equal(found, one) for found, one in zip(gradients, expected, strict=True))
    clip_by_norm_(gradients, norm, 8.0)  # below the bound nothing changes
    assert all(torch.equal(found, one) for found, one in zip(gradients, expected, strict=True))
