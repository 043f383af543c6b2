"""How the tests are dealt out to the workers of pytest-xdist."""

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

SLURM = "tests/slurm"


class ByModule(LoadScopeScheduling):
    """A module's tests stay together, as they share what it set up, and those of the one live
    Slurm do."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return SLURM if module.startswith(f"{SLURM}/") else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return ByModule(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The tests of Slurm begin first: they take longest, and most of that is waiting."""
    place = Path(config.rootpath, SLURM)
    items.sort(key=lambda item: not item.path.is_relative_to(place))
