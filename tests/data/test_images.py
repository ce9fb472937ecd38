"""Published image archives become pixels and labels; what is broken is named by its path."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import tarfile
import threading
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.names import VISION
from pipeal.data import Source, canonical_image_name, load_images
from pipeal.data.images import datasets as image_datasets
from pipeal.data.images.decode import MAX_PIXELS, BrokenImageError, decode, square
from pipeal.data.images.files import class_folders
from pipeal.data.images.published import PublishedImages, zip_or_folder


def encoded(width=32, height=32, mode="RGB", kind="PNG", seed=0, **options) -> bytes:
    random = np.random.default_rng(seed)
    image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def zipped(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def cifar_images(**changes):
    files = {
        f"cifar-10-images/{split}/{label}/{i:04}.png": encoded(seed=100 * i + len(label) + len(split))
        for split, count in (("train", 3), ("test", 2))
        for label in ("cat", "bird")
        for i in range(count)
    }
    return files | {f"cifar-10-images/{name}": content for name, content in changes.items()}


def tiny_images(
    annotations="val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n", words="n01\tcrane\nn02\tcat, felis\n"
):
    top = "tiny-imagenet-200/"
    files = {f"{top}train/n0{c}/images/n0{c}_{i}.JPEG": encoded(64, 64, kind="JPEG") for c in (1, 2) for i in (0, 1)}
    files |= {f"{top}train/n01/n01_boxes.txt": b"", f"{top}wnids.txt": b"n02\nn01\n"}
    files |= {f"{top}val/images/val_{i}.JPEG": encoded(64, 64, "L", "JPEG", seed=i) for i in (0, 1)}
    files |= {f"{top}val/val_annotations.txt": annotations.encode()} if annotations is not None else {}
    return files | ({f"{top}words.txt": words.encode()} if words else {})


def load(name, root, **options):
    return load_images(name, root, **{"download": False, "cache": False, "threads": 2} | options)


@pytest.fixture
def cifar(tmp_path):
    return zipped(tmp_path / "data" / "cifar-10-images" / "cifar-10-images.zip", cifar_images()).parents[1]


def broken(root, **changes):
    zipped(root / "cifar-10-images.zip", cifar_images(**changes))
    return root


def test_spellings():
    assert {canonical_image_name(name) for name in ("tinyImageNet", "tiny-imagenet-200")} == {"tinyimagenet"}
    assert [canonical_image_name(name) for name in ("CIFAR10", "cifar-100", "demo")] == [
        "cifar10",
        "cifar100",
        "toyimages",
    ]
    with pytest.raises(DataError, match="unknown data set 'cifar11'; did you mean 'cifar10'"):
        load_images("cifar11")


@pytest.mark.parametrize("place", ["tiny-imagenet-200/tiny-imagenet-200.zip", "tiny-imagenet-200.zip", None])
def test_tiny_imagenet_from_zip_or_folder(tmp_path, place):
    if place:
        zipped(tmp_path / place, tiny_images())
    else:
        zipfile.ZipFile(zipped(tmp_path / "a.zip", tiny_images())).extractall(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    data = load("tinyImageNet", tmp_path)
    assert data.classes == ("crane", "cat")
    assert data.train.pixels.shape == (4, 32, 32, 3)
    assert data.train.labels.tolist() == [0, 0, 1, 1]
    assert data.test.labels.tolist() == [1, 0]
    for i in (0, 1):
        picture = Image.open(io.BytesIO(encoded(64, 64, "L", "JPEG", seed=i))).convert("RGB")
        assert np.array_equal(data.test.pixels[i], v2.functional.resize(picture, [32]))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (None, "no val/val_annotations.txt, which tells the classes"),
        ("val_0.JPEG\tn01\nval_1.JPEG\tn01\nval_0.JPEG\tn02\n", "line 3: 'val_0.JPEG' has two classes"),
        ("val_0.JPEG\tn02\nval_1.JPEG\tn09\n", r"line 2: class 'n09' of 'val_1.JPEG' has no images"),
        ("val_0.JPEG n02\n", "line 1: class ''"),
        ("val_0.JPEG\tn02\n", "says nothing of val/images/val_1.JPEG"),
        ("val_0.JPEG\tn02\nval_1.JPEG\tn01\nval_2.JPEG\tn01\n", r"broken image val/images/val_2.JPEG \(no such file"),
    ],
)
def test_annotations_that_do_not_fit(tmp_path, annotations, message):
    zipped(tmp_path / "tiny-imagenet-200.zip", tiny_images(annotations))
    with pytest.raises(DataError, match=message) as caught:
        load("tinyimagenet", tmp_path)
    assert "\n" not in str(caught.value)


def test_class_names_that_repeat_and_those_that_are_missing(tmp_path):
    path = zipped(tmp_path / "tiny-imagenet-200.zip", tiny_images(words="n01\tcrane\nn02\tcrane\n"))
    assert load("tinyimagenet", tmp_path).classes == ("crane (n01)", "crane (n02)")
    zipped(path, tiny_images(words=None))
    assert load("tinyimagenet", tmp_path).classes == ("n01", "n02")


def test_missing_files_say_what_to_fetch_and_where_to_put_it(tmp_path):
    with pytest.raises(DataError, match=r"tinyimagenet: neither tiny-imagenet-200/tiny.*fetch http.*put it there"):
        load("tinyimagenet", tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cifar-10-images/train/a/1.png": b""}, "no images under test/<class>/"),
        ({"cifar-10-images/train/a/1.png": b"", "cifar-10-images/test/b/1.png": b""}, "test/b has no images under"),
    ],
)
def test_class_folders_that_do_not_fit(tmp_path, files, message):
    zipped(tmp_path / "cifar-10-images.zip", files)
    with pytest.raises(DataError, match=message):
        load("cifar10", tmp_path)


def test_class_folders_may_be_links_and_hidden_ones_are_none(tmp_path):
    """A linked class was not there; a notebook's copies of images were one."""
    shadows = {f"{split}/.ipynb_checkpoints/0-checkpoint.png": encoded() for split in ("train", "test")}
    zipfile.ZipFile(zipped(tmp_path / "a.zip", cifar_images(**shadows))).extractall(tmp_path)
    top = tmp_path / "cifar-10-images"
    (top / "train" / "cat").rename(tmp_path / "cat")
    (top / "train" / "cat").symlink_to(tmp_path / "cat")
    (top / "test" / "bird").rename(top / "train" / "bird" / "held out")
    (top / "test" / "bird").symlink_to(top / "train" / "bird" / "held out")
    # Circles end: to what is around, directly and by way of another folder.
    (top / "train" / "cat" / "up").symlink_to(top)
    (top / "train" / "bird" / "cats").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "birds").symlink_to(top / "train" / "bird")
    data = load("cifar10", tmp_path)
    assert data.classes == ("bird", "cat")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 0, 1, 1]


def test_a_link_to_nothing_is_a_broken_image(tmp_path):
    """It ended the run with an error about the folder, which is there; it could not be skipped, nor when no image."""
    zipfile.ZipFile(zipped(tmp_path / "a.zip", cifar_images())).extractall(tmp_path)
    top = tmp_path / "cifar-10-images"
    (top / "README").symlink_to(tmp_path / "nowhere")
    (top / "loop").symlink_to(top / "loop")
    assert len(load("cifar10", tmp_path).train) == 6
    (top / "train" / "cat" / "9.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match=r"broken image train/cat/9\.png \(No such file or directory\)"):
        load("cifar10", tmp_path)
    assert load("cifar10", tmp_path, on_broken="skip").train.skipped == ("train/cat/9.png",)
    (tmp_path / "nowhere.png").write_bytes(encoded())
    assert len(load("cifar10", tmp_path).train) == 7


@pytest.mark.parametrize("hidden", ["train/.ipynb_checkpoints/0.png", "train/cat/.0.png"])
def test_hidden_files_and_folders_of_an_archive_are_none(tmp_path, hidden):
    assert load("cifar10", broken(tmp_path, **{hidden: encoded()})).train.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_broken_archive_is_one_line(tmp_path):
    path = zipped(tmp_path / "cifar-10-images.zip", cifar_images())
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"cifar-10-images\.zip: broken archive \(.*\); delete it") as caught:
        load("cifar10", tmp_path)
    assert "\n" not in str(caught.value)


def bomb(side: int) -> bytes:
    out = io.BytesIO()
    Image.new("1", (side, side)).save(out, "PNG")
    return out.getvalue()


BROKEN = {
    "truncated JPEG": (encoded(kind="JPEG")[:-300], "truncated"),
    "truncated PNG": (encoded()[:-1500], ""),
    "damaged PNG": (encoded()[:60] + b"zz" + encoded()[62:], ""),
    "empty": (b"", "the file is empty"),
    "no image": (b"<html>not found</html>", "neither JPEG nor PNG"),
    "bomb": (bomb(8200), "8200 × 8200 pixels, more than"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_images_are_named_or_left_out(tmp_path, what):
    content, reason = BROKEN[what]
    root = broken(tmp_path, **{"train/bird/0001.jpg": content})
    with pytest.raises(
        DataError, match=rf"broken image train/bird/0001\.jpg \(.*{reason}.*\); .*on_broken: skip"
    ) as caught:
        load("cifar10", root)
    assert "\n" not in str(caught.value)
    data = load("cifar10", root, on_broken="skip")
    assert data.train.skipped == ("train/bird/0001.jpg",)
    assert (len(data.train), data.train.labels.tolist(), data.test.skipped) == (6, [0, 0, 0, 1, 1, 1], ())


def test_a_long_thin_image_may_not_unfold_without_bound():
    out = io.BytesIO()
    Image.new("L", (60_000, 1)).save(out, "PNG")
    with pytest.raises(BrokenImageError, match="more than"):
        decode(out.getvalue(), 64)
    assert MAX_PIXELS < 60_000 * 64 * 64


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("mode", "kind"),
    [("CMYK", "JPEG"), ("L", "JPEG"), ("L", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG")],
)
def test_every_kind_of_image_becomes_rgb(mode, kind):
    options = {"transparency": bytes(range(256))} if mode == "P" else {}
    content = encoded(mode=mode, kind=kind, **options)
    image = Image.open(io.BytesIO(content))
    assert image.mode == mode
    wanted = image.convert("RGBA").convert("RGB") if mode == "P" else image.convert("RGB")
    assert np.array_equal(decode(content, 32), wanted)


def test_16_bit_grey_keeps_its_high_byte():
    values = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    assert np.array_equal(decode(out.getvalue(), 32), np.repeat((values >> 8)[..., None], 3, 2))


@pytest.mark.parametrize(("width", "height"), [(64, 64), (64, 48), (31, 80), (33, 32), (32, 35), (10, 10), (32, 32)])
def test_size_is_torchvisions(width, height):
    image = Image.open(io.BytesIO(encoded(width, height)))
    wanted = v2.Compose([v2.Resize(32), v2.CenterCrop(32)])(image)
    assert np.array_equal(square(image, 32), wanted)


def test_the_cache_gives_the_same_and_decodes_once(cifar, tmp_path):
    seen = []
    options = {"cache": tmp_path / "cache", "decoding": lambda *step: seen.append(step)}
    fresh, first = load("cifar10", cifar), load("cifar10", cifar, **options)
    assert seen == [("cifar10 train", 6, 6), ("cifar10 test", 4, 4)]
    again = load("cifar10", cifar, **options)
    assert len(seen) == 2
    for data in (first, again):
        assert data.classes == fresh.classes == ("bird", "cat")
        for split in ("train", "test"):
            mine, wanted = getattr(data, split), getattr(fresh, split)
            assert isinstance(mine.pixels, np.memmap)
            assert np.array_equal(mine.pixels, wanted.pixels)
            assert np.array_equal(mine.labels, wanted.labels)


def test_a_changed_source_or_a_cut_cache_is_decoded_anew(cifar, tmp_path):
    cache = tmp_path / "cache"
    load("cifar10", cifar, cache=cache)
    names = {path.name for path in cache.iterdir()}
    assert len(names) == 5
    for name in sorted(names):
        content = (cache / name).read_bytes()
        (cache / name).write_bytes(content[:-1])
        assert np.array_equal(load("cifar10", cifar, cache=cache).train.pixels, load("cifar10", cifar).train.pixels)
        assert (cache / name).read_bytes() == content
    zipped(cifar / "cifar-10-images" / "cifar-10-images.zip", cifar_images(**{"train/cat/9.png": encoded()}))
    assert len(load("cifar10", cifar, cache=cache).train) == 7
    assert not names & {path.name for path in cache.iterdir()}
    # Another size lies beside it.
    assert load("cifar10", cifar, cache=cache, size=16).train.size == 16
    assert len(list(cache.iterdir())) == 10


def test_the_verdict_on_broken_images_does_not_depend_on_who_made_the_cache(tmp_path):
    root, cache = broken(tmp_path, **{"test/cat/0001.png": b"oh"}), tmp_path / "cache"
    with pytest.raises(DataError, match=r"broken image test/cat/0001\.png"):
        load("cifar10", root, cache=cache)
    assert not [path for path in cache.iterdir() if path.suffix == ".json"]
    for _ in range(2):
        assert load("cifar10", root, cache=cache, on_broken="skip").test.skipped == ("test/cat/0001.png",)
    with pytest.raises(DataError, match=r"broken image test/cat/0001\.png \(neither"):
        load("cifar10", root, cache=cache)


def test_a_cache_that_cannot_be_written_names_the_folder_and_the_setting(cifar, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file.*data\.cache_dir"):
        load("cifar10", cifar, cache=tmp_path / "file" / "below")


def everything(folder):
    """All names below a folder, with what is in them and when they changed."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


def test_the_data_folder_stays_as_it_is(cifar, tmp_path, monkeypatch):
    """Decoded images were written beside data that may be shared; only where it was read-only, elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    before = everything(cifar)
    for _ in range(2):
        load("cifar10", cifar, cache=True)
    assert everything(cifar) == before
    assert len(list((tmp_path / "xdg" / "pipeal" / "images").iterdir())) == 5


@pytest.mark.parametrize("why", ["no home", "no folder", "no room"])
def test_without_a_place_to_keep_them_images_are_in_memory(why, cifar, tmp_path, monkeypatch, said):
    wanted = load("cifar10", cifar, cache=False)
    if why == "no home":
        for name in ("XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("nobody")))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("file" if why == "no folder" else "xdg")))
    if why == "no room":

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("pipeal.core.atomic.os.fsync", full)
    found = load("cifar10", cifar, cache=True)
    assert np.array_equal(found.train.pixels, wanted.train.pixels)
    assert len(said) == 1
    assert said[0].startswith("cifar-10-images.zip: its images are made each time: ")
    assert "\n" not in said[0]
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".aside"]


def test_two_at_once_share_a_cache(cifar, tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(load("cifar10", cifar, cache=tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(list((tmp_path / "cache").iterdir())) == 5
    assert all(np.array_equal(data.train.pixels, found[0].train.pixels) for data in found)


def test_a_split_travels_as_a_path_and_a_subset_copies_nothing(cifar, tmp_path):
    split = load("cifar10", cifar, cache=tmp_path / "cache").train
    part = split.subset([5, 1, 3]).subset([0, 2])
    travelled = pickle.loads(pickle.dumps(part))
    assert len(pickle.dumps(part)) < 2_000
    assert part.pixels is split.pixels
    for found in (part, travelled):
        assert found.labels.tolist() == split.labels[[5, 3]].tolist()
        assert np.array_equal(found.images([0, 1]), split.pixels[[5, 3]])
    with pytest.raises(DataError, match=r"samples 2\.\.6 of a split of 6"):
        split.subset([2, 6])


@pytest.fixture
def published(monkeypatch):
    """A small archive in CIFAR-10's published form, whose checksums torchvision takes for the real ones."""
    random = np.random.default_rng(0)

    def rows(count):
        return {"data": random.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": [i % 3 for i in range(count)]}

    parts = {
        "data_batch_1": rows(5),
        "data_batch_2": rows(2),
        "test_batch": rows(3),
        "batches.meta": {"label_names": list("abc")},
    }
    files = {name: pickle.dumps(part) for name, part in parts.items()}
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(
        datasets.CIFAR10, "train_list", [[name, md5[name]] for name in ("data_batch_1", "data_batch_2")]
    )
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": md5["batches.meta"]}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in {"../escaped": b"", **{f"cifar-10-batches-py/{n}": c for n, c in files.items()}}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue(), np.vstack([parts["data_batch_1"]["data"], parts["data_batch_2"]["data"]])


def test_published_cifar_is_downloaded_checked_and_read(served, published, tmp_path):
    archive, rows = published
    served.files["cifar-10-python.tar.gz"] = archive
    url, file = served.address + "cifar-10-python.tar.gz", ("cifar-10-python.tar.gz",)
    with pytest.raises(DataError, match=r"wanted md5 000.*put cifar-10-python.tar.gz into"):
        load_images("cifar10", tmp_path, sources={"cifar10": [Source(url, "0" * 32, file)]})
    sources = {"cifar10": [Source(url, hashlib.md5(archive).hexdigest(), file)]}
    for _ in range(2):
        data = load_images("cifar10", tmp_path, sources=sources, cache=tmp_path / "cache")
        assert data.classes == ("a", "b", "c")
        assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 0, 1]
        assert np.array_equal(data.train.pixels, rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        assert data.test.labels.tolist() == [0, 1, 2]
        assert not np.array_equal(data.test.pixels, data.train.pixels[:3]), "it is tested on images of its own"
    assert len(served.asked) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cifar-10-python.tar.gz"]
    assert not (tmp_path.parent / "escaped").exists()
    with pytest.raises(DataError, match=r"md5 .* wanted 000"):
        load("cifar10", tmp_path, sources={"cifar10": [Source(url, "0" * 32, file)]})


def test_an_unpacked_cifar_with_another_checksum_is_refused_unread(published, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(published[0])) as archive:
        for member in archive.getmembers()[1:]:
            archive.extract(member, tmp_path, filter="data")
    assert len(load("cifar10", tmp_path).test) == 3
    bad = tmp_path / "cifar-10-batches-py" / "test_batch"
    bad.write_bytes(pickle.dumps({"data": np.zeros((3, 3072), np.uint8), "labels": [0, 0, 0]}))
    with pytest.raises(DataError, match="cifar-10-batches-py: test_batch missing or not as published"):
        load("cifar10", tmp_path)


def test_a_new_data_set_is_one_value_and_one_line(served, tmp_path, monkeypatch):
    """Its name, addresses, files and statistics stood in three files."""
    files = {name.replace("cifar-10-images", "birds"): content for name, content in cifar_images().items()}
    served.files["birds.zip"] = zipped(tmp_path / "aside" / "a.zip", files).read_bytes()
    new = PublishedImages(
        name="birds",
        mean=(0.1, 0.2, 0.3),
        std=(1.0, 1.0, 1.0),
        sources=(Source(served.address + "birds.zip", None, ("birds.zip",)),),
        forms=zip_or_folder("birds", class_folders),
    )
    monkeypatch.setattr(image_datasets, "BIRDS", new, raising=False)
    monkeypatch.setitem(VISION.datasets, "birds", f"{image_datasets.__name__}:BIRDS")
    monkeypatch.setitem(VISION.spellings, "sparrows", "birds")
    with pytest.raises(DataError, match=r"birds: neither birds/birds.zip nor .* in .*; fetch http.*put it there"):
        load("birds", tmp_path)
    data = load("Sparrows", tmp_path, download=True)
    assert (data.name, data.classes, data.mean, len(data.train)) == ("birds", ("bird", "cat"), (0.1, 0.2, 0.3), 6)
    assert (tmp_path / "birds.zip").is_file()


def test_what_no_address_gives_is_told(tmp_path):
    with pytest.raises(DataError, match=r"cifar10: neither .*; put it there, or name another data root"):
        load("cifar10", tmp_path, download=True, sources={})


def test_a_tiny_imagenet_archive_is_downloaded_and_kept_as_it_is(served, tmp_path):
    content = zipped(tmp_path / "aside" / "a.zip", tiny_images()).read_bytes()
    served.files["tiny-imagenet-200.zip"] = content
    source = Source(
        served.address + "tiny-imagenet-200.zip", hashlib.md5(content).hexdigest(), ("tiny-imagenet-200.zip",)
    )
    seen = set()
    data = load_images(
        "tinyimagenet",
        tmp_path,
        sources={"tinyimagenet": [source]},
        cache=False,
        progress=lambda *step: seen.add(step[0]),
    )
    assert (len(data.train), seen) == (4, {"tiny-imagenet-200.zip"})
    assert [path.name for path in (tmp_path / "tiny-imagenet-200").iterdir()] == ["tiny-imagenet-200.zip"]


@pytest.mark.parametrize("options", [{"size": 0}, {"size": True}, {"on_broken": "ignore"}])
def test_values_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        load_images("demo", **options)


def test_toyimages_are_seeded_and_no_class_is_told_by_its_colour_alone():
    first, again, other = (load_images("demo", seed=seed, size=16) for seed in (1, 1, 2))
    assert np.array_equal(first.train.pixels, again.train.pixels)
    assert not np.array_equal(first.train.pixels, other.train.pixels)
    assert (len(first.train), len(first.test), len(first.classes)) == (2000, 500, 8)
    # Mean colours, nearest class mean: better than chance, far from right.
    colours, tests = (split.pixels.mean((1, 2)) for split in (first.train, first.test))
    means = np.stack([colours[first.train.labels == kind].mean(0) for kind in range(8)])
    found = np.argmin(((tests[:, None] - means) ** 2).sum(-1), 1)
    assert 0.15 < (found == first.test.labels).mean() < 0.8


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(("name", "classes"), [("tinyimagenet", 200), ("cifar10", 10)])
def test_real_archives(real_data, tmp_path, name, classes):
    data = load_images(name, real_data, download=False, cache=tmp_path)
    assert (len(data.train), len(data.test), len(data.classes)) == (10_000, 2_000, classes)
    for split in (data.train, data.test):
        assert set(np.bincount(split.labels, minlength=classes)) == {len(split) // classes}
        assert split.skipped == ()
    if name == "tinyimagenet":
        pixels = np.concatenate([data.train.pixels, data.test.pixels])
        grey = (pixels[..., 0] == pixels[..., 1]).all((1, 2)) & (pixels[..., 1] == pixels[..., 2]).all((1, 2))
        assert grey.sum() >= 179
    mean = torch.from_numpy(data.train.pixels[::5].copy()).float().mean((0, 1, 2)) / 255
    assert torch.allclose(mean, torch.tensor(data.mean), atol=0.02)


def test_the_facts_of_a_cache_are_readable(cifar, tmp_path):
    load("cifar10", cifar, cache=tmp_path)
    (facts,) = tmp_path.glob("*.json")
    assert json.loads(facts.read_text())["train"] == {"count": 6, "broken": []}
    assert os.fspath(facts.name).startswith("cifar-10-images.zip.32px.")
