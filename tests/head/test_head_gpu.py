"""The class head on a GPU: the checks that its benchmark begins with."""

import pytest
import torch

from benchmarks.head_gpu_checks import CHECKS, SMALL


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_gpu(check):
    check(torch.device("cuda", 0))


@pytest.mark.slow
@pytest.mark.parametrize("check", list(SMALL), ids=lambda check: check.__name__)
def test_interpreted(interpreter, check):
    interpreter(check, torch.device("cpu"), **SMALL[check])
