"""The order in which a machine is examined: what is quick first, training last."""

from skyrl_engine.doctor.caches import examine_caches
from skyrl_engine.doctor.finding import MachinePart
from skyrl_engine.doctor.installed import examine_distributions, examine_plugins
from skyrl_engine.doctor.libraries import examine_ray, examine_torch
from skyrl_engine.doctor.machine import (
    examine_disks,
    examine_left_overs,
    examine_limits,
    examine_memory,
    examine_name,
    examine_python,
)
from skyrl_engine.doctor.self_test import examine_training

PARTS = (
    MachinePart("python", examine_python),
    MachinePart("memory", examine_memory),
    MachinePart("disks", examine_disks),
    MachinePart("limits", examine_limits),
    MachinePart("name of the machine", examine_name),
    MachinePart("distributions", examine_distributions),
    MachinePart("torch", examine_torch),
    MachinePart("ray", examine_ray),
    MachinePart("plugins", examine_plugins),
    MachinePart("caches", examine_caches),
    MachinePart("left-overs", examine_left_overs),
)
SELF_TEST = MachinePart("self-test", examine_training)
