"""Exported programs (torch.export, .pt2): written without pickles, and read only if nothing in them can run code.

For a service team that gets its model as a file from somebody else: neither `plsc serve --model FILE` nor `plsc embed
FILE` may execute what the file contains. ``torch.export.load`` by itself unpickles what a file asks it to, evaluates
its symbolic expressions as Python, and calls any function of torch by name. So a file is inspected first: its tensors
have to be raw bytes, its expressions arithmetic, its calls ATen operators, and its names identifiers.
"""

import ast
import hashlib
import io
import json
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsc.embedding.onnx_session import check_same, read_again
from plsc.errors import DataError, first_line
from plsc.models.preprocessing import Preprocessing, check_side, stated_contract
from plsc.models.torch_files import archive_names
from plsc.models.trial import CPU_BATCHES, GPU_BATCHES, Inputs, pieces, require_trial
from plsc.signing import MODEL, is_asked_for, read_signed

CONTRACT_FILE = "plsc.json"
FORMAT = "plsc-program-1"

_OPERATORS = re.compile(
    # No files; and no sizes that kernels read out of tensors by themselves, which a trial would not see.
    r"torch\.ops\.aten\.(?!from_file|_?segment_reduce|_pack_padded|tensor_split\.tensor|\w*nested|\w*sparse"
    r"|(lstm|gru|rnn_\w+)\.data)\w+(\.\w+)?"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|getitem)"
    r"|torch\.sym_(max|min|int|float|not|ite)"
)
_FUNCTIONS = re.compile(  # sympy's, with which torch writes symbolic sizes
    r"Symbol|Integer|Rational|Float|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv"
    r"|Eq|Equality|Ne|Unequality|Lt|Le|Gt|Ge|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan"
    r"|And|Or|Not|true|false"
)
_MEMBERS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|models/\w+\.json"
    r"|data/(weights|constants)/\w+(\.json)?|data/sample_inputs/\w+\.pt|extra/[\w.]+"
)
_PLAIN = re.compile(r"[\w.+:-]*")
# Keys whose values need no check as names: checked by themselves, parsed as JSON, or never turned into code.
_INERT = ("expr_str", "in_spec", "out_spec", "metadata")
_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Name, ast.Load, ast.keyword),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def is_program(path: Path) -> bool:
    """True if ``path`` is an archive of torch.export."""
    return any(name.endswith("/archive_format") for name in archive_names(path))


def save_program(program: torch.export.ExportedProgram, path: Path, contract: dict[str, Any]) -> None:
    """Write ``program`` without its example inputs, which would be pickled, and with ``contract`` as JSON."""
    program._example_inputs = None
    program._guards_code = []
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={CONTRACT_FILE: "{}"})
    contract = {**contract, "fingerprint": _fingerprint(buffer)}
    final = io.BytesIO()  # not the path itself: torch would name the archive's folder after it
    torch.export.save(program, final, extra_files={CONTRACT_FILE: json.dumps(contract)})
    path.write_bytes(final.getvalue())


def open_program(path: Path, device: torch.device, *, own: bool = False) -> tuple[nn.Module, Preprocessing, int, str]:
    """Load a program for inference.

    Args:
        path: the file.
        device: where it runs.
        own: this process wrote it: neither a signature nor a trial is asked for.

    Returns:
        The module on ``device``, its preprocessing, D and the contract id.

    Raises:
        DataError: the archive is corrupt, contains what could run code, or takes too much memory or time.
        IntegrityError: it is not signed, where :mod:`plsc.signing` asks for that.
    """
    content = _inspected(path, path.read_bytes() if own else read_signed(path, MODEL))
    contract, preprocessing = _contract(path, content)
    batches = GPU_BATCHES if device.type == "cuda" else CPU_BATCHES
    trusted = own or is_asked_for()
    if not trusted:
        check_side(preprocessing.image_size, path)
        shapes = tuple((batch, *preprocessing.shape) for batch in batches)
        require_trial(path, "program", content.getvalue(), Inputs("", "float32", shapes))
    try:
        module = _loaded(content, device)
        with torch.inference_mode():
            embedding_dim = module(torch.zeros(1, *preprocessing.shape, device=device)).flatten(1).shape[1]
    except Exception as error:  # torch's reader of foreign bytes raises anything
        raise DataError(f"{path} is no exported embedding model: {first_line(error)}") from None
    contract_id = stated_contract(path, contract, FORMAT, _fingerprint(content), preprocessing)
    program = _Program(module, path.absolute(), _fingerprint(content), device, () if trusted else batches)
    return program, preprocessing, embedding_dim, contract_id


class _Program(nn.Module):
    """Runs a model with batches of those sizes alone in which it was tried, if it was; pickles as its file does."""

    def __init__(
        self, module: nn.Module, path: Path, fingerprint: str, device: torch.device, batches: Sequence[int]
    ) -> None:
        super().__init__()
        self._module, self._batches = module, batches
        self._path, self._fingerprint, self._device = path, fingerprint, device

    def forward(self, images: Tensor) -> Tensor:
        sizes = pieces(len(images), self._batches) if self._batches else [len(images)]
        return torch.cat([self._module(piece) for piece in images.split(sizes)])

    def __reduce__(self) -> tuple[Any, ...]:
        """Read the file again: a program that runs does not pickle. DataError where it is another now."""
        content = _inspected(self._path, read_again(self._path))
        check_same(self._path, _fingerprint(content) == self._fingerprint)
        return _reopened, (content.getvalue(), self._path, self._fingerprint, self._device, self._batches)


def _reopened(content: bytes, path: Path, fingerprint: str, device: torch.device, batches: Sequence[int]) -> _Program:
    return _Program(_loaded(io.BytesIO(content), device), path, fingerprint, device, batches)


def _contract(path: Path, content: io.BytesIO) -> tuple[dict[str, Any], Preprocessing]:
    try:
        with zipfile.ZipFile(content) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/extra/{CONTRACT_FILE}")]
            contract = json.loads(archive.read(names[0])) if names else {}
        return contract, Preprocessing.from_metadata(contract)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is no exported embedding model: {first_line(error)}") from None


def _loaded(content: io.BytesIO, device: torch.device) -> nn.Module:
    from torch.export.passes import move_to_device_pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content.seek(0)
        program = torch.export.load(content)
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        return _without_dtype_checks(program.module())


def _without_dtype_checks(module: nn.Module) -> nn.Module:
    """Let a program run under autocast, as the module does that it was made of.

    Where that says ``x.float()``, torch.export checks (2.15) that ``x`` is of the type which it had at the export.
    """
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            check = torch.ops.aten._assert_tensor_metadata.default
            for node in part.graph.find_nodes(op="call_function", target=check):
                part.graph.erase_node(node)
            part.recompile()
    return module


def _fingerprint(file: io.BytesIO) -> str:
    """SHA-256 over graph and weights: everything but the extra files and torch's own bookkeeping."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            inner = name.partition("/")[2]
            if inner.startswith(("data/", "models/")):
                content = hashlib.sha256(archive.read(name)).hexdigest()
                digest.update(f"{inner} {content}\n".encode())
    return digest.hexdigest()


def _inspected(path: Path, content: bytes) -> io.BytesIO:
    """The archive's members, inspected and packed again: torch reads the very bytes that were inspected.

    Two readers of one zip file can see different members (a name that stands twice, a second directory).
    """
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(packed, "w") as copy:
            names, entries = archive.namelist(), archive.infolist()
            reason = "it holds a name twice" if len(set(names)) < len(names) else None
            if sum(entry.file_size for entry in entries) > len(content):  # a small file could fill the memory
                raise DataError(f"{path} is refused: it is compressed, or its members overlap; export it again")
            for name in dict.fromkeys(names):
                member = archive.read(name)
                reason = reason or next(_member_dangers(name.partition("/")[2], member), None)
                copy.writestr(name, member)
    except (zipfile.BadZipFile, zlib.error, ValueError, RecursionError, EOFError, NotImplementedError) as error:
        raise DataError(f"{path} is truncated or corrupt: {first_line(error)}") from None
    if reason is not None:
        mend = "export it again with `plsc export --format torch`, or by plsc.embedding.export.export_torch"
        raise DataError(f"{path} is refused: {reason}; {mend}")
    packed.seek(0)
    return packed


def _member_dangers(name: str, content: bytes) -> Iterator[str]:
    if not _MEMBERS.fullmatch(name):
        yield f"it holds {name or 'a file outside its folder'}"
    if name.startswith("data/sample_inputs/") and content:
        yield "it holds pickled example inputs"
    if name.startswith(("data/constants/", "data/weights/")) and name.endswith(".json"):
        for key, payload in json.loads(content)["config"].items():
            if payload["use_pickle"] is not False or not payload["path_name"].startswith(("weight_", "tensor_")):
                yield f"it holds {key} pickled"
    if name.startswith("models/"):
        yield from _graph_dangers(json.loads(content))


def _graph_dangers(value: Any) -> Iterator[str]:
    """Reasons to refuse the graph: torch generates Python source from the names in it."""
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        yield f"it holds the name {value[:80]!r}"
    elif isinstance(value, list):
        for item in value:
            yield from _graph_dangers(item)
    elif isinstance(value, dict):
        if value.get("guards_code"):
            yield "it holds Python code"
        if "target" in value and "inputs" in value and not _OPERATORS.fullmatch(str(value["target"])):
            yield f"it calls {str(value['target'])[:80]}"
        if "expr_str" in value and not _is_arithmetic(str(value["expr_str"])):
            yield f"it evaluates {str(value['expr_str'])[:80]!r}"
        for key, item in value.items():
            if key not in _INERT:
                yield from _graph_dangers(key)
                yield from _graph_dangers(item)


def _is_arithmetic(expression: str) -> bool:
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, MemoryError):
        return False
    return all(_is_arithmetic_node(node) for node in ast.walk(tree))


def _is_arithmetic_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and _FUNCTIONS.fullmatch(node.func.id) is not None
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) or re.fullmatch(r"\w+", node.value) is not None
    return isinstance(node, _ARITHMETIC)
