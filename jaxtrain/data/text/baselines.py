"""Results of simple models, which a trained one must beat."""

from jaxtrain.data.sources import Source, subsample

_BASELINE_TEXTS = 100_000  # enough for naive Bayes; bounds its memory


def bag_of_words_accuracy(train: Source, validation: Source) -> float:
    """Return the accuracy of multinomial naive Bayes over counts of words and punctuation; needs scikit-learn.

    Args:
      train: Rows `{"text": text, "label": label}`; no more than 100,000 of them are used.
      validation: Rows of the same kind.

    Returns:
      The share of the validation rows that are classified correctly.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    def columns(source: Source) -> tuple[list[str], list[str]]:
        rows = [source[i] for i in range(len(source))]
        return [str(row["text"]) for row in rows], [str(row["label"]) for row in rows]

    words = CountVectorizer(token_pattern=r"\w+|[^\w\s]")
    texts, labels = columns(subsample(train, _BASELINE_TEXTS))
    bayes = MultinomialNB().fit(words.fit_transform(texts), labels)
    texts, labels = columns(validation)
    return float(bayes.score(words.transform(texts), labels))
