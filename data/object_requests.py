"""Requests to object stores (S3, Google's, Azure's) by obstore, in any process.

obstore's threads do not live on in a forked process: a request there never returns, whichever store it is of. So a
process that was forked from one that has made requests lets a process of its own make them
(:mod:`plsc.data.helper_process`).
"""

import functools
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

# Of what may pass: 5xx, connections, time-outs, and bodies that end early, whose rest obstore then asks for.
_RETRIES: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=120)}
# What obstore (0.12) says of a listing whose body ends early, which it does not ask for again.
_CUT = "Error getting list response body"
# What obstore says of a request that it cannot even make, and the mend.
_MENDS = {
    "169.254.169.254": "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true",
    "Missing AccessKeyId": "AWS_SECRET_ACCESS_KEY is set, and AWS_ACCESS_KEY_ID is not",
    "Missing SecretAccessKey": "AWS_ACCESS_KEY_ID is set, and AWS_SECRET_ACCESS_KEY is not",
    "metadata.google.internal": "no credentials: set GOOGLE_APPLICATION_CREDENTIALS",
    "BadScheme": "an endpoint of http:// needs AWS_ALLOW_HTTP=true",
    "Account must be specified": "set AZURE_STORAGE_ACCOUNT_NAME",
    "PermanentRedirect": "the bucket is of another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is of another region; set AWS_REGION",
    "incorrectly configured region": "the bucket is of another region; set AWS_REGION",
    "Forbidden": "no permission",
    "Unauthorized": "no permission",
    "NoSuchBucket": "there is no such bucket",
}
_TEXTS = (r"status code: (\d{3}[A-Za-z -]*)", r"<Code>(\w+)</Code>", r'message: "([^"]*)"', r"source: (TimedOut)\b")
_URL = re.compile(r"\w+://\S+")  # which may hold a signature

Entry = tuple[str, int, str]  # an object's key, size in bytes and version
T = TypeVar("T")


class RequestError(Exception):
    """A request failed for good; its arguments are "missing", "changed" or "failed", and why, without any secret."""


@functools.lru_cache(maxsize=64)
def open_store(bucket: str) -> Any:
    """The store of a bucket's URL; credentials, endpoint and region come from the environment."""
    from obstore.store import from_url

    # No options of the client: with any, obstore forgets those of the environment (AWS_ALLOW_HTTP, AWS_TIMEOUT, …).
    return from_url(bucket, retry_config=_RETRIES)


def entries(bucket: str, prefix: str, whole: bool) -> list[Entry]:
    """The objects below a prefix, at any depth if ``whole``, in order of key."""

    def list_them() -> list[Any]:
        store = open_store(bucket)
        if whole:
            return [meta for page in store.list(prefix or None, chunk_size=1000) for meta in page]
        return list(store.list_with_delimiter(prefix or None)["objects"])

    for again in reversed(range(_RETRIES["max_retries"])):
        try:
            found = _told(list_them)
            break
        except RequestError as error:
            if not again or _CUT not in error.args[1]:
                raise
    return sorted((meta["path"], meta["size"], meta["e_tag"] or str(meta["last_modified"])) for meta in found)


def read(bucket: str, key: str, start: int, stop: int, version: str) -> bytes:
    """Bytes [start, stop) of the version of an object that an entry names."""

    def get() -> bytes:
        # A store without ETags names no version that a request may ask for; the time of change is compared instead.
        options: Any = {"range": (start, stop)} | ({"if_match": version} if '"' in version else {})
        result = open_store(bucket).get(key, options=options)
        if '"' not in version and version != str(result.meta["last_modified"]):
            raise RequestError("changed", "")
        return bytes(result.bytes())

    content = _told(get)
    if len(content) != stop - start:
        raise RequestError("failed", "it is shorter than it was listed")
    return content


def _told(request: Callable[[], T]) -> T:
    """Make a request, and say of its failure what a person needs: obstore's text is pages of debugging."""
    from obstore.exceptions import BaseError, PreconditionError

    try:
        return request()
    except FileNotFoundError:
        raise RequestError("missing", "there is no such object") from None
    except PreconditionError:
        raise RequestError("changed", "") from None
    except (BaseError, ValueError, OSError) as error:
        raise RequestError("failed", reason(str(error))) from None


def reason(text: str) -> str:
    """What a library's text about a failed request says to a person, in a line and without any secret."""
    found = [mend for sign, mend in _MENDS.items() if sign in text][:1]
    found += [match[1].strip() for pattern in _TEXTS if (match := re.search(pattern, text))]
    first = _URL.sub("its address", text.partition("\n")[0].partition("Debug source")[0]).strip()
    return ", ".join(dict.fromkeys(found))[:200] or first[:200] or "no answer"


_user: int | None = None  # the process in which obstore's threads run, or ran before it was forked


def call(request: Callable[..., T], *args: Any) -> T:
    """Make a request of this module here, or where obstore cannot any more, in a process of its own."""
    global _user
    _user = _user or os.getpid()
    if _user == os.getpid():
        return request(*args)
    from plsc.data.helper_process import CallError, call_elsewhere

    try:
        found: T = call_elsewhere(__file__, request.__name__, *args)
    except CallError as error:
        raise RequestError(*error.args) from None
    except EOFError:
        raise RequestError("failed", "the process that makes requests has ended") from None
    return found


CALLED, FORESEEN = (entries, read), (RequestError, ValueError)  # of plsc/data/helper_process.py
