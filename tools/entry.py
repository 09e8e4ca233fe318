"""The command ``plsc``: finds the tool, parses its arguments, turns failures into one line and an exit code.

Every other module of this package is a command: it defines ``HELP`` (a line for the overview), ``configure(parser)``
and ``run(args)``, whose result ``--json`` writes, unless all its sub-commands have a ``run`` of their own
(:func:`add_action`). ``args.argv`` is the whole command line. ``accepts_overrides = True`` gives it ``args.overrides``,
and ``args.options``, the names of its own options; ``exit_code(result)`` says whether a result is a failure.

A command imports torch, and whatever imports it, in ``run`` only: help and usage errors take no time then.
"""

import argparse
import contextlib
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from plsc.errors import PlscError, UsageError, masked
from plsc.files import check_output, new_folder, write_json
from plsc.nearest import did_you_mean
from plsc.progress import flush, note, printable, show, write
from plsc.regular_files import ALLOW_OUTSIDE
from plsc.signing import VERIFY_FROM, VERIFY_KEY

_MODULES = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
COMMANDS = tuple(sorted(name for name in _MODULES if name != "entry"))
# A rank other than its machine's first holds its error back for so long: where the first one fails for the same reason,
# the launcher has ended this rank by then, and one line is printed instead of one per rank.
_HOLD_SECONDS = 5.0
_LONGEST_LINE = 2000  # characters of an error


# argparse's names of the types of options' values, in words.
_EXPECTED = {"int": "a whole number", "float": "a number"}
# The distributions whose modules have other names, or that bring those of others along.
_DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "fontTools": "fonttools",
    "lance": "pylance",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "scipy": "scikit-learn",
    "sklearn": "scikit-learn",
}
Number = TypeVar("Number", int, float)


def number(read: Callable[[str], Number], holds: Callable[[Number], bool], wanted: str) -> Callable[[str], Number]:
    """Make a type of an option's value: what ``read`` makes of it, refused by saying ``wanted`` unless it ``holds``."""

    def parse(text: str) -> Number:
        value = read(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text}: {wanted}")
        return value

    parse.__name__ = getattr(read, "__name__", "number")  # in argparse's message where ``read`` fails
    return parse


PRECISIONS = ("auto", "fp32", "bf16", "fp16")  # that a model can compute in
SOURCES = (  # docs/data.md says how each is written; plsc.data.readers opens them
    "a folder, a list, .rec, .tar, .parquet, .arrow or .lance files, s3://, gs:// or az://BUCKET/…, hub:ORG/NAME, "
    "avatars:IDSxIMAGES or glyphs:BLOCK"
)
AUTO_PRECISION = "(auto: on a GPU bf16, fp16 on Volta and Turing; fp32 on a CPU and for .onnx)"
# Of plsc.embedding.onnx_session, which imports torch: help does not wait for that.
PROVIDERS = ("auto", "cpu", "cuda", "tensorrt", "openvino", "coreml")
positive = number(int, lambda value: value >= 1, "it must be at least 1")
natural = number(int, lambda value: value >= 0, "it must not be negative")
above_0 = number(float, lambda value: value > 0, "it must be more than 0")


class ArgumentError(UsageError):
    """Wrong arguments of the command ``prog``."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(f"{message} (see {prog} --help)")
        self.prog = prog


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line as all others; sub-commands' parsers are of this class too."""

    accepts_unknown = False  # what it does not know is the tool's business: --KEY VALUE pairs

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; of a command without sub-commands, what it does not know is an error that names the nearest option.

        argparse would leave that to the parser above it, which knows other options, and would ask for a required
        option before it names the misspelt one.
        """
        words = list(args if args is not None else sys.argv[1:])
        strict = self._subparsers is None and not self.accepts_unknown
        if strict:
            self._refuse_unknown_options(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if strict and unknown:
            self.error(f"unexpected {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Raise :class:`ArgumentError` in place of printing the usage and ending the process."""
        for type_name, expected in _EXPECTED.items():
            message = re.sub(rf"invalid {type_name} value: ('.*')$", rf"\1 is not {expected}", message)
        message = re.sub(r"^argument (--\S+): (\S+: )", r"\1 \2", message)  # a number's type that refused it
        raise ArgumentError(self.prog, message.removeprefix("argument "))

    def _print_message(self, message: str, file: Any = None) -> None:
        write(message, sys.stderr if file is None else file)

    def _refuse_unknown_options(self, words: list[str]) -> None:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                near = did_you_mean(name, {option: (option[2:], option) for option in known})
                self.error(f"there is no option {name}{near}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the choice, or the sub-command, that a wrong one most resembles; argparse would list all of them."""
        names = [str(choice) for choice in action.choices or ()]
        if action.choices is not None and value not in action.choices and (near := did_you_mean(str(value), names)):
            raise argparse.ArgumentError(action, f"there is no {value!r}{near}")
        super()._check_value(action, value)


def main(argv: list[str] | None = None) -> int:
    """Run ``plsc CMD …`` and return its exit code: 0 done, 1 failed, 2 usage error, 130 interrupted.

    Raises:
        SystemExit: 0 after help; 141 where whoever read standard output has left, as ``plsc --help | head -1``.
    """
    try:
        try:
            return _main(sys.argv[1:] if argv is None else argv)
        finally:
            flush()  # what is left fails here, and not in the interpreter's own end
    except OSError as error:
        return _fail("plsc", f"standard output: {error.strerror}", 1)


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        show(*_overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        from plsc import __version__

        show(f"plsc {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS) or f"; it is one of {', '.join(COMMANDS)}"
        return _fail("plsc", f"no command {name!r}{near} (see plsc --help)", 2)
    with _plain_warnings(name):
        return _run(_tool(name), name, rest)


@contextmanager
def _plain_warnings(name: str) -> Iterator[None]:
    """Show in a line what the next release does not take any more, without its place in our code."""
    whole = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        if category is FutureWarning:
            return f"plsc {name}: warning: {printable(str(message))}\n"
        return whole(message, category, *place, **line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = whole


def _tool(name: str) -> ModuleType:
    return importlib.import_module(f"plsc.tools.{name}")


def _overview() -> list[str]:
    lines = ["usage: plsc CMD [arguments]    (plsc CMD --help explains each)", ""]
    return lines + [f"  {name:<12}{_tool(name).HELP}" for name in COMMANDS]


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


def add_result_options(parser: argparse.ArgumentParser, *, replaces: str = "--json", subcommand: bool = False) -> None:
    """Declare --json and --overwrite, unless the tool has; every command has both, with one meaning.

    Args:
        parser: of a command, or of one of its sub-commands.
        replaces: the arguments whose files --overwrite replaces, for its help.
        subcommand: the outer parser has both options too, to stand before the sub-command; keep its values.
    """
    unset: dict[str, Any] = {"default": argparse.SUPPRESS} if subcommand else {}
    if "--json" not in parser._option_string_actions:
        parser.add_argument("--json", metavar="FILE", type=Path, help="write the result into FILE as JSON", **unset)
    if "--overwrite" not in parser._option_string_actions:
        text = f"replace what exists already ({replaces})"
        parser.add_argument("--overwrite", action="store_true", help=text, **unset)


def add_actions(parser: argparse.ArgumentParser, metavar: str) -> Any:
    """Make the place for a command's sub-commands, of which one must be given."""
    return parser.add_subparsers(dest="action", required=True, metavar=metavar)


def add_action(
    actions: Any,
    name: str,
    run: Callable[[argparse.Namespace], Any],
    text: str,
    *,
    replaces: str = "--json",
) -> argparse.ArgumentParser:
    """Declare a sub-command, which ``--help`` describes by the docstring of ``run``.

    Args:
        actions: of :func:`add_actions`.
        name: of the sub-command.
        run: carries it out; its result is what ``--json`` writes.
        text: its line of help, and its description where ``run`` has no docstring.
        replaces: the arguments whose files --overwrite replaces, for its help.
    """
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=text,
        description=inspect.getdoc(run) or f"{text[0].upper()}{text[1:]}.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_result_options(parser, replaces=replaces, subcommand=True)
    return parser


def add_verify_option(parser: argparse.ArgumentParser) -> None:
    """Declare --verify-key and --verify-from, for a command that reads what others made."""
    text = f"refuse what is not signed by this key: a PEM file of ed25519 (default: ${VERIFY_KEY})"
    parser.add_argument("--verify-key", metavar="PUBKEY", type=Path, help=text)
    text = f"and what was signed with a lower counter: N, or NAME=N, by commas (default: ${VERIFY_FROM})"
    parser.add_argument("--verify-from", metavar="N", help=text)


def add_detector_option(parser: "argparse._ActionsContainer", purpose: str) -> None:
    """Declare --detector, for a command that takes whole photos; ``purpose`` begins its help."""
    text = f"{purpose}: mtcnn (pip install plsc-torch[detector]), yunet ([faces]), or onnx:FILE of SCRFD or YuNet"
    parser.add_argument("--detector", metavar="NAME", help=text)


def add_provider_option(parser: "argparse._ActionsContainer") -> None:
    """Declare --provider, for a command that runs models."""
    text = "of onnxruntime, for an .onnx model; the CPU and a line that says so where it is not installed (auto)"
    parser.add_argument("--provider", choices=PROVIDERS, default="auto", help=text)


def add_sign_option(parser: argparse.ArgumentParser) -> None:
    """Declare --sign, for a command that writes what others read."""
    text = "sign what is written by this private key: a PEM file of ed25519"
    parser.add_argument("--sign", metavar="KEY", type=Path, help=text)


def add_outside_option(parser: argparse.ArgumentParser) -> None:
    """Declare --allow-outside, for a command that reads pictures of a folder or a list."""
    text = f"read pictures that links, or the paths of a list, find outside of its folder (or ${ALLOW_OUTSIDE}=1)"
    parser.add_argument("--allow-outside", action="store_true", help=text)


@contextmanager
def _reading_as(args: argparse.Namespace) -> Iterator[None]:
    """Tell readers, and the ranks that the command starts, what --verify-key and --allow-outside ask for."""
    key, counter = (getattr(args, name, None) for name in ("verify_key", "verify_from"))
    if counter is not None and key is None and not os.environ.get(VERIFY_KEY):
        raise UsageError("--verify-from needs --verify-key: a counter without a signature is anybody's")
    outside = "1" if getattr(args, "allow_outside", False) else None
    asked = {VERIFY_KEY: None if key is None else str(key.absolute()), VERIFY_FROM: counter, ALLOW_OUTSIDE: outside}
    settings = {name: value for name, value in asked.items() if value is not None}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def _run(tool: ModuleType, name: str, argv: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"plsc {name}",
        description=tool.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tool.configure(parser)
    add_result_options(parser)
    try:
        args = _parse(parser, argv, overrides=getattr(tool, "accepts_overrides", False))
        args.argv = [name, *argv]
        with _result_file(args) as write, _reading_as(args):
            result = (tool.run if hasattr(tool, "run") else args.run)(args)
            write(result)
        return int(tool.exit_code(result)) if hasattr(tool, "exit_code") else 0
    except ArgumentError as error:
        return _fail(error.prog, str(error), error.exit_code)
    except PlscError as error:
        return _fail(f"plsc {name}", str(error), error.exit_code)
    except ModuleNotFoundError as error:  # of an extra (docs/install.md)
        if error.name is None or error.name.startswith("plsc"):
            raise
        module = error.name.partition(".")[0]
        return _fail(f"plsc {name}", f"it needs {module}: pip install '{_requirement(module)}' brings it", 1)
    except KeyboardInterrupt:
        return _fail(f"plsc {name}", "interrupted", 130)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        return _fail(f"plsc {name}", f"{file}{error.strerror or error}", 1)


def _requirement(module: str) -> str:
    """What to ask pip for where a module is missing: plsc-torch, with the extra that brings it."""
    from importlib import metadata

    wanted = _DISTRIBUTIONS.get(module, module).replace("_", "-")
    with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout that is not installed
        for line in metadata.requires("plsc-torch") or ():
            requirement, _, marker = line.partition(";")
            if re.split(r"[^\w-]", requirement)[0] == wanted:
                extra = re.search(r"extra == .([\w-]+)", marker)
                return f"plsc-torch[{extra[1]}]" if extra else "plsc-torch"
    return "plsc-torch[all]"


@contextmanager
def _result_file(args: argparse.Namespace) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes the result into --json's file, which is checked now, not after hours of work."""
    if args.json is None:
        yield lambda result: None
        return
    if args.json.is_dir():
        raise UsageError(f"--json {args.json} is a folder; name a file")
    if getattr(args, "resume", None) is None:  # else the file is that of the run that goes on
        check_output(args.json, overwrite=args.overwrite)
    with new_folder(args.json.absolute().parent):
        yield lambda result: write_json(args.json, result) if result is not None else None


def _parse(parser: ArgumentParser, argv: list[str], *, overrides: bool) -> argparse.Namespace:
    """Parse ``argv``; with ``overrides``, --KEY VALUE pairs that it does not know become args.overrides."""
    if not overrides:
        return parser.parse_args(argv)
    parser.accepts_unknown = True
    options = [name for action in parser._actions for name in action.option_strings]
    own, pairs = _split_overrides(argv, set(options))
    args, unknown = parser.parse_known_args(own)
    args.overrides = pairs + unknown
    args.options = options
    return args


def launch_ranks(args: argparse.Namespace) -> None:
    """Run this command line as ``args.nproc`` ranks, the first of which prints and writes the result.

    Raises:
        SystemExit: with the code of the rank that failed, and has said why.
    """
    from plsc.parallel.launch import launch

    if code := launch(args.argv, args.nproc):
        raise SystemExit(code)


def is_launched() -> bool:
    """Return whether this process is one of several ranks already (started by ``--nproc`` or torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _fail(command: str, message: str, code: int) -> int:
    """Print the one line of a failure and return its exit code; of several ranks, one prints, and the process ends."""
    message = masked(message)  # it may quote a word of the command line
    if not is_launched():
        print_error(command, message)
        return code
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_HOLD_SECONDS)
    # The launcher ends all ranks when one has failed; its SIGTERM must not keep this line from being printed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print_error(command, message)
    # Not by the interpreter's own end: a thread that waits in gloo for other ranks would abort it when these end too.
    try:
        flush()
    finally:
        os._exit(code)


def print_error(command: str, message: str) -> None:
    """Print the one line of a failure of ``command``, and tell torchrun of it."""
    line = f"{command}: error: {' '.join(message.split())}"
    line = printable(line[:_LONGEST_LINE])  # names in messages come from files, and may have any length
    if is_launched():
        _write_error_file(line)
    note(line)


def _write_error_file(line: str) -> None:
    """Tell torchrun the reason, for the report that it prints of a failed rank (torch.distributed.elastic's format)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):
            error = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": error}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
