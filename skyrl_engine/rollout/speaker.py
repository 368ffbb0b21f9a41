"""A model that answers messages, token by token, without a run around it: for `skyrl-engine chat`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from attrs import define, evolve, field

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.environment import Action, Message
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Generator, GeneratorDescription, Sampling
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ModelError, RolloutError, UnsupportedError
from skyrl_engine.model_facts.end_tokens import end_tokens
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.chat_renderer import ChatRenderer, Tools
from skyrl_engine.rollout.text_stream import TextStream
from skyrl_engine.rollout.turn_tokens import Ids
from skyrl_engine.workers.generation import GeneratorDriver, LoadedWeights
from skyrl_engine.workers.sampler_facts import SamplerFacts

_SESSION = 0
"""One dialogue is under way with a speaker, whose turns go on from what the generator kept of it."""


@define(eq=False)
class Speaker:
    """A model in this process with its generator and its chat template; `name` is that of the model, for people.

    A prompt is rendered anew for every answer, as a server does: what is the same as in the last turn, token by token, is not read again.
    """

    name: str
    renderer: ChatRenderer
    longest: int | None
    """Most tokens of a prompt with its answer; None where the model does not say."""
    _driver: GeneratorDriver
    _sampling: Sampling
    _requests: int = field(default=0, init=False)

    @classmethod
    def open(
        cls, model: ModelConfig, generator: SelectedPlugin, sampling: Sampling, *, device: str, raw: bool, name: str
    ) -> "Speaker":
        """Load the model onto `device`, with the adapters of `model.lora.path` merged, and start the generator over its memory.

        `raw` says that no template writes prompts: each is one text, answered by itself. Raises ModelError for a model that is no causal
        language model or has no chat template, and UnsupportedError for a generator that shows no tokens on their way.
        """
        _refuse_generator(generator)
        files = ModelFiles.of(model)
        _refuse_classifier(files)
        renderer = ChatRenderer(files.tokenizer, "template", raw=raw)
        if not raw and not files.tokenizer.chat_template:
            raise ModelError(
                f"{name} has no chat template, so it was not trained to chat",
                remedy="Give one with --template FILE, or add --template none: each line is then a text that it goes on from",
            )
        # a tokenizer may name another end token than its template writes after a turn
        closing = None if raw else renderer.closing()
        ends = sampling.stop_token_ids if closing is None else (*sampling.stop_token_ids, closing[0])
        facts = SamplerFacts(end_tokens(model, files.tokenizer), files.facts.vocabulary_size, files.facts.longest_row)
        part: BoundPlugin[Generator] = generator.bind("generator", FactoryContext(pad_token_id=files.pad_token_id))
        driver = GeneratorDriver(part)
        # adapters are merged into the weights that are shown
        driver.start(facts.make_start(evolve(model, lora=None), device, LoadedWeights.read(model, device), version=0))
        return cls(name, renderer, facts.longest, driver, evolve(sampling, stop_token_ids=ends))

    def answer(
        self, messages: Sequence[Message], tools: Tools, *, turn: int, seed: int, is_stopped: Callable[[], bool]
    ) -> Iterator[str | Action]:
        """Yield the text of an answer as it is sampled, "" while there is none to show, and at its end the whole of it as an action.

        `is_stopped` is asked after every token. An answer is at most as long as the context has room. Raises RolloutError where it has none,
        and DataError for messages that the template refuses.
        """
        prompt = self.renderer.prompt(messages, tools, name="the dialogue")
        sampling = self._fit(prompt)
        number = self._requests
        self._requests += 1
        self._driver.submit([GenerationRequest(number, prompt, sampling, seed, session=_SESSION)])
        stream = TextStream(partial(self._decode))
        completion: Completion | None = None
        aborted = False
        try:
            while completion is None:
                completion = next(iter(self._driver.poll(0.0, eager=True)), None)
                if completion is None:
                    yield stream.extend(self._driver.read_sampled(number).tolist())
                    if is_stopped() and not aborted:
                        self._driver.abort([number])
                        aborted = True
        finally:
            if completion is None:
                self._driver.abort([number])
                self._driver.poll(0.0, eager=True)
        if completion.finish == "error":
            raise RolloutError(
                f"{self.name} cannot answer: {completion.error}", remedy="Begin anew with /reset, or raise that limit"
            )
        yield stream.extend(completion.token_ids.tolist(), last=True)
        yield self.renderer.action(completion, turn, tools)

    def forget(self) -> None:
        """Free what the generator keeps of the dialogue."""
        self._driver.end_sessions([_SESSION])

    def close(self) -> None:
        """Free the model."""
        self._driver.close()

    def _fit(self, prompt: Ids) -> Sampling:
        """Return how to sample, with no more tokens than the context has room for."""
        if self.longest is None:
            return self._sampling
        room = self.longest - len(prompt)
        if room < 1:
            raise RolloutError(
                f"the context is full: the dialogue has {len(prompt):,} tokens, and {self.name} takes {self.longest:,}",
                remedy="Begin anew with /reset, or say less",
            )
        return evolve(self._sampling, max_tokens=min(self._sampling.max_tokens, room))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.renderer.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _refuse_generator(generator: SelectedPlugin) -> None:
    description: GeneratorDescription = generator.loaded.describe_generator(generator.options)
    if "streaming" not in description.capabilities or "module" not in description.accepts:
        raise UnsupportedError(
            f"{generator.loaded.record} does not show tokens as they are sampled from a model in this process, and a chat does",
            remedy='Set generator.use = "hf", or remove it',
        )


def _refuse_classifier(files: ModelFiles) -> None:
    """Refuse a model that values texts: of those whose head is tied, transformers would make a language model without a word."""
    config = files.facts.config
    named = [] if config is None else [*(getattr(config, "architectures", None) or ())]
    if named and all(name.endswith("Classification") for name in named):
        raise ModelError(
            f"{files.source.path} is a {named[0]}, which values texts and writes none",
            remedy="Chat with a causal language model",
        )
