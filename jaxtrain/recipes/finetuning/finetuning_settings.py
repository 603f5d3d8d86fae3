"""The settings of fine-tuning."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jaxtrain as jt
from jaxtrain.data.finetuning import ExampleFiles, ModelTokenizer, Parse, parse_example, read_examples, split_examples
from jaxtrain.fields import NotNegative, Positive, Rate, Share, Width
from jaxtrain.recipes.finetuning.answer_scores import check_best_metric


@dataclass(frozen=True, kw_only=True)
class FineTuneSettings(jt.Recipe):
    """Settings of `FineTuneRecipe`."""

    model: Path | None = None
    """Folder of the pretrained model, with its tokenizer; for conversations also its chat template."""
    data: Path | None = None
    """Examples: a file, a folder of files, or a dataset saved by `datasets`."""
    validation: Path | None = None
    """Held-out examples; None takes those that the data name as such, or a share of them."""
    validation_fraction: Share = 0.1
    """Share of the examples that is held out, if nothing else is."""
    chat_template: Path | None = None
    """Chat template of conversations, a file such as chat_template.jinja; None for that of the model."""
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    """Date for chat templates that write today's, as YYYY-MM-DD; it is that of the start after every resumption."""
    method: Literal["lora", "dora", "full"] = "lora"
    """Train low-rank adapters, adapters with the norms of columns (DoRA), or all weights."""
    quantize: Literal["none", "nf4"] = "none"
    """Store the frozen kernels in 4 bits (QLoRA)."""
    loss: Literal["supervised", "dpo", "reward", "classification"] = "supervised"
    """Learn answers, or which of two is preferred; or with a head on the last token, rewards or the labels of texts."""
    normalize: Literal["token", "sequence"] = "token"
    """Every token in the loss counts the same, as in TRL, or every sequence whatever its length."""
    steps: int = 300
    # The settings of Dettmers et al. (2023), "QLoRA", for 7B and 13B models: batches of 16, learning rate 2e-4, beta2
    # 0.999, no weight decay; 3% of the updates of this recipe warm up. A full fine-tuning takes 2e-5, the default of
    # TRL's SFTConfig; DPO 1e-6, that of its DPOConfig.
    batch_size: int = 16
    lr: float = 2e-4
    """Peak learning rate: 2e-5 is common for --method full, 1e-6 for --loss dpo, and 5e-6 for it with adapters."""
    beta2: float = 0.999
    weight_decay: float = 0.0
    warmup_steps: int = 10
    schedule: str = "linear"  # of transformers.TrainingArguments
    # Of TRL's SFTConfig.
    seq_len: Width = 1024
    """Number of predictions of a row, in tokens; longer examples lose their end."""
    packing: bool = True
    """Place as many examples in a row as fit, without attention between them; preferences are padded."""
    # Rank, alpha and dropout of TRL's ModelConfig; adapters on all linear layers as in QLoRA.
    rank: Width = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """The product of the adapters is multiplied by alpha / rank."""
    lora_dropout: Rate = 0.05
    """Dropout rate on the inputs of the adapters; preferences are learned without."""
    targets: str | None = None
    """Regular expression of the paths of the kernels with adapters, such as ".*/[qv]_proj/kernel"; None for all linear
    layers but the head."""
    beta: Positive = 0.1  # of Rafailov et al. (2023), and TRL's DPOConfig
    """Factor of the rewards of --loss dpo: the larger, the nearer the model stays to the one before."""
    center_rewards: NotNegative = 0.0
    """Factor of (c + r)² of the rewards of --loss reward, which keeps them around 0; 0.01 is common."""
    neftune: Positive | None = None
    """Size of the noise on the embeddings of tokens (NEFTune); 5 is the paper's, None for none."""
    answers: Width | None = 2
    """Number of held-out prompts whose answers are shown at every evaluation; None for none."""
    scored_answers: Width | None = 64
    """Number of held-out prompts whose answers are scored by exact match and ROUGE-L; None for none."""
    answer_tokens: Width = 64
    """Number of tokens of the longest of these answers."""
    best_metric: Literal["loss", "exact_match", "rouge_l"] = "loss"
    """Metric of the evaluations that --keep-best and --patience go by."""
    eval_rows: Width = 128
    """Largest number of validation rows per evaluation."""

    def example_files(self, data: Path, parse: Parse = parse_example) -> tuple[ExampleFiles, ExampleFiles]:
        """Open the examples of (training, validation)."""
        if self.validation is None:
            return split_examples(data, self.validation_fraction, parse)
        return read_examples(data, parse), read_examples(self.validation, parse)

    def checked_paths(self) -> tuple[Path, Path]:
        """Return the model and the data. Raises `UserError` for settings that cannot work."""
        for name in ("model", "data", "validation", "chat_template"):
            path = getattr(self, name)
            if path is not None and not path.exists():
                remedy = "give a local folder or file"
                if name == "model" and len(path.parts) == 2 and not path.is_absolute():
                    remedy += f", or get it from the Hub: hf download {path} --local-dir {path.name}"
                raise jt.UserError(f"{name} {path} does not exist: {remedy}")
        if self.quantize != "none" and self.method == "full":
            raise jt.UserError(f"quantize {self.quantize} needs frozen weights: use --method lora, or --quantize none")
        if self.quantize != "none" and self.precision.startswith("bf16_params"):
            raise jt.UserError(f"quantize {self.quantize} needs its scales in float32: use --precision bf16")
        if self.neftune is not None and self.loss != "supervised":
            raise jt.UserError(f"neftune {self.neftune} is for --loss supervised: omit it, {self.loss} has no noise")
        if self.normalize == "sequence" and self.loss != "supervised":
            raise jt.UserError(f"normalize sequence is for --loss supervised: omit it, {self.loss} counts examples")
        check_best_metric(self.best_metric, self.scored_answers)
        if self.model is None or self.data is None:
            raise jt.UserError("fine-tuning needs a model and examples: use --model FOLDER --data FILE")
        return self.model, self.data

    def tokenizer(self, folder: Path) -> ModelTokenizer:
        """Return the tokenizer of the model, with the chat template. Raises `UserError` if the date is none."""
        try:
            now = datetime.datetime.strptime(self.date, "%Y-%m-%d")
        except ValueError:
            raise jt.UserError(f"date {self.date} is no date: write it as YYYY-MM-DD") from None
        return ModelTokenizer(folder, now, self.chat_template)
