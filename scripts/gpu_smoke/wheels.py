"""A folder of wheels, gathered where there is a network and unpacked where there is none."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TESTS = ("pytest", "pytest-timeout", "hypothesis")
"""Of the development packages, those that tests need."""
_THERE = ("torch", "torchvision", "numpy")
"""Not asked for with all others: torch and numpy are there, and torchvision belongs to a torch."""
_GLIBC = (28, 27, 17)


def fetch(folder: Path, pyproject: Path, *, python: str, torch: str, machine: str) -> int:
    """Gathers what pipeal and its tests import beside torch and numpy, as pip has it; returns pip's exit code.

    Args:
        folder: Where to.
        pyproject: What pipeal needs.
        python: The version of the Python that will import it, such as ``3.12``.
        torch: The version of its torch, such as ``2.11``: torchvision has to fit.
        machine: Its processor, such as ``x86_64``.

    Raises:
        ValueError: A version is none.
    """
    major, dot, minor = torch.partition(".")
    if major != "2" or not dot or not minor.isdigit() or not re.fullmatch(r"3\.\d+", python):
        raise ValueError(f"found Python {python!r} and torch {torch!r}; expected such as 3.12 and 2.11")
    platforms = [f"manylinux_2_{number}_{machine}" for number in _GLIBC] + [f"manylinux2014_{machine}"]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    target += [f"--platform={platform}" for platform in platforms]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *target]
    vision = f"torchvision==0.{int(minor) + 15}.*"  # the two have counted alike since 2.0 and 0.15
    folder.mkdir(parents=True, exist_ok=True)
    for wanted in (_needed(pyproject), ["--no-deps", vision]):
        if code := subprocess.call([*pip, *wanted]):
            return code
    for wheel in folder.glob("numpy-*.whl"):
        wheel.unlink()  # a need of others; large, and there
    return 0


def unpack(folder: Path, into: Path) -> list[str]:
    """Unpacks the wheels of packages that are not installed here, and returns what they are called.

    Without pip, which need not be there. What is installed stays in force: a torch may not go with another numpy.

    Raises:
        ValueError: There are no wheels in it, or one is for another Python or processor.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"no wheels in {folder}; --fetch-wheels gathers them where there is a network")
    missing = [wheel for wheel in wheels if not _is_installed(wheel.name.partition("-")[0])]
    for wheel in missing:
        if not _fits(wheel.stem):
            here, machine = ".".join(map(str, sys.version_info[:2])), platform.machine()
            raise ValueError(
                f"{wheel.name} is not for Python {here} on {machine}; "
                f"fetch the wheels with --python {here} --machine {machine}"
            )
    for wheel in missing:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    for parts in [*into.glob("*.data/purelib"), *into.glob("*.data/platlib")]:
        shutil.copytree(parts, into, dirs_exist_ok=True)
    return [wheel.name.partition("-")[0] for wheel in missing]


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _fits(stem: str) -> bool:
    """Whether a wheel of this name can be imported by this Python on this processor.

    >>> _fits("click-8.1-py3-none-any"), _fits("click-8.1-py2-none-any"), _fits("click-8.1-py3-none-linux_vax")
    (True, False, False)
    """
    pythons, abis, platforms = stem.split("-")[-3:]
    if not any(one == "any" or one.endswith(f"_{platform.machine()}") for one in platforms.split(".")):
        return False
    minor = sys.version_info[1]
    for python in pythons.split("."):
        if python in ("py3", f"py3{minor}", f"cp3{minor}"):
            return True
        if "abi3" in abis and python.startswith("cp3") and int(python[3:] or 0) <= minor:
            return True
    return False


def _needed(pyproject: Path) -> list[str]:
    tomllib = import_module("tomllib")  # from Python 3.11 on
    project: dict[str, Any] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    needed = [one for one in project["dependencies"] if _name(one) not in _THERE]
    return needed + [one for one in project["optional-dependencies"]["dev"] if _name(one) in _TESTS]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
