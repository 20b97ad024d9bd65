"""Training losses by name (``optim.loss``): each is the mean over the counted labels of a batch.

``weight`` has a number for each class (C,), for labels that of their positive side; ``smoothing``
moves this share of each label to all classes alike. Classes are int64 ``(B, *sizes)``, with -1 for
what does not count, or probabilities ``(B, C)``, as Mixup makes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.ops import sigmoid_focal_loss

IGNORED = -1
"""The class of positions that neither train nor count."""

GAMMA = 2.0  # of focal losses: the value that T.-Y. Lin et al. found best
_EPSILON = 1e-5  # of the Dice loss; a class that a batch lacks and the network does not predict

Loss = Callable[..., Tensor]


def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy of classes."""
    options = {"ignore_index": IGNORED, "label_smoothing": smoothing}
    if weight is None:
        return functional.cross_entropy(logits, labels, **options)  # type: ignore[arg-type]
    total = functional.cross_entropy(logits, labels, weight, reduction="sum", **options)  # type: ignore[arg-type]
    # torch's "mean" divides by the weights of the labels: an image's gradient would depend on the
    # others in its batch
    return total / _counted(labels).sum()


def focal(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """``-(1 - p)^2 log p`` of the true class: right images count little (arXiv 1708.02002)."""
    log_p = logits.log_softmax(1)
    losses = -_shares(labels, logits, smoothing) * (1 - log_p.exp()) ** GAMMA * log_p
    if weight is not None:
        losses = losses * weight.view(-1, *[1] * (logits.dim() - 2))
    counted = _counted(labels)
    return (losses.sum(1) * counted).sum() / counted.sum()


def ordinal(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """For ordered classes: the binary cross-entropy of each question ``y > k``, on average.

    As CORAL (W. Cao et al. 2020, arXiv 1901.07884), a wrong class costs more the further away it
    is. CORAL's layer has one weight vector and C - 1 biases. Here ``P(y > k)`` is the sum of the
    softmax above ``k``: it also falls with ``k``, and the network keeps its C outputs.
    """
    log_p, shares = logits.log_softmax(1), _shares(labels, logits, smoothing)
    up_to = log_p.logcumsumexp(1)[:, :-1]
    above = log_p.flip(1).logcumsumexp(1).flip(1)[:, 1:]
    # of each k, the share of the label that is at most k
    true = shares @ torch.ones(shares.shape[1], shares.shape[1] - 1).triu().to(shares)
    losses = -(true * up_to + (1 - true) * above).mean(1)
    return (losses if weight is None else losses * (shares @ weight)).mean()


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Of labels (B, K), each 0 or 1."""
    soft = _softened(labels, smoothing)
    return functional.binary_cross_entropy_with_logits(logits, soft, pos_weight=weight)


def one_against_rest(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Binary cross-entropy of single classes, each against all others (arXiv 2110.00476)."""
    shares = _shares(labels, logits, smoothing)
    return functional.binary_cross_entropy_with_logits(logits, shares, pos_weight=weight)


def binary_focal(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """The focal loss of labels (B, K), without its factor alpha."""
    soft = _softened(labels, smoothing)
    losses = sigmoid_focal_loss(logits, soft, alpha=-1, gamma=GAMMA)
    return (losses if weight is None else losses * (1 + (weight - 1) * soft)).mean()


def dice_cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """The mean of the cross-entropy and one minus the Dice coefficient.

    Dice counts small classes as much as large ones (F. Milletari, N. Navab, S. Ahmadi, "V-Net",
    3DV 2016, arXiv 1606.04797). Both count all positions of a batch together.
    """
    entropy = cross_entropy(logits, labels, weight=weight, smoothing=smoothing)
    return (entropy + 1 - dice(logits.softmax(1), labels)) / 2


def dice(probabilities: Tensor, labels: Tensor) -> Tensor:
    """The mean over the classes of the soft Dice coefficient of a batch, ().

    Args:
        probabilities: (B, C, *sizes).
        labels: int64 (B, *sizes), -1 for positions that do not count.
    """
    counted = _counted(labels)
    # (B, *sizes, C), as one_hot returns it
    found = probabilities.movedim(1, -1) * counted.unsqueeze(-1)
    true = functional.one_hot(labels.clamp(min=0), found.shape[-1]) * counted.unsqueeze(-1)
    both, either = (t.flatten(0, -2).sum(0) for t in (found * true, found + true))
    return ((2 * both + _EPSILON) / (either + _EPSILON)).mean()


def _counted(labels: Tensor) -> Tensor:
    """Whether each label counts, (B, *sizes); of probabilities all do."""
    return torch.ones_like(labels[:, 0]) if labels.is_floating_point() else labels != IGNORED


def _shares(labels: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """The labels as smoothed probabilities, as the logits."""
    count = logits.shape[1]
    if not labels.is_floating_point():
        labels = functional.one_hot(labels.clamp(min=0), count).movedim(-1, 1)
    return labels.to(logits) * (1 - smoothing) + smoothing / count


def _softened(labels: Tensor, smoothing: float) -> Tensor:
    return labels * (1 - smoothing) + smoothing / 2


CLASSIFICATION: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "focal": focal,
    "ordinal": ordinal,
    "bce": one_against_rest,
}
MULTILABEL: dict[str, Loss] = {"bce": binary_cross_entropy, "focal": binary_focal}
# Huber first: its gradients are bounded as those of cross-entropy, so the same rates work
REGRESSION: dict[str, Loss] = {
    "huber": functional.huber_loss,
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
}
SEGMENTATION: dict[str, Loss] = {
    "dice_ce": dice_cross_entropy,
    "cross_entropy": cross_entropy,
    "focal": focal,
}
