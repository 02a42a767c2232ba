"""Dtypes, checkpoints, padding and other things that layers have in common."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gem_core.batch import Jagged
from gem_core.model.gem import GemModel, GemOptions, State
from gem_core.model.hstu import HstuModel, HstuOptions
from gem_core.model.layers import LearnedToken, Mlp, compute_dtype, pair_width, together, total
from gem_core.model.sequence import Events
from gem_core.spec import RequestError

OPTIONS = GemOptions.model_validate({"dim": 8, "tokens": 6, "sequence": {"dim": 8, "heads": 2}, "features": {"embedding_dim": 8}, "dropout": 0.3})


class TestDtypes:
    def test_kernels_are_called_in_the_compute_dtype(self) -> None:
        single, double = torch.randn(2), torch.randn(2).double()
        assert compute_dtype(single) == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert compute_dtype(single) == torch.bfloat16
            assert compute_dtype(double) == torch.float64
            assert {t.dtype for t in together(single, single.half())} == {torch.bfloat16}
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert compute_dtype(single) == torch.float32

    def test_tensors_meet_in_the_first_ones_dtype(self) -> None:
        out = together(torch.randn(1).bfloat16(), torch.randn(1), torch.randn(1))
        assert {t.dtype for t in out} == {torch.bfloat16}


class TestSmallParts:
    def test_mlp(self) -> None:
        mlp = Mlp(3, (5, 4), 2)
        assert mlp(torch.randn(7, 3)).shape == (7, 2)
        assert [type(part) for part in mlp] == [nn.Linear, nn.GELU, nn.Dropout, nn.Linear, nn.GELU, nn.Dropout, nn.Linear]
        assert mlp.flops(7) == 7 * 2 * (3 * 5 + 5 * 4 + 4 * 2)
        assert Mlp(3, (), 2).flops(1) == pair_width(3, 2) == 12

    def test_learned_token(self) -> None:
        token = LearnedToken(4)
        assert token(3).shape == (3, 1, 4)
        assert token(0).shape == (0, 1, 4)
        token(3).sum().backward()
        assert token.weight.grad is not None
        assert token.weight.grad.tolist() == [[3.0] * 4]

    def test_counts_are_python_integers(self) -> None:
        import numpy as np

        assert type(total([np.int64(3), 2**70])) is int


class TestModel:
    def test_what_layers_hand_on_is_open_to_hooks(self) -> None:
        """Sharding wrappers find a layer's outputs through torch's tree of containers."""
        events = Events(torch.zeros(1), torch.zeros(2), 1, None, torch.zeros(3), torch.zeros(6))
        leaves = pytree.tree_leaves(State(torch.zeros(4), [events], [torch.zeros(5)], []))
        assert [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)] == [4, 1, 2, 3, 6, 5]

    def test_a_longer_maximum_changes_nothing(self, kit: ModuleType) -> None:
        """Padding belongs to the kernels: a row's result does not know how long the longest row could be."""
        batch = kit.make_batch(kit.FULL, [[3, 2], [0, 1], [4, 0]])
        loose = {name: Jagged(column.values, column.offsets, column.max_length + 4) for name, column in batch.event_offsets.items()}
        for cls, options in ((GemModel, OPTIONS), (HstuModel, HstuOptions(dim=8))):
            model, tables = kit.make_model(cls, kit.FULL, options)
            embedded = tables(batch.ids)
            tight, wide = model(batch, embedded), model(replace(batch, event_offsets=loose), embedded)
            for task, logit in tight.items():
                torch.testing.assert_close(wide[task], logit, rtol=1e-4, atol=1e-5)

    def test_too_short_a_maximum_is_refused(self, kit: ModuleType) -> None:
        batch = kit.make_batch(kit.FULL, [[3, 2]])
        short = {name: Jagged(column.values, column.offsets, 1) for name, column in batch.event_offsets.items()}
        model, tables = kit.make_model(GemModel, kit.FULL, OPTIONS)
        with pytest.raises(RequestError, match="longe"):
            model(replace(batch, event_offsets=short), tables(batch.ids))

    def test_a_state_dict_carries_the_whole_model(self, kit: ModuleType) -> None:
        batch = kit.make_batch(kit.FULL, [[3, 2], [0, 1]])
        first, tables = kit.make_model(GemModel, kit.FULL, OPTIONS, seed=1)
        second, _ = kit.make_model(GemModel, kit.FULL, OPTIONS, seed=2)
        embedded = tables(batch.ids)
        assert not torch.equal(first(batch, embedded)["ctr"], second(batch, embedded)["ctr"])
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(batch, embedded)["ctr"], second(batch, embedded)["ctr"])

    def test_dropout_follows_the_seed(self, kit: ModuleType) -> None:
        batch = kit.make_batch(kit.FULL, [[3, 2], [0, 1]])
        model, tables = kit.make_model(GemModel, kit.FULL, OPTIONS)
        embedded = tables(batch.ids)
        model.train()
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(model(batch, embedded)["ctr"])
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])

    def test_first_order_terms_learn_alone(self, kit: ModuleType) -> None:
        """With ``wide`` a table's further columns move the logits of their own task only."""
        batch = kit.make_batch(kit.FULL, [[3, 2], [0, 1]])
        model, tables = kit.make_model(GemModel, kit.FULL, OPTIONS.model_copy(update={"wide": True}))
        embedded = tables(batch.ids)
        before = model(batch, embedded)
        moved = embedded["user"].clone()
        moved[:, 8] += 1.0
        after = model(batch, embedded | {"user": moved})
        torch.testing.assert_close(after["ctr"] - before["ctr"], torch.ones(2))
        assert torch.equal(after["cvr"], before["cvr"])
