"""Whole runs with managed ids: resumed, on other numbers of ranks, killed, with tables of another size, exported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gem_train_fakes import FakeSource
from gem_train_ranks import run_ranks
from torch import Tensor

from gem_core.cli.main import run as gem
from gem_core.config.load import LoadedConfig, load_config
from gem_core.spec import RequestError
from gem_core.train.checkpoint.compare import differences
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.compose import compose
from gem_core.train.ids import idmap
from gem_core.train.log import read_log
from gem_core.train.run import evaluate_run, train
from gem_core.train.scoring import export_scorer, load_scorer
from gem_core.train.step import forward

Configure = Callable[..., LoadedConfig]
COLUMNS = ("id", "id_count", "id_row", "id_used")


def ids(**values: Any) -> str:
    """A setting without spaces: words of a command are split at them."""
    rule = {"pattern": "item", "rows": 9, "buckets": 3, "evict_every": 2, "admit_after": 2, **values}
    return "embedding.ids=[{" + ",".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in rule.items()) + "}]"


MANAGED = ("train.log_every=1", "train.checkpoint_every=2", "train.keep_checkpoints=9", "embedding.optimizer=adam", ids())


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.train.run.write_report", lambda folder: folder)


def table(run: Path) -> dict[str, Tensor]:
    return dict(find_checkpoint(run).read()["tables"]["item"])


def cut(run: Path, step: int) -> None:
    """Remove all checkpoints after a step, as if the run had been killed before the next."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def same_ids(a: Path, b: Path) -> bool:
    return all(torch.equal(table(a)[name], table(b)[name]) for name in COLUMNS)


def test_a_run_admits_and_evicts_and_tells_of_it(configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(configure(*MANAGED))
    records = read_log(tmp_path / "run")
    steps = [record["ids"] for record in records if record["event"] == "train"]
    assert sum(step["tables"]["item"]["admitted"] for step in steps) > 8, "more than there are rows"
    assert sum(step["tables"]["item"]["evicted"] for step in steps) > 0
    assert steps[-1]["tables"]["item"]["owned"] == 8
    assert all(step["features"]["item"]["ids"] == 16 for step in steps), "each step's own figures, though the next one is prepared in it"
    assert 0 < steps[-1]["features"]["item"]["unadmitted"] < 16
    (told,) = [record["ids"] for record in records if record["event"] == "eval"]
    assert told["features"]["item"]["ids"] == FakeSource().rows("test")
    held = table(tmp_path / "run")
    assert held["weight"].shape == (9, 4)
    assert held["id_row"][held["id_row"] > 0].sort().values.tolist() == list(range(1, 9))
    assert int(held["id_count"].sum()) <= 16 * len(steps)
    assert gem(["checkpoint", "show", str(tmp_path / "run")]) == 0
    assert f"{held['id'].numel()} ids, 8 with a row of their own" in capsys.readouterr().out


def test_case_E09_a_resumed_run_equals_one_that_went_through(configure: Configure, tmp_path: Path) -> None:
    train(configure(*MANAGED, out="through"))
    train(configure(*MANAGED))
    for step in (6, 2):
        cut(tmp_path / "run", step)
        train(configure(*MANAGED), resume=tmp_path / "run")
        assert differences(find_checkpoint(tmp_path / "run"), find_checkpoint(tmp_path / "through")) == []


def test_case_E09_a_lost_count_changes_who_survives(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: the comparison above goes red when counts are not taken over."""
    train(configure(*MANAGED, out="through"))
    train(configure(*MANAGED))
    cut(tmp_path / "run", 2)
    load = idmap.IdMap.load

    def without_counts(self: idmap.IdMap, state: Any) -> None:
        load(self, np.stack([*state[:2], np.minimum(state[2], 1), state[3]]))

    monkeypatch.setattr(idmap.IdMap, "load", without_counts)
    train(configure(*MANAGED), resume=tmp_path / "run")
    assert not same_ids(tmp_path / "run", tmp_path / "through")


def test_case_E03_any_number_of_ranks_gives_and_takes_over_the_same_ids(recipe: str, configure: Configure, tmp_path: Path) -> None:
    """Four ranks, one of which keeps no bucket; their checkpoint goes on on two, killed on the way, and then on one."""
    settings = " ".join(f"--set {value}" for value in MANAGED)
    ddp = "--set parallel.strategies=['fake-ddp']"
    train(configure(*MANAGED, out="one"))
    whole = run_ranks(4, tmp_path, f"train -c {recipe} --out {tmp_path / 'four'} {settings} {ddp}")
    assert whole.codes == [0] * 4, whole.err
    assert same_ids(tmp_path / "four", tmp_path / "one")
    cut(tmp_path / "four", 2)
    killed = run_ranks(2, tmp_path, f"train --resume {tmp_path / 'four'} --set train.checkpoint_background=false {ddp}", kill_at_flush=7)
    assert any(code != 0 for code in killed.codes)
    again = run_ranks(1, tmp_path, f"train --resume {tmp_path / 'four'} --set parallel.strategies=['single']")
    assert again.codes == [0], again.err
    assert same_ids(tmp_path / "four", tmp_path / "one")
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.allclose(table(tmp_path / "four")[name], table(tmp_path / "one")[name], atol=1e-4), name
    (told, alone) = ([r["ids"] for r in read_log(tmp_path / run) if r["event"] == "train"] for run in ("four", "one"))
    assert told == alone


def owners(run: Path) -> dict[int, tuple[Tensor, Tensor]]:
    """Weights and first moment of each id that owns a row."""
    held = table(run)
    pairs = zip(held["id"].tolist(), held["id_row"].tolist(), strict=True)
    return {id: (held["weight"][row], held["exp_avg"][row]) for id, row in pairs if row}


@pytest.mark.parametrize("size", [{"rows": 15}, {"rows": 6}, {"rows": 9, "buckets": 1}, {"rows": 12, "hashed_rows": 2}])
def test_case_E03_a_table_of_another_size_keeps_its_best_ids(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: dict[str, int]
) -> None:
    run = tmp_path / "run"
    train(configure(*MANAGED))
    before, first = owners(run), table(run)["weight"][0]
    changed = configure(*MANAGED[:-1], ids(**size, resized="grow"))
    made = compose(changed, resume=run, training=False)
    made.close()
    weights = {piece.name: piece.tensor for piece in made.embeddings.table_slices()}["weight"]
    held = made.ids.maps["item"]
    now = {int(id): weights[row] for id, row in held.state[:2].T if row}
    room = held.rule.rows - 1 - held.rule.hashed_rows
    assert 0 < len(now) <= min(len(before), room)
    assert len(now) == min(len(before), room) or held.rule.buckets > 1, "only a bucket may lack room"
    assert set(now) <= set(before)
    assert all(torch.equal(weight, before[id][0]) for id, weight in now.items())
    assert torch.equal(weights[0], first)
    train(configure(*MANAGED[:-1], ids(**size, resized="grow"), "train.epochs=3"), resume=run)
    after = table(run)
    assert after["weight"].shape[0] == after["exp_avg"].shape[0] == size["rows"]
    (told,) = [record["tables"] for record in read_log(run) if record["event"] == "resized"]
    assert gem(["checkpoint", "show", str(run)]) == 0
    assert told[0] in capsys.readouterr().out
    assert told[0].startswith("table 'item' changed from 9 rows, 0 of them hashed, in 3 buckets to ")
    assert told[0].endswith(f"(resized = 'grow'): {len(now)} ids took their rows along")


def test_case_E03_the_optimisers_state_moves_with_the_rows(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_core.train.checkpoint import restore

    monkeypatch.setattr(restore, "MOVED_ROWS", 2)
    train(configure(*MANAGED))
    before = owners(tmp_path / "run")
    made = compose(configure(*MANAGED[:-1], ids(rows=20, resized="grow")), resume=tmp_path / "run")
    made.close()
    pieces = {piece.name: piece.tensor for piece in made.embeddings.table_slices()}
    now = {int(id): row for id, row in made.ids.maps["item"].state[:2].T if row}
    assert set(now) == set(before)
    assert all(torch.equal(pieces["exp_avg"][row], before[id][1]) for id, row in now.items())
    free = torch.tensor([row for row in range(1, 20) if row not in now.values()])
    assert not pieces["exp_avg"][free].any()
    assert pieces["weight"][free].all(), "rows that nobody owned yet have their first weights"


def test_case_E03_a_changed_size_is_refused_kept_or_reset_as_the_rule_says(configure: Configure, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(configure(*MANAGED))
    with pytest.raises(RequestError, match=r"9 rows, 0 of them hashed, in 3 buckets, and embedding.ids asks for 12 rows.*'grow'.*'keep'.*'reset'"):
        train(configure(*MANAGED[:-1], ids(rows=12)), resume=run)
    assert evaluate_run(run, [ids(rows=12, resized="keep")])["test"] == evaluate_run(run)["test"]
    train(configure(*MANAGED[:-1], ids(rows=12, resized="keep"), "train.epochs=3"), resume=run)
    assert table(run)["weight"].shape == (9, 4)
    with pytest.raises(RequestError, match="asks for 12 rows"):
        train(configure(*MANAGED[:-1], ids(rows=12), "train.epochs=4"), resume=run)
    train(configure(*MANAGED[:-1], ids(rows=12, resized="reset"), "train.epochs=4"), resume=run)
    held = table(run)
    assert held["weight"].shape == (12, 4)
    assert int(held["id_count"].sum()) <= 16 * 6, "only the last epoch's look-ups"


def test_rules_can_neither_appear_nor_vanish_unnoticed(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1", out="plain"))
    with pytest.raises(RequestError, match=r"trained without managed ids, and .* asks for 9 rows.*resized = 'reset' starts the table afresh"):
        train(configure(ids(resized="grow"), out="plain"), resume=tmp_path / "plain")
    train(configure(ids(resized="reset"), out="plain"), resume=tmp_path / "plain")
    assert table(tmp_path / "plain")["weight"].shape == (9, 4)
    with pytest.raises(RequestError, match=r"'item'.*managed ids \(9 rows\).*Put its entry back"):
        train(configure("train.epochs=3", out="plain"), resume=tmp_path / "plain")


@pytest.mark.parametrize("hashed", [0, 2])
def test_an_exported_model_scores_raw_ids_as_the_run_does(configure: Configure, tmp_path: Path, hashed: int) -> None:
    train(configure(*MANAGED[:-1], ids(hashed_rows=hashed)))
    export_scorer(find_checkpoint(tmp_path / "run"), tmp_path / "scorer")
    made = compose(load_config(tmp_path / "run/config.toml"), resume=tmp_path / "run", training=False)
    made.close()
    batch = next(FakeSource().batches("test", batch_size=40))
    made.dense.eval()
    with torch.no_grad():
        logits = forward(made.dense, made.embeddings, made.ids.rows_of(batch), made.schema.tasks)
    shutil.rmtree(tmp_path / "run")
    scorer = load_scorer(tmp_path / "scorer")
    assert scorer(batch)["ctr"].tolist() == torch.sigmoid(logits["ctr"]).tolist()
    (held,) = scorer._ids.maps.values()
    assert held.owned == held.state.shape[1] == 8 - hashed, "waiting ids stay behind"
    held.state[1] = np.roll(held.state[1], 1)
    assert scorer(batch)["ctr"].tolist() != torch.sigmoid(logits["ctr"]).tolist(), "the map matters"


def test_a_table_that_saw_no_id_is_saved_exported_and_resumed(configure: Configure, tmp_path: Path) -> None:
    settings = (*MANAGED[:-1], ids(admit_after=1))
    made = compose(configure(*settings, "train.max_steps=1"))
    try:
        from gem_core.train.loop import save

        save(made, background=False)
    finally:
        made.close()
    assert sorted(table(tmp_path / "run")) == ["exp_avg", "exp_avg_sq", "weight"]
    export_scorer(find_checkpoint(tmp_path / "run"), tmp_path / "scorer")
    assert json.loads((tmp_path / "scorer/model.json").read_text())["ids"]["item"]["rows"] == 9
    assert (load_scorer(tmp_path / "scorer")(next(FakeSource().batches("test", batch_size=4)))["ctr"] > 0).all()
    train(configure(*settings, "train.max_steps=1"), resume=tmp_path / "run")
    assert table(tmp_path / "run")["id"].numel() > 0
