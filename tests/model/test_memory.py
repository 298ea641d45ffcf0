"""How much memory is left: of the machine, and of the control groups that a process is in."""

from __future__ import annotations

from pathlib import Path

from tlserve.model.memory import available_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_control_groups_it_is_what_the_machine_says(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, {})) == 8 * GIB


def test_a_system_that_says_nothing_is_asked_for_its_free_pages(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 1 << 20


def test_the_limit_of_a_container_counts_without_cached_files(tmp_path: Path) -> None:
    """What files have left in memory can be dropped: a model that was just read takes nothing away."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
    }
    assert available_memory(write(tmp_path, files)) == 2 * GIB - GIB // 2


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    """As systemd sets them up: a limit of the service, one of its slice, none of the root."""
    slice_ = "sys/fs/cgroup/system.slice"
    files = {
        "proc/self/cgroup": "0::/system.slice/tlserve.service\n",
        f"{slice_}/memory.max": f"{3 * GIB}\n",
        f"{slice_}/memory.current": f"{2 * GIB}\n",
        f"{slice_}/tlserve.service/memory.max": f"{4 * GIB}\n",
        f"{slice_}/tlserve.service/memory.current": "0\n",
    }
    assert available_memory(write(tmp_path, files)) == GIB


def test_no_limit_is_none_and_a_use_beyond_it_leaves_nothing(tmp_path: Path) -> None:
    path = "sys/fs/cgroup/memory"
    unlimited = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    assert available_memory(write(tmp_path, unlimited)) == 8 * GIB
    old = {f"{path}/memory.limit_in_bytes": "100\n", f"{path}/memory.usage_in_bytes": "200\n"}
    assert available_memory(write(tmp_path, old)) == 0
