"""Text data sets, vocabularies, word vectors, characters."""
