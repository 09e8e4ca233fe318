#!/usr/bin/env bash
# obstore 0.12.1: any client_options given to from_url make it forget the client options of the environment.
#
# Guess before running: AWS_ALLOW_HTTP=true of the environment holds as long as client_options does not name allow_http,
# as credentials, endpoint and region of the environment do when config is given.
# Seen: a store of one's own at http://127.0.0.1 (MinIO, moto, Ceph) is listed with the environment alone. With
# client_options={"user_agent": "me"}, and even with {}, each request fails by "builder error … BadScheme".
# With allow_http repeated in client_options it works again.
# Consequence: a program that sets a time limit or a user agent breaks for those who configure their store by
# AWS_ALLOW_HTTP, AWS_TIMEOUT or AWS_PROXY_URL, and the error names neither. Leave client_options out, or repeat all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet obstore==0.12.1
"$folder/venv/bin/python" - <<'PY'
import datetime
import http.server
import os
import threading

import obstore
from obstore.store import from_url

LISTING = b"""<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount>
<IsTruncated>false</IsTruncated><Contents><Key>x</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>
<ETag>"a"</ETag><Size>1</Size></Contents></ListBucketResult>"""


class Store(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(LISTING)))
        self.end_headers()
        self.wfile.write(LISTING)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ.update(
    AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}",
    AWS_ALLOW_HTTP="true",
    AWS_ACCESS_KEY_ID="key",
    AWS_SECRET_ACCESS_KEY="secret",
    AWS_REGION="us-east-1",
)
once = {"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=1)}


def listed(**options):
    try:
        return [entry["path"] for entry in obstore.list(from_url("s3://bucket", retry_config=once, **options)).collect()]
    except obstore.exceptions.BaseError as error:
        return "BadScheme" if "BadScheme" in str(error) else str(error)


assert listed() == ["x"], listed()
assert listed(client_options={"user_agent": "me"}) == "BadScheme", listed(client_options={"user_agent": "me"})
assert listed(client_options={}) == "BadScheme", listed(client_options={})
assert listed(client_options={"user_agent": "me", "allow_http": True}) == ["x"]
assert listed(config={"virtual_hosted_style_request": False}) == ["x"]
print("as described")
PY
