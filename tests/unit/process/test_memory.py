"""The memory that this process may use: control groups of both versions, and what is available now."""

from pathlib import Path

import pytest

from skyrl_tx.process import memory

GIB = 2**30


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a machine of 16 GiB with 8 GiB available, and control groups."""

    def make_machine(own_groups: str, **files: str) -> None:
        proc, groups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * 2**20} kB\n")
        (proc / "self" / "cgroup").write_text(own_groups)
        for path, content in files.items():
            file = groups / path.replace("__", "/").replace("_DOT_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        monkeypatch.setattr(memory, "_PROC", proc)
        monkeypatch.setattr(memory, "_CGROUP", groups)
        monkeypatch.setattr(memory, "get_physical_memory", lambda: 16 * GIB)

    return make_machine


def make_version_2(group: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{group}memory_DOT_max": f"{limit}\n",
        f"{group}memory_DOT_current": f"{used}\n",
        f"{group}memory_DOT_stat": f"anon 1\ninactive_file {inactive}\n",
    }


def test_without_a_control_group_all_memory_may_be_used(make_machine) -> None:
    make_machine("")
    assert (memory.get_memory_limit(), memory.read_available_memory()) == (16 * GIB, 8 * GIB)


@pytest.mark.parametrize("path", ["/", "/host/path/of/the/container"])
def test_a_container_sees_its_own_group_as_the_root(make_machine, path: str) -> None:
    make_machine(f"0::{path}\n", **make_version_2("", str(4 * GIB), 3 * GIB, inactive=GIB))
    assert (memory.get_memory_limit(), memory.read_available_memory()) == (4 * GIB, 2 * GIB)


def test_the_smallest_limit_of_a_group_and_its_parents_counts(make_machine) -> None:
    make_machine(
        "0::/system.slice/server.service\n",
        **make_version_2("system.slice__server.service__", "max", 5),
        **make_version_2("system.slice__", str(10 * GIB), 3 * GIB),
        **make_version_2("", str(12 * GIB), 11 * GIB),
    )
    assert (memory.get_memory_limit(), memory.read_available_memory()) == (10 * GIB, GIB)


@pytest.mark.parametrize(("limit", "found"), [(4 * GIB, (4 * GIB, 3 * GIB)), (2**63 - 4096, (16 * GIB, 8 * GIB))])
def test_version_1_writes_a_very_large_number_for_no_limit(make_machine, limit: int, found: tuple[int, int]) -> None:
    make_machine(
        "4:cpu,cpuacct:/a\n3:memory:/docker/1\n",
        **{
            "memory__memory_DOT_limit_in_bytes": str(limit),
            "memory__memory_DOT_usage_in_bytes": str(2 * GIB),
            "memory__memory_DOT_stat": f"total_inactive_file {GIB}\n",
        },
    )
    assert (memory.get_memory_limit(), memory.read_available_memory()) == found


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(make_machine) -> None:
    make_machine("0::/\n", **make_version_2("", str(GIB), 2 * GIB))
    assert memory.read_available_memory() == 0


def test_unreadable_files_are_no_limit(make_machine, tmp_path: Path) -> None:
    make_machine("0::/\n", memory_DOT_max="many", memory_DOT_current="1")
    (tmp_path / "proc" / "meminfo").unlink()
    assert memory.get_memory_limit() == memory.read_available_memory() == 16 * GIB


def test_engines_of_one_server_divide_the_limit(make_machine, monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine("0::/\n", **make_version_2("", str(6 * GIB), used=GIB))
    monkeypatch.setenv(memory.ENGINES_ON_HOST, "3")
    assert memory.get_memory_limit() == 2 * GIB
