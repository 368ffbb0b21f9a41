"""Configurations of other trainers as ours: what is taken over is valid, and no key is lost."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.cli.app import main
from skyrl_engine.config import load, resolve
from skyrl_engine.config.migration import migrate
from skyrl_engine.config.reading.origins import format_key, leaves
from skyrl_engine.config.reading.yaml import read_yaml
from skyrl_engine.errors import ConfigError

AXOLOTL = """
base_model: org/base
datasets:
  - {path: org/chats, type: chat_template, field_messages: conversations}
  - {path: ./more.jsonl, type: chat_template}
val_set_size: 0.1
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
load_in_4bit: true
warmup_ratio: 0.1
wandb_project:
fsdp_config: {fsdp_offload_params: true}
some_new_key: 1
"""
FACTORY = """
model_name_or_path: org/base
stage: dpo
finetuning_type: full
lora_rank: 8
pref_loss: simpo
pref_beta: 0.1
dataset: one,two
cutoff_len: 512
per_device_train_batch_size: 1
max_steps: 50
num_train_epochs: 3.0
save_steps: 500
"""
TRL = """
model_name_or_path: org/base
dataset_name: org/chats
learning_rate: 2.0e-5
lr_scheduler_type: polynomial
max_length: 1024
per_device_train_batch_size: 4
eval_steps: 100
load_in_8bit: false
report_to: wandb
packing: true
"""
VERL = """
data: {train_files: tasks.parquet, max_prompt_length: 512, max_response_length: 256, train_batch_size: 64}
actor_rollout_ref:
  model: {path: org/base}
  actor: {ppo_epochs: 2, optim: {lr: 1e-6, weight_decay: 0.1}, clip_ratio: 0.2}
  rollout: {n: 8, temperature: 0.9, val_kwargs: {temperature: 0}}
critic: {optim: {lr: 1e-5, weight_decay: 0.3}}
algorithm: {adv_estimator: rloo}
trainer: {save_freq: 20, test_freq: -1, total_training_steps: 100, n_gpus_per_node: 8}
"""


def migrated(text: str, trainer: str | None = None) -> tuple[dict[str, Any], str]:
    """Return our tables and the text; what every migration keeps is asserted."""
    table, lines = read_yaml(text, "theirs.yaml")
    result = migrate(table, lines, "theirs.yaml", trainer).to_toml("theirs.yaml")
    for path, _ in leaves(table):
        assert format_key(path) in result
    return tomllib.loads(result), result


@pytest.mark.parametrize(("text", "trainer"), [(AXOLOTL, None), (FACTORY, None), (TRL, "sft"), (VERL, None)])
def test_what_is_written_is_a_configuration(text: str, trainer: str | None, tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(migrated(text, trainer)[1])
    resolve(load(tmp_path / "ours.toml"), need=())


def test_axolotl() -> None:
    ours, text = migrated(AXOLOTL)
    assert ours == {
        "trainer": "sft",
        "data": {
            "train": ["org/chats", "./more.jsonl"],
            "eval_fraction": 0.1,
            "max_length": 2048,
            "map": {"messages": "conversations"},
        },
        "model": {
            "path": "org/base",
            "dtype": "auto",
            "lora": {"rank": 16, "alpha": 32, "targets": "all-linear", "load_in_4bit": True},
        },
        "optimizer": {"schedule": "cosine", "learning_rate": 2e-4},
        "training": {"batch_size": 8, "micro_batch_rows": 2, "epochs": 3},
    }
    assert "max_length = 2048  # sequence_len, line 11" in text
    assert '# line 15: optimizer = "paged_adamw_8bit": this value is not taken over: see optimizer.use' in text
    assert "load_in_4bit = true  # load_in_4bit, line 19" in text
    assert "warmup_ratio = 0.1: Set optimizer.warmup_steps (it counts steps, not a share of them)" in text
    assert "some_new_key = 1: it has no counterpart here, as far as is known" in text


def test_weights_in_four_bits() -> None:
    ours, _ = migrated(
        FACTORY.replace("finetuning_type: full", "finetuning_type: lora\nquantization_bit: 4\ndouble_quantization: true")
    )
    assert ours["model"]["lora"] == {"rank": 8, "load_in_4bit": True, "double_quantization": True}
    ours, text = migrated(
        FACTORY.replace("finetuning_type: full", "finetuning_type: lora\nquantization_bit: 8\ndouble_quantization: true")
    )
    assert ours["model"]["lora"] == {"rank": 8}
    assert "quantization_bit = 8: this value is not taken over: see model.lora.load_in_4bit" in text
    assert "it is not read without model.lora.load_in_4bit (double_quantization" in text


def test_llama_factory() -> None:
    ours, text = migrated(FACTORY)
    assert ours["trainer"] == "preference"
    assert ours["preference"] == {"preset": "simpo"}
    assert ours["training"] == {"batch_size": 1, "micro_batch_rows": 1, "steps": 50}
    assert ours["data"]["train"] == ["one", "two"]
    assert "lora" not in ours["model"]
    assert "lora_rank = 8: no adapters are trained" in text
    assert "the number of steps counts (num_train_epochs, line 12)" in text
    assert "pref_beta = 0.1: an option of the loss: set loss.beta" in text


def test_trl_does_not_say_how_it_trains() -> None:
    with pytest.raises(ConfigError, match="Add --trainer sft"):
        migrated(TRL)
    ours, text = migrated(TRL, "reward_model")
    assert ours["trainer"] == "reward_model"
    assert 'lr_scheduler_type = "polynomial": this value is not taken over: see optimizer.schedule' in text


def test_online_dpo_of_trl() -> None:
    ours, text = migrated("missing_eos_penalty: 0.5\nmax_new_tokens: 64\nloss_type: sigmoid\n", "rl")
    assert ours["rl"] == {"missing_eos_penalty": 0.5, "max_tokens": 64}
    assert "missing_eos_penalty = 0.5  # missing_eos_penalty, line 1" in text


def test_what_needs_nothing_stands_apart_from_what_is_to_be_decided() -> None:
    ours, text = migrated(TRL, "sft")
    written, _, rest = text.partition("# Not taken over, yours to decide:\n")
    decide, _, nothing = rest.partition("# Nothing has to be written for:\n")
    assert "evaluation" not in ours
    assert "evaluation.every = 100: set it with data.eval or data.eval_fraction (eval_steps, line 8)" in decide
    assert "report_to" in decide
    assert "packing" in nothing
    assert "load_in_8bit = false" in nothing
    assert "max_length = 1024" in written


def test_verl_takes_the_actor_and_says_the_critic() -> None:
    ours, text = migrated(VERL)
    assert ours["rl"] == {
        "max_prompt_tokens": 512,
        "max_tokens": 256,
        "groups": 64,
        "epochs": 2,
        "group_size": 8,
        "temperature": 0.9,
        "steps": 100,
    }
    assert ours["optimizer"] == {"learning_rate": 1e-6, "weight_decay": 0.1}
    assert ours["advantage"] == {"use": "rloo"}
    assert ours["checkpoint"] == {"every": 20}
    assert "critic.optim.weight_decay = 0.3" in text
    assert 'data.train_files = "tasks.parquet": Set environments.data' in text
    assert ours["loss"] == {"clip_low": 0.2, "clip_high": 0.2}


def test_verl_keys_that_say_one_thing_together() -> None:
    table, _ = read_yaml(VERL, "theirs.yaml")
    table["custom_reward_function"] = {"path": "my_r.py", "name": "score"}
    table["data"] |= {"val_files": ["held-out.parquet"], "prompt_key": "question"}
    table["algorithm"] |= {"use_kl_in_reward": False, "kl_ctrl": {"kl_coef": 0.01}}
    actor = {"ppo_mini_batch_size": 16, "clip_ratio_high": 0.28, "loss_agg_mode": "seq-mean-token-mean"}
    table["actor_rollout_ref"]["actor"] |= actor | {"use_kl_loss": True, "kl_loss_coef": 0.02, "entropy_coeff": 0}
    migration = migrate(table, {}, "theirs.yaml")
    ours = tomllib.loads(migration.to_toml("theirs.yaml"))
    assert ours["environments"] == [
        {
            "use": "function",
            "reward": "./my_r.py:score",
            "form": "verl",
            "data": "tasks.parquet",
            "eval_data": ["held-out.parquet"],
            "map": {"prompt": "question"},
        }
    ]
    assert ours["rl"]["mini_batches"] == 4
    assert ours["loss"] == {"clip_low": 0.2, "clip_high": 0.28, "terms": [{"use": "kl", "coef": 0.02, "estimator": "k3"}]}
    assert ours["reducer"] == {"use": "sequence_mean"}
    assert "kl" not in ours["rl"]
    needless = {said.key for said in migration.said if said.needless}
    assert {"actor_rollout_ref.actor.entropy_coeff", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"} <= needless
    table["algorithm"]["use_kl_in_reward"] = True
    table["actor_rollout_ref"]["actor"] |= {"use_kl_loss": False, "entropy_coeff": 0.001}
    ours = tomllib.loads(migrate(table, {}, "theirs.yaml").to_toml("theirs.yaml"))
    assert ours["rl"]["kl"] == {"coef": 0.01, "estimator": "k1"}
    assert ours["loss"]["terms"] == [{"use": "entropy", "coef": 0.001}]


def test_packed_rows_are_counted_in_tokens() -> None:
    ours, text = migrated(AXOLOTL + "sample_packing: true\n")
    assert ours["training"] == {"batch_size": 8, "micro_batch_tokens": 4096, "epochs": 3}
    assert "by the samples that a packed row held" in text


def test_rows_of_a_second_form_are_named() -> None:
    text = migrated(AXOLOTL.replace("./more.jsonl, type: chat_template", "./more.jsonl, type: alpaca"))[1]
    assert "a run reads rows of one form, and the first dataset's is 'chat_template'" in text.partition("yours to decide")[2]


def test_losses_on_all_turns() -> None:
    assert migrated(TRL + "assistant_only_loss: true\n", "sft")[0]["data"]["loss_on"] == "all"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.yaml").write_text(TRL)
    line = ["config", "migrate", str(tmp_path / "theirs.yaml"), "--trainer", "sft"]
    assert main(line) == 0
    output = capsys.readouterr()
    assert tomllib.loads(output.out)["training"]["batch_size"] == 4
    assert "are yours to decide" in output.err
    assert main([*line, str(tmp_path / "ours.toml")]) == 0
    assert (tmp_path / "ours.toml").read_text() == output.out
    assert main([*line, str(tmp_path / "ours.toml")]) == 2
    assert main(line[:3]) == 2
