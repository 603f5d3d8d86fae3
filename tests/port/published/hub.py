"""Folders in place of what scripts load from Hugging Face's hub: a small BERT and GPT-2, and sentences with labels."""

import json
import random
from pathlib import Path

WORDS = ["the", "cat", "dog", "bird", "old", "tree", "sat", "ran", "saw", "ate", "fish", "on", "under", "near"]
README = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.jsonl}
  - {split: validation, path: validation.jsonl}
---
"""


def write_hub(folder: Path) -> None:
    """Write `bert-base-cased`, `gpt2` and `nyu-mll/glue`, which libraries find in the folder in which a script runs."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, GPT2Config

    bert, gpt2 = folder / "bert-base-cased", folder / "gpt2"
    glue, draw = folder / "nyu-mll" / "glue", random.Random(0)
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(bert / "vocab.txt")).save_pretrained(bert)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(bert)
    GPT2Config(vocab_size=5 + len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=32).save_pretrained(gpt2)
    glue.mkdir(parents=True)
    (glue / "README.md").write_text(README)
    for split, count in (("train", 96), ("validation", 16)):
        rows = [
            {
                "sentence1": " ".join(draw.choices(WORDS, k=draw.randint(3, 8))),
                "sentence2": " ".join(draw.choices(WORDS, k=draw.randint(3, 8))),
                "label": draw.randint(0, 1),
                "idx": i,
            }
            for i in range(count)
        ]
        (glue / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{split}.json").write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{split}.txt").write_text("\n".join(row["sentence1"] for row in rows))
