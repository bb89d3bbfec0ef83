"""The two parts of a network family: LanguageModel, what its network computes, and Family, what the other rooms need.

A family's folder has a network (a LanguageModel), a batch (how it packs sequences), a footprint (how many bytes that
takes), and its Hugging Face form; its Family record names them. No other room knows any of these.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from model.nn.attention import has_kernels
from model.nn.bf16_gradients import hold_rounded
from model.nn.dropout import NO_DROPOUT, Masks, step_key
from model.nn.flat_params import FlatParams, with_padding
from model.nn.gradient_parts import gradient_parts
from model.nn.guides import Guides, TeacherOutput
from model.nn.layers import Linear, ResidualNorm
from model.nn.lora import FACTORS, factor_kind, is_factor
from model.nn.loss import computes_logits_again, cross_entropy_again, linear_cross_entropy, token_log_probs
from model.nn.loss_terms import PLAIN
from model.nn.products import product
from model.nn.recomputation import HostInputs


class LanguageModel(nn.Module):
    """A network over packed sequences, whose parameters and gradients are views of the flat tensors in `flat`.

    A family's network makes its layers, then calls `make_flat`, and defines what raises NotImplementedError here.
    `dropout` is a probability, active in training mode only; `key_dropout` chooses the masks of a step.
    """

    def __init__(self, model_config, dropout=0.0, compute_dtype=torch.float32):
        super().__init__()
        self.config, self.dropout, self.compute_dtype = model_config, dropout, compute_dtype
        # The plan decides, before each step, how many blocks backward computes again: the first ones of the forward
        # pass, because backward begins at the last ones. So at most one of them is held beside all that is kept.
        self.gradient_checkpointing = 0
        self.offloads_inputs = False  # whether these blocks' inputs wait for that in host memory
        self.lora = None  # LoraConfig of its adapters, which model.nn.lora.attach adds
        self.teachers = ()  # LanguageModels in evaluation mode that read the same batches; they are no part of it

    @property
    def tables(self):
        """The matrices with a row for each token: the embedding, then the output projection if it is another one."""
        raise NotImplementedError

    @property
    def output_weight(self):
        """The table that turns hidden states into logits: logits = hidden @ output_weight.T."""
        return self.tables[-1]

    @property
    def all_blocks(self):
        """The blocks in the order of forward, each called with the residual stream first.

        A network that names none sums its gradients over ranks in one part.
        """
        return []

    @property
    def uses_kernels(self):
        """True if attention runs in Triton kernels, which need batches made for them."""
        return has_kernels(self.output_weight.device, self.compute_dtype, *self.config.kernel_sizes)

    def new_host_inputs(self):
        """Where the recomputed blocks of one forward keep their inputs; None: on the device."""
        return HostInputs(self.device) if self.offloads_inputs and torch.is_grad_enabled() else None

    def hidden(self, batch):
        """(hidden states (targets, width) in the compute dtype, labels (targets,)); a label below 0 is padding."""
        raise NotImplementedError

    def new_cache(self, slots, input_tokens, new_tokens):
        """Static tensors for `slots` sequences of at most so many input and generated tokens.

        Its method `first(slots, input_tokens, new_tokens)` gives a part of it for smaller sizes, which shares its
        memory. `reads_all` says whether a step reads all of such a part, or only the tokens that are there.
        """
        raise NotImplementedError

    def prefill(self, inputs, cache, slots, first_id):
        """Read `inputs` (arrays of ids) into these slots of the cache; returns what `decode_one` gets first in each."""
        raise NotImplementedError

    def decode_one(self, ids, cache):
        """Hidden states (slots, width) for the token after `ids` (slots,); fixed shapes, nothing read on the host."""
        raise NotImplementedError

    def logits(self, hidden):
        """Logits (slots, vocabulary) of hidden states (slots, width)."""
        return product(hidden, with_padding(self.output_weight.copy))[:, : len(self.output_weight)]

    @torch.no_grad()
    def initialise(self, seed):
        """Draw random weights one by one on the CPU, the same on every rank for the same seed; returns the model."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.own_modules():
            if isinstance(module, Linear | nn.Embedding):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * self.init_std(module))
        return self

    def init_std(self, module):
        """Standard deviation of the random weights of a Linear or an nn.Embedding."""
        raise NotImplementedError

    def freeze_all_but(self, part):
        """Freeze all weights outside `part`, one of the family's `parts`; returns the model."""
        assert part == "all", f"this network has no part {part!r}"
        return self

    def make_flat(self, will_share=False, will_round=False):
        """Make the flat tensors, again whenever parameters were replaced, frozen or thawed; options of FlatParams."""
        layers = [(factor_kind(name), layer) for name, layer in self.named_modules() if isinstance(layer, Linear)]
        # the factors of one kind side by side, whatever their shapes
        matrices = [layer.weight for wanted in ("", *FACTORS) for kind, layer in layers if kind == wanted]
        known = {id(p) for p in matrices}
        others = [p for p in self.parameters() if id(p) not in known]
        packs = self.lora is not None and self.lora.base_precision == "nf4"
        biases = [layer.bias for _, layer in layers if layer.bias is not None]
        self.flat = FlatParams(others, matrices, self.tables, self.compute_dtype, packs, biases, will_share, will_round)
        self.gradient_parts = gradient_parts(self.flat, self.all_blocks)
        self.step_key = torch.zeros(2, dtype=torch.int32, device=self.device)

    @torch.no_grad()
    def place(self, device, will_share=False, will_round=False):
        """Give a network built on the meta device memory on `device`, once: trained weights as masters, others as held.

        Norms get ones, all other weights zeros; returns the model. The other options are those of FlatParams.
        """
        for p in self.parameters():
            placed = nn.Parameter(torch.zeros(1, device=device).expand(p.shape), p.requires_grad)  # takes no memory
            placed.__dict__.update(p.__dict__)
            torch.utils.swap_tensors(p, placed)  # so that what refers to the parameter still does
        self.make_flat(will_share, will_round)
        if will_round:
            hold_rounded(self.flat)
        for module in self.modules():
            if isinstance(module, ResidualNorm):
                module.weight.fill_(1)
        return self

    def _apply(self, *args, **kwargs):
        """Rebuild the flat tensors, because Module.to replaces each weight by a tensor of its own."""
        super()._apply(*args, **kwargs)
        self.make_flat()
        return self

    def zero_grad(self, set_to_none=False):
        """Zero the gradients and the metrics' sums in place."""
        self.flat.zero_gradients()

    @property
    def device(self):
        return self.flat.copies.device  # masters may be in host memory

    @property
    def has_dropout(self):
        """True if training draws masks, so that batches need keys of their tokens."""
        return self.dropout > 0 or self.lora is not None and self.lora.dropout > 0

    def own_modules(self):
        """The modules of the network itself, without adapters' factors."""
        return [module for name, module in self.named_modules() if not factor_kind(name)]

    def saved_tensors(self):
        """{name: tensor} of what a checkpoint holds: all weights, or the adapters alone if there are any."""
        return {name: t for name, t in self.state_dict().items() if self.lora is None or is_factor(name)}

    def key_dropout(self, seed, step):
        """Draw the masks of this step from now on; captured steps read the key too."""
        for word, value in zip(self.step_key.unbind(), step_key(seed, step), strict=True):
            word.fill_(value)  # unlike a copy from the host, it does not wait for the device

    def masks(self, token_keys):
        """Masks of the first site of tokens with these keys; in evaluation they drop nothing."""
        if not (self.training and self.has_dropout):
            return NO_DROPOUT
        assert token_keys is not None, "dropout needs a batch whose tokens have keys: Packing.dropout"
        return Masks(self.dropout, self.step_key, token_keys)

    def cross_entropy(self, batch, chunk_tokens=2048, terms=PLAIN):
        """(loss, parts (3,)) as in linear_cross_entropy, summed over target tokens; the first is the cross-entropy."""
        guides = self._guides(batch, terms)  # before `hidden`: the teachers' temporaries are free when it begins
        hidden, labels = self.hidden(batch)
        weight = self.output_weight
        if self._adds_by_chunk:
            return cross_entropy_again(hidden, weight, labels, chunk_tokens, terms, guides)
        return linear_cross_entropy(hidden, weight, labels, chunk_tokens, terms, with_padding(weight.copy), guides)

    def _guides(self, batch, terms):
        """The Guides of a batch in training: what the teachers make of it, and places if the batch has them."""
        teachers = self.teachers if terms.distill_weight and self.training else ()
        return Guides(tuple(teacher.output(batch) for teacher in teachers), batch.values.get("places"))

    @torch.no_grad()
    def output(self, batch):
        """What this network makes of a batch, for another one to learn."""
        table = self.output_weight
        return TeacherOutput(self.hidden(batch)[0], with_padding(table.copy), len(table))

    def token_log_probs(self, batch, chunk_tokens=2048):
        """Log-probability of each target token in nats, (targets,) float32; 0 for padding."""
        hidden, labels = self.hidden(batch)
        weight = self.output_weight
        return token_log_probs(hidden, weight, labels, chunk_tokens, with_padding(weight.copy), self._adds_by_chunk)

    @property
    def _adds_by_chunk(self):
        """Whether backward adds each chunk of the logits to the gradient of the output weight."""
        weight, checkpointing = self.output_weight, self.gradient_checkpointing
        trains = torch.is_grad_enabled() and weight.requires_grad
        return trains and computes_logits_again(checkpointing, self.config.num_blocks, weight.numel())

    def forward(self, batch, chunk_tokens=2048):
        """Cross-entropy in nats, summed over target tokens; a float32 scalar."""
        return self.cross_entropy(batch, chunk_tokens)[0]


@dataclass(frozen=True)
class Family:
    """A network architecture: functions, none of which knows runs, ranks or files of pairs."""

    name: str
    # A frozen record of sizes. Beside vocab_size it has: width (columns of the output table), num_blocks (each holds at
    # least one tensor), max_tokens (of a sequence, all its columns together; None: no limit), kernel_sizes (that the
    # attention kernels must support), parts (what `--trainable` may name).
    config_class: type
    # (model_config, dropout, compute_dtype) -> LanguageModel, whose weights are not drawn yet; ValueError for a dropout
    # above 0 if the network has none
    build: Callable
    collate: Callable  # (Sequences, Packing) -> the batch that the network takes; has `to(device)` and `values`
    first_id: Callable  # (model_config, tokenizer) -> token id that a sequence of targets begins with
    step_moments: Callable  # (MemorySpec, tokens (kinds, columns), checkpointing) -> {moment: bytes (kinds,)}
    evaluation_moment: Callable  # (MemorySpec, tokens (kinds, columns)) -> bytes (kinds,)
    cache_bytes: Callable  # (MemorySpec, slots, input_tokens, new_tokens) -> bytes of generation
    config_of: Callable  # (dict of a Hugging Face config.json, its path) -> config_class; ValueError for wrong values
    check_config: Callable  # (that dict, path); raises ValueError for what the network does not compute
    config_with: Callable  # (config_class, own tensors) -> config_class; what only the tensors tell
    from_hf: Callable  # ({name: tensor} of Hugging Face files, path) -> those of the network
    aliases: tuple[str, ...]  # names under which such a file may hold a tensor a second time
    to_hf: Callable  # (model, tokenizer) -> (dict of its config.json, dict of its generation_config.json)
    adapter_targets: Callable  # (model_config) -> names of the linear layers that `--lora_targets` may name
    adapter_prefix: str = "base_model.model."  # of the network's names in PEFT's files
    task_type: str = "CAUSAL_LM"  # PEFT's name of what such a network does
    # whether it reads dialogues in the tokenizer's chat template (model/data/turn_template.py)
    reads_dialogues: bool = False
    reads_one_stream: bool = False  # whether the columns of an example lie in one sequence
    # (model_config, device, dropout) -> functions that launch a part of the network's Triton kernels each, on small
    # tensors, so that they are compiled at the same time
    kernel_works: Callable = lambda *_: ()


@dataclass(frozen=True)
class Packing:
    """How a batch is made."""

    first_id: int  # token id that a sequence of targets begins with
    kernels: bool = False  # for the Triton kernels
    bucket: object = None  # Bucket that the batch is padded to, with `kernels` only; None: no padding
    num_sequences: int = 0  # most sequences in the bucket
    dropout: bool = False  # the tokens get the keys of their masks
