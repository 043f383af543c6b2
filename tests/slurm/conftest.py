"""A live Slurm for the session, and tests that run side by side on it.

Nearly all of a launch test's time is waiting: for Slurm to notice a lost node, for a requeued job's
turn. Tests marked `beside` therefore start together, each on nodes of its own; the pytest item of
each waits for its own and reports it."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from slurm.faults import FaultTable
from slurm.lab import Lab, missing

NUM_NODES = 24
NUM_BESIDE = 9
BESIDE_LIMIT_S = 1800
HERE = Path(__file__).parent
_OPEN = ExitStack()
"""What is stopped after the last of these tests."""


def pytest_configure(config):
    config.addinivalue_line("markers", "beside: starts together with the others of its kind")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("beside"):
            item.fixturenames.append("started")


@pytest.fixture(scope="session")
def lab():
    """A cluster with all nodes up."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with _OPEN:
        lab = _OPEN.enter_context(Lab.free(NUM_NODES))
        reason = lab.unreadable()
        if reason:
            pytest.skip(reason)
        yield lab


@pytest.fixture(scope="session")
def big(lab):
    """slurm.conf of the cluster of 2048 nodes that is only asked."""
    return str(lab.start_big())


@pytest.fixture(scope="session")
def fault_table():
    """Where fault tests record how long things took."""
    return FaultTable.from_environment()


@pytest.fixture(scope="session")
def started(request, lab, fault_table):
    """The selected `beside` tests, all of them running or waiting for their turn."""
    shared = {"lab": lab, "fault_table": fault_table}
    pool = ThreadPoolExecutor(NUM_BESIDE)
    futures: dict[str, Future] = {}
    for item in request.session.items:
        if item.get_closest_marker("beside"):
            given = {**shared, **(item.callspec.params if item.name != item.originalname else {})}
            code = item.obj.__code__
            names = code.co_varnames[: code.co_argcount]
            futures[item.nodeid] = pool.submit(item.obj, *(given[name] for name in names))
    _OPEN.callback(pool.shutdown, wait=False, cancel_futures=True)
    return futures


def pytest_runtest_teardown(nextitem):
    # Not at the end of the session: other tests measure times.
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        _OPEN.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.get_closest_marker("beside") is None:
        return None
    pyfuncitem.funcargs["started"][pyfuncitem.nodeid].result(BESIDE_LIMIT_S)
    return True
