"""Run the shell and Python blocks of a Markdown page as written, in order, in one folder.

bash runs all blocks of a page as one script. ``plsc``, ``python``, ``torchrun`` and others that a page names are
stand-ins first on its PATH: each hands its arguments over a socket to this process, which answers with output and exit
code. ``plsc`` therefore runs in this process, through its own entry point, without the seconds that an import of torch
takes; pipes, variables and redirections are bash's own. A Python block is executed in this process as well.

``plsc serve`` is served by a thread until the page ends, on a free port that replaces the page's.
"""

import contextlib
import fnmatch
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
import threading
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from support import page_files
from support.waiting import free_port

ROOT = Path(__file__).parents[2]
PORT = "8080"  # of the service, on every page
STAND_INS = (
    "plsc",
    "python",
    "python3",
    "torchrun",
    "make",
    "pip",
    "git",
    "curl",
    "unzip",
    "apt-get",
    "python-block",
    "file-block",
)
_STAND_IN = """#!{python} -SI
import json, os, socket, sys
program = os.path.basename(sys.argv[0])
asks_service = program == "curl" and not any(word.startswith("https://") for word in sys.argv)
if asks_service or (program == "python3" and sys.argv[1] == "-c"):
    os.environ["PATH"] = os.environ["PATH"].partition(":")[2]
    os.execvp(program, sys.argv)
link = socket.create_connection(("127.0.0.1", int(os.environ["PAGE_PORT"])))
variables = {{name: value for name, value in os.environ.items() if name.startswith("PLSC_")}}
link.sendall(json.dumps([program, sys.argv[1:], os.getcwd(), variables]).encode() + b"\\n")
code, out, err = json.loads(link.makefile().readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""

# The programs of clusters, as far as a page uses them: a job of one task, on this machine.
_CLUSTER = {
    "sbatch": "#!/bin/sh\nexport SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node-0 SLURM_NNODES=1 SLURM_NODEID=0\n"
    'exec bash -euo pipefail "$1"\n',
    "kubectl": '#!/bin/sh\ntest -f "$3"\n',
    "torchx": '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec plsc "$@"\n',
    "scontrol": '#!/bin/sh\necho "$3"\n',
    "srun": '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n',
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it shows (or ""), its text, the line at which it begins."""

    language: str
    title: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """Read the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    fence = r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^(?P=indent)```$'
    return [
        Block(
            match["language"],
            match["title"] or "",
            textwrap.dedent(match["text"]),
            text[: match.start()].count("\n") + 1,
        )
        for match in re.finditer(fence, text, flags=re.DOTALL | re.MULTILINE)
    ]


@dataclass
class PageRun:
    """One run of a page.

    Attributes:
        page: the Markdown file.
        folder: where the blocks run.
        replaced: texts of the blocks to replace before they run, for amounts that a test cannot afford.
        parsed_only: commands, as "bench head", whose arguments are parsed and which are not run.
        names: names that the page's Python blocks find defined.
        ran: the commands that ran, as the page has them; ``only_parsed`` those that did not.
    """

    page: Path
    folder: Path
    replaced: Mapping[str, str] = field(default_factory=dict)
    parsed_only: Sequence[str] = ()
    names: dict[str, Any] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    only_parsed: list[str] = field(default_factory=list)
    _services: list[tuple[Any, threading.Thread]] = field(default_factory=list)

    def run(self) -> None:
        """Run the page's blocks; fail the test with the block and the output of the first that fails."""
        self._port, self._blocks = free_port(), blocks_of(self.page)
        programs = self.folder / ".programs"
        programs.mkdir()
        for name in STAND_INS:
            (programs / name).write_text(_STAND_IN.format(python=sys.executable))
            (programs / name).chmod(0o755)
        for name, text in _CLUSTER.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._run_script(listener, programs)
        finally:
            for server, thread in self._services:
                server.stop()
                thread.join(30)

    def script(self) -> str:
        """The page's blocks as one script for bash."""
        parts = ["set -Eeuo pipefail", "trap 'echo \"at $AT: $BASH_COMMAND\" >&2' ERR"]
        for index, block in enumerate(self._blocks):
            parts.append(f"AT={self.page.name}:{block.line}")
            if block.title:
                parts.append(f"file-block {index}")
            elif block.language == "python":
                parts.append(f"python-block {index}")
            elif block.language == "sh":
                parts.append(self._adapted(block.text))
        return "\n".join(parts)

    def _adapted(self, text: str) -> str:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text.replace(PORT, str(self._port))

    def _run_script(self, listener: socket.socket, programs: Path) -> None:
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PAGE_PORT": str(listener.getsockname()[1]),
            "NO_PROXY": "*",
        }
        with (programs / "output").open("w+", encoding="utf-8") as output:
            bash = subprocess.Popen(
                ["bash", "-c", self.script()], cwd=self.folder, env=environment, stdout=output, stderr=output
            )
            try:
                listener.settimeout(0.05)
                while bash.poll() is None:
                    with contextlib.suppress(TimeoutError):
                        self._answer(listener.accept()[0])
            finally:
                bash.kill()
                bash.wait()
            output.seek(0)
            told = output.read()
            assert bash.returncode == 0, told[-4000:]
            assert "\ufffd" not in told, "several lines were shown as one (plsc.progress.show)"

    def _answer(self, link: socket.socket) -> None:
        """Run one command that the script calls."""
        with link:
            link.setblocking(True)
            program, argv, cwd, variables = json.loads(link.makefile().readline())
            out, err = io.StringIO(), io.StringIO()
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.chdir(cwd))
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                for name, value in variables.items():
                    patch.setenv(name, value)
                stack.enter_context(contextlib.redirect_stdout(out))
                stack.enter_context(contextlib.redirect_stderr(err))
                code = _exit_code(lambda: getattr(self, f"_{program.replace('-', '_')}")(argv))
            with contextlib.suppress(BrokenPipeError):
                link.sendall(json.dumps([code, out.getvalue(), err.getvalue()]).encode() + b"\n")

    def _plsc(self, argv: list[str]) -> int:
        from plsc.tools import entry

        command = " ".join(argv[:2])
        if any(command == name or argv[0] == name for name in self.parsed_only):
            self.only_parsed.append(shlex.join(argv))
            return _parse(argv)
        self.ran.append(shlex.join(argv))
        if code := _parse(argv):
            return code
        if argv[0] == "serve":
            return self._serve(argv)
        with _small_training() if argv[0] == "train" else contextlib.nullcontext():
            return entry.main(_on_one_rank(argv))

    def _serve(self, argv: list[str]) -> int:
        """Start ``plsc serve`` in a thread, in place of the one before it, and return when it is ready."""
        from plsc.serve import server
        from plsc.tools import entry

        if "--port" not in argv:
            argv = [*argv, "--port", str(self._port)]
        # From the root: the service goes on when this process is in another folder again.
        place = argv.index("--store") + 1
        argv = [*argv[:place], str(Path(argv[place]).absolute()), *argv[place + 1 :]]
        while self._services:
            before, thread = self._services.pop()
            before.stop()
            thread.join(30)
        ready: Queue[Any] = Queue()

        class Announcing(server.Server):
            def run(self, load: Any, announce: Callable[[Any], None]) -> None:
                super().run(load, lambda service: (announce(service), ready.put(self)))

        def serve() -> None:
            code = _exit_code(lambda: entry.main(argv))
            ready.put(code)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "Server", Announcing)
            thread = threading.Thread(target=serve)
            thread.start()
            started = ready.get(timeout=60)
        if isinstance(started, int):
            return started or 1
        self._services.append((started, thread))
        return 0

    def _torchrun(self, argv: list[str]) -> int:
        """Parse torchrun's own arguments, and run the command that follows them as one process."""
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(argv)
        if not args.no_python or args.training_script != "plsc":
            print("torchrun has to run plsc: --no-python plsc CMD …", file=sys.stderr)
            return 2
        return self._plsc(args.training_script_args)

    def _python(self, argv: list[str]) -> int:
        """Run what the page shows; accept scripts of the repository, with options that they know; nothing else."""
        if argv[:2] == ["-m", "venv"]:
            activate = Path(argv[2]) / "bin" / "activate"
            activate.parent.mkdir(parents=True)
            activate.touch()
            return 0
        if argv[:2] == ["-m", "pip"]:
            return self._pip(argv[2:])
        if argv[0] in {block.title for block in self._blocks}:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True)
            print(done.stdout, end="")
            print(done.stderr, end="", file=sys.stderr)
            return done.returncode
        script = ROOT / argv[0]
        text = script.read_text(encoding="utf-8")
        unknown = [word for word in argv[1:] if word.startswith("--") and f'"{word}"' not in text]
        if unknown:
            print(f"{argv[0]} has no option {unknown[0]}", file=sys.stderr)
        self.only_parsed.append(shlex.join(["python", *argv]))
        return 2 if unknown else 0

    _python3 = _python

    def _make(self, argv: list[str]) -> int:
        """Accept targets of the Makefile. They set up environments, or run the tests themselves."""
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        return 0 if set(argv) <= set(targets) else 2

    def _pip(self, argv: list[str]) -> int:
        """Accept installations of this project, with extras that it has, and removals. Tests do neither."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = {name for word in argv for found in re.findall(r"\[(.*)\]", word) for name in found.split(",")}
        return 0 if argv[0] in ("install", "uninstall") and extras <= set(project["optional-dependencies"]) else 2

    def _apt_get(self, argv: list[str]) -> int:
        """Accept installations of packages that the checks before a change install too. Tests install none."""
        known = (ROOT / ".ci" / "run").read_text(encoding="utf-8").split()
        return 0 if argv[0] == "install" and set(argv[1:]) <= {word.rstrip(";") for word in known} else 2

    def _git(self, argv: list[str]) -> int:
        """Let the page's own folder pass for the clone. Tests do not clone."""
        assert argv[0] == "clone", argv
        Path(argv[-1]).symlink_to(".")
        return 0

    def _curl(self, argv: list[str]) -> int:
        """Make a stand-in for a file of another host. Tests ask no other host; the service's requests are made."""
        page_files.make(Path(), argv[argv.index("-o") + 1])
        return 0

    def _unzip(self, argv: list[str]) -> int:
        """Extract a file without its folders, for machines that have no unzip."""
        assert argv[:2] == ["-q", "-j"], argv
        with zipfile.ZipFile(argv[2]) as archive:
            for name in fnmatch.filter(archive.namelist(), argv[3]):
                Path(Path(name).name).write_bytes(archive.read(name))
        return 0

    def _file_block(self, argv: list[str]) -> int:
        block = self._blocks[int(argv[0])]
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(self._adapted(block.text), encoding="utf-8")
        return 0

    def _python_block(self, argv: list[str]) -> int:
        block = self._blocks[int(argv[0])]
        code = compile("\n" * block.line + self._adapted(block.text), self.page.name, "exec")
        exec(code, self.names)
        return 0


def options_of(command: str) -> set[str]:
    """The options that ``plsc COMMAND`` and its sub-commands take, keys of a configuration included."""
    import argparse

    from plsc import config

    tool, parser = _tool(command)
    options = {"--json"} | {f"--{key}" for key in config.KEYS if getattr(tool, "accepts_overrides", False)}
    pending = [parser]
    while pending:
        for action in pending.pop()._actions:
            options |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
    return options


def unknown_words(command: str, words: Sequence[str]) -> list[str]:
    """The words that the parser of ``plsc COMMAND`` leaves over; sentences may leave out what the command asks for."""
    tool, parser = _tool(command)
    parser.add_argument("--json")
    for action in parser._actions:
        action.required = False
    try:
        left = parser.parse_known_args([word for word in words if word != "--help"])[1]
    except SystemExit:  # an option without its value, as sentences name them
        return []
    return [] if getattr(tool, "accepts_overrides", False) else left


def _tool(command: str) -> tuple[Any, Any]:
    """The module of a command, and its parser."""
    import argparse
    import importlib

    tool, parser = importlib.import_module(f"plsc.tools.{command}"), argparse.ArgumentParser(conflict_handler="resolve")
    tool.configure(parser)
    return tool, parser


def _exit_code(function: Callable[[], int]) -> int:
    try:
        return function()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
        return 99


def _parse(argv: list[str]) -> int:
    """Parse a command's arguments with its own parser, without running it."""
    import importlib

    from plsc.tools import entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(f"plsc.tools.{argv[0]}"), "run", lambda args: None, raising=False)
        return entry.main(argv)


def _on_one_rank(argv: list[str]) -> list[str]:
    """Replace ``--nproc N`` and ``--nnodes N`` by one rank, and the built-in classes by few."""
    few = [_few_classes(word) for word in argv]
    for option in ("--nproc", "--nnodes", "--node-rank", "--master-addr", "--master-port"):
        if option in few:
            del few[few.index(option) : few.index(option) + 2]
    return few


# What a training run of a page is replaced by, once its own configuration has been read and checked.
_SMALL_RUN: dict[str, Any] = {
    "backbone": "resnet8",
    "embedding_dim": 16,
    "precision": "fp32",
    "epochs": None,
    "steps": 2,
    "sync_batchnorm": False,
    "head_ranks": 0,
    "compile": False,
    "data.image_size": 32,
    "data.batch_size": 4,
    "data.workers": 0,
    "optim.lr": 0.001,
    "optim.warmup_epochs": None,
    "optim.warmup_steps": 0,
    "log.to": (),
}


@contextlib.contextmanager
def _small_training() -> Iterator[None]:
    """Lay :data:`_SMALL_RUN` over every configuration that is loaded."""
    from plsc import config

    load = config.load

    def load_small(path: Any = None, overrides: Mapping[str, Any] | None = None) -> config.Config:
        whole = load(path, overrides)
        small = {**_SMALL_RUN, "data.train": _few_classes(whole.data.train)}
        small["eval.sets"] = [_few_classes(name) for name in whole.eval.sets]
        return load(path, {**(overrides or {}), **small})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "load", load_small)
        yield


def _few_classes(text: str) -> str:
    few = re.sub(r"avatars:\d+x\d+", "avatars:6x4", text)
    return re.sub(r"^glyphs:.*", "glyphs:41-46:fonts=DejaVuSans+DejaVuSerif:variants=2", few)
