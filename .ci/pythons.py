# SPDX-License-Identifier: Apache-2.0
"""Prints the paths of the oldest and the newest supported Python of this machine, a line each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

OLDEST = (3, 10)
ASK = "import ensurepip, sys, venv; print(sys.executable, *sys.version_info[:2])"


def candidates() -> list[Path]:
    folders = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/*/bin"))
    return [path for folder in folders for path in sorted(folder.glob("python3*"))]


def main() -> None:
    found: dict[tuple[int, int], str] = {}
    for path in candidates():
        if not path.name.removeprefix("python3").lstrip(".").isdigit() and path.name != "python3":
            continue  # python3-config and its like
        asked = subprocess.run([path, "-c", ASK], capture_output=True, text=True)
        if asked.returncode == 0:
            executable, major, minor = asked.stdout.rsplit(maxsplit=2)
            found.setdefault((int(major), int(minor)), executable)
    supported = sorted(version for version in found if version >= OLDEST)
    print(found[supported[0]], found[supported[-1]], sep="\n")


if __name__ == "__main__":
    main()
