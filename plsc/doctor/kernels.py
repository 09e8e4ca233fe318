"""Every kernel that exists here, against float64 on the device that runs it, and which of them head and search take."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from plsc.devices import low_precision_speed, low_precision_units
from plsc.doctor.report import Line, Tick, absent, checked, failed, found
from plsc.errors import first_line
from plsc.head.backends import HeadShape, select_backend
from plsc.head.backends.kept_exponentials import ALIGNED
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.self_check import (
    Deviation,
    Shard,
    check_passes,
    check_update,
    on_one_thread,
)
from plsc.head.backends.triton_backend import TritonBackend, is_interpreted, runs_on
from plsc.head.backends.triton_stored import WIDE_SAMPLES, has_wide_blocks
from plsc.head.backends.triton_tiles import device_kind
from plsc.head.sharded_head import ShardedHead
from plsc.head.update_rules import AdamWRule, SgdRule, UpdateKind
from plsc.index import faiss_gpu
from plsc.index.scan import PRECISIONS, ExactScan
from plsc.losses.margins import ArcFace
from plsc.native import build, head_kernels
from plsc.optim.head_optimizers import HeadAdamW, HeadSGD
from plsc.parallel.mesh import Mesh

_STORAGES = {"float32": ("float32", "float32"), "bfloat16 + int8": ("bfloat16", "int8")}
_USUAL = {torch.float32: "SGD, float32 momentum", torch.bfloat16: "SGD, int8 momentum"}
_SGD = SgdRule(0.1, 0.9, 5e-4, nesterov=False)
_ADAMW = AdamWRule(1e-3, 0.9, 0.999, 1e-8, 1e-2, step=3)
_MOMENTA = (torch.float32, torch.bfloat16, torch.int8)
_PASSES = ("sums", "embeddings' gradient", "rows' gradient")
_EXPONENTIALS = 1 << 20  # bytes: more than those of any table here
_SCAN_ROWS, _SCAN_DIM, _SCAN_QUERIES, _SCAN_K = 3000, 96, 9, 10
_ADVICE = (
    "send this report; until then PLSC_HEAD_BACKEND=torch, or PLSC_NATIVE=0 on a CPU, computes without these kernels"
)
_SCAN_ADVICE = "send this report; until then PLSC_NATIVE=0 searches without these kernels"
_TORCH_SCAN_ADVICE = "send this report; until then search in a precision that it does not name"


def chosen(device: torch.device) -> list[Line]:
    """What a head of each storage and the exact search compute with here, and why."""
    with on_one_thread():
        lines = [_chosen_head(name, device, *dtypes) for name, dtypes in _STORAGES.items()]
    rows = np.eye(32, dtype=np.float32)
    for precision in PRECISIONS:
        scan = ExactScan(rows, precision=precision, device=device.type)
        where = f"compiled for {scan.products}" if scan.backend == "native" else f"by {scan.products}"
        lines.append(found(f"search, {precision}", f"{scan.backend} scan, {where}, on {device.type}"))
    return [*lines, _index_building(), _precision(device)]


def _index_building() -> Line:
    """Where the cells of approximate indexes are found."""
    reason = faiss_gpu.why_not()
    return found("index building", "by faiss on the GPU" if reason is None else f"by faiss on the CPU: {reason}")


def _precision(device: torch.device) -> Line:
    """What ``precision = "auto"`` is here, and how fast that is."""
    units = low_precision_units(device)
    tried = units.best if units.precisions else "bf16"
    speed = low_precision_speed(tried, device)
    compared = f"{speed:.1f} times as fast as fp32" if speed >= 1 else f"{1 / speed:.1f} times slower than fp32"
    return found("precision", f"auto is {units.best}: {tried} is {compared} here ({units.reason})", speed=speed)


def _chosen_head(name: str, device: torch.device, weight: str, momentum: str) -> Line:
    head = ShardedHead(512, 64, Mesh(0, 1, 0, device), weight_dtype=weight, momentum_dtype=momentum)
    HeadSGD(head, momentum=0.9)  # its kernels are checked when it is made, and the head tells
    HeadAdamW(head)
    text = head.backend.describe()
    return checked(f"head, {name}", text, "disagree" not in text, _ADVICE)


# The head ------------------------------------------------------------------------------------------------------------


def head(device: torch.device, tick: Tick) -> list[Line]:
    """A line for each backend that runs here, each dtype of the table, and each precision of its products."""
    lines = []
    for shard in _storages(device):
        name = str(shard.dtype).removeprefix("torch.")
        name += "" if shard.fp32_precision == "ieee" else f" in {shard.fp32_precision}"
        if shard.fp32_precision != "bf16x3":  # which PyTorch lacks
            lines.append(_backend_line(f"torch, {name}", "torch", shard, tick))
        if runs_on(device):
            lines.append(_backend_line(f"triton, {name}", "triton", shard, tick))
        for path in _cpu_paths(device):
            with cpu_path(path):
                lines.append(_backend_line(f"compiled for {path}, {name}", "cpu", shard, tick))
    if not runs_on(device):
        lines.append(absent("triton", f"does not run on {device.type}"))
    return lines


def _storages(device: torch.device) -> list[Shard]:
    """A table of each kind, whose size is yet to be chosen."""
    has_units = device.type == "cuda" and "bf16" in low_precision_units(device).precisions
    precisions: tuple[Fp32Precision, ...] = ("ieee", "tf32", "bf16x3") if has_units else ("ieee",)
    float32 = [Shard(device, torch.float32, 0, fp32_precision=precision) for precision in precisions]
    return [*float32, Shard(device, torch.bfloat16, 0)]


def _cpu_paths(device: torch.device) -> list[str]:
    """The paths of the compiled kernels to check: the one that PLSC_CPU forces, else all that exist."""
    if device.type != "cpu":
        return []
    paths, forced = build.available_paths(), os.environ.get("PLSC_CPU")
    return [path for path in paths if forced in (None, "", path)]


@contextmanager
def cpu_path(path: str) -> Iterator[None]:
    """Run the compiled kernels of ``path`` within."""
    before = os.environ.get("PLSC_CPU")
    os.environ["PLSC_CPU"] = path
    try:
        yield
    finally:
        if before is None:
            del os.environ["PLSC_CPU"]
        else:
            os.environ["PLSC_CPU"] = before


def _backend_line(name: str, backend: str, like: Shard, tick: Tick) -> Line:
    """All of a backend's passes and updates on tables of one dtype; what is off, or what is nearest to its bound."""
    if backend == "cpu" and not head_kernels.is_compiled():
        return failed(name, build.why_no_library(), "repair the compiler, or set PLSC_NATIVE=0 to do without")
    deviations: dict[str, list[Deviation]] = {}
    try:
        for label, shard, every_update in _tables(like, backend):
            for kind, check in _checks(backend, shard, every_update):
                tick(f"{name}, {kind}, {label}")
                with on_one_thread():
                    deviations[f"{kind}, {label}"] = check()
    except Exception as error:  # of a compiler, a driver or a kernel: the report says so, and goes on
        return failed(name, f"{type(error).__name__}: {first_line(error)}", _ADVICE)
    figures = {label: {each.name: [each.error, each.bound] for each in of} for label, of in deviations.items()}
    wrong = [f"{label}: {max(of, key=_share)}" for label, of in deviations.items() if not all(each.ok for each in of)]
    if wrong:
        text = f"{len(wrong)} of {len(deviations)} checks: {'; '.join(wrong[:3])}"
        return failed(name, text + (" …" if len(wrong) > 3 else ""), _ADVICE, checks=figures)
    largest: dict[str, Deviation] = {}
    for each in itertools.chain(*deviations.values()):
        kind = each.name if each.name in _PASSES else "update"
        largest[kind] = max(largest.get(kind, each), replace(each, name=kind), key=_share)
    return found(name, f"{len(deviations)} checks: {', '.join(map(str, largest.values()))}", checks=figures)


def _share(deviation: Deviation) -> float:
    """The error as a share of its bound; what is not a number is worst."""
    share = deviation.error / deviation.bound
    return float("inf") if share != share else share


def _tables(like: Shard, backend: str) -> Iterator[tuple[str, Shard, bool]]:
    """The tables to check, and whether every update is checked on it, or the usual one of its storage.

    Triton compiles a kernel for each kind of table and update, which takes seconds on a GPU's first day, and interprets
    them in more: fewer then.
    """
    of_triton = backend == "triton"
    if of_triton and is_interpreted():
        small = replace(like, dim=64, classes=40, batch=9, chunk=32)
        yield "D = 64", small, True
        yield "D = 64, sampled", replace(small, listed=True), False
        return
    yield "D = 512", replace(like, dim=512), like.fp32_precision == "ieee"
    if like.fp32_precision != "ieee":
        return
    for dim in (512, 64):
        shard, every = replace(like, dim=dim), not of_triton
        if dim != 512:
            yield f"D = {dim}", shard, every
        yield f"D = {dim}, sampled", replace(shard, listed=True), every
        yield f"D = {dim}, sub-centres", replace(shard, centers=3, classes=100, chunk=64), every  # as many rows


def _checks(backend_name: str, shard: Shard, every_update: bool) -> Iterator[tuple[str, Callable[[], list[Deviation]]]]:
    shape = HeadShape(shard.device, shard.dtype, shard.dim, shard.centers, ArcFace(), shard.fp32_precision)
    backend = select_backend(shape, backend_name)
    yield "passes", partial(check_passes, backend, shard)
    if isinstance(backend, TritonBackend) and backend.takes_passes and shape.row_kind.can_be_stored:
        yield "passes, weights stored", partial(check_passes, backend.in_shape(stored=True), shard)
        if has_wide_blocks(device_kind(shard.device), shard.dtype, shard.dim, shard.centers):
            wide = backend.in_shape(stored=True, is_wide=True)
            yield (
                "passes, weights stored in wide blocks",
                partial(check_passes, wide, replace(shard, batch=WIDE_SAMPLES)),
            )
        keeping = backend.in_shape(stored=True)
        keeping.exponentials_memory = _EXPONENTIALS
        if shard.centers == 1:
            yield "passes, exponentials kept", partial(check_passes, keeping, replace(shard, batch=2 * ALIGNED))
    for name, kind in _updates():
        if every_update or name == _USUAL[shard.dtype]:
            yield name, partial(check_update, backend, shard, kind)
        if backend.updates_by_rows and name == _USUAL[shard.dtype]:
            yield f"{name}, by kept exponentials", partial(check_update, backend, shard, kind, is_by_rows=True)


def _updates() -> Iterator[tuple[str, UpdateKind]]:
    yield "SGD", UpdateKind(replace(_SGD, momentum=0.0), {})
    for dtype in _MOMENTA:
        short = str(dtype).removeprefix("torch.")
        yield f"SGD, {short} momentum", UpdateKind(_SGD, {"momentum": dtype})
        second = torch.float32 if dtype == torch.float32 else torch.bfloat16
        yield f"AdamW, {short} moments", UpdateKind(_ADAMW, {"first_moment": dtype, "second_moment": second})


# The scan ------------------------------------------------------------------------------------------------------------


def scans(device: torch.device, tick: Tick) -> list[Line]:
    """The exact search by each kernel, against a float64 ranking."""
    lines = []
    for path in _cpu_paths(torch.device("cpu")):
        tick(f"scan compiled for {path}")
        with cpu_path(path):
            problem = build.why_no_library("scan_kernels")
            name = f"scan compiled for {path}"
            advice = "repair the compiler, or set PLSC_NATIVE=0"
            lines.append(_scan_line(name, "cpu", _SCAN_ADVICE) if problem is None else failed(name, problem, advice))
    if not lines:
        lines.append(_scan_line("scan by torch", "cpu"))
    if device.type == "cuda":
        tick("scan on the GPU")
        lines.append(_scan_line("scan on the GPU", "cuda"))
    return lines


def _scan_line(name: str, device: str, advice: str = _TORCH_SCAN_ADVICE) -> Line:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((_SCAN_ROWS, _SCAN_DIM), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True) * np.float32(1.001)
    queries = vectors[:: _SCAN_ROWS // _SCAN_QUERIES][:_SCAN_QUERIES] + np.float32(0.01)
    allowed = generator.random(_SCAN_ROWS) < 0.5
    wrong, worst, products = [], 0.0, list[str]()
    try:
        for precision in PRECISIONS:
            scan = ExactScan(vectors, precision=precision, device=device)
            products.append(f"{precision} by {scan.products}")
            for kind, mask in (("all rows", None), ("a half of the rows", allowed)):
                scores, rows = scan.search(queries, _SCAN_K, allowed=mask)
                want_scores, want_rows = _float64_ranking(vectors, queries, mask)
                error = float(np.abs(scores - want_scores).max())
                worst = max(worst, error)
                if not np.array_equal(rows, want_rows) or not error < 1e-6:
                    wrong.append(f"{precision}, {kind}")
    except Exception as error:  # whatever a kernel raises is its line
        return failed(name, f"{type(error).__name__}: {first_line(error)}", advice)
    if wrong:
        return failed(name, f"not the float64 ranking: {'; '.join(wrong)}", advice, largest_error=worst)
    text = f"the float64 ranking, {', '.join(products)}; scores off by {worst:.0e} at most"
    return found(name, text, largest_error=worst, products=products)


def _float64_ranking(
    vectors: np.ndarray, queries: np.ndarray, allowed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :_SCAN_K]
    return np.take_along_axis(scores, order, axis=1), order
