"""Sessions of onnxruntime: opened on the execution provider that is asked for, or on the CPU with a line that says so.

Which providers there are is a matter of the package that is installed: ``onnxruntime`` has the CPU's,
``onnxruntime-gpu`` CUDA's and TensorRT's, ``onnxruntime-openvino`` OpenVINO's, and ``onnxruntime`` on macOS CoreML's.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.embedding.onnx_model import load_graph
from plsc.errors import DataError, UsageError, first_line
from plsc.progress import warn
from plsc.regular_files import open_regular

AUTO = "auto"
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# Each hands what it cannot run to the next, and at last to the CPU's.
PROVIDERS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": (CUDA,),
    "tensorrt": ("TensorrtExecutionProvider", CUDA),
    "openvino": ("OpenVINOExecutionProvider",),
    "coreml": ("CoreMLExecutionProvider",),
}


class Session:
    """An ``onnxruntime.InferenceSession`` that pickles: with the content of its file, which must be there still."""

    def __init__(self, path: Path, content: bytes, providers: list[str], running: Any) -> None:
        self._path, self._providers = path.absolute(), providers
        self._digest = hashlib.sha256(content).digest()
        self.run, self.get_outputs = running.run, running.get_outputs

    def __reduce__(self) -> tuple[Any, ...]:
        """Read the file again, so that its bytes lie in no memory meanwhile; DataError where it is another now."""
        _, content = load_graph(self._path, read_again(self._path), trusted=True)
        check_same(self._path, hashlib.sha256(content).digest() == self._digest)
        return open_session, (self._path, content, self._providers)


def read_again(path: Path) -> bytes:
    """Read the file of a model that is to be pickled; DataError where it is gone."""
    check_same(path, path.exists())
    with open_regular(path) as file:
        return file.read()


def check_same(path: Path, same: bool) -> None:
    """Refuse to pickle a model whose file is no longer what was opened: DataError."""
    if not same:
        raise DataError(f"{path} is not the file that was opened, and a model is pickled with it: load it again")


def session_providers(path: Path, device: torch.device, provider: str = AUTO) -> list[str]:
    """onnxruntime's names of the providers for a session, the preferred one first, the CPU's last.

    Args:
        path: of the model, for messages.
        device: where "auto" runs it: on CUDA where that is asked for and there.
        provider: one of :data:`PROVIDERS`; where the installed onnxruntime lacks it, a warning is logged. Or "auto".

    Raises:
        UsageError: there is no such provider.
    """
    import onnxruntime

    if provider not in (AUTO, *PROVIDERS):
        raise UsageError(f"provider is {provider!r}; it has to be one of {', '.join((AUTO, *PROVIDERS))}")
    wanted = PROVIDERS["cuda" if device.type == "cuda" else "cpu"] if provider == AUTO else PROVIDERS[provider]
    found = [name for name in wanted if name in onnxruntime.get_available_providers()]
    if provider != AUTO and wanted[:1] != tuple(found[:1]):
        _say_fallback(path, wanted[0], (*found, CPU)[0], "the installed onnxruntime does not have it")
    return [*found, CPU]


def open_session(path: Path, content: bytes, providers: list[str]) -> Session:
    """Open a :class:`Session` with torch's number of threads.

    Args:
        path: of the file, for messages.
        content: of the file.
        providers: of :func:`session_providers`; where the first does not start, the CPU's runs the model, and a warning
            is logged.

    Raises:
        DataError: onnxruntime cannot run the file: operators that it does not know, broken shapes.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # fatal only: errors come as exceptions
    try:  # its own way of falling back prints
        session = onnxruntime.InferenceSession(content, options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's errors share no public base class
        if providers == [CPU]:
            raise DataError(f"{path} cannot be run by onnxruntime: {first_line(error)}") from None
        _say_fallback(path, providers[0], CPU, first_line(error))
        return open_session(path, content, [CPU])
    if (running := session.get_providers()[0]) != providers[0]:
        _say_fallback(path, providers[0], running, "its libraries could not be loaded")
    return Session(path, content, providers, session)


def _say_fallback(path: Path, wanted: str, running: str, reason: str) -> None:
    warn("plsc.embedding", f"{path} runs on {running} in place of {wanted}: {reason}")


def run_session(path: Path, session: Session, outputs: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a session; :class:`DataError` names the file and the inputs' shapes when it does not run on them."""
    try:
        answer: list[np.ndarray] = session.run(outputs, inputs)
    except Exception as error:  # onnxruntime's errors share no public base class
        shapes = " and ".join(str(value.shape) for value in inputs.values())
        raise DataError(f"{path} does not run on {shapes}: {first_line(error)}") from None
    return answer
