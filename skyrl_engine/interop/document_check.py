"""Try a model with documents of a collator: each must be scored as if it stood alone, whatever lies beside it."""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.interop.hf_rows import LabelledDocuments, LaidOut

if TYPE_CHECKING:
    import torch

LENGTHS = (9, 5, 7)
TOLERANCES = {"torch.float64": 1e-4, "torch.float32": 1e-4}
"""The largest difference of logits, relative to the largest logit, by dtype. Rounding of float32 stays below 1e-5."""
COARSE = 5e-2
"""The same for other dtypes: bfloat16 has eight bits."""


def check_documents(lay_out: Callable[[LabelledDocuments], LaidOut], label: str, model: Any) -> None:
    """Raise UnsupportedError where `model(**batch)` fails, or scores a document otherwise than `model(input_ids)` of it alone."""
    import torch

    documents = _draw_documents(model)
    name = type(model).__name__
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            laid_out = lay_out(documents)
            places = laid_out.gather
            logits = _call(model, name, label, laid_out.batch)
            beside = logits[torch.from_numpy(places.rows), torch.from_numpy(places.columns)]
            alone = _score_alone(model, laid_out.documents)[torch.from_numpy(places.actions)]
    finally:
        model.train(was_training)
    difference = (beside - alone).abs().max() / alone.abs().max()
    tolerance = TOLERANCES.get(str(beside.dtype), COARSE)
    if not difference <= tolerance:
        raise UnsupportedError(
            f"{name} scores a document in rows of {label} otherwise than alone: logits differ by {difference:.1e} of the largest",
            remedy="Choose the collator padded, or another attention implementation"
            if "attention_mask" not in laid_out.batch
            else "Choose the collator packed, or collate rows of one length with the model's own",
        )


def _draw_documents(model: Any) -> LabelledDocuments:
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    ids = np.random.default_rng(3).integers(0, vocabulary, sum(LENGTHS))
    return LabelledDocuments(ids, ids, offsets_of(LENGTHS))


def _call(model: Any, name: str, label: str, batch: Any) -> "torch.Tensor":
    import torch

    device = next(model.parameters()).device
    moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    del moved["labels"]
    try:
        logits: torch.Tensor = model(**moved).logits
    except TypeError as error:
        raise UnsupportedError(
            f"{name} does not take what {label} makes ({', '.join(batch)}): {error}",
            remedy="Choose another collator, or another model",
        ) from error
    return logits.cpu()


def _score_alone(model: Any, documents: LabelledDocuments) -> "torch.Tensor":
    """Return the logits before every token but the first of its document, [actions, vocabulary]."""
    import torch

    device = next(model.parameters()).device
    bounds = documents.offsets
    rows = [torch.from_numpy(documents.input_ids[start:stop])[None].to(device) for start, stop in pairwise(bounds)]
    return torch.cat([model(input_ids=ids).logits[0, :-1].cpu() for ids in rows])
