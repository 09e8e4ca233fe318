"""A library in the place of the compiled kernels that was not made from their sources."""

import subprocess
from pathlib import Path

from plsc.native import build

SOURCE = 'extern "C" const char* plsc_fingerprint() { return "of other sources"; }'


def plant(monkeypatch, folder: Path, code: str = SOURCE) -> list[Path]:
    """Fill an empty cache in ``folder`` with libraries of ``code`` under the names of both kernels'; return them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    real = subprocess.run

    def compile_instead(command, **options):
        if "-o" in command:
            source = folder / "other.cpp"
            source.write_text(code)
            command = [command[0], "-shared", "-fPIC", "-o", command[command.index("-o") + 1], str(source)]
        return real(command, **options)

    build._load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", compile_instead)
        compiler = build._find_compiler(None)
        return [build._compiled(compiler, source, None)[0] for source in ("head_kernels", "scan_kernels")]
