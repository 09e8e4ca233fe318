"""A checkpoint of tensors on a GPU: the fake runtime's kernels do nothing, but its copies copy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_trace import runtime

pytestmark = pytest.mark.live

MISSING = runtime.missing()
SCRIPT = """
import json, sys, threading
from pathlib import Path
import torch
from plsc.parallel.tensor_shard import TensorShard
from plsc.parallel import Mesh
from plsc.train import async_checkpoint, checkpoint_writer
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.checkpoint import CheckpointFolder
from plsc.train.checkpoint_reader import open_newest

device = torch.device("cuda", 3)
torch.cuda.set_device(device)
rows = torch.arange(3_000_000.0).view(-1, 100)
table = torch.empty(rows.shape, device=device).copy_(rows)
copies, devices = [], set()
copy_to_host, get = checkpoint_writer._copy_to_host, checkpoint_writer.HostStager.get

def copying(tensor):
    copy, event = copy_to_host(tensor)
    copies.append((copy.device.type, event is not None, list(copy.stride())))
    return copy, event

def getting(self):
    devices.add((threading.current_thread().name, torch.cuda.current_device()))
    return get(self)

checkpoint_writer._copy_to_host, checkpoint_writer.HostStager.get = copying, getting
equal = []
for memory in (10**9, 0):
    async_checkpoint.available_bytes = lambda: memory
    folder = Path(sys.argv[1]) / str(memory)
    checkpointer = AsyncCheckpointer(CheckpointFolder(folder, Mesh(0, 1, 3, device)), print)
    images = torch.empty((2, 3, 4, 4), device=device, memory_format=torch.channels_last)
    checkpointer.save(5, {"table": TensorShard.of_rows(table, 0, len(table)), "images": images}, {"step": 5})
    table.copy_(-rows)  # the next step's update; the copies' events lie before it
    checkpointer.wait()
    checkpointer.close()
    table.copy_(rows)
    stored = open_newest(CheckpointFolder(folder, Mesh(0, 1, 0, torch.device("cpu")))).read("table")
    equal.append(torch.equal(stored[""], rows))
print(json.dumps({"copies": copies, "devices": sorted(devices), "equal": equal}))
"""


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_table_on_a_gpu_is_copied_behind_the_step_and_written_from_the_copy(tmp_path: Path) -> None:
    environment = runtime.environment(runtime.build(tmp_path))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"] == [True, True]
    table, images = ["cpu", True, [100, 1]], ["cpu", True, [48, 1, 12, 3]]
    assert found["copies"] == [table, images] * 2
    assert found["devices"] == [["checkpoint_0", 3]]  # not GPU 0, where each rank would make a context
