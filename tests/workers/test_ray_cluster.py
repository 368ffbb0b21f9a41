"""Finding room for ranks on a Ray cluster: what each asks for, where it is placed, and no silence when there is none."""

import signal
import socket

import pytest

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.workers import ray_cluster
from skyrl_engine.workers.ray_actor import device_index
from skyrl_engine.workers.ray_cluster import by_machine, connect, import_ray, rank_resources, wait_for_room
from skyrl_engine.workers.ray_transport import on_start
from skyrl_engine.workers.spec import WorkerSpec
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.plugin import MegatronPlugin

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets of its own to the garbage collector


@pytest.mark.parametrize(
    ("device", "total", "expected"),
    [
        ("auto", {"CPU": 4.0, "GPU": 4.0}, {"CPU": 1, "GPU": 1}),
        ("auto", {"CPU": 4.0}, {"CPU": 1}),
        ("cpu", {"CPU": 4.0, "GPU": 4.0}, {"CPU": 1}),
        ("cuda", {"CPU": 4.0, "GPU": 2.0}, {"CPU": 1, "GPU": 1}),
    ],
)
def test_ranks_ask_for_gpus_where_the_cluster_has_them(device, total, expected):
    assert rank_resources(device, total, 2) == expected


@pytest.mark.parametrize(
    ("device", "total", "message"),
    [
        ("auto", {"CPU": 1.0}, r"needs 2 CPU, the Ray cluster has 1 CPU. Lower run.ranks, grow the cluster$"),
        ("cuda", {"CPU": 8.0}, r"needs 2 CPU and 2 GPU, the Ray cluster has 8 CPU and 0 GPU\. .*run\.device = \"cpu\"$"),
        ("auto", {"CPU": 8.0, "GPU": 1.0}, r"has 8 CPU and 1 GPU"),
    ],
)
def test_a_cluster_that_could_never_hold_the_ranks_is_refused(device, total, message):
    with pytest.raises(UnsupportedError, match=message):
        rank_resources(device, total, 2)


def test_ranks_of_one_machine_are_neighbours():
    assert by_machine(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]
    assert by_machine(["a", "a", "a"]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ([], None, 0),
        (["3"], "3", 0),  # as Ray does
        (["3"], None, 3),  # a cluster that hides nothing
        (["3"], "2,3", 1),
        (["GPU-b"], "GPU-a,GPU-b", 1),
    ],
)
def test_a_rank_takes_the_device_that_ray_assigned(assigned, visible, index):
    assert device_index(assigned, visible) == index


def test_an_address_where_nothing_answers_is_refused_at_once():
    """Ray itself would try for many minutes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"no Ray cluster can be joined at {address}"):
            connect(import_ray(), address, 1)


def test_a_ray_that_does_not_come_up_is_an_error_with_a_remedy(monkeypatch):
    """Ray raises a plain Exception where its own processes are late."""

    def fail_late(**_options):
        raise Exception("The current node timed out during startup.\nSee the logs.")  # noqa: TRY002 - as Ray does

    ray = import_ray()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail_late)
    with pytest.raises(EngineError, match="Ray did not start on this machine") as caught:
        connect(ray, None, 2)
    assert caught.value.cause.endswith("(The current node timed out during startup.)")
    assert "Try again when the machine is less busy" in caught.value.remedy


def test_the_signal_handlers_of_the_process_stay():
    """Ray's handler for SIGTERM would end a run at once, without its last step and checkpoint."""

    class Cluster:
        def is_initialized(self) -> bool:
            return False

        def init(self, **_options: object) -> None:
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        assert connect(Cluster(), None, 1) == "started"
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_room_that_others_hold_is_waited_for_with_a_word_and_not_for_ever(monkeypatch, caplog):
    ray = import_ray()
    from ray.util.placement_group import placement_group

    monkeypatch.setattr(ray_cluster, "WORD_SECONDS", 0.3)
    monkeypatch.setattr(ray_cluster, "PATIENCE_SECONDS", 1.0)
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        others = placement_group([{"CPU": 2.0}])
        assert others.wait(30)
        group = placement_group([{"CPU": 1.0}] * 2)
        with pytest.raises(EngineError, match="made no room for 2 ranks in 1 s: needed are 2 CPU, free are 0 CPU"):
            wait_for_room(ray, group.wait, {"CPU": 2.0}, who="2 ranks", remedy="lower run.ranks")
        assert "waiting for the Ray cluster to make room for 2 ranks" in caplog.text
    finally:
        ray.shutdown()


def test_ranks_on_gpus_start_with_the_variables_of_their_backend(monkeypatch):
    """CUDA reads them once, so they are in the environment of the process before anything of torch is; the user's own value stays."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    described = MegatronPlugin().skyrl_engine_describe_backend(MegatronConfig(tensor_parallel=2), 2)
    spec = WorkerSpec({}, FactoryContext(), ModelConfig("./missing"), None, described.topology, environment=described.environment)
    started = {"runtime_env": {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}}
    assert on_start(spec, {"CPU": 1.0, "GPU": 1.0}) == started
    assert on_start(spec, {"CPU": 1.0}) == {}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert on_start(spec, {"CPU": 1.0, "GPU": 1.0}) == {"runtime_env": {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}}
    alone = MegatronPlugin().skyrl_engine_describe_backend(MegatronConfig(pipeline_parallel=2), 2)
    assert alone.environment == {}
