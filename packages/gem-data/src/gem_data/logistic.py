"""First-order logistic regression over id columns, the baseline for click data without histories."""

from collections.abc import Callable

import numpy as np

from gem_data.history import Floats, Ints
from gem_data.score import logit, sigmoid


def fit_logistic(features: Ints, labels: Floats, *, epochs: int = 3, batch: int = 500, lr: float = 0.02) -> Callable[[Ints], Floats]:
    """Fit one weight an id and column by AdaGrad (Duchi et al. 2011).

    Args:
        features: ``[rows, columns]`` ids, 0 or more, each column with ids of its own.
        labels: ``[rows]`` 0 or 1, both present.

    Returns:
        The logits ``[n]`` of ``[n, columns]`` ids; ids not seen in training weigh 0.
    """
    sizes = features.max(axis=0) + 1
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    weights, squares = np.zeros(sizes.sum()), np.full(sizes.sum(), 0.1)
    bias = float(logit(np.asarray(labels.mean())))
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(labels.size)
        for start in range(0, labels.size, batch):
            rows = order[start : start + batch]
            at = features[rows] + first
            error = sigmoid(weights[at].sum(1) + bias) - labels[rows]
            gradient = np.bincount(at.ravel(), np.repeat(error, at.shape[1]), minlength=weights.size)
            squares += gradient**2
            weights -= lr * gradient / np.sqrt(squares)

    def logits(ids: Ints) -> Floats:
        known = ids < sizes
        return np.asarray(np.where(known, weights[np.where(known, ids, 0) + first], 0.0).sum(1) + bias)

    return logits
