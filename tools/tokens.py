"""Manage the tokens of a service: who may call, and what each may do, in a file that plsc serve --tokens reads.

  plsc tokens add camera-1 --role search --collections staff --file tokens.toml      prints the secret, once
  plsc tokens change camera-1 --collections staff guests --file tokens.toml          keeps the secret
  plsc tokens list --file tokens.toml
  plsc tokens remove camera-1 --file tokens.toml

search allows to search and compare by pictures; read also to list persons; write also to enrol, change and delete
them; admin also to delete collections, compact, take snapshots, and both rights. --allow vectors lets a token send
vectors and see exact scores, which are rounded without it; --allow embeddings lets it get the embeddings of pictures.
With either, stored templates can be computed. The file holds the SHA-256 of each secret, as the last line of a token;
a running service rereads it within a second.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plsc.progress import note, show
from plsc.serve.access import RIGHTS, ROLES
from plsc.tools.entry import add_action, add_actions

HELP = "manage the tokens of a service"
_OPTIONS = ("role", "allow", "collections", "rates", "expires")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = add_actions(parser, "add|change|list|remove")
    adding = add_action(actions, "add", _add, "make a token and print its secret")
    changing = add_action(actions, "change", _change, "change what a token may do; what is not given stays")
    listing = add_action(actions, "list", _list, "show names and what they may do")
    removing = add_action(actions, "remove", _remove, "take a token away")
    for action in (adding, changing, listing, removing):
        action.add_argument("--file", type=Path, default=Path("tokens.toml"), metavar="FILE", help="(tokens.toml)")
    adding.add_argument("name", metavar="NAME", help="who it is for; shown in the audit log")
    changing.add_argument("name", metavar="NAME")
    removing.add_argument("name", metavar="NAME")
    allowed = f"besides the role: {', '.join(RIGHTS)} (none)"
    rates = "requests, searches, embeddings or writes a second, or N/m, N/h (those of plsc serve --rate-limit)"
    for action in (adding, changing):
        add = action.add_argument
        add("--role", choices=ROLES, required=action is adding, help="what it allows")
        add("--allow", nargs="*", choices=RIGHTS, metavar="RIGHT", help=allowed)
        add("--collections", nargs="+", metavar="NAME", help="may know of these alone; * is all (all)")
        add("--rate", nargs="*", dest="rates", metavar="KIND=N", help=rates)
        add("--expires", metavar="DATE", help='refused from then on, such as 2027-01-01; "never" (never)')


def _add(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.tokens import add_token

    secret = add_token(args.file, args.name, **_given(args))
    show(secret)
    note(f"{args.name} may {args.role}; the secret is shown this once: {args.file} has its hash")
    return {"name": args.name, "role": args.role, "file": str(args.file)}


def _change(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.tokens import change_token

    token = change_token(args.file, args.name, **_given(args))
    show(_line(token))
    return {**_described(token), "file": str(args.file)}


def _list(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.tokens import read_tokens

    tokens = read_tokens(args.file, in_any_order=True)
    for token in tokens:
        show(_line(token))
    return {"tokens": [_described(token) for token in tokens]}


def _remove(args: argparse.Namespace) -> dict[str, Any]:
    from plsc.serve.tokens import remove_token

    remove_token(args.file, args.name)
    show(f"{args.name} may not call any more")
    return {"name": args.name, "file": str(args.file)}


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The attributes of a token that the command line gives."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    if given.get("collections") == ["*"]:
        given["collections"] = None
    if given.get("expires") == "never":
        given["expires"] = None
    return given


def _line(token: Any) -> str:
    seen = "all collections" if token.collections is None else " ".join(token.collections)
    rights: Sequence[str] = token.allow or ("-",)
    more = [*token.rates, *([] if token.expires is None else [f"until {token.expires}"])]
    return f"{token.name:<24}{token.role:<8}{token.created}  {' '.join(rights):<20}  {'  '.join([seen, *more])}"


def _described(token: Any) -> dict[str, Any]:
    names = ("name", "role", "created", "allow", "collections", "rates", "expires")
    return {name: getattr(token, name) for name in names}
