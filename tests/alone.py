"""Run in a clean environment that holds only the wheel of one package (and core's): ``python tests/alone.py PACKAGE WHEEL_FOLDER``."""

import importlib
import json
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

from gem_core.spec import MachineError


def check_wheel(package: str, wheels: Path) -> None:
    """The wheel holds files of its own import package and its metadata, and a ``py.typed``."""
    name = package.replace("-", "_")
    (wheel,) = wheels.glob(f"{name}-*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    strange = [file for file in files if not file.startswith((f"{name}/", f"{name}-"))]
    assert not strange, f"{wheel.name} holds files of others: {strange}"
    assert f"{name}/py.typed" in files, f"{wheel.name} holds no py.typed"


def check_imports(package: str) -> int:
    """Every module imports with the siblings absent; only test helpers may want the extra ``testing``, and native kernels Triton."""
    module = importlib.import_module(package.replace("-", "_"))
    names = [info.name for info in pkgutil.walk_packages(module.__path__, module.__name__ + ".") if not info.name.endswith("__main__")]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if ".testing." not in name or error.name not in ("pytest", "hypothesis"):
                raise
        except MachineError:
            if ".kernels." not in name:
                raise
    return len(names)


def check_plugin(package: str) -> None:
    """The command lists the package's plugin as loaded, and listing plugins imports no torch."""
    listed = subprocess.run(
        [str(Path(sys.executable).with_name("gem")), "plugins", "list", "--json"], capture_output=True, text=True, check=True
    ).stdout
    status = {plugin["name"]: plugin["status"] for plugin in json.loads(listed)}
    assert status.get(package) == "loaded", f"{package} is {status.get(package)!r} in {status}"
    probe = "import sys; from gem_core.plugins.manager import host; host(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0, "listing plugins imported torch"


def main(package: str, wheels: str) -> None:
    check_wheel(package, Path(wheels))
    check_plugin(package)
    count = check_imports(package)
    print(f"{package}: wheel, plugin and {count} modules are fine alone")


if __name__ == "__main__":
    main(*sys.argv[1:])
