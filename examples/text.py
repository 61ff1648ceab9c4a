"""Text: a small GPT learns Python's help pages, character by character, and then writes its own.

    python examples/text.py --epochs 2

Paragraphs differ in length, so batches differ in their number of characters. The loss function
returns this number. So every character counts the same, in an update from four batches and in every
reported number.

Two optimizers train the model: Muon the matrices inside the blocks, AdamW the rest. Both are
clipped and scheduled together.
"""

import argparse
import functools
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, random_split

from fnloop import (
    TrainState,
    accumulate,
    amp,
    clip,
    evaluate,
    every,
    fit,
    pipeline,
    predict,
    schedule,
)
from fnloop.schedules import cosine

CONTEXT, WIDTH = 64, 96
ALPHABET = "".join(sorted(set("\n".join(topics.values()))))
PAD = -1  # not a character


def encode(text):
    return torch.tensor([ALPHABET.index(character) for character in text])


def snippets():
    """Return all paragraphs, each between two newlines; long ones are split into pieces."""
    paragraphs = (p for topic in topics.values() for p in topic.split("\n\n") if p.strip())
    pieces = (piece for p in paragraphs for piece in encode(f"\n{p}\n").split(CONTEXT + 1))
    return [piece for piece in pieces if len(piece) > 1]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH,
            nhead=3,
            dim_feedforward=4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.TransformerEncoder(block, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text):
        length = text.size(1)
        x = self.characters(text) + self.places.weight[:length]
        past_only = nn.Transformer.generate_square_subsequent_mask(length, text.device)
        return self.head(self.blocks(x, past_only, is_causal=True))


def next_character(model, batch):
    """Return the mean loss over the characters, padding left out, and their number."""
    given, wanted = batch[:, :-1].clamp(min=0), batch[:, 1:]
    loss = cross_entropy(model(given).flatten(0, 1), wanted.flatten(), ignore_index=PAD)
    return loss, {"weight": (wanted != PAD).sum()}


def write_on(model, text, length=300, temperature=0.7):
    """Return the text with more characters, each drawn from the model's prediction."""
    for _ in range(length):
        logits = model(text[None, -CONTEXT:])[0, -1]
        text = torch.cat([text, (logits / temperature).softmax(-1).multinomial(1)])
    return "".join(ALPHABET[code] for code in text)


def main():
    parser = argparse.ArgumentParser(description="A small GPT learns Python's help pages.")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(1)  # matrices this small are fastest on one core
    torch.manual_seed(0)
    train, valid = random_split(snippets(), [0.9, 0.1])  # type: ignore[arg-type]  # a list is enough
    padded = functools.partial(pad_sequence, batch_first=True, padding_value=PAD)
    train = DataLoader(train, batch_size=8, shuffle=True, collate_fn=padded)
    valid = DataLoader(valid, batch_size=32, collate_fn=padded)

    model = GPT()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW(rest, lr=8e-3, weight_decay=0.1, fused=True)
    state = TrainState.create(model, {"matrices": muon, "rest": adamw})
    precision = "bf16" if torch.accelerator.is_available() else None  # most CPUs emulate it
    middleware = amp(precision), accumulate(4), clip(1.0), schedule(cosine(warmup=0.1))
    step = pipeline(*middleware)(next_character)
    untrained = evaluate(step, state, valid)["loss"]
    state = fit(step, state, (train, valid), epochs=args.epochs, evaluate_every=every(epochs=0.25))
    if state.stop:  # such as Ctrl-C
        return

    print(state.history)
    blind, trained = math.log(len(ALPHABET)), state.history.latest("valid/loss")
    numbers = f"{blind:.2f} by guessing, {untrained:.2f} untrained, {trained:.2f} trained"
    print(f"nats per character: {numbers}")
    (text,) = predict(write_on, state, [encode("\nThe ")])
    print(text)


if __name__ == "__main__":
    main()
