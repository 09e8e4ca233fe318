"""Push a trained backbone to the Hugging Face hub, with a model card written from what was measured.

The repository gets model.safetensors, config.json (with the preprocessing contract), model.onnx and README.md, in one
commit. Models of timm are stored so that timm loads them without plsc. --report takes what `plsc eval --json` and
`plsc eval --calibration` wrote; the card has their figures, and the keys of RUN's config.toml, but no path of this
machine: of data the last name is told, or the words of --data. The token is HF_TOKEN's, or `hf auth login`'s.

  plsc eval runs/faces --data unseen/ --json unseen.json --calibration faces.calibration.json
  plsc push runs/faces --folder pushed/ --report unseen.json           # look at it first; nothing leaves this machine
  plsc push runs/faces --repo ORG/NAME --report unseen.json faces.calibration.json --license apache-2.0
  plsc eval hf-hub:ORG/NAME --data others/                             # every command that takes a model takes it
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.files import atomic_folder
from plsc.progress import show
from plsc.tools.entry import add_result_options, add_sign_option, add_verify_option

if TYPE_CHECKING:
    from plsc.hub import CardFacts
    from plsc.models import Backbone

HELP = "push a trained backbone to the Hugging Face hub, with a model card"
EXAMPLE = "ORG/NAME"  # in the card of a folder for no repository


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("model", metavar="RUN", help="a run directory, or a .safetensors file")
    add("--best", action="store_true", help="of RUN, the weights of the best evaluation")
    add("--repo", metavar="ORG/NAME", help="the repository; it is created where it does not exist")
    add("--folder", type=Path, metavar="DIR", help="write the files here, and push nothing")
    add("--private", action="store_true", help="create the repository for its members alone")
    add("--revision", metavar="BRANCH", help="the branch to commit to (main)")
    add("--message", metavar="TEXT", help="of the commit")
    add("--report", nargs="+", type=Path, default=[], metavar="JSON", help="what plsc eval wrote, for the card")
    add("--license", metavar="ID", help="of the weights, as the hub names it: apache-2.0, cc-by-nc-4.0, …")
    add("--data", metavar="TEXT", help="what the weights were trained on (default: the last name of data.train)")
    add_sign_option(parser)
    add_verify_option(parser)
    add_result_options(parser, replaces="DIR, a model in the repository, --json")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the repository's files, push them, and print where they are."""
    from plsc.embedding.embedder import model_file
    from plsc.hub import CardFacts, Repository, check_folder, check_repository, embeddings_contract, read_measurements
    from plsc.models import load_model

    if args.repo is None and args.folder is None:
        raise UsageError("give --repo ORG/NAME to push to, or --folder DIR to write into")
    name = EXAMPLE if args.repo is None else check_repository(args.repo)
    repository = None
    if args.folder is not None:
        check_folder(args.folder, overwrite=args.overwrite)
    else:
        repository = Repository(name, args.revision)
        if not args.overwrite and repository.holds_model():
            raise UsageError(f"{name} has a model already: give --overwrite to commit a new one over it")
    model = load_model(model_file(args.model, best=args.best))
    measurements = read_measurements(args.report, embeddings_contract(model))
    source = Path(args.model)
    facts = CardFacts(name, measurements, args.license, args.data, source if source.is_dir() else None)
    if repository is None:
        with atomic_folder(args.folder) as folder:
            result = _write(args, model, folder, facts)
        show(f"{args.folder}: {', '.join(result['files'])}; nothing was pushed")
        return {"folder": str(args.folder), **result}
    with tempfile.TemporaryDirectory(prefix="plsc-push-") as temporary:
        folder = Path(temporary)
        result = _write(args, model, folder, facts)
        message = args.message or f"Push {model.name} by plsc"
        url = repository.push(folder, private=args.private, message=message)
    show(f"{url}: {', '.join(result['files'])}", f'plsc.load_model("hf-hub:{name}") loads it')
    return {"repository": name, "commit": url, **result}


def _write(args: argparse.Namespace, model: "Backbone", folder: Path, facts: "CardFacts") -> dict[str, Any]:
    from plsc.hub import write_folder
    from plsc.signing import load_private_key

    return write_folder(model, folder, facts, key=None if args.sign is None else load_private_key(args.sign))
