"""Checks of a backend's kernels against float64 on the device that runs them: a kernel that disagrees is not used.

:func:`check_passes` and :func:`check_update` return errors beside their bounds. A head asks
:func:`why_no_passes`, and its optimizer :func:`why_no_update`, about the kernels that it is going to run: once per
process and kind of table. ``PLSC_SELF_CHECK=0`` leaves those two out. ``plsc doctor`` checks more kinds, and always.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from plsc.errors import UsageError, first_line
from plsc.head.backends.kept_exponentials import ALIGNED
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.torch_backend import Batch, PassInputs, TorchBackend
from plsc.head.class_table import ClassRows, renew_norms
from plsc.head.low_precision import Rounding, RoundingBits, RowState
from plsc.head.update_rules import AdamWRule, SgdRule, Update, UpdateKind, UpdateRule
from plsc.losses.margins import ArcFace

# Of sums and gradients, relative in the Frobenius norm. All sums are float32; bfloat16 rounds the factors of gradients.
_SUM_BOUND, _GRADIENT_BOUND = 2e-5, 1.2e-2
# Of a float32 table's sums and gradients, as its products are made. s = 64 multiplies a cosine's error, and matrix
# units cut TF32's factors off: emulated, that is 3e-2 at D = 8 and 8e-3 at 512; bf16x3 is off by 1e-4 and 1e-5.
_PRECISION_BOUNDS: dict[Fp32Precision, float] = {"ieee": 2e-5, "tf32": 5e-2, "bf16x3": 3e-4}
_NORM_BOUND = 1e-6
# Of stored numbers: float32 relative in the Frobenius norm; bfloat16 and int8 in units of the last place, of which
# rounding costs less than one, and stochastic rounding none in the mean: cutting off costs a third of one.
_FLOAT32_BOUND, _ROUNDING_BOUND, _BIAS_BOUND = 1e-5, 1.01, 0.05
_SAME_BOUND = 1e-3  # of one arithmetic in two kernels: a sum's last place may lead to the other neighbour
_BFLOAT16_ULP = 2.0**-7  # relative to the number, at most
_INT8_STEPS = 127
_SEED, _STEP, _FIRST_ROW = 7, 3, 1000
_LOG_Z = 9.0

_verdicts: dict[tuple[object, ...], str | None] = {}
_kernel_threads: int | None = None  # of the kernels under check, where the rest has one


@dataclass(frozen=True)
class Deviation:
    """The error of a kernel's result beside the bound that it may reach."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """False for an error beyond the bound, and for one that is not a number."""
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.name} {self.error:.2g} (bound {self.bound:.3g})"


@dataclass(frozen=True)
class Shard:
    """A small shard of made-up rows to check a kernel on.

    Attributes:
        device, dtype: of the rows.
        dim: D.
        classes: C; 300 end in a block that is not full, in every kernel.
        batch: B samples. Some targets are of other shards.
        centers: K per class.
        listed: visit two of three classes by their numbers, as sampling does; else all.
        chunk: classes at a time.
        fp32_precision: of the backend's products over a float32 shard, for their bounds.
    """

    device: torch.device
    dtype: torch.dtype
    dim: int
    classes: int = 300
    batch: int = 20
    centers: int = 1
    listed: bool = False
    chunk: int = 256
    fp32_precision: Fp32Precision = "ieee"

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest relative errors of sums and of gradients over it."""
        if self.dtype == torch.float32:
            return _PRECISION_BOUNDS[self.fp32_precision], _PRECISION_BOUNDS[self.fp32_precision]
        return _SUM_BOUND, _GRADIENT_BOUND

    def rows(self) -> ClassRows:
        """Rows with norms between 0.5 and 2, and the classes to visit."""
        count = self.classes * self.centers
        lengths = torch.linspace(0.5, 2, count)[:, None]
        weight = (torch.nn.functional.normalize(self._normal(count, key=1)) * lengths).to(self.device, self.dtype)
        selected = None
        if self.listed:
            numbers = torch.arange(self.classes, device=self.device)
            selected = numbers[numbers % 3 != 1]
        rows = ClassRows(weight, torch.empty(count, device=self.device), self.centers, selected)
        renew_norms(rows, slice(0, count))
        return rows

    def samples(self, rows: ClassRows) -> Batch:
        """Unit embeddings; every fifth target is not among the visited classes."""
        features = torch.nn.functional.normalize(self._normal(self.batch, key=2)).to(self.device, self.dtype)
        position = torch.arange(self.batch, device=self.device) * 7 % rows.num_classes
        position[::5] = -1
        return Batch(features, position, torch.zeros(self.batch, device=self.device), ArcFace(), {})

    def derivatives(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B,) float64 each: log Z, and what pass 2 takes as ``scale`` and ``target_grad``."""
        log_z = torch.full((self.batch,), _LOG_Z, dtype=torch.float64, device=self.device)
        scale = torch.linspace(0.5, 1.5, self.batch, dtype=torch.float64, device=self.device)
        return log_z, scale, -0.5 * scale

    def gradient(self, rows: int) -> Tensor:
        """(rows, D) float32, a gradient by unit rows."""
        return self._normal(rows, key=3).to(self.device)

    def state(self, name: str, dtype: torch.dtype, rounding: Rounding) -> RowState:
        """An optimizer's table of ordinary values: positive ones where it is a second moment."""
        count = self.classes * self.centers
        table = RowState(count, self.dim, dtype, self.device, rounding)
        values = self._normal(count, key=4).to(self.device)
        values = values.square() + 0.5 if name == "second_moment" else values
        bits = RoundingBits.draw(_SEED, 0, torch.arange(count, device=self.device), self.dim)
        table.write(slice(0, count), values, bits)
        return table

    def _normal(self, rows: int, key: int) -> Tensor:
        # made on the CPU, so that every device checks the same numbers
        return torch.randn(rows, self.dim, generator=torch.Generator().manual_seed(key), device="cpu")


# What a head and its optimizer ask -----------------------------------------------------------------------------------


def why_no_passes(backend: TorchBackend, shard: Shard) -> str | None:
    """The reason not to trust the passes of ``backend`` on tables such as ``shard``; None: they agree with float64."""
    memory = backend.exponentials_memory
    shard = replace(shard, batch=-(-shard.batch // ALIGNED) * ALIGNED) if memory else shard  # others are not kept
    return _verdict(("passes", backend.name, memory > 0, shard), lambda: check_passes(backend, shard))


def why_no_update(backend: TorchBackend, kind: UpdateKind, shard: Shard) -> str | None:
    """The reason not to trust the kernel by which ``backend`` updates such tables; None: it agrees, or none exists."""
    if backend.updater(kind) == backend.update:
        return None
    usual = replace(kind, rule=_terms(kind.rule))
    ways = (False, True) if backend.exponentials_memory and backend.updates_by_rows else (False,)
    key = ("update", backend.name, usual.rule, tuple(kind.state_dtypes.items()), kind.rounding, shard, ways)
    return _verdict(key, lambda: [each for way in ways for each in check_update(backend, shard, usual, is_by_rows=way)])


def _verdict(key: tuple[object, ...], check: Callable[[], list[Deviation]]) -> str | None:
    if os.environ.get("PLSC_SELF_CHECK") == "0":
        return None
    if key not in _verdicts:
        _verdicts[key] = problem_of(check)
    return _verdicts[key]


def _terms(rule: UpdateRule) -> UpdateRule:
    """A step of the same terms as ``rule``'s with numbers of ordinary size, among which none is 0 that need not be."""
    if isinstance(rule, SgdRule):
        return SgdRule(0.1, 0.9 if rule.momentum else 0.0, 5e-4 if rule.weight_decay else 0.0, rule.nesterov)
    return AdamWRule(1e-3, 0.9, 0.999, 1e-8, 1e-2, _STEP) if isinstance(rule, AdamWRule) else rule


def problem_of(check: Callable[[], list[Deviation]]) -> str | None:
    """Run a check; the results that are off, or the error that it raised, in one line. None where all is well."""
    try:
        wrong = [deviation for deviation in check() if not deviation.ok]
    except (torch.OutOfMemoryError, MemoryError, UsageError):
        raise
    except Exception as error:  # of a compiler, a driver or a kernel: PyTorch can compute all the same
        return f"{type(error).__name__}: {first_line(error)}"
    return "; ".join(map(str, wrong)) or None


# The checks ----------------------------------------------------------------------------------------------------------


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Neither gradients nor autocast nor inference tensors within: a head may be made inside of any."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let all but compiled kernels compute on one thread within: on shards this small, others take seven times as long.

    For a process that only checks: threads are the whole process's.
    """
    global _kernel_threads
    before = _kernel_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _kernel_threads = None
        torch.set_num_threads(before)


@contextmanager
def _under_check(backend: TorchBackend) -> Iterator[None]:
    """Give the kernels of ``backend`` the threads that they will have: how rows are shared out is checked too."""
    threads = _kernel_threads if backend.name == "cpu" else None
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(1)


def check_passes(backend: TorchBackend, shard: Shard) -> list[Deviation]:
    """Compare both passes of ``backend`` over ``shard`` with the formula in float64.

    Returns:
        The errors of Σ exp(z), of the embeddings' gradient and of the rows'.
    """
    with plain_arithmetic(shard.device):
        rows = shard.rows()
        batch = shard.samples(rows)
        log_z, scale, target_grad = shard.derivatives()
        want = _reference(rows, batch, log_z, scale, target_grad)
        with _under_check(backend):
            first = backend.first_pass(rows, batch, shard.chunk, with_grad=True, keeps=True)
            kept = [] if first.exponentials is None else [first.exponentials]
            inputs = PassInputs(rows, batch, log_z, scale, target_grad, shard.chunk, exponentials=kept)
            pieces = backend.second_pass(inputs)
            gradient = torch.cat([piece.clone() for _, piece in pieces])
        assert first.grad_embeddings is not None
        sum_bound, bound = shard.bounds
        grown = first.maximum.double().exp()
        return [
            Deviation("sums", _relative(first.total * grown, want[0]), sum_bound),
            Deviation("embeddings' gradient", _relative(first.grad_embeddings * grown[:, None], want[1]), bound),
            Deviation("rows' gradient", _relative(gradient, want[2]), bound),
        ]


def _reference(
    rows: ClassRows, batch: Batch, log_z: Tensor, scale: Tensor, target_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ exp(z) (B,), Σ exp(z)·Ŵ (B, D) and the gradient by the visited unit rows (n·K, D), in float64."""
    index = rows.row_index(0, rows.num_classes)
    weight, x = rows.weight[index].double(), batch.features.double()
    unit = weight / weight.norm(dim=1, keepdim=True)
    cos = (unit @ x.T).view(-1, rows.centers, len(x))
    wins = torch.nn.functional.one_hot(cos.argmax(1), rows.centers).movedim(2, 1)
    z = batch.margin.s * cos.amax(1)
    is_target = torch.arange(len(z), device=z.device)[:, None] == batch.position
    e = z.exp().masked_fill(is_target, 0)
    p = torch.where(is_target, target_grad, (z - log_z).exp() * scale)
    spread_e, spread_p = ((wins * matrix[:, None]).flatten(0, 1) for matrix in (e, p))
    return e.sum(0), spread_e.T @ unit, spread_p @ x


@dataclass(frozen=True)
class _Trial:
    """An update of a shard, by ``kind``: its rows, its state, and the step."""

    shard: Shard
    kind: UpdateKind
    rows: ClassRows
    state: dict[str, RowState]
    update: Update

    @classmethod
    def of(cls, shard: Shard, kind: UpdateKind) -> "_Trial":
        state = {name: shard.state(name, dtype, kind.rounding) for name, dtype in kind.state_dtypes.items()}
        return cls(shard, kind, shard.rows(), state, Update(kind.rule, 0.5, kind.rounding, _SEED, _STEP, _FIRST_ROW))

    def in_float64(self) -> "_Trial":
        """The same in float64, which rounds nothing."""
        everything, rows = slice(0, len(self.rows.weight)), self.rows
        exact = ClassRows(rows.weight.double(), rows.inverse_norm.double(), rows.centers, rows.selected)
        renew_norms(exact, everything)
        tables = {name: table.read(everything, torch.float64) for name, table in self.state.items()}
        state = {name: RowState.over(values, None, "nearest") for name, values in tables.items()}
        return replace(self, rows=exact, state=state)

    def run(self, backend: TorchBackend, gradient: Tensor, *, is_by_rows: bool = False) -> None:
        """Update the visited rows by a gradient of their unit rows, which the kernel may get times their 1/norms."""
        (chunk,) = self.rows.chunks(self.shard.classes)
        updater: Callable[..., None] = backend.updater(self.kind)
        if is_by_rows:
            updater, gradient = partial(updater, is_by_rows=True), gradient * chunk.inverse_norm[:, None]
        with _under_check(backend):
            updater(chunk, gradient.clone(), self.state, self.update)


def check_update(backend: TorchBackend, shard: Shard, kind: UpdateKind, *, is_by_rows: bool = False) -> list[Deviation]:
    """Compare an update of ``shard``'s rows, state and norms with the same in float64, which rounds nothing.

    Args:
        backend: whose updater is checked.
        shard: small.
        kind: of the update.
        is_by_rows: by gradients as exponentials that were kept give them (``TorchBackend.updates_by_rows``).

    Returns:
        The errors of weights, of each table of state, and of 1/norms against the weights that were stored.
    """
    with plain_arithmetic(shard.device):
        trial = _Trial.of(shard, kind)
        exact = trial.in_float64()
        rows, visited = trial.rows, trial.rows.row_index(0, trial.rows.num_classes)
        gradient = shard.gradient(len(rows.weight[visited]))
        exact.run(TorchBackend("reference"), gradient.double())
        trial.run(backend, gradient, is_by_rows=is_by_rows)
        found = _stored("weights", rows.weight, None, exact.rows.weight, visited)
        for name, table in trial.state.items():
            found += _stored(name.replace("_", " "), table.values, table.scale, exact.state[name].values, visited)
        norms = 1 / rows.weight.double().norm(dim=1)
        return [*found, Deviation("1/norms", _relative(rows.inverse_norm, norms), _NORM_BOUND)]


def _stored(name: str, got: Tensor, scale: Tensor | None, want: Tensor, visited: slice | Tensor) -> list[Deviation]:
    """Errors of stored numbers: relative, or of rounded ones in units of the last place, the largest and the mean.

    Rows that were not visited must be as they were; they count into the relative error of all.
    """
    values = got.double() if scale is None else got.double() * scale.double()[:, None]
    if got.dtype == torch.float32:
        return [Deviation(name, _relative(values, want), _FLOAT32_BOUND)]
    values, want = values[visited], want[visited]
    largest = want.abs().amax(1, keepdim=True)
    unit = _BFLOAT16_ULP * want.abs() + 1e-6 * largest if scale is None else largest / _INT8_STEPS
    units = (values - want) / unit.clamp(min=1e-30)
    bias = units.mean(), (units * want.sign()).mean()  # down, or towards zero
    return [
        Deviation(f"{name}, roundings", float(units.abs().max()), _ROUNDING_BOUND),
        Deviation(f"{name}, bias", max(abs(float(mean)) for mean in bias), _BIAS_BOUND),
    ]


def _relative(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖."""
    return float((got.double() - want).norm() / want.norm())
