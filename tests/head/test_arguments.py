"""What a user would type naturally is understood, or is one clear error."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import plsc
from plsc.errors import UsageError
from plsc.losses import MARGINS
from plsc.optim import GradScaler, clip_grad_norm_


def make(**changes: object) -> plsc.ShardedHead:
    return plsc.ShardedHead(**{"dim": 8, "num_classes": 10, **changes})


@pytest.mark.parametrize("name", sorted(MARGINS))
def test_a_margins_name_gives_the_margin_with_its_own_values(name):
    assert make(margin=name).margin == MARGINS[name]()


def test_a_margin_by_name_computes_what_the_instance_does():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 8, generator=generator), torch.randint(10, (6,), generator=generator)
    assert torch.equal(make(margin="cosface")(x, y), make(margin=plsc.CosFace())(x, y))
    assert torch.equal(make()(x, y), make(margin="arcface")(x, y))


def test_storage_by_name_is_that_of_the_dtype():
    head = make(weight_dtype="bfloat16", momentum_dtype="int8")
    assert (head.weight.dtype, head.momentum_dtype) == (torch.bfloat16, torch.int8)
    assert make(momentum_dtype="none").momentum_dtype is None


WRONG = [
    ({"margin": "ArcFace"}, r"no margin 'ArcFace': give one of adaface, arcface, .*, sphereface"),
    ({"margin": "arc"}, r"no margin 'arc': give one of"),
    ({"margin": plsc.CosFace}, r"the class CosFace; give an instance: plsc\.CosFace\(\)"),
    ({"margin": 0.5}, r"no margin 0\.5: give one of"),
    ({"weight_dtype": "bf16"}, "weight_dtype must be one of float64, float32, bfloat16, not 'bf16'"),
    ({"weight_dtype": torch.float16}, r"weight_dtype must be .*, not torch\.float16"),
    ({"weight_dtype": None}, "weight_dtype must be .*, not None"),
    ({"momentum_dtype": torch.float16}, r"momentum_dtype must be .*int8, none, not torch\.float16"),
    ({"momentum_dtype": 0.9}, r"momentum_dtype must be .*, not 0\.9"),
    ({"update": "later"}, 'update must be "fused" or "autograd", not \'later\''),
    ({"mesh": "cuda"}, r"mesh must be what plsc\.init\(\) returns, not 'cuda'"),
    ({"mesh": torch.device("cpu")}, r"mesh must be what plsc\.init\(\) returns"),
    ({"dim": plsc.ArcFace()}, "dim must be an integer, not ArcFace"),
    ({"dim": 8.0}, r"dim must be an integer, not 8\.0"),
    ({"num_classes": [1, 2]}, "num_classes must be an integer"),
    ({"num_classes": True}, "num_classes must be an integer"),
    ({"centers": 1.5}, "centers must be an integer"),
    ({"chunk_classes": 0}, "chunk_classes must be at least 1"),
    ({"seed": "a"}, "seed must be an integer"),
    ({"sample_rate": "0.1"}, "sample_rate is a share of the classes from 0 to 1, not '0.1'"),
    ({"dim": 0}, "dim must be at least 1"),
    ({"num_classes": 0}, "num_classes must be at least 1"),
    ({"centers": 0}, "centers must be at least 1"),
    ({"sample_rate": 1.5}, "sample_rate is a share of the classes from 0 to 1, not 1.5"),
    ({"sample_rate": float("nan")}, "sample_rate is a share of the classes from 0 to 1, not nan"),
    ({"placement": "cpu"}, "placement is .*, not 'cpu'"),
    ({"backend": "cuda"}, "head backend 'cuda' does not exist"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_a_wrong_argument_of_the_head_is_one_clear_error(changes, message):
    with pytest.raises(UsageError, match=message) as error:
        make(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("optimizer", [plsc.HeadSGD, plsc.HeadAdamW])
@pytest.mark.parametrize(
    "value", [nn.Linear(2, 2), make().parameters(), [make()], "head"], ids=lambda v: type(v).__name__
)
def test_an_optimizer_of_the_head_takes_the_head_alone(optimizer, value):
    message = (
        rf"plsc\.{optimizer.__name__} takes the plsc\.ShardedHead itself, not a {type(value).__name__}; .*torch\.optim"
    )
    with pytest.raises(UsageError, match=message):
        optimizer(value)


@pytest.mark.parametrize(
    ("optimizer", "changes", "message"),
    [
        (plsc.HeadSGD, {"lr": "0.1"}, "lr must be a number, not '0.1'"),
        (plsc.HeadSGD, {"lr": float("nan")}, "lr must not be negative"),
        (plsc.HeadSGD, {"momentum": None}, "momentum must be a number"),
        (plsc.HeadSGD, {"rounding": "none"}, "rounding must be"),
        (plsc.HeadAdamW, {"betas": 0.9}, "betas are two numbers"),
        (plsc.HeadAdamW, {"betas": (0.9, "x")}, "betas must be a number"),
        (plsc.HeadAdamW, {"eps": "1"}, "eps must be a number"),
    ],
)
def test_a_wrong_hyperparameter_is_one_clear_error(optimizer, changes, message):
    with pytest.raises(UsageError, match=message):
        optimizer(make(), **changes)


@pytest.mark.parametrize("margin", [getattr(plsc, kind.__name__) for kind in MARGINS.values()])
def test_every_number_of_a_margin_has_to_be_one(margin):
    numbers = [name for name, value in inspect.signature(margin).parameters.items() if type(value.default) is float]
    for name in numbers:
        with pytest.raises(UsageError, match=f"{margin.__name__}'s {name} must be a number, not '0.5'"):
            margin(**{name: "0.5"})


@pytest.mark.parametrize(
    ("embeddings", "labels"),
    [([[1.0] * 8], [1]), (np.zeros((2, 8), np.float32), torch.zeros(2).long()), (torch.zeros(2, 8), [1, 2])],
    ids=["lists", "numpy", "list of labels"],
)
def test_what_is_no_tensor_is_named(embeddings, labels):
    with pytest.raises(UsageError, match=r"the head takes tensors of embeddings \(b, 8\) and labels \(b,\), not "):
        make()(embeddings, labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(2, 2), "cpu"), r"mesh must be what plsc\.init\(\) returns, not 'cpu'"),
        (("resnet", plsc.init()), r"takes a torch\.nn\.Module, not 'resnet'"),
    ],
)
def test_data_parallel_takes_a_module_and_a_mesh(arguments, message):
    with pytest.raises(UsageError, match=message):
        plsc.data_parallel(*arguments)


def test_clipping_and_scaling_take_the_heads_optimizer():
    head, net = make(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for wrong in (head, optimizer):
        message = f"give the head's optimizer, .* not a {type(wrong).__name__}"
        with pytest.raises(UsageError, match=message):
            clip_grad_norm_(net.parameters(), 5.0, wrong)
        with pytest.raises(UsageError, match=message):
            GradScaler(plsc.init()).unscale_all(optimizer, wrong)


def test_a_wrong_device_is_named():
    with pytest.raises(UsageError, match="there is no device 'gpu'"):
        plsc.init("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch finds no GPU for device 'cuda'"):
            plsc.init("cuda")
