"""Text: a small GPT learns Python's help pages character by character, and then writes one.

Paragraphs differ in length, so batches differ in characters. The loss says how many it is the mean of, and every
character counts the same: in the gradient over four batches, and in what is reported.

    python examples/text.py --epochs 3
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, random_split

from fnloop import TrainState, accumulate, amp, clip, evaluate, every, fit, pipeline, predict, schedule
from fnloop.schedules import cosine

CONTEXT, WIDTH, HEADS, LAYERS = 96, 128, 4, 3
ALPHABET = sorted(set("\n".join(topics.values())))
CODES = {character: code for code, character in enumerate(ALPHABET)}
PAD = -1


def encode(text):
    return torch.tensor([CODES[character] for character in text])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # head before time
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters, self.places = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text):
        x = self.characters(text) + self.places.weight[: text.size(1)]
        return self.head(self.norm(self.blocks(x)))


def snippets():
    """Return every paragraph as characters between two newlines, the long ones in pieces."""
    paragraphs = (p for topic in topics.values() for p in topic.split("\n\n") if p.strip())
    return [piece for p in paragraphs for piece in encode(f"\n{p}\n").split(CONTEXT + 1) if len(piece) > 1]


def pad(batch):
    return pad_sequence(batch, batch_first=True, padding_value=PAD)


def next_character(model, batch):
    """Return the mean loss over the characters that are there, and how many those are."""
    seen, wanted = batch[:, :-1].clamp(min=0), batch[:, 1:]
    loss = cross_entropy(model(seen).flatten(0, 1).float(), wanted.flatten(), ignore_index=PAD)
    return loss, {"weight": (wanted != PAD).sum()}


def write(model, text, length=400):
    """Return the text with more characters, each drawn from what the model expects."""
    for _ in range(length):
        expected = model(text[None, -CONTEXT:])[0, -1].softmax(-1)
        text = torch.cat([text, expected.multinomial(1)])
    return "".join(ALPHABET[i] for i in text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, valid = random_split(snippets(), [0.9, 0.1])
    train = DataLoader(train, batch_size=8, shuffle=True, collate_fn=pad)
    valid = DataLoader(valid, batch_size=32, collate_fn=pad)

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    step = pipeline(amp("bf16"), accumulate(4), clip(1.0), schedule(cosine(warmup=0.1)))(next_character)
    state = TrainState.create(model, optimizer)

    print(
        f"knowing nothing: {math.log(len(ALPHABET)):.2f} nats per character; untrained: {evaluate(step, state, valid)['loss']:.2f}"
    )
    state = fit(step, state, {"train": train, "valid": valid}, epochs=args.epochs, evaluate_every=every(epochs=0.5))
    print(state.history)
    for text in predict(write, state, [encode("\nThe ")]):
        print(text)


if __name__ == "__main__":
    main()
