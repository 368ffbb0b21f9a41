"""Python, memory, disks, limits and the name of this machine."""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

from skyrl_engine.doctor.finding import DoctorFinding
from skyrl_engine.model_facts.memory import find_free_host_bytes, format_bytes
from skyrl_engine.registry.discovery import ENGINE
from skyrl_engine.run.environment import usable_cores
from skyrl_engine.scratch import PREFIX, is_scratch_folder

_GIB = 2**30
_LOW_MEMORY, _LOW_DISK, _FULL_DISK, _LOW_SHARED = 2 * _GIB, 10 * _GIB, _GIB, _GIB
_LOW_FILES, _LOW_PROCESSES = 4096, 1024
_OLD_SECONDS = 86_400.0


def examine_python() -> Iterator[DoctorFinding]:
    """Yield the interpreter, and whether the engine is made for it."""
    from packaging.specifiers import SpecifierSet

    facts = metadata(ENGINE)
    wanted = SpecifierSet(facts["Requires-Python"] or "")
    here = f"{platform.python_implementation()} {platform.python_version()} in {sys.prefix}"
    if not wanted.contains(platform.python_version(), prereleases=True):
        yield DoctorFinding("python", "problem", f"{here}; the engine is made for {wanted}", f"Use a Python {wanted}")
        return
    tested = [
        line.rpartition(" ")[2]
        for line in facts.get_all("Classifier") or ()
        if line.startswith("Programming Language :: Python :: 3.")
    ]
    minor = ".".join(platform.python_version_tuple()[:2])
    if tested and minor not in tested:
        yield DoctorFinding(
            "python",
            "warning",
            f"{here}; the engine is tested on {', '.join(tested)}",
            f"Use Python {tested[-1]} where something fails",
        )
    else:
        yield DoctorFinding("python", "ok", here)


def examine_memory() -> Iterator[DoctorFinding]:
    """Yield the cores and the free memory of this machine, within the control group of this process."""
    cores = usable_cores()
    yield DoctorFinding("processor", "ok", f"{cores} of {os.cpu_count()} cores")
    free = find_free_host_bytes()
    if free is None:
        yield DoctorFinding("memory", "ok", "this system does not say how much is free")
    elif free < _LOW_MEMORY:
        yield DoctorFinding("memory", "warning", f"{format_bytes(free)} free", "End other programs, or raise the container's limit")
    else:
        yield DoctorFinding("memory", "ok", f"{format_bytes(free)} free")


def examine_disks() -> Iterator[DoctorFinding]:
    """Yield the free space where runs, temporary files and models are written, and in shared memory."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for topic, path in (
        ("disk of this folder", Path.cwd()),
        ("disk of temporary files", Path(tempfile.gettempdir())),
        ("disk of models", Path(HF_HUB_CACHE)),
    ):
        yield _examine_disk(topic, path)
    shared = Path("/dev/shm")  # noqa: S108 -- it is looked at, nothing is written
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        if total < _LOW_SHARED:
            remedy = "Start the container with --shm-size=16g: Ray and NCCL exchange data there"
            yield DoctorFinding("shared memory", "warning", f"{format_bytes(total)} in {shared}", remedy)
        else:
            yield DoctorFinding("shared memory", "ok", f"{format_bytes(total)} in {shared}")


def _examine_disk(topic: str, path: Path) -> DoctorFinding:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    found = f"{format_bytes(free)} free at {path}"
    if not os.access(there, os.W_OK):
        return DoctorFinding(topic, "warning", f"{path} cannot be written", "Choose another folder, or make it writable")
    if free < _FULL_DISK:
        return DoctorFinding(topic, "problem", found, "Free some space, or move it to another disk")
    if free < _LOW_DISK:
        return DoctorFinding(topic, "warning", found, "Free some space: one checkpoint holds weights and optimizer")
    return DoctorFinding(topic, "ok", found)


def examine_limits() -> Iterator[DoctorFinding]:
    """Yield limits of open files and of processes that ranks and servers run into."""
    for topic, which, least, flag in (
        ("open files", resource.RLIMIT_NOFILE, _LOW_FILES, "-n 65536"),
        ("processes", resource.RLIMIT_NPROC, _LOW_PROCESSES, "-u unlimited"),
    ):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY and soft < least:
            yield DoctorFinding(
                f"limit of {topic}", "warning", f"{soft:,}; Ray with several ranks needs more", f"Run `ulimit {flag}` in this shell"
            )
        else:
            yield DoctorFinding(f"limit of {topic}", "ok", "none" if soft == resource.RLIM_INFINITY else f"{soft:,}")


def examine_name() -> Iterator[DoctorFinding]:
    """Yield whether the name of this machine leads to an address at which ranks can meet."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as listening:
            listening.bind((address, 0))
    except OSError as error:
        remedy = "Give this machine's name a line in /etc/hosts: several ranks meet at its address"
        yield DoctorFinding("name of the machine", "warning", f"it leads to no address of this machine ({error})", remedy)
    else:
        yield DoctorFinding("name of the machine", "ok", "it leads to an address of this machine")


def examine_left_overs() -> Iterator[DoctorFinding]:
    """Yield temporary folders that processes of the engine left behind, and that no other process of it deletes."""
    root, now = Path(tempfile.gettempdir()), time.time()
    left = [path for path in root.glob(f"{PREFIX}*") if path.is_dir() and not is_scratch_folder(path)]
    old = [path for path in left if now - path.stat().st_mtime > _OLD_SECONDS]
    if old:
        remedy = f"Delete them where no run uses them: {root}/{PREFIX}*"
        yield DoctorFinding("left-overs", "warning", f"{len(old):,} temporary folders older than a day in {root}", remedy)
    else:
        yield DoctorFinding("left-overs", "ok", f"none in {root}")
