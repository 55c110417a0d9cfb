"""The source distribution and the wheel: built as a release is, with everything in them that the source has.

`python -m tests.matrix.wheel` (`make wheel`) leaves both in dist/, installs the wheel and the pinned requirements, and
nothing else, in an environment of its own, and serves a run from an empty folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.matrix.outcome import ROOT, Failed, run

DIST = ROOT / "dist"


def build(directory: Path) -> Path:
    """Build both, the wheel from the source distribution, and return the wheel. Raises Failed."""
    run([sys.executable, "-m", "build", "--outdir", directory, ROOT])
    (wheel,) = directory.glob("*.whl")
    (source,) = directory.glob("*.tar.gz")
    check_contents(wheel, source, package_files())
    return wheel


def package_files() -> set[str]:
    """The files of the package that git knows: modules, migrations, py.typed."""
    listed = subprocess.run(["git", "ls-files", "src/holdfast"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def check_contents(wheel: Path, source: Path, expected: set[str]) -> None:
    """Raises Failed naming the files of the package that are not in both, or that only the wheel has."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {f"src/{name}" for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    if missing := sorted(expected - in_wheel):
        raise Failed(f"{wheel.name} lacks {', '.join(missing)}")
    if extra := sorted(in_wheel - expected):
        raise Failed(f"{wheel.name} has files that git does not know: {', '.join(extra)}")
    if missing := sorted({*expected, "LICENSE", "README.md", "pyproject.toml"} - in_source):
        raise Failed(f"{source.name} lacks {', '.join(missing)}")


def main() -> int:
    from tests.matrix.pythons import Interpreter, install_release, smoke

    shutil.rmtree(DIST, ignore_errors=True)
    try:
        wheel = build(DIST)
        with tempfile.TemporaryDirectory(prefix="holdfast-wheel-") as name:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            smoke(install_release(Interpreter(version, (sys.executable,)), wheel, Path(name)), Path(name))
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(f"{path.relative_to(ROOT)}" for path in sorted(DIST.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
