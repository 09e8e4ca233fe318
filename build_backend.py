"""setuptools' build backend, whose archives are the same bytes wherever and whenever they are built (PEP 517)."""

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the hooks that are taken as they are)

# The time of every member: ZIP has none before 1980. https://reproducible-builds.org/docs/source-date-epoch/
os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")
os.umask(0o022)  # of the files that setuptools writes and then packs; a hook has its process to itself


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the source distribution, then order its members and give them one time, one owner and two modes.

    setuptools takes them from the checkout. The wheel is built from what this archive is unpacked to.
    """
    name = build_meta.build_sdist(sdist_directory, config_settings)
    path = Path(sdist_directory, name)
    buffer = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    return name
