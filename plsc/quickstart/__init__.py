"""Quickstart on built-in identities: train, evaluate on unseen ones, embed, index, search, export, report."""

import shlex
from pathlib import Path

CONFIG = "avatars_quickstart"  # a shipped configuration
UNSEEN = "avatars:400x6@1000000"  # identities from number 1,000,000: no configuration trains on them


class QuickstartPaths:
    """The inputs of a quickstart, and the paths of its outputs below ``out``.

    Attributes:
        unseen: the identities that nothing is trained on.
        config: the configuration, of whose keys ``overrides`` changes some.
        run: the training run's directory.
        embeddings: the embedding set of the unseen identities.
        index: the index over it.
        model: the exported backbone.
        report: the figures as JSON; the page lies beside it.
        gallery: the folder of the store in which the unseen identities are enrolled.
        queries: pictures to search by: of people who are found, of one who is refused, of some who are not enrolled.
        calibration: which cosine holds which false-match rate, measured on the people of the gallery.
        serve_arguments: of plsc, to serve the gallery.
        serve_command: the same as a line for a shell.
    """

    def __init__(self, out: Path, unseen: str = UNSEEN, config: str = CONFIG, overrides: tuple[str, ...] = ()) -> None:
        self.out, self.unseen, self.config, self.overrides = out, unseen, config, overrides
        self.run, self.embeddings, self.index = out / "run", out / "unseen.emb", out / "unseen.idx"
        self.report, self.gallery, self.queries = out / "report.json", out / "gallery", out / "queries"
        self.calibration, self.model = out / "calibration.json", out / "model.onnx"
        self.serve_arguments = [
            "serve", "--model", str(self.model), "--store", f"{self.gallery}/",
            "--calibration", str(self.calibration), "--keep-thumbnails",
        ]  # fmt: skip
        self.serve_command = shlex.join(["plsc", *self.serve_arguments])
