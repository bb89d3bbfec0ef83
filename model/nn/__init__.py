"""Neural networks: layers, kernels and weights. Knows nothing of data files, optimizers, ranks or runs.

base says what a network computes and what a family gives; registry names the families. Each family is a folder.
layers and activations hold what several families are built of; attention works on packed examples, whose places
packed_layout gives; loss is the output projection with cross-entropy or log-probabilities and never holds all logits.
flat_params keeps weights, gradients and bf16 copies in flat tensors, flat_batch the arrays of a batch in one;
gradient_parts tells which gradients backward has completed; footprint says what determines the bytes of a run.
dropout draws its masks with philox, from what a token is and not from where it lies.
lora adds adapters to a network's linear layers, whose products adapted_product computes; quantized holds frozen
matrices in four bits. weights_io reads and writes model files, with a model_card, adapter_io adapters; tensor_files
reads the tensors in files of strangers; other_formats writes models again, in bf16 or for CTranslate2.
kernels/ holds the Triton kernels; each has a PyTorch implementation that gives the same results to rounding.
"""
