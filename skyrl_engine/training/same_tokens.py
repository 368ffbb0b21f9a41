"""Two models of one run must mean the same tokens by the same numbers."""

from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import UnsupportedError


def refuse_other_tokens(what: str, table: str, own: ModelFiles, trained: ModelFiles) -> None:
    """Raise UnsupportedError where a token of the trained model has another number, or none, in the model of configuration table `table`.

    `what` names that model, as "the teacher" does. Rows of an embedding behind the tokenizer's last token are padding, and may differ.
    """
    path, theirs = own.facts.model.path, own.tokenizer.get_vocab()
    ours = trained.tokenizer.get_vocab()
    other = min((token for token, number in ours.items() if theirs.get(token) != number), key=ours.__getitem__, default=None)
    remedy = f"Set {table}.path to a model with the tokenizer of the trained one"
    if other is not None:
        raise UnsupportedError(
            f"{what} {path} has another tokenizer than the trained model: the token {other!r} is number {ours[other]} of the one and "
            f"{theirs.get(other, 'none')} of the other",
            remedy=remedy,
        )
    known, needed = own.facts.vocabulary_size, trained.facts.vocabulary_size
    if known is not None and needed is not None and known < needed:
        raise UnsupportedError(f"{what} {path} knows {known:,} tokens, and the trained model {needed:,}", remedy=remedy)
