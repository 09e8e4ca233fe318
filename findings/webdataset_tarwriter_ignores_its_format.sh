#!/usr/bin/env bash
# webdataset 1.0.2: TarWriter's format is worked out and never handed to tarfile, so that each member has a pax header.
#
# Guess before running: the default, "USTAR_FORMAT" by its source, writes 512 bytes of header a member, and
# format="GNU_FORMAT" writes GNU's.
# Seen: whatever the format, each member is preceded by a pax header of its own, for its time of change is a fraction of
# a second: 1,536 bytes of headers a member in place of 512. All formats give tars of the same size.
# Why: the constructor sets a local variable `format`, and calls tarfile.open without it.
# Consequence: a sample of a 2 KB picture and a label of a digit takes 5,632 bytes where 3,584 would do, and whoever
# scans headers alone reads three times as many blocks. Programs that read ustar alone cannot read these files.
# Round the time (TarWriter(mtime=…) with a whole number) or write by tarfile itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet webdataset==1.0.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import io
import tarfile

import webdataset


def written(**options):
    file = io.BytesIO()
    writer = webdataset.TarWriter(file, **options)
    for number in range(20):
        writer.write({"__key__": f"{number:06d}", "jpg": bytes(2048), "cls": "1"})
    writer.close()
    return file.getvalue()


def headers(content):
    """Bytes before each member's data, from where the former member's blocks end."""
    end, found = 0, set()
    for member in tarfile.open(fileobj=io.BytesIO(content)):
        found.add(member.offset_data - end)
        end = member.offset_data + -(-member.size // 512) * 512
    return found


tars = {name: written(**options) for name, options in {
    "default": {}, "ustar": {"format": "USTAR_FORMAT"}, "gnu": {"format": "GNU_FORMAT"},
}.items()}
print({name: headers(content) for name, content in tars.items()})
assert all(headers(content) == {1536} for content in tars.values())
assert len({len(content) for content in tars.values()}) == 1
whole = written(mtime=1_700_000_000)
print(headers(whole))
assert headers(whole) == {512}
print("as described")
PY
