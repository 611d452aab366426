import gc
import pathlib
import sys

import keras
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--loose", metavar="FILE", help="measure each kind where its budget holds everything, see loose.py")


def pytest_configure(config):
    if config.getoption("--loose"):
        import loose
        loose.install(config.getoption("--loose"))


@pytest.fixture(autouse=True)
def quiet_and_fresh():
    """Each test starts with Keras's names counted anew, and says nothing but what it is asked for."""
    keras.backend.clear_session(free_memory=False)
    yield


@pytest.fixture(autouse=True, scope="module")
def without_what_others_left():
    """Each file starts without the garbage of those before; looking for it before every test would take a second or more."""
    gc.collect()
    yield
