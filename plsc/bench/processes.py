"""A contestant's own fresh processes: started, watched, ended."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plsc.bench.setting import Setting
from plsc.files import write_json
from plsc.parallel.launch import rank_environment


def measured(setting: Setting, limit: float) -> dict[str, Any]:
    """Measure a contestant in ``setting.nproc`` new processes.

    Args:
        setting: what to measure.
        limit: seconds after which the processes are ended.

    Returns:
        Over the ranks: the mean of CPU seconds and rates, the largest wall time and memory; or only ``reason``.
    """
    with tempfile.TemporaryDirectory(prefix="plsc-bench-") as name:
        folder = Path(name)
        write_json(folder / "task.json", setting.as_dict())
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [_start(setting, rank, store.port, folder) for rank in range(setting.nproc)]
        try:
            problem = _wait(ranks, limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        results = [_read(folder / f"rank-{rank}.json") for rank in range(setting.nproc)]
        for result in results:
            if result is not None and "reason" in result:
                return {"reason": result["reason"]}
        finished = [result for result in results if result is not None]
        if problem is not None or len(finished) < len(ranks):
            return {"reason": problem or _last_words(folder)}
    return _over_ranks(finished)


def _start(setting: Setting, rank: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = rank_environment(rank, setting.nproc, port)
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(setting.threads))
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "plsc.bench.worker", str(folder / "task.json"), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], limit: float) -> str | None:
    """None once every rank ended well; a reason once one was killed or time is up; "" left to the ranks' words."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if any(codes):
            killed = [-code for code in codes if code is not None and code < 0]
            return f"a rank was killed by signal {killed[0]}" if killed else ""
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)
    return f"took longer than {limit:g} s"


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _last_words(folder: Path) -> str:
    """The last line that some rank printed before it ended without a result."""
    for path in sorted(folder.glob("rank-*.log")):
        if lines := path.read_text(encoding="utf-8", errors="replace").strip().splitlines():
            return lines[-1][:200]
    return "a rank ended without a result"


def _over_ranks(results: list[dict[str, Any]]) -> dict[str, Any]:
    over: dict[str, Any] = {}
    for key in results[0]:
        values = [result[key] for result in results]
        if key in ("wall_s", "memory_mib", "peak_mib"):
            over[key] = max(values)
        elif values[0] is None or isinstance(values[0], str):
            over[key] = values[0]
        else:
            over[key] = sum(values) / len(values)
    return over
