"""Sign models, detectors, calibrations, embedding sets and indexes, so that others can ask for --verify-key public.pem.

  openssl genpkey -algorithm ed25519 -out key.pem && chmod 600 key.pem
  openssl pkey -in key.pem -pubout -out public.pem         # for the readers
  plsc sign key.pem model.onnx det_10g.onnx calibration.json photos.emb

A folder is checked against its hashes first. The signature is stored beside what it signs (FILE.sig, or
manifest.json.sig in the folder). It covers the content, the kind, the name, and a counter: the time in seconds, or
--counter N. Readers refuse lower ones than --verify-from says. plsc checkpoint sign signs the checkpoints of a run.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.files import MANIFEST
from plsc.progress import show
from plsc.signing import CALIBRATION, VERIFY_KEY
from plsc.tools.entry import main

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HELP = "sign models, calibrations, embedding sets and indexes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("key", type=Path, metavar="KEY", help="a private key: a PEM file of ed25519")
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="what to sign: files and folders")
    parser.add_argument(
        "--counter", type=int, metavar="N", help="that rises from one to the next (the time in seconds)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Check and sign each, and print where its signature is."""
    from plsc.signing import load_private_key

    if args.counter is not None and args.counter < 0:
        raise UsageError(f"--counter {args.counter}: it has to be at least 0")
    key = load_private_key(args.key)
    os.environ.pop(VERIFY_KEY, None)  # what is signed now need not be signed before
    signatures = [_sign(path, key, args.counter) for path in args.paths]
    return {"signatures": signatures}


def _sign(path: Path, key: "Ed25519PrivateKey", counter: int | None) -> str:
    from plsc.files import read_json
    from plsc.signing import sign

    kind = None
    if path.is_dir():
        _check_folder(path)
    elif path.suffix == ".json" and path.name != "config.json":  # which goes with timm's weights
        from plsc.evaluation.calibration import read_calibration

        read_calibration(path)
        kind = CALIBRATION
    target = sign(path, key, kind, counter)
    about = read_json(target)
    show(f"{target}: {about['kind']} {about['name']}, counter {about['counter']}")
    return str(target)


def _check_folder(path: Path) -> None:
    """Refuse to sign an embedding set or an index that is not whole."""
    from plsc.embedding.embedding_set import FORMAT, EmbeddingSet
    from plsc.files import holds_manifest
    from plsc.index import Index
    from plsc.index.build import FORMAT as INDEX_FORMAT

    if holds_manifest(path, FORMAT):
        EmbeddingSet(path, verify=True)
    elif holds_manifest(path, INDEX_FORMAT):
        Index(path)
    elif (path / MANIFEST).is_file():
        raise UsageError(f"{path} is neither an embedding set nor an index; plsc checkpoint sign signs checkpoints")
    else:
        raise UsageError(f"{path} holds nothing that is signed; name a file, an embedding set or an index")


if __name__ == "__main__":
    raise SystemExit(main(["sign", *sys.argv[1:]]))
