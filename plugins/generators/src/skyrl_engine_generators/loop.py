"""The loop over slots: requests wait, are read, are sampled a token a step, and leave; free slots are filled while others go on.

A request waits until some slots are free, or all. Then its prompt is read in one forward pass (prefill), together with other prompts, but for
the beginning that was kept of its session or that its group has alike, and it is live: every step samples one token of every live row. A
finished one leaves its slot to the last live row, and what was read of it to the session's next turn. After an update nothing is kept, and all
live rows wait again, in front, and are read again with the tokens sampled so far.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from skyrl_engine.contracts import POLICY, Completion, TopLogprobs
from skyrl_engine_generators.admission import Admission, stack_ends
from skyrl_engine_generators.kept import CacheBudget, KeptRow, Room
from skyrl_engine_generators.rows import TokenDecoder
from skyrl_engine_generators.sampled_row import PromptScores, SampledRow
from skyrl_engine_generators.sampling import RowDistributions, draw, logprobs_of

OWN_TOKENS = 2**20
"""Tokens whose keys and values a loop holds that was given no budget."""

LOGITS_AT_ONCE = 2**22
"""Logits that log-probabilities of a prompt are computed from at once."""


class SlotLoop:
    """Samples requests from `rows`, `slots` of them at once. `version` is the number of steps after which `rows` took its weights.

    `budget` keeps rows under the name `target`, and `room` is the part of it that `rows` take; without them, the loop has a budget of its own.
    """

    def __init__(
        self,
        rows: TokenDecoder,
        slots: int,
        *,
        version: int = 0,
        prefill_tokens: int = 8192,
        target: str = POLICY,
        budget: CacheBudget | None = None,
        room: Room | None = None,
    ) -> None:
        self._rows = rows
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        self._target = target
        self._budget = budget or CacheBudget(OWN_TOKENS)
        self._room = room or self._budget.open_room()
        self._room.shrink = self._shrink
        # few free slots are not worth a forward pass of their own
        self._refill = max(1, slots // 16)
        self._waiting: deque[SampledRow] = deque()
        # the row in slot i is the i-th
        self._live: list[SampledRow] = []
        self._sessions: Counter[int] = Counter()
        self._settings: RowDistributions | None = None
        self.version = version

    def __len__(self) -> int:
        """Count the requests that are not finished."""
        return len(self._waiting) + len(self._live)

    def add(self, row: SampledRow) -> None:
        self._sessions[row.request.session] += 1
        self._waiting.append(row)

    def find(self, request_id: int) -> SampledRow | None:
        """Return the row of a request that is not finished; None where there is none."""
        return next((row for row in (*self._live, *self._waiting) if row.request.request_id == request_id), None)

    def update(self, version: int) -> None:
        """Go on with other weights: keys and values of the old ones are dropped, and live rows are read again before their next token."""
        self._budget.drop_target(self._target)
        for row in self._live:
            row.prompt_hidden = row.kept = None
        self._waiting.extendleft(reversed(self._live))
        self._live.clear()
        self._room.bound = 0
        self._settings = None
        self.version = version

    @torch.inference_mode()
    def abort(self, chosen: Callable[[int], bool]) -> list[Completion]:
        """End the requests of chosen ids."""
        ended = [row for row in (*self._live, *self._waiting) if chosen(row.request.request_id)]
        if ended:
            gone = {id(row) for row in ended}
            for row in ended:
                self._forget(row)
            self._waiting = deque(row for row in self._waiting if id(row) not in gone)
            self._compact(id(row) in gone for row in self._live)
        return [row.completion("abort") for row in ended]

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Read prompts into free slots where enough of them are free, else sample one token of every live row; what finished by it."""
        done = self._step()
        if done and not len(self):
            self._rows.rest()
        return done

    def _step(self) -> list[Completion]:
        free = self._slots - len(self._live)
        if self._waiting and free and (free >= self._refill or not self._live):
            before = len(self._waiting)
            done = self._admit(free)
            if len(self._waiting) < before:
                return done
        if not self._live:
            return []
        hidden = self._rows.step([row.last for row in self._live], [row.cached_length for row in self._live])
        if self._settings is None:
            self._settings = self._of(self._live)
        ended = self._sample(self._live, self._rows.logits(hidden), self._settings)
        self._leave(ended)
        return [completion for completion in ended if completion is not None]

    def _of(self, rows: Sequence[SampledRow]) -> RowDistributions:
        return RowDistributions.of([row.request.sampling for row in rows], self._rows.device)

    def _admit(self, free: int) -> list[Completion]:
        """Put waiting rows into free slots, as many as one pass reads and as memory holds."""
        admission = Admission(self._live, self._budget, self._target, self._rows.keeps, [])
        arrivals, longest, reading = admission.arrivals, 0, 0
        bound = max((row.bound for row in self._live), default=0)
        while self._waiting and len(arrivals) < free:
            row = self._waiting[0]
            bound = max(bound, row.bound)
            if not self._room.admits(bound * (len(self._live) + len(arrivals) + 1)):
                break
            arrival = admission.plan(row)
            longest = max(longest, arrival.unread)
            if arrival.unread and reading and longest * (reading + 1) > self._prefill_tokens:
                break
            reading += bool(arrival.unread)
            arrivals.append(arrival)
            self._room.bound = bound * (len(self._live) + len(arrivals))
            self._waiting.popleft()
        if not arrivals:
            return []
        self._settings = None
        first = len(self._live)
        ordered = admission.place(self._rows, first)
        for arrival in ordered:
            row = arrival.row
            if row.needs_prompt_logprobs and arrival.hidden is not None:
                row.prompt_scores = self._of_prompt(row, arrival.hidden)
            if arrival.kept is not None and arrival.kept.key == admission.key_of(row):
                row.kept, row.kept_tokens = ref(arrival.kept), arrival.start
        self._live += [arrival.row for arrival in ordered]
        done = self._sample(self._live[first:], self._rows.logits(stack_ends(ordered)), self._of(self._live[first:]))
        self._leave(done, first)
        return [completion for completion in done if completion is not None]

    def _leave(self, ended: Sequence[Completion | None], first: int = 0) -> None:
        """Let rows go that ended, among those from slot `first` on, and keep their prompts for the next turns of their sessions."""
        for slot, completion in enumerate(ended, first):
            if completion is None:
                continue
            row = self._live[slot]
            self._forget(row)
            if completion.finish != "error":
                self._keep(row, slot)
        self._compact([*([False] * first), *(completion is not None for completion in ended)])

    def _forget(self, row: SampledRow) -> None:
        """Note that a request of its session is no more; where its turn is the last one, nothing is kept of the session."""
        session = row.request.session
        self._sessions[session] -= 1
        if not self._sessions[session]:
            del self._sessions[session]
            if row.request.last_turn:
                self._budget.drop([(self._target, session)])

    def _keep(self, row: SampledRow, slot: int) -> None:
        """Keep what was read of a row, unless nobody may ask for it: of several requests that a session has at once, the last one stays."""
        count = row.cached_length if self._rows.keeps_sampled else len(row.prompt)
        session = row.request.session
        if not self._rows.keeps or row.request.last_turn or self._sessions[session]:
            return
        if not self._budget.takes(count):
            self._budget.note_short((self._target, session))
            return
        kept = None if row.kept is None else row.kept()
        begin = () if kept is None else kept.cut(row.kept_tokens).pieces
        start = row.kept_tokens if begin else 0
        pieces = (*begin, self._rows.save(slot, start, count)) if start < count else begin
        self._budget.keep(KeptRow((self._target, session), row.request.prefix_group, row.ids[:count], pieces))

    def _sample(self, rows: Sequence[SampledRow], logits: Tensor, settings: RowDistributions) -> list[Completion | None]:
        """Draw a token of every row; the completions of rows that end by it."""
        uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
        drawn = draw(logits, uniforms, settings)
        numbers, logprobs = self._rows.settle(torch.stack([drawn.tokens.double(), drawn.logprobs])).tolist()
        tokens = list(map(int, numbers))
        done: list[Completion | None] = []
        for place, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            # false for NaN too
            if not logprob > -float("inf"):
                done.append(row.completion("error", error=f"the model's logits are not finite after token {row.cached_length}"))
                continue
            row.add(token, logprob, self.version)
            if row.request.top_logprobs:
                values, ids = (drawn.scaled[place] - drawn.normalizer[place]).topk(row.request.top_logprobs)
                row.top.append((ids.cpu().numpy().astype(np.int32), values.cpu().numpy().astype(np.float32)))
            finish, stop = row.rule.after(row.tokens)
            done.append(None if finish is None else row.completion(finish, stop))
        return done

    def _of_prompt(self, row: SampledRow, hidden: Tensor) -> PromptScores:
        """Score every prompt token, and the most likely tokens at its position, given the tokens before it."""
        count, k, temperature = len(row.prompt), row.request.top_prompt_logprobs, row.request.sampling.temperature
        logprobs = np.full(count, np.nan, dtype=np.float32)
        top = TopLogprobs(np.zeros((count, k), dtype=np.int32), np.full((count, k), np.nan, dtype=np.float32))
        step = max(1, LOGITS_AT_ONCE // self._rows.vocabulary)
        for start in range(0, count - 1, step):
            places = slice(start + 1, min(start + step, count - 1) + 1)
            logits = self._rows.logits(hidden[places.start - 1 : places.stop - 1])
            own = torch.from_numpy(row.prompt[places, None]).to(logits.device)
            most = logits.topk(k).indices
            scores = logprobs_of(logits, torch.cat([own, most], dim=1), temperature).cpu().numpy()
            logprobs[places], top.logprobs[places] = scores[:, 0], scores[:, 1:]
            top.token_ids[places] = most.cpu().numpy()
        return PromptScores(logprobs, top if k else None)

    def _shrink(self) -> None:
        """Free memory that no live row needs."""
        self._rows.shrink(len(self._live), max((row.cached_length for row in self._live), default=0))

    def _compact(self, ended: Iterable[bool]) -> None:
        """Drop rows that ended, and move the last live ones into their slots."""
        gone = {place for place, is_ended in enumerate(ended) if is_ended}
        if not gone:
            return
        kept = len(self._live) - len(gone)
        movers = (place for place in range(len(self._live) - 1, kept - 1, -1) if place not in gone)
        for hole in sorted(index for index in gone if index < kept):
            mover = next(movers)
            self._rows.copy(mover, [hole], self._live[mover].cached_length)
            self._live[hole] = self._live[mover]
        del self._live[kept:]
        self._room.bound = len(self._live) * max((row.bound for row in self._live), default=0)
        self._settings = None
