"""Law 4 for a pipeline made by hand: saved anywhere and loaded anywhere, it goes on as if it had never stopped."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeal import AE, AL, ENC, ALPackage, ConfigError, DataError, LabelAE, Pipeline, ScheduleError
from pipeal.core.packet import Packet
from pipeal.engine import SCHEDULES
from pipeal.engine.execution.executors import Executor
from pipeal.engine.runner import precision as settings
from pipeal.engine.state.layer_state import layer_state, load_layer_states

from .cases import Case, Layer, Outcome, cases, cosine, cuts, outcome
from .test_layer_state import pairs, rebuilt
from .traps import Trap, nothing, quick, throw


def test_a_users_first_save_and_load(tmp_path: Path) -> None:
    def package() -> ALPackage:
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU())
        return ALPackage.from_bp(net, torch.randn(4, 6), outputs=3, split=["3"])

    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(6)]
    with Pipeline(package(), devices="cpu*2", threads=1) as pipe:
        pipe.run(batches[:4])
        pipe.save(tmp_path / "model.pipeal")
        wanted = pipe.run(batches[4:])

    with Pipeline.load(tmp_path / "model.pipeal", package(), devices="cpu", threads=1) as pipe:
        assert pipe.next_batch == 4
        found = pipe.run(batches[4:])
    assert all(map(torch.equal, found.losses, wanted.losses))


@patch("pipeal.engine.state.mapped_file._SMALL", 1)
@given(case=cases(), data=st.data())
def test_loaded_into_other_stages_it_goes_on_as_if_it_had_never_stopped(
    tmp_path_factory: pytest.TempPathFactory, case: Case, data: st.DataObject
) -> None:
    last, batches = len(case.rows), case.batches()
    every = data.draw(st.integers(1, 3), label="accumulate")
    stop = data.draw(st.sampled_from([*range(0, last, every), last]), label="stop")
    path = tmp_path_factory.mktemp("saved") / "model.pipeal"

    def updates(batch: int) -> bool:
        return batch % every == every - 1 or batch == last - 1

    def drawn(what: str) -> dict[str, Any]:
        stages = data.draw(st.integers(1, min(4, len(case.layers))), label=f"{what}, stages")
        schedule = data.draw(st.sampled_from(list(SCHEDULES)), label=f"{what}, schedule")
        offloads = data.draw(st.booleans(), label=f"{what}, offload") and schedule in ("sequential", "pipelined")
        return {
            "devices": ["cpu"] * stages,
            "schedule": schedule,
            "offload": "disk" if offloads else "none",
            "offload_folder": path.parent,
            "sizes": data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label=f"{what}, sizes"),
            "threads": 1,
        }

    whole = case.build()
    with Pipeline(whole, ["cpu"], "sequential", seed=case.seed, threads=1) as pipe:
        wanted = pipe.run(batches, cosine, updates=updates)

    pipe = Pipeline(case.build(), **drawn("saved"), seed=case.seed)
    with pipe:
        pipe.run(batches[:stop], cosine, updates=updates)
        if data.draw(st.booleans(), label="saved while open"):
            pipe.save(path)
            pipe.run(batches[stop:], cosine, updates=updates)  # a future that is lost
    if not path.exists():
        pipe.save(path)

    package = rebuilt(case)
    way = data.draw(st.sampled_from(["made", "closed", "open"]), label="loaded")
    # Symptom: an infinite loss. Cause: other weights, each one higher, at full rate, before the file is loaded.
    options = {**drawn("loaded"), "on_non_finite": "ignore" if way == "open" else "raise"}
    pipe = Pipeline.load(path, package, **options) if way == "made" else Pipeline(package, **options)
    if way == "closed":
        pipe.load(path)
    with pipe:
        if way == "open":
            pipe.run(batches)
            pipe.load(path)
        assert pipe.next_batch == stop
        report = pipe.run(batches[stop:], cosine, updates=updates)
    losses = [rows[-(last - stop) :] for rows in report.losses] if stop < last else []
    rest = [rows[stop:] for rows in wanted.losses] if stop < last else []
    assert outcome(package, losses, []).differences(outcome(whole, rest, [])) == []


def half(kind: type[AL] = AL) -> AL:
    enc = ENC(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)), nn.Linear(6, 3))
    return kind(enc, AE(nn.Linear(3, 3), nn.Linear(3, 3)))


def small(seed: int = 0) -> ALPackage:
    torch.manual_seed(seed)
    first = AL(ENC(nn.Linear(6, 6), nn.Linear(6, 3)), LabelAE(nn.Linear(3, 3), nn.Linear(3, 3), 3))
    return ALPackage([first, half(), half()])


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=draw), torch.randint(3, (4,), generator=draw)) for _ in range(count)]


def values(package: ALPackage) -> list[Any]:
    """All leaves of what a package has learnt; tensors as lists."""
    states = {str(number): layer_state(layer) for number, layer in enumerate(package)}
    return [one.tolist() if isinstance(one, Tensor) else one for one, _ in pairs(states, states).values()]


def test_in_fp16_the_factors_of_the_losses_move_along(tmp_path: Path) -> None:
    with patch.object(settings, "_cpu_has_fp16", lambda: True):
        with Pipeline(small(), "cpu*3", threads=1, precision="fp16") as pipe:
            pipe.run(data(3))
            pipe.save(tmp_path / "m")
            wanted = pipe.run(data(3))
        package = small(1)
        with Pipeline.load(tmp_path / "m", package, "cpu", threads=1, precision="fp16") as other:
            found = other.run(data(3))
    assert all(map(torch.equal, found.losses, wanted.losses))
    assert values(package) == values(pipe.model)
    assert any("scaler" in name for name in package.state_dict())


def test_the_seed_is_that_of_the_file(tmp_path: Path) -> None:
    with Pipeline(small(), "cpu", threads=1, seed=5) as pipe:
        pipe.run(data(2))
        pipe.save(tmp_path / "m")
        wanted = pipe.run(data(2))
    other = Pipeline(small(1), "cpu*2", threads=1, seed=6)
    other.load(tmp_path / "m")
    assert other.seed == 5
    with other:
        assert all(map(torch.equal, other.run(data(2)).losses, wanted.losses))
    for name in ("seed", "first_batch"):
        with pytest.raises(ConfigError, match=f"{name} is given, but comes from the file"):
            Pipeline.load(tmp_path / "m", small(), **{name: 5})


@pytest.mark.parametrize(
    "settings", [{"seed": np.int64(3)}, {"first_batch": np.int64(3)}, {}], ids=lambda one: str(*one)
)
def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Symptom: a file that ``save`` had written was "damaged": ``torch.load`` takes no number of NumPy's."""
    pipe = Pipeline(quick(2), "cpu", "sequential", **settings)
    pipe.skip(np.int64(2))
    pipe.save(tmp_path / "model.pipeal")
    loaded = Pipeline.load(tmp_path / "model.pipeal", quick(2))
    assert (loaded.seed, loaded.next_batch) == (settings.get("seed", 0), settings.get("first_batch", 0) + 2)


@pytest.mark.parametrize("way", ["made", "loaded"])
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_what_is_loaded_in_inference_mode_learns_on(tmp_path: Path, way: str, offload: Any) -> None:
    """Symptom: "Inplace update to inference tensor outside InferenceMode", in the first update: what optimizers keep
    was made in that mode, and on the meta device weights could not be made there at all."""
    case = Case((Layer(width=40), Layer(code=40)))

    def learnt(mode: bool) -> Outcome:
        with torch.device("meta") if way == "made" else nullcontext():
            package = case.build()
        settings: dict[str, Any] = {"threads": 1, "offload": offload, "offload_folder": tmp_path}
        with torch.inference_mode(mode):
            if way == "made":
                pipe = Pipeline(package, "cpu*2", **settings)
            else:
                pipe = Pipeline.load(path, package, "cpu*2", **settings)
        with pipe:
            losses = pipe.run(case.batches(), cosine).losses
        assert not any(weight.is_inference() for weight in package.parameters())
        return outcome(package, losses, [])

    path = tmp_path / "model.pipeal"
    with Pipeline(case.build(), "cpu", threads=1) as pipe:
        pipe.run(case.batches())
        pipe.save(path)
    assert learnt(True).differences(learnt(False)) == []


def test_in_the_middle_of_an_update_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    with Pipeline(small(), "cpu*3", threads=1) as pipe:
        pipe.save(tmp_path / "m")
        pipe.submit(*data(1)[0], updates=False)
        for use in (pipe.save, pipe.load):
            with pytest.raises(ScheduleError, match="between two batches of one update"):
                use(tmp_path / "m")
        pipe.submit(*data(1)[0])


def test_while_an_iterator_predicts_nothing_is_loaded(tmp_path: Path) -> None:
    pipe = Pipeline(small(), "cpu*3", threads=1)
    pipe.save(tmp_path / "m")
    answers = pipe.predict_each([data(1)[0][0]] * 3)
    next(answers)
    with pytest.raises(ScheduleError, match="the pipeline is predicting"):
        pipe.load(tmp_path / "m")
    answers.close()
    pipe.load(tmp_path / "m")


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_what_a_failure_has_left_is_not_taken_for_a_model(tmp_path: Path, schedule: str) -> None:
    """Layers stand at different batches: nobody could go on from there as if nothing had been."""
    pipe = Pipeline([*quick(1), Trap("F", 2, throw(ValueError("the trap")))], None, schedule)
    with pytest.raises(ValueError, match="the trap"), pipe:
        pipe.run(nothing(3))
    with pytest.raises(ScheduleError, match="a failure ended the pipeline before its layers had all learnt"):
        pipe.save(tmp_path / "m")
    with pipe, pytest.raises(ScheduleError, match="a failure ended the pipeline"):  # opened once more, they still do
        pipe.snapshot()
    with pytest.raises(ScheduleError, match="a failure ended the pipeline"):
        pipe.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    sound = Pipeline([*quick(1), Trap("F", 9, throw(ValueError("the trap")))], None, schedule)
    sound.save(tmp_path / "m")
    pipe.load(tmp_path / "m")
    pipe.save(tmp_path / "m")


def test_a_failure_after_all_was_learnt_hinders_no_saving(tmp_path: Path) -> None:
    pipe = Pipeline(quick(2))
    with pytest.raises(ZeroDivisionError), pipe:  # noqa: PT012  a user's own mistake
        pipe.run(nothing(3))
        raise ZeroDivisionError
    pipe.save(tmp_path / "m")
    assert Pipeline.load(tmp_path / "m", quick(2)).next_batch == 3


def test_a_failure_between_batches_of_sequential_hinders_no_saving(tmp_path: Path) -> None:
    """Symptom: what was submitted had all been learnt from, but ``save`` said that it had not, and refused."""
    pipe = Pipeline(small(), "cpu*3", "sequential", threads=1)
    with pytest.raises(ZeroDivisionError), pipe:  # noqa: PT012  a user's own mistake
        for batch in data(3):
            pipe.submit(*batch)
        raise ZeroDivisionError
    pipe.save(tmp_path / "m")
    found, wanted = small(1), small()
    assert Pipeline.load(tmp_path / "m", found, "cpu").next_batch == 3
    with Pipeline(wanted, "cpu", threads=1) as other:
        other.run(data(3))
    assert values(found) == values(wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_signal_right_after_a_batch_was_handed_over_finds_it_counted(tmp_path: Path, schedule: str) -> None:
    """Symptom: a file that a signal's handler saved there, or the caller after a Ctrl-C, counted one batch too few."""
    interrupted = False
    files = [tmp_path / "handler", tmp_path / "caller", tmp_path / "end"]
    with Pipeline(small(), "cpu*3", schedule, threads=1) as pipe:
        pipe.submit(*data(1)[0])
        submit = pipe._executor.submit  # type: ignore[union-attr]

        def cut_off(packet: Packet) -> None:
            submit(packet)
            pipe.save(files[0])
            raise ZeroDivisionError  # pytest ends by a KeyboardInterrupt

        with patch.object(pipe._executor, "submit", cut_off):
            try:
                pipe.submit(*data(2)[1])
            except ZeroDivisionError:
                interrupted = True
        pipe.save(files[1])
        report = pipe.drain()
    pipe.save(files[2])
    assert interrupted
    assert (report.batches, report.samples) == (2, sum(len(y) for _, y in data(2)))
    wanted = small()
    with Pipeline(wanted, "cpu", threads=1) as other:
        other.run(data(2))
    for file in files:
        found = small(1)
        assert Pipeline.load(file, found, "cpu").next_batch == 2
        assert values(found) == values(wanted)


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_a_ctrl_c_amid_the_count_leaves_no_batch_uncounted(tmp_path: Path, schedule: str) -> None:
    """Symptoms: a batch submitted after it got the number of that before, and was waited for in vain; what was saved
    after the ``with`` counted one too few; a file that was loaded after it counted one too many."""
    pipe = Pipeline(small(), "cpu*3", schedule, threads=1)
    count = pipe._count

    def cut_off(executor: Executor) -> None:
        if executor.submitted > pipe._sequence:
            raise ZeroDivisionError  # pytest ends by a KeyboardInterrupt
        count(executor)

    def interrupted(number: int) -> None:
        with patch.object(pipe, "_count", cut_off), pytest.raises(ZeroDivisionError):
            pipe.submit(*data(number + 1)[number])

    with pipe:
        pipe.submit(*data(1)[0])
        pipe.save(tmp_path / "first")
        interrupted(1)
        pipe.submit(*data(3)[2])
        assert pipe.drain().batches == pipe.next_batch == 3
        interrupted(3)
        pipe.load(tmp_path / "first")
        assert pipe.snapshot().batch == 1
        interrupted(1)
        pipe.skip(2)
        assert pipe.next_batch == 4
        interrupted(2)
    pipe.save(tmp_path / "end")
    assert Pipeline.load(tmp_path / "end", small(), "cpu").next_batch == 5


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
@pytest.mark.parametrize("drains", [False, True])
def test_a_failure_between_two_batches_of_one_update_leaves_nothing_to_save(
    tmp_path: Path, schedule: str, *, drains: bool
) -> None:
    """Symptom: after a ``drain`` the file counted the first batch, whose gradients the pipeline's end had dropped."""
    pipe = Pipeline(quick(2), None, schedule)
    with pytest.raises(ZeroDivisionError), pipe:  # noqa: PT012
        pipe.submit(None, None, updates=False)
        if drains:
            pipe.drain()
        raise ZeroDivisionError
    with pytest.raises(ScheduleError, match="a failure ended the pipeline before"):
        pipe.save(tmp_path / "m")


def test_a_stage_that_failed_says_so_when_it_is_saved(tmp_path: Path) -> None:
    with Pipeline([Trap("F", 0, throw(ValueError("the trap"))), *quick(1)]) as pipe:
        pipe.submit(None, None)
        with pytest.raises(ValueError, match="the trap"):
            pipe.save(tmp_path / "m")


def saved(path: Path) -> Path:
    with Pipeline(small(), "cpu", threads=1) as pipe:
        pipe.run(data(1))
        pipe.save(path)
    return path


def truncated(path: Path) -> None:
    path.write_bytes(saved(path).read_bytes()[:-100])


def flipped(path: Path) -> None:
    whole = bytearray(saved(path).read_bytes())
    with zipfile.ZipFile(path) as entries:
        weights = max(entries.infolist(), key=lambda one: one.file_size)
    whole[weights.header_offset + 200] ^= 1
    path.write_bytes(whole)


def of_a_later_format(path: Path) -> None:
    torch.save({**torch.load(saved(path), weights_only=True), "format": 2}, path)


def without_a_seed(path: Path) -> None:
    content = torch.load(saved(path), weights_only=True)
    del content["seed"]
    torch.save(content, path)


def no_states(path: Path) -> None:
    torch.save({**torch.load(saved(path), weights_only=True), "layers": [{}, {}, {}]}, path)


def code(path: Path) -> None:
    torch.save(nn.Linear(1, 1), path)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot read .*: No such file"),
    "a folder": (Path.mkdir, "cannot read .*: Is a directory"),
    "empty": (Path.touch, "is damaged, or no file that Pipeline.save"),
    "a text": (lambda path: path.write_text("hello"), "is damaged, or no file that Pipeline.save"),
    "truncated": (truncated, "is damaged, or no file that Pipeline.save"),
    "another byte": (flipped, "is damaged: .* has other bytes than were written"),
    "code": (code, "is damaged, or no file that Pipeline.save.*nothing in it was run"),
    "weights": (
        lambda path: torch.save(small().state_dict(), path),
        r"holds a dict with '0.enc.f.weight', .*; exp",
    ),
    "a tensor": (lambda path: torch.save(torch.ones(2), path), "holds a Tensor; expected a file that Pipeline.save"),
    "later": (of_a_later_format, "has the format 2; this version of pipeal reads 1"),
    "no seed": (without_a_seed, "lacks a batch number, a seed or states of layers"),
    "no states": (no_states, r"layer 0: found the parts \[\]; expected the state of a layer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, name: str) -> None:
    make, words = BAD[name]
    path = tmp_path / "model.pipeal"
    make(path)
    package = small(1)
    before, pipe = values(package), Pipeline(package, "cpu")
    for load in (pipe.load, lambda path: Pipeline.load(path, package)):
        with pytest.raises(DataError, match=words) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    assert values(package) == before
    assert pipe.next_batch == 0


def other_width() -> ALPackage:
    package = small(1)
    return ALPackage([*package[:2], AL(ENC(nn.Linear(6, 7), nn.Linear(7, 3)), AE(nn.Linear(3, 3), nn.Linear(3, 3)))])


def other_optimizer() -> ALPackage:
    enc, ae = ENC(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), nn.Linear(6, 3)), AE(nn.Linear(3, 3), nn.Linear(3, 3))
    return ALPackage([*small(1)[:2], AL(enc, ae, optimizer=torch.optim.SGD)])


MISFITS: dict[str, tuple[Callable[[], ALPackage], str]] = {
    "fewer layers": (lambda: small(1)[:2], "found the states of 3 layers; the model has 2"),
    "more layers": (lambda: ALPackage([*small(1), half()]), "found the states of 3 layers; the model has 4"),
    "another shape": (
        other_width,
        r"layer 2: the state does not fit the layer \(AL\)",
    ),
    "another optimizer": (other_optimizer, "layer 2: the state does not fit .*'enc_opt' is Adam in the state and SGD"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_file_of_another_model_loads_nothing(tmp_path: Path, name: str) -> None:
    build, words = MISFITS[name]
    package, path = build(), saved(tmp_path / "m")
    before = values(package)
    with pytest.raises(DataError, match=f"m does not fit the model: {words}") as caught:
        Pipeline.load(path, package)
    assert "\n" not in str(caught.value)
    assert values(package) == before


def test_a_layer_that_has_no_shapes_yet_has_none_after_a_file_that_does_not_fit(tmp_path: Path) -> None:
    lazy = AL(ENC(nn.LazyLinear(6), nn.Linear(6, 3)), LabelAE(nn.Linear(3, 3), nn.Linear(3, 3), 3))
    package = ALPackage([lazy, *other_width()[1:]])
    with pytest.raises(DataError, match="m does not fit the model: layer 2"):
        Pipeline.load(saved(tmp_path / "m"), package)
    assert is_lazy(lazy.enc.f.weight)


class Moody(AL):
    """Looks as if it took any state, and then does not."""

    def get_extra_state(self) -> Any:
        return {"mood": 1}

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("not today")


def test_a_last_layer_that_does_not_take_its_state_leaves_the_others_as_they_were() -> None:
    """Not half-loaded: what was loaded before it is taken back, with optimizers and what scales losses in fp16."""
    package, other = (ALPackage([*small(seed)[:2], half(Moody)]) for seed in (0, 1))
    for layer in package:
        layer.scale_losses()
    with Pipeline(other[:2], "cpu", threads=1) as pipe:
        pipe.run(data(2))
    before = values(other[:2])
    with pytest.raises(DataError, match="layer 2: Moody does not take its state: not today"):
        load_layer_states(list(other), [layer_state(layer) for layer in package])
    assert values(other[:2]) == before


def test_a_byte_that_changed_anywhere_is_seen_or_means_nothing(tmp_path: Path) -> None:
    """Of a file, one byte in each of its entries and records and some more: what loads is what was saved."""
    path = saved(tmp_path / "m")
    whole, package = path.read_bytes(), small(1)
    pipe = Pipeline(package, "cpu", threads=1)
    fresh = values(package)
    pipe.load(path)
    wanted = values(package)
    refused = 0
    for place in range(0, len(whole), 401):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        package = small(1)
        pipe = Pipeline(package, "cpu", threads=1)
        try:
            pipe.load(path)
        except DataError:
            refused += 1
            assert values(package) == fresh
        else:
            assert values(package) == wanted
            assert pipe.next_batch == 1
    assert refused > 0.5 * len(whole) / 401


def test_a_disk_that_is_full_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m")
    before = path.read_bytes()

    def full(content: object, file: Path) -> None:
        file.write_bytes(b"PK")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DataError, match=r"cannot write .*m: .*file write failed; make room there"):
        Pipeline(small(), "cpu").save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["m"]


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*: Not a directory|cannot write .*: File exists"):
        Pipeline(small(), "cpu").save(tmp_path / "file" / "m")


class Keepsake(AL):
    """Its state cannot be loaded without running code."""

    def get_extra_state(self) -> Any:
        return {"seen": {1, 2}}


def test_a_layer_that_cannot_be_kept_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a layer's state holds a set"), Pipeline([half(Keepsake)], "cpu") as pipe:
        pipe.save(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
