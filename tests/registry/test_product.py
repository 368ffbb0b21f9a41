"""A product is held to its contract when it is made: members, signatures, declared values."""

import pytest
from attrs import define

from skyrl_engine.errors import ContractError
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.owner import Owner
from skyrl_engine.registry.product import check_product, contract_of

OWNER = Owner("loss 'x' of acme 1.0.0", "Correct it")


def check(kind: str, product: object) -> None:
    check_product(KINDS[kind], product, OWNER, KINDS[kind].factory_hook)


@define
class GoodLoss:
    needs: tuple[str, ...] = ("logprobs",)
    reducers: tuple[str, ...] | None = None
    advised_reducers: tuple[str, ...] | None = None
    batch_local: bool = False
    homogeneous: bool = False

    def __call__(self, tokens: object) -> object:
        return tokens


class GoodReducer:
    empty_sequence = "skip"
    batch_local = False

    def weights(self, structure: object) -> object:
        return structure


class GoodCollator:
    rows = "padded"

    def plan(self, lengths, layout):
        pass

    def build(self, columns, micro_batch, *, fields=None):
        pass


class GenerousMerger:
    def merge(self, *arguments, **keywords):
        pass


class RenamedMerger:
    """Arguments that the engine passes by place may have any name."""

    def merge(self, parts, the_plan, debug=False):
        pass


@pytest.mark.parametrize(
    ("kind", "product"),
    [
        ("loss", GoodLoss()),
        ("loss", GoodLoss(needs=[], reducers=("sequence_mean",))),
        ("reducer", GoodReducer()),
        ("collator", GoodCollator()),
        ("merger", GenerousMerger()),
        ("merger", RenamedMerger()),
    ],
)
def test_products_that_keep_the_contract_pass(kind: str, product: object) -> None:
    check(kind, product)


class NamelessCorrection:
    def __call__(self, tokens: object) -> object:
        return tokens


class NoCall:
    needs = ()
    reducers = None
    batch_local = False


class NoEmptySequence:
    def weights(self, structure):
        pass


class OddEmptySequence(GoodReducer):
    empty_sequence = "maybe"


class OddBatchLocal(GoodReducer):
    batch_local = "sometimes"


class ForgetfulMerger:
    def merge(self, outputs):
        pass


class DemandingMerger:
    def merge(self, outputs, plan, device):
        pass


class PositionalCollator(GoodCollator):
    def build(self, columns, micro_batch):
        pass


class MergeIsData:
    merge = "merged"


@pytest.mark.parametrize(
    ("kind", "product", "message"),
    [
        ("loss", NoCall(), "it cannot be called"),
        ("loss", lambda tokens: tokens, "it has no attribute 'needs'"),
        ("loss", GoodLoss(needs="logprobs"), "needs must be a tuple of names, is 'logprobs'"),
        ("loss", GoodLoss(reducers="sequence_mean"), "reducers must be None or a tuple of names"),
        ("loss", GoodLoss(batch_local=None), "batch_local must be True or False"),
        ("loss", GoodLoss(homogeneous="yes"), "homogeneous must be True or False"),
        ("loss", GoodLoss(advised_reducers="sequence_mean"), "advised_reducers must be None or a tuple of names"),
        ("correction", NamelessCorrection(), "it has no attribute 'needs'"),
        ("reducer", NoEmptySequence(), "it has no attribute 'empty_sequence'"),
        ("reducer", OddEmptySequence(), "empty_sequence must be one of 'count', 'skip', is 'maybe'"),
        ("reducer", OddBatchLocal(), "batch_local must be True or False, is 'sometimes'"),
        ("merger", object(), "it has no method 'merge'"),
        ("merger", MergeIsData(), "it has no method 'merge'"),
        ("merger", ForgetfulMerger(), "it takes (outputs)"),
        ("merger", DemandingMerger(), "missing a required argument: 'device'"),
        ("collator", PositionalCollator(), "got an unexpected keyword argument"),
        ("collator", 7, "returned int, which is not a collator"),
        ("backend", object(), "it has no method 'setup'"),
        ("observer", None, "returned None"),
    ],
)
def test_products_that_break_the_contract_are_refused(kind: str, product: object, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        check(kind, product)
    assert message in str(caught.value)
    assert "loss 'x' of acme 1.0.0" in caught.value.cause
    assert caught.value.exit_code == 3


def test_every_contract_names_a_protocol() -> None:
    for kind in KINDS.values():
        contract = contract_of(kind)
        assert (contract is None) == (kind.name == "observer")
        assert contract is None or contract.__doc__
        assert contract is None or kind.late <= set(contract.__annotations__)
