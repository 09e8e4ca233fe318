"""The command ``plsc``: finds the tool, parses its arguments, turns failures into one line and an exit code.

Every other module of this package is a command: it defines ``HELP`` (a line for the overview), ``configure(parser)``
and ``run(args)``, whose result ``--json`` writes; ``accepts_overrides = True`` gives it ``args.overrides``.
"""

import argparse
import importlib
import itertools
import os
import pkgutil
import signal
import sys
from pathlib import Path
from types import ModuleType

from plsc.errors import PlscError
from plsc.files import make_folder, write_json

_MODULES = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
COMMANDS = tuple(sorted(name for name in _MODULES if name != "entry"))


def main(argv: list[str] | None = None) -> int:
    """Run ``plsc CMD …`` and return its exit code: 0 done, 1 failed, 2 usage error, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        from plsc import __version__

        print(f"plsc {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        return _fail("plsc", f"no command {name!r}; it is one of {', '.join(COMMANDS)}", 2)
    return _run(_tool(name), name, rest)


def _tool(name: str) -> ModuleType:
    return importlib.import_module(f"plsc.tools.{name}")


def _overview() -> str:
    lines = ["usage: plsc CMD [arguments]    (plsc CMD --help explains each)", ""]
    lines += [f"  {name:<12}{_tool(name).HELP}" for name in COMMANDS]
    return "\n".join(lines)


def _split_overrides(argv: list[str], options: set[str]) -> tuple[list[str], list[str]]:
    """Split off the --KEY VALUE pairs, whose values the parser would take for positional arguments."""
    own: list[str] = []
    pairs: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in options:
            own.append(word)
        else:
            pairs += [word] if equals else [word, *itertools.islice(words, 1)]
    return own, pairs


def _run(tool: ModuleType, name: str, argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"plsc {name}",
        description=tool.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tool.configure(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result into FILE as JSON")
    if getattr(tool, "accepts_overrides", False):  # --KEY VALUE pairs that the tool itself knows
        own, overrides = _split_overrides(argv, {name for action in parser._actions for name in action.option_strings})
        args, unknown = parser.parse_known_args(own)
        args.overrides = overrides + unknown
    else:
        args = parser.parse_args(argv)
    try:
        if args.json is not None:
            make_folder(args.json.absolute().parent)  # found out now, not after hours of work
        result = tool.run(args)
        if args.json is not None and result is not None:
            write_json(args.json, result)
        return 0
    except PlscError as error:
        return _fail(f"plsc {name}", str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail(f"plsc {name}", "interrupted", 130)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 (the interpreter flushes it at exit)
        return 1
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        return _fail(f"plsc {name}", f"{file}{error.strerror or error}", 1)


def _fail(who: str, message: str, code: int) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The launcher ends all ranks when one has failed; its SIGTERM must not keep this line from being printed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"{who}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
