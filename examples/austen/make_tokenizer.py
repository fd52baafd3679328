"""Train the example's tokenizer: byte-level BPE, 2,048 tokens, on the five training novels.

    python examples/austen/make_tokenizer.py

The result is written to ``teacher/`` beside this file, next to the teacher that uses it.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "prideprejudice", "sensesensibility")


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(HERE / "text" / f"{novel}.txt") for novel in NOVELS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(HERE / "teacher")


if __name__ == "__main__":
    main()
