"""AG News: titles and descriptions of four topics, 120,000 to train on and 7,600 to test on."""

from functools import partial

from pipeal.data.loading.sources import Source
from pipeal.data.text.published import PublishedTexts
from pipeal.data.text.rows import read_splits

_ADDRESS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"

AGNEWS = PublishedTexts(
    name="agnews",
    folder="ag_news_csv",
    files=("train.csv", "test.csv"),
    # Checksums as torchtext lists them.
    sources=(
        Source(_ADDRESS + "train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
        Source(_ADDRESS + "test.csv", "d52ea96a97a2d943681189a97654912d"),
    ),
    read=partial(read_splits, classes=("World", "Sports", "Business", "Sci/Tech")),
)
