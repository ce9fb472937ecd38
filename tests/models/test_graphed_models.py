"""Every layer of every model by name gets its CUDA graphs: on paper, without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pipeal import ALPackage, Pipeline
from pipeal.engine.graphed import GraphWarning
from pipeal.models import (
    LANGUAGE_MODELS,
    TEXT_MODELS,
    VISION_MODELS,
    CharDims,
    TextDims,
    VisionDims,
    build_language,
    build_text,
    build_vision,
)
from tests.engine.tape import TapeRecorder

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")

VOCAB, CLASSES, ROWS = 20, 3, 4
TEXT = TextDims(embedding=12, hidden=10, code=8, heads=3, dropout=0.3)
CHARS = CharDims(block=8, width=12, heads=2, layers=3, dropout=0.3)
IMAGE = VisionDims(size=16, hidden=10, code=8, width=0.05)


@pytest.fixture(autouse=True)
def on_paper(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """Every stage records on tapes; and without oneDNN, whose LSTM gives less without a graph of autograd."""
    monkeypatch.setattr("pipeal.engine.stage.recorders", lambda device: TapeRecorder)
    monkeypatch.setattr("pipeal.engine.pipeline.check_cuda_graphs", lambda wanted, devices, **beside: None)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def build(name: str, mode: str) -> ALPackage:
    torch.manual_seed(0)
    if name in TEXT_MODELS:
        return build_text(name, mode, vocab_size=VOCAB, classes=CLASSES, dims=TEXT)  # type: ignore[arg-type]
    if name in LANGUAGE_MODELS:
        return build_language(name, mode, characters=VOCAB, dims=CHARS)  # type: ignore[arg-type]
    return build_vision(name, mode, classes=CLASSES, dims=IMAGE)  # type: ignore[arg-type]


def batch(name: str, mode: str, seed: int) -> tuple[Tensor, Tensor]:
    """Classes of a label side are probabilities: of numbers, a CPU asks how large they are, which no graph can."""
    draw = torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randint(1, VOCAB, (ROWS, 8), generator=draw)

    if name in LANGUAGE_MODELS:
        return tokens(), tokens()
    x = tokens() if name in TEXT_MODELS else torch.randn(ROWS, 3, 16, 16, generator=draw)
    if name in TEXT_MODELS:
        x[1, 5:] = 0  # padding
    if mode == "bp":
        return x, torch.randint(CLASSES, (ROWS,), generator=draw)
    return x, torch.rand(ROWS, CLASSES, generator=draw).softmax(1)


@pytest.mark.parametrize("mode", ["al", "bp"])
@pytest.mark.parametrize("name", [*TEXT_MODELS, *LANGUAGE_MODELS, *VISION_MODELS])
def test_every_layer_gets_its_graphs_and_learns_as_without(name: str, mode: str) -> None:
    """Nothing in them waits, reads what a replay would not find, or differs from batch to batch."""

    def trained(*, cuda_graphs: bool) -> list[Tensor]:
        model = build(name, mode)
        with warnings.catch_warnings(), Pipeline(model, ["cpu"], threads=1, cuda_graphs=cuda_graphs) as pipe:
            warnings.simplefilter("error", GraphWarning)
            pipe.run(batch(name, mode, seed) for seed in range(5))
            graphs = [len(graphed._graphs) for graphed in pipe.stages[0]._graphed.values()]
        assert graphs == ([1] * len(model) if cuda_graphs else [])
        return list(model.state_dict().values())

    torch.testing.assert_close(trained(cuda_graphs=True), trained(cuda_graphs=False))
