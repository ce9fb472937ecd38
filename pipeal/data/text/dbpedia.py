"""DBpedia: titles and abstracts of fourteen kinds of things, 560,000 to train on and 70,000 to test on."""

from functools import partial

from pipeal.data.loading.sources import Source, unpack_members
from pipeal.data.text.published import PublishedTexts
from pipeal.data.text.rows import read_splits

_CLASSES = (
    *("Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder", "MeanOfTransportation"),
    *("Building", "NaturalPlace", "Village", "Animal", "Plant", "Album", "Film", "WrittenWork"),
)

DBPEDIA = PublishedTexts(
    name="dbpedia",
    folder="dbpedia_csv",
    files=("train.csv", "test.csv"),
    sources=(
        # Address and checksum as fastText's tests/fetch_test_data.sh lists them.
        Source(
            "https://github.com/le-scientifique/torchDatasets/raw/master/dbpedia_csv.tar.gz",
            "8139d58cf075c7f70d085358e73af9b3",
            ("train.csv", "test.csv"),
            unpack_members,
        ),
    ),
    read=partial(read_splits, classes=_CLASSES),
)
