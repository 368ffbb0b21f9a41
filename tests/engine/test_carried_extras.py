"""Expert routes and images that a collator or backend cannot take are refused while planning, not left out in silence."""

import numpy as np
import pytest

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.engine.capability import check_capabilities, collect_required_capabilities, require_carried
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_fsdp.plugin import FsdpConfig

TEXT = SampleColumns.from_lists(input_ids=[[1, 2]])
ROUTES = SampleColumns.from_lists(input_ids=[[1, 2]], routes=[[[[0, 1]]]])
IMAGES = {
    "images": Ragged(np.array(["cat.png"], dtype=object), offsets_of([1])),
    "mm_token_type_ids": [[1, 0]],
}


class TokensAlone(PaddedCollator):
    """Declares to carry nothing, as a collator does that does not say."""

    carries = frozenset()


def with_images(name: str) -> SampleColumns:
    return SampleColumns.from_lists(input_ids=[[1, 2]], extras={name: IMAGES[name]})


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
def test_the_fsdp_backend_refuses_what_it_does_not_declare(collator: PaddedCollator | PackedCollator) -> None:
    plugin = load(Registry.discover().resolve("backend", "fsdp"))
    check_capabilities(
        "fsdp",
        plugin.describe_backend(None, 1).capabilities,
        collect_required_capabilities(Topology(), collator, [TEXT, with_images("images")]),
    )
    description = plugin.describe_backend(FsdpConfig(tensor_parallel=2), 2)
    for data in (TEXT, with_images("images"), with_images("mm_token_type_ids")):
        required = collect_required_capabilities(Topology(), collator, [TEXT, data])
        assert required == {collator.rows} | ({"vision"} if data is not TEXT else set())
        check_capabilities("fsdp", description.capabilities, required)
    required = collect_required_capabilities(Topology(), collator, [TEXT, ROUTES])
    assert required == {collator.rows, "router_replay"}
    with pytest.raises(UnsupportedError, match="needs the capability 'router_replay', which backend fsdp does not declare"):
        check_capabilities("fsdp", description.capabilities, required)


@pytest.mark.parametrize(("data", "what"), [(ROUTES, "expert routes"), (with_images("images"), "images")])
def test_a_collator_that_does_not_declare_to_carry_is_refused(data: SampleColumns, what: str) -> None:
    require_carried("padded", PaddedCollator(), [TEXT, data])
    require_carried("plain", TokensAlone(), [TEXT])
    with pytest.raises(UnsupportedError, match=f"the data has {what}, which collator plain does not carry"):
        require_carried("plain", TokensAlone(), [TEXT, data])
