"""A repository of the Hugging Face hub that a folder is pushed into, in one commit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plsc.errors import PlscError, UsageError, first_line
from plsc.models.timm_weights import FILES, why_no_hub


class Repository:
    """``ORG/NAME`` on the hub that HF_ENDPOINT names, by the token of HF_TOKEN or ``hf auth login``.

    Args:
        name: ``ORG/NAME``.
        revision: a branch, made where it does not exist; None: main.

    Raises:
        UsageError: the hub does not answer, or does not know the token.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        from huggingface_hub import HfApi, constants, get_token

        self.name, self.revision = name, revision
        self._api: Any = HfApi()
        if constants.HF_HUB_OFFLINE:
            raise UsageError("HF_HUB_OFFLINE is set: nothing is pushed; unset it, or give --folder DIR alone")
        if silence := why_no_hub():
            raise UsageError(f"the Hugging Face hub does not answer ({silence}); check the network")
        if get_token() is None:
            raise UsageError("there is no token of the Hugging Face hub: set HF_TOKEN, or run `hf auth login`")
        with self._refusals():
            self._api.whoami()

    def holds_model(self) -> bool:
        """Return whether there is a model in the repository, at the revision, already."""
        with self._refusals():
            return bool(self._api.file_exists(self.name, FILES[0], revision=self.revision))

    def push(self, folder: Path, *, private: bool, message: str) -> str:
        """Create the repository where it does not exist, and commit the files of ``folder``; return the commit's URL.

        Raises:
            UsageError: the hub refuses.
        """
        from huggingface_hub import CommitOperationAdd

        files = [CommitOperationAdd(path.name, path) for path in sorted(folder.iterdir())]
        with self._refusals():
            self._api.create_repo(self.name, private=private, exist_ok=True)
            if self.revision is not None:
                self._api.create_branch(self.name, branch=self.revision, exist_ok=True)
            commit = self._api.create_commit(self.name, files, commit_message=message, revision=self.revision)
        return str(commit.commit_url)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except PlscError:
            raise
        except Exception as error:  # errors of the hub, its HTTP client and its checks of names share no base class
            code = getattr(getattr(error, "response", None), "status_code", None)
            advice = {
                401: "check the token (HF_TOKEN, `hf auth login`)",
                403: "the token has no right to write there",
            }.get(code or 0, "check the name, the token and the network")
            raise UsageError(f"the Hugging Face hub refused {self.name} ({first_line(error)}); {advice}") from None
