"""What to install when an optional package is missing, as a command that is right for how millrace came here.

The distribution is `millrace-broker`, because `millrace` on the package index is somebody else's; the import and the
command are `millrace`. Every message that tells people what to install is made here. Not here: installing anything.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

DISTRIBUTION: Final = "millrace-broker"
_SOURCES: Final = Path(__file__).parents[2]


def install_hint(extra: str) -> str:
    """`pip install '.[spark]'` in a checkout, `pip install 'millrace-broker[spark]'` for everybody else."""
    checkout = _checkout()
    if checkout is None:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    here = checkout == Path.cwd()
    return f"pip install '{'.' if here else checkout}[{extra}]'"


def _checkout() -> Path | None:
    """The folder that this was installed from, editable or not; None where it came from an index or as a wheel."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:  # found through PYTHONPATH alone
        return _with_project(_SOURCES)
    direct_url = json.loads(installed.read_text("direct_url.json") or "{}")  # PEP 610
    if "dir_info" not in direct_url:
        return None
    return _with_project(Path(unquote(urlsplit(direct_url["url"]).path)))


def _with_project(folder: Path) -> Path | None:
    return folder if (folder / "pyproject.toml").is_file() else None
