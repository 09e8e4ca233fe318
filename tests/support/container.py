"""A Dockerfile's steps, run as root in folders, without Docker: for tests of what a container would do.

Knows the instructions that deploy/Dockerfile uses, and refuses others. Where an image begins with ``FROM``, a copy of a
Debian root stands in; ``RUN`` and the finished image run in it by chroot, the latter in namespaces of its own.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_INSTRUCTION = re.compile(r"([A-Z]+)\s+(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(\w+)")


@dataclass
class Image:
    """A stage as far as it was run: its ``root``, and what the instructions set."""

    root: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    )
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, comments taken out and continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [_INSTRUCTION.fullmatch(line.strip()) for line in joined.splitlines() if line.strip()]
    assert all(found), "a line is no instruction"
    return [(match[1], match[2].strip()) for match in found if match]


class Builder:
    """Runs a Dockerfile.

    Args:
        base: a Debian root, copied for each ``FROM``.
        context: the folder that ``COPY`` copies from, with what the image may hold alone.
        folder: for the images.
        mounts: {path inside: folder outside}, mounted read-only while steps run.
        environment: of the steps, beside what the Dockerfile sets.
    """

    def __init__(
        self, base: Path, context: Path, folder: Path, mounts: dict[str, Path], environment: dict[str, str]
    ) -> None:
        self._base, self._context, self._folder = base, context, folder
        self._mounts, self._environment = mounts, environment
        self._stages: dict[str, Image] = {}

    def build(self, dockerfile: Path) -> Image:
        """Run all stages; returns the last one."""
        image: Image | None = None
        for name, text in instructions(dockerfile):
            if name == "FROM":
                source, *alias = text.split()
                assert source == "debian:bookworm-slim", source
                label = alias[1] if alias else "final"
                image = self._stages[label] = self._from(label)
            else:
                assert image is not None, "FROM comes first"
                self._step(image, name, text)
        assert image is not None, "the file is empty"
        return image

    def _from(self, label: str) -> Image:
        root = self._folder / label
        subprocess.run(["cp", "--archive", "--reflink=auto", self._base, root], check=True)
        shutil.copyfile("/etc/resolv.conf", root / "etc" / "resolv.conf")
        return Image(root)

    def _step(self, image: Image, name: str, text: str) -> None:
        if name == "ARG":
            key, _, value = text.partition("=")
            image.environment.setdefault(key, value.strip('"'))
        elif name == "ENV":
            for item in shlex.split(text):
                key, _, value = item.partition("=")
                image.environment[key] = _VARIABLE.sub(lambda match: image.environment.get(match[1], ""), value)
        elif name == "RUN":
            self._run(image, text)
        elif name == "COPY":
            self._copy(image, text.split())
        elif name == "USER":
            image.user = text
        elif name == "VOLUME":
            image.volumes = json.loads(text)
        elif name == "HEALTHCHECK":
            image.healthcheck = json.loads(text.partition("CMD ")[2])
        elif name == "ENTRYPOINT":
            image.entrypoint = json.loads(text)
        elif name == "CMD":
            image.command = json.loads(text)
        else:
            assert name == "EXPOSE", name

    def _run(self, image: Image, command: str) -> None:
        environment = {**image.environment, **self._environment}
        done = in_root(image.root, ["/bin/sh", "-c", command], environment, self._mounts, capture=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def _copy(self, image: Image, words: list[str]) -> None:
        stage = next((word.partition("=")[2] for word in words if word.startswith("--from=")), None)
        source, target = [word for word in words if not word.startswith("--")]
        origin = self._context / source if stage is None else self._stages[stage].root / source.lstrip("/")
        shutil.copytree(origin, image.root / target.lstrip("/"), symlinks=True, dirs_exist_ok=True)


def in_root(
    root: Path,
    command: list[str],
    environment: dict[str, str],
    mounts: dict[str, Path],
    *,
    capture: bool = False,
    user: str = "0:0",
    writable: dict[str, Path] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run ``command`` in ``root`` and wait; see :func:`start_in_root`."""
    process = start_in_root(root, command, environment, mounts, user=user, writable=writable, capture=capture)
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def start_in_root(
    root: Path,
    command: list[str],
    environment: dict[str, str],
    mounts: dict[str, Path],
    *,
    user: str = "0:0",
    writable: dict[str, Path] | None = None,
    capture: bool = True,
) -> "subprocess.Popen[str]":
    """Start ``command`` in ``root``.

    Args:
        mounts: {path inside: folder outside}, read-only.
        user: "uid:gid"; another than root runs without capabilities, and cannot get any.
        writable: {path inside: folder outside}; with it the root itself is read-only, as ``read_only: true`` makes it.
    """
    uid, gid = user.split(":")
    lines = ["set -e", f"mount --rbind {shlex.quote(str(root))} {shlex.quote(str(root))}"]
    for inside, outside in {**mounts, **(writable or {})}.items():
        place = shlex.quote(f"{root}{inside}")
        lines += [f"mkdir -p {place}", f"mount --bind {shlex.quote(str(outside))} {place}"]
        if inside in mounts:
            lines.append(f"mount -o remount,bind,ro {place}")
    lines += [f"mount -t {kind} {kind} {root}{place}" for kind, place in (("proc", "/proc"), ("tmpfs", "/tmp"))]
    lines.append(f"mount --rbind /dev {root}/dev")
    if writable is not None:
        lines.append(f"mount -o remount,bind,ro {shlex.quote(str(root))}")
    drop = [] if uid == "0" else ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    inner = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *drop, *command]
    settings = [f"{name}={value}" for name, value in environment.items()]
    lines.append(f"exec chroot {shlex.quote(str(root))} {shlex.join(['/usr/bin/env', '-i', *settings, *inner])}")
    pipe = subprocess.PIPE if capture else None
    return subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGTERM", "/bin/sh", "-c", "\n".join(lines)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
