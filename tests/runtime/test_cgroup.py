"""Limits of control groups count, of both versions, and the least of those on the way up."""

import os

import pytest

from model.runtime.cgroup import host_memory, limit_threads, num_cpus

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write a machine of 16 processors with 64 GiB, 40 of them free, and the files of its groups; gives its root."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def written(group, **folders):
        files = {
            "proc/self/cgroup": group,
            "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {40 * 2**20} kB\n",
        }
        files |= {f"sys/fs/cgroup/{at}/{name}": text for at, group in folders.items() for name, text in group.items()}
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return written


def v2(cpu="max 100000", memory="max", used=GIB, cache=0):
    return {
        "cpu.max": cpu, "memory.max": memory, "memory.current": used,
        "memory.stat": f"anon {used - cache}\ninactive_file {cache}",
    }  # fmt: skip


def v1(quota, memory, used=GIB, cache=0):
    return {
        "cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100000, "memory.limit_in_bytes": memory,
        "memory.usage_in_bytes": used, "memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}",
    }  # fmt: skip


def test_without_limits_the_machine_counts(machine):
    root = machine("0::/user.slice", **{"user.slice": v2(), ".": v2()})
    assert (num_cpus(root), host_memory(root)) == (16, (40 * GIB, 64 * GIB))
    root = machine("4:memory:/a\n1:cpu,cpuacct:/a", memory__a=v1(-1, UNLIMITED_V1), cpu__a=v1(-1, UNLIMITED_V1))
    assert (num_cpus(root), host_memory(root)) == (16, (40 * GIB, 64 * GIB))


def test_limits_of_version_2_count_and_cache_is_not_in_use(machine):
    root = machine("0::/job", job=v2("350000 100000", 8 * GIB, used=5 * GIB, cache=2 * GIB))
    assert (num_cpus(root), host_memory(root)) == (3, (5 * GIB, 8 * GIB))


def test_the_least_limit_on_the_way_up_counts(machine):
    root = machine(
        "0::/a/b/c", a=v2("200000 100000"), a__b=v2("max 100000", 6 * GIB), a__b__c=v2("400000 100000", 7 * GIB)
    )
    assert (num_cpus(root), host_memory(root)) == (2, (5 * GIB, 6 * GIB))


def test_limits_of_version_1_count_in_a_container_too_which_sees_its_host_s_path_and_its_own_files(machine):
    own = dict(cpu=v1(50_000, 0), memory=v1(0, 4 * GIB, used=3 * GIB, cache=GIB))
    root = machine("4:memory:/docker/3f\n1:cpu:/docker/3f\n0::/", **own)
    assert (num_cpus(root), host_memory(root)) == (1, (2 * GIB, 4 * GIB))


def test_a_quota_limits_torch_s_threads_unless_they_were_chosen(machine, monkeypatch):
    root = machine("0::/../job", job=v2("200000 100000"))
    for chosen, expected in (("5", "5"), ("", "2")):
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
        if not chosen:
            monkeypatch.delenv("OMP_NUM_THREADS")
        limit_threads(root)
        assert os.environ["OMP_NUM_THREADS"] == expected


def test_this_machine_s_own_files_are_read():
    available, total = host_memory()
    assert 0 < available <= total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 <= num_cpus() <= len(os.sched_getaffinity(0))
