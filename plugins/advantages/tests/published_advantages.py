"""Advantages as other engines publish them, as plain loops over Python floats, and the attempts that they are tried on.

docs/reference/advantages.md names repository, file and version of each. A formula takes attempts and gives one list of advantages for each,
[token], of which only those of sampled tokens count.
"""

import math
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

GAMMA, LAM = 0.9, 0.8


@frozen
class Word:
    """One token of an attempt: whether the model sampled it, its reward, and the critic's value."""

    sampled: bool
    reward: float = 0.0
    value: float = 0.0


@frozen
class Attempt:
    group: int
    words: tuple[Word, ...]

    @property
    def reward(self) -> float:
        total = 0.0
        for word in self.words:
            total += word.reward
        return total


Published = Callable[[Sequence[Attempt]], list[list[float]]]


def attempts() -> list[Attempt]:
    """Groups of four, three, two and one; equal rewards, a negative mean, tool answers between turns, rewards of turns, many lengths."""
    rewards = {0: (1.0, 0.0, 0.25, 3.0), 1: (-1.0, -2.5, 0.5), 2: (3.25, 3.25), 3: (2.0,)}
    attempts_of_groups = []
    for group, of_group in rewards.items():
        for member, reward in enumerate(of_group):
            length = 2 + (3 * group + 2 * member) % 5
            values = [0.125 * group - 0.375 * member + 0.25 * place for place in range(length)]
            words = [Word(True, 0.0, value) for value in values]
            if member % 2 == 0:
                words[1:1] = [Word(False, 0.0, 5.0), Word(False, 0.0, -4.0)]
                words[0] = evolve(words[0], reward=0.5)
            words[-1] = evolve(words[-1], reward=reward - words[0].reward)
            attempts_of_groups.append(Attempt(group, tuple(words)))
    return attempts_of_groups


# ---------------------------------------------------------------- what the pages have in common


def groups_of(batch: Sequence[Attempt]) -> dict[int, list[int]]:
    indices_of_group: dict[int, list[int]] = {}
    for place, attempt in enumerate(batch):
        indices_of_group.setdefault(attempt.group, []).append(place)
    return indices_of_group


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation_of(values: Sequence[float]) -> float:
    """With the number less one under the root, as torch.std."""
    mean = mean_of(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def by_group(formula: Callable[[list[float]], list[float]]) -> Published:
    """One number for each attempt, out of the rewards of its group, at all of its tokens."""

    def published(batch: Sequence[Attempt]) -> list[list[float]]:
        values = [0.0] * len(batch)
        for places in groups_of(batch).values():
            for place, value in zip(places, formula([batch[index].reward for index in places]), strict=True):
                values[place] = value
        return [[value] * len(attempt.words) for value, attempt in zip(values, batch, strict=True)]

    return published


def sampled(batch: Sequence[Attempt]) -> list[list[bool]]:
    return [[word.sampled for word in attempt.words] for attempt in batch]


def all_words(batch: Sequence[Attempt]) -> list[list[bool]]:
    """SkyRL's `response_mask`: every token after the prompt."""
    return [[True] * len(attempt.words) for attempt in batch]


Mask = Callable[[Sequence[Attempt]], list[list[bool]]]


def chosen(values: Sequence[Sequence[float]], mask: Sequence[Sequence[bool]]) -> list[float]:
    return [value for row, taken in zip(values, mask, strict=True) for value, counts in zip(row, taken, strict=True) if counts]


def masked_whiten(values: list[list[float]], mask: list[list[bool]]) -> list[list[float]]:
    """The function that verl and SkyRL took from TRL: the variance with n - 1, 1e-8 added under the root."""
    among = chosen(values, mask)
    mean, variance = mean_of(among), deviation_of(among) ** 2
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in values]


# ---------------------------------------------------------------- verl, SkyRL


def verl_grpo(*, by_deviation: bool = True) -> Published:
    """`compute_grpo_outcome_advantage`; SkyRL's is the same. A group of one has mean 0 and deviation 1."""

    def formula(rewards: list[float]) -> list[float]:
        alone = len(rewards) == 1
        mean, deviation = (0.0, 1.0) if alone else (mean_of(rewards), deviation_of(rewards))
        return [(reward - mean) / (deviation + 1e-6) if by_deviation else reward - mean for reward in rewards]

    return by_group(formula)


def verl_rloo(rewards: list[float]) -> list[float]:
    """`compute_rloo_outcome_advantage`: a group of one keeps its reward."""
    count = len(rewards)
    if count == 1:
        return rewards
    mean = mean_of(rewards)
    return [reward * count / (count - 1) - mean * count / (count - 1) for reward in rewards]


def verl_rloo_vectorized(rewards: list[float]) -> list[float]:
    count = len(rewards)
    return [(count * reward - sum(rewards)) / max(count - 1, 1) * (count > 1) for reward in rewards]


def verl_reinforce_plus_plus(batch: Sequence[Attempt]) -> list[list[float]]:
    """Returns are carried past observations, without a discount there."""
    returns = []
    for attempt in batch:
        running, row = 0.0, []
        for word in reversed(attempt.words):
            if word.sampled:
                running = word.reward + GAMMA * running
            row.append(running if word.sampled else 0.0)
        returns.append(row[::-1])
    return masked_whiten(returns, sampled(batch))


def earlier_verl_reinforce_plus_plus(batch: Sequence[Attempt]) -> list[list[float]]:
    """January 2026 (b178a3cd5): an observation sets the return to 0, so that no turn hears of a later one. SkyRL's words, verl's mask."""
    return reset_returns(batch, sampled(batch))


def skyrl_reinforce_plus_plus(batch: Sequence[Attempt]) -> list[list[float]]:
    return reset_returns(batch, all_words(batch))


def reset_returns(batch: Sequence[Attempt], mask: list[list[bool]]) -> list[list[float]]:
    returns = []
    for attempt, counts in zip(batch, mask, strict=True):
        running, row = 0.0, []
        for word, counted in zip(reversed(attempt.words), reversed(counts), strict=True):
            running = word.reward + GAMMA * running
            row.append(running)
            running *= counted
        returns.append(row[::-1])
    return masked_whiten(returns, mask)


def verl_reinforce_plus_plus_baseline(batch: Sequence[Attempt]) -> list[list[float]]:
    return masked_whiten(verl_grpo(by_deviation=False)(batch), sampled(batch))


def verl_gae(batch: Sequence[Attempt]) -> list[list[float]]:
    """Observations are skipped: neither their value nor a discount for them."""
    advantages = []
    for attempt in batch:
        next_value, last, row = 0.0, 0.0, []
        for word in reversed(attempt.words):
            now = word.reward + GAMMA * next_value - word.value + GAMMA * LAM * last
            if word.sampled:
                next_value, last = word.value, now
            row.append(last)
        advantages.append(row[::-1])
    return masked_whiten(advantages, sampled(batch))


def skyrl_gae(batch: Sequence[Attempt]) -> list[list[float]]:
    """Over every token after the prompt, values of observations included."""
    advantages = []
    for attempt in batch:
        next_value, last, row = 0.0, 0.0, []
        for word in reversed(attempt.words):
            last = word.reward + GAMMA * next_value - word.value + GAMMA * LAM * last
            next_value = word.value
            row.append(last)
        advantages.append(row[::-1])
    return masked_whiten(advantages, all_words(batch))


def skyrl_maxrl(rewards: list[float]) -> list[float]:
    """Divides by the mean whatever its sign; a group of one keeps its reward."""
    if len(rewards) == 1:
        return rewards
    mean = mean_of(rewards)
    return [(reward - mean) / (mean + 1e-6) for reward in rewards]


def skyrl_batch_normalize(batch: Sequence[Attempt]) -> list[list[float]]:
    """`_normalize_advantages`: the mean is over the padded batch, the deviation over positions after the prompt, around that mean."""
    advantages = verl_grpo(by_deviation=False)(batch)
    longest = max(len(row) for row in advantages)
    mean = sum(map(sum, advantages)) / (longest * len(advantages))
    counted = chosen(advantages, all_words(batch))
    variance = sum((value - mean) ** 2 for value in counted) / len(counted)
    return [[(value - mean) / math.sqrt(max(variance, 1e-8)) for value in row] for row in advantages]


# ---------------------------------------------------------------- TRL


def trl_grpo(scale: str) -> Published:
    """`sum_then_normalize` of `_generate_and_score_completions`."""

    def published(batch: Sequence[Attempt]) -> list[list[float]]:
        of_batch = deviation_of([attempt.reward for attempt in batch])

        def formula(rewards: list[float]) -> list[float]:
            mean = mean_of(rewards)
            deviation = deviation_of(rewards) if len(rewards) > 1 else 0.0
            divisor = {"group": deviation + 1e-4, "batch": of_batch + 1e-4, "none": 1.0}[scale]
            return [(reward - mean) / divisor for reward in rewards]

        return by_group(formula)(batch)

    return published


def trl_rloo(rewards: list[float]) -> list[float]:
    count = len(rewards)
    return [reward - (sum(rewards) - reward) / (count - 1) if count > 1 else 0.0 for reward in rewards]


def trl_rloo_normalized(batch: Sequence[Attempt]) -> list[list[float]]:
    """`normalize_advantages`: over attempts, whatever their lengths."""
    values = [row[0] for row in by_group(trl_rloo)(batch)]
    mean, deviation = mean_of(values), deviation_of(values)
    return [[(value - mean) / (deviation + 1e-4)] * len(attempt.words) for value, attempt in zip(values, batch, strict=True)]


# ---------------------------------------------------------------- NeMo-RL, prime-rl


def nemo_grpo(*, leave_one_out: bool = True, normalize: bool = True) -> Published:
    """`calculate_baseline_and_std_per_prompt`: mean and deviation of the others, or of all."""

    def formula(rewards: list[float]) -> list[float]:
        if len(rewards) == 1:
            return [0.0]
        baselines = []
        for place, reward in enumerate(rewards):
            among = [reward for index, reward in enumerate(rewards) if not leave_one_out or index != place]
            deviation = deviation_of(among) if len(among) > 1 else 0.0
            distance = reward - mean_of(among)
            baselines.append(distance / (deviation + 1e-6) if normalize and deviation > 0 else distance)
        return baselines

    return by_group(formula)


def nemo_whiten(values: list[list[float]], mask: list[list[bool]]) -> list[list[float]]:
    among = chosen(values, mask)
    mean = mean_of(among)
    variance = max(sum((value - mean) ** 2 for value in among) / len(among), 1e-8)
    return [[(value - mean) / math.sqrt(variance) for value in row] for row in values]


def nemo_reinforce_plus_plus(*, minus_baseline: bool = True) -> Published:
    """The whole reward at every token, less the group's mean or not; no discount, no later or earlier."""

    def published(batch: Sequence[Attempt]) -> list[list[float]]:
        plain = [[attempt.reward] * len(attempt.words) for attempt in batch]
        centred = by_group(lambda rewards: [reward - mean_of(rewards) for reward in rewards] if len(rewards) > 1 else [0.0])(batch)
        return nemo_whiten(centred if minus_baseline else plain, sampled(batch))

    return published


def nemo_gae(batch: Sequence[Attempt]) -> list[list[float]]:
    """One reward per attempt, at its last sampled token; then as verl's."""
    ended = []
    for attempt in batch:
        words = [evolve(word, reward=0.0) for word in attempt.words]
        last = max(place for place, word in enumerate(words) if word.sampled)
        words[last] = evolve(words[last], reward=attempt.reward)
        ended.append(evolve(attempt, words=tuple(words)))
    return verl_gae(ended)


def prime_grpo(rewards: list[float]) -> list[float]:
    return [reward - mean_of(rewards) for reward in rewards]


def prime_max_rl(rewards: list[float]) -> list[float]:
    mean = mean_of(rewards)
    return [0.0 if mean <= 0 else (reward - mean) / mean for reward in rewards]


PUBLISHED: dict[tuple[str, str], Published] = {
    ("verl", "adv_estimator=grpo"): verl_grpo(),
    ("verl", "adv_estimator=grpo, norm_adv_by_std_in_grpo=False"): verl_grpo(by_deviation=False),
    ("verl", "adv_estimator=rloo"): by_group(verl_rloo),
    ("verl", "adv_estimator=rloo_vectorized"): by_group(verl_rloo_vectorized),
    ("verl", "adv_estimator=reinforce_plus_plus"): verl_reinforce_plus_plus,
    ("verl", "adv_estimator=reinforce_plus_plus_baseline"): verl_reinforce_plus_plus_baseline,
    ("verl", "adv_estimator=gae"): verl_gae,
    ("SkyRL", "advantage_estimator=grpo"): verl_grpo(),
    ("SkyRL", "advantage_estimator=grpo, grpo_norm_by_std=false"): verl_grpo(by_deviation=False),
    ("SkyRL", "advantage_estimator=rloo"): by_group(trl_rloo),
    ("SkyRL", "advantage_estimator=maxrl"): by_group(skyrl_maxrl),
    ("SkyRL", "advantage_estimator=reinforce++"): skyrl_reinforce_plus_plus,
    ("SkyRL", "advantage_estimator=gae"): skyrl_gae,
    ("SkyRL", "advantage_estimator=grpo, grpo_norm_by_std=false, advantage_batch_normalize=true"): skyrl_batch_normalize,
    ("TRL", "GRPOConfig"): trl_grpo("group"),
    ("TRL", "GRPOConfig, scale_rewards=none"): trl_grpo("none"),
    ("TRL", "GRPOConfig, scale_rewards=batch"): trl_grpo("batch"),
    ("TRL", "RLOOConfig, beta=0.0"): by_group(trl_rloo),
    ("TRL", "RLOOConfig, beta=0.0, normalize_advantages=True"): trl_rloo_normalized,
    ("NeMo-RL", "name=grpo"): nemo_grpo(),
    ("NeMo-RL", "name=grpo, use_leave_one_out_baseline=false"): nemo_grpo(leave_one_out=False),
    ("NeMo-RL", "name=grpo, normalize_rewards=false"): nemo_grpo(normalize=False),
    ("NeMo-RL", "name=grpo, use_leave_one_out_baseline=false, normalize_rewards=false"): nemo_grpo(
        leave_one_out=False, normalize=False
    ),
    ("NeMo-RL", "name=reinforce_plus_plus"): nemo_reinforce_plus_plus(),
    ("NeMo-RL", "name=reinforce_plus_plus, minus_baseline=false"): nemo_reinforce_plus_plus(minus_baseline=False),
    ("NeMo-RL", "name=gae, normalize_advantages=true"): nemo_gae,
    ("prime-rl", "type=grpo"): by_group(prime_grpo),
    ("prime-rl", "type=max_rl"): by_group(prime_max_rl),
}
