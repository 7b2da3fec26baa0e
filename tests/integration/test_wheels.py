"""Wheels, built from a copy of the sources: with the C kernels where there is a compiler, and without them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def build_module() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """A copy of what a wheel is built from, without a library."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_without_a_compiler_there_is_a_warning_and_no_library(
    source_tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for compiler in ("/bin/false", "/no/such/compiler"):
        monkeypatch.setenv("CC", compiler)
        assert build_module().build_kernels(source_tree) is None
        assert "the C kernels were not built" in capsys.readouterr().err
    assert not list(source_tree.rglob("*.so"))


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling builds wheels and is not installed"
)
@pytest.mark.parametrize("compiler", ["cc", "/bin/false"])
def test_wheels_are_for_the_platform_only_with_a_library(source_tree: Path, compiler: str) -> None:
    if compiler == "cc" and not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    code = "from hatchling.build import build_wheel; print(build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=source_tree, env={**os.environ, "CC": compiler}, check=True)
    (wheel,) = (source_tree / "dist").glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(names) == (compiler == "cc")
    assert wheel.name.endswith("-py3-none-any.whl") == (compiler == "/bin/false")
    site = source_tree / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import rose.transfer.kernels as k; print(k.__file__, k.load().name)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True, check=True).stdout
    assert str(site) in shown
    assert ("native" in shown) == (compiler == "cc")
