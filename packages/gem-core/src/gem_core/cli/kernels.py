"""``gem kernels``: which backend runs each op here, and why the others do not. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from gem_core.cli.lazy import SharedGroup
from gem_core.cli.output import print_json, print_table
from gem_core.plugins.nearest import nearest
from gem_core.select.device import current_device, installed
from gem_core.select.policy import Candidate, KernelChoice, check_request, describe, explain, named_backend, policy_scope, preference
from gem_core.select.registry import registry, stale
from gem_core.spec import DEVICES, DTYPES, KernelRequest, KernelUnavailable, RequestError, load_object

app = typer.Typer(cls=SharedGroup, help="Which backend runs each op here, and why the others do not.", add_completion=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[str | None, typer.Option("--config", "-c", help="Take [kernels] from this file or recipe.")]
HEAD_DIM = 64


@app.command("list")
def list_(json: Json = False, config: Config = None) -> None:
    """Every kernel, asked for one usual training call of its op: head size 64, with backward, no further features."""
    with _policy_of(config):
        rows, here = [], current_device()
        dtype = "bf16" if here.device == "cuda" else "fp32"
        for op in sorted(registry().ops):
            request = KernelRequest(op=op, device=here.device, dtype=dtype, arch=here.arch, head_dim=HEAD_DIM)
            rows += [_row(candidate, request) for candidate in explain(request)[0]]
        rows += [_row(Candidate(owned=owned, here="no", why_not=[reason])) for owned, reason in stale() if owned.impl.op not in registry().ops]
        if json:
            print_json(rows)
            return
        print(f"{_machine()}  prefer: {_preference()}")
        print(f"asked: head_dim {HEAD_DIM}, {dtype}, backward, no feature words; `gem kernels explain OP` asks for others\n")
    _print_rows(rows)


@app.command("explain")
def explain_(
    op: Annotated[str, typer.Argument(help="The op.")],
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}; bf16 on CUDA and fp32 elsewhere if left out.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Size of one head.")] = HEAD_DIM,
    features: Annotated[list[str] | None, typer.Option(help="Feature words of the op, comma separated or repeated.")] = None,
    backward: Annotated[bool, typer.Option("--backward/--forward", help="Whether gradients are wanted.")] = True,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Ask for bit-equal repetition.")] = False,
    device: Annotated[str | None, typer.Option(help=f"One of {', '.join(DEVICES)}; this machine's if left out.")] = None,
    arch: Annotated[int | None, typer.Option(help="Compute capability, 90 for sm90; this machine's if left out.")] = None,
    backend: Annotated[str | None, typer.Option(help="Name a backend, as a call's backend= does.")] = None,
    json: Json = False,
    config: Config = None,
) -> None:
    """Walk the rules of choice for one request."""
    here = current_device()
    device = device or here.device
    request = KernelRequest(
        op=op,
        device=_one_of("--device", device, DEVICES),
        dtype=_one_of("--dtype", dtype or ("bf16" if device == "cuda" else "fp32"), DTYPES),
        arch=arch if arch is not None or device != here.device else here.arch,
        head_dim=head_dim,
        features=frozenset(word.strip() for part in features or () for word in part.split(",") if word.strip()),
        backward=backward,
        deterministic=deterministic,
    )
    check_request(request)
    with _policy_of(config):
        candidates, outcome = explain(request, backend)
        name, where = named_backend(op, backend)
        prefer = _preference()
    rows = [_row(candidate, request) for candidate in candidates]
    if json:
        print_json({"request": describe(request), "named": name, "named_by": where, "prefer": prefer, "candidates": rows, **_as_json(outcome)})
        return
    print(f"{_machine()}\nrequest: {describe(request)}")
    print(f"1. named: {f'{name} ({where})' if name else 'no (backend=, gem_core.use, GEM_KERNELS, kernels.use name none)'}")
    print(f"2. by preference: {'not asked, since one is named' if name else prefer}")
    print(f"3. {_verdict(outcome)}\n")
    _print_rows(rows)


@contextmanager
def _policy_of(config: str | None) -> Iterator[None]:
    if config is None:
        yield
        return
    from gem_core.config.load import load_config

    with policy_scope(load_config(config).kernel_policy()):
        yield


def _one_of(option: str, word: str, known: tuple[str, ...]) -> str:
    if word not in known:
        raise RequestError(f"{option} {word}", "there is no such word", nearest(word, known))
    return word


def _row(candidate: Candidate, request: KernelRequest | None = None) -> dict[str, Any]:
    impl = candidate.owned.impl
    stated = request is not None and candidate.here != "no" and impl.configuration
    return {
        "op": impl.op,
        "backend": impl.backend,
        "variant": impl.variant,
        "from": candidate.owned.owner_name,
        "version": candidate.owned.owner_version,
        "here": candidate.here,
        "why_not": candidate.why_not,
        **({"configuration": load_object(stated)(request, current_device().name)} if stated else {}),
    }


def _print_rows(rows: list[dict[str, Any]]) -> None:
    columns = ("OP", "BACKEND", "FROM", "HERE", "WHY NOT, OR WHERE ITS CONFIGURATION COMES FROM")
    cells = [
        (
            r["op"],
            "/".join(filter(None, (r["backend"], r["variant"]))),
            f"{r['from']} {r['version']}",
            r["here"],
            "; ".join([*r["why_not"], *([f"configuration: {r['configuration']}"] if "configuration" in r else [])]),
        )
        for r in rows
    ]
    print_table(columns, cells)


def _machine() -> str:
    here = current_device()
    arch = f" (sm{here.arch})" if here.arch is not None else ""
    versions = [f"{name} {version}" for name in ("torch", "triton") if (version := installed(name)) is not None]
    return " · ".join([f"{'cuda:0 ' if here.device == 'cuda' else ''}{here.name}{arch}", *versions])


def _preference() -> str:
    names, rule = preference()
    return f"{', '.join(names)} ({rule})"


def _verdict(outcome: KernelChoice | KernelUnavailable) -> str:
    if isinstance(outcome, KernelChoice):
        variant = f"/{outcome.impl.variant}" if outcome.impl.variant else ""
        return f"chosen: {outcome.backend}{variant}, by {outcome.rule}"
    return f"refused: {outcome.so.splitlines()[0].rstrip(':')}. {outcome.do}"


def _as_json(outcome: KernelChoice | KernelUnavailable) -> dict[str, Any]:
    if isinstance(outcome, KernelChoice):
        return {"chosen": outcome.backend, "variant": outcome.impl.variant, "rule": outcome.rule, "error": None}
    return {"chosen": None, "variant": None, "rule": None, "error": str(outcome)}
