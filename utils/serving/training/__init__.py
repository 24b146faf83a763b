"""How the models that come with the course were made: corpus, vocabulary, training, model card.

::

    apt-get download r-cran-janeaustenr r-cran-tokenizers bible-kjv bible-kjv-text      # Debian; about 5 MB
    python -m utils.serving.training.corpus --packages . --out corpus.txt
    python -m utils.serving.training.vocabulary --corpus corpus.txt --size 4096 --out tokenizer
    python -m utils.serving.training --size target --corpus corpus.txt --tokenizer tokenizer --out target --minutes 5
    python -m utils.serving.training --size draft --corpus corpus.txt --tokenizer tokenizer --out draft --minutes 2 \
        --teacher target

Nothing after the first line needs a network. The corpus itself comes with the course, compressed:
:data:`utils.serving.training.books.BOOKS`.
"""
