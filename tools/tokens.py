"""Manage the tokens of a service: names and roles, in a file that plsc serve --tokens reads.

  plsc tokens add camera-1 --role read --file tokens.toml      prints the secret, once
  plsc tokens list --file tokens.toml
  plsc tokens remove camera-1 --file tokens.toml

read allows to search, compare and list; write also to enrol and delete persons; admin also to delete collections,
compact and take snapshots. The file holds the SHA-256 of each secret. A running service rereads it within a second.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from plsc.serve.tokens import ROLES
from plsc.tools.entry import add_result_options, main

HELP = "manage the tokens of a service"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|remove")
    add = _action(actions, "add", "make a token and print its secret")
    add.add_argument("name", metavar="NAME", help="who it is for; shown in the audit log")
    add.add_argument("--role", choices=ROLES, required=True, help="what it allows")
    _action(actions, "list", "show names and roles")
    _action(actions, "remove", "take a token away").add_argument("name", metavar="NAME")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do what was asked, print it, and return it."""
    return {"add": _add, "list": _list, "remove": _remove}[args.action](args)


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description, allow_abbrev=False)
    parser.add_argument("--file", type=Path, default=Path("tokens.toml"), metavar="FILE", help="(tokens.toml)")
    add_result_options(parser, subcommand=True)
    return parser


def _add(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.tokens import add_token

    secret = add_token(args.file, args.name, args.role)
    print(secret)
    print(f"{args.name} may {args.role}; the secret is shown this once: {args.file} has its hash", file=sys.stderr)
    return {"name": args.name, "role": args.role, "file": str(args.file)}


def _list(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.tokens import read_tokens

    tokens = read_tokens(args.file)
    for token in tokens:
        print(f"{token.name:<24}{token.role:<8}{token.created}")
    return {"tokens": [{"name": token.name, "role": token.role, "created": token.created} for token in tokens]}


def _remove(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.tokens import remove_token

    remove_token(args.file, args.name)
    print(f"{args.name} may not call any more")
    return {"name": args.name, "file": str(args.file)}


if __name__ == "__main__":
    raise SystemExit(main(["tokens", *sys.argv[1:]]))
