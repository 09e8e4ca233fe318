"""Runs an example, ``striking.py EXAMPLE ARGUMENT…``, and prints what its main() returns.

While there is the file $STRIKE, the worker that first meets the picture $STRIKE_AT removes it and kills itself.
"""

import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import plsc


class Striking(plsc.Embedder):
    """A ``plsc.Embedder`` in a worker that is killed once."""

    def arrow(self, batches: Any) -> Any:
        for batch in batches:
            if any(path.endswith(os.environ["STRIKE_AT"]) for path in batch.column("path").to_pylist()):
                try:
                    Path(os.environ["STRIKE"]).unlink()
                except FileNotFoundError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield from super().arrow([batch])


if __name__ == "__main__":
    import striking  # by whose name workers find the class

    plsc.Embedder = striking.Striking  # type: ignore[misc]
    example, *arguments = sys.argv[1:]
    if "ray" in example:
        import ray

        ray.init = partial(ray.init, num_cpus=2, _node_ip_address="127.0.0.1")
    print(runpy.run_path(example)["main"](arguments))
