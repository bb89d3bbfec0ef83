"""Losses and gradients of preferences against the trainers of TRL, float32, small random models, on a CPU.

Twice, each half in its own environment:
    python -m bench.preference_formulas --write DIR           # ours: models, rows, losses, gradients
    TRL_PYTHON -P bench/preference_formulas.py --read DIR     # with a Python that has trl; -P: bench/ has a kernels.py
The second prints a line for each loss: relative difference of the loss, and the largest one of a gradient.
It takes trl >= 1.0 for a decoder (DPO; its experimental ORPO and CPO) and trl 0.28 for a T5 (DPO, ORPO and CPO).
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

NUM_PAIRS, VOCABULARY = 6, 90
KINDS = {
    "dpo": dict(objective="dpo", beta=0.1, sft_weight=1.0),
    "dpo_plain": dict(objective="dpo", beta=0.5, sft_weight=0.0),
    "dpo_mean": dict(objective="dpo", beta=1.5, sft_weight=0.0, normalize_length=True),
    "dpo_cautious": dict(objective="dpo", beta=0.3, sft_weight=0.0, label_smoothing=0.2),
    "ipo": dict(objective="dpo", beta=0.1, sft_weight=0.0, dpo_loss="ipo"),
    "orpo": dict(objective="orpo", beta=0.1, sft_weight=1.0),
    "simpo": dict(objective="simpo", beta=2.0, sft_weight=1.0, gamma=0.7, label_smoothing=0.1),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--read", type=Path)
    arguments = parser.parse_args()
    if arguments.write:
        for family in ("t5", "decoder"):
            write(arguments.write / family, family)
    if arguments.read:
        compare(arguments.read)


def write(folder, family):
    """Write a policy, a reference, rows of ids, and our losses and gradients of each of KINDS."""
    import numpy as np

    from model.nn.decoder.network import DecoderModel
    from model.nn.decoder.sizes import DecoderModelConfig
    from model.nn.t5.network import TextToTextModel
    from model.nn.t5.sizes import T5ModelConfig
    from tests.parts import SHAPE, make_config
    from tests.stock import as_hugging_face

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    if family == "t5":
        policy, reference = (
            TextToTextModel(T5ModelConfig(**SHAPE, vocab_size=VOCABULARY)).initialise(s) for s in (1, 2)
        )
    else:
        shape = DecoderModelConfig(**sizes, vocab_size=VOCABULARY, model_type="qwen3", initializer_range=0.2)
        policy, reference = (DecoderModel(shape).initialise(seed) for seed in (1, 2))
    draw = np.random.default_rng(0)
    rows = [[draw.integers(3, VOCABULARY, draw.integers(2, 12)).tolist() for _ in range(3)] for _ in range(NUM_PAIRS)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(rows))
    for name, model in (("policy", policy), ("reference", reference)):
        as_hugging_face(model, SimpleNamespace(pad_id=0, eos_id=1)).save_pretrained(folder / name)
    for kind, options in KINDS.items():
        save_file(_ours(policy, reference, rows, make_config(**options)), folder / f"{kind}.safetensors")


def _ours(policy, reference, rows, config):
    """{name: gradient} of the policy's weights, and the loss."""
    import numpy as np

    from model.commands.objective import objectives_for
    from model.nn.base import Packing
    from model.nn.registry import family_of
    from model.train.weighted_loss import weighted_loss

    objective = objectives_for(config, policy.config)[config.objective]
    store, ids, collate = _store(rows, objective), np.arange(len(rows)), family_of(policy.config).collate
    if objective.derived:
        with torch.no_grad():
            found = objective.derive(reference, collate(objective.sequences(store, ids, 0, 1), Packing(0)), 64)
        store.values.update({name: column.numpy() for name, column in found.items()})
    scales = [torch.tensor([1 / weight for weight in part]) for part in objective.weights(store, ids, 0, 1)]
    policy.zero_grad()
    loss = weighted_loss(policy, objective, collate(objective.sequences(store, ids, 0, 1), Packing(0)), 64, scales)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
    return gradients | {"loss": loss.detach()[None]}


def _store(rows, objective):
    """What an objective needs of a TokenStore that holds these rows."""
    import numpy as np

    columns = [list(column) for column in zip(*rows, strict=True)]
    if len(objective.columns) == 5:
        columns += [[[len(ids)] for ids in column] for column in columns[1:]]
    lengths = np.array([[len(ids) for ids in column] for column in columns]).T
    values = {name: np.zeros(len(rows), np.float32) for name in objective.derived}
    flat = tuple(np.concatenate([np.array(ids) for ids in column]) for column in columns)
    return SimpleNamespace(lengths=lengths, values=values, tokens=lambda ids: flat)


def compare(folder):
    """Print how far the losses and gradients of this environment's TRL are from those in the folder."""
    import trl

    family = "t5" if trl.__version__.startswith("0.") else "decoder"
    for kind, options in KINDS.items():
        if family == "decoder" and kind == "dpo_cautious":
            continue  # trl 1 has no label smoothing of this kind
        if family == "t5" and kind == "dpo_mean":
            continue  # trl 0.28 has no scores per token
        ours = load_file(folder / family / f"{kind}.safetensors")
        loss, gradients = (_t5 if family == "t5" else _decoder)(folder / family, options)
        expected = ours.pop("loss").item()
        far = max(float((gradients[n] - own).norm() / own.norm().clamp(min=1e-9)) for n, own in _named(ours, gradients))
        print(f"trl {trl.__version__} {family} {kind}: loss {loss:.6f}, differs by {abs(loss / expected - 1):.1e}; "
              f"gradients by {far:.1e}", flush=True)  # fmt: skip


def _named(ours, gradients):
    """Our gradients under transformers' names."""
    return [(name if name in gradients else f"model.{name}", own) for name, own in ours.items()]


def _outcome(model, loss):
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class _Logs(dict):
    """Takes the metrics that a trainer collects, and its other fields."""

    def __missing__(self, key):
        self[key] = _Logs() if key in ("train", "eval") else []
        return self[key]


def _bare(kind, **fields):
    """A trainer of TRL that is not set up, with these fields: its losses need no more."""
    trainer = kind.__new__(kind)
    same = dict.fromkeys(("gather", "gather_for_metrics", "unwrap_model"), lambda x: x)
    known = dict(_metrics=_Logs(), aux_loss_enabled=False, _total_train_tokens=0, _tp_size=1)
    trainer.__dict__.update(accelerator=SimpleNamespace(device=torch.device("cpu"), **same), **known, **fields)
    return trainer


def _decoder(folder, options):
    from transformers import AutoModelForCausalLM

    rows = json.loads((folder / "rows.json").read_text())
    model, reference = (AutoModelForCausalLM.from_pretrained(folder / n).train() for n in ("policy", "reference"))
    if options["objective"] != "dpo":
        return _outcome(model, _reference_free(model, rows, options, is_t5=False))
    from trl.trainer import dpo_trainer

    collate = dpo_trainer.DataCollatorForPreference(pad_token_id=0)
    batch = collate([dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)) for row in rows])
    kind = options.get("dpo_loss", "sigmoid_norm" if options.get("normalize_length") else "sigmoid")
    types = dict(loss_types=[kind, "sft"], loss_weights=[1.0, options["sft_weight"]])
    dpo_trainer.add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    dpo_trainer.add_fused_lm_head(reference)
    trainer = _bare(
        dpo_trainer.DPOTrainer, model=model, ref_model=reference, beta=options["beta"], ld_alpha=None,
        f_divergence_type="reverse_kl", precompute_ref_logps=False, use_weighting=False, label_smoothing=0.0,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), **types,
    )  # fmt: skip
    return _outcome(model, trainer._compute_loss(model, batch, return_outputs=False))


def _t5(folder, options):
    from transformers import AutoModelForSeq2SeqLM

    rows = json.loads((folder / "rows.json").read_text())
    model, reference = (AutoModelForSeq2SeqLM.from_pretrained(folder / n).eval() for n in ("policy", "reference"))
    return _outcome(model, _reference_free(model, rows, options, True, reference))


def _reference_free(model, rows, options, is_t5, reference=None):
    """The loss by `get_batch_logps` and the loss functions of TRL's trainers with padded batches."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    logits, labels = _padded_logits(model, rows, is_t5)
    is_mean = options["objective"] != "dpo" or "dpo_loss" in options
    log_probs = ORPOTrainer.get_batch_logps(logits, labels, average_log_prob=is_mean, is_encoder_decoder=is_t5)
    chosen, rejected = log_probs.chunk(2)
    fields = dict(beta=options["beta"], label_smoothing=options.get("label_smoothing", 0.0))
    if options["objective"] == "orpo":
        losses = -_bare(ORPOTrainer, **fields).odds_ratio_loss(chosen, rejected)[0]
    elif options["objective"] == "simpo":
        fields |= dict(loss_type="simpo", simpo_gamma=options["gamma"], alpha=0.0)
        losses = _bare(CPOTrainer, **fields).cpo_loss(chosen, rejected)[0]
    else:
        from trl.trainer.dpo_trainer import DPOTrainer

        with torch.no_grad():
            there = _padded_logits(reference, rows, is_t5)
            theirs = ORPOTrainer.get_batch_logps(*there, average_log_prob=is_mean, is_encoder_decoder=is_t5).chunk(2)
        kind = options.get("dpo_loss", "sigmoid")
        trainer = _bare(
            DPOTrainer, reference_free=False, f_divergence_type="reverse_kl", f_divergence_params=None, **fields
        )
        losses = trainer.dpo_loss(chosen, rejected, *theirs, kind)[0]
    half = len(labels) // 2
    shifted = (logits, labels) if is_t5 else (logits[:, :-1], labels[:, 1:])
    ours = [x[:half].flatten(0, 1) for x in shifted]  # as the trainers' cross_entropy_loss of the chosen responses
    sft = torch.nn.functional.cross_entropy(*ours, ignore_index=-100)
    return losses.mean() + options["sft_weight"] * sft


def _padded_logits(model, rows, is_t5):
    """(logits, labels) of the chosen and then the rejected responses, each padded."""
    pairs = [(prompt, chosen) for prompt, chosen, _ in rows] + [(prompt, rejected) for prompt, _, rejected in rows]
    if is_t5:
        sources, labels = zip(*pairs, strict=True)
        labels = _pad(labels, -100)
        return model(input_ids=_pad(sources, 0), attention_mask=_pad([[1] * len(s) for s in sources], 0),
                     labels=labels).logits, labels  # fmt: skip
    labels = _pad([[-100] * len(source) + target for source, target in pairs], -100)
    whole = [source + target for source, target in pairs]
    return model(_pad(whole, 0), attention_mask=_pad([[1] * len(ids) for ids in whole], 0)).logits, labels


def _pad(rows, fill):
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


if __name__ == "__main__":
    main()
