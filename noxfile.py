"""Every check and every documented workflow of the repository, found by globbing packages/.

``nox -s tests`` runs each package's tests with its siblings absent; ``nox -s "tests(gem-kernels)"`` or ``nox -t gem-kernels`` one of them.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests", "together", "strangers"]

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints" / "cpu.txt")
METADATA = {path.parent.name: tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
PACKAGES = list(METADATA)
EACH_PACKAGE = nox.parametrize("package", [nox.param(name, id=name, tags=[name]) for name in PACKAGES])
# torchmetrics and ml-dtypes: AUC and number formats are held against them
TEST_TOOLS = ("pytest>=8", "pytest-timeout", "pytest-xdist>=3.5", "hypothesis>=6.100", "torchmetrics>=1.0.3", "ml-dtypes>=0.5")
# torchrec requires the CUDA build of fbgemm by name, so it goes in without its requirements, after the fbgemm that fits this torch.
FBGEMM = ("torch", "fbgemm-gpu-cpu", "numpy", "tensordict", "pyre-extensions", "tqdm", "torchmetrics")


def source(package: str) -> Path:
    return ROOT / "packages" / package


def needs(package: str) -> list[str]:
    """The distributions of this repository that ``package`` requires, itself last."""
    names = [name for name in PACKAGES if any(dep.startswith(name) for dep in METADATA[package]["dependencies"])]
    return [*names, package]


def install_torchrec(session: nox.Session) -> None:
    session.install("-c", CONSTRAINTS, *FBGEMM)
    session.install("-c", CONSTRAINTS, "--no-deps", "torchrec")


def share_torch(session: nox.Session) -> None:
    """Let the session's environment see one copy of torch that the sessions share: each would spend half a minute and 0.75 GB on its own.

    pip counts what lies on the path as installed. Torch's commands, such as ``torchrun``, are not on PATH then: ``together`` and ``quickstart`` need
    them and do not share.
    """
    facts = Path(CONSTRAINTS).read_text() + sys.version
    shared = ROOT / ".nox" / f"torch-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    if not shared.exists():
        draft = Path(session.create_tmp()) / "torch"
        shutil.rmtree(draft, ignore_errors=True)
        session.run("python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, "--target", str(draft), "torch", "numpy")
        draft.rename(shared)
    site = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    Path(site.strip(), "shared_torch.pth").write_text(f"{shared}\n")


def install_sources(session: nox.Session, *packages: str, tools: tuple[str, ...] = (), shared: bool = True) -> None:
    """Install packages of this repository from their sources, in place, and what they require.

    Args:
        shared: use the sessions' common copy of torch.
    """
    if shared:
        share_torch(session)
    if "gem-parallel" in packages:
        install_torchrec(session)
    editable = [word for name in packages for word in ("-e", str(source(name)))]
    session.install("-c", CONSTRAINTS, *editable, *tools)


def run_pytest(session: nox.Session, *paths: str) -> None:
    """Two processes at once, a file in one of them: files launch ranks and train models that their tests share."""
    spread = ("-n", "2", "--dist", "loadfile")
    session.run("python", "-m", "pytest", "-m", "not gpu", *spread, *paths, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style and the import walls. Needs no torch."""
    session.install("ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(str(source(name) / "src") for name in PACKAGES)})


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on each package; ``nox -s types -- gem-core`` for one."""
    install_sources(session, *PACKAGES, tools=("mypy", "pytest", "hypothesis"))
    for package in session.posargs or PACKAGES:
        session.run("mypy", str(source(package) / "src"))


@nox.session
@EACH_PACKAGE
def tests(session: nox.Session, package: str) -> None:
    """The tests of one package, its siblings absent, with what its own kernels need."""
    kernels = METADATA[package].get("optional-dependencies", {}).get("native", [])
    install_sources(session, *needs(package), tools=(*TEST_TOOLS, *kernels))
    run_pytest(session, f"packages/{package}/tests")


@nox.session
@EACH_PACKAGE
def alone(session: nox.Session, package: str) -> None:
    """The wheel of one package in a clean environment: it imports, its plugin loads without torch, it holds its own files and no others."""
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    for name in needs(package):
        session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(source(name)))
    built = [str(wheel) for wheel in wheels.glob("*.whl")]
    share_torch(session)
    session.install("-c", CONSTRAINTS, *built)
    # a kept environment already has a wheel of this version, which pip would keep
    session.install("--force-reinstall", "--no-deps", *built)
    session.run("python", str(ROOT / "tests" / "alone.py"), package, str(wheels))


@nox.session
def together(session: nox.Session) -> None:
    """All five packages: what no single package can test, and the walls."""
    install_sources(session, *PACKAGES, tools=(*TEST_TOOLS, "import-linter"), shared=False)
    run_pytest(session, "tests/walls", "tests/together")


@nox.session
def strangers(session: nox.Session) -> None:
    """Somebody else's package replaces a kernel, and somebody else's model uses ours."""
    install_sources(session, "gem-core", "gem-kernels", tools=TEST_TOOLS)
    session.install("-c", CONSTRAINTS, "./examples/acme-gem-backend")
    run_pytest(session, "examples/acme-gem-backend/tests", "tests/strangers")
    session.run("python", "examples/foreign_model.py")


@nox.session
@EACH_PACKAGE
def floors(session: nox.Session, package: str) -> None:
    """The tests of one package with the lowest versions it allows (torch and triton stay at the constraint: they only work as a set)."""
    install_sources(session, *needs(package), tools=TEST_TOOLS)
    lowest = []
    for dependency in METADATA[package]["dependencies"]:
        name, _, version = dependency.partition(">=")
        if name not in {"torch", "triton", *PACKAGES}:
            lowest.append(f"{name}=={version.split(',')[0]}")
    if lowest:
        session.install("-c", CONSTRAINTS, *lowest)
    run_pytest(session, f"packages/{package}/tests")


@nox.session
def skew(session: nox.Session) -> None:
    """A core that is too new: pip's range refuses it, and forced in, its kernels are listed as unfit with the reason."""
    install_sources(session, "gem-core", "gem-kernels", tools=TEST_TOOLS)
    run_pytest(session, "tests/skew")


@nox.session
def spark(session: nox.Session) -> None:
    """One preparation on DuckDB and on a local Spark gives identical rows; needs Java 17."""
    install_sources(session, "gem-core", "gem-data", tools=(*TEST_TOOLS, "pyspark>=4.0,<5"))
    run_pytest(session, "tests/spark")


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The GPU tests of the interpreter that runs nox; without nox: ``python3 -m pytest -m gpu packages``."""
    session.run("python3", "-m", "pytest", "-m", "gpu", "packages", *session.posargs, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks that run on this machine; results go to benchmarks/results."""
    install_sources(session, *PACKAGES)
    for script in sorted(ROOT.glob("packages/*/benchmarks/cpu_*.py")):
        session.run("python", str(script), *session.posargs)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Install all five packages, fetch MovieLens-100K and train on it; the report is runs/quickstart/report.html."""
    install_sources(session, *PACKAGES, shared=False)
    session.run("gem", "doctor")
    session.run("gem", "data", "fetch", "ml-100k", success_codes=[0, 3])
    recipe = "quickstart" if _fetched(session) else "synthetic"
    session.run("gem", "train", "-c", recipe, "--out", "runs/quickstart", *session.posargs)


def _fetched(session: nox.Session) -> bool:
    """Whether MovieLens-100K lies in the cache; without it the quickstart trains on generated data and says so."""
    probe = "import sys; from gem_data.fetch import *; sys.exit(not is_complete(find_release('ml-100k'), default_folder('ml-100k')))"
    found = subprocess.run([str(Path(session.bin) / "python"), "-c", probe]).returncode == 0
    if not found:
        session.warn("MovieLens-100K could not be fetched: training on the synthetic source instead")
    return found


@nox.session(venv_backend="none")
def changed(session: nox.Session) -> None:
    """Queue the tests of the packages that differ from main (or from the revision given after ``--``)."""
    base = session.posargs[0] if session.posargs else "main"
    files = subprocess.run(["git", "diff", "--name-only", base], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    touched = {Path(file).parts[1] for file in files if file.startswith("packages/")}
    for package in PACKAGES:
        if touched & set(needs(package)):
            session.notify(f"tests({package})", posargs=[])
    session.notify("together", posargs=[])
