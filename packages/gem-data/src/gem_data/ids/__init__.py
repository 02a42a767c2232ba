"""From ids as they are in files to rows of embedding tables: by stable hash, by vocabulary, or as they are. Row 0 is for unknown and missing ids."""

from gem_data.ids.encoders import Encoder, HashEncoder, PassEncoder, VocabularyEncoder, encoders
from gem_data.ids.hashing import hash_keys
from gem_data.ids.vocabulary import Vocabulary, VocabularyBuilder

__all__ = [
    "Encoder",
    "HashEncoder",
    "PassEncoder",
    "Vocabulary",
    "VocabularyBuilder",
    "VocabularyEncoder",
    "encoders",
    "hash_keys",
]
