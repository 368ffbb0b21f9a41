"""The verbs of an engine that sample from its model: a generator on its ranks, requests, and further weights to sample from."""

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.schema import GeneratorTable
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest
from skyrl_engine.contracts.values.model import LoraConfig
from skyrl_engine.engine.generator_placement import start_host
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.engine.pass_engine import PassEngine
from skyrl_engine.engine.sampler import Sampler
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.end_tokens import end_tokens
from skyrl_engine.workers.future import Future
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.sampler_facts import SamplerFacts


def make_sampler(
    group: WorkerGroup | None,
    generator: SelectedPlugin,
    table: GeneratorTable | None,
    files: ModelFiles,
    context: FactoryContext,
    *,
    version: int = 0,
    longest: int | None = None,
    folder: Path | None = None,
    beside: bool = False,
) -> Sampler:
    """Start generators where `table` says, beside the ranks of `group`; None: there are none, for a generator that `needs_no_ranks`.

    The other arguments and what is raised are those of `SamplingVerbs.start_sampler`.
    """
    model, vocabulary = files.facts.model, files.facts.vocabulary_size
    facts = SamplerFacts(end_tokens(model, files.tokenizer), vocabulary, longest, folder)
    host = start_host(group, generator, table, context=context, model=model, facts=facts, version=version, beside=beside)
    description = generator.loaded.describe_generator(generator.options)
    return Sampler(host, str(generator.loaded.record), description, version, vocabulary)


class SamplingVerbs(PassEngine):
    """The part of `Engine` that samples."""

    _files: ModelFiles
    _generator_table: GeneratorTable | None
    _sampler: Sampler | None = None

    @property
    def vocabulary_size(self) -> int | None:
        """The number of token ids that the model knows; None where its configuration does not say."""
        return self._files.facts.vocabulary_size

    @property
    def sampler(self) -> Sampler:
        """The sampler that `start_sampler` or `generate` started, for requests and completions as a stream."""
        self.group.refuse_ended()
        if self._sampler is None:
            raise UnsupportedError("no generator was started", remedy="Call start_sampler or generate first")
        return self._sampler

    @property
    def has_sampler(self) -> bool:
        """Say whether a generator was started, so that `sampler` can be used."""
        return self._sampler is not None

    def start_sampler(
        self,
        generator: SelectedPlugin,
        *,
        version: int | None = None,
        longest: int | None = None,
        folder: Path | None = None,
        beside: bool = False,
    ) -> Sampler:
        """Start generators with the weights as they are, where the table `[generator]` says; it ends those that were started before.

        `version` is what tokens of these weights carry (None: the optimizer steps that made them). `longest` counts the tokens of the longest
        attempt (None: nobody says), `folder` takes what generators write, and `beside` says that they
        must sample while the ranks train. Raises UnsupportedError for a generator, a place or weights that do not go together, and what the
        generator's start raises.
        """
        self.group.refuse_ended()
        self._end_sampler()
        self._sampler = make_sampler(
            self.group,
            generator,
            self._generator_table,
            self._files,
            self.assembly.context,
            version=self.step if version is None else version,
            longest=longest,
            folder=folder,
            beside=beside,
        )
        return self._sampler

    def _end_sampler(self) -> None:
        """End generators that live in processes of their own or drive servers; those of ranks end with the ranks, or as others start there."""
        if self._sampler is not None and not self._sampler.on_ranks:
            sampler, self._sampler = self._sampler, None
            sampler.close()

    def generate(self, requests: Sequence[GenerationRequest]) -> Future[list[Completion]]:
        """Sample from the model as it is: completions in the order of the requests, whose tokens carry the number of steps of the weights.

        The first call starts the generator that the configuration's table `[generator]` selects. Raises UnsupportedError without one, and for
        what the generator does not claim; ContractError for a request that no generator could serve.
        """
        self.group.refuse_ended()
        sampler = self._sampler
        if sampler is None:
            selected = self.assembly.plugins.get("generator")
            if selected is None:
                raise UnsupportedError(
                    "the engine was opened without a generator", remedy='Add [generator] with use = "hf" to the configuration'
                )
            sampler = self.start_sampler(selected)
        elif sampler.version != self.step:
            sampler.update(self.step)
        return sampler.generate(requests)

    def add_weights(self, target: str, model: str | Path, adapter: str | Path | None = None) -> None:
        """Let requests with this `target` sample from weights other than those that are trained: of `model`, a directory or hub id of the
        same architecture, with the adapter of a PEFT directory merged.

        The generator must have been started. Raises ModelError for weights that do not fit, UnsupportedError for a generator that takes none.
        """
        self.group.refuse_ended()
        trained_model = self._files.facts.model
        is_own_base = str(model) == trained_model.path
        lora = None if adapter is None else LoraConfig(path=str(adapter))
        if lora is not None and trained_model.lora is not None and is_own_base:
            lora = trained_model.lora.stored_at(str(adapter))
        revision = trained_model.revision if is_own_base else None
        self.sampler.load(evolve(trained_model, path=str(model), revision=revision, lora=lora), target)
