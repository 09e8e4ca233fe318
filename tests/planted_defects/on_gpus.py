"""Defects of the GPU's kernels, and of what surrounds them."""

from planted_defects.defect import Defect

_SEARCH, _SEARCH_KERNELS = "plsc/index/triton_scan.py", "plsc/index/triton_scan_kernels.py"
_PASSES, _STORED = "plsc/head/backends/triton_pass_kernels.py", "plsc/head/backends/triton_stored_kernels.py"

ON_GPUS = (
    Defect(
        "Triton's first pass counts the rows behind the last class",
        _PASSES,
        "inside = (slot // SLOTS < count - done) & (slot % SLOTS < CENTERS)",
        "inside = slot % SLOTS < CENTERS",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "Triton's first pass counts targets, which the loss adds once more",
        _PASSES,
        "counted = counted & ~own",
        "counted = counted & (own | ~own)",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "Triton's passes take another class's centres",
        _PASSES,
        "row = (slot // SLOTS) * CENTERS + slot % SLOTS",
        "row = (slot // SLOTS) * SLOTS + slot % SLOTS",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "Triton's second pass leaves the scale of the loss out",
        _PASSES,
        "        p *= _along(share, SAMPLE_AXIS)\n",
        "",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "an int8 momentum keeps the scales of the step before",
        "plsc/head/backends/triton_update_kernels.py",
        "        tl.store(scale + rows, row_scale, mask=held)\n",
        "",
        ("tests/head/test_triton_update.py",),
    ),
    Defect(
        "copied rows are rounded by the numbers of their places in the copy",
        "plsc/head/backends/triton_update.py",
        "numbers=chunk.local_rows.contiguous()",
        "numbers=torch.arange(n, device=weight.device)",
        ("tests/head/test_triton_update.py",),
    ),
    Defect(
        "a chunk is updated before the replicas have summed its gradient",
        "plsc/head/replica_exchange.py",
        "    work.wait()\n    return chunk, gradient",
        "    return chunk, gradient",
        ("tests/head/test_groups.py",),
    ),
    Defect(
        "a group takes the margins of another group's samples",
        "plsc/head/sharded_softmax.py",
        "gathered.local_group(values.view(cos.shape))",
        "values.view(cos.shape)[: len(gathered.labels)]",
        ("tests/head/test_groups.py",),
    ),
    Defect(
        "each shard takes off its own maximum",
        "plsc/head/sharded_softmax.py",
        "highest = all_reduce_max(maximum.clone(), self.mesh.head)",
        "highest = maximum.clone()",
        ("tests/head/test_exactness.py", "tests/head/test_groups.py"),
    ),
    Defect(
        "stored weights: the first pass counts targets",
        _STORED,
        "counted = inside[:, None] & (number[:, None] != target[None, :])",
        "counted = inside[:, None] & (number[:, None] >= 0)",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "stored weights: the kernel that multiplies rows counts targets",
        _STORED,
        "e = tl.where(slot[:, None] == target[None, :], 0.0, e)",
        "e = tl.where(slot[:, None] == target[None, :], e, e)",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "stored weights: rows past the last class are counted",
        _STORED,
        ' + tl.where(inside, 0.0, float("-inf"))[:, None]',
        "",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "stored weights: every centre of a class learns",
        _STORED,
        "weight = tl.where(wins, weight, 0.0)",
        "weight = tl.where(open_, weight, 0.0)",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "stored weights: every chunk is masked by the first one's samples",
        _STORED,
        "at = member + (start + number)[:, None] * batch",
        "at = member + number[:, None] * batch",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "stored weights: a chunk's sums replace those of the chunk before",
        _STORED,
        'tl.atomic_add(total + part * batch + b, sums.to(tl.float64), mask=held, sem="relaxed")',
        "tl.store(total + part * batch + b, sums.to(tl.float64), mask=held)",
        ("tests/head/test_triton_passes.py",),
    ),
    Defect(
        "ranks store logits from different numbers of samples on",
        "plsc/head/backends/__init__.py",
        "    found = broadcast_object(found, mesh)\n",
        "",
        ("tests/head/test_triton_shape.py",),
    ),
    Defect(
        "passes with stored weights are used though they disagree with float64",
        "plsc/head/backends/__init__.py",
        "        backend.stored_from = None\n",
        "",
        ("tests/head/test_triton_shape.py",),
    ),
    Defect(
        "Triton's search drops groups of rows within the rounding error of the best",
        _SEARCH,
        "values[:, -1] - asked.margin",
        "values[:, -1]",
        ("tests/index/test_fused_scan.py",),
    ),
    Defect(
        "Triton's search takes the most that a score by codes may be for the least",
        _SEARCH_KERNELS,
        "_store_best(lowest, scores - 2 * slack,",
        "_store_best(lowest, scores,",
        ("tests/index/test_fused_scan.py",),
    ),
    Defect(
        "Triton's search ranks rows whose float64 sums may come out either way",
        _SEARCH,
        "is_clear = (gap > 2 * error)",
        "is_clear = (gap >= 0)",
        ("tests/index/test_fused_scan.py",),
    ),
)
