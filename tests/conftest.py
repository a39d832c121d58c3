"""Fixtures and pytest hooks for all test directories."""

import gc
import hashlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from skyrl_tx.backends.jax.compiler import set_cpu_options
from tests.support.client_environments import (
    ClientEnvironment,
    PreparedEnvironment,
    UnavailableEnvironment,
    cache_directory,
    is_required,
    prepare,
)
from tests.support.fast_jit import FAST_COMPILE_FLAGS
from tests.support.leftover_work import (
    cancel_tasks_of_clients,
    find_leftover_threads,
    find_threads,
    stop_loop_of_clients,
)
from tests.support.postgresql_server import PostgresqlServer
from tests.support.quick_stores import make_stores_quick

TOGETHER = (
    ("tests/api/",),
    tuple(f"tests/conformance/test_{name}.py" for name in ("models", "decoding", "training")),
)
"""Path prefixes of files that share a slow fixture, for example a JAX server or a torch process."""

APART = ("tests/contract/test_jax.py", "tests/conformance/test_mesh.py", "tests/gpu/test_parity.py")
"""Slow files that are split over multiple processes by class, or by test if they have no classes."""

WITH_TOLERANCE = (
    "tests/contract/test_jax.py",  # tests/unit/backends/jax compares the bits of its slow families too
    "tests/api/test_conformance.py",
    "tests/recipes/",
    "tests/clients/",
    *(
        f"tests/conformance/test_{name}.py"
        for name in (
            "models",
            "decoding",
            "training",
            "trainer_and_sampler",
            "exports",
            "greedy",
            "packed_tensors",
            "torch_and_jax",
        )
    ),
    "tests/conformance/test_mesh.py::test_moe_training_on_eight_devices",
    "tests/faults/test_simulation.py::test_equal_seeds_give_equal_histories",
    *(
        f"tests/unit/backends/jax/test_{name}"
        for name in (
            "kernel_choice.py::test_kernels_on_a_mesh_of_eight_devices",
            "sharing_in_training.py::test_other_families_share",
            "sharing_oracle.py::test_shared_prefixes_are_at_most_twice_as_far",
            "training_costs.py::test_the_estimate_is_near_the_account",
        )
    ),
)
"""Files and tests, or beginnings of their names, that compare no bits, or bits that other tests compare too.

CI runs their slow tests with programs that are compiled with little optimization, in a third of the CPU time: see
`tests.support.fast_jit`.
"""

COMPARES_BITS = (
    "tests/contract/test_jax.py",
    "tests/contract/test_recovery.py",
    *(
        f"tests/unit/backends/jax/test_{name}.py"
        for name in (
            *("backend", "checkpoint", "custom_losses", "draw", "expert_lora", "layer_views", "sampler_pool"),
            *("loss_selection", "model_runner", "optimizer", "prompt_scores", "prompts_together", "random_numbers"),
            *("scored_prefixes", "slice_rows", "state", "token_filters", "training_programs"),
        )
    ),
    *(
        f"tests/unit/layers/test_{name}.py"
        for name in (
            *("cache_shards", "cache_state", "experts", "kernels", "logprobs", "lora", "moe", "pages_kernels"),
            *("recurrence", "sharding", "stable_bits", "state_space"),
        )
    ),
    *(f"tests/unit/models/test_{name}.py" for name in ("adapters", "decoder", "mixture")),
)
"""Files with tests that are not slow and compare bits of compiled programs.

The default run compiles all programs with little optimization, which takes a third of the CPU time. CI runs these tests
with the compiler options of the product instead, because bits depend on them: `pytest -m "not slow and bits"`.
"""

PROGRAMS_KEPT_S = 14 * 86_400
"""How long compiled programs are kept."""

DEFAULT_SELECTION = "not slow"
"""The marker expression of a run without `-m`, see pyproject.toml."""

MOST_MAPPINGS = 30_000
"""Clear compiled programs above this number.

Linux allows 65,530 memory mappings per process by default, and XLA's compiler crashes when they are
used up.
"""


def pytest_collection(session: pytest.Session) -> None:
    """Stop garbage collection until all tests are collected.

    Everything that is imported and collected stays until the end. Looking at it again and again takes an eighth of the
    time of collection, in each worker process.
    """
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage again, except what was imported and collected."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment of this process and of the processes that tests start: cache, compiler options, SDK."""
    os.environ |= {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    if config.option.markexpr == DEFAULT_SELECTION:
        os.environ.setdefault("XLA_FLAGS", FAST_COMPILE_FLAGS)
    if getattr(config, "cache", None) is not None:  # there is no cache with -p no:cacheprovider
        programs = _find_program_cache()
        if not hasattr(config, "workerinput"):
            _remove_old_programs(programs)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    # A client whose server has ended logs this two minutes later, during an unrelated test.
    logging.getLogger("tinker.lib.internal_client_holder").addFilter(
        lambda record: not str(record.msg).startswith("Session heartbeat failed")
    )
    # The JAX backend sets the same options, so all tests share compiled programs.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    set_cpu_options(os.environ)
    make_stores_quick()
    # There is no deadline, because the machine may be busy. A few examples are enough because each
    settings.register_profile(
        "default run", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("default run")


def _find_program_cache() -> Path:
    """Return the directory for compiled programs, beside the client environments.

    All runs on this machine share it: a run whose programs are compiled takes half of the CPU time.
    A program for one kind of CPU may not run on another, so each kind has its own directory.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    described = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    kind = hashlib.sha256("\n".join((platform.machine(), *described)).encode()).hexdigest()[:16]
    directory = cache_directory() / f"programs-{kind}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _remove_old_programs(directory: Path) -> None:
    """Remove programs that are older than `PROGRAMS_KEPT_S`, so that the directory does not grow forever."""
    oldest = time.time() - PROGRAMS_KEPT_S
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # another run removes programs too
            if path.stat().st_mtime < oldest:
                path.unlink()


@pytest.hookimpl(tryfirst=True)  # before deselection by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the markers `tolerance`, `bits` and `postgres`.

    Tests that use the SDK also ignore warnings about connections that SDK clients leave open.
    """
    for item in items:
        if item.nodeid.startswith(WITH_TOLERANCE):
            item.add_marker(pytest.mark.tolerance)
        if item.nodeid.startswith(COMPARES_BITS) and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.bits)
        if _needs_postgresql(item):
            item.add_marker(pytest.mark.postgres)
        if (
            isinstance(item, pytest.Function)
            and hasattr(item.module, "tinker")
            and not item.nodeid.startswith("tests/unit/")
        ):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


def _needs_postgresql(item: pytest.Item) -> bool:
    """Return whether a test uses PostgreSQL, through a fixture or through a parameter."""
    if not isinstance(item, pytest.Function):
        return False
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return "postgresql" in item.fixturenames or any(value == "postgresql" for value in parameters)


class _Scheduling(LoadFileScheduling):
    """Runs each file in one process, but for those APART, and all files that are TOGETHER, in the order of collection.

    The longest directories are first. Files share compiled programs through the cache on disk.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid.rpartition("::")[0] if "::Test" in nodeid else nodeid
        file = super()._split_scope(nodeid)
        return next((names[0] for names in TOGETHER if file.startswith(names)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """Return the scheduler that distributes tests over processes (`-n`)."""
    config.option.loadscopereorder = False
    return _Scheduling(config, log)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo `configure_logging` after each test.

    A command that ran in this process leaves a handler that writes to a closed stream.
    """
    root, ours = logging.getLogger(), logging.getLogger("skyrl_tx")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler and handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


_threads_of_packages = WeakSet[threading.Thread]()
"""Threads started by fixtures with package or session scope."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """Record which threads belong to fixtures with package or session scope."""
    before = find_threads()
    made = yield
    if fixturedef.scope in ("package", "session"):
        _threads_of_packages.update(find_threads() - before)
    return made


@pytest.fixture(scope="module", autouse=True)
def _no_work_goes_on() -> Iterator[None]:
    """Check that no thread of a module is still at work in the next one.

    A server that several modules share may start threads in any of them, so they are not checked while it runs.
    """
    before = find_threads()
    yield
    cancel_tasks_of_clients()
    if not any(thread.is_alive() for thread in _threads_of_packages):
        assert find_leftover_threads(before) == []


@pytest.fixture(scope="module", autouse=True)
def _few_mappings() -> Iterator[None]:
    """Clear compiled programs after a module if there are too many.

    Each takes about 25 memory mappings.
    """
    yield
    _forget_programs()


@pytest.fixture(autouse=True)
def _few_mappings_of_slow_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clear compiled programs after slow tests too, because one slow module may exceed the limit."""
    yield
    if request.node.get_closest_marker("slow") is not None:
        _forget_programs()


def _forget_programs() -> None:
    mappings = Path("/proc/self/maps")
    jax = sys.modules.get("jax")
    if jax is not None and mappings.exists() and mappings.read_text().count("\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def client_environment() -> Callable[[ClientEnvironment], PreparedEnvironment]:
    """Return a function that prepares client environments, each at most once per session.

    If an environment cannot be prepared, the test is skipped with the reason.
    """
    outcomes: dict[ClientEnvironment, PreparedEnvironment | str] = {}

    def get(recipe: ClientEnvironment) -> PreparedEnvironment:
        if recipe not in outcomes:
            try:
                outcomes[recipe] = prepare(recipe)
            except UnavailableEnvironment as error:
                outcomes[recipe] = str(error)
        outcome = outcomes[recipe]
        if isinstance(outcome, str):
            (pytest.fail if is_required() else pytest.skip)(outcome)
        return outcome

    return get


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """Start a PostgreSQL server for the tests.

    If none can be started, the test is skipped with the reason.
    """
    try:
        server = PostgresqlServer()
    except UnavailableEnvironment as error:
        (pytest.fail if is_required() else pytest.skip)(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def _shared_database(postgresql: PostgresqlServer) -> str:
    return postgresql.new_database()


@pytest.fixture
def postgresql_url(postgresql: PostgresqlServer, _shared_database: str) -> str:
    """Return the URL of a database with empty tables on the test server."""
    postgresql.clear(_shared_database)
    return _shared_database


def pytest_sessionfinish() -> None:
    """Stop the background event loop of the SDK."""
    stop_loop_of_clients()
