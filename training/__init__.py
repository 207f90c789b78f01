"""How the demo models were made: data, tokenizer, training and evaluation."""
