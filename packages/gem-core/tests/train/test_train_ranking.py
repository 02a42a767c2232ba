"""AUC and group AUC against the definition, counted pair by pair."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core.train.ranking import auc, group_auc


def by_pairs(scores: Tensor, labels: Tensor, weights: Tensor) -> float | None:
    """Mann-Whitney with half credit, straight from its definition."""
    right = total = 0.0
    for i, j in product(range(len(scores)), repeat=2):
        if labels[i] == 1 and labels[j] == 0:
            pair = float(weights[i] * weights[j])
            total += pair
            right += pair * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return right / total if total else None


rows = st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(1, 4), st.integers(0, 3)), min_size=0, max_size=24)


def columns(drawn: list[tuple[int, bool, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with many ties, labels, weights and groups."""
    table = torch.tensor([[s, y, w, g] for s, y, w, g in drawn], dtype=torch.float64).reshape(-1, 4)
    return table[:, 0] / 2, table[:, 1], table[:, 2], table[:, 3].long()


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
def test_case_D01_constant_score_has_half_whatever_the_order(labels: list[int]) -> None:
    assert auc(torch.full((4,), 0.5), torch.tensor(labels), torch.ones(4)) == 0.5


def test_case_D01_planted_fault_an_auc_without_ties_goes_red() -> None:
    """Twin of the test above: ranking by position, as a sort without ties does, gives the tracker's wrong figures."""

    def without_ties(scores: Tensor, labels: Tensor) -> float:
        order = scores.argsort(descending=True, stable=True)
        y = labels[order].double()
        return float((y.cumsum(0) * (1 - y)).sum() / (y.sum() * (1 - y).sum()))

    wrong = [without_ties(torch.full((4,), 0.5), torch.tensor(labels)) for labels in ([0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1])]
    assert wrong == [0.25, 1.0, 0.0]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows)
def test_auc_is_mann_whitney_with_half_credit(drawn: list[tuple[int, bool, int, int]]) -> None:
    scores, labels, weights, _ = columns(drawn)
    expected, got = by_pairs(scores, labels, weights), auc(scores, labels, weights)
    assert (got is None) == (expected is None)
    if expected is not None:
        assert got == pytest.approx(expected, rel=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows, st.randoms(use_true_random=False))
def test_case_D01_order_of_rows_does_not_matter(drawn: list[tuple[int, bool, int, int]], random: object) -> None:
    shuffled = list(drawn)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = columns(drawn), columns(shuffled)
    assert auc(*first[:3]) == auc(*second[:3])
    assert group_auc(*first) == group_auc(*second)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows)
def test_group_auc_is_the_average_of_the_groups_auc(drawn: list[tuple[int, bool, int, int]]) -> None:
    scores, labels, weights, groups = columns(drawn)
    each, sizes = [], []
    for group in sorted(set(groups.tolist())):
        at = groups == group
        value = by_pairs(scores[at], labels[at], weights[at])
        if value is not None:
            each.append(value)
            sizes.append(int(at.sum()))
    got = group_auc(scores, labels, weights, groups)
    assert (got.groups_used, got.groups_skipped) == (len(each), len(set(groups.tolist())) - len(each))
    if not each:
        assert got.unweighted is None
        assert got.impression_weighted is None
        return
    assert got.unweighted == pytest.approx(sum(each) / len(each), rel=1e-12)
    assert got.impression_weighted == pytest.approx(sum(a * n for a, n in zip(each, sizes, strict=True)) / sum(sizes), rel=1e-12)


def test_auc_equals_torchmetrics_where_it_can_be_asked() -> None:
    """torchmetrics takes no weights and works in float32; without weights and with ties its exact mode agrees."""
    from torchmetrics.classification import BinaryAUROC

    torch.manual_seed(0)
    scores, labels = torch.rand(500).mul(20).round().div(20), torch.randint(0, 2, (500,))
    assert auc(scores.double(), labels, torch.ones(500)) == pytest.approx(float(BinaryAUROC()(scores, labels)), abs=1e-6)


def test_case_D11_a_group_of_one_class_is_skipped_and_counted() -> None:
    scores = torch.tensor([0.1, 0.9, 0.3, 0.4, 0.3, 0.4], dtype=torch.float64)
    got = group_auc(scores, torch.tensor([0, 1, 0, 0, 1, 1]), torch.ones(6), torch.tensor([1, 1, 2, 2, 3, 3]))
    assert (got.unweighted, got.impression_weighted) == (1.0, 1.0)
    assert (got.groups_used, got.groups_skipped) == (1, 2)


def test_case_D19_the_two_averages_differ_where_group_sizes_do() -> None:
    """Group 1 has two rows and AUC 0; group 2 has four rows and AUC 1."""
    scores = torch.tensor([0.9, 0.1, 0.1, 0.2, 0.8, 0.9], dtype=torch.float64)
    got = group_auc(scores, torch.tensor([0, 1, 0, 0, 1, 1]), torch.ones(6), torch.tensor([1, 1, 2, 2, 2, 2]))
    assert got.unweighted == pytest.approx(0.5)
    assert got.impression_weighted == pytest.approx(4 / 6)
    assert (got.groups_used, got.groups_skipped) == (2, 0)


def test_groups_need_not_be_sorted_or_small() -> None:
    scores = torch.tensor([0.1, 0.9, 0.9, 0.1], dtype=torch.float64)
    labels, groups = torch.tensor([0, 0, 1, 1]), torch.tensor([2**62, -5, 2**62, -5])
    got = group_auc(scores, labels, torch.ones(4), groups)
    assert (got.unweighted, got.groups_used) == (0.5, 2)


def test_many_rows_take_no_loop_over_groups() -> None:
    """100,000 groups: a Python loop over them would take many seconds."""
    torch.manual_seed(1)
    scores, groups = torch.randn(400_000, dtype=torch.float64), torch.arange(400_000) // 4
    labels = torch.tensor([0, 1, 0, 1]).repeat(100_000)
    got = group_auc(scores, labels, torch.ones(400_000), groups)
    assert got.groups_used == 100_000
    assert got.unweighted == pytest.approx(0.5, abs=0.01)


def test_scores_that_a_sigmoid_would_saturate_keep_their_order() -> None:
    """As probabilities 40 and 50 are both 1.0; metrics rank logits."""
    assert auc(torch.tensor([40.0, 50.0], dtype=torch.float64), torch.tensor([0, 1]), torch.ones(2)) == 1.0
