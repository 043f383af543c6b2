"""The package as one file that any Python of a node runs."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

START = """\
import sys

if sys.version_info < (3, 9):
    sys.exit(
        "credit_launch needs Python 3.9 or newer, %s is %d.%d; load a newer one by launch.prologue"
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
from credit_launch.main import main

sys.exit(main(sys.argv[1:]))
"""
"""Syntax that an old Python reads, so that it can say that it is too old."""


def write_package(target: Path) -> None:
    """Writes the zip file with this package, replacing an older one at once.

    Not by zipapp, whose archives hold the time of each file: the same package is the same bytes.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    source = Path(__file__).parent
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.glob("*.py")):
            archive.writestr(zipfile.ZipInfo(f"credit_launch/{path.name}"), path.read_text())
        archive.writestr(zipfile.ZipInfo("__main__.py"), START)
    os.replace(partial, target)
