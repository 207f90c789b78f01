"""`python make_checkpoint.py FOLDER SHAPE`: write a model with random weights and a tokenizer."""

import json
import sys

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SEED = 0


def main(folder: str, shape: dict[str, int]) -> None:
    """Save a Llama model, or a Mixtral model if `shape` has experts, to `folder`."""
    kind = "Mixtral" if "num_local_experts" in shape else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **shape, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False
    )
    torch.manual_seed(_SEED)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(folder)
    _tokenizer(shape["vocab_size"]).save_pretrained(folder)


def _tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, padded with dummy tokens so that every token id has a text."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    for number in range(len(vocab), vocab_size):
        vocab[f"<{number}>"] = number
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
