"""A BERT-like encoder of ``transformers``, made from a configuration: random weights, nothing is downloaded.

python examples/bert.py            its features, once converted, are those of transformers; it trains on two stages
"""

import sys

import torch

from pipeal import ALPackage, Encoder, Pipeline

try:
    from transformers import BertConfig, BertModel
except ImportError:
    sys.exit("skipped: transformers is not installed (pip install transformers)")

WORDS, LENGTH = 200, 24


def batches(count=40, samples=32):
    """Texts of several lengths, padded. The class is whichever of three words comes more often than chance."""
    drawn = torch.Generator().manual_seed(1)
    for _ in range(count):
        y = torch.randint(3, (samples,), generator=drawn)
        ids = torch.randint(4, WORDS, (samples, LENGTH), generator=drawn)
        told = torch.rand(samples, LENGTH, generator=drawn) < 0.2
        ids = torch.where(told, y[:, None] + 1, ids)
        mask = torch.arange(LENGTH) < torch.randint(8, LENGTH + 1, (samples, 1), generator=drawn)
        yield (ids * mask, mask), y  # 0 is padding


if __name__ == "__main__":
    torch.manual_seed(0)
    bert = BertModel(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
        )
    )
    (ids, mask), _ = next(batches(1))
    with torch.no_grad():
        wanted = bert.eval()(ids, attention_mask=mask.long()).last_hidden_state

    # The blocks are found one after the other: two of them, or the embedding, are one layer that trains itself.
    parts = Encoder(bert.embeddings, bert.encoder.layer, per_layer=2)
    package = ALPackage.from_bp(parts, (ids, mask), outputs=3)
    print(package.summary())
    x = (ids, mask)
    with torch.no_grad():
        for layer in package.eval():
            x = layer.inference(x, "f")
    print("the features of transformers:", torch.allclose(x[0], wanted, atol=1e-5))

    with Pipeline(package.train(), "cpu*2", threads=1) as pipe:
        print(pipe.run(batches()))
        texts, y = next(batches(1, samples=500))
        print(f"accuracy on new texts: {(pipe.predict(texts).argmax(1) == y).float().mean():.3f}")
