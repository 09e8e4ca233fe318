#!/usr/bin/env bash
# obstore 0.12.1: a read of an object whose body is cut off is resumed; a listing whose body is cut off is an error.
#
# Guess before running: retry_config={"max_retries": 8} covers both, since both are GET requests that may be repeated.
# boto3 repeats the listing, and leaves an object's body to its caller.
# Seen: obstore asks for the rest of the object by a range, but for no second listing ("Error getting list response
# body"). boto3 1.44.8 is as guessed, and so the very opposite.
# Why: object_store's retries end with the headers of an answer. Only the stream of an object's bytes has its own.
# Consequence: a program that opens a prefix of thousands of objects at once fails by a single cut connection, however
# many retries it asked for. It has to repeat its listings itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet obstore==0.12.1 boto3==1.44.8
"$folder/venv/bin/python" - <<'PY'
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
from botocore.config import Config
from obstore.store import S3Store

OBJECT = bytes(range(256)) * 64
LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<Name>bucket</Name><Prefix></Prefix><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    b"<Contents><Key>a</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag>"
    b"<Size>%d</Size><StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>" % len(OBJECT)
)
asked = []  # since the last client began


class Store(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        is_listing = "list-type=2" in self.path
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        body = LISTING if is_listing else OBJECT[start:]
        asked.append("listing" if is_listing else f"object from byte {start}")
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Type", "application/xml" if is_listing else "application/octet-stream")
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{len(OBJECT) - 1}/{len(OBJECT)}")
        self.end_headers()
        if len(asked) == 1:  # the first answer ends after half of its body, as a lost connection's does
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
keys = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
store = S3Store("bucket", endpoint=url, client_options={"allow_http": True}, retry_config={"max_retries": 8}, **keys)
client = boto3.client(
    "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s",
    config=Config(retries={"max_attempts": 8}),
)
tries = {
    "obstore, read": lambda: bytes(store.get("a").bytes()) == OBJECT,
    "obstore, listing": lambda: [entry["path"] for page in store.list() for entry in page] == ["a"],
    "boto3, read": lambda: client.get_object(Bucket="bucket", Key="a")["Body"].read() == OBJECT,
    "boto3, listing": lambda: [entry["Key"] for entry in client.list_objects_v2(Bucket="bucket")["Contents"]] == ["a"],
}
seen = {}
for name, attempt in tries.items():
    asked.clear()
    try:
        seen[name] = "right" if attempt() else "wrong"
    except Exception as error:
        seen[name] = "raised"
        print("   ", f"{type(error).__name__}: {error}".partition("\n")[0][:160])
    print(f"{name}: {seen[name]}; asked for: {', '.join(asked)}")
assert seen == {"obstore, read": "right", "obstore, listing": "raised", "boto3, read": "raised", "boto3, listing": "right"}
PY
