"""Law 1 for every model as it is compiled: the graphs are traced as ever, and run operator by operator.

That takes half a minute where kernels take several; kernels are for tests/engine/test_compiling.py. Backpropagation is
one layer whatever the model: it has two of them.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from pipeal import ALPackage
from tests.integration import law, test_charlm_exactness, test_text_exactness, test_vision_exactness

MODELS = {
    "charlm": lambda mode, schedule, stages: test_charlm_exactness.trained(mode, "codes", schedule, stages, 2, "fp32"),
    "lstm": lambda mode, schedule, stages: test_text_exactness.trained("lstm", mode, schedule, stages, 2, "fp32"),
    "transformer": lambda mode, schedule, stages: test_text_exactness.trained(
        "transformer", mode, schedule, stages, 2, "fp32"
    ),
    "resnet": partial(test_vision_exactness.trained, "resnet"),
    "vgg": partial(test_vision_exactness.trained, "vgg"),
}


def of_two_shapes(package: ALPackage, data: law.Batches, *arguments: Any, **options: Any) -> list[torch.Tensor]:
    """A batch, and half of it."""
    x, y = data[0]
    half = len(y) // 2
    return law.left_behind(package, [(x, y), (x[:half], y[:half])], *arguments, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pipeal.engine.runner.regions.CompileWarning")
@pytest.mark.parametrize(("model", "mode"), [*product(MODELS, ["al"]), ("resnet", "bp"), ("lstm", "bp")])
def test_stages_leave_what_sequential_leaves(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    compile = torch.compile

    def traced(function: Any, *, backend: object, **keywords: Any) -> Any:
        def keep(graph: Any, _: object) -> Any:
            graphs.append(graph)
            return graph

        return compile(function, **keywords, backend=keep)

    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(law, "Pipeline", partial(law.Pipeline, compile="static"))
    for module in (test_charlm_exactness, test_text_exactness, test_vision_exactness):
        monkeypatch.setattr(module, "left_behind", of_two_shapes)
    expected = MODELS[model](mode, "sequential", 1)
    alone = len(graphs)
    found = MODELS[model](mode, "pipelined", 3 if mode == "al" else 1)
    assert all(map(torch.equal, found, expected))
    assert min(alone, len(graphs) - alone) >= 2, "one for each of the shapes, of a part at least"
