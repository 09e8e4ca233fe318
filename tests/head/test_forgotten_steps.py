"""Training loops that would train nothing: each is one error that names the fix, and what only looks alike is not."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import plsc
from plsc.errors import UsageError
from plsc.head.pending import MOST_WAITING

IMAGES, DIM, CLASSES = 12, 8, 20


def batch(seed: int = 0, images: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, IMAGES, generator=generator), torch.randint(CLASSES, (images,), generator=generator)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(IMAGES, DIM)


@pytest.fixture
def head() -> plsc.ShardedHead:
    return plsc.ShardedHead(DIM, CLASSES, plsc.init())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def train(net, head, optimizers, steps=6, accumulate=1):
    for step in range(steps):
        for part in range(accumulate):
            images, labels = batch(step * accumulate + part)
            head(net(images), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda net, head: torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1),
        lambda net, head: torch.optim.SGD([{"params": net.parameters()}, {"params": head.parameters()}], lr=0.1),
        lambda net, head: torch.optim.AdamW([{"params": head.parameters()}, {"params": net.parameters()}]),
        lambda net, head: torch.optim.SGD(nn.ModuleList([net, head]).parameters(), lr=0.1, momentum=0.9),
    ],
    ids=["one list", "arcface_torch", "AdamW", "one module"],
)
def test_a_torch_optimizer_over_a_fused_head_is_refused_at_its_first_step(net, head, optimizer):
    before = [weight.detach().clone() for weight in net.parameters()]
    with pytest.raises(UsageError, match=r'head\.weight is a parameter of \w+.*plsc\.HeadSGD\(head\).*"autograd"'):
        train(net, head, [optimizer(net, head)])
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_under_a_grad_scaler_it_is_refused_too(net, head):
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(head(net(batch()[0]), batch()[1])).backward()
    with pytest.raises(UsageError, match=r"head\.weight is a parameter of SGD"):
        scaler.step(optimizer)


def test_a_torch_optimizer_that_also_holds_the_weight_beside_the_heads_own_is_harmless(net, head):
    everything = nn.ModuleList([net, head])
    before = head.weight.detach().clone()
    train(net, head, [sgd(everything), plsc.HeadSGD(head, lr=0.1)])
    assert not torch.equal(head.weight.detach(), before)


def test_a_head_that_stays_as_it_is_may_lie_in_any_optimizer(net, head):
    train(net, head, [sgd(net), plsc.HeadSGD(head, lr=0.1)])
    gc.collect()
    before = head.weight.detach().clone()
    train(net, head.eval(), [sgd(nn.ModuleList([net, head]))])
    assert torch.equal(head.weight.detach(), before)


def test_update_autograd_is_for_any_torch_optimizer(net):
    head = plsc.ShardedHead(DIM, CLASSES, update="autograd")
    before = head.weight.detach().clone()
    train(net, head, [torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)])
    assert (head.weight.detach() != before).any(dim=1).all()


@pytest.mark.parametrize("trained", [True, False], ids=["backbone trained", "backbone frozen"])
def test_a_head_without_an_optimizer_is_refused_at_the_second_batch(net, head, trained):
    with pytest.raises(UsageError, match=r"the head has no optimizer.*plsc\.HeadSGD\(head\).*head\.eval\(\)"):
        train(net, head, [sgd(net)] if trained else [])
    assert len(head.softmax.pending.batches) == 1


def test_an_optimizer_that_is_gone_counts_as_none(net, head):
    train(net, head, [sgd(net), plsc.HeadSGD(head, lr=0.1)])
    gc.collect()
    with pytest.raises(UsageError, match="the head has no optimizer"):
        train(net, head, [sgd(net)])


def test_a_forgotten_step_of_the_heads_optimizer_is_refused_at_the_next_batch(net, head):
    head_optimizer = plsc.HeadSGD(head, lr=0.1)
    with pytest.raises(UsageError, match=r"SGD\.step\(\) was called, but the head's HeadSGD\.step\(\) was not"):
        train(net, head, [sgd(net)])
    head_optimizer.step()  # the message's fix
    train(net, head, [sgd(net), head_optimizer])


def test_forgetting_is_noticed_after_good_steps_as_well(net, head):
    head_optimizer = plsc.HeadAdamW(head)
    train(net, head, [sgd(net), head_optimizer])
    with pytest.raises(UsageError, match=r"HeadAdamW\.step\(\) was not"):
        train(net, head, [sgd(net)])


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["net first", "head first"])
def test_accumulation_of_batches_before_one_step_of_both_is_legal(net, head, order):
    train(net, head, [sgd(net), plsc.HeadSGD(head, lr=0.1)][order], accumulate=5)


def test_a_frozen_backbone_needs_no_optimizer_beside_the_heads(net, head):
    head_optimizer = plsc.HeadSGD(head, lr=0.1)
    train(net.requires_grad_(False), head, [head_optimizer], accumulate=3)
    assert head_optimizer.steps == 6


def test_two_heads_on_one_backbone_may_take_turns(net, head):
    second = plsc.ShardedHead(DIM, CLASSES, seed=1)
    optimizers = {head: plsc.HeadSGD(head, lr=0.1), second: plsc.HeadSGD(second, lr=0.1)}
    backbone = sgd(net)
    for step in range(6):
        turn = (head, second)[step % 2]
        turn(net(batch(step)[0]), batch(step)[1]).backward()
        backbone.step()
        optimizers[turn].step()
    for _ in range(3):  # one head accumulates, the other steps each time
        head(net(batch()[0]), batch()[1]).backward()
        second(net(batch()[0]), batch()[1]).backward()
        optimizers[second].step()
    optimizers[head].step()
    assert optimizers[head].steps == 4


def test_other_optimizers_are_no_concern_of_a_head_that_nothing_waits_for(net, head):
    other = nn.Linear(3, 3)
    optimizer = sgd(other)
    for _ in range(3):
        other(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    train(net, head, [sgd(net), optimizer, plsc.HeadSGD(head, lr=0.1)])


@pytest.mark.parametrize("margin", ["arcface", "adaface", "curricularface"])
@pytest.mark.parametrize("kind", ["eval", "no_grad", "inference", "loss alone"])
def test_evaluation_is_harmless_with_no_optimizer(net, kind, margin):
    head = plsc.ShardedHead(DIM, CLASSES, margin=margin)
    if kind == "eval":
        head.eval()
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with contexts.get(kind, torch.enable_grad)():
        for step in range(3):
            loss = head(net(batch(step)[0]), batch(step)[1])
            if kind == "eval":
                loss.backward()
                sgd(net).step()
    assert torch.isfinite(loss)
    assert head.softmax.pending.batches == []
    train(net, head.train(), [sgd(net), plsc.HeadSGD(head, lr=0.1)])


def test_evaluation_while_a_batch_waits_is_harmless(net, head):
    """A validation loss between backward() and the steps, and after the backbone's."""
    head_optimizer, optimizer = plsc.HeadSGD(head, lr=0.1), sgd(net)
    head(net(batch()[0]), batch()[1]).backward()
    optimizer.step()
    with torch.no_grad():
        head(net(batch(1)[0]), batch(1)[1])
    head_optimizer.step()
    assert head_optimizer.steps == 1


def test_zero_grad_forgets_a_batch_that_is_not_wanted(net, head):
    head_optimizer, optimizer = plsc.HeadSGD(head, lr=0.1), sgd(net)
    for _ in range(3):
        head(net(batch()[0]), batch()[1]).backward()
        optimizer.step()
        head_optimizer.zero_grad()
    assert head_optimizer.steps == 0


@pytest.mark.slow
def test_more_batches_than_anybody_accumulates_are_refused(net, head):
    plsc.HeadSGD(head, lr=0.1)
    optimizer = plsc.HeadSGD(head, lr=0.1)
    images, labels = batch(images=1)
    embeddings = net(images).detach()
    for _ in range(MOST_WAITING):
        head(embeddings, labels).backward()
    with pytest.raises(UsageError, match=r"1,024 batches went through backward\(\) without a step of the head"):
        head(embeddings, labels)
    optimizer.step()
    head(embeddings, labels)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_copy_of_a_head_needs_an_optimizer_of_its_own(net, head, copied):
    optimizer = plsc.HeadSGD(head, lr=0.1)
    head(net(batch()[0]), batch()[1]).backward()
    twin = copied(head)
    assert twin.softmax.pending.batches == []
    twin(net(batch()[0]), batch()[1]).backward()
    with pytest.raises(UsageError, match="the head has no optimizer"):
        twin(net(batch()[0]), batch()[1])
    with pytest.raises(UsageError, match=r"head\.weight is a parameter of SGD"):
        sgd(twin).step()
    optimizer.step()
    assert not torch.equal(head.weight.detach(), twin.weight.detach())


def forget_on_ranks(mesh):
    torch.manual_seed(0)
    net, head = nn.Linear(IMAGES, DIM), plsc.ShardedHead(DIM, CLASSES, mesh)
    try:
        train(net, head, [torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)])
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_every_rank_raises(ranks):
    assert "head.weight is a parameter of SGD" in (messages := ranks(2, forget_on_ranks))[0]
    assert messages[0] == messages[1]
