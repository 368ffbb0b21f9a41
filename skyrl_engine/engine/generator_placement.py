"""The place of a run's generators: chosen and refused while planning, and started."""

from pathlib import Path
from typing import Literal

from attrs import fields

from skyrl_engine.cleanup import close_after
from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.schema import GeneratorTable
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.generator import GeneratorDescription, WeightForm
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers.generation import GeneratorDriver
from skyrl_engine.workers.generator_hosts import GeneratorHost, RankHost, RemoteHost, WeightFolders
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.messages import Export, LeaveDevice, WriteWeights
from skyrl_engine.workers.ray_cluster import multiply
from skyrl_engine.workers.replica_launch import LocalLauncher, ReplicaLauncher
from skyrl_engine.workers.replicas import ReplicaHost, SilenceLimits
from skyrl_engine.workers.sampler_facts import SamplerFacts
from skyrl_engine.workers.sharing_host import SharingHost

Placement = Literal["rank", "process", "remote"]


def choose_placement(
    label: str, description: GeneratorDescription, table: GeneratorTable | None = None, *, beside: bool = False
) -> Placement:
    """Return the place of a generator, which `label` names. `beside` says that it must sample while the ranks train.

    Raises UnsupportedError for keys of its table that its place does not read, and for a place where it cannot be.
    """
    placement = _choose(label, description, table, beside)
    if table is not None and table.share_devices:
        _refuse_sharing(label, description, placement, beside)
    return placement


def _choose(label: str, description: GeneratorDescription, table: GeneratorTable | None, beside: bool) -> Placement:
    wanted = "auto" if table is None else table.placement
    if description.placement == "remote":
        for key, is_set in (("placement", wanted != "auto"), *_list_process_keys(table)):
            if is_set:
                raise UnsupportedError(
                    f"generator.{key} is set, and {label} drives servers of its own",
                    remedy=f"Remove generator.{key}; see its own options",
                )
        return "remote"
    placement: Placement = description.placement
    if wanted != "auto":
        placement = wanted
    elif beside:
        placement = "process"
    if placement == "rank":
        for key, is_set in _list_process_keys(table):
            if is_set:
                raise UnsupportedError(
                    f"generator.{key} is set, and {label} samples on the ranks",
                    remedy='Set generator.placement = "process", or remove it',
                )
        if description.placement == "process":
            raise UnsupportedError(f"{label} cannot live on a rank", remedy="Remove generator.placement")
        if beside:
            raise UnsupportedError(
                f'generator.placement = "rank", where {label} samples only while nothing is trained, and rl.staleness is above 0',
                remedy='Set generator.placement = "process", or rl.staleness = 0',
            )
    elif not {"tensors", "directory", "adapter"} & {*description.accepts} and "recorded" not in description.capabilities:
        raise UnsupportedError(
            f"{label} takes weights as {' or '.join(description.accepts) or 'nothing'}, which a process of its own cannot be given",
            remedy="Let it sample on the ranks: remove generator.placement, with rl.staleness = 0",
        )
    elif table is not None and table.devices and table.replicas not in (1, len(table.devices)):
        raise UnsupportedError(
            f"generator.replicas is {table.replicas}, and generator.devices names {len(table.devices)}",
            remedy="Remove generator.replicas: there is one on each device",
        )
    return placement


def _refuse_sharing(label: str, description: GeneratorDescription, placement: Placement, beside: bool) -> None:
    """Refuse a generator that is to work on the devices of the ranks, in turns with them, and cannot."""
    key = "generator.share_devices is set"
    if placement == "rank":
        raise UnsupportedError(
            f"{key}, and {label} samples on the ranks, with what they hold",
            remedy='Set generator.placement = "process", or remove it',
        )
    if beside:
        raise UnsupportedError(
            f"{key}, and with rl.staleness above 0 ranks and generators work at once",
            remedy="Set rl.staleness = 0, or remove it and give the generators devices of their own",
        )
    if "sleep" not in description.capabilities:
        raise UnsupportedError(
            f"{key}, and {label} does not declare the capability 'sleep'",
            remedy="Let the generator sleep, if it has an option for that, or remove it and give the generator devices of its own",
        )


def needs_no_ranks(plugin: SelectedPlugin) -> bool:
    """Say whether a generator drives servers and takes no weights, so that it samples without a model here."""
    description: GeneratorDescription = plugin.loaded.describe_generator(plugin.options)
    return description.placement == "remote" and not description.accepts


def _list_process_keys(table: GeneratorTable | None) -> tuple[tuple[str, bool], ...]:
    """Return the keys that only the placement "process" reads, and whether they are set."""
    if table is None:
        return ()
    return (
        ("replicas", table.replicas > 1),
        ("devices", bool(table.devices)),
        ("launch", table.launch != "local"),
        ("silent_seconds", table.silent_seconds != fields(GeneratorTable).silent_seconds.default),
        ("weights_seconds", table.weights_seconds != fields(GeneratorTable).weights_seconds.default),
    )


def start_host(
    group: WorkerGroup | None,
    plugin: SelectedPlugin,
    table: GeneratorTable | None,
    *,
    context: FactoryContext,
    model: ModelConfig,
    facts: SamplerFacts,
    version: int,
    beside: bool = False,
) -> GeneratorHost:
    """Start the generators of a run where `choose_placement` says, with the weights as they are. Raises what their start raises.

    `group` are the ranks; None: there are none, for a generator that `needs_no_ranks`.
    """
    label = str(plugin.loaded.record)
    description: GeneratorDescription = plugin.loaded.describe_generator(plugin.options)
    placement = choose_placement(label, description, table, beside=beside)
    lock = plugin.to_lock_entry()
    if placement == "rank":
        assert group is not None, "a generator without ranks drives servers"
        return RankHost.start(group, lock, facts, version)

    def write_weights_of_ranks(folder: Path, form: WeightForm) -> None:
        assert group is not None, "weights come from ranks"
        group.ask(Export(folder) if form == "adapter" else WriteWeights(folder))

    replicas = count_replicas(table)
    launcher = _choose_launcher(group, table, replicas) if placement == "process" else None
    root = None if facts.folder is None else facts.folder / "weights"
    shares = table is not None and table.share_devices
    folders = WeightFolders.open(write_weights_of_ranks, model, description, label, root)
    host: GeneratorHost
    try:
        folders.write(version)
        if shares:
            assert group is not None, "devices are shared with ranks"
            group.ask(LeaveDevice())
        if launcher is None:
            host = RemoteHost.start(GeneratorDriver(plugin.bind("generator", context)), folders, facts, version)
        else:
            host = ReplicaHost.start(
                lock,
                context,
                facts,
                folders,
                label=label,
                version=version,
                replicas=replicas,
                launcher=launcher,
                limits=SilenceLimits() if table is None else SilenceLimits(table.silent_seconds, table.weights_seconds),
            )
    except BaseException as error:
        close_after(error, folders.close)
        raise
    return SharingHost.open(host, group) if shares and group is not None else host


def count_replicas(table: GeneratorTable | None) -> int:
    """Return the number of processes of the placement "process"."""
    return 1 if table is None else len(table.devices) or table.replicas


def _choose_launcher(group: WorkerGroup | None, table: GeneratorTable | None, replicas: int) -> ReplicaLauncher:
    if table is None or table.launch == "local":
        devices = (table.devices if table is not None else ()) or ("cpu",) * replicas
        return LocalLauncher(devices, ranks=0 if group is None else group.topology.world_size)
    from skyrl_engine.workers.ray_replica import RayLauncher

    assert group is not None, "replicas take the weights of ranks"
    rank = group.ray_resources
    assert rank is not None, "the configuration refuses replicas on Ray beside ranks that are not"
    gpus = rank.get("GPU", 0.0) if table.gpus is None else table.gpus
    share = {"CPU": table.cpus, **({"GPU": gpus} if gpus else {})}
    return RayLauncher.open(share, replicas, ranks=multiply(rank, group.topology.world_size))
