"""What every backbone promises, whatever its family."""

import copy

import pytest
import torch
from support.backbones import trained_a_little, values

import plsc.models
from plsc.errors import UsageError
from plsc.models import vit

# Small in each family: what they share with the large ones is code, not numbers.
CHEAP = {"iresnet18", "mobilefacenet", "mobilefacenet_large", "resnet7", "resnet8", "vit_tiny"}
NAMES = (*plsc.models.names(), "timm:test_vit", "timm:test_resnet", "turned:resnet8")
RUN_NAMES = tuple(name for name in NAMES if name in CHEAP or name.startswith("timm:"))
DIM = 24


@pytest.mark.parametrize("name", ["resnet8", "timm:test_resnet"])  # the latter would take any size
def test_pictures_of_another_size_are_refused_in_one_line(name: str) -> None:
    model = plsc.models.create(name, embedding_dim=DIM, image_size=64)
    with pytest.raises(UsageError, match=f"^{name} was made for 64x64, got 48x32: create it with their image_size$"):
        model(torch.zeros(2, 3, 48, 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", plsc.models.names())
def test_every_name_maps_images_to_embeddings_at_its_own_size(name: str) -> None:
    for size in (48, 112):
        with torch.device("meta"):
            model = plsc.models.create(name, embedding_dim=DIM, image_size=size)
            answer = model.eval()(torch.empty(2, 3, size, size))
        assert (answer.shape, answer.dtype) == ((2, DIM), torch.float32)
        assert (model.name, model.embedding_dim, model.image_size) == (name, DIM, size)


@pytest.mark.first_ring("32-iresnet18", "48-mobilefacenet", "112-vit_tiny", "32-timm:test_vit")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "vit_tiny", "timm:test_vit"])
@pytest.mark.parametrize("size", [32, 48, 112])
def test_embeddings_are_finite_and_differ_between_images(name: str, size: int) -> None:
    model = trained_a_little(name, size, DIM)
    with torch.no_grad():
        answer = model(values(3, size, seed=9))
    assert answer.shape == (3, DIM)
    assert answer.isfinite().all()
    assert torch.pdist(answer).min() > 1e-4 * answer.norm(dim=1).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_NAMES)
def test_gradients_reach_every_trainable_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = plsc.models.create(name, embedding_dim=DIM, image_size=32).train()
    answer = model(values(4, 32))
    (answer * torch.randn_like(answer)).sum().backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
        else:
            assert parameter.grad is None, key
    untrained = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    assert untrained in ([], ["features.weight"], ["mask_token"])


@pytest.mark.parametrize("name", RUN_NAMES)
def test_evaluation_is_the_same_again_alone_in_a_fresh_model_and_nearly_in_bf16(name: str) -> None:
    model = trained_a_little(name, 32, DIM)
    other = plsc.models.create(name, embedding_dim=DIM, image_size=32).eval()
    other.load_state_dict(copy.deepcopy(model.state_dict()), strict=True)
    batch = values(4, 32, seed=5)
    with torch.no_grad():
        together = model(batch)
        assert torch.equal(together, model(batch))
        assert torch.equal(together, other(batch))
        alone = torch.cat([model(image[None]) for image in batch])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = model(batch)
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4 * float(together.abs().max()))
    assert torch.nn.functional.cosine_similarity(together, rounded).min() > 0.98


@pytest.mark.first_ring("resnet8", "vit_tiny", "timm:test_resnet")
@pytest.mark.parametrize("name", RUN_NAMES)
def test_bf16_autocast_trains_and_keeps_the_last_layers_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    model = plsc.models.create(name, embedding_dim=DIM, image_size=32).train()
    seen: list[torch.dtype] = []
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    last.register_forward_hook(lambda module, given, answer: seen.append(answer.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = model(values(4, 32))
    answer.square().sum().backward()
    assert answer.dtype == torch.float32
    assert seen == [torch.float32]
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_dropout_acts_in_training_only_and_has_no_keys() -> None:
    torch.manual_seed(0)
    model = plsc.models.create("iresnet18", image_size=32, dropout=0.4)
    assert list(model.state_dict()) == list(plsc.models.create("iresnet18", image_size=32).state_dict())
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(values(2, 32)), model(values(2, 32)))
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.eval()
        model.dropout.train()
        assert not torch.equal(model(values(2, 32)), model(values(2, 32)))


def test_branches_that_are_kept_make_up_for_those_that_are_dropped() -> None:
    block = vit.Block(8, drop_path=0.75)
    assert set(block._drop_path(torch.ones(200, 1, 1)).unique().tolist()) == {0.0, 4.0}


def test_masked_patches_train_the_mask_token_and_leave_evaluation_alone() -> None:
    torch.manual_seed(0)
    model = plsc.models.create("vit_tiny", embedding_dim=DIM, image_size=32, mask_ratio=0.5, drop_path=0.0)
    model.train()(values(4, 32)).square().sum().backward()
    assert model.mask_token.grad is not None
    assert model.mask_token.grad.abs().sum() > 0
    whole = plsc.models.create("vit_tiny", embedding_dim=DIM, image_size=32)
    whole.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(values(2, 32)), whole.eval()(values(2, 32)))


def test_unmasked_tokens_return_to_their_own_places() -> None:
    model = plsc.models.create("vit_tiny", embedding_dim=DIM, image_size=32, mask_ratio=0.5)
    tokens = torch.arange(2 * 16 * 256, dtype=torch.float32).view(2, 16, 256)
    order = torch.stack([torch.randperm(16), torch.randperm(16)])
    kept = torch.stack([tokens[i, order[i, :8]] for i in range(2)])
    restored = model._with_mask_tokens(kept, order[:, :8])
    for i in range(2):
        assert torch.equal(restored[i, order[i, :8]], tokens[i, order[i, :8]])
        assert torch.equal(restored[i, order[i, 8:]], model.mask_token[0].expand(8, -1))
