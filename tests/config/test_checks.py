"""Combinations of tables that cannot be meant."""

import pytest

from skyrl_engine.config.reading.sources import from_dict, load
from skyrl_engine.config.resolution import resolve
from skyrl_engine.config.structure import structure
from skyrl_engine.contracts.kinds.optimizer_settings import SgdSettings


def problems(overrides: list[str]) -> list[str]:
    return [str(problem) for problem in structure(load(None, ["model.path=m", "data.train=d", *overrides])).problems]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["run.ranks=2"], ('command line: run.ranks: is 2, but launch = "inline" is one rank in this process. '
         'Set run.launch = "ray" or run.ranks = 1')),
        (["run.ray_address=auto"], ('command line: run.ray_address: has no meaning with launch = "inline". '
         'Set run.launch = "ray" or remove run.ray_address')),
        (['run.observers=["a", "b", "a"]'], "command line: run.observers: names a twice. Name every observer once"),
        (["training.steps=3", "training.epochs=1"], ("command line: training.epochs: training.steps is set too. "
         "Give one of training.steps and training.epochs")),
        (["training.micro_batch_rows=3", "training.micro_batch_tokens=1"], ("command line: training.micro_batch_tokens: "
         "training.micro_batch_rows is set too. Give one of training.micro_batch_rows and training.micro_batch_tokens")),
        (["data.eval=e", "data.eval_fraction=0.1"], ("command line: data.eval_fraction: data.eval is set too. "
         "Give one of data.eval and data.eval_fraction")),
        (["data.eval_fraction=1"], "command line: data.eval_fraction: must be less than 1.0, is 1.0. Choose a smaller number"),
        (["evaluation.every=3"], ("command line: evaluation.every: asks for evaluation, but there is no held-out data. "
         "Set data.eval or data.eval_fraction")),
        (["evaluation.best=loss"], ("command line: evaluation.best: asks for evaluation, but there is no held-out data. "
         "Set data.eval or data.eval_fraction")),
        *(([f"evaluation.{given}"], (f"command line: evaluation.{given.partition('=')[0]}: is of evaluation.best, which is not set. "
         f"Set evaluation.best, or remove evaluation.{given.partition('=')[0]}")) for given in ("best_is=lowest", "patience=2")),
        (["data.eval=e", "evaluation.best=entropy"], ("default: evaluation.best_is: nobody says whether the lowest or the highest "
         'entropy is best. Set evaluation.best_is to "lowest" or "highest"')),
        (["data.eval=e", "evaluation.best=loss", "evaluation.at_end=false"], ("command line: evaluation.best: is set, and nothing is "
         "evaluated after a step. Set evaluation.every")),
        (["data.eval=e", "evaluation.best=loss", "evaluation.patience=2"], ("command line: evaluation.patience: counts evaluations, and "
         "evaluation.every is not set. Set evaluation.every")),
        (["data.eval=e", "evaluation.best=loss", "evaluation.min_delta=0.1"], ("command line: evaluation.min_delta: is of "
         "evaluation.patience, which is not set. Set evaluation.patience, or remove evaluation.min_delta")),
        (["evaluation.at_start=true"], ("command line: evaluation.at_start: asks for evaluation, but there is no held-out data. "
         "Set data.eval or data.eval_fraction")),
        *(([f"evaluation.{key}=4"], (f"command line: evaluation.{key}: is of trainer rl, which attempts held-out tasks. "
         f"Remove evaluation.{key}")) for key in ("samples", "tasks", "temperature")),
        (["teacher.revision=main"], ("command line: teacher.revision: is of the model of teacher.path, which is not set. "
         "Set teacher.path, or remove teacher.revision")),
        (["checkpoint.every=9", "checkpoint.at_end=false", "training.steps=8"], ("command line: checkpoint.every: is 9, so a training of "
         "8 steps would end without a checkpoint. Lower checkpoint.every or set checkpoint.at_end = true")),
        (["checkpoint.resume=true"], ("command line: checkpoint.resume: a new run directory holds nothing to continue from. "
         "Set run.directory to the run to continue")),
        (["optimizer.warmup_steps=9", "training.steps=8"], ("command line: optimizer.warmup_steps: warm-up takes 9 steps of a training "
         "of 8. Lower optimizer.warmup_steps or raise training.steps")),
        (["optimizer.groups=[{match='a'}]"], ("command line: optimizer.groups: the group 'a' changes nothing. Set "
         "its learning_rate or weight_decay, or remove the group; model.freeze freezes parameters")),
        (["optimizer.warmup=cosine"], ("command line: optimizer.warmup: is the form of a warm-up, and there is none. "
         "Set optimizer.warmup_steps, or remove optimizer.warmup")),
        (["optimizer.schedule=wsd"], ('default: optimizer.decay_steps: schedule "wsd" decays over its last steps, and nobody says how '
         "many. Set optimizer.decay_steps")),
        (["optimizer={schedule='wsd', decay_steps=6, warmup_steps=3}", "training.steps=8"], ("command line: optimizer.decay_steps: "
         "warm-up and decay take 9 steps of a training of 8. Lower optimizer.decay_steps or optimizer.warmup_steps, or raise "
         "training.steps")),
        (["optimizer.min_ratio=0.1"], ('command line: optimizer.min_ratio: is not read where optimizer.schedule = "constant". Remove it, '
         'or set optimizer.schedule = "cosine_with_min"')),
        *((["optimizer.use=sgd", given], (f"command line: optimizer.{given.partition('.')[2].partition('=')[0]}: is not read where "
         'optimizer.use = "sgd". Remove it, or set optimizer.use = "adamw"'))
         for given in ("optimizer.betas=[0.9, 0.95]", "optimizer.epsilon=1e-8")),
        (['plugins.pin."los:ppo"=acme'], "command line: plugins.pin: 'los:ppo' is not of the form \"kind:name\". Did you mean \"loss\"?"),
        (['checkpoint.allow_changed=["ppo"]'], ("command line: checkpoint.allow_changed: 'ppo' is not of the form \"kind:name\". "
         "Start with one of collator:, loss:, correction:, reducer:, backend:, merger:, "
         "advantage:, environment:, group_filter:, generator:, observer:, trainer:")),
    ],
)  # fmt: skip
def test_combinations_that_cannot_be_meant(overrides: list[str], problem: str) -> None:
    assert problems(overrides) == [problem]


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.ranks=2", "run.launch=ray", "run.ray_address=auto"],
        ["training.steps=3"],
        ["training.epochs=0.5", "training.micro_batch_tokens=100"],
        ["data.eval=e", "evaluation.every=3", "evaluation.at_start=true"],
        ["data.eval_fraction=0.1", "evaluation.every=3"],
        ["data.eval=e", "evaluation.best=entropy", "evaluation.best_is=highest"],
        ["data.eval=e", "evaluation={best='loss', every=2, patience=3, min_delta=0.1, at_end=false}"],
        ["checkpoint.every=9", "training.steps=8"],
        ["checkpoint.every=8", "training.steps=8", "checkpoint.at_end=false"],
        ["checkpoint.resume=true", "run.directory=runs/a"],
        ["optimizer.warmup_steps=8", "training.steps=8"],
        ["optimizer.use=sgd", "optimizer.weight_decay=0.1", "optimizer.max_grad_norm=none", "optimizer.schedule=linear"],
        [
            "optimizer={schedule='wsd', decay_steps=6, warmup_steps=2, warmup='1-sqrt', decay='linear', min_ratio=0.1}",
            "training.steps=8",
        ],
        ["optimizer.use=adamw", "optimizer.betas=[0.9, 0.95]", "optimizer.epsilon=1e-6"],
        ['plugins.pin."loss:ppo"=acme', 'checkpoint.allow_changed=["backend:fsdp", "trainer:perplexity"]'],
        ["teacher.path=t", "teacher.revision=main", "evaluation.samples=1"],
    ],
)
def test_combinations_that_make_sense(overrides: list[str]) -> None:
    assert problems(overrides) == []


@pytest.mark.parametrize(
    ("best", "problem"),
    [
        ("loss", "evaluations of trainer rl report names that begin with evaluation/. Name one, such as evaluation/avg@6"),
        ("evaluation/avg@4", "is of 4 attempts, and with evaluation.samples = 6 avg@k is reported for k = 6"),
        ("evaluation/sums/pass@3", "is of 3 attempts, and with evaluation.samples = 6 pass@k is reported for k = 1, 2, 4, 6"),
        ("evaluation/pass@4_low", None),
    ],
)
def test_a_best_metric_that_no_environment_reports_is_refused(best: str, problem: str | None) -> None:
    overrides = ["trainer=rl", "model.path=m", "evaluation.samples=6", f"evaluation.best={best}"]
    found = [str(found) for found in structure(load(None, overrides)).problems]
    assert [line for line in found if "evaluation.best" in line and problem and problem in line] == (found if problem else [])


def test_a_refused_table_does_not_hide_what_others_contradict() -> None:
    found = problems(["run.seed=-1", "training.steps=3", "training.epochs=1"])
    assert [line.split(":")[1].strip() for line in found] == ["run.seed", "training.epochs"]


@pytest.mark.parametrize(
    ("key", "words"), [("sft.batch_size=2", "Did you mean training.batch_size?"), ("sft.nonsense=2", "is not a known key")]
)
def test_a_table_by_the_trainers_own_name_is_not_another_trainers(key: str, words: str) -> None:
    assert any(words in str(problem) for problem in structure(load(None, ["trainer=sft", "model.path=m", key])).problems)


@pytest.mark.parametrize("key", ["path=r", "revision=main", "weight=2"])
def test_the_former_keys_of_one_reward_model_name_the_present_ones(key: str) -> None:
    (problem,) = structure(load(None, ["trainer=rl", "model.path=m", f"reward_model.{key}"])).problems
    assert "[reward_model] is a table of trainer reward_model" in str(problem)
    assert "Set rl.reward_models (a list: [[rl.reward_models]] with path, weight, name" in str(problem)


def test_a_separator_of_steps_that_nobody_values_is_refused() -> None:
    models = 'rl.reward_models=[{path="a", step_separator="x"}]'
    (problem,) = structure(load(None, ["trainer=rl", "model.path=m", models])).problems
    assert "step_separator is of process reward models, and `steps` is not set. Set `steps`, or remove step_separator" in str(
        problem
    )
    models = 'rl.reward_models=[{path="a", weight=0}]'
    (problem,) = structure(load(None, ["trainer=rl", "model.path=m", models])).problems
    assert "weight is 0, which leaves the reward model out. Remove the reward model, or give it another weight" in str(problem)


def test_a_reward_model_without_a_path_is_refused_in_its_place_of_the_list() -> None:
    (problem,) = structure(load(None, ["trainer=rl", "model.path=m", 'rl.reward_models=[{path="a"}, {weight=2.0}]'])).problems
    assert "rl.reward_models[1].path: is required" in str(problem)


def test_keys_that_another_optimizer_reads_are_in_no_file_of_the_run() -> None:
    """A resume reads what was written; were a default of AdamW in it, it would be refused there."""
    resolved = resolve(load(None, ["model.path=m", "data.train=d", "optimizer.use=sgd"]))
    assert {"betas", "epsilon"}.isdisjoint(resolved.as_dict()["optimizer"])
    assert resolved.config.optimizer.settings() == SgdSettings(learning_rate=1e-5)
    again = resolve(from_dict(resolved.as_dict(), "run.json"))
    assert again.as_dict() == resolved.as_dict()
