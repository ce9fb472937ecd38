"""Published files become texts and labels; every malformed row is named by file and line."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from functools import partial

import pytest

from pipeal.core.errors import DataError
from pipeal.core.names import TEXT
from pipeal.data import Source, canonical_text_name, load_text, published_max_len, unpack_imdb, unpack_members
from pipeal.data.text import datasets
from pipeal.data.text.published import PublishedTexts
from pipeal.data.text.rows import read_splits

GOOD = '"1","Title","Text"\n"4","","Only ""text"" here"\n'


def agnews(root, train=GOOD, test=GOOD, folder="ag_news_csv"):
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, content in (("train.csv", train), ("test.csv", test)):
        (root / folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def imdb(root, content):
    (root / "imdb").mkdir(exist_ok=True)
    (root / "imdb" / "IMDB_Dataset.csv").write_text(content, encoding="utf-8")
    return root


def tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *((spelling, "agnews") for spelling in ("ag_news", "AGNews", "AG_NEWS", "agnews", "AG news")),
        *((spelling, "dbpedia") for spelling in ("dbpedia_14", "Dbpedia", "DBpedia", "dbpedia")),
        *((spelling, "imdb") for spelling in ("IMDb", "imdb", "IMDB")),
        *((spelling, "toynews") for spelling in ("demo", "toynews", "embedded")),
    ],
)
def test_published_spellings(spelling, name):
    assert canonical_text_name(spelling) == name


def test_unknown_name_gets_the_nearest():
    with pytest.raises(DataError, match="unknown data set 'agnew'; did you mean 'agnews'"):
        load_text("agnew")


def test_a_new_data_set_is_one_value_and_one_line(served, tmp_path, monkeypatch):
    """Its name, addresses, files, class names and length stood in three files."""
    served.files |= {"train.csv": GOOD.encode(), "test.csv": GOOD.encode()}
    new = PublishedTexts(
        name="weather",
        folder="weather_csv",
        files=("train.csv", "test.csv"),
        sources=tuple(Source(served.address + name, None, (name,)) for name in ("train.csv", "test.csv")),
        read=partial(read_splits, classes=("wet", "dry", "hot", "cold")),
        max_len=7,
    )
    monkeypatch.setattr(datasets, "WEATHER", new, raising=False)
    monkeypatch.setitem(TEXT.datasets, "weather", f"{datasets.__name__}:WEATHER")
    monkeypatch.setitem(TEXT.spellings, "rain", "weather")
    with pytest.raises(DataError, match=r"weather: no train.csv or test.csv .*weather_csv; fetch http.*put it there"):
        load_text("weather", tmp_path, download=False)
    data = load_text("Ra-in", tmp_path)
    assert (data.name, data.classes, data.test.labels) == ("weather", ("wet", "dry", "hot", "cold"), [0, 3])
    assert (tmp_path / "weather_csv" / "test.csv").is_file()
    assert (published_max_len("rain"), published_max_len("IMDb"), published_max_len("AG_NEWS")) == (7, 256, 128)


@pytest.mark.parametrize("folder", ["ag_news_csv", "."])
def test_agnews_in_its_folder_or_in_root(tmp_path, folder):
    data = load_text("AG_NEWS", agnews(tmp_path, folder=folder), download=False)
    assert data.name == "agnews"
    assert data.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert data.train.texts == ["Title Text", 'Only "text" here']
    assert data.train.labels == [0, 3]
    assert len(data.test) == 2


def test_gzip_byte_order_mark_blank_lines_and_texts_over_lines(tmp_path):
    agnews(tmp_path)
    path = tmp_path / "ag_news_csv" / "train.csv"
    path.unlink()
    path.with_name("train.csv.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf"2","a","b\nc"\r\n\r\n3,x,y\r\n\r\n'))
    split = load_text("agnews", tmp_path, download=False).train
    assert (split.texts, split.labels) == (["a b\nc", "x y"], [1, 2])


def test_class_names_are_read_where_present(tmp_path):
    agnews(tmp_path)
    names = tmp_path / "ag_news_csv" / "classes.txt"
    names.write_text("A\nB\nC\nD\n")
    assert load_text("agnews", tmp_path).classes == ("A", "B", "C", "D")
    names.write_text("A\nB\n")
    with pytest.raises(DataError, match=r"classes\.txt: 2 class names, wanted 4"):
        load_text("agnews", tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('"1","a","b"\n"2","a"\n', r"train\.csv, line 2: 2 columns, wanted 3"),
        ('"1","a","b\nc"\n"2","a","b","c"\n', r"line 3: 4 columns, wanted 3"),
        ("Class Index,Title,Description\n", r"line 1: label 'Class Index' is not a whole number.*header"),
        ("1,a,b\n1.5,a,b\n", r"line 2: label '1.5' is not a whole number, wanted 1\.\.4$"),
        ("1,a,b\n0,a,b\n", r"line 2: label 0 out of range, wanted 1\.\.4"),
        ("5,a,b\n", r"line 1: label 5 out of range, wanted 1\.\.4"),
        ('1,a,b\n\n2,""," "\n', r"line 3: title and description are empty"),
        ('1,a,b\n2,"a,b\n3,c,d\n', r"line 2: unexpected end of data; probably a quote"),
        ('1,a,"b"c\n', r"line 1: .* expected after .*; probably a quote"),
        ("1,a," + "b" * (1 + (1 << 24)), r"line 1: a field of more than 16,777,216 characters"),
        (b"1,a,b\n2,caf\xe9,b\n", r"line 2: byte 0xe9 at place 6 is not UTF-8"),
        ("", r"train\.csv: no rows"),
    ],
)
def test_malformed_rows(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load_text("agnews", agnews(tmp_path, train=rows), download=False)


@pytest.mark.parametrize("content", [gzip.compress(GOOD.encode() * 50, mtime=0)[:-20], b"not gzip at all"])
def test_broken_gzip(tmp_path, content):
    path = agnews(tmp_path) / "ag_news_csv" / "train.csv"
    path.unlink()
    path.with_name("train.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.csv\.gz: broken gzip file after line \d+"):
        load_text("agnews", tmp_path, download=False)


def test_imdb_split_is_seeded_and_covers_everything(tmp_path):
    rows = "".join(f'"review {i}<br />",{"positive" if i % 3 else "negative"}\n' for i in range(11))
    imdb(tmp_path, "review,sentiment\n" + rows)
    first, again, other = (load_text("IMDb", tmp_path, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert (len(first.train), len(first.test)) == (8, 3)
    both = dict(zip(first.train.texts + first.test.texts, first.train.labels + first.test.labels, strict=True))
    assert both == {f"review {i}<br />": int(i % 3 == 0) for i in range(11)}
    assert first.classes == ("positive", "negative")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\na,positive\n", r"line 1: header 'text,label', wanted 'review,sentiment'"),
        ("", r"line 1: header '', wanted"),
        ("review,sentiment\na,positive,b\n", r"line 2: 3 columns, wanted 2"),
        ("review,sentiment\na,good\n", r"line 2: sentiment 'good', wanted positive or negative"),
        ("review,sentiment\na,positive\n , positive\n", r"line 3: the review is empty"),
        ("review,sentiment\n", r"no rows under the header"),
        ("review,sentiment\na,positive\n", r"1 review cannot be split"),
    ],
)
def test_malformed_reviews(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        load_text("imdb", imdb(tmp_path, content), download=False)


def test_missing_files_say_what_to_fetch_and_where_to_put_it(tmp_path):
    with pytest.raises(DataError) as caught:
        load_text("agnews", tmp_path, download=False)
    message = str(caught.value)
    assert message.startswith(f"agnews: no train.csv or test.csv (nor .gz) in {tmp_path / 'ag_news_csv'}; fetch http")
    assert "\n" not in message


def test_download_end_to_end(served, tmp_path):
    served.files |= {"x/train.csv": GOOD.encode(), "x/test.csv": b"2,a,b\n"}
    sources = {
        "agnews": [
            Source(f"{served.address}x/{name}", hashlib.md5(served.files[f"x/{name}"]).hexdigest(), (name,))
            for name in ("train.csv", "test.csv")
        ]
    }
    seen = set()
    data = load_text("agnews", tmp_path, sources=sources, progress=lambda *step: seen.add(step[0]))
    assert data.train.labels == [0, 3]
    assert seen == {"train.csv", "test.csv"}
    served.files.clear()
    assert load_text("agnews", tmp_path, sources=sources) == data


def test_only_what_is_missing_is_fetched(served, tmp_path):
    agnews(tmp_path)
    (tmp_path / "ag_news_csv" / "test.csv").unlink()
    served.files["test.csv"] = b"2,a,b\n"
    sources = {"agnews": [Source(served.address + name, None, (name,)) for name in ("train.csv", "test.csv")]}
    assert load_text("agnews", tmp_path, sources=sources).test.labels == [1]
    assert [path for path, _ in served.asked] == ["/test.csv"]


def test_failed_download_says_what_to_do_by_hand(served, tmp_path):
    sources = {"agnews": [Source(served.address + "train.csv", None, ("train.csv",))]}
    with pytest.raises(DataError, match=r"HTTP 404 Not Found; or fetch it elsewhere and put train\.csv into"):
        load_text("agnews", tmp_path, sources=sources)


def test_dbpedia_archive(served, tmp_path):
    members = {"dbpedia_csv/train.csv": b"14,a,b\n", "../dbpedia_csv/test.csv": b"1,c,d\n", "other": b""}
    served.files["d.tar.gz"] = tar(tmp_path / "d.tar.gz", members)
    source = Source(served.address + "d.tar.gz", None, ("train.csv", "test.csv"), unpack_members)
    data = load_text("dbpedia_14", tmp_path / "root", sources={"dbpedia": [source]})
    assert (data.train.labels, data.test.texts, len(data.classes)) == ([13], ["c d"], 14)
    made = {path.name for path in (tmp_path / "root").rglob("*") if path.is_file()}
    assert made == {"train.csv", "test.csv"}


REVIEWS = {
    **{f"aclImdb/train/pos/{i}_9.txt": f'Good, "{i}"\nfilm'.encode() for i in range(4)},
    **{f"aclImdb/test/neg/{i}_2.txt": f"Bad\r{i}".encode() for i in range(4)},
    "aclImdb/train/unsup/0_0.txt": b"Unlabelled",
    "aclImdb/train/urls_pos.txt": b"http",
}


def test_imdb_archive_becomes_the_csv(served, tmp_path):
    """A review with a carriage return made two rows of the file, which could not be read, nor made again."""
    served.files["a.tar.gz"] = tar(tmp_path / "a.tar.gz", REVIEWS)
    source = Source(
        served.address + "a.tar.gz",
        hashlib.md5(served.files["a.tar.gz"]).hexdigest(),
        ("IMDB_Dataset.csv",),
        unpack_imdb,
    )
    data = load_text("imdb", tmp_path, sources={"imdb": [source]})
    both = {
        text: label for split in (data.train, data.test) for text, label in zip(split.texts, split.labels, strict=True)
    }
    assert both == {
        **{f'Good, "{i}"\nfilm': 0 for i in range(4)},
        **{f"Bad\r{i}": 1 for i in range(4)},
    }
    assert [path.name for path in (tmp_path / "imdb").iterdir()] == ["IMDB_Dataset.csv"]


def test_an_archive_put_there_by_hand_needs_no_network_and_stays(tmp_path):
    (tmp_path / "imdb").mkdir()
    content = tar(tmp_path / "imdb" / "a.tar.gz", REVIEWS)
    md5 = hashlib.md5(content).hexdigest()
    # In capital letters an archive that was fetched was taken, and one that was there already refused.
    source = Source("http://127.0.0.1:9/a.tar.gz", md5.upper(), ("IMDB_Dataset.csv",), unpack_imdb)
    data = load_text("imdb", tmp_path, download=False, sources={"imdb": [source]})
    assert len(data.train) + len(data.test) == 8
    assert (tmp_path / "imdb" / "a.tar.gz").is_file()
    (tmp_path / "imdb" / "IMDB_Dataset.csv").unlink()
    other = Source(source.url, "0" * 32, source.files, unpack_imdb)
    with pytest.raises(DataError, match=f"md5 {md5}, wanted 000"):
        load_text("imdb", tmp_path, download=False, sources={"imdb": [other]})


@pytest.mark.parametrize(
    ("members", "message"),
    [(None, "broken archive"), ({"other": b""}, "holds no")],
)
@pytest.mark.parametrize("unpack", [unpack_imdb, unpack_members])
def test_bad_archives_leave_nothing(tmp_path, unpack, members, message):
    path = tmp_path / "a.tar.gz"
    if members is None:
        path.write_bytes(b"no archive")
    else:
        tar(path, members)
    with pytest.raises(DataError, match=message):
        unpack(path, tmp_path, ["IMDB_Dataset.csv"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


@pytest.mark.parametrize("unpack", [unpack_imdb, unpack_members])
def test_a_cut_archive_leaves_nothing(tmp_path, unpack):
    path = tmp_path / "a.tar.gz"
    content = tar(
        path, {"train/pos/1.txt": bytes(range(97, 123)) * 1, "IMDB_Dataset.csv": hashlib.sha512().digest() * 99}
    )
    path.write_bytes(content[:-30])
    with pytest.raises(DataError, match="broken archive"):
        unpack(path, tmp_path, ["IMDB_Dataset.csv"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "classes", "train", "test"),
    [("agnews", 4, 16_568, 7_600), ("dbpedia", 14, 13_998, 7_600), ("imdb", 2, 40_000, 10_000)],
)
def test_real_files(real_data, name, classes, train, test):
    data = load_text(name, real_data, download=False)
    assert (len(data.classes), len(data.train), len(data.test)) == (classes, train, test)
    assert set(data.train.labels) == set(data.test.labels) == set(range(classes))
