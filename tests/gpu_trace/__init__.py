"""The training step traced on fake CUDA tensors, in worlds of up to 1,024 ranks, by a machine without a GPU.

:mod:`runtime` pretends the devices, :mod:`world` the ranks, :mod:`tracer` counts what a step does to them,
:mod:`triton_launches` what its Triton launches do; :mod:`scenarios` names the steps that are traced, :mod:`ratchet`
compares their counts with the committed ones of ``counts.json``.

What it cannot see: values, time, races between streams, NCCL itself, the allocator's rounding.
"""
