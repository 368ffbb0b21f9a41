"""Push the exported model of a run to a repository of the Hugging Face hub, with a card that tells how it was trained.

Everything goes in one commit, so that no repository is left half written. The token is read from the environment (`HF_TOKEN`, or what
`hf auth login` keeps) and handed to the client alone.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import frozen

from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.report.run_facts import RunFacts, read_run
from skyrl_engine.tracking.flat_config import hide_secrets
from skyrl_engine.training.model_card import write_model_card

_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_CARD: Final = "README.md"
_CONFIGURATIONS: Final = ("config.json", "adapter_config.json")
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")


@frozen
class ModelToPush:
    """The files of an exported model, and the run that it comes from. `size` is in bytes."""

    run: RunFacts
    folder: Path
    files: tuple[Path, ...]
    size: int


def find_model_to_push(run: Path, folder: Path | None = None) -> ModelToPush:
    """Find the model that a run wrote at its end, or in `folder` an export of it.

    Raises ConfigError for a folder that is no run, or without an exported model, and for links in it.
    """
    facts = read_run(run)
    place = facts.directory.model if folder is None else folder
    files = tuple(sorted(path for path in place.rglob("*") if path.is_file())) if place.is_dir() else ()
    if (link := next((path for path in place.rglob("*") if path.is_symlink()), None)) is not None:
        raise ConfigError([Problem(str(link), "is a link, and may lead out of the model's folder", "Put the file itself there")])
    names = {path.relative_to(place).as_posix() for path in files}
    if not names & set(_CONFIGURATIONS) or not any(name.endswith(".safetensors") for name in names):
        remedy = f"Write one with `skyrl-engine export {run} FOLDER`, and name it with --model FOLDER"
        raise ConfigError([Problem(str(place), "holds no exported model", remedy)])
    return ModelToPush(facts, place, files, sum(path.stat().st_size for path in files))


def push_model(model: ModelToPush, repository: str, *, public: bool = False, update: bool = False) -> str:
    """Write a model and its card to `repository` (NAMESPACE/NAME) in one commit, and return the repository's address.

    A repository that exists is written to only with `update`: its history keeps what was there, and weights that the model no longer has are
    deleted. A new one is private unless it is `public`.

    Raises ConfigError for a name that the hub does not take, without a token, and for a repository that exists; EngineError where the hub
    does not answer, or refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if _NAME.fullmatch(repository) is None:
        raise ConfigError(
            [Problem("REPOSITORY", f"{repository} is no name of a repository", "Name it NAMESPACE/NAME, as ada/my-model")]
        )
    token = os.environ.get("HF_TOKEN") or get_token()
    if not token:
        raise ConfigError(
            [Problem("HF_TOKEN", "is not set", "Set it to a token of the hub that may write, or run `hf auth login`")]
        )
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    card = write_model_card(model.run, adapters=(model.folder / "adapter_config.json").is_file())
    with _refusals_of_hub(repository, token):
        exists = api.repo_exists(repository)
        if exists and (public or not update):
            cause = f"{repository} exists, {'and a push does not change who sees it' if public else 'and would be written over'}"
            remedy = "Remove --public" if public else "Name another repository, or add --update to write a commit onto it"
            raise ConfigError([Problem("REPOSITORY", cause, remedy)])
        if not exists:
            api.create_repo(repository, private=not public)
        local = {path.relative_to(model.folder).as_posix(): path for path in model.files}
        local.pop(_CARD, None)
        there = api.list_repo_files(repository) if exists else []
        stale = [name for name in there if name.endswith(_WEIGHTS) and name not in local]
        commit = api.create_commit(
            repository,
            [
                CommitOperationAdd(_CARD, card.encode()),
                *(CommitOperationAdd(name, path) for name, path in local.items()),
                *(CommitOperationDelete(name, is_folder=False) for name in stale),
            ],
            commit_message=f"{model.run.trainer}, step {model.run.step}, by skyrl_engine",
        )
    return str(commit.repo_url)


@contextmanager
def _refusals_of_hub(repository: str, token: str) -> Iterator[None]:
    """Turn the client's errors into ours, without the token."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # noqa: BLE001 - the client raises errors of its own and of the libraries under it
        first: BaseException = error
        while first.__cause__ is not None and not hasattr(first, "response"):
            first = first.__cause__
        said = next((line for line in str(first).splitlines() if line.strip()), type(first).__name__)
        status = getattr(getattr(first, "response", None), "status_code", None)
        remedy = (
            f"Give HF_TOKEN a token that may write to {repository}"
            if status in (401, 403)
            else "Push again when the hub can be reached: a push is one commit, so nothing is half written"
        )
        cause = hide_secrets(said.replace(token, "(hidden)")).rstrip(".")
        raise EngineError(f"the hub did not take {repository} ({cause})", remedy=remedy) from None
