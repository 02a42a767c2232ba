"""AUC and normalised entropy of baselines, in float64."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def auc(labels: Floats, scores: Floats) -> float:
    """Probability that a positive outranks a negative, ties counting one half; NaN when a class is missing."""
    positives = float(labels.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, rank, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0
    return float((mean_rank[rank][labels > 0].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def ne(labels: Floats, probabilities: Floats) -> float:
    """Log loss over the entropy of the mean label (He et al. 2014, section 3); NaN when a class is missing."""
    rate = float(labels.mean()) if labels.size else 0.0
    if rate in (0.0, 1.0):
        return float("nan")
    p = np.clip(probabilities, 1e-12, 1 - 1e-12)
    loss = -(labels * np.log(p) + (1 - labels) * np.log1p(-p)).mean()
    return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def scores(labels: Floats, probabilities: Floats) -> dict[str, float]:
    """``{"auc", "ne"}``."""
    return {"auc": auc(labels, probabilities), "ne": ne(labels, probabilities)}


def sigmoid(x: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))


def logit(p: Floats) -> Floats:
    return np.asarray(np.log(p) - np.log1p(-p))


def expected_scores(probabilities: Floats, observed: Floats, predicted: Floats | None = None) -> dict[str, float]:
    """AUC and NE that a prediction reaches on average over labels drawn from the true probabilities, as ratios of expectations.

    The expected number of correctly ordered (positive, negative) pairs over the expected number of pairs, and the expected log loss over the entropy
    of the expected rate: what the sample figures tend to as rows grow. For the true probabilities themselves, what no predictor can beat on average.

    Args:
        probabilities: ``[rows]``, the true probability of a positive label.
        observed: ``[rows]``, the probability that the row's label is seen at all.
        predicted: ``[rows]``, the prediction that is scored; by default the true probabilities.
    """
    predicted = probabilities if predicted is None else predicted
    rank = np.unique(predicted, return_inverse=True)[1]
    positive = np.bincount(rank, observed * probabilities)
    negative = np.bincount(rank, observed * (1 - probabilities))
    below = np.cumsum(negative) - negative
    own = (observed**2 * probabilities * (1 - probabilities)).sum()
    ordered = (positive * (below + negative / 2)).sum() - own / 2
    rate = positive.sum() / observed.sum()
    p = np.clip(predicted, 1e-300, 1 - 1e-16)
    loss = -(observed * (probabilities * np.log(p) + (1 - probabilities) * np.log1p(-p))).sum() / observed.sum()
    return {"auc": float(ordered / (positive.sum() * negative.sum() - own)), "ne": float(loss / entropy(np.asarray(rate)))}


def entropy(p: Floats) -> Floats:
    """Of a binary event, in nats; 0 for a certain one."""
    p = np.clip(p, 1e-300, 1 - 1e-16)
    return np.asarray(-(p * np.log(p) + (1 - p) * np.log1p(-p)))
