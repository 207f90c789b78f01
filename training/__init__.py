"""Generates data, trains the demo models and their tokenizer, and evaluates the models."""
