"""Where there is no GPU kernels run in Triton's interpreter.  Torch runs in one thread.  Both are set before their import."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path
from zlib import crc32

import pytest

LACKING = Path(__file__).parent / "lacking"
VARIED = {"formats", "kernels", "models"}                        # folders whose tests run under the caller's global state
FORK_EVERY = 5                                                   # tests of each other state for one in a child, which takes 50 ms


def commits() -> str:
    """The number of commits; 0 without git.  `quarter_of` (tests/support/covering.py) chooses by it which cases run."""
    if not shutil.which("git"):
        return "0"
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "0"


# Two workers of two threads each wait for each other three times as long as they work.
os.environ["OMP_NUM_THREADS"] = "1"

try:
    import torch

    CUDA = torch.cuda.is_available()
except ImportError:
    CUDA = False

if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
for name in ("COLUMNS", "LINES"):                                # xdist's workers have those of a terminal, and tests read pipes
    os.environ.pop(name, None)
os.environ.setdefault("QDSL_TEST_TURN", commits())
os.environ["QDSL_CPU_COMPILE"] = "never"                         # the tests of compiled loops turn them on


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="write golden files anew, for a reviewer to read in the diff")
    parser.addoption("--lacks", action="append", choices=["triton", "unix", "size"], default=[],
                     help="run on a machine without Triton, without what only Unix has, or of the smallest size")
    parser.addoption("--global-state", default="", help="a state of tests/support/global_state.py for all tests, or 'none'")


def pytest_configure(config: pytest.Config) -> None:
    """Take away what --lacks names, here and, by the environment, from every process that is started."""
    config.addinivalue_line("markers", "own_state: the test sets torch's global state itself, or depends on it")
    if (lacks := config.getoption("--lacks")) and "QDSL_TEST_LACKS" not in os.environ:
        os.environ["QDSL_TEST_LACKS"] = ",".join(lacks)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(LACKING), os.environ.get("PYTHONPATH"))))
        runpy.run_path(str(LACKING / "sitecustomize.py"))
    if "torch" in globals() and (hasattr(config, "workerinput") or not config.getoption("numprocesses")):
        from tests.support import global_state

        global_state.install()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test under the global state that its name draws, or in a forked child of this process."""
    if "torch" not in globals() or pyfuncitem.path.parent.name not in VARIED or pyfuncitem.get_closest_marker("own_state"):
        return None
    from tests.support import global_state

    names = [*global_state.STATES, "none"] * FORK_EVERY + [global_state.FORK]
    name = pyfuncitem.config.getoption("--global-state") or names[crc32(pyfuncitem.nodeid.encode()) % len(names)]
    is_threaded = pyfuncitem.path.parent.name == "models"        # libraries load in threads, and a fork has no pool for them
    if name == "none" or (name == global_state.FORK and is_threaded):
        return None
    pyfuncitem.add_report_section("call", "global state", f"{name}; run it again by --global-state {name}")
    global_state.run(name, lambda: pyfuncitem.obj(**{key: pyfuncitem.funcargs[key] for key in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, those that compile kernels and the wheel: at the end no worker waits long."""
    items.sort(key=lambda item: item.path.parent.name != "kernels" and item.path.name != "test_wheel.py")


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled libraries that the tests of a file share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--bless"))


def pytest_report_header() -> str:
    try:
        import torch
    except ImportError:
        return "no torch: tests of the compiler alone"
    try:
        import triton
    except ImportError:
        return f"torch {torch.__version__}, no Triton"
    return (f"torch {torch.__version__}, triton {triton.__version__}, kernels {'on a GPU' if CUDA else 'in the interpreter'}, "
            f"QDSL_TEST_TURN={os.environ['QDSL_TEST_TURN']}")
