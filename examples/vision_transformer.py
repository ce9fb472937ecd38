"""A ViT of torchvision, small: cut at its own blocks, trained on one and on three stages, exported.

python examples/vision_transformer.py      the same weights on both; what is exported answers as the pipeline does
"""

import torch
from torchvision.models import VisionTransformer

from pipeal import ALPackage, Pipeline


def vit():
    torch.manual_seed(0)
    return VisionTransformer(
        image_size=24, patch_size=8, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=4
    )


def batches(count=50, samples=32):
    """A bright patch in noise; the class is the quarter of the image that it is in."""
    drawn = torch.Generator().manual_seed(1)
    for _ in range(count):
        y = torch.randint(4, (samples,), generator=drawn)
        images = torch.randn(samples, 3, 24, 24, generator=drawn)
        for image, quarter in zip(images, y, strict=True):
            top, left = (quarter // 2) * 12, (quarter % 2) * 12
            image[:, top : top + 12, left : left + 12] += 0.7
        yield images, y


def train(devices):
    images, _ = next(batches(1))
    blocks = [f"encoder.layers.encoder_layer_{number}" for number in (1, 2)]  # a layer begins at each
    package = ALPackage.from_bp(vit(), images, outputs=4, split=blocks)
    with Pipeline(package, devices, threads=1) as pipe:
        report = pipe.run(batches())
        x, y = next(batches(1, samples=500))
        logits = pipe.predict(x)
    busy = ", ".join(f"{share:.0%}" for share in report.busy_share)
    print(
        f"{devices}: {report.seconds:.1f} s, stages busy {busy}, accuracy {(logits.argmax(1) == y).float().mean():.3f}"
    )
    return package, x, logits


if __name__ == "__main__":
    (one, _, _), (three, x, logits) = train("cpu"), train("cpu*3")
    weights = one.state_dict(), three.state_dict()
    print(
        "the same weights on one stage and on three:",
        all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
    )
    exported = torch.export.export(three.to_bp(), (x,)).module()
    print("exported, it answers the same:", torch.allclose(exported(x), logits, atol=1e-5))
