"""Restarts by torchrun: which run a launch has begun or resumed, so that its next attempt goes on with that one."""

import contextlib
import dataclasses
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from plsc.files import read_json, write_json
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, on_main
from plsc.parallel.rendezvous import agent_keeps_store, connect
from plsc.train.checkpoint import CHECKPOINTS

LAUNCH = "launch.json"  # the torchrun that the run was last begun or resumed by


@dataclass(frozen=True)
class Launch:
    """One call of torchrun on each machine, however often they restart their ranks.

    Attributes:
        name: in no other launch, and the same in every attempt as long as one agent keeps the ranks' store.
        process: the first rank, as HOST:PID; differs between attempts.
        agents: torchrun's processes that have started the ranks of this attempt, as HOST:PID:START. One lives as long
            as its machine takes part in the launch; the name does not, where the machine that keeps the store is lost.
    """

    name: str
    process: str
    agents: tuple[str, ...]


def current_launch(mesh: Mesh) -> Launch | None:
    """Return torchrun's launch that the ranks belong to; None without torchrun. Every rank calls."""
    agents = tuple(sorted(set(all_gather_object(_own_agent(), mesh))))

    def named() -> Launch | None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        name = uuid.uuid4().hex
        if agent_keeps_store():
            name = connect().compare_set("plsc/launch", "", name).decode()  # the first to come names it
        return Launch(name, f"{socket.gethostname()}:{os.getpid()}", agents)

    return on_main(named, mesh)


def mark_launch(out: Path, launch: Launch) -> None:
    """Note in ``out`` that ``launch`` has begun or resumed its run."""
    write_json(out / LAUNCH, dataclasses.asdict(launch))


def after_restart(out: Path, resume: str | None, launch: Launch | None) -> tuple[bool, str | None]:
    """Return (True, "auto") in the place of (False, ``resume``) where torchrun's restart finds its own run in ``out``.

    An attempt before this one had begun or resumed the run then: the folder bears the launch's name, or an agent that
    takes part in this attempt. A folder that was there before the launch does not, and stays refused in every attempt.
    The restart count says neither that nor the truth on all machines, whose agents count their own failures only.
    """
    if launch is None or not (out / LAUNCH).exists():
        return False, resume
    mark = read_json(out / LAUNCH)
    is_own = mark["name"] == launch.name or not set(launch.agents).isdisjoint(mark.get("agents", ()))
    if not is_own or mark["process"] == launch.process:
        return False, resume
    return True, "auto" if resume is None or any((out / CHECKPOINTS).glob("step-*")) else resume


def _own_agent() -> str:
    parent, start = os.getppid(), ""
    with contextlib.suppress(OSError, IndexError):  # a system without /proc, where process numbers may come again
        start = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{parent}:{start}"
