"""Opening ONNX files that other people wrote: every way in which one can be wrong is one line."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.errors import DataError

INPUT_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}


def load_graph(path: Path) -> Any:
    """The file's ``onnx.ModelProto``; :class:`DataError` if it is cut, no ONNX file, or holds no graph."""
    import onnx

    try:
        model = onnx.load(str(path))
    except OSError:
        raise
    except Exception as error:  # protobuf's errors, and those of onnx's reader of external data
        raise DataError(f"{path} is truncated, or no ONNX file: {first_line(error)}") from None
    if not model.graph.node:
        raise DataError(f"{path} is truncated, or no ONNX file: it holds no graph")
    return model


def open_session(path: Path, device: torch.device) -> Any:
    """An ``onnxruntime.InferenceSession`` on ``device`` with torch's number of threads.

    Raises :class:`DataError` if onnxruntime cannot run the file: operators that it does not know, broken shapes.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what matters comes as an exception
    wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[*providers, "CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no public base class
        raise DataError(f"{path} cannot be run by onnxruntime: {first_line(error)}") from None


def run_session(path: Path, session: Any, outputs: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """``session``'s answer; :class:`DataError` names the file and the inputs' shapes when it does not run on them."""
    try:
        answer: list[np.ndarray] = session.run(outputs, inputs)
    except Exception as error:  # onnxruntime's errors share no public base class
        shapes = " and ".join(str(value.shape) for value in inputs.values())
        raise DataError(f"{path} does not run on {shapes}: {first_line(error)}") from None
    return answer


def first_line(error: BaseException) -> str:
    """What an error says, shortened to one line."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
