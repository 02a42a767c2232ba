"""Backends of communication: why not, what is set in the environment, the copies of the copy engine, SMs by waves, ``gem bench comm``."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from gem_core.spec import MachineError, RequestError, Tier, Topology, load_object
from gem_parallel import plugin
from gem_parallel.comm import bench, cli, plot
from gem_parallel.comm.backends import NAMES, RESERVED, Here, require, set_environment, why_not
from gem_parallel.comm.occupancy import free_blocks
from gem_parallel.comm.transport import CopyEngineGather
from gem_parallel.dense.fsdp import here as where

HOST = Here(device="cuda", ranks=8, local=8, peer_access=True)


@pytest.mark.parametrize("name", NAMES)
def test_all_backends_work_on_the_gpus_of_one_host(name: str) -> None:
    assert why_not(name, HOST) == []
    require(name, HOST)


@pytest.mark.parametrize(
    ("name", "here", "reason"),
    [
        ("low_cta", Here(device="cpu", ranks=2, local=2), "it needs CUDA, this is cpu"),
        ("copy_engine", Here(device="cpu", ranks=2, local=2), "it needs CUDA, this is cpu"),
        ("copy_engine", Here(device="cuda", ranks=16, local=8, peer_access=True), "spans hosts of 8"),
        ("copy_engine", Here(device="cuda", ranks=2, local=2, peer_access=False), "cannot read each other's memory"),
    ],
)
def test_what_does_not_work_has_reasons_and_is_never_replaced(name: str, here: Here, reason: str) -> None:
    assert reason in "; ".join(why_not(name, here))
    with pytest.raises(MachineError, match="comm = 'default'"):
        require(name, here)
    assert why_not("default", here) == []


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="copy_engine"):
        why_not("nvls", HOST)


def test_multicast_is_off_unless_somebody_switched_it_on() -> None:
    off: dict[str, str] = {}
    set_environment("cuda:0", environ=off)
    assert off == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    asked: dict[str, str] = {}
    set_environment("cuda", multicast=True, environ=asked)
    assert asked == {}
    users = {"NCCL_NVLS_ENABLE": "1"}
    set_environment("cuda", environ=users)
    assert users["NCCL_NVLS_ENABLE"] == "1"
    cpu: dict[str, str] = {}
    set_environment("cpu", reserved_sms=8, environ=cpu)
    assert cpu == {}


def test_reserved_sms_reach_the_kernels_and_a_contradiction_is_refused() -> None:
    environ: dict[str, str] = {}
    set_environment("cuda", reserved_sms=8, environ=environ)
    assert environ[RESERVED] == "8"
    set_environment("cuda", reserved_sms=None, environ=environ)
    assert environ[RESERVED] == "8"
    with pytest.raises(RequestError, match="GEM_RESERVED_SMS=8"):
        set_environment("cuda", reserved_sms=4, environ=environ)


@pytest.mark.parametrize(("tiers", "local"), [((Tier(name="host", size=8, bandwidth=1e9),), 8), ((), 16)])
def test_a_group_knows_whether_it_spans_hosts(tiers: tuple[Tier, ...], local: int) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    try:
        everyone, host = torch.distributed.group.WORLD, torch.distributed.new_group(list(range(8)))
        assert everyone is not None
        topology = Topology(world=16, device="cpu", tiers=tiers)
        assert where("cpu", everyone, topology) == Here(device="cpu", ranks=16, local=local)
        assert where("cpu", host, topology) == Here(device="cpu", ranks=8, local=8)
    finally:
        torch.distributed.destroy_process_group()


class Shared:
    """Symmetric memory of ``ranks`` ranks in one process; every barrier is written down."""

    def __init__(self, ranks: int, rank: int, parts: list[torch.Tensor], log: list[str]) -> None:
        self.world_size, self.rank, self._parts, self._log = ranks, rank, parts, log

    def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self._log.append(f"buffer {rank}")
        assert (shape, dtype) == (self._parts[rank].shape, self._parts[rank].dtype)
        return self._parts[rank]

    def barrier(self) -> None:
        self._log.append("barrier")


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_copies_between_gpus_gather_every_part(monkeypatch: pytest.MonkeyPatch, ranks: int, in_place: bool) -> None:
    """The other ranks' parts are there already; memory is poisoned where the gather must write."""
    parts = [torch.full((3,), float(rank)) for rank in range(ranks)]
    for rank in range(ranks):
        log: list[str] = []
        buffers = [torch.full((3,), torch.nan) if other == rank else part for other, part in enumerate(parts)]
        shared = Shared(ranks, rank, buffers, log)
        monkeypatch.setattr("torch.distributed._symmetric_memory.get_symm_mem_workspace", lambda name, size, shared=shared: shared)
        group: Any = type("Group", (), {"group_name": "g"})()
        output = torch.full((3 * ranks,), torch.nan)
        own = output[3 * rank : 3 * rank + 3] if in_place else torch.empty(3)
        own.copy_(parts[rank])
        CopyEngineGather(group)(output, own)
        assert torch.equal(output, torch.cat(parts))
        assert torch.equal(buffers[rank], parts[rank])
        assert log == [f"buffer {rank}", "barrier", *(f"buffer {(rank + step) % ranks}" for step in range(1, ranks)), "barrier"]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 140), st.integers(0, 139))
def test_sms_are_counted_by_the_step_to_another_wave(sms: int, taken: int) -> None:
    """A machine that runs ``free`` blocks in a wave of one second."""
    free = max(1, sms - taken)
    asked: list[int] = []

    def seconds(blocks: int) -> float:
        asked.append(blocks)
        return float(-(-blocks // free))

    assert free_blocks(seconds, sms) == min(free, sms)
    assert len(asked) == sms.bit_length() + 2, "ranks ask equally often, whatever they measure"
    assert all(1 <= blocks <= sms for blocks in asked)


def test_bytes_on_a_link() -> None:
    assert bench.link_bytes(800, 8) == 700
    whole, part = bench.tensors(1001, 4, torch.device("cpu"))
    assert whole.numel() == 4 * part.numel()
    assert whole.nbytes >= 1001


def test_work_beside_a_collective_knows_whether_it_was_beside_it_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    calls: list[int] = []
    short = bench.Crowd(lambda: calls.append(1), 3, torch.device("cpu"))
    seconds, covered = short.around(lambda: torch.randn(400, 400).mm(torch.randn(400, 400)))
    assert seconds > 0
    assert not covered
    assert len(calls) == 3


def test_a_backend_that_fails_does_not_lose_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: str, tier: bench.Tier) -> list[bench.Way]:
        if backend == "copy_engine":
            raise RuntimeError("no symmetric memory\nand much more")
        return [bench.Way(what="all_gather", backend=backend, tier=tier, call=lambda whole, part: None)]

    tier = bench.Tier(name="host", group=None, here=HOST)  # type: ignore[arg-type]
    monkeypatch.setattr(bench, "tiers", lambda device: [tier])
    monkeypatch.setattr(bench, "ways", broken)
    monkeypatch.setattr(bench, "beside", lambda way, device, repeats: {"slowdown_pct": 1.0})
    monkeypatch.setattr(bench, "slowest", lambda seconds: seconds)
    rows = list(bench._rows(torch.device("cpu"), ["copy_engine", "default"], [1024], 1))
    assert rows[0] == {"backend": "copy_engine", "tier": "host", "what": "-", "note": "failed: no symmetric memory"}
    assert [row.get("bytes", row.get("slowdown_pct")) for row in rows[1:]] == [1024, 1.0]


def test_one_process_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RequestError, match="torchrun --nproc-per-node 2"):
        bench.open_group()


@pytest.mark.parametrize(
    ("words", "match"), [({"backend": ["nvls"]}, "--backend nvls"), ({"size": [12]}, "--size 12"), ({"plot": Path("p.png")}, "--plot p.png")]
)
def test_wrong_words_are_refused_before_any_work(words: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        cli.comm(**words)


def test_rows_are_appended_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "results" / "comm.csv"
    for n in (1, 2):
        cli.append(file, {"what": "all_gather", "bytes": n})
    rows = list(csv.DictReader(file.open()))
    assert [row["bytes"] for row in rows] == ["1", "2"]
    assert set(rows[0]) == set(cli.FIELDS)


def test_a_plot_has_every_way_and_what_it_costs(tmp_path: Path) -> None:
    about = {"ranks": 2, "device": "a GPU", "tier": "host"}
    ways = [{**about, "what": "all_gather", "backend": backend} for backend in ("default", "copy_engine")]
    rows = [{**way, "bytes": 1 << n, "gbps": 1.0 * n} for way in ways for n in (20, 22)]
    rows += [{**way, "bytes": 1 << 22, "slowdown_pct": 3.0, "sms": sms} for way, sms in zip(ways, (24, 0), strict=True)]
    plot.draw(tmp_path / "new" / "comm.svg", [*rows, {**about, "what": "-", "backend": "low_cta", "note": "it needs CUDA"}])
    svg = (tmp_path / "new" / "comm.svg").read_text()
    for text in ("all_gather default, host", "all_gather copy_engine, host, 0 SMs", "all_gather default, host, 24 SMs", "2 ranks on a GPU"):
        assert f"<!-- {text}" in svg or text in svg, text
    assert "low_cta" not in svg


def test_the_command_is_declared() -> None:
    (command,) = [command for command in plugin.gem_cli_commands() if command.name == "bench comm"]
    assert load_object(command.load) is cli.comm


def test_two_ranks_measure(tmp_path: Path) -> None:
    """The whole table on the CPU: bandwidth by size, the cost to a matrix product, and reasons for what cannot run here."""
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    words = [sys.executable, "-m", "gem_core", "bench", "comm", "--size", "65536", "--repeats", "1", "--csv", str(tmp_path / "comm.csv")]
    words += ["--plot", str(tmp_path / "comm.svg")]
    ranks = [
        subprocess.Popen(words, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(2)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    rows = list(csv.DictReader((tmp_path / "comm.csv").open()))
    figures = {(row["what"], row["backend"], row["bytes"]): row for row in rows}
    for what in ("all_gather", "reduce_scatter"):
        assert float(figures[what, "default", "65536"]["gbps"]) > 0
        row = figures[what, "default", str(bench.BESIDE["cpu"])]
        assert float(row["overlapped_ms"]) > 0
        assert float(row["slowdown_pct"]) == pytest.approx(100 * (float(row["overlapped_ms"]) / float(row["gemm_ms"]) - 1))
    assert {row["backend"] for row in rows if row["note"].startswith("it needs CUDA")} == {"low_cta", "copy_engine"}
    assert "all_gather" in outputs[0]
    assert "<svg" in (tmp_path / "comm.svg").read_text()
    assert "all_gather" not in outputs[1], "only the first rank prints"


def test_figures_are_those_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduced(value: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        value.clamp_(min=3.0)

    monkeypatch.setattr("torch.distributed.all_reduce", reduced)
    slowest: Callable[[float], float] = bench.slowest
    assert slowest(1.0) == 3.0
