"""The loss without logits equals the one with them, and so do its gradients; what is imitated is the target's law."""

from __future__ import annotations

import torch
from toys import CPU, VOCAB, config, embed, output, random_example

from specdec.models.heads import make_head
from specdec.train.batch import Batch
from specdec.train.losses import Output, SoftCrossEntropy, Weighing, losses, targets


def test_cross_entropy_in_pieces_is_cross_entropy() -> None:
    torch.manual_seed(0)
    n, d, v, r, k = 600, 8, 50, 3, 4  # more rows than a piece
    x, low = torch.randn(n, d, requires_grad=True), torch.randn(n, r, requires_grad=True)
    matrix, second = torch.randn(v, d), torch.randn(v, r, requires_grad=True)
    ids = torch.stack([torch.randperm(v)[:k] for _ in range(n)])
    law = torch.rand(n, k).softmax(1)
    law[::3, 1:] = 0
    law /= law.sum(1, keepdim=True)

    dense = torch.zeros(n, v).scatter_(1, ids, law)
    logp = (x @ matrix.t() + low @ second.t()).log_softmax(1)
    expected = torch.nn.functional.kl_div(logp, dense, reduction="sum")
    (2 * expected).backward()
    grads = [t.grad.clone() for t in (x, low, second)]
    for t in (x, low, second):
        t.grad = None
    loss, best = SoftCrossEntropy.apply(x, matrix, ids, law, low, second)
    (2 * loss).backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert torch.equal(best, logp.argmax(1))
    for t, grad in zip((x, low, second), grads, strict=True):
        assert torch.allclose(t.grad, grad, atol=1e-4)


def test_what_is_imitated_is_the_law_cut_to_what_can_be_drafted() -> None:
    e = random_example(8, 3, 0)
    cut = Output.of(torch.randn(VOCAB - 1, 4), torch.tensor([i for i in range(VOCAB) if i != int(e.top_ids[0, 1])]), VOCAB)
    places, law = targets(Batch.of([e], CPU), cut, hard=0.0)
    assert torch.allclose(law.sum(1), torch.ones(len(law)))
    assert law[0].tolist() == [1.0, 0.0]
    assert cut.ids[places[0, 0]] == e.top_ids[0, 0]
    softer = targets(Batch.of([e], CPU), output(), hard=0.0)[1]
    harder = targets(Batch.of([e], CPU), output(), hard=0.5)[1]
    assert torch.allclose(harder[:, 1], softer[:, 1] / 2)


def test_positions_outside_the_vocabulary_do_not_count() -> None:
    """With no token that can be drafted there is nothing to learn, and no gradient."""
    e = random_example(8, 3, 0)
    said = set(e.top_ids[:, 0].tolist())
    ids = torch.tensor([i for i in range(VOCAB) if i not in said])
    head = make_head(config("eagle3"))
    found = losses(
        head, Batch.of([e], CPU), embed, Output.of(torch.randn(len(ids), 32), ids, VOCAB), 2, Weighing(0.8, 0.3, 0.0)
    )
    found.total.backward()
    assert found.by_step == [0.0, 0.0]
    assert all(p.grad is None or not p.grad.any() for p in head.parameters())
