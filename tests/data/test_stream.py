"""The laws of the binned stream: every sample once, within budget and buffer, and the same future after a resume."""

from __future__ import annotations

import gzip
import json
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError, ScheduleError
from pipeal.data.batching.binned import BinnedBatchIterator, StreamBatch
from pipeal.data.batching.bounds import length_bounds

LENGTHS = st.lists(st.integers(1, 20), max_size=80)
BOUNDS = [2, 3, 5, 9, 14, 20]
OPTIONS = st.fixed_dictionaries(
    {
        "budget": st.integers(20, 90),
        "buffer_samples": st.integers(1, 40),
        "max_wait": st.one_of(st.none(), st.integers(1, 60)),
        "max_samples": st.one_of(st.none(), st.integers(1, 9)),
        "pad_to": st.sampled_from(["bound", "longest"]),
    }
)
VARIED = np.random.default_rng(0).integers(1, 21, 400).tolist()


def stream(source, *, budget=80, bounds=BOUNDS, **options):
    return BinnedBatchIterator(source, bounds, budget, length=int, **options)


class Counting:
    """A checkpointable source that counts what was read from it."""

    def __init__(self, samples):
        self.samples = samples
        self.at = self.reads = 0
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= len(self.samples):
            raise StopIteration
        self.at += 1
        self.reads += 1
        return self.samples[self.at - 1]

    def getstate(self):
        return {"at": self.at}

    def setstate(self, checkpoint):
        self.at = checkpoint["at"] if checkpoint else 0

    def close(self):
        self.closed = True


@given(LENGTHS, OPTIONS)
@example(  # a full bin went first, and the oldest sample waited for one more
    lengths=[1, 1, 6, 6, 1, 1],
    options={"budget": 20, "buffer_samples": 4, "max_wait": 4, "max_samples": None, "pad_to": "bound"},
)
def test_every_sample_once_within_budget_bound_and_buffer(lengths, options):
    source = Counting(lengths)
    given_out = 0
    batches = []
    for batch in stream(source, **options):
        assert source.reads - given_out <= options["buffer_samples"]
        given_out += len(batch)
        oldest = source.reads - min(batch.positions)
        assert source.at == len(lengths) or oldest <= (options["max_wait"] or 8 * options["buffer_samples"])
        batches.append(batch)
    assert sorted(chain.from_iterable(batch.positions for batch in batches)) == list(range(len(lengths)))
    for batch in batches:
        assert batch.samples == [lengths[position] for position in batch.positions]
        longest = max(batch.samples)
        bound = min(bound for bound in BOUNDS if bound >= longest)
        assert batch.padded_length == (bound if options["pad_to"] == "bound" else longest)
        assert len(batch) * bound <= options["budget"]
        assert len(batch) <= (options["max_samples"] or len(batch))


def sources(lengths):
    return {
        "sequence": lengths,
        "iterable": dict.fromkeys(enumerate(lengths)).keys(),
        "checkpointable": Counting(lengths),
    }


@pytest.mark.parametrize("kind", ["sequence", "iterable", "checkpointable"])
@given(lengths=LENGTHS, options=OPTIONS, data=st.data())
def test_a_resumed_future_is_the_same_from_every_place(kind, lengths, options, data):
    def build():
        if kind == "iterable":
            return BinnedBatchIterator(sources(lengths)[kind], BOUNDS, length=lambda pair: pair[1], **options)
        return stream(sources(lengths)[kind], **options)

    running = build()
    states, future = [running.getstate()], []
    for batch in running:
        future.append(batch)
        states.append(json.loads(json.dumps(running.getstate())))
    assert not list(running)
    for seen, state in enumerate(states):
        again = build()
        again.setstate(state)
        assert again.getstate()["waiting"] == state["waiting"]
        assert list(again) == future[seen:]
    seen = data.draw(st.integers(0, len(future)))
    further = data.draw(st.integers(0, len(future) - seen))
    again.setstate(states[seen])
    list(islice(again, further))
    third = build()
    third.setstate(json.loads(json.dumps(again.getstate())))
    assert list(third) == future[seen + further :]
    third.setstate(None)
    assert list(third) == future


def test_states_are_small_and_little_is_read_again():
    lengths = np.random.default_rng(1).integers(1, 21, 50_000).tolist()
    source = Counting(lengths)
    running = stream(source, budget=400, buffer_samples=200, max_wait=800)
    for _ in range(900):
        next(running)
    state = running.getstate()
    assert len(json.dumps(state)) < 3000
    source.reads = 0
    running.setstate(state)
    assert 0 < source.reads <= 800 + 200 // 8


def test_no_sample_waits_for_ever():
    lengths = [20, *[2] * 500]
    batches = list(stream(lengths, max_wait=50))
    assert [0 in batch.positions for batch in batches].index(True) <= 2
    late = [0 in batch.positions for batch in stream(lengths, max_wait=10_000)]
    assert late.index(True) > 5


def test_samples_of_a_bin_leave_in_the_order_in_which_they_came() -> None:
    stream = BinnedBatchIterator(["a", "bb", "cccc", "d", "ee", "f"], [2, 4], budget=6)
    found = [(batch.samples, batch.positions) for batch in stream]
    assert [(samples, places) for samples, places in found if len(samples) > 1] == [
        (["a", "bb", "d"], [0, 1, 3]),
        (["ee", "f"], [4, 5]),
    ]


def test_batches_of_a_bin_have_one_shape():
    batches = list(stream(VARIED * 5))
    full = {(len(batch), batch.padded_length) for batch in batches if 80 // batch.padded_length == len(batch)}
    assert full == {(80 // bound, bound) for bound in BOUNDS}
    assert sum((len(batch), batch.padded_length) in full for batch in batches) > 0.95 * len(batches)


def test_a_cost_may_stand_for_padded_tokens():
    for batch in BinnedBatchIterator(VARIED, BOUNDS, 900, length=int, cost=lambda n, longest: n * longest**2):
        assert len(batch) * batch.padded_length**2 <= 900


def test_over_size_samples():
    lengths = [3, 21, 5, 40]
    with pytest.raises(DataError, match="sample 1 of the stream has length 21, above the last bound 20; cut it"):
        list(stream(lengths))
    dropping = stream(lengths, oversize="drop")
    assert sorted(chain.from_iterable(batch.samples for batch in dropping)) == [3, 5]
    assert dropping.dropped == 2
    single = list(stream(lengths, oversize="single"))
    assert single[:2] == [StreamBatch([21], [1], 21), StreamBatch([40], [3], 40)]


@pytest.mark.parametrize("failure", [OSError("disk"), KeyboardInterrupt(), DataError("a sample")])
def test_a_failure_does_not_leave_a_sample_out(failure):
    """The sample that was being read was left out of the batches that followed, and of the states."""
    failing = [failure]

    def length(sample):
        if sample == 20 and failing:
            raise failing.pop()
        return sample

    whole = list(stream(VARIED))
    broken = BinnedBatchIterator(VARIED, BOUNDS, 80, length=length)
    found, states = [], [broken.getstate()]

    def walk():
        for batch in broken:
            found.append(batch)
            states.append(broken.getstate())

    with pytest.raises(type(failure)):
        walk()
    for _ in range(2):
        with pytest.raises(type(failure) if isinstance(failure, Exception) else ScheduleError):
            next(broken)
        with pytest.raises(ScheduleError, match="no state after a failure"):
            broken.getstate()
    broken.setstate(states[-1])
    assert found + list(broken) == whole


def test_an_iterator_that_cannot_be_read_again_gives_batches_but_no_state():
    whole = list(stream(VARIED))
    once = stream(iter(VARIED))
    with pytest.raises(ConfigError, match="a list_iterator, cannot be read again; wanted an iterable"):
        once.getstate()
    assert list(once) == whole


def test_a_source_that_cannot_go_where_it_should_leaves_no_position():
    """The stream went on from where the source had come to, under positions of before."""
    source = Counting([1, 2, 3, 4])
    refusing = stream(source)
    state = refusing.getstate()
    source.setstate = lambda _: {}["the disk"]
    for wanted in (lambda: refusing.setstate(state), lambda: next(refusing)):
        with pytest.raises(KeyError, match="the disk"):
            wanted()
    with pytest.raises(ScheduleError, match="no state after a failure"):
        refusing.getstate()


def test_an_iterator_that_cannot_be_read_again_does_not_pretend_to_go_back():
    """It read on from where it stood, and gave other samples under the positions of the state."""
    running = stream(VARIED)
    next(running)
    once = stream(iter(VARIED))
    with pytest.raises(ConfigError, match="a list_iterator, cannot be read again"):
        once.setstate(running.getstate())
    once.setstate(None)
    begun = [next(once)]
    with pytest.raises(ConfigError, match="a list_iterator, cannot be read again"):
        once.setstate(None)
    assert begun + list(once) == list(stream(VARIED))


@pytest.mark.parametrize("found", [1.5, 2.0, -1, None, "3", True])
def test_a_length_is_a_whole_number(found):
    """A length of 2.7 was cut to 2, and its batch passed the budget."""
    with pytest.raises(DataError, match=r"sample 1 of the stream has length .*; wanted a whole number"):
        list(BinnedBatchIterator([3, found], BOUNDS, 80, length=lambda sample: sample))


def test_any_kind_of_whole_number_is_a_length():
    for kind in (np.array(VARIED, dtype=np.uint8), torch.tensor(VARIED, dtype=torch.int32)):
        batches = list(BinnedBatchIterator(kind, BOUNDS, 80, length=lambda sample: sample))
        assert [batch.positions for batch in batches] == [batch.positions for batch in stream(VARIED)]


def test_a_budget_without_end_leaves_the_number_of_samples():
    assert [len(batch) for batch in stream(VARIED, budget=float("inf"), max_samples=50, bounds=[20])] == [50] * 8


def test_closing_closes_the_source():
    source = Counting(VARIED)
    stream(source).close()
    assert source.closed
    stream(VARIED).close()


def test_states_of_other_options_versions_and_sources_are_refused():
    running = stream(VARIED)
    next(running)
    state = running.getstate()
    for other in ({"budget": 79}, {"bounds": [5, 20]}, {"buffer_samples": 9}, {"pad_to": "longest"}):
        with pytest.raises(DataError, match="bounds, budget or another option differ"):
            stream(VARIED, **other).setstate(state)
    with pytest.raises(DataError, match="a state of version 7"):
        running.setstate(state | {"version": 7})
    for wrong in ({"epoch": 1}, {}, [1], {"version": 1, "fingerprint": state["fingerprint"]}):
        with pytest.raises(DataError, match=r"a state with .*; wanted dropped, fingerprint, mark, read, source"):
            running.setstate(wrong)
    shorter = stream(VARIED[:3])
    with pytest.raises(DataError, match="the source ended after 3 samples, but the state was taken after"):
        shorter.setstate(state)
    with pytest.raises(DataError, match="has length 21, above the last bound 20, but was within it when the state"):
        stream([21] * 400).setstate(state)
    # It went on with what it had read by then: an empty epoch, or one without its first samples.
    with pytest.raises(DataError, match="the source ended after 3 samples"):
        next(shorter)
    shorter.setstate(None)
    assert sorted(chain.from_iterable(batch.positions for batch in shorter)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget is 0; wanted a number above 0"),
        ({"budget": -80}, "budget is -80"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"budget": "80"}, "budget is '80'"),
        ({"cost": lambda n, longest: float("nan")}, r"cost\(1, 20\) gave nan; wanted a number of at least 0"),
        ({"budget": 19}, "one sample of the last bound, 20, is over the budget of 19"),
        ({"buffer_samples": 0}, "buffer_samples is 0"),
        ({"max_wait": 0}, "max_wait is 0"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"pad_to": "top"}, "pad_to is 'top'; wanted one of bound, longest"),
        ({"oversize": "hide"}, "oversize is 'hide'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        stream(VARIED, **options)


@pytest.mark.parametrize("bounds", [[], [5, 5, 20], [9, 3], [0, 3]])
def test_bad_bounds(bounds):
    with pytest.raises(DataError, match="wanted"):
        stream(VARIED, bounds=bounds)


@pytest.mark.data
def test_wikitext_2_is_padded_by_three_percent_at_most(real_data):
    with gzip.open(real_data / "wikitext-2" / "train.txt.gz", "rt", encoding="utf-8") as lines:
        lengths = [min(len(line.split()), 512) for line in lines if len(line.strip()) > 2]
    for sample in (lengths, lengths[:5000]):
        batches = list(stream(lengths, bounds=length_bounds(sample, 64), budget=16_384, oversize="single"))
        padded = sum(len(batch) * batch.padded_length for batch in batches)
        assert 1 - sum(lengths) / padded <= 0.03
