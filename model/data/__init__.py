"""Any file to conversations, these to stored token ids; which ids form a step and how they are packed. No tensors."""
