"""What a run that goes on takes from its config.json, and what typed options may change."""

import json

import pytest

from model.commands.option_values import load_config
from model.commands.options import KEEP_TRAINING, exit_early, read_request
from model.commands.origin import broadcast_request
from model.commands.run_length import global_batch


def test_on_several_machines_the_stored_options_are_not_checked_early(tmp_path, monkeypatch):
    write_run(tmp_path, dict(preset="nonsense", given={}))
    line = ["train", f"--output_dir={tmp_path}", "--is_keep_training=True"]
    with pytest.raises(SystemExit):
        exit_early(line)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    exit_early(line)
    with pytest.raises(SystemExit):
        exit_early([*line, "--epochs=0"])


def write_run(run_dir, stored):
    """Make `run_dir` a run with a checkpoint and `stored` in its config.json."""
    (run_dir / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps(stored))


@pytest.mark.parametrize(
    "stored",
    [dict(preset="sft"), dict(preset="nonsense", given={}), dict(preset=[], given={}), dict(preset="sft", given=[])]
    + [dict(preset="sft", given=dict(output_dir=None)), dict(preset="sft", given=dict(epochs=[3])), [], "x"],
)
def test_a_damaged_config_json_is_refused_with_its_path_and_what_to_do(tmp_path, stored):
    write_run(tmp_path, stored)
    with pytest.raises(ValueError, match="config.json cannot be read .*delete it"):
        read_request((), dict(output_dir=str(tmp_path), is_keep_training="True"))


def test_a_run_goes_on_with_the_ways_to_hold_state_that_it_was_started_with(tmp_path):
    keeps = dict(output_dir=str(tmp_path), is_keep_training="True")
    write_run(tmp_path, dict(preset="pretrain", given=dict(share_update="True")))
    assert read_request((), keeps).config.share_state == "True", "of an earlier version"
    became = dict(share_state="True", master_dtype="bf16", optimizer="adamw", learn_rate=1e-3)
    stored = dict(preset="pretrain", given=dict(master_dtype="auto", optimizer="adamw"), config=became)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    for typed in ({}, dict(master_dtype="auto")):
        config = read_request((), keeps | typed).config
        assert (config.share_state, config.master_dtype) == ("True", "bf16")
    with pytest.raises(ValueError, match="--master_dtype=float32: this run was started with master_dtype=bf16"):
        read_request((), keeps | dict(master_dtype="float32"))


def test_a_run_stored_with_exact_is_refused_by_name_and_one_without_it_goes_on(tmp_path):
    write_run(tmp_path, dict(preset="pretrain", given=dict(exact="True")))
    with pytest.raises(ValueError, match="was started with --exact=True, which this version does not have"):
        read_request((), dict(output_dir=str(tmp_path), is_keep_training="True"))
    (tmp_path / "config.json").write_text(json.dumps(dict(preset="pretrain", given=dict(exact=False))))
    assert read_request((), dict(output_dir=str(tmp_path), is_keep_training="True")).preset == "pretrain"


def test_control_characters_of_a_config_json_are_printed_as_escapes(tmp_path, capsys):
    write_run(tmp_path, dict(preset="pretrain", given={"\x1b[2Jepoch": 1, "learn_rate": "\u202e1"}))
    with pytest.raises(SystemExit) as ended:
        exit_early(["train", f"--output_dir={tmp_path}", "--is_keep_training=True"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert r"\x1b[2Jepoch" in shown and r"\u202e1" in shown and "\n  " in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def request(run_dir, *flags, **typed):
    return read_request((), dict(output_dir=str(run_dir), **dict.fromkeys(flags, "True"), **typed))


OWN_RATE = load_config("pretrain", {}).learn_rate


def test_stored_options_of_a_run_without_checkpoints_are_ignored(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(preset="sft", given=dict(learn_rate=0.5))))
    assert request(tmp_path, is_keep_training="auto").config.learn_rate == OWN_RATE
    examined, tested = (
        read_request((), dict(output_dir=str(tmp_path)), KEEP_TRAINING[command]) for command in ("doctor", "test")
    )
    assert examined.config.learn_rate == OWN_RATE, "doctor reads the options that train would"
    assert tested.config.learn_rate == 0.5, "test needs no checkpoint"
    write_run(tmp_path, dict(preset="sft", given=dict(learn_rate=0.5)))
    assert request(tmp_path, is_keep_training="auto").config.learn_rate == 0.5


@pytest.mark.parametrize(
    ("stored", "typed", "refusal"),
    [
        (dict(teacher="big"), dict(distill_weight="0.3"), "only teacher uses it: type --teacher too"),
        (dict(against_loops="scalegrad"), dict(loops_ngram="2"), "only against_loops uses it"),
        (dict(lora_rank="4"), dict(lora_dropout="0.1"), "belongs to an adapter, so type its rank too"),
        (dict(temperature="0.7"), dict(top_p="0.9"), "belongs to a temperature above 0"),
        (dict(optimizer="adamw"), dict(offload="optimizer"), None),
        (dict(objective="dpo"), dict(beta="0.3"), "the objective dpo or orpo or simpo uses it"),
    ],
)
def test_an_option_is_taken_by_a_run_that_stores_what_it_needs(tmp_path, stored, typed, refusal):
    write_run(tmp_path, dict(preset="pretrain", given=stored, config=dict(single_turn=False)))
    ((name, value),) = typed.items()
    for keep in ("True", "auto"):
        again = broadcast_request((), dict(output_dir=str(tmp_path), is_keep_training=keep) | typed)
        assert str(getattr(again.config, name)) == value and stored.items() | typed.items() <= again.given.items()
    for afresh in (dict(output_dir=str(tmp_path)), dict(output_dir=str(tmp_path / "new"), is_keep_training="auto")):
        if refusal:
            with pytest.raises(ValueError, match=refusal):
                broadcast_request((), afresh | typed)


def test_a_stored_option_that_a_typed_one_contradicts_is_named_with_what_to_type(tmp_path):
    write_run(tmp_path, dict(preset="pretrain", given=dict(temperature="0.7", top_p="0.9", lora_rank="4")))
    with pytest.raises(ValueError, match="top_p=0.9 is stored with this run: .* type its default, --top_p=1.0$"):
        request(tmp_path, "is_keep_training", temperature="0")
    assert request(tmp_path, "is_keep_training", temperature="0", top_p="1.0").config.temperature == 0
    with pytest.raises(ValueError, match="average=0.1") as refusal:
        request(tmp_path, "is_keep_training", share_state="True", average="0.1")
    assert "stored" not in str(refusal.value), "neither a typed option nor one that the run must keep"
    with pytest.raises(ValueError) as refusal:
        request(tmp_path, "is_keep_training", epoch="3", top_p="2", save_steps="often")
    assert all(f"{name}=" in str(refusal.value) for name in ("top_p", "save_steps")) and "--epoch" in str(refusal.value)


@pytest.mark.parametrize(
    ("stored", "typed"),
    [
        (dict(objective="dpo", beta="0.3", dpo_loss="ipo"), "pairs"),
        (dict(objective="span", span_mean="4"), "text"),
        (dict(teacher="big", distill_weight="0.3", prompt_prefix="sum: "), "dpo"),
        (dict(mix="span:a.txt,pairs:b.jsonl", span_density="0.2"), "pairs"),
    ],
)
def test_what_a_run_stores_for_its_objective_is_left_out_where_another_is_typed(tmp_path, stored, typed):
    write_run(tmp_path, dict(preset="pretrain", given=stored))
    again = broadcast_request((), dict(output_dir=str(tmp_path), objective=typed), KEEP_TRAINING["test"])
    assert again.config.objective == typed and not again.config.mix
    assert stored.keys() & again.given.keys() <= {"objective", "prompt_prefix"}
    with pytest.raises(ValueError, match="beta=0.1: the objective dpo"):
        broadcast_request((), dict(output_dir=str(tmp_path), objective="text", beta="0.1"), KEEP_TRAINING["test"])


@pytest.mark.parametrize("given", [dict(epochs=9), dict(epochs=9, output_dir="exp1")])
def test_the_output_dir_of_a_moved_run_is_where_it_is_now(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    default_dir = "model_save/pretrain"  # without --output_dir
    write_run(tmp_path / default_dir, dict(preset="sft", given=given))
    for typed, keep in ((dict(is_keep_training="True"), False), (dict(is_keep_training="auto"), False), ({}, True)):
        request = read_request((), typed, keep)
        assert (request.preset, request.config.epochs, request.config.output_dir) == ("sft", 9, default_dir)
        assert request.given["output_dir"] == default_dir and not request.changed
    assert read_request((), {}, KEEP_TRAINING["doctor"]).config.output_dir == default_dir


def test_resuming_a_run_of_another_preset_is_refused_and_the_suggested_commands_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "model_save/sft", dict(preset="pretrain", given={}))
    flags = dict(is_finetune="True", is_keep_training="auto")
    with pytest.raises(ValueError, match="is a run of the preset pretrain, not sft: .*--output_dir=model_save/sft"):
        read_request((), flags)
    assert read_request((), dict(is_keep_training="auto", output_dir="model_save/sft")).preset == "pretrain"
    assert read_request((), flags | dict(overwrite="True")).preset == "sft"
    assert read_request((), flags | dict(output_dir="other")).preset == "sft"


def test_overwrite_starts_a_new_run_and_contradicts_is_keep_training(tmp_path):
    write_run(tmp_path, dict(preset="pretrain", given=dict(learn_rate=0.5)))
    afresh = request(tmp_path, "overwrite", is_keep_training="auto")
    assert (afresh.config.learn_rate, afresh.keep_training) == (OWN_RATE, False)
    with pytest.raises(ValueError, match="--overwrite=True starts a new one"):
        request(tmp_path, "overwrite", "is_keep_training")


def test_a_resumed_run_keeps_its_global_batch_until_another_is_typed(tmp_path):
    sizes = dict(batch_size_per_gpu="16", gradient_accumulation_steps="2", global_batch_size="64")
    write_run(tmp_path, dict(preset="pretrain", given=sizes | dict(output_dir=str(tmp_path))))
    again = request(tmp_path, "is_keep_training")
    assert [global_batch(again.config, world, again.typed) for world in (1, 2, 3)] == [64, 64, 64]
    again = request(tmp_path, "is_keep_training", batch_size_per_gpu="8")
    assert [global_batch(again.config, world, again.typed) for world in (1, 2)] == [16, 32]
    again = request(tmp_path, "is_keep_training", global_batch_size="128")
    assert global_batch(again.config, 2, again.typed) == 128
    again = request(tmp_path, "is_keep_training", batch_size_per_gpu="16", learn_rate="0.05")
    assert global_batch(again.config, 2, again.typed) == 64, "a script may type the same options again"
    assert again.changed == (f"learn_rate {OWN_RATE} -> 0.05",)
    again = request(tmp_path, "is_keep_training", batch_size_per_gpu="16", gradient_accumulation_steps="2")
    assert [global_batch(again.config, world, again.typed) for world in (1, 2)] == [64, 64]
    with pytest.raises(ValueError, match="contradicts"):
        again = request(tmp_path, "is_keep_training", **sizes)
        global_batch(again.config, 1, again.typed)


def test_an_exported_model_is_not_read_as_a_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(architectures=["T5ForConditionalGeneration"])))
    with pytest.raises(ValueError, match=f"give the run's directory, .*, or type test {tmp_path}"):
        read_request((), dict(output_dir=str(tmp_path)), KEEP_TRAINING["test"])


@pytest.mark.parametrize("name", ["step_00000001", ".step_00000001.01234567.aside"])
def test_stored_options_are_used_also_if_a_kill_left_the_checkpoint_aside(tmp_path, name):
    write_run(tmp_path, dict(preset="sft", given=dict(output_dir=str(tmp_path), epochs=9)))
    (tmp_path / "checkpoints" / "step_00000001").rename(tmp_path / "checkpoints" / name)
    request = read_request((), dict(output_dir=str(tmp_path), is_keep_training="True"))
    assert (request.preset, request.config.epochs) == ("sft", 9)


@pytest.mark.parametrize(
    ("name", "before", "now"), [("optimizer", "muon", "adafactor"), ("trainable", "all", "decoder")]
)
def test_a_resumed_run_cannot_change_its_optimizer_or_trainable_weights(tmp_path, monkeypatch, name, before, now):
    write_run(tmp_path, dict(preset="pretrain", given={}))
    monkeypatch.setenv("CHAT_COMMAND", "./run_train.sh -t stage3 ")
    with pytest.raises(ValueError, match=rf"^\./run_train.sh -t stage3 means --{name}={now}: this run.*started it"):
        request(tmp_path, "is_keep_training", **{name: now})
    monkeypatch.setenv("CHAT_COMMAND", f"./run_train.sh -t stage3 --{name}={now}")
    with pytest.raises(
        ValueError,
        match=f"--{name}={now}: this run has the optimizer state of {name}={before}.*leave it out.*overwrite",
    ):
        request(tmp_path, "is_keep_training", **{name: now})
    for way_out in (dict(overwrite="True"), dict(output_dir=str(tmp_path / "other"))):
        typed = dict(output_dir=str(tmp_path), is_keep_training="auto") | {name: now} | way_out
        assert getattr(read_request((), typed).config, name) == now


def test_a_resumed_run_cannot_change_its_initial_weights(tmp_path):
    write_run(tmp_path, dict(preset="sft", given=dict(finetune_from_ckp_file="a/best")))
    assert request(tmp_path, "is_keep_training", finetune_from_ckp_file="./a/best").keep_training
    with pytest.raises(ValueError, match="this run was started from 'a/best'"):
        request(tmp_path, "is_keep_training", finetune_from_ckp_file="b/best")


@pytest.mark.parametrize(
    "typed, parts",
    [
        (dict(learn_rate="1e-4"), ("muon takes 0.001 to 0.1", "of AdamW is about 0.01 here: type --learn_rate=0.01")),
        (dict(learn_rate="1e-4", optimizer="adamw_rms"), ("--learn_rate=0.01", "adamw_rms's default 0.02")),
        (dict(learn_rate="3e-2", optimizer="adamw"), ("--learn_rate=0.0003;", "adamw's default 0.0003")),
        (dict(learn_rate="1e-4", is_finetune="True", optimizer="muon"), ("--learn_rate=0.01;", "muon's default 0.015")),
        (dict(learn_rate="0.5", optimizer="adafactor"), ("adafactor's default 0.02",)),
    ],
)
def test_a_typed_learning_rate_out_of_range_is_refused_without_any_learn_rate(tmp_path, typed, parts):
    with pytest.raises(ValueError, match="^--learn_rate=") as refusal:
        request(tmp_path, **typed)
    assert all(part in str(refusal.value) for part in (*parts, "--any_learn_rate=True"))
    assert request(tmp_path, any_learn_rate="True", **typed).config.learn_rate == float(typed["learn_rate"])


def test_a_resumed_run_keeps_its_learning_rate_and_warm_up_if_ranges_and_defaults_change(tmp_path):
    used = dict(learn_rate=1e-4, warmup_steps=1000)
    given = dict(optimizer="adamw_rms", output_dir=str(tmp_path))
    write_run(tmp_path, dict(preset="pretrain", given=given, config=used))
    for again in (request(tmp_path, "is_keep_training"), request(tmp_path, "is_keep_training", learn_rate="1e-4")):
        assert (again.config.learn_rate, again.config.warmup_steps, again.changed) == (1e-4, 1000, ())
    with pytest.raises(ValueError, match="^--learn_rate=0.0002: adamw_rms"):
        request(tmp_path, "is_keep_training", learn_rate="2e-4")
    used["any_learn_rate"] = "True"
    (tmp_path / "config.json").write_text(json.dumps(dict(preset="pretrain", given=used)))
    assert request(tmp_path, "is_keep_training", learn_rate="2e-4").config.learn_rate == 2e-4
