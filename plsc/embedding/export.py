"""Exporting backbones: ONNX, a torch.export program, arcface_torch's state_dict; each verified after writing.

Other people's ONNX files are reduced likewise. Every function writes the file under a temporary name, reads it back,
compares its embeddings with the model's on random images at several batch sizes, and only then renames it.
"""

import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc.embedding.contracts import SEPARATOR
from plsc.embedding.embedder import Engine, TorchEngine, backbone_engine
from plsc.embedding.onnx_deployment import FP16, FP32, INT8, OnnxForm, in_precision, put_preprocessing_inside
from plsc.embedding.onnx_engine import (
    COMPATIBLE_WITH,
    FORMER_IDS,
    METADATA_PREFIX,
    MULTIPLICATIONS,
    SUBTRACTIONS,
    OnnxEngine,
)
from plsc.embedding.onnx_engine import FORMAT as ONNX_FORMAT
from plsc.embedding.onnx_fingerprint import fingerprint
from plsc.embedding.onnx_source import OnnxSource
from plsc.embedding.program import FORMAT as PROGRAM_FORMAT
from plsc.embedding.program import open_program, save_program
from plsc.errors import DataError, PlscError, UsageError, first_line
from plsc.files import atomic_write
from plsc.models import Backbone, load_model
from plsc.models.backbone import ARCFACE_TORCH_NAMES
from plsc.models.preprocessing import Preprocessing, contract_id
from plsc.models.weights import unwrapped

CPU = torch.device("cpu")
BATCH_AXIS = "batch"
CHECKED_BATCHES = (1, 2, 5)  # a batch that the exporter fixed by mistake shows at another size
TOLERANCE = 1e-4  # of the largest value in the embeddings
# int8 has none: far from pictures, as noise is, its embeddings are off by any amount. Its TAR is judged instead.
ONNX_TOLERANCES = {FP32: TOLERANCE, FP16: 1e-2, INT8: math.inf}

Judge = Callable[[Engine, Engine], dict[str, Any]]

ARCFACE_TORCH_SIZE = 112


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    tolerance: float | None = None,
    form: OnnxForm | None = None,
    judge: Judge | None = None,
    compatible_with: Sequence[str] = (),
) -> dict[str, Any]:
    """Write ``model`` as ONNX: input ``data`` (B, 3, H, W) float32 of (x - mean)/std, output ``embedding`` (B, D).

    The batch is free; its axis is named ``batch``. No node has a name by which insightface would take the input for
    unnormalised pixels. The metadata (``plsc.*``) hold image_size, mean, std, interpolation, precision and the contract
    id: the model's own, but in int8, whose thresholds are others.

    Args:
        model: the backbone, perhaps wrapped; of a module of your own, a :class:`plsc.models.ModuleBackbone`. It is put
            into evaluation mode.
        path: of the file.
        tolerance: as a share of the largest value; None: 1e-4, in fp16 1e-2, and in int8 any.
        form: precision and preprocessing inside; None: float32 without.
        judge: gets the engines of the model and of the written file; what it raises keeps the file from appearing.
        compatible_with: contract ids of older models whose galleries this one's queries search; the metadata hold them.

    Returns:
        ``format, file, bytes, max_abs_error, max_abs_value, tolerance, embedding_dim, image_size, contract_id``, and
        ``precision``, ``with_preprocessing``, ``compatible_with`` and what ``judge`` returned, or None, as ``judged``;
        max_abs_value is the largest value in the embeddings that were compared, tolerance None in int8.

    Raises:
        UsageError: the model has no ONNX form, or the file cannot be written.
        DataError: the written file's embeddings differ by more than ``tolerance`` times their largest value.
    """
    backbone = unwrapped(model)
    engine = replace(backbone_engine(backbone, CPU), compatible_with=tuple(compatible_with))
    return _export_graph(engine, lambda _: _float_graph(backbone), path, tolerance, form, judge)


def reduce_onnx(
    source: OnnxSource,
    path: str | Path,
    *,
    tolerance: float | None = None,
    form: OnnxForm | None = None,
    judge: Judge | None = None,
) -> dict[str, Any]:
    """Write somebody's ONNX model anew, in a lower precision or with the preprocessing inside.

    A fixed batch stays, and so do the names of input and output and what the file says of itself. The metadata are
    those of :func:`export_onnx`; the contract id is the source's, but in int8, and so are the models that it is
    compatible with.

    Args:
        source: of :func:`plsc.embedding.onnx_source.open_source`.
        path: of the file.
        tolerance, form, judge: as :func:`export_onnx`.

    Returns:
        As :func:`export_onnx`.

    Raises:
        UsageError: int8 has nothing to calibrate on, or no layer to compute; the file cannot be written.
        DataError: the graph has no such form; the written file's embeddings differ by more than ``tolerance``.
    """
    form = form or OnnxForm()
    form = replace(form, calibration=source.batches(form.calibration))
    return _export_graph(source.engine, source.graph, path, tolerance, form, judge, source)


def _export_graph(
    engine: Engine,
    float_graph: Callable[[str], Any],
    path: str | Path,
    tolerance: float | None,
    form: OnnxForm | None,
    judge: Judge | None,
    source: OnnxSource | None = None,
) -> dict[str, Any]:
    """Write in the form what ``float_graph`` makes for a precision, an ``onnx.ModelProto``, perhaps of a ``source``."""
    import onnx

    form = form or OnnxForm()
    judged: list[dict[str, Any]] = []

    def write(engine: Engine, tmp_path: Path) -> Engine:
        onnx.save(_in_form(float_graph, engine, form, {} if source is None else source.metadata), str(tmp_path))
        written = OnnxEngine(tmp_path, CPU, own=True)
        if source is not None:  # its graph is somebody's still: no batch is larger than those that were tried
            written.batches = source.engine.batches
        return written

    def judge_written(engine: Engine, written: Engine) -> None:
        if judge is not None:
            judged.append(judge(engine, written))

    limit = ONNX_TOLERANCES[form.precision] if tolerance is None else tolerance
    result = _exported("onnx", engine, Path(path), write, limit, judge_written)
    about = {"precision": form.precision, "with_preprocessing": form.with_preprocessing}
    about |= {"compatible_with": list(engine.compatible_with)}
    return {**result, **about, "judged": judged[0] if judged else None}


def export_torch(model: nn.Module, path: str | Path, *, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Write ``model`` as a program of torch.export: ``torch.export.load(FILE).module()`` runs it without plsc.

    It maps (B, 3, H, W) float32 of (x - mean)/std to (B, D) for any B; its extra file ``plsc.json`` holds
    image_size, mean, std, interpolation and the contract id. Nothing in it is pickled. Returns and raises as
    :func:`export_onnx`.
    """

    backbone = unwrapped(model)

    def write(engine: Engine, tmp_path: Path) -> Engine:
        contract = {"format": PROGRAM_FORMAT, **engine.preprocessing.to_dict(), **_contract(engine)}
        with _quiet():
            save_program(_program(backbone), tmp_path, contract)
        return TorchEngine(*open_program(tmp_path, CPU, own=True), CPU, "fp32")

    return _exported("torch", backbone_engine(backbone, CPU), Path(path), write, tolerance)


def export_insightface(model: Backbone, path: str | Path) -> dict[str, Any]:
    """Write ``model`` as the bare state_dict that arcface_torch calls ``model.pt`` and loads strictly.

    Returns:
        As :func:`export_onnx`, and ``arcface_torch``: the name of the network there, or None at sizes other than 112,
        for which arcface_torch has no network.

    Raises:
        UsageError: arcface_torch has no such backbone, or the file cannot be written.
        DataError: the backbone read back from the file differs in any bit.
    """
    if model.name not in ARCFACE_TORCH_NAMES:
        raise UsageError(f"arcface_torch has no {model.name}; export it with --format onnx or torch")
    if model.preprocessing != Preprocessing(model.image_size) or not isinstance(model.image_size, int):
        raise UsageError(
            f"the model takes {model.preprocessing.describe()}, which a bare state_dict cannot say; "
            "export it with --format onnx or torch"
        )

    def write(engine: Engine, tmp_path: Path) -> Engine:
        torch.save({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, tmp_path)
        return backbone_engine(load_model(tmp_path, own=True), CPU)

    network = ARCFACE_TORCH_NAMES[model.name] if model.image_size == ARCFACE_TORCH_SIZE else None
    result = _exported("insightface", backbone_engine(model, CPU), Path(path), write, 0.0)
    return {**result, "arcface_torch": network}


def _exported(
    kind: str,
    engine: Engine,
    path: Path,
    write: Callable[[Engine, Path], Engine],
    tolerance: float,
    judge: Callable[[Engine, Engine], None] = lambda engine, written: None,
) -> dict[str, Any]:
    """Let ``write`` write the file and read it back; it appears once its embeddings are those of ``engine``."""
    expected = _expected(engine, path)
    with atomic_write(path) as tmp_path:
        tmp_path.touch()  # fails now, before the work, if the folder cannot be written
        try:
            written = write(engine, tmp_path)
        except DataError as error:  # of what was written, which its readers do not take
            reason = str(error).partition("; export it again")[0].replace(str(tmp_path), "it")
            raise DataError(f"{path} was not written: {reason}") from None
        check = _checked(engine, expected, written, path, tolerance)
        try:
            judge(engine, written)
        except DataError as error:
            raise DataError(f"{path} was not written: {error}") from None
    return {
        "format": kind,
        "file": str(path),
        "bytes": path.stat().st_size,
        **check,
        "embedding_dim": engine.embedding_dim,
        "image_size": engine.preprocessing.image_size,
        "contract_id": written.contract_id,
    }


def _in_form(float_graph: Callable[[str], Any], engine: Engine, form: OnnxForm, metadata: dict[str, str]) -> Any:
    """The ``onnx.ModelProto`` that is written."""
    import onnx

    try:
        with _quiet():
            graph = in_precision(float_graph(form.precision), form, engine.preprocessing)
    except PlscError:
        raise
    except Exception as error:  # onnx's and onnxruntime's errors share no public base class
        raise DataError(f"the model has no form in {form.precision}: {first_line(error)}") from None
    contract = {**engine.preprocessing.metadata(), **_contract(engine)}
    if form.precision == INT8:
        contract["contract_id"] = contract_id(engine.preprocessing, fingerprint(graph))
    if form.with_preprocessing:
        put_preprocessing_inside(graph, engine.preprocessing)
    own = {"format": ONNX_FORMAT, "precision": form.precision, **contract, "fingerprint": fingerprint(graph)}
    same = () if form.precision == INT8 else engine.former_ids
    own |= {
        key: SEPARATOR.join(ids) for key, ids in ((COMPATIBLE_WITH, engine.compatible_with), (FORMER_IDS, same)) if ids
    }
    stated = {f"{METADATA_PREFIX}{key}": str(value) for key, value in own.items()}
    onnx.helper.set_model_props(graph, {**metadata, **stated})
    return graph


def _float_graph(model: Backbone) -> Any:
    """The ``onnx.ModelProto`` in float32, without metadata."""
    with _quiet():
        try:
            program = torch.onnx.export(
                _program(model),
                input_names=["data"],
                output_names=["embedding"],
                external_data=False,
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise UsageError(f"{model.name} has no ONNX form: {first_line(error)}") from None
    assert program is not None
    graph: Any = program.model_proto
    _name_batch_axis(graph.graph)
    for node in graph.graph.node:
        if node.name.startswith(SUBTRACTIONS + MULTIPLICATIONS):
            node.name = f"node_{node.name}"
    return graph


def _name_batch_axis(graph: Any) -> None:
    """Name the batch axis, which the exporter calls ``s77`` or so, "batch", wherever a shape has it."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", BATCH_AXIS, dim.dim_param)


def _program(model: Backbone) -> torch.export.ExportedProgram:
    example = torch.zeros(2, *model.preprocessing.shape)
    batch = torch.export.Dim(BATCH_AXIS, min=1)
    try:
        program = torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))
        # Regions of autocast or no_grad in a forward become calls of graphs, which neither readers nor ONNX take.
        has_regions = any(str(node.target).startswith("wrap_with_") for node in program.graph.nodes)
        return program.run_decompositions({}) if has_regions else program
    except Exception as error:  # torch's errors about a stranger's code are of any kind
        reason = f"{first_line(error)}; its forward may not branch on values, or on the number of images"
        raise UsageError(f"{model.name} has no form for torch.export: {reason}") from None


def _contract(engine: Engine) -> dict[str, Any]:
    return {"embedding_dim": engine.embedding_dim, "contract_id": engine.contract_id}


def _expected(engine: Engine, path: Path) -> list[tuple[Tensor, Tensor]]:
    """Pairs (random images, their embeddings), one for each of the batch sizes that are checked."""
    pairs = []
    for count in CHECKED_BATCHES:
        generator = torch.Generator().manual_seed(count)
        shape = (count, *engine.preprocessing.shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        try:
            embeddings = engine.run(images)
        except PlscError:
            raise
        except Exception as error:  # of a module that a user wrote
            what = f"the model fails on a batch of {count}: {first_line(error)}"
            raise UsageError(f"{path} was not written: {what}; let it take any number of images") from None
        if not embeddings.isfinite().all():
            raise DataError(f"{path} was not written: the model's embeddings are not finite; check its weights")
        pairs.append((images, embeddings))
    return pairs


def _checked(
    engine: Engine, expected: list[tuple[Tensor, Tensor]], written: Engine, path: Path, tolerance: float
) -> dict[str, float | None]:
    """Largest difference of the written file's embeddings; :class:`DataError` if it is beyond the tolerance."""
    own = written.precision == INT8 or written.contract_id == engine.contract_id
    if not own or written.preprocessing != engine.preprocessing:
        raise DataError(f"{path} was not written: its preprocessing did not survive the export")
    differences = [(written.run(images) - embeddings).abs().max() for images, embeddings in expected]
    error = max(float(difference.nan_to_num(torch.inf)) for difference in differences)
    largest = max(float(embeddings.abs().max()) for _, embeddings in expected)
    limit = tolerance * largest
    if error > limit or math.isinf(error):
        mend = "; a larger --tolerance admits them" if tolerance and math.isfinite(error) else ""
        raise DataError(f"{path} was not written: its embeddings are off by {error:.2g} (tolerance {limit:.2g}){mend}")
    stated = tolerance if math.isfinite(tolerance) else None  # JSON has no infinities
    return {"max_abs_error": error, "max_abs_value": largest, "tolerance": stated}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' warnings, prints and log lines off the screen; failures come as exceptions."""
    import onnxruntime

    # It writes past Python's streams, with names of the file as they are: those of a stranger may be escape sequences.
    onnxruntime.set_default_logger_severity(4)
    before, handler = logging.root.manager.disable, logging.NullHandler()
    logging.disable(logging.CRITICAL)
    logging.root.addHandler(handler)  # without one, logging.warning() would add one that prints, for good
    try:
        with Path(os.devnull).open("w") as devnull, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with redirect_stdout(devnull), redirect_stderr(devnull):
                yield
    finally:
        logging.root.removeHandler(handler)
        logging.disable(before)
