"""What a draft of another tokenizer loses: one that has only a share of the target's tokens."""
