"""Corpora that are tokenized once, into shards on disk that every process of a run maps."""

from jaxtrain.data.corpus.corpus_manifest import Manifest, ShardEntry
from jaxtrain.data.corpus.corpus_manifest import is_corpus as is_corpus
from jaxtrain.data.corpus.mixed import corpus_mixtures as corpus_mixtures
from jaxtrain.data.corpus.mixed import named_corpora as named_corpora
from jaxtrain.data.corpus.token_corpus import TokenCorpus
from jaxtrain.data.corpus.tokenization import SHARD_TOKENS as SHARD_TOKENS
from jaxtrain.data.corpus.tokenization import TOKENIZER as TOKENIZER
from jaxtrain.data.corpus.tokenization import tokenize_corpus
from jaxtrain.data.rows.windows import CorpusRows

__all__ = ["CorpusRows", "Manifest", "ShardEntry", "TokenCorpus", "tokenize_corpus"]
