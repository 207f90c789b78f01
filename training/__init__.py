"""Data, tokenizer, training and evaluation of the demo models."""
