"""Mistakes at the command line: each is one line that names the thing and the mend, with its exit code."""

import logging
from pathlib import Path

import pytest
from PIL import Image

from plsc.tools.entry import main

SMALL = "avatars_quickstart"
# (arguments, exit code, what the line says). The folder that they run in is made by `here`.
MISTAKES = [
    # words
    ("data chekc photos", 2, "there is no 'chekc'; did you mean check?"),
    ("index serach x", 2, "there is no 'serach'; did you mean search?"),
    ("gallery compakt x", 2, "there is no 'compakt'; did you mean compact?"),
    ("checkpoint verfy x", 2, "there is no 'verfy'; did you mean verify?"),
    ("bench haed", 2, "there is no 'haed'; did you mean head?"),
    ("tokens add cam --role searcher --file t.toml", 2, "--role: there is no 'searcher'; did you mean search?"),
    ("serve --model m.onnx --store s --thresold 1", 2, "there is no option --thresold; did you mean --threshold?"),
    ("embed m.onnx --out x.emb --precison fp32", 2, "there is no option --precison; did you mean --precision?"),
    (
        "train fine_tunes",
        2,
        "fine_tunes does not exist: name a TOML file, or a shipped configuration; did you mean fine",
    ),
    ("bench head --contestants pfc", 2, "--contestants pfc: there is no such head; choose from floor, plsc, "),
    ("bench train --contestants pfc", 2, "--contestants pfc: there is no such loop; choose from plsc, "),
    ("bench search --contestants annoy", 2, "--contestants annoy: there is no such search; choose from plsc-int8, "),
    ("bench train --backbone r18", 2, "--backbone r18: choose from "),
    ("bench serve --form text", 2, "invalid choice: 'text'"),
    ("doctor --only lungs", 2, "invalid choice: 'lungs'"),
    (f"plan {SMALL} --device abacus", 2, "--device abacus: it is one of b200, h200, h100, "),
    (
        f"plan {SMALL} --strategy fspd",
        2,
        '"fspd" is not one of ddp, zero1, zero2, fsdp, hsdp, auto; did you mean fsdp?',
    ),
    # keys and values of a configuration
    (f"plan {SMALL} --head.wieght_dtype bfloat16", 2, "no key head.wieght_dtype; did you mean head.weight_dtype?"),
    ("train typo.toml", 2, "typo.toml: there is no key optim.leraning_rate; did you mean optim.lr?"),
    (f"train {SMALL} --data.batchsize 3", 2, "no key data.batchsize; did you mean data.batch_size?"),
    (f"train {SMALL} --nprocs 3", 2, "there is no key nprocs; did you mean --nproc?"),
    (f"train {SMALL} --optim.lr", 2, "--optim.lr needs a value: a number above 0"),
    (f"train {SMALL} --optim.lr fast", 2, 'optim.lr = "fast" is a string; it takes a number above 0'),
    (f"train {SMALL} --optim.lr -1", 2, "optim.lr = -1.0 is out of range; it takes a number above 0"),
    (f"train {SMALL} --data.batch_size 12GB", 2, 'data.batch_size = "12GB" is a string; it takes an integer'),
    (f"train {SMALL} --epochs 3 --steps 4", 2, "epochs and steps are both given; keep one"),
    (f"train {SMALL} --backbone resnet50", 2, 'backbone = "resnet50" does not exist; did you mean iresnet50?'),
    (f"train {SMALL} --head.margin arcfase", 2, "did you mean arcface?"),
    ("train", 2, "no configuration: plsc train CONFIG.toml"),
    (f"train {SMALL} --epochs three", 2, 'epochs = "three" is a string; it takes an integer'),
    (f"train {SMALL} --out /proc/here", 2, "cannot write into /proc/here"),
    (f"train {SMALL} --resume /no/where", 2, "/no/where is no checkpoint"),
    (f"train {SMALL} extra", 2, "'extra' belongs to no key; keys are given as --KEY VALUE"),
    (f"train {SMALL} --list-keys leraning_rate", 2, "did you mean optim.lr?"),
    # files
    ("train photos", 2, "cannot read photos: it is a folder; name a TOML file"),
    ("train prose.toml", 2, "prose.toml is not TOML: "),
    ("train nowhere.toml", 2, "nowhere.toml does not exist: name a TOML file"),
    (f"train {SMALL} --data.train nowhere", 2, "there is no nowhere; images come from a folder per identity"),
    (f"train {SMALL} --init_weights nowhere.pt --out run", 2, "nowhere.pt does not exist; name a model file"),
    (f"train {SMALL} --eval.sets nowhere.bin --out run", 2, "there is no nowhere.bin; it would be a .bin of"),
    ("data stats empty", 2, "empty has no image in any sub-folder; give each identity a folder of its own"),
    ("data stats broken.rec", 1, "broken.rec holds no image record; use another copy"),
    ("data convert photos photos", 2, "photos holds the source photos; name another output"),
    ("eval nowhere --data photos", 2, "nowhere does not exist; name a run directory or a model file"),
    ("eval empty --data photos", 2, "empty is no run directory: it has no model.safetensors"),
    ("export broken.onnx --format onnx --out x.onnx", 2, "is ONNX already: give --precision fp16 or int8, or --with"),
    ("export broken.onnx --format onnx --out x.onnx --precision fp16", 1, "is truncated, or no ONNX file"),
    ("embed broken.onnx --data photos --out x.emb", 1, "broken.onnx is truncated, or no ONNX file"),
    ("index build photos --out x.idx", 1, "photos is no plsc embedding set: it has no manifest.json"),
    ("index search empty --query photos/a/0.png", 1, "empty is no plsc index: it has no manifest.json"),
    ("gallery check empty", 2, "empty holds no gallery: name the folder that plsc serve --store was given"),
    ("checkpoint info empty", 2, "empty holds no finished checkpoint; name a checkpoint, a run, or"),
    ("tokens list --file no.toml", 2, "there is no token file no.toml; make it with plsc tokens add"),
    ("serve --model broken.onnx --store s --calibration no.json", 1, "no.json does not exist; `plsc eval MODEL --data"),
    ("bench head --partial-fc nowhere", 2, "--partial-fc nowhere: there is no partial_fc_v2.py in it"),
    ("bench train --arcface-torch nowhere", 2, "--arcface-torch nowhere: there is no partial_fc_v2.py in it"),
    ("bench train --baselines nowhere.py", 2, "--baselines nowhere.py: there is no such file"),
    (f"plan {SMALL} --data.train nowhere.rec", 2, "nowhere.rec is not here to count its classes; give --classes C"),
    # amounts
    (f"train {SMALL} --nproc two", 2, "--nproc: 'two' is not a whole number"),
    (f"train {SMALL} --nproc 0", 2, "--nproc 0: at least one rank is needed"),
    (f"plan {SMALL} --classes 2MB", 2, "--classes: '2MB' is no count; write 2000000, 2M, 500k or 2e6"),
    (f"plan {SMALL} --gpu-memory 80", 2, "--gpu-memory '80' is less than a mebibyte; write the unit too, as in 80GB"),
    (f"plan {SMALL} --classes 10 --link fast", 2, "--link fast: it is nvlink, pcie, infiniband, ethernet, or GB/s"),
    (f"train {SMALL} --between 5G --dry-run", 2, "--between 5G: it is nvlink, pcie, infiniband, ethernet, or GB/s"),
    ("serve --model m.onnx --store s --threshold high", 2, "--threshold: 'high' is not a number"),
    ("serve --model m.onnx --store s --port 99999", 2, "--port 99999: a port lies between 0 and 65535"),
    ("eval broken.onnx --data photos --batch-size 0", 2, "--batch-size 0: it must be at least 1"),
    (f"plan {SMALL} --classes 0", 2, "--classes 0: at least one is needed"),
    (f"plan {SMALL} --images many", 2, "--images: 'many' is no count"),
    (f"plan {SMALL} --gpus 0", 2, "--gpus 0: at least one is needed"),
    (f"plan {SMALL} --gpu-memory much", 2, "write 80GB (as sold), 78GiB or 84e9 (bytes)"),
    (f"plan {SMALL} --classes 10000000000", 1, "do not fit on 1 GPU of 78.0 GiB: stored as bfloat16"),
    ("bench head --classes 0", 2, "--classes 0: it must be at least 1"),
    ("bench head --sample-rate 1", 2, "--sample-rate 1: it must lie between 0 and 1"),
    ("bench head --limit 0", 2, "--limit 0: it must be more than 0"),
    ("bench search --batch 2000", 2, "--batch 2000: it must lie between 1 and 1024"),
    ("bench serve --rounds x", 2, "--rounds: 'x' is not a whole number"),
    ("doctor --limit 0", 2, "--limit 0: it must be more than 0"),
    # what does not go together
    ("eval broken.onnx", 2, "nothing to evaluate on: give --pairs X.bin, --data DIR or --ijb DIR"),
    (f"train {SMALL} --nnodes 2", 2, "--nnodes 2 needs --master-addr: the first machine's address"),
    (f"train {SMALL} --head_ranks 3 --nproc 2", 2, "head_ranks = 3 does not divide the number of ranks, 2; give 1, 2"),
    (
        f"train {SMALL} --nproc 3 --averaging.name local_sgd --averaging.group_ranks 2",
        2,
        "averaging.group_ranks = 2 does not divide the number of ranks, 3",
    ),
    (f"train {SMALL} --parallel.tp 2", 2, "and backbone = 'resnet7' has none that it knows: set tp = 1, or take vit_*"),
    ("serve --model broken.onnx --store s --host 0.0.0.0", 2, "make some with plsc tokens add NAME --role search"),
    ("bench head --contestants partial-fc", 2, "PartialFC_V2 needs --partial-fc FOLDER"),
    ("bench train --contestants arcface-torch", 2, "PartialFC_V2 needs --arcface-torch FOLDER"),
    (f"plan {SMALL} --gpus 8 --strategy hsdp --shard-ranks 3", 2, "shard_ranks"),
    (f"plan {SMALL} --gpus 8 --strategy ddp --offload", 2, "parallel.offload"),
    (f"plan {SMALL} --gpus 8 --strategy fsdp --comm-hook dgc", 2, "parallel.comm_hook"),
    (f"train {SMALL} --json empty", 2, "--json empty is a folder; name a file"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos of two people, an empty folder, and files that are not what their names say."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name in ("a", "b"):
        Path("photos", name).mkdir(parents=True)
        Image.new("RGB", (112, 112), "red" if name == "a" else "blue").save(f"photos/{name}/0.png")
    Path("typo.toml").write_text("[optim]\nleraning_rate = 1\n")
    Path("prose.toml").write_text("hello world\n")
    Path("broken.onnx").write_bytes(b"nonsense")
    Path("broken.rec").write_bytes(b"nonsense")
    return tmp_path


@pytest.mark.parametrize(("words", "code", "says"), MISTAKES, ids=[words for words, _, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_mend(
    words: str, code: int, says: str, here: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = sorted(here.rglob("*"))
    with caplog.at_level(logging.WARNING):
        assert main(words.split()) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"plsc {words.split()[0]}")
    assert ": error: " in captured.err
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert caplog.text == ""
    assert sorted(here.rglob("*")) == before  # nothing is left behind
