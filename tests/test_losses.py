"""fovea.losses: worked numbers, equality with the plain form, and what several positives mean."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fovea import losses


def test_info_nce_hand_worked() -> None:
    """Two orthogonal pairs, scale 1: each row is −log(e/(e+1)) = log(1 + 1/e) = 0.3133."""
    eye = torch.eye(2)
    assert losses.info_nce(eye, eye, torch.tensor(0.0)).item() == pytest.approx(
        math.log(1 + math.exp(-1)), abs=1e-6
    )


def test_info_nce_is_clips_loss() -> None:
    """With one positive a row it is the symmetric cross-entropy of CLIP."""
    torch.manual_seed(0)
    a, b, scale = torch.randn(7, 5), torch.randn(7, 5), torch.tensor(1.3)
    logits = scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    labels = torch.arange(7)
    want = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    torch.testing.assert_close(losses.info_nce(a, b, scale), want)


def test_same_image_twice_is_not_pushed_apart() -> None:
    """Rows 0 and 1 show the same image with different texts: the gradient on their similarity pulls them
    together.

    With the diagonal alone as positives, the text of row 1 is a negative of image 0 and the gradient pushes
    away.
    """
    ids = torch.tensor([[1, 10], [1, 11], [2, 12]])
    positive = losses.positives(ids, ids)
    assert positive.tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    images = torch.eye(3).repeat_interleave(1, 0)
    for mask, sign in ((positive, -1), (None, 1)):
        texts = torch.tensor([[1.0, 0.1, 0.0], [0.3, 1.0, 0.0], [0.0, 0.0, 1.0]], requires_grad=True)
        losses.info_nce(images, texts, torch.tensor(0.0), mask).backward()
        assert texts.grad is not None
        # d loss / d cos(image 0, text 1), up to the norm of text 1: negative means pulled together.
        assert math.copysign(1, texts.grad[1, 0].item()) == sign


def test_same_text_twice_is_a_positive() -> None:
    """A text id in common is enough, on either side of the batch."""
    left, right = torch.tensor([[1, 7]]), torch.tensor([[5, 7], [6, 8]])
    assert losses.positives(left, right).tolist() == [[True, False]]


def test_optimum_of_two_positives_is_log_two() -> None:
    """Two identical images with one text: the loss's floor is the entropy of the uniform law, log 2."""
    ids = torch.tensor([[1, 1], [1, 1]])
    same = torch.ones(2, 3)
    assert losses.info_nce(same, same, torch.tensor(2.0), losses.positives(ids, ids)).item() == pytest.approx(
        math.log(2), abs=1e-6
    )


def test_regional_weights_are_the_mean_over_images_of_the_mean_over_regions() -> None:
    """Image 5 has three regions, image 6 one: 1/(2·3) each and 1/(2·1); they add up to 1."""
    weights = losses.regional_weights(torch.tensor([5, 6, 5, 5]))
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 6, 1 / 6])
    assert losses.regional_weights(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("norm", [1e-20, 1e20])
def test_extreme_norms_stay_finite(norm: float) -> None:
    """Embeddings of any norm give a finite loss: they are normalised in fp32."""
    a = torch.randn(4, 8) * norm
    assert torch.isfinite(losses.info_nce(a, a, torch.tensor(math.log(100.0))))


def test_half_precision_input_is_computed_in_fp32() -> None:
    """bf16 embeddings with the largest temperature: the loss is computed in fp32."""
    torch.manual_seed(1)
    a = torch.randn(16, 32).bfloat16()
    loss = losses.info_nce(a, a, torch.tensor(math.log(100.0)))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, losses.info_nce(a.float(), a.float(), torch.tensor(math.log(100.0))))


def test_autocast_does_not_reach_the_loss() -> None:
    """Under bf16-mixed the loss and its gradient are those of float32: bf16 logits would be off by 0.4 %."""
    torch.manual_seed(0)
    plain = torch.randn(2, 9, 16, requires_grad=True)
    mixed = plain.detach().clone().requires_grad_()
    scale = torch.tensor(4.6)
    want = losses.info_nce(plain[0], plain[1], scale)
    with torch.autocast("cpu", torch.bfloat16):
        got = losses.info_nce(mixed[0], mixed[1], scale)
    assert got.dtype == torch.float32 and got.item() == want.item()
    want.backward()
    got.backward()
    torch.testing.assert_close(mixed.grad, plain.grad, rtol=0, atol=0)


def test_shares_of_two_ranks_add_up_with_gradient() -> None:
    """Rows 0–2 and 3–6 as two uneven shares: loss and gradients are those of the whole batch."""
    torch.manual_seed(2)
    a, b = torch.randn(7, 4), torch.randn(7, 4)
    ids = torch.stack([torch.tensor([0, 1, 1, 2, 3, 4, 5]), torch.tensor([0, 1, 2, 3, 3, 4, 5])], 1)
    scale = torch.tensor(1.0, requires_grad=True)
    whole_a, whole_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    whole = losses.info_nce(whole_a, whole_b, scale, losses.positives(ids, ids))
    whole.backward()
    whole_scale = scale.grad.clone()  # type: ignore[union-attr]
    scale.grad = None
    part_a, part_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    total = torch.zeros(())
    for rows in (slice(0, 3), slice(3, 7)):
        n = len(ids[rows])
        total = total + losses.weighted_info_nce(
            part_a[rows],
            part_b[rows],
            part_a,
            part_b,
            scale,
            losses.positives(ids[rows], ids),
            torch.full((n,), 1 / 7),
        )
    total.backward()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(part_a.grad, whole_a.grad)
    torch.testing.assert_close(part_b.grad, whole_b.grad)
    torch.testing.assert_close(scale.grad, whole_scale)
