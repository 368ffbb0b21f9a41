"""Every setting of the table is seen when it changes, and put back."""

import decimal
import gc
import locale
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

from skyrl_engine.testing import select_plugin, verify
from skyrl_engine.testing.process_settings import require_settings_unchanged, restore_settings, settings_of_process
from skyrl_engine.testing.promise import Broken


def tf32_in_both_ways():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.fp32_precision = "tf32"


CHANGES = {
    "gradient mode": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "flushing of denormal numbers": lambda: torch.set_flush_denormal(True),
    "precision of matrix products": lambda: torch.set_float32_matmul_precision("medium"),
    "the precision of matrix products": tf32_in_both_ways,
    "torch.backends.fp32_precision": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "torch.backends.mkldnn.matmul.fp32_precision": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "anomaly detection (check_nan)": lambda: torch.autograd.set_detect_anomaly(False, check_nan=False),
    "default device": lambda: torch.set_default_device("meta"),
    "threads of backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "autocast on the CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "repetition of torch's warnings": lambda: torch.set_warn_always(True),
    "print options of torch (precision)": lambda: torch.set_printoptions(precision=7),
    "sharing strategy of tensors": lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
    "errors of NumPy (over)": lambda: np.seterr(over="ignore"),
    "print options of NumPy (precision)": lambda: np.set_printoptions(precision=3),
    "filters of warnings": lambda: warnings.filterwarnings("ignore", "nothing that anybody says"),
    "level of all logging": lambda: logging.disable(logging.INFO),
    "levels of loggers (root)": lambda: logging.root.setLevel(logging.FATAL),
    "levels of loggers (skyrl_engine)": lambda: logging.getLogger("skyrl_engine").setLevel(logging.FATAL),
    "garbage collector": gc.disable,
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1000),
    "switch interval": lambda: sys.setswitchinterval(0.25),
    "digits of integers": lambda: sys.set_int_max_str_digits(9000),
    "context of decimals (prec)": lambda: setattr(decimal.getcontext(), "prec", 9),
    "context of decimals (traps)": lambda: decimal.getcontext().traps.update({decimal.Inexact: True}),
    "sys.excepthook": lambda: setattr(sys, "excepthook", print),
    "handler of SIGTERM": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "default timeout of sockets": lambda: socket.setdefaulttimeout(3),
    "start method of processes": lambda: multiprocessing.set_start_method("spawn", force=True),
    "locale": lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
    "file mode mask": lambda: os.umask(0o077),
    "working directory": lambda: os.chdir("/"),
    "search path of modules": lambda: sys.path.insert(0, "elsewhere"),
    "environment variables": lambda: os.environ.update(A_PLUGIN_WAS_HERE="1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_and_put_back(name):
    before = settings_of_process()
    with pytest.raises(Broken) as broken, require_settings_unchanged():
        CHANGES[name]()
    assert name in broken.value.cause
    assert settings_of_process() == before
    with restore_settings():
        CHANGES[name]()
    assert settings_of_process() == before


def test_what_raises_is_put_back_too():
    before = settings_of_process()
    with pytest.raises(ZeroDivisionError), require_settings_unchanged():
        gc.disable() or 1 / 0
    assert settings_of_process() == before


def test_a_thread_that_goes_on_is_told_and_one_that_ends_is_not():
    wait = threading.Event()
    with require_settings_unchanged():
        threading.Thread(target=int).start()
    with pytest.raises(Broken, match="leaves 1 threads running, such as 'forgotten'"), require_settings_unchanged():
        threading.Thread(target=wait.wait, args=(20.0,), name="forgotten").start()
    wait.set()


def test_a_process_that_goes_on_is_told_and_one_that_ends_is_not():
    with require_settings_unchanged():
        subprocess.run([sys.executable, "-c", ""], check=True)
    with pytest.raises(Broken, match=r"leaves the process \d+ running"), require_settings_unchanged():
        forgotten = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    forgotten.kill()
    forgotten.wait()


SETS_ERRORS = """
import numpy as np
from skyrl_engine import reducer


@reducer()
def sets_errors(structure, config):
    np.seterr(all="ignore")
    return structure.loss_weight.astype(np.float64)
"""


def test_a_verdict_leaves_the_settings_as_they_were(tmp_path):
    (tmp_path / "mine.py").write_text(SETS_ERRORS)
    before = np.geterr()
    verdict = verify(select_plugin("reducer", "./mine.py:sets_errors", {}, base=tmp_path), examples=2)
    assert "process_settings" in {finding.promise for finding in verdict.of_status("broken")}
    assert np.geterr() == before
