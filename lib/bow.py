"""The bag-of-words baseline of fine-tuning, which ignores word order."""


def bag_of_words(rows):
    """Fit TF-IDF with logistic regression on rows of (texts, class) -> scikit-learn's model;
    .predict(rows) gives classes.

    The features are the words. For a pair of texts, further features are whether the first text
    contains each word of the second, and the share of such words in tenths. Raises ValueError
    without scikit-learn.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
    except ImportError:
        raise ValueError(
            "--ckpt bow needs scikit-learn: pip install -r requirements-dev.txt"
        ) from None
    words = TfidfVectorizer().build_analyzer()

    def features(row):
        first, *second = map(words, row[0])
        found = [f"a {w}" for w in first]
        for text in second:
            found += [f"b {w}" for w in text] + [f"b, in a: {w in first} {w}" for w in text]
            share = sum(w in first for w in text) / max(1, len(text))
            found += [f"share {tenth}" for tenth in range(int(10 * share))]
        return found

    model = make_pipeline(
        TfidfVectorizer(analyzer=features, sublinear_tf=True),
        LogisticRegression(C=10 if len(rows[0][0]) == 1 else 1, max_iter=1000),
    )
    return model.fit(rows, [label for _, label in rows])
